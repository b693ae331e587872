"""URLs, filters and kinds of stores, one from outside the package, and the table in the guide of what each can do."""

import re
from pathlib import Path

import numpy as np
import pytest
from additions import store
from search.test_collection import assert_same, both, calibration_of, gaussians
from support.raising import raises
from support.stores_contract import FINGERPRINT, StoreBasics

from sfumato import Filter, GaussianCollection, GaussianIndex
from sfumato.errors import UserError
from sfumato.search.stores import protocol as stores
from sfumato.search.stores.local import LocalStore
from sfumato.search.stores.milvus import MilvusStore
from sfumato.search.stores.pgvector import PgVectorStore

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {"file": LocalStore, "postgresql": PgVectorStore, "milvus": MilvusStore, "milvus+http": MilvusStore}
URLS = dict(zip(CLASSES, ("file:none", "postgresql://h/d", "milvus:none.db", "milvus+http://h/n"), strict=True))
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
    assert set(table()) == set(CLASSES) == set(stores.STORES) - set(SAME)
    assert all(stores.STORES[name].factory == stores.STORES[other].factory for name, other in SAME.items())
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for scheme, row in table().items():
        texts = CLASSES[stores.scheme(stores.beside(URLS[scheme]))]
        assert row["search by words"] == ("yes" if issubclass(texts, stores.WordStore) else "no"), scheme
        named = re.findall(r"([a-z-]+) (\d+\.\d+\.\d+)", row["tested with"])
        assert named and all(pinned[name] == version for name, version in named), scheme


OF_HNSW = "memory, exact_below, compress, m, ef_construction, ef_search, overfetch"


