"""Texts for tests of search: vectors without MiniLM, and a collection with a rare word in one of its captions."""

import hashlib

import torch

from sfumato.gaussian import GaussianEmbedding
from sfumato.search.answer import QueryInfo, SearchOptions
from sfumato.search.collection import GaussianCollection
from sfumato.search.index import copy_gallery
from sfumato.search.stores.protocol import WORDS, Filter, Records


def quick_vectors(texts):
    """Another vector for each text, without MiniLM."""
    seeds = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") for text in texts]
    rows = [torch.randn(384, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.nn.functional.normalize(torch.stack(rows), dim=1) if rows else torch.empty(0, 384)


SCENES = ("a dog in the snow", "a cake on a table", "children run over a meadow", "a red car in the street")
RARE = "\n".join((*SCENES[1:], "the tin box of the Ostrakavelli"))


def assert_a_rare_word_is_found(folder, store, monkeypatch):
    generator, n = torch.Generator().manual_seed(0), 240
    mean = torch.randn(n, 7, generator=generator)
    mean[77] = 1.5  # Farther from the query than nearly all.
    items = GaussianEmbedding(mean, torch.full((n, 7), -3.0))
    payloads = [{"captions": f"{SCENES[i % 4]}\na photo of day {i}", "date": f"20{i % 3}"} for i in range(n)]
    payloads[8:78:2] = [{"captions": "the Ostrakaveli", "date": "202"}] * 35  # Sounds nearer than the captions.
    payloads[77] = {"captions": RARE, "date": "202"}
    query = GaussianEmbedding(torch.zeros(1, 7), torch.full((1, 7), -3.0))

    def first(collection, **options):
        collection.n_exact, collection.n_sample = 10, 50
        (answer,) = collection.search(query, 3, SearchOptions(**options), QueryInfo.of_texts(["the Ostrakavelli"]))
        return answer[0].id

    with GaussianCollection.create(folder / "made", store("a"), d=7, texts=True) as made:
        made.upsert(items, [f"{i:03}" for i in range(n)], payloads=payloads)
        assert first(made) == first(made, filter=Filter({"date": ("202",)})) == "077"
        assert first(made, filter=Filter({"date": ("200", "201")})) != "077"
        with monkeypatch.context() as patch:
            patch.setattr(type(made.texts.store), "match_words", lambda *_: [])
            assert first(made) != "077"
        stored = made.texts.store.get(["077"])
        assert "ostrakavelli" in stored.payloads[0][WORDS].split() and WORDS not in made.get(["077"]).payloads[0]
        old = ({"date": "202"},)  # As stores of earlier versions have it.
        made.texts.store.upsert(Records(stored.ids, stored.vectors, stored.uncertainty, old))
        assert first(made) != "077"
        with copy_gallery(made, folder / "copy", store("b")) as copied:
            assert first(copied) == "077"
            copied.rename("077", "new", payloads[77])
            assert first(copied) == "new"
            copied.delete(["new"])
            assert first(copied) not in ("new", "077")
