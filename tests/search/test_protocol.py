"""Collections answer as an index does; URLs, filters and kinds of stores, and the table in the guide of each."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from additions import store
from support.raising import raises
from support.stores_contract import FINGERPRINT, StoreBasics

from sfumato import Calibration, Filter, GaussianCollection, GaussianEmbedding, GaussianIndex, QueryScores, csd_matrix
from sfumato.calibration.logits import ConditionalLogits, FirstHit, ReferenceQueries
from sfumato.errors import UserError
from sfumato.ids import composed
from sfumato.search import folder as folders
from sfumato.search.answer import SearchOptions
from sfumato.search.exact import LIFTED_DISTANCES, gallery_centre
from sfumato.search.folder import is_collection
from sfumato.search.index import copy_gallery
from sfumato.search.stores import protocol as stores
from sfumato.search.stores.local import LocalStore
from sfumato.search.stores.milvus import MilvusStore
from sfumato.search.stores.pgvector import PgVectorStore
from sfumato.search.stores.protocol import StoreInUseError, create_store

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {"file": LocalStore, "postgresql": PgVectorStore, "milvus": MilvusStore, "milvus+http": MilvusStore}
URLS = dict(zip(CLASSES, ("file:none", "postgresql://h/d", "milvus:none.db", "milvus+http://h/n"), strict=True))
SAME = {"postgres": "postgresql", "milvus+https": "milvus+http"}


def table():
    guide = (ROOT / "docs" / "guides" / "search.md").read_text(encoding="utf-8")
    section = guide.partition("### What each store can do\n")[2].partition("\n#")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {
        re.match(r"`([a-z+]+):", first)[1]: dict(zip(lines[0][1:], rest, strict=True)) for first, *rest in lines[2:]
    }


@pytest.mark.parametrize("n_made", [1, 2])
def test_what_was_made_is_closed_if_the_collection_cannot_be(tmp_path, monkeypatch, n_made):
    made, full = [Mock() for _ in range(n_made)], OSError("the disk is full")
    monkeypatch.setattr(stores, "create_store", Mock(side_effect=[*made, full]))
    monkeypatch.setattr(folders, "write_settings", Mock(side_effect=full))
    with pytest.raises(OSError, match="full"):
        GaussianCollection.create(tmp_path / "c", d=3, texts=True)
    for one in made:
        one.close.assert_called_once_with()


def test_the_first_store_is_closed_if_the_second_cannot_be_opened(tmp_path, monkeypatch):
    GaussianCollection.create(tmp_path / "c", d=3, texts=True).close()
    first = stores.open_store(str(tmp_path / "c" / "store"))
    monkeypatch.setattr(first, "close", Mock(wraps=first.close))
    monkeypatch.setattr(stores, "open_store", Mock(side_effect=[first, OSError("the disk is gone")]))
    with pytest.raises(OSError, match="gone"):
        GaussianCollection.open(tmp_path / "c")
    first.close.assert_called_once_with()


def test_every_store_has_a_row_records_name_what_is_wrong_and_filters_take_letters_in_two_parts():
    assert set(table()) == set(CLASSES) == set(stores.STORES) - set(SAME)
    assert all(stores.STORES[name].factory == stores.STORES[other].factory for name, other in SAME.items())
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for scheme, row in table().items():
        texts = CLASSES[stores.scheme(stores.beside(URLS[scheme]))]
        assert row["search by words"] == ("yes" if issubclass(texts, stores.WordStore) else "no"), scheme
        named = re.findall(r"([a-z-]+) (\d+\.\d+\.\d+)", row["tested with"])
        assert named and all(pinned[name] == version for name, version in named), scheme
    raises(ValueError, "1 ids, 2 vectors", stores.Records, ("a",), np.zeros((2, 3), np.float32), np.zeros(2), ({}, {}))
    with pytest.raises(ValueError, match="'b' is not finite"):
        stores.Records(("a", "b"), np.array([[0], [np.inf]], np.float32), np.zeros(2), ({}, {}))
    for payload in ({"x": "a\0b"}, {"x": 3}, {"x": "\ud800"}, {"\0": "x"}):
        with pytest.raises(ValueError, match="payload of 'a' must be Unicode texts"):
            stores.Records(("a",), np.zeros((1, 3), np.float32), np.zeros(1), (payload,))
    for most in (-1.0, float("nan")):
        raises(ValueError, "max_uncertainty must be at least 0", Filter, max_uncertainty=most)
    raises(ValueError, r"\(n, e\) float32", stores.Records, ("a",), np.zeros((1, 3)), np.zeros(1), ({},))
    item = composed({"folder": "A\u0308rger", "_file": "A\u0308rger"})
    assert item == {"folder": "\u00c4rger", "_file": "A\u0308rger"}
    assert all(stores.parse_where([f"folder={form}"]).accepts(item, 1.0) for form in ("A\u0308rger", "\u00c4rger"))


OF_HNSW = "memory, exact_below, compress, m, ef_construction, ef_search, overfetch"


@pytest.mark.parametrize("url, said", [
    ("file:?engine=flat", "names no folder"), ("store?engine=ivf", "engine must be flat or hnsw, got 'ivf'"),
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
])  # fmt: skip
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
        "store": "store_texts", "file:a/b?engine=hnsw": "file:a/b_texts?engine=hnsw",
        "milvus:x.db?index=HNSW": "milvus:x.db?index=HNSW&name=sfumato_texts",
    }  # fmt: skip
    assert stores.beside("milvus+http://h:1/c") == "milvus+http://h:1/c_texts"
    assert stores.beside("postgresql://u@h/d?table=s.t") == "postgresql://u@h/d?table=s.t_texts"


@pytest.mark.parametrize("words, expected", [
    (["date=2024-06"], [2, 3]), (["date>=2024-06"], [2, 3, 4]), (["date<=2024-06"], [0, 1, 2, 3]),
    (["date>2024"], [4]), (["date < 2024-06"], [0, 1]), (["date>=2024-06-13 12:01", "date<=2024"], [3]),
    (["date>=2023", "date>=2024-06", "date<2025", "date<=2025"], [2, 3]), (["date:2025"], [4]),
    (["folder=a", "folder=b", "date>=2024"], [1, 2, 3]), (["folder>=b"], [2, 3]), (["folder:"], [5]),
    (["folder=b"], [2, 3]), (["folder=b/"], [2, 3]), (["folder:b"], [2, 3]), (["folder=b/c"], [3]),
    (["odd:a=b"], [3]), (["beach"], "'beach', expected FIELD=VALUE"), (["=beach"], "expected FIELD=VALUE"),
    (["date>=june"], "'date>=june', expected a date such as 2024, 2024-06 or 2024-06-13"),
    (["date=2023", "date=2024"], "'date=2024' beside another date; give one span"),
])  # fmt: skip
def test_a_filter_in_words(words, expected):
    days = ("2023-12-31T23:59:59", "2024-05-31T23:59:59", "2024-06-01T00:00:00", "2024-06-13T12:01:09", "2025", "")
    if isinstance(expected, str):
        raises(ValueError, expected, stores.parse_where, words)
        return
    folders = ("a", "a", "b", "b/c", None, "")
    items = [{"date": day} | ({} if f is None else {"folder": f}) for day, f in zip(days, folders, strict=True)]
    items[3]["odd"] = "a=b"
    wanted = stores.parse_where(words)
    assert [i for i, item in enumerate(items) if wanted.accepts(item, 1.0)] == expected


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
    raises(UserError, re.escape(f"known: {', '.join(stores.STORES)}, or a path"), stores.open_store, "nowhere:x")
    raises(UserError, "there is none", stores.open_store, "toy:nothing")
    raises(ValueError, "'toy' is already registered", stores.register_store, "toy", store)
    for wrong in ("x", "Toy", "to:y", ""):
        raises(ValueError, r"two or more lower-case letters", stores.register_store, wrong, store)
    stores.register_store("lazy", "a.module.that.is.not.there", is_path=True)  # Imported at first use only.
    raises(ModuleNotFoundError, "a", stores.open_store, "lazy:x")


D = 11


def gaussians(n, seed, *, offset=3.0):
    random = np.random.default_rng(seed)
    mean, noise = random.standard_normal((2, n, D))
    return GaussianEmbedding(mean + offset, random.standard_normal((n, 1)) + 0.4 * noise - 2).to(np.float32)


ids_of = lambda n: [f"item {i}" for i in range(n)]
payload_of = lambda n: {"colour": ["rgb"[i % 3] for i in range(n)], "text": [f"no {i}" for i in range(n)]}


def calibration_of(gallery, seed=9):
    distance = csd_matrix(gaussians(300, seed), gallery)
    order, second = distance.argsort(1), np.arange(300) % 4 == 0
    match = np.eye(gallery.n, dtype=int)[np.where(second, order[:, 1], order[:, 0])]
    return Calibration.fit(distance, match, t2i=QueryScores.fit(distance, match))


def both(tmp_path, n=157, *, distance="csd", store="store", calibration=None):
    gallery = gaussians(n, 0)
    told = {"distance": distance, "calibration": calibration, "logit_scale": 0.7, "logit_bias": 2.0}
    index = GaussianIndex.build(gallery, ids_of(n), payload=payload_of(n), **told)
    told |= {"d": D, "centre": gallery_centre(gallery), "metadata": {"run": "r"}}
    made = GaussianCollection.create(tmp_path / "collection", store, **told)
    made.upsert(gallery.tensors(), ids_of(n), payload_of(n))
    return index, made


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.uncertainty == pytest.approx(b.uncertainty, rel=1e-6)
        assert a.abstained == b.abstained and a.best_probability == pytest.approx(b.best_probability, rel=1e-4)
        for mine, other in ((a.hits, b.hits), (a.conformal_set or (), b.conformal_set or ())):
            assert [h.id for h in mine] == [h.id for h in other]
            for x, y in zip(mine, other, strict=True):
                assert (x.rank, x.payload) == (y.rank, y.payload) and x.distance == pytest.approx(y.distance, rel=2e-6)
                assert x.match_probability == pytest.approx(y.match_probability, rel=1e-4)
                assert x.uncertainty == pytest.approx(y.uncertainty, rel=1e-6)


@pytest.mark.parametrize("distance", LIFTED_DISTANCES)
def test_answers_as_the_index_does(tmp_path, distance):
    index, made = both(tmp_path, distance=distance)
    queries = gaussians(13, 1)
    with made:
        assert len(made) == 157 and made.d == D
        assert_same(made.search(queries, 9), index.search(queries, 9))
        assert_same(made.search(queries.to(np.float64).tensors(), 400), index.search(queries, 400))
        assert made.search(queries[:0], 3) == []
        assert made.expected_matches(queries) == pytest.approx(index.expected_matches(queries), rel=1e-4)


@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("wanted", [None, Filter({"colour": ("r", "b")})])
def test_probabilities_given_the_nearest_items(tmp_path, wanted, with_reference):
    calibration, weights = calibration_of(gaussians(157, 0)), (0.3, -0.2, 0.4, -0.5, 0.05, 0.02, -0.1)
    hits = ConditionalLogits(1.4, -0.3, weights, (-60.0,) * 7, (60.0,) * 7, "planted", 50, (10, 20))
    t2i = replace(calibration.t2i, conditional=hits, hits=calibration.t2i.scores)
    if with_reference:
        hits = replace(hits, first=FirstHit(0.9, 0.4, (0.3, -0.2), (0.0, 0.0), (90.0, 90.0)))
        t2i = replace(t2i, conditional=hits, reference=ReferenceQueries.of(gaussians(60, 17), "csd", "t2i"), hits=None)
    calibration = replace(calibration, t2i=t2i)
    index, made = both(tmp_path, calibration=calibration)
    queries = gaussians(7, 3)
    accepted = [wanted is None or wanted.accepts(index.get([i]).payloads[0], 0.0) for i in index.ids]
    distance = csd_matrix(queries, index.embeddings).astype(np.float64)
    nearest, n, features = np.sort(distance)[:, :50], distance.shape[1], None
    if with_reference:
        features = calibration.t2i.reference.features(queries, index.embeddings[distance.argmin(1)])
    slow = calibration.t2i.hit_probability(distance, nearest, n_gallery=n, reference=features)
    assert not np.allclose(slow, calibration.t2i.probability(distance, n_gallery=n), atol=0.01)
    slow = slow[:, accepted]  # A filter leaves the probabilities as they are.
    with made:
        for gallery in (index, made):
            for hits, p in zip(gallery.search(queries, 9, SearchOptions(filter=wanted)), -np.sort(-slow), strict=True):
                assert [h.match_probability for h in hits] == pytest.approx(p[:9], abs=1e-4)
            assert gallery.expected_matches(queries, wanted) == pytest.approx(slow.sum(1).tolist(), rel=1e-3)
            assert gallery.expected_matches(queries, Filter({"colour": ("mauve",)})) == [0.0] * 7


def test_promises_are_the_same(tmp_path, monkeypatch):
    calibration = calibration_of(gaussians(157, 0))
    index, made = both(tmp_path, calibration=calibration)
    queries = gaussians(30, 2)
    with made:
        for asked in (
            {"coverage": 0.9}, {"coverage": 0.5, "min_probability": 0.2}, {"max_risk": 0.4},
            {"coverage": 0.8, "max_set": 3},
            {"filter": Filter({"colour": ("r", "b")}, max_uncertainty=2.0), "min_probability": 0.1},
            {"filter": Filter(ranges={"colour": ("c", "r")})}, {"filter": Filter(ranges={"place": ("", "")})},
        ):  # fmt: skip
            assert_same(*(gallery.search(queries, 7, SearchOptions(**asked)) for gallery in (made, index)))
        cut = made.search(queries, 2, SearchOptions(coverage=0.9, max_set=1))
        assert any(r.conformal_set_cut for r in cut) and all(len(r.conformal_set) <= 1 for r in cut)
        whole = made.search(queries, 2, SearchOptions(coverage=0.9))
        assert not any(r.conformal_set_cut for r in whole)
        assert [r.conformal_set_cut for r in cut] == [len(r.conformal_set) > 1 for r in whole]
        search = made.store.search
        with monkeypatch.context() as patch:  # An engine that brings few: the set comes from a scan.
            patch.setattr(made.store, "search", lambda *asked: [part.take([0]) for part in search(*asked)])
            again = made.search(queries, 2, SearchOptions(coverage=0.9))
        assert [r.conformal_set for r in again] == [r.conformal_set for r in whole]
        with GaussianCollection.create(tmp_path / "empty", d=D, calibration=calibration) as empty:
            (answer,) = empty.search(queries[:1], 3, SearchOptions(max_risk=0.4))
            assert answer.abstained and answer.hits == ()
        least = min(index.embeddings.total_variance.tolist())
        just_below, huge = (Filter(max_uncertainty=limit) for limit in (math.nextafter(least, 0), 1e300))
        assert [(index.count(f), made.count(f)) for f in (just_below, huge)] == [(0, 0), (157, 157)]
        mauve = Filter({"colour": ("mauve",)})
        nothing = made.search(queries[:2], 5, SearchOptions(filter=mauve))
        assert [(r.hits, r.best_probability) for r in nothing] == [((), 0.0)] * 2
        assert_same(nothing, index.search(queries[:2], 5, SearchOptions(filter=mauve)))
        nowhere = Filter({"colour": ("mauve",)}, ranges={"place": ("a", "")})
        for gallery in (index, made):
            (said, _) = gallery.search(queries[:2], 5, SearchOptions(filter=nowhere))
            assert "no item has a field 'place'; the fields are" in said.verdict.text and "colour" in said.verdict.text
        told = "guarantees about the whole gallery, but a filter may remove the match"
        for gallery, promise in itertools.product((made, index), ({"coverage": 0.9}, {"max_risk": 0.4})):
            raises(ValueError, told, gallery.search, queries, 5, SearchOptions(filter=mauve, **promise))


def test_items_have_the_distances_of_the_originals_also_opened_again(tmp_path):
    calibration = calibration_of(gaussians(157, 0))
    _, made = both(tmp_path, calibration=calibration)
    queries = gaussians(6, 1)
    before = made.search(queries, 5, SearchOptions(coverage=0.8))
    made.close()
    (tmp_path / "collection").rename(tmp_path / "elsewhere")  # its store lies inside and goes along
    with GaussianCollection.open(tmp_path / "elsewhere") as again:
        assert again.search(queries, 5, SearchOptions(coverage=0.8)) == before
        assert again.metadata == {"run": "r"} and again.scorer.calibration == calibration and again.distance == "csd"
    assert is_collection(tmp_path / "elsewhere") and not is_collection(tmp_path)
    for distance in LIFTED_DISTANCES:
        index, made = both(tmp_path / distance, distance=distance)
        with made:
            items = made.get(["item 9", "nobody", "item 2"])
            assert items.ids == ("item 9", "item 2") and items.payloads[1] == {"colour": "b", "text": "no 2"}
            mine, other = made.search(items.embeddings, 8), index.search(index.get(items.ids).embeddings, 8)
            assert_same(mine, other)
            assert [r[0].id for r in mine] == (["item 9", "item 2"] if distance != "csd" else [r[0].id for r in other])
            expected = index.get(items.ids).embeddings.total_variance
            np.testing.assert_allclose(items.embeddings.total_variance, expected, rtol=1.3e-6, atol=1e-5)


def test_what_was_interrupted_says_so(tmp_path, monkeypatch):
    index, made = both(tmp_path)
    (tmp_path / "collection" / "pictures").mkdir()
    (tmp_path / "collection" / "pictures" / "a.jpg").write_bytes(b"uploaded")
    upserts = []

    def dies(self, records, kept=LocalStore.upsert):
        upserts.append(len(records))
        if len(upserts) == 2:
            raise KeyboardInterrupt
        kept(self, records)

    monkeypatch.setattr(LocalStore, "upsert", dies)
    for source, name in ((made, "copied"), (index, "from index")):
        upserts.clear()
        raises(KeyboardInterrupt, None, copy_gallery, source, tmp_path / name, batch=60)
        raises(UserError, "is incomplete: a copy was interrupted; remove it", GaussianCollection.open, tmp_path / name)
        with GaussianCollection.open(tmp_path / name, unfinished=True) as part:
            assert len(part) == 60
    monkeypatch.undo()
    with made, copy_gallery(made, tmp_path / "whole") as whole:
        assert len(whole) == 157 and (tmp_path / "whole" / "pictures" / "a.jpg").read_bytes() == b"uploaded"
    GaussianCollection.open(tmp_path / "whole").close()
    with copy_gallery(index, tmp_path / "of index") as copied:
        queries = gaussians(6, 1)
        assert_same(copied.search(queries, 9), index.search(queries, 9))


def test_equal_distances_are_ordered_by_id_and_removed_items_are_not_sampled(tmp_path):
    same = GaussianEmbedding(np.ones((12, D)), np.zeros((12, D)))
    with GaussianCollection.create(tmp_path / "c", d=D) as made:
        made.upsert(same, [f"{i:02}" for i in reversed(range(12))])
        assert [h.id for h in made.search(same[:1], 6)[0]] == ["00", "01", "02", "03", "04", "05"]
    _, made = both(tmp_path, n=300)
    made.n_sample = 100
    with made:
        drawn = made.sample(100).ids
        made.delete(drawn[:2])
        assert made.sample(100).ids[:50] == drawn[2:52] and not set(drawn[:2]) & set(made.sample(100).ids)


def test_a_sample_is_even_the_same_each_time_and_estimates_what_it_should(tmp_path):
    n = 3000
    gallery = gaussians(n, 0)
    index = GaussianIndex.build(gallery, ids_of(n), logit_scale=0.5, logit_bias=3.0)
    with GaussianCollection.create(tmp_path / "c", d=D, logit_scale=0.5, logit_bias=3.0) as made:
        made.upsert(gallery, ids_of(n))
        made.n_sample, made.n_exact = 600, 40
        queries = gaussians(40, 1)
        exact, estimated = index.expected_matches(queries), made.expected_matches(queries)
        # The rest of each query, 2,960 items, is estimated from about 592 of them: its deviation is that of their mean.
        for query, a, b in zip(range(40), exact, estimated, strict=True):
            p = np.sort(index.match_probability(csd_matrix(queries[query : query + 1], gallery)[0]))[:-40]
            deviation = 2960 * float(p.std(ddof=1)) / math.sqrt(592)
            assert abs(a - b) < 4.5 * deviation + 1e-3  # 40 queries: false alarm below 1 in 3,000
        drawn = made.sample(500)
        assert len(set(drawn.ids)) == 500
        assert drawn.ids == made.sample(500).ids and made.sample(100).ids == drawn.ids[:100]
        place = [int(i.split()[1]) for i in drawn.ids]
        # Even: the mean position has a deviation of 866 / sqrt(500) = 39.
        assert abs(sum(place) / 500 - 1499.5) < 4 * 39
        one = place.index(max(place))
        np.testing.assert_allclose(drawn.embeddings.mean[one], gallery.mean[max(place)], rtol=1e-6, atol=1e-6)
        assert made.sample(500, seed=1).ids == made.sample(500, seed=1).ids != drawn.ids
        assert len(made.sample(10_000).ids) == n


def test_what_cannot_be_stored_and_folders_that_do_not_belong_together_are_refused(tmp_path):
    _, made = both(tmp_path)
    with made:
        for arguments, message in (
            ((gaussians(2, 1), ["a"]), "2 embeddings, 1 ids"),
            ((gaussians(2, 1), ["a", "b"], {"x": ["1"]}), r"payloads of \[1\]"),
            ((gaussians(2, 1), ["a", "a"]), "(?s)distinct, non-empty.*'a'"),
            ((gaussians(2, 1), ["a", ""]), "(?s)distinct, non-empty"),
            ((gaussians(1, 0), ["a"], {"x": ["1"]}, [{}]), "payload or payloads, not both"),
            ((gaussians(1, 0), ["a"], None, [{}, {}]), r"1 embeddings, 1 ids and payloads of \[2\]"),
            ((GaussianEmbedding.point(np.full((1, D), np.nan)), ["a"]), "(?i)nan|finite"),
            ((GaussianEmbedding.point(np.zeros((1, D + 1))), ["a"]), f"{D + 1} dimensions, the index has {D}"),
        ):
            embeddings, ids, payload, payloads = (*arguments, None, None)[:4]
            raises(ValueError, message, made.upsert, embeddings, ids, payload, payloads=payloads)
        made.upsert(gaussians(0, 1), [])
        assert len(made) == 157
        points = GaussianEmbedding.point(gaussians(2, 0).mean)
        made.upsert(points, ["a", "b"], payloads=[{"x": "1"}, {"y": "2", "z": "3"}])
        found = made.get(["b", "a"])
        assert found.payloads == ({"y": "2", "z": "3"}, {"x": "1"}) and not found.embeddings.var.any()
    create, folder = GaussianCollection.create, tmp_path / "collection"
    raises(UserError, "exists already; give a new or empty folder", create, folder, d=D)
    raises(ValueError, r"centre must have shape \(11,\)", create, tmp_path / "x", d=D, centre=np.zeros(3))
    raises(ValueError, "not a Euclidean distance", create, tmp_path / "x", d=D, distance="kl")
    kl = GaussianIndex.build(gaussians(5, 0), ids_of(5), distance="kl")
    raises(ValueError, "kl.*not a Euclidean distance of lifted vectors", copy_gallery, kl, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    create_store(str(tmp_path / "other"), D + 1, "of somebody else").close()
    raises(UserError, "vectors of another collection", GaussianCollection.open, folder, str(tmp_path / "other"))
    raises(FileNotFoundError, "there is no folder", GaussianCollection.open, tmp_path / "nowhere")
    manifest = json.loads((folder / "manifest.json").read_text())
    for kind, error, told in (
        ("other-1", ValueError, "expected 'sfumato-collection-1'"),
        ("sfumato-index-1", UserError, "index of an earlier version.*sfumato index RUN"),
    ):
        (folder / "manifest.json").write_text(json.dumps(manifest | {"kind": kind}))
        raises(error, told, GaussianCollection.open, folder)


def test_filling_beside_another_writer_does_not_mark_the_collection(tmp_path):
    with GaussianCollection.create(tmp_path / "c", d=D) as first, GaussianCollection.open(tmp_path / "c") as second:
        first.upsert(gaussians(2, 0), ["a", "b"])
        with pytest.raises(StoreInUseError, match="writes to it"), second.filling("again"):
            raise AssertionError("the block must not run")
        GaussianCollection.open(tmp_path / "c").close()
