"""Pairs and batches: match matrices against loops over the listed pairs, draws against their stated frequencies."""

import collections
import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.pairs import captions, many_to_many
from support.pictures import write_tar
from support.raising import raises

from sfumato.data.coco import TarArchive, find_image
from sfumato.data.images import FileImage, Problem, Problems
from sfumato.data.pairs import PairData, PairSampler, make_pair_data
from sfumato.data.splits import merge_equal_texts
from sfumato.errors import UserError


def test_match_equals_a_loop_over_the_pairs_and_keep_images_keeps_it():
    data = many_to_many()
    ground_truth = {(int(i), int(t)) for i, t in data.pairs}
    random = np.random.default_rng(1)
    images, texts = random.integers(0, 23, 11), random.integers(0, 17, 13)
    match = data.match(images, texts)
    assert data.pairs.tolist() == sorted(map(list, ground_truth)) and data.groups.tolist() == list(range(23))
    assert match.shape == (11, 13) and match.dtype == np.float32
    assert match.tolist() == [[float((i, t) in ground_truth) for t in texts.tolist()] for i in images.tolist()]
    assert 0 < match.mean() < 1
    dense = data.match(np.arange(23), np.arange(17))
    assert np.array_equal(dense.astype(bool), data.relevance().to_dense())
    index = np.array([20, 3, 7, 4])
    kept = data.keep_images(index)
    assert kept.image_ids == ("i20", "i3", "i7", "i4") and kept.images[0].path == "20.png"
    assert kept.groups.tolist() == [20, 3, 7, 4]
    listed = {(data.image_ids[i], data.text_ids[t]) for i, t in data.pairs if i in index}
    assert {(kept.image_ids[i], kept.text_ids[t]) for i, t in kept.pairs} == listed
    assert set(kept.text_ids) == {t for _, t in listed}
    assert [data.texts[data.text_ids.index(t)] for t in kept.text_ids] == list(kept.texts)
    assert [data.text_kinds[data.text_ids.index(t)] for t in kept.text_ids] == list(kept.text_kinds)
    good = {
        **{"image_ids": ("a", "b"), "images": (FileImage("a"), FileImage("b")), "text_ids": ("x", "y")},
        **{"texts": ("x", "y"), "text_kinds": ("caption",) * 2, "pairs": [[0, 0], [1, 1]]},
    }
    PairData(**good)
    for change, message in (
        ({"image_ids": ("a", "a")}, "image id 'a' occurs more than once"), ({"images": ()}, "2 image ids for 0 images"),
        ({"text_ids": ("x", "x")}, "text id 'x' occurs more than once"), ({"texts": ("x",)}, "2 text ids for 1 texts"),
        ({"text_kinds": ("caption",) * 3}, "3 kinds"), ({"groups": np.zeros(3)}, "3 groups for 2 images"),
        ({"pairs": [[0, 2]]}, "a pair points outside of 2 images and 2 texts"),
        ({"pairs": [[-1, 0]]}, "points outside"),
    ):  # fmt: skip
        raises(ValueError, message, PairData, **good | change)


@pytest.mark.parametrize("epoch_over", ["images", "pairs"])
def test_an_epoch_shows_everything_once_and_only_true_pairs(epoch_over):
    data = many_to_many()
    sampler = PairSampler(data, 8, seed=5, epoch_over=epoch_over)
    batches = list(sampler.batches(0))
    assert len(batches) == len(sampler)
    images = np.concatenate([b.image_index for b in batches])
    texts = np.concatenate([b.text_index for b in batches])
    listed = {tuple(p) for p in data.pairs.tolist()}
    drawn = list(zip(images.tolist(), texts.tolist(), strict=True))
    assert set(drawn) <= listed
    if epoch_over == "images":
        assert sorted(images) == list(range(23))
    else:
        assert sorted(drawn) == sorted(listed)
    for b in batches:
        loop = [[float((i, t) in listed) for t in b.text_index.tolist()] for i in b.image_index.tolist()]
        assert b.match.tolist() == loop and (np.diag(b.match) == 1).all()


def test_batches_are_of_nearly_equal_sizes_and_bad_options_are_refused():
    for n, sizes in ((16, [8, 8]), (17, [6, 6, 5]), (18, [6, 6, 6]), (9, [5, 4]), (5, [5])):
        sampler = PairSampler(captions(n, 1), 8, seed=0)
        assert [len(b.image_index) for b in sampler.batches(0)] == sizes and len(sampler) == len(sizes)
    for options, message in (
        ({"data": captions(1, 1)}, "has 1 pairs"), ({"kind_weights": {"name": 0.0}}, "fewer than two images"),
        ({"kind_weights": {"nam": 1.0}}, r"names \['nam'\], but the texts are of the kinds \['group', 'name', 'tag'\]"),
        ({"kind_weights": {"name": 1.0}, "epoch_over": "pairs"}, "kind_weights have no effect"),
    ):  # fmt: skip
        raises(ValueError, message, PairSampler, **{"data": many_to_many(), "batch_size": 4, "seed": 0} | options)


