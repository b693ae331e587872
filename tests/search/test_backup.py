"""Copies while another process writes, backups that are restored, and what earlier and later versions have written."""

import contextlib
import itertools
import json
import os
import random
import re
import shlex
import sqlite3
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.raising import raises
from support.stores_contract import quick_vectors

from sfumato import (
    Calibration,
    GaussianCollection,
    GaussianEmbedding,
    QueryScores,
    csd_matrix,
    load_embeddings,
    load_index,
)
from sfumato.errors import UserError
from sfumato.search.collection import UPLOADED_IMAGES
from sfumato.search.index import copy_gallery
from sfumato.search.stores.protocol import Records, open_store
from sfumato.search.texts import item_texts, text_vectors

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "operate.md"
N, D, pytestmark = 90, 5, pytest.mark.usefixtures("quick_texts")


def version_of(i, step):
    mean = np.array([i, step, 1, -2, i * 0.5], np.float32)
    captions = f"number {i} {'before' if step % 2 else 'after'} {'after' if step % 2 else 'before'}"
    captions += f"\nseen {step} times" if i % 3 else ""
    return mean, {"step": str(step)} | ({} if i % 7 == step % 7 else {"captions": captions})


def write(collection, ids, step):
    means, payloads = zip(*(version_of(i, step) for i in ids), strict=True)
    embeddings = GaussianEmbedding(np.stack(means), np.full((len(ids), D), -3, np.float32))
    collection.upsert(embeddings, [f"i{i}" for i in ids], payloads=payloads)


def assert_texts_match(collection, payloads):
    kept = {id: payload for id, payload in payloads.items() if item_texts(payload)}
    vectors = dict(zip(kept, text_vectors(list(kept.values())), strict=True))
    assert sorted([id for part in collection.texts.store.scan() for id in part.ids]) == sorted(kept)
    records = collection.texts.store.get(list(kept))
    for id, vector in zip(records.ids, records.vectors, strict=True):
        np.testing.assert_allclose(vector, vectors[id], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["file", pytest.param("postgresql", marks=pytest.mark.engine)])
def test_a_copy_while_others_write_is_one_state_and_restores(tmp_path, kind, request):
    url = request.getfixturevalue("server").url if kind == "postgresql" else lambda: "store"
    gallery = GaussianEmbedding(np.stack([version_of(i, 0)[0] for i in range(N)]), np.full((N, D), -3, np.float32))
    distance = csd_matrix(gallery[:40], gallery)
    match = np.eye(N, dtype=int)[distance.argmin(1)]
    calibration = Calibration.fit(distance, match, t2i=QueryScores.fit(distance, match))
    told = {"d": D, "centre": gallery.mean.mean(0), "calibration": calibration, "texts": True}
    queries, chance, steps = gallery[:6], random.Random(5), itertools.count(1)
    with GaussianCollection.create(tmp_path / "live", url(), **told) as writer:
        write(writer, range(N), 0)
        before = writer.search(queries, 9)

        def meanwhile(copied):
            write(writer, chance.sample(range(N), 20), next(steps))
            writer.delete([f"i{i}" for i in chance.sample(range(N), 5)])

        with GaussianCollection.open(tmp_path / "live") as live:
            copy_gallery(live, tmp_path / "backup", batch=13, progress=meanwhile).close()
        assert len(writer) < N and next(steps) > 5
    with (
        GaussianCollection.open(tmp_path / "backup") as kept,
        copy_gallery(kept, tmp_path / "again", url()) as restored,
    ):
        for collection in (kept, restored):
            assert [answer.hits for answer in collection.search(queries, 9)] == [answer.hits for answer in before]
            assert_texts_match(collection, {f"i{i}": version_of(i, 0)[1] for i in range(N)})
            assert len(collection) == N


