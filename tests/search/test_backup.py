"""Copies of a collection while another process writes to it, and backups that are restored, compared by content."""

import itertools
import os
import random
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato import Calibration, GaussianEmbedding, QueryScores, csd_matrix, load_index
from sfumato.search.collection import UPLOADED_IMAGES, GaussianCollection
from sfumato.search.index import copy_gallery
from sfumato.search.texts import item_texts, text_vectors

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "operate.md"
N, D = 90, 5

pytestmark = pytest.mark.usefixtures("quick_texts")


def version_of(i, step):
    """The embedding and payload that an item has from a step on; the texts of some have the same words as before."""
    mean = np.array([i, step, 1, -2, i * 0.5], np.float32)
    captions = f"number {i} {'before' if step % 2 else 'after'} {'after' if step % 2 else 'before'}"
    captions += f"\nseen {step} times" if i % 3 else ""
    payload = {"step": str(step)} | ({} if i % 7 == step % 7 else {"captions": captions})
    return mean, payload


def write(collection, ids, step):
    means, payloads = zip(*(version_of(i, step) for i in ids), strict=True)
    embeddings = GaussianEmbedding(np.stack(means), np.full((len(ids), D), -3, np.float32))
    collection.upsert(embeddings, [f"i{i}" for i in ids], payloads=payloads)


def assert_texts_match(collection, payloads):
    kept = {id: payload for id, payload in payloads.items() if item_texts(payload)}
    vectors = dict(zip(kept, text_vectors(list(kept.values())), strict=True))
    there = [id for part in collection.texts.store.scan() for id in part.ids]
    assert sorted(there) == sorted(kept)
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


def commands_of_the_guide():
    section = GUIDE.read_text(encoding="utf-8").partition("## Back up and restore\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?:^    .+\n)+", section, re.MULTILINE)
    return [[line.strip() for line in block.splitlines()] for block in blocks]


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
    backup, restore, dump, put_back = commands_of_the_guide()

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
