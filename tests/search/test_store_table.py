"""The table of what each store can do, in the guide, against the stores, their options and the pinned versions."""

import re
from pathlib import Path

import pytest
from support.raising import raises

from sfumato.errors import UserError
from sfumato.search.stores import protocol as stores
from sfumato.search.stores.local import LocalStore
from sfumato.search.stores.milvus import MilvusStore
from sfumato.search.stores.pgvector import PgVectorStore
from sfumato.search.stores.protocol import STORES, WordStore, create_store

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {
    "file": LocalStore,
    "postgresql": PgVectorStore,
    "milvus": MilvusStore,
    "milvus+http": MilvusStore,
}
URLS = {
    "file": "file:none",
    "postgresql": "postgresql://h/d",
    "milvus": "milvus:none.db",
    "milvus+http": "milvus+http://h/n",
}
SAME = {"postgres": "postgresql", "milvus+https": "milvus+http"}


def table():
    """The cells of each row by the scheme in its first cell."""
    guide = (ROOT / "docs" / "guides" / "search.md").read_text(encoding="utf-8")
    section = guide.partition("### What each store can do\n")[2].partition("\n#")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {
        re.match(r"`([a-z+]+):", first)[1]: dict(zip(lines[0][1:], rest, strict=True)) for first, *rest in lines[2:]
    }


def test_every_store_has_a_row():
    assert set(table()) == set(CLASSES) == set(STORES) - set(SAME)
    assert all(STORES[name].factory == STORES[other].factory for name, other in SAME.items())


def test_the_stores_that_search_by_words():
    for scheme, row in table().items():
        texts = CLASSES[stores.scheme(stores.beside(URLS[scheme]))]
        assert row["search by words"] == ("yes" if issubclass(texts, WordStore) else "no"), scheme


INDEXES = {"file": "engine=hnsw", "postgresql": "index=hnsw"}


@pytest.mark.parametrize("scheme", CLASSES)
@pytest.mark.parametrize("compress", ["int8", "half", "binary"])
def test_the_stores_take_the_compressions_of_their_row_and_refuse_others(scheme, compress, tmp_path, needs_faiss):
    index = INDEXES.get(scheme, "index=IVF_FLAT")
    url = re.sub("//h/", "//127.0.0.1:1/", URLS[scheme]).replace("none", f"{tmp_path}/none")
    url = f"{url}{'&' if '?' in url else '?'}{index}&compress={compress}"
    known = re.findall("`([a-z0-9]+)`", table()[scheme]["compressed vectors"].partition(";")[0])
    if compress not in known:
        said = f"compress must be .*{known[0]}.*, got '{compress}'"
        return raises(UserError, said, create_store, url, 3, "f")
    if scheme in ("file", "milvus"):
        return create_store(url, 3, "f").close()
    raises(UserError, "refused|unavailable", create_store, url, 3, "f")  # There is no server.


def test_the_versions_are_those_that_the_tests_have():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for scheme, row in table().items():
        named = re.findall(r"([a-z-]+) (\d+\.\d+\.\d+)", row["tested with"])
        assert named and all(pinned[name] == version for name, version in named), scheme
