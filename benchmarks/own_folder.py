"""First hits in a folder of photographs with nothing trained: the model `small` on the test split of Flickr8k.

python benchmarks/own_folder.py FLICKR8K [--split test] [--json FILE]

FLICKR8K holds dataset_flickr8k.json, efflite0_224_fp16.npy (features of the photographs at 224 pixels, a row an image),
minilm_l6_v2_fp16.npy (a row a caption) and images_128.tar (small copies). The query is the fifth caption; the index
has four. Three draws of 400 photographs, with 40 others added, and all 1,000. Words: 30 of WORDS that 5 to 100 of the
400 mention in any of five captions; P@10 is divided by what can be reached. Baselines: the captions searched by MiniLM,
by BM25 (bm25s) and by reciprocal-rank fusion of both.
"""

import argparse
import json
import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import command_parser, write_json

from sfumato import load
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import RaggedStore
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.search.answer import QueryInfo
from sfumato.search.collection import GaussianCollection
from sfumato.search.texts import says, word_stems

DRAWS = 3


WORDS = [
    "dog", "snow", "bike", "ball", "beach", "grass", "water", "horse", "car", "street", "mountain", "field", "pool",
    "skateboard", "soccer", "football", "rock", "tree", "bench", "boat", "hat", "sand", "ocean", "river", "ice",
    "fence", "basketball", "guitar", "motorcycle", "helmet", "bicycle", "building", "crowd", "girl", "boy", "woman",
    "child", "baby", "swing", "slide", "camera", "lake", "road", "wall", "toy", "stick",
]  # fmt: skip


