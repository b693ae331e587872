"""Fit the constants of target "fits" (src/sfumato/calibration/fits.py), and say how well they hold.

    python benchmarks/fits_prior.py FLICKR8K JUDGEMENTS [--json FILE]

FLICKR8K holds dataset_flickr8k.json, efflite0_224_fp16.npy (n, 1280) and minilm_l6_v2_fp16.npy (5 n, 384). JUDGEMENTS
holds crowd.csv: image, caption_id, yes, no (Hodosh, Young and Hockenmaier 2013). Sentences: people's verdicts on the
pairs of half of the judged captions, against the photographs' own captions without the judged one. Words: drawn from
the captions of three draws of 400 validation photographs, and words that none of these has; a photograph fits a word
that one of its five captions mentions, and has four captions in the index. Both count alike. The other halves say how
well the constants hold. The hits are those of all judged captions among all photographs, by the constants of the
package.
"""

import argparse
import csv
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato import load
from sfumato.calibration.fits import Evidence, fits_logit
from sfumato.calibration.platt import fit_logistic
from sfumato.distances import get_distance
from sfumato.encoders.features import RaggedStore
from sfumato.encoders.minilm import sentence_vectors
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.gallery import REFERENCE_SIZE, Scorer
from sfumato.search.texts import ItemTexts, word_stems


class Photographs:
    """A split of Flickr8k, embedded by the model small."""

    def __init__(self, folder: Path, split: str) -> None:
        images = json.loads((folder / "dataset_flickr8k.json").read_text("utf-8"))["images"]
        rows = [i for i, image in enumerate(images) if image["split"] == split]
        self.model = load("small")
        self.names = [images[i]["filename"] for i in rows]
        self.captions = [[sentence["raw"] for sentence in images[i]["sentences"]] for i in rows]
        store = RaggedStore(
            np.load(folder / "efflite0_224_fp16.npy")[rows], np.arange(len(rows)), np.ones(len(rows), np.int64)
        )
        self.images: GaussianEmbedding = self.model.model.image.embed(store)
        means = torch.from_numpy(np.load(folder / "minilm_l6_v2_fp16.npy").astype(np.float32)).view(len(images), 5, -1)
        self.vectors = torch.nn.functional.normalize(means, dim=2)[rows]  # (n, 5, 384)

    def texts(self, kept: list[list[int]], index: list[int]) -> ItemTexts:
        """The texts of some photographs: of photograph index[k] its captions kept[k]."""
        mean = torch.stack([self.vectors[i, own].mean(0) for i, own in zip(index, kept, strict=True)])
        payloads = [
            {"captions": "\n".join(self.captions[i][c] for c in own)} for i, own in zip(index, kept, strict=True)
        ]
        return ItemTexts.of(torch.nn.functional.normalize(mean, dim=1), payloads)

    def evidence(self, items: ItemTexts, index: list[int], queries: list[str], vectors: Tensor) -> Evidence:
        """Of queries and some photographs."""
        calibration = self.model.calibration
        assert calibration is not None
        scorer = Scorer(calibration.logit_scale, calibration.logit_bias, calibration)
        distance = get_distance("csd").matrix(self.model.embed_texts(queries), self.images[torch.tensor(index)])
        return items.evidence(queries, vectors, scorer.pair_logit(distance, REFERENCE_SIZE))