def test_texts_that_a_writer_has_left_half_changed_are_those_of_the_payload_in_a_copy(tmp_path):
    with GaussianCollection.create(tmp_path / "live", d=D, texts=True) as collection:
        write(collection, range(20), 0)
        ids, step = [f"i{i}" for i in range(0, 20, 2)], 3
        collection.texts.upsert(ids, [version_of(int(i[1:]), step)[1] for i in ids])
        collection.texts.upsert(["stranger"], [{"captions": "an item that never came"}])
        (tmp_path / "live" / UPLOADED_IMAGES / "ab").mkdir(parents=True)
        (tmp_path / "live" / UPLOADED_IMAGES / "ab" / "abcd").write_bytes(b"image")
        (tmp_path / "live" / UPLOADED_IMAGES / "ab" / ".ef.0123456789abcdef.tmp").write_bytes(b"half")
        with copy_gallery(collection, tmp_path / "copy") as copied:
            assert_texts_match(copied, {f"i{i}": version_of(i, 0)[1] for i in range(20)})
            files = [path.name for path in (copied.folder / UPLOADED_IMAGES).rglob("*") if path.is_file()]
            assert files == ["abcd"] and len(copied) == 20


@pytest.mark.slow
def test_the_commands_of_the_guide_as_printed(tmp_path, server, sfumato, monkeypatch):
    server.execute("CREATE DATABASE sfumato", "CREATE ROLE sfumato LOGIN SUPERUSER")
    monkeypatch.chdir(tmp_path)
    for name, value in {"PGHOST": "127.0.0.1", "PGPORT": server.port, "PGUSER": "sfumato"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", str(server.programs), prepend=os.pathsep)

    def run(lines):
        for line in lines:
            words = shlex.split(line.replace("@store/sfumato", f"@127.0.0.1:{server.port}/sfumato"))
            if words[0] == "sfumato":
                sfumato.printed(*words[1:])
            else:
                subprocess.run(["bash", "-e", "-c", line], check=True, timeout=60)

    Path("photos").mkdir()
    for colour in ("tan", "khaki", "red", "black"):
        Image.new("RGB", (64, 64), colour).save(f"photos/{colour}.png")
    Path("backup").mkdir()
    run(["sfumato index --data photos --out index/collection --store postgresql://sfumato@store/sfumato?table=images"])
    section = GUIDE.read_text(encoding="utf-8").partition("## Back up and restore\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?:^    .+\n)+", section, re.MULTILINE)
    backup, restore, dump, put_back = ([line.strip() for line in block.splitlines()] for block in blocks)

    def answers(folder):
        with load_index(folder) as index:
            assert len(index) == 4
            return [[(h.id, h.distance) for h in one.hits] for one in index.search_items(["red.png", "tan.png"], 4)]

    expected = answers("index/collection")
    run(backup)
    run(restore)
    assert answers("backup/monday") == answers("index/restored") == expected
    run(dump)
    with GaussianCollection.open("index/collection") as collection:
        collection.delete(["tan.png"])
    run(["rm -r index/collection/data-*", *put_back])
    assert answers("index/collection") == expected


FORMATS_N, FORMATS_D = 12, 5


def gaussians(n, seed):
    generator = torch.Generator().manual_seed(seed)
    mean, log_var = (torch.randn(n, FORMATS_D, generator=generator) for _ in range(2))
    return GaussianEmbedding(mean, log_var - 2)


IDS = [f"größe {i}.jpg" for i in range(FORMATS_N)]
PAYLOADS = [{"colour": "rgb"[i % 3]} | ({"captions": f"a dog number {i}"} if i % 4 else {}) for i in range(FORMATS_N)]


def answers(gallery):
    found = gallery.search(gaussians(3, 1), 4)
    return [[[h.id, h.distance, h.match_probability, h.payload] for h in r.hits] for r in found]


@pytest.fixture
def old(tmp_path):
    """Folders, rows of PostgreSQL, a file of Milvus Lite and answers of f5d496a8; by test_formats.py at 03c1c196."""
    with tarfile.open(Path(__file__).with_name("formats_f5d496a8.tar.xz")) as tar:
        tar.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


def assert_answers(gallery, old, name):
    for found, expected in zip(answers(gallery), json.loads((old / "answers.json").read_text())[name], strict=True):
        assert [(hit[0], hit[3]) for hit in found] == [(hit[0], hit[3]) for hit in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine[1:3] == pytest.approx(theirs[1:3], rel=1e-5)


def assert_whole(collection, old, name):
    assert_answers(collection, old, name)
    found = collection.get(IDS)
    assert list(found.ids) == IDS and [dict(payload) for payload in found.payloads] == PAYLOADS
    np.testing.assert_allclose(found.embeddings.mean, gaussians(FORMATS_N, 0).mean, rtol=1e-5, atol=1e-5)
    collection.upsert(gaussians(1, 7), ["new"], payloads=[{"captions": "a new one"}])
    with copy_gallery(collection, old / f"copy of {name}") as copied:
        assert len(copied) == FORMATS_N + 1 and set(copied.ids_after("", 99)) == {*IDS, "new"}
        if collection.texts is not None:
            (records,) = copied.texts.store.scan()
            assert len(records) == 1 + sum("captions" in p for p in PAYLOADS)
            by_id = dict(zip(records.ids, records.vectors, strict=True))
            np.testing.assert_allclose(by_id[IDS[1]], quick_vectors(["a dog number 1"])[0], rtol=0, atol=1e-6)
    collection.delete(["new"])
    assert_answers(collection, old, name)


def test_a_file_of_milvus_lite_of_an_earlier_version(old):
    pytest.importorskip("pymilvus", reason="needs the extra milvus")
    pytest.importorskip("milvus_lite", reason="needs the extra milvus")
    with GaussianCollection.open(old / "milvus") as collection:
        assert_whole(collection, old, "milvus")


def refused(open_it, found, known):
    raises(UserError, rf"has format \S*\b{found}, written by a later version.*up to \S*\b{known}\. Up", open_it)


def test_folders_of_an_earlier_version_open_and_of_a_later_one_are_refused(old, sfumato):
    with GaussianCollection.open(old / "collection") as collection:
        assert_whole(collection, old, "collection")
    with pytest.raises(UserError, match="index again: sfumato index RUN --images FOLDER --out NEW"):
        GaussianCollection.open(old / "index")
    embeddings, ids = load_embeddings(old / "one.safetensors")
    assert ids == IDS and np.array_equal(embeddings.mean, gaussians(FORMATS_N, 0).mean)
    file, kind = old / "collection" / "manifest.json", "sfumato-collection"
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace(f"{kind}-1", f"{kind}-13"), encoding="utf-8")
    told = sfumato.refused("copy", old / "collection", old / "copied")
    assert f"has format {kind}-13" in told and f"up to {kind}-1. Update sfumato" in told
    file.write_text(before, encoding="utf-8")
    with contextlib.closing(sqlite3.connect(old / "collection" / "store" / "records.sqlite")) as connection:
        connection.execute("PRAGMA user_version=3")
    refused(lambda: GaussianCollection.open(old / "collection"), 3, 2)
    data = (old / "one.safetensors").read_bytes()
    (old / "one.safetensors").write_bytes(data.replace(b"sfumato-embeddings-1", b"sfumato-embeddings-2"))
    refused(lambda: load_embeddings(old / "one.safetensors"), "sfumato-embeddings-2", "sfumato-embeddings-1")


@pytest.mark.engine
def test_rows_of_an_earlier_version_open_and_of_a_later_one_are_refused(old, server, tmp_path):
    server.execute("CREATE DATABASE earlier")
    command = [server.programs / "psql", "-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres", "-q"]
    subprocess.run([*command, "-d", "earlier", "-v", "ON_ERROR_STOP=1", "-f", old / "rows.sql"], check=True, timeout=60)
    with GaussianCollection.open(old / "postgresql", server.url(database="earlier", table="images")) as collection:
        assert_whole(collection, old, "postgresql")
    from sfumato.search.stores import milvus, pgvector
    from sfumato.search.stores.protocol import create_store

    for module, url in ((pgvector, server.url()), (milvus, f"milvus:{tmp_path / 'later.db'}")):
        if module is milvus:
            pytest.importorskip("milvus_lite", reason="needs the extra milvus")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "FORMAT", 7)
            store = create_store(url, 3, "f")
            store.upsert(Records(("a",), torch.ones(1, 3), torch.ones(1), ({},)))
            store.close()
        refused(lambda url=url: open_store(url), 7, 1)
