"""A store from outside the package: one object and one line register it, and one class tests it."""

import re

import pytest
import torch
from support.stores_contract import FINGERPRINT, StoreBasics

from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.collection import GaussianCollection
from sfumato.search.index import GaussianIndex
from sfumato.search.stores.protocol import STORES, Records, create_store, open_store, register_store


class ToyStore:
    """Records in a dictionary of this process; searches compare every vector in float64."""

    def __init__(self, url, dim, fingerprint):
        self.url, self.dim, self.fingerprint, self.kept = url, dim, fingerprint, {}

    def _records(self, ids):
        rows = [self.kept[i] for i in ids]
        if not rows:
            return Records.none(self.dim)
        vectors, uncertainty, payloads = zip(*rows, strict=True)
        return Records(tuple(ids), torch.stack(vectors), torch.stack(uncertainty), payloads)

    def _fitting(self, filter):
        rows = list(self.kept.items())
        return [i for i, (_, u, payload) in rows if filter is None or filter.accepts(payload, float(u))]

    def upsert(self, records):
        if records.vectors.shape[1] != self.dim:
            raise ValueError(f"toy: expected {self.dim} dimensions, got {records.vectors.shape[1]}")
        for i, key in enumerate(records.ids):
            self.kept[key] = (records.vectors[i], records.uncertainty[i], dict(records.payloads[i]))

    def delete(self, ids):
        return sum(self.kept.pop(i, None) is not None for i in dict.fromkeys(ids))

    def get(self, ids):
        return self._records([i for i in dict.fromkeys(ids) if i in self.kept])

    def search(self, queries, k, filter=None):
        if queries.shape[1] != self.dim:
            raise ValueError(f"toy: expected {self.dim} dimensions, got {queries.shape[1]}")
        if k < 1:
            raise ValueError(f"toy: k must be at least 1, got {k}")
        fitting = self._records(self._fitting(filter))
        distance = (queries.double().unsqueeze(1) - fitting.vectors.double()).square().sum(2)
        return [fitting.take(row.argsort()[:k].tolist()) for row in distance]

    def count(self, filter=None):
        return len(self._fitting(filter))

    def ids_after(self, after, n):
        return sorted(id for id in self.kept if id > after)[:n]

    def scan(self, batch=4096, filter=None):
        records = self._records(self._fitting(filter))
        for start in range(0, len(records), batch):
            yield records.take(range(start, min(start + batch, len(records))))

    def optimise(self):
        pass

    def close(self):
        pass


class ToyStores:
    """Makes stores and remembers them by URL."""

    def __init__(self):
        self.made = {}

    def create(self, url, dim, fingerprint):
        if url in self.made:
            raise UserError(f"store {url}: exists already")
        return self.made.setdefault(url, ToyStore(url, dim, fingerprint))

    def open(self, url):
        if url not in self.made:
            raise UserError(f"store {url}: there is none")
        return self.made[url]


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr("sfumato.search.stores.protocol.STORES", dict(STORES))
    register_store("toy", ToyStores())


class TestToyStore(StoreBasics):
    def create(self, tmp_path, dim):
        return create_store(f"toy:{tmp_path}", dim, FINGERPRINT)


def gaussians(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return GaussianEmbedding(torch.randn(n, 6, generator=generator), torch.randn(n, 6, generator=generator) - 2)


def test_a_collection_in_a_toy_store_answers_as_an_index_does(tmp_path):
    gallery, queries, ids = gaussians(60, 0), gaussians(7, 1), [f"item {i}" for i in range(60)]
    index = GaussianIndex.build(gallery, ids, logit_scale=0.7, logit_bias=2.0)
    folder = tmp_path / "collection"
    with GaussianCollection.create(folder, "toy:shop", d=6, logit_scale=0.7, logit_bias=2.0) as made:
        made.upsert(gallery, ids)
    with GaussianCollection.open(folder) as again:
        assert again.delete(["item 3"]) == 1
        again.upsert(gallery[3:4], ["item 3"])
        for found, expected in zip(again.search(queries, 9), index.search(queries, 9), strict=True):
            assert [r.id for r in found] == [r.id for r in expected]
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.distance == pytest.approx(theirs.distance, rel=2e-6)
                assert ours.match_probability == pytest.approx(theirs.match_probability, rel=1e-4)
        assert again.expected_matches(queries) == pytest.approx(index.expected_matches(queries), rel=1e-4)


def test_unknown_and_taken_schemes_are_refused():
    with pytest.raises(UserError, match=re.escape(f"known: {', '.join([*STORES, 'toy'])}, or a path")):
        open_store("nowhere:x")
    with pytest.raises(UserError, match="there is none"):
        open_store("toy:nothing")
    with pytest.raises(ValueError, match="'toy' is already registered"):
        register_store("toy", ToyStores())
    for wrong in ("x", "Toy", "to:y", ""):
        with pytest.raises(ValueError, match=r"two or more lower-case letters"):
            register_store(wrong, ToyStores())
    register_store("lazy", "a.module.that.is.not.there", path="")  # Imported at first use only.
    with pytest.raises(ModuleNotFoundError, match="a"):
        open_store("lazy:x")
