"""What an earlier version has written is opened and answers as it did; what a later one has written is refused.

The archive beside this file has folders, rows of PostgreSQL, a file of Milvus Lite, and the answers of commit f5d496a8;
this file at commit 03c1c196 has the program that wrote it.
"""

import contextlib
import json
import sqlite3
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.raising import raises
from support.rare_words import quick_vectors

from sfumato import GaussianCollection, GaussianEmbedding, load_embeddings
from sfumato.errors import UserError
from sfumato.search.index import copy_gallery
from sfumato.search.stores.protocol import Records, open_store

OLD = Path(__file__).with_name("formats_f5d496a8.tar.xz")
N, D = 12, 5

pytestmark = pytest.mark.usefixtures("quick_texts")


def gaussians(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return GaussianEmbedding(torch.randn(n, D, generator=generator), torch.randn(n, D, generator=generator) - 2)


IDS = [f"größe {i}.jpg" for i in range(N)]
PAYLOADS = [{"colour": "rgb"[i % 3]} | ({"captions": f"a dog number {i}"} if i % 4 else {}) for i in range(N)]


def answers(gallery):
    return [
        [[h.id, h.distance, h.match_probability, h.payload] for h in r.hits] for r in gallery.search(gaussians(3, 1), 4)
    ]


def on_server(server, program, *words):
    address = ["-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres"]
    return subprocess.run([server.programs / program, *address, *words], check=True, timeout=60, stdout=-1).stdout


@pytest.fixture
def old(tmp_path):
    with tarfile.open(OLD) as tar:
        tar.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


def assert_answers(gallery, old, name):
    for found, expected in zip(answers(gallery), json.loads((old / "answers.json").read_text())[name], strict=True):
        assert [(hit[0], hit[3]) for hit in found] == [(hit[0], hit[3]) for hit in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine[1:3] == pytest.approx(theirs[1:3], rel=1e-5)


def assert_whole(collection, old, name):
    """It answers as it did, can be written to, and can be copied with its texts."""
    assert_answers(collection, old, name)
    found = collection.get(IDS)
    assert list(found.ids) == IDS and [dict(payload) for payload in found.payloads] == PAYLOADS
    np.testing.assert_allclose(found.embeddings.mean, gaussians(N, 0).mean, rtol=1e-5, atol=1e-5)
    collection.upsert(gaussians(1, 7), ["new"], payloads=[{"captions": "a new one"}])
    with copy_gallery(collection, old / f"copy of {name}") as copied:
        assert len(copied) == N + 1 and set(copied.ids_after("", 99)) == {*IDS, "new"}
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
    assert ids == IDS and np.array_equal(embeddings.mean, gaussians(N, 0).mean)
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
    on_server(server, "psql", "-q", "-d", "earlier", "-v", "ON_ERROR_STOP=1", "-f", old / "rows.sql")
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
