"""A store from outside the package: one object and one line register it, and one class tests it."""

import re

import pytest
import torch
from additions import store
from support.raising import raises
from support.stores_contract import FINGERPRINT, StoreBasics

from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.collection import GaussianCollection
from sfumato.search.index import GaussianIndex
from sfumato.search.stores.protocol import STORES, create_store, open_store, register_store


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr("sfumato.search.stores.protocol.STORES", dict(STORES))
    register_store("toy", store)


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
    raises(UserError, re.escape(f"known: {', '.join([*STORES, 'toy'])}, or a path"), open_store, "nowhere:x")
    raises(UserError, "there is none", open_store, "toy:nothing")
    raises(ValueError, "'toy' is already registered", register_store, "toy", store)
    for wrong in ("x", "Toy", "to:y", ""):
        raises(ValueError, r"two or more lower-case letters", register_store, wrong, store)
    register_store("lazy", "a.module.that.is.not.there", path="")  # Imported at first use only.
    raises(ModuleNotFoundError, "a", open_store, "lazy:x")