def test_draws_depend_on_seed_and_epoch_alone_and_sampled_positives_are_those_drawn_for_the_group():
    data = many_to_many()

    def drawn(sampler, epoch):
        return [(b.image_index.tolist(), b.text_index.tolist()) for b in sampler.batches(epoch)]

    one, same, other = (PairSampler(data, 8, seed) for seed in (1, 1, 2))
    assert drawn(one, 0) == drawn(same, 0) != drawn(one, 1) != drawn(other, 1)
    assert drawn(one, 1) == drawn(PairSampler(data, 8, 1), 1), "earlier draws leave no state behind"
    data = dataclasses.replace(many_to_many(), groups=np.arange(23) // 2)
    fewer = 0
    for epoch in range(5):
        for b in PairSampler(data, 12, seed=epoch, positives="sampled").batches(epoch):
            groups, texts = data.groups[b.image_index].tolist(), b.text_index.tolist()
            drawn = set(zip(groups, texts, strict=True))
            assert b.match.tolist() == [[float((g, t) in drawn) for t in texts] for g in groups]
            fewer += int((data.match(b.image_index, b.text_index) > b.match).sum())
    assert fewer > 0


def test_kinds_are_drawn_by_weight_and_uniformly_within():
    # a has a name, three tags and a group; b a name and a tag; c only the group.
    pairs = [[0, 0], [0, 2], [0, 3], [0, 4], [0, 5], [1, 1], [1, 2], [2, 5]]
    ids, kinds = tuple("nmtuvg"), ("name", "name", "tag", "tag", "tag", "group")
    data = PairData(("a", "b", "c"), (FileImage("a"),) * 3, ids, ids, kinds, pairs)
    counts: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    sampler = PairSampler(data, 4, seed=7, kind_weights={"name": 0.5, "tag": 1.5})
    epochs = 4000
    for epoch in range(epochs):
        for b in sampler.batches(epoch):
            for i, t in zip(b.image_index.tolist(), b.text_index.tolist(), strict=True):
                counts[i][data.text_ids[t]] += 1
    assert set(counts) == {0, 1}  # c has no text of a kind with a weight.
    assert set(counts[0]) == set("ntuv") and set(counts[1]) == set("mt")
    share = {(i, t): c / epochs for i, own in counts.items() for t, c in own.items()}
    # Four standard deviations of a share p over 4,000 draws are at most 0.032.
    expected = {(0, "n"): 0.25, (0, "t"): 0.25, (0, "u"): 0.25, (0, "v"): 0.25, (1, "m"): 0.25, (1, "t"): 0.75}
    assert share == pytest.approx(expected, abs=0.032)


def test_tar_members_are_read_by_position_from_many_threads(tmp_path):
    members = {f"./some/folder/{'x' * (k % 150)}{k}.bin": bytes([k % 256]) * (k * 37 % 5000) for k in range(300)}
    write_tar(tmp_path / "a.tar", members)
    archive = TarArchive(tmp_path / "a.tar")
    names = [name.removeprefix("./") for name in members]
    assert all(name in archive for name in names) and "some" not in archive
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(archive.read, names * 3)) == list(members.values()) * 3
    image = find_image(tmp_path, archive, "some/folder", "0.bin")
    assert (image.location, image.read_bytes()) == (f"{tmp_path / 'a.tar'}!some/folder/0.bin", b"")
    write_tar(tmp_path / "a.tar.gz", {"a": b"123"}, "w:gz")
    (tmp_path / "no.tar").write_bytes(b"not a tar file" * 100)
    (tmp_path / "empty.tar").write_bytes(b"")
    for name in ("a.tar.gz", "no.tar", "empty.tar"):
        raises(ValueError, f"{name}: not an uncompressed tar file", TarArchive, tmp_path / name)
    with pytest.raises(FileNotFoundError):
        TarArchive(tmp_path / "absent.tar")
    write_tar(tmp_path / "a.tar", {"a": b"1" * 3000, "b": b"2" * 3000})
    archive = TarArchive(tmp_path / "a.tar")
    os.truncate(tmp_path / "a.tar", 5000)
    assert archive.read("a") == b"1" * 3000
    raises(OSError, r"a\.tar ends within b", archive.read, "b")


def test_problems_are_listed_counted_and_fatal_beyond_their_share(tmp_path):
    problems = Problems()
    problems.write(tmp_path / "none.jsonl")
    assert (tmp_path / "none.jsonl").read_text() == "" and len(problems) == 0
    problems.check(0, 0.0)
    for k in range(12):
        problems.add(tmp_path / f"{k}.png", f"bad · {k}")
    problems.check(1188, 0.01)  # 12 of 1,200 are just 1 %.
    with pytest.raises(UserError, match="12 of 1199 items are unusable") as error:
        problems.check(1187, 0.01)
    told = str(error.value)
    assert "9.png: bad · 9" in told and "10.png" not in told and "and 2 more" in told
    problems.write(tmp_path / "p.jsonl")
    lines = (tmp_path / "p.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 12 and lines[3] == f'{{"place": "{tmp_path}/3.png", "reason": "bad · 3"}}'
    problems.add("caf\udce9\n.png", "looks \x1b[31mred")
    problems.write(tmp_path / "p.jsonl")
    assert problems.items[-1] == Problem("caf\\udce9\\n.png", "looks \\x1b[31mred")


def test_equally_worded_texts_become_one_that_matches_all_their_images():
    texts = [["A red Dog", "one"], ["two", " a  red dog", "two"], ["a red dog.", "ONE"]]
    data = make_pair_data("abc", [FileImage(x) for x in "abc"], texts)
    merged = merge_equal_texts(data)
    assert merged.texts == ("A red Dog", "one", "two", "a red dog.")
    assert merged.text_ids == ("a#0", "a#1", "b#0", "c#0") and len(merged.text_kinds) == 4
    found = {image: {merged.texts[t] for i, t in merged.pairs if i == k} for k, image in enumerate(merged.image_ids)}
    assert found == {"a": {"A red Dog", "one"}, "b": {"two", "A red Dog"}, "c": {"a red dog.", "one"}}
    assert merge_equal_texts(merged) is merged
    assert merged.image_ids == data.image_ids and merged.groups.tolist() == data.groups.tolist()
