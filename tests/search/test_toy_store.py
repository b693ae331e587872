"""A store from outside the package: one object and one line register it, and one class tests it."""

import re

import pytest
from additions import store
from search.test_collection import assert_same, both, gaussians
from support.raising import raises
from support.stores_contract import FINGERPRINT, StoreBasics

from sfumato.errors import UserError
from sfumato.search.collection import GaussianCollection
from sfumato.search.stores.protocol import STORES, create_store, open_store, register_store


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr("sfumato.search.stores.protocol.STORES", dict(STORES))
    register_store("toy", store)


class TestToyStore(StoreBasics):
    def create(self, tmp_path, dim):
        return create_store(f"toy:{tmp_path}", dim, FINGERPRINT)


def test_a_collection_in_a_toy_store_answers_as_an_index_does(tmp_path):
    index, made = both(tmp_path, 60, store="toy:shop")
    made.close()
    queries, kept = gaussians(7, 1), index.get(["item 3"])
    with GaussianCollection.open(tmp_path / "collection") as again:
        assert again.delete(["item 3"]) == 1
        again.upsert(kept.embeddings, ["item 3"], payloads=kept.payloads)
        assert_same(again.search(queries, 9), index.search(queries, 9))
        assert again.expected_matches(queries) == pytest.approx(index.expected_matches(queries), rel=1e-4)


def test_unknown_and_taken_schemes_are_refused():
    raises(UserError, re.escape(f"known: {', '.join([*STORES, 'toy'])}, or a path"), open_store, "nowhere:x")
    raises(UserError, "there is none", open_store, "toy:nothing")
    raises(ValueError, "'toy' is already registered", register_store, "toy", store)
    for wrong in ("x", "Toy", "to:y", ""):
        raises(ValueError, r"two or more lower-case letters", register_store, wrong, store)
    register_store("lazy", "a.module.that.is.not.there", is_path=True)  # Imported at first use only.
    raises(ModuleNotFoundError, "a", open_store, "lazy:x")
