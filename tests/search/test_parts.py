"""A folder of parts: what is written is read, equal content gives equal bytes, and whatever is missing is named."""

import dataclasses
import json
import math

import pytest
import torch
from support.raising import raises

from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding, load_embeddings
from sfumato.search.parts import (
    PartMetadata,
    PartName,
    PartsManifest,
    begin,
    check_complete,
    read_manifest,
    read_metadata,
    read_parts,
    write_job,
    write_part,
)

EMBEDDED = PartsManifest("images", "m" * 64, "folder", 20, "d" * 64, 2, 10, "runs/mine", "pictures", "csd")


def make_part(folder, name, *, n=2, parts=1, problems=()):
    """Random numbers that depend on the part alone."""
    generator = torch.Generator().manual_seed(100 * name.section + name.number)
    embeddings = GaussianEmbedding(torch.randn(n, 3, generator=generator), torch.randn(n, 3, generator=generator))
    ids = [f"{name.section}/{name.number}/{k} é" for k in range(n)]
    about = PartMetadata(EMBEDDED.identity, n, parts, list(problems))
    write_part(folder, name, about, embeddings, ids, [{"path": f"p/{i}"} for i in ids])
    return embeddings, ids


def test_what_is_written_is_read_in_the_order_of_sections(tmp_path):
    begin(tmp_path, EMBEDDED)
    written = {}
    for section in reversed(range(10)):
        for number in reversed(range(3 if section == 4 else 1)):
            name = PartName(section, number)
            written[name.section, name.number] = make_part(tmp_path, name, parts=3 if section == 4 else 1)
    assert PartName(3).file == "part-000003.safetensors" and PartName(4, 2).file == "part-000004-0002.safetensors"
    found = list(read_parts(tmp_path))
    assert len(found) == 12
    for (ids, embeddings, payloads), (_, (expected, expected_ids)) in zip(found, sorted(written.items()), strict=True):
        assert ids == expected_ids and payloads == [{"path": f"p/{i}"} for i in ids]
        assert embeddings.mean.equal(expected.mean) and embeddings.log_var.equal(expected.log_var)
    also, ids = load_embeddings(tmp_path / "part-000004-0001.safetensors")
    assert ids == found[5][0] and also.mean.equal(found[5][1].mean)


def test_the_same_content_gives_the_same_bytes_and_the_problems_are_kept(tmp_path):
    problems = [{"place": "p/x.png", "reason": "no picture"}]
    for folder in (tmp_path / "a", tmp_path / "b"):
        begin(folder, EMBEDDED)
        make_part(folder, PartName(7), problems=problems)
    assert (tmp_path / "a" / PartName(7).file).read_bytes() == (tmp_path / "b" / PartName(7).file).read_bytes()
    about = read_metadata(tmp_path / "a", PartName(7))
    assert about == PartMetadata(EMBEDDED.identity, 2, 1, problems)
    assert read_metadata(tmp_path / "a", PartName(8)) is None


def test_points_and_half_precision(tmp_path):
    begin(tmp_path, EMBEDDED)
    points = GaussianEmbedding.point(torch.randn(2, 3).half())
    write_part(tmp_path, PartName(0), PartMetadata("", 2, 1, []), points, ["a", "b"], [{}, {}])
    found, _ = load_embeddings(tmp_path / PartName(0).file)
    assert found.dtype == torch.float32 and found.mean.equal(points.mean.float())
    assert (found.log_var == -math.inf).all()


def test_bad_parts_are_refused(tmp_path):
    begin(tmp_path, EMBEDDED)
    good, about = GaussianEmbedding(torch.zeros(2, 3), torch.zeros(2, 3)), PartMetadata("", 2, 1, [])
    for embeddings, ids, payloads in (
        (good, ["a"], [{}, {}]),
        (good, ["a", "a"], [{}, {}]),
        (good, ["a", "b"], [{}]),
        (good[:1], ["a", "b"], [{}, {}]),
    ):
        with pytest.raises(ValueError, match="give one distinct id and one payload for each"):
            write_part(tmp_path, PartName(0), about, embeddings, ids, payloads)
    with pytest.raises(ValueError, match=r"part-000000.safetensors: embedding 1 holds NaN"):
        wrong = GaussianEmbedding(torch.tensor([[0.0], [math.nan]]), torch.zeros(2, 1))
        write_part(tmp_path, PartName(0), about, wrong, ["a", "b"], [{}, {}])
    assert not list(tmp_path.glob("part-*"))


def test_what_is_missing_is_named_with_its_job(tmp_path):
    begin(tmp_path, EMBEDDED)
    with pytest.raises(UserError) as error:
        read_parts(tmp_path)  # At once: nothing has been asked of the iterator.
    first = ", ".join(f"part-00000{i}" for i in range(5))
    assert f"10 of 10 parts or more are missing: {first} and 5" in str(error.value)
    for section in (0, 1, 2, 4, 6, 7, 9):
        make_part(tmp_path, PartName(section), parts=2 if section == 6 else 1)
    write_job(tmp_path, 0, 4, {"finished": True})
    with pytest.raises(UserError) as error:
        check_complete(tmp_path)
    named = "part-000003 of job 3/4, part-000005 of job 1/4, part-000006-0001 of job"
    assert f"4 of 11 parts or more are missing: {named}" in str(error.value)
    assert "with --shard I/4 for I = 0, 1, 2, 3, or once without --shard" in str(error.value)
    for section in (3, 5, 8):
        make_part(tmp_path, PartName(section))
    told = r"1 of 11 parts or more are missing: part-000006-0001 of job 2/4; .*--shard 2/4"
    raises(UserError, told, check_complete, tmp_path)
    make_part(tmp_path, PartName(6, 1), parts=2)
    assert len(check_complete(tmp_path)) == 11


def test_other_folders_are_told(tmp_path):
    raises(UserError, r"no folder of embeddings \(no manifest.json in it\); write one with", read_parts, tmp_path)
    for content in ("{", "[]", '{"format": "sfumato-index-1", "n": 3}', '{"format": "sfumato-parts-1"}'):
        (tmp_path / "manifest.json").write_text(content)
        for run in (lambda: read_parts(tmp_path), lambda: begin(tmp_path, EMBEDDED)):
            raises(UserError, r"manifest.json: damaged, or not a part of a folder of embeddings", run)
    (tmp_path / "manifest.json").unlink()
    begin(tmp_path, EMBEDDED)
    assert read_manifest(tmp_path) == EMBEDDED
    # Where the model lies may change; which model, which data and which parts may not.
    pinned = {"modality", "model", "kind", "n", "digest", "part_size", "sections"}
    values = json.loads((tmp_path / "manifest.json").read_text())
    assert values["home"] == EMBEDDED.model_source
    for key, value in dataclasses.asdict(EMBEDDED).items():
        other = dataclasses.replace(EMBEDDED, **{key: value * 2})
        assert (other.identity != EMBEDDED.identity) == (key in pinned)
        if key in pinned - {"sections"}:
            raises(UserError, "give another --out, or remove that folder", begin, tmp_path, other)
        elif key not in pinned:
            begin(tmp_path, other)
