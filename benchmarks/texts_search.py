"""Time of one search by text in 100,000 items of a collection on disk: with texts of the items as evidence, or without.

    OMP_NUM_THREADS=1 python benchmarks/texts_search.py FLICKR8K [--items 100000] [--out FILE]

FLICKR8K is a folder with dataset_flickr8k.json. An item belongs to one of its images: its embedding is near a point of
that image, and its four captions are captions of the image with some words from those of others. The vectors of texts
are sums of the vectors of their words, which take less time to make than those of sentences. A query is a caption of an
image, or one to three words of it. Both kinds of search run in turn in one process. A search with texts embeds the
query with MiniLM; neither includes the model's own embedding of the query. The first search draws the sample of 20,000
items and is timed apart.
"""

import argparse
import datetime
import json
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.nn.functional import normalize

from sfumato import GaussianEmbedding
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.search.answer import QueryInfo
from sfumato.search.collection import GaussianCollection
from sfumato.search.texts import FUNCTION_WORDS, words_of

D, SWAPPED, BATCH, QUERIES, SEED = 512, 0.25, 5_000, 200, 0


class World:
    """Items and queries about the images of Flickr8k."""

    def __init__(self, file: Path, seed: int) -> None:
        images = json.loads(file.read_text("utf-8"))["images"]
        self.captions = [[words_of(s["raw"]) for s in image["sentences"]] for image in images]
        counts = Counter(word for own in self.captions for caption in own for word in caption)
        self.all_words = [word for own in self.captions for caption in own for word in caption]
        self.row = {word: i for i, word in enumerate(counts)}
        total = len(self.all_words)
        weight = torch.tensor([math.log(total / n) for n in counts.values()])
        self.vectors = sentence_vectors(list(counts)) * weight.unsqueeze(1)
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.points = torch.randn(len(images), D, generator=self.generator) / math.sqrt(D)

    def embeddings(self, images: list[int]) -> GaussianEmbedding:
        """Embeddings near the points of images."""
        noise = torch.randn(len(images), D, generator=self.generator) / math.sqrt(D)
        mean = normalize(self.points[images] + noise, dim=1)
        return GaussianEmbedding(mean, torch.full_like(mean, -8.0))

    def caption(self, image: int) -> list[str]:
        """A caption of an image with some words from others."""
        words = self.draw.choice(self.captions[image])
        return [self.draw.choice(self.all_words) if self.draw.random() < SWAPPED else word for word in words]

    def query(self, image: int, *, short: bool) -> str:
        """A caption of an image, or one to three of its words."""
        words = self.draw.choice(self.captions[image])
        others = [word for word in words if word not in FUNCTION_WORDS] or words
        return " ".join(others[: self.draw.randint(1, 3)] if short else words)

    def items(self, n: int) -> tuple[GaussianEmbedding, list[dict[str, str]], torch.Tensor]:
        """Embeddings, payloads and vectors of texts of n items."""
        images = [self.draw.randrange(len(self.captions)) for _ in range(n)]
        captions = [[self.caption(image) for _ in range(4)] for image in images]
        payloads = [
            {"captions": "\n".join(map(" ".join, own)), "folder": str(i % 50)} for i, own in enumerate(captions)
        ]
        words = [[self.row[word] for caption in own for word in caption] for own in captions]
        texts = torch.stack([self.vectors[own].sum(0) for own in words])
        return self.embeddings(images), payloads, normalize(texts, dim=1)


def fill(collection: GaussianCollection, world: World, n: int) -> None:
    """Store n items."""
    own, collection.texts = collection.texts, None  # The vectors of texts are made otherwise.
    assert own is not None
    for start in range(0, n, BATCH):
        items, payloads, vectors = world.items(min(BATCH, n - start))
        ids = [f"{i:07}" for i in range(start, start + items.n)]
        own.write(ids, vectors, payloads)
        collection.upsert(items, ids, payloads=payloads)
    collection.texts = own
    collection.optimise()


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Median and 90th percentile."""
    return {
        "median_ms": round(1e3 * statistics.median(seconds), 2),
        "p90_ms": round(1e3 * statistics.quantiles(seconds, n=10)[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    world = World(given.flickr8k / "dataset_flickr8k.json", SEED)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "items"
        with GaussianCollection.create(folder, "store?engine=flat", d=D, texts=True) as made:
            fill(made, world, given.items)
        with GaussianCollection.open(folder) as collection:
            result = measured(collection, world)
    command = f"OMP_NUM_THREADS={torch.get_num_threads()} python benchmarks/texts_search.py FLICKR8K"
    about = {"command": command, "seed": SEED, "date": datetime.date.today().isoformat()}
    result = about | {"items": given.items, "d": D, "engine": "flat", "threads": torch.get_num_threads()} | result
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", "utf-8")


def measured(collection: GaussianCollection, world: World, n: int = QUERIES) -> dict[str, object]:
    """Times of n searches of each kind, in turn."""
    images = [world.draw.randrange(len(world.captions)) for _ in range(n)]
    queries, texts = world.embeddings(images), [world.query(i, short=j % 2 == 1) for j, i in enumerate(images)]
    first, times = dict[str, float](), {"with_texts": list[float](), "without": list[float]()}
    for i in range(-1, n):
        for kind, taken in times.items():
            start = time.perf_counter()
            own = QueryInfo.of_texts([texts[i]]) if kind == "with_texts" else None
            collection.search(queries[i % n : i % n + 1], 10, about=own)
            seconds = time.perf_counter() - start
            if i < 0:
                first[kind] = round(seconds, 2)
            else:
                taken.append(seconds)
    result: dict[str, object] = {"queries": n, "first_search_seconds": first["with_texts"]}
    for name, some in (("all", slice(None)), ("captions", slice(0, None, 2)), ("words", slice(1, None, 2))):
        found = {kind: milliseconds(taken[some]) for kind, taken in times.items()}
        ratios = {
            f"{q}_ratio": round(found["with_texts"][f"{q}_ms"] / found["without"][f"{q}_ms"], 2)
            for q in ("median", "p90")
        }
        result[name] = found | ratios
    return result


if __name__ == "__main__":
    main()