def judged(data: Photographs, path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """(q, n, 4) features of the judged captions, (q, n) fractions of yes, nan where nobody judged, (q,) own images."""
    place, everything = {name: i for i, name in enumerate(data.names)}, list(range(len(data.names)))
    pairs = [pair for pair in csv.DictReader(path.open(encoding="utf-8")) if pair["image"] in place]
    asked = sorted({pair["caption_id"] for pair in pairs if pair["caption_id"].split("#")[0] in place})
    number, yes = {one: q for q, one in enumerate(asked)}, torch.full((len(asked), len(everything)), torch.nan)
    for pair in pairs:
        if pair["caption_id"] in number:
            n_yes, n_no = int(pair["yes"]), int(pair["no"])
            yes[number[pair["caption_id"]], place[pair["image"]]] = n_yes / (n_yes + n_no)
    owner = [(place[one.split("#")[0]], int(one.split("#")[1])) for one in asked]
    queries, vectors = [data.captions[i][c] for i, c in owner], torch.stack([data.vectors[i, c] for i, c in owner])
    items = data.texts([list(range(5))] * len(everything), everything)
    features = data.evidence(items, everything, queries, vectors).features()
    for q, (i, c) in enumerate(owner):  # Its own caption is left out.
        own = data.texts([[k for k in range(5) if k != c]], [i])
        image = features[q : q + 1, i : i + 1, 1]
        features[q, i] = own.evidence([queries[q]], vectors[q : q + 1], image, items.rarity).features()[0, 0]
    return features, yes, torch.tensor([i for i, _ in owner])


def pairs_of(features: Tensor, yes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(k, 4) features of the judged pairs, (k,) fractions of yes and (k,) numbers of the captions."""
    query, image = (~yes.isnan()).nonzero(as_tuple=True)
    return features[query, image], yes[query, image].double(), query


def hits(features: Tensor, yes: Tensor, own: Tensor, k: int) -> dict[str, dict[str, float]]:
    """What is said beside the first k hits, and what people said; the own image of a caption counts as yes."""
    yes = yes.scatter(1, own.unsqueeze(1), 1.0)
    n_words, result = 1 / features[:, 0, 3], {}
    for name, agreement, words in (
        ("with texts", features[..., 0], features[..., 2]),
        ("without texts", torch.full_like(yes, torch.nan), torch.zeros_like(yes)),
    ):
        logit, place = fits_logit(Evidence(features[..., 1], agreement, words, n_words)).topk(k, dim=1)
        verdict = yes.gather(1, place)
        known = ~verdict.isnan()
        found = quality(logit.sigmoid()[known].double(), verdict[known].double())
        result[name] = {"judged": float(known.double().mean()), **found}
    return result


def mentioned(data: Photographs, seeds: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """The same of single words: whether a caption mentions them."""
    features, match, number = [], [], []
    for seed in range(seeds):
        draw = random.Random(seed).sample(range(len(data.names)), 400)
        stems = [{stem for caption in data.captions[i] for stem in word_stems(caption)} for i in draw]
        words = {word for own in data.captions for caption in own for word in re.findall("[a-z]{3,}", caption.lower())}
        count = {word: sum(word_stems(word)[0] in own for own in stems) for word in sorted(words)}
        there, absent = (
            [w for w, n in count.items() if wanted(n)] for wanted in (lambda n: 3 <= n <= 150, lambda n: not n)
        )
        queries = random.Random(seed).sample(there, 150) + random.Random(seed).sample(absent, 40)
        items = data.texts([list(range(4))] * len(draw), draw)
        features.append(data.evidence(items, draw, queries, sentence_vectors(queries)).features().flatten(0, 1))
        match.append(
            torch.tensor([[float(word_stems(q)[0] in own) for own in stems] for q in queries]).flatten().double()
        )
        number.append(torch.arange(len(queries)).repeat_interleave(len(draw)) + 1_000 * seed)
    return torch.cat(features), torch.cat(match), torch.cat(number)


def first_half(number: Tensor) -> Tensor:
    """The rows of a random half of the queries."""
    distinct = number.unique()
    chosen = distinct[torch.from_numpy(np.random.default_rng(0).permutation(len(distinct))[: len(distinct) // 2])]
    return torch.isin(number, chosen)


def quality(probability: Tensor, match: Tensor) -> dict[str, float]:
    """Mean, rate, calibration error in ten equally full bins, and AUROC of more than half of the people."""
    bins = torch.tensor_split(probability.argsort(), 10)
    error = sum(float((probability[b].mean() - match[b].mean()).abs()) * len(b) for b in bins) / len(match)
    positive, order = match > 0.5, probability.argsort().argsort().double()
    n, rest = int(positive.sum()), int((~positive).sum())
    auroc = (float(order[positive].sum()) - n * (n - 1) / 2) / (n * rest)
    return {"said": float(probability.mean()), "right": float(match.mean()), "error": error, "auroc": auroc}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flickr8k", type=Path)
    parser.add_argument("judgements", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    features, yes, own = judged(Photographs(given.flickr8k, "test"), given.judgements / "crowd.csv")
    sets = {"sentences": pairs_of(features, yes)}
    sets["words"] = mentioned(Photographs(given.flickr8k, "val"))
    result: dict[str, Any] = {}
    for name, columns in {"with texts": [0, 1, 2, 3], "without texts": [1, 3]}.items():
        parts = [(f[half][:, columns], y[half], torch.full((int(half.sum()),), 1.0 / float(half.sum())))
                 for f, y, number in sets.values() for half in [first_half(number)]]  # fmt: skip
        weight, bias = fit_logistic(*(torch.cat(c) for c in list(zip(*parts, strict=True))[:2]),
                                    weight=torch.cat([part[2] for part in parts]))  # fmt: skip
        result[name] = {"weights": [round(float(w), 2) for w in weight], "bias": round(bias, 2)}
        for kind, (f, y, number) in sets.items():
            rest = ~first_half(number)
            result[name][kind] = quality(torch.sigmoid(f[rest][:, columns].double() @ weight + bias), y[rest])
        print(name, json.dumps(result[name]))
    for k in (1, 10):
        result[f"hits 1 to {k}"] = hits(features, yes, own, k)
        print("hits 1 to", k, json.dumps(result[f"hits 1 to {k}"]))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