def small_copies(path: Path) -> dict[str, bytes]:
    """The bytes of the files of an archive by name."""
    with tarfile.open(path) as archive:
        files = {Path(m.name).name: archive.extractfile(m) for m in archive if m.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


def recalls(distance: torch.Tensor) -> dict[str, float]:
    """Recall@1 and @10 of a square matrix whose diagonal is right."""
    rank = (distance < distance.diagonal().unsqueeze(1)).sum(1)
    return {f"recall@{k}": float((rank < k).double().mean()) for k in (1, 10)}


def mean_and_deviation(found: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and standard deviation over draws."""
    return {key: [float(f([one[key] for one in found])) for f in (np.mean, np.std)] for key in found[0]}


class Split:
    """The photographs of a split with their captions, embedded."""

    def __init__(self, folder: Path, name: str) -> None:
        images = json.loads((folder / "dataset_flickr8k.json").read_text("utf-8"))["images"]
        rows = [i for i, image in enumerate(images) if image["split"] == name]
        self.files = [images[i]["filename"] for i in rows]
        self.captions = [[sentence["raw"] for sentence in images[i]["sentences"]] for i in rows]
        self.stems = [[set(word_stems(caption)) for caption in own] for own in self.captions]
        self.model = load("small")
        full = np.load(folder / "efflite0_224_fp16.npy")[rows]
        self.images = self.model.model.image.embed(
            RaggedStore(full, np.arange(len(rows)), np.ones(len(rows), np.int64))
        ).tensors()
        vectors = torch.from_numpy(np.load(folder / "minilm_l6_v2_fp16.npy").astype(np.float32))
        self.vectors = torch.nn.functional.normalize(vectors, dim=1).view(len(images), 5, -1)[rows]

    def collection(self, folder: Path, index: list[int], captioned: set[int]) -> GaussianCollection:
        """Some photographs as a collection; those captioned have their first four captions."""
        store = GaussianCollection.create(
            folder,
            d=self.images.d,
            calibration=self.model.calibration,
            metadata={"calibrated": True, "run": "small"},
            texts=True,
        )
        payloads = [{"captions": "\n".join(self.captions[i][:4])} if i in captioned else {} for i in index]
        store.upsert(self.images[torch.tensor(index)], [str(i) for i in index], payloads=payloads)
        return store

    def search(self, gallery: GaussianCollection, queries: list[str], k: int) -> list[list[int]]:
        """The hits of texts, as `sfumato search` finds them."""
        answers = gallery.search(self.model.embed_texts(queries), k, about=QueryInfo.of_texts(queries))
        return [[int(hit.id) for hit in answer] for answer in answers]

    def fifth(self, index: list[int]) -> list[str]:
        """The fifth captions of some photographs."""
        return [self.captions[i][4] for i in index]

    def words(self, index: list[int], seed: int) -> tuple[list[str], list[set[int]]]:
        """Words, and the photographs that mention each."""
        fitting = {word: {i for i in index if any(says(c, word_stems(word)) for c in self.stems[i])} for word in WORDS}
        known = [word for word, found in fitting.items() if 5 <= len(found) <= 100]
        chosen = random.Random(seed).sample(known, min(30, len(known)))
        return chosen, [fitting[word] for word in chosen]


def found(hits: list[list[int]], wanted: list[int]) -> dict[str, float]:
    """Recall@1 and @10."""
    pairs = list(zip(hits, wanted, strict=True))
    return {f"recall@{k}": sum(i in own[:k] for own, i in pairs) / len(pairs) for k in (1, 10)}


def precision(hits: list[list[int]], right: list[set[int]]) -> dict[str, float]:
    """P@10 as a fraction of what can be reached."""
    return {
        "p@10": float(np.mean([len(own & set(h[:10])) / min(10, len(own)) for h, own in zip(hits, right, strict=True)]))
    }


def by_captions(data: Split, index: list[int], queries: list[str], vectors: torch.Tensor) -> dict[str, list[list[int]]]:
    """The cheapest things that a user could do with the captions instead."""
    import bm25s

    cosine = torch.einsum("qd,ncd->qnc", vectors, data.vectors[index, :4])
    minilm = (cosine.amax(2) + cosine.mean(2)).argsort(1, descending=True).tolist()
    engine = bm25s.BM25()
    engine.index([[s for c in data.stems[i][:4] for s in c] for i in index], show_progress=False)
    bm25 = [np.argsort(-engine.get_scores(word_stems(query)), kind="stable").tolist() for query in queries]
    fused = []
    for a, b in zip(minilm, bm25, strict=True):
        score = np.zeros(len(index))
        for ranking in (a, b):
            score[ranking] += 1 / (60 + np.arange(1, len(index) + 1))
        fused.append(np.argsort(-score, kind="stable").tolist())
    named = {"captions by MiniLM, maximum + mean": minilm, "captions by BM25": bm25, "reciprocal-rank fusion": fused}
    return {name: [[index[j] for j in row[:10]] for row in ranked] for name, ranked in named.items()}


def through_collections(data: Split, folder: Path) -> dict[str, Any]:
    """What a user meets: photographs with captions, without, and added ones, through a collection."""
    rows: dict[str, list[dict[str, float]]] = {}

    def add(name: str, figures: dict[str, float]) -> None:
        rows.setdefault(name, []).append(figures)

    for seed in range(DRAWS):
        drawn = random.Random(seed).sample(range(len(data.files)), 440)
        own, new = drawn[:400], drawn[400:]
        words = data.words(own, seed)
        for name, captioned in (("with captions", set(own)), ("without captions", set())):
            with data.collection(folder / f"{seed} {name}", own, captioned) as gallery:
                add(f"400 {name}", found(data.search(gallery, data.fifth(own), 10), own))
                add(f"words {name}", precision(data.search(gallery, words[0], 10), words[1]))
        for name, captioned in (("with captions", set(drawn)), ("without captions", set(own))):
            with data.collection(folder / f"{seed} added {name}", drawn, captioned) as gallery:
                add(f"40 added {name}", found(data.search(gallery, data.fifth(new), 10), new))
                add(f"400 beside 40 added {name}", found(data.search(gallery, data.fifth(own), 10), own))
        for name, hits in by_captions(data, own, data.fifth(own), data.vectors[own, 4]).items():
            add(f"400, {name}", found(hits, own))
        for name, hits in by_captions(data, own, words[0], torch.from_numpy(sentence_vectors(words[0]))).items():
            add(f"words, {name}", precision(hits, words[1]))
    everything = list(range(len(data.files)))
    queries = [own[4] for own in data.captions]
    for name, captioned in (("with captions", set(everything)), ("without captions", set())):
        with data.collection(folder / f"all {name}", everything, captioned) as gallery:
            add(f"1,000 {name}", found(data.search(gallery, queries, 10), everything))
    for name, hits in by_captions(data, everything, queries, data.vectors[:, 4]).items():
        add(f"1,000, {name}", found(hits, everything))
    return {name: mean_and_deviation(figures) for name, figures in rows.items()}


def split_arguments(description: str | None) -> argparse.Namespace:
    """The arguments of a benchmark on a split of Flickr8k."""
    parser = command_parser(description)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("--split", default="test")
    return parser.parse_args()


def main() -> None:
    given = split_arguments(__doc__)
    data = Split(given.flickr8k, given.split)
    copies = small_copies(given.flickr8k / "images_128.tar")
    queries, rows = data.model.embed_texts([own[4] for own in data.captions]).tensors(), range(len(data.files))
    csd, result = get_distance("csd").matrix, dict[str, Any]()
    small = csd(queries, data.model.embed_images([copies[name] for name in data.files]).tensors())
    draws = [random.Random(seed).sample(rows, 400) for seed in range(DRAWS)]
    result["small, copies of 128 pixels, by distance alone"] = {
        "400": mean_and_deviation([recalls(small[draw][:, draw]) for draw in draws]), "1000": recalls(small),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result |= through_collections(data, Path(folder))
    for name, figures in result.items():
        print(name, json.dumps(figures))
    write_json(given.json, result)


if __name__ == "__main__":
    main()