@pytest.mark.parametrize(
    "url, said",
    [
        ("file:?engine=flat", "names no folder"),
        ("store?engine=ivf", "engine must be flat or hnsw, got 'ivf'"),
        ("store?engine=hnsw&n_probe=3", f"engine hnsw has no option 'n_probe'; it has {OF_HNSW}"),
        ("store?engine=hnsw&compress=half", "compress must be none or int8, got 'half'"),
        ("store?engine=hnsw&m=1", "m must be a whole number from 2, got '1'"),
        ("store?m=9", "engine flat has no option 'm'; it has memory, exact_below"),
        ("store?memory=-5", "memory must be a whole number from 0, got '-5'"),
        ("store?colour=red", "unknown option 'colour'; known: engine"),
        ("milvus:runs/store", r"an embedded Milvus is milvus:PATH.db"),
        ("milvus+http://h:19530", "a collection has letters, digits and _ in its name, got ''"),
        ("milvus:a.db?index=SCANN", "index must be FLAT, HNSW, IVF_FLAT or AUTOINDEX, got 'SCANN'"),
        ("milvus+http://h:1/n?consistency=bounded", "consistency must be strong or session, got 'bounded'"),
        ("milvus:a.db?index=HNSW&compress=int8", "compress=int8 goes with index=IVF_FLAT, got index=HNSW"),
        ("postgresql://h/x?index=flat", "index must be none, hnsw or ivfflat, got 'flat'"),
        ("postgresql://h/x?index=hnsw&compress=int8", "compress must be none, half or binary, got 'int8'"),
        ("postgresql://h/x?compress=half", "compress=half is of an index; add index=hnsw or index=ivfflat"),
        ("postgresql://h/x?statement_timeout=-1", "statement_timeout must be a whole number from 0, got '-1'"),
        ("postgresql://h/x?table=a%25s", "table must be a name or schema.name, without %"),
        ("mongodb://h/x", "unknown kind 'mongodb'; known: file, milvus"),
    ],
)
def test_urls_are_checked_before_anything_is_made_or_connected(url, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raises(UserError, said, stores.create_store, url, 3, "f")
    assert list(tmp_path.iterdir()) == []


def test_paths_passwords_and_second_stores_of_urls():
    home = Path("/of/shop")
    assert stores.anchored("store?engine=hnsw", home) == "/of/shop/store?engine=hnsw"
    assert stores.anchored("file:store", home) == "file:/of/shop/store"
    assert stores.anchored("file:/abs/store?x=1", home) == "file:/abs/store?x=1"
    assert stores.anchored("milvus:m.db", home) == "milvus:/of/shop/m.db"
    for remote in ("milvus+http://h:1/n", "postgresql://u@h/d?table=t"):
        assert stores.anchored(remote, home) == remote
    url = "postgresql://me:s3cr3t@h:1/d?table=t"
    assert stores.without_password(url) == "postgresql://me@h:1/d?table=t"
    assert stores.redacted(url) == "postgresql://me:***@h:1/d?table=t"
    assert stores.without_password("postgresql://:s3cr3t@h/0") == "postgresql://@h/0"
    for plain in ("postgresql://me@h/d?table=t", "file:a@b", "store?engine=flat"):
        assert stores.without_password(plain) == stores.redacted(plain) == plain
    assert {url: stores.beside(url) for url in ("store", "file:a/b?engine=hnsw", "milvus:x.db?index=HNSW")} == {
        "store": "store_texts",
        "file:a/b?engine=hnsw": "file:a/b_texts?engine=hnsw",
        "milvus:x.db?index=HNSW": "milvus:x.db?index=HNSW&name=sfumato_texts",
    }
    assert stores.beside("milvus+http://h:1/c") == "milvus+http://h:1/c_texts"
    assert stores.beside("postgresql://u@h/d?table=s.t") == "postgresql://u@h/d?table=s.t_texts"


DAYS = ("2023-12-31T23:59:59", "2024-05-31T23:59:59", "2024-06-01T00:00:00", "2024-06-13T12:01:09", "2025", "")


@pytest.mark.parametrize(
    "words, expected",
    [
        (["date=2024-06"], [2, 3]), (["date>=2024-06"], [2, 3, 4]), (["date<=2024-06"], [0, 1, 2, 3]),
        (["date>2024"], [4]), (["date < 2024-06"], [0, 1]), (["date>=2024-06-13 12:01", "date<=2024"], [3]),
        (["date>=2023", "date>=2024-06", "date<2025", "date<=2025"], [2, 3]), (["date:2025"], [4]),
        (["folder=a", "folder=b", "date>=2024"], [1, 2]), (["folder>=b"], [2, 3]), (["folder:"], [5]),
        (["odd:a=b"], [3]), (["beach"], "'beach', expected FIELD=VALUE"), (["=beach"], "expected FIELD=VALUE"),
        (["date>=june"], "'date>=june', expected a date such as 2024, 2024-06 or 2024-06-13"),
        (["date=2023", "date=2024"], "'date=2024' beside another date; give one span"),
    ],
)  # fmt: skip
def test_a_filter_in_words(words, expected):
    if isinstance(expected, str):
        return raises(ValueError, expected, stores.parse_where, words)
    folders = ("a", "a", "b", "b/c", None, "")
    items = [{"date": day} | ({} if f is None else {"folder": f}) for day, f in zip(DAYS, folders, strict=True)]
    items[3]["odd"] = "a=b"
    wanted = stores.parse_where(words)
    assert [i for i, item in enumerate(items) if wanted.accepts(item, 1.0)] == expected


def test_records_name_what_is_wrong_and_filters_take_letters_in_two_parts():
    raises(ValueError, "1 ids, 2 vectors", stores.Records, ("a",), np.zeros((2, 3), np.float32), np.zeros(2), ({}, {}))
    with pytest.raises(ValueError, match="'b' is not finite"):
        stores.Records(("a", "b"), np.array([[0], [np.inf]], np.float32), np.zeros(2), ({}, {}))
    for payload in ({"x": "a\0b"}, {"x": 3}, {"x": "\ud800"}, {"\0": "x"}):
        with pytest.raises(ValueError, match="payload of 'a' must be Unicode texts"):
            stores.Records(("a",), np.zeros((1, 3), np.float32), np.zeros(1), (payload,))
    for most in (-1.0, float("nan")):
        raises(ValueError, "max_uncertainty must be at least 0", Filter, max_uncertainty=most)
    raises(ValueError, r"\(n, e\) float32", stores.Records, ("a",), np.zeros((1, 3)), np.zeros(1), ({},))
    item = stores.composed({"folder": "A\u0308rger", "_file": "A\u0308rger"})
    assert item == {"folder": "\u00c4rger", "_file": "A\u0308rger"}
    assert all(stores.parse_where([f"folder={form}"]).accepts(item, 1.0) for form in ("A\u0308rger", "\u00c4rger"))


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr("sfumato.search.stores.protocol.STORES", dict(stores.STORES))
    stores.register_store("toy", store)


@pytest.mark.usefixtures("toy")
class TestToyStore(StoreBasics):
    def create(self, tmp_path, dim):
        return stores.create_store(f"toy:{tmp_path}", dim, FINGERPRINT)


def test_a_toy_store_answers_as_an_index_does_and_unknown_schemes_are_refused(tmp_path, toy):
    index, made = both(tmp_path, 60, store="toy:shop", calibration=calibration_of(gaussians(60, 0)))
    made.close()
    queries, kept = gaussians(7, 1), index.get(["item 3"])
    with GaussianCollection.open(tmp_path / "collection") as again:
        assert again.delete(["item 3"]) == 1
        again.upsert(kept.embeddings, ["item 3"], payloads=kept.payloads)
        assert_same(again.search(queries, 9), index.search(queries, 9))
        assert again.expected_matches(queries) == pytest.approx(index.expected_matches(queries), rel=1e-4)
        assert again.delete(["item 8", "nobody"]) == 1 and len(again) == 59
        left = [f"item {i}" for i in range(60) if i != 8]
        less = GaussianIndex.build(index.get(left).embeddings, left, calibration=index.calibration)
        found, expected = again.search(queries, 12), less.search(queries, 12)
        assert [[h.id for h in a] for a in found] == [[h.id for h in b] for b in expected]
        for a, b in zip(found, expected, strict=True):
            assert [h.match_probability for h in a] == pytest.approx([h.match_probability for h in b], rel=1e-4)
    raises(
        UserError,
        re.escape(f"known: {', '.join(stores.STORES)}, or a path"),
        stores.open_store,
        "nowhere:x",
    )
    raises(UserError, "there is none", stores.open_store, "toy:nothing")
    raises(ValueError, "'toy' is already registered", stores.register_store, "toy", store)
    for wrong in ("x", "Toy", "to:y", ""):
        raises(ValueError, r"two or more lower-case letters", stores.register_store, wrong, store)
    stores.register_store("lazy", "a.module.that.is.not.there", is_path=True)  # Imported at first use only.
    raises(ModuleNotFoundError, "a", stores.open_store, "lazy:x")
