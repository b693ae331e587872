"""Queries of several words in a folder of photographs: `--without` and `--also` of `sfumato search`, by mentions.

python benchmarks/query_forms.py FLICKR8K [--split test] [--json FILE]

FLICKR8K as for own_folder.py. A photograph shows a word if one of its five captions mentions it. Pairs of WORDS are
asked: A without B, A and B. The figure is the fraction of the first ten photographs that fit, of what can be reached.
"""

import itertools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from own_folder import Split, split_arguments

from sfumato.arrays import Array
from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.answer import QueryInfo, TextQuery
from sfumato.search.collection import GaussianCollection
from sfumato.search.searcher import combined
from sfumato.workflows.search import LoadedModel

_OBJECTS = "dog water grass snow ball beach boy girl man woman bike street crowd mountain car child people sand pool"
_OTHERS = "field run jump swim red blue black white shirt hat camera rock tree bench sit play toy frisbee soccer"
WORDS = f"{_OBJECTS} {_OTHERS}".split()


def reached(distance: torch.Tensor, fits: np.ndarray) -> float:
    """P@10 as a fraction of what is reachable; the mean over queries. distance, fits (q, n)."""
    first = distance.topk(10, largest=False).indices.numpy()
    found = np.take_along_axis(fits, first, 1).sum(1)
    return float((found / np.minimum(10, fits.sum(1))).mean())


def fill(model: LoadedModel, items: GaussianEmbedding, captions: list[list[str]], folder: Path) -> GaussianCollection:
    """A collection of photographs with their captions."""
    made = GaussianCollection.create(
        folder, d=items.d, texts=True, logit_scale=model.logit_scale, logit_bias=model.logit_bias,
        calibration=model.calibration,
    )  # fmt: skip
    made.upsert(items, [str(i) for i in range(items.n)], {"captions": ["\n".join(own) for own in captions]})
    return made


def main() -> None:
    given = split_arguments(__doc__)
    data, csd = Split(given.flickr8k, given.split), get_distance("csd").matrix
    captions = [[caption.strip().rstrip(" .") for caption in own] for own in data.captions]
    model, photographs = data.model, data.images

    def by_texts(texts: list[str]) -> Array:
        return csd(model.embed_texts(texts), photographs)

    def by(queries: list[TextQuery]) -> Array:
        parts = model.embed_texts([part for one in queries for part in one.parts])
        return csd(combined(queries, parts), photographs)

    ending = "(s|es|ning|ping|ming|ing|ting)?"
    shows = {
        word: np.array([bool(re.search(rf"\b{word}{ending}\b", " ".join(own).lower())) for own in captions])
        for word in WORDS
    }
    result: dict[str, float] = {}

    def report(name: str, value: float) -> None:
        result[name] = value
        print(f"{name}: {value:.3f}")

    def without(a: str, b: str) -> bool:
        both, alone = (shows[a] & shows[b]).sum(), (shows[a] & ~shows[b]).sum()
        return bool(both >= 10 and alone >= 10 and both >= 0.15 * shows[a].sum())

    pairs = [pair for pair in itertools.permutations(WORDS, 2) if without(*pair)]
    fits = np.array([shows[a] & ~shows[b] for a, b in pairs])
    ways: dict[str, Callable[[], torch.Tensor]] = {
        '"A"': lambda: by_texts([a for a, _ in pairs]),
        '"A without B" as a text': lambda: by_texts([f"{a} without {b}" for a, b in pairs]),
        "A --without B": lambda: by([TextQuery(a, without=(b,)) for a, b in pairs]),
    }
    for name, way in ways.items():
        report(f"{len(pairs)} pairs, A and not B: {name}", reached(way(), fits))
    dog = [i for i, pair in enumerate(pairs) if pair == ("dog", "water")]
    for name, way in ways.items() if dog else ():
        report(f"dog, not water: {name}", reached(way()[dog], fits[dog]))
    folder = tempfile.TemporaryDirectory()
    collection = fill(model, photographs, [own[:4] for own in captions], Path(folder.name) / "collection")
    for name, asked in {
        '"A"': [TextQuery(a) for a, _ in pairs],
        '"A without B" as a text': [TextQuery(f"{a} without {b}") for a, b in pairs],
        "A --without B": [TextQuery(a, without=(b,)) for a, b in pairs],
    }.items():
        embedded = combined(asked, model.embed_texts([part for one in asked for part in one.parts]))
        found = collection.search(embedded, 10, about=QueryInfo.of_texts(asked))
        right = [sum(fits[i][int(hit.id)] for hit in one) / min(10, fits[i].sum()) for i, one in enumerate(found)]
        report(f"{len(pairs)} pairs, A and not B, four captions in the index: {name}", float(np.mean(right)))
    collection.close()
    folder.cleanup()
    pairs = [p for p in itertools.combinations(WORDS, 2) if 8 <= (shows[p[0]] & shows[p[1]]).sum() <= 150]
    fits = np.array([shows[a] & shows[b] for a, b in pairs])
    parts = csd(model.embed_texts(WORDS), photographs)
    summed = torch.stack([parts[WORDS.index(a)] + parts[WORDS.index(b)] for a, b in pairs])
    report(f"{len(pairs)} pairs, A and B: distances added", reached(summed, fits))
    report(f"{len(pairs)} pairs, A and B: A --also B", reached(by([TextQuery(a, (b,)) for a, b in pairs]), fits))

    def first(distance: torch.Tensor) -> float:
        return float((distance.argmin(1) == torch.arange(len(captions))).double().mean())

    report("first hits: one caption", first(by_texts([own[0] for own in captions])))
    report("first hits: two captions as one text", first(by_texts([f"{own[0]}. {own[1]}" for own in captions])))
    report("first hits: caption --also caption", first(by([TextQuery(own[0], (own[1],)) for own in captions])))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
