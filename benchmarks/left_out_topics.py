"""Fit the constants of target "fits" for images without texts on topics that the model has not seen, and test them.

    python benchmarks/left_out_topics.py train FLICKR8K TEXTS WORK      five models, each without a fifth of the topics
    python benchmarks/left_out_topics.py fit FLICKR8K TEXTS WORK [--write]
    python benchmarks/left_out_topics.py coco FOLDER CAPTIONS           the packaged constants on COCO's photographs

FLICKR8K as for fits_prior.py; TEXTS is the texts.npy of scripts/make_small.py. Topics are 25 clusters of the mean
vectors of a photograph's captions. Galleries have 100, 400 and 1,000 photographs, half of topics that were left out,
half of the validation split's others. A third of the weight have sentences that describe another photograph, and words
that no caption says. A sentence fits a photograph with the probability that its
captions give (logistic of maximum and mean of MiniLM's cosines, fitted on people's verdicts). Models whose validation
RSUM stays below 200 are left out. FOLDER holds annotations/captions_*.json and COCO's photographs; CAPTIONS is a file
with a caption of other photographs of COCO a line.
"""

import argparse
import json
import random
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fits_prior import fitted, grams, quality, shuffled

import sfumato
from sfumato.arrays import as_numpy, sigmoid
from sfumato.calibration import fits
from sfumato.calibration.calibrator import Scorer
from sfumato.distances import get_distance
from sfumato.encoders.backbones import text_backbone
from sfumato.encoders.encoder_protocol import RaggedStore
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import load_model
from sfumato.search.answer import LINE, QueryInfo
from sfumato.search.candidates import REFERENCE_SIZE
from sfumato.search.collection import GaussianCollection
from sfumato.search.texts import is_close, says, word_stems
from sfumato.training.loop import fit as train

FOLDS, LEAST_RSUM = 5, 200
SIZES = ((100, 5), (400, 3), (1000, 1))
"""Photographs of a gallery, and number of galleries."""

QUERIES, WORDS = 60, 60
ABSENT = 1 / 3
"""Weight of queries that mean nothing in the gallery."""


def fitting(queries: np.ndarray, captions: np.ndarray) -> np.ndarray:
    """(q, n) probability that a person calls sentences right. queries (q, 384), captions (n, c, 384)."""
    cosine = np.einsum("qd,ncd->qnc", queries, captions)
    return np.asarray(1 / (1 + np.exp(-(6.48 * cosine.max(2) + 6.58 * cosine.mean(2) - 7.97))))


def fold_of_topics(mean: np.ndarray) -> np.ndarray:
    """(n,) folds of 25 topics, spherical k-means, of about equal size. mean (n, 384) of captions."""

    def unit(rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))

    points, random = unit(mean - mean.mean(0)), np.random.default_rng(0)
    centres = points[random.choice(len(points), 25, replace=False)]
    for _ in range(50):
        topic = (points @ centres.T).argmax(1)
        centres = unit(np.stack([points[topic == k].mean(0) for k in range(25)]))
    size, fold, held = np.bincount(topic, minlength=25), np.zeros(25, int), np.zeros(FOLDS)
    for k in np.argsort(-size):
        fold[k] = held.argmin()
        held[fold[k]] += size[k]
    return np.asarray(fold[topic])


class Data:
    """Flickr8k with its topics."""

    def __init__(self, folder: Path, texts: Path) -> None:
        self.folder, self.texts = folder, texts
        self.listed = json.loads((folder / "dataset_flickr8k.json").read_text("utf-8"))["images"]
        self.split = np.array([image["split"] for image in self.listed])
        self.captions = [[sentence["raw"] for sentence in image["sentences"]] for image in self.listed]
        vectors = np.load(folder / "minilm_l6_v2_fp16.npy").astype(np.float32).reshape(len(self.listed), 5, -1)
        self.vectors = vectors / np.linalg.norm(vectors, axis=2, keepdims=True)
        self.fold = fold_of_topics(self.vectors.mean(1))
        self.stems = [set[str]().union(*map(word_stems, own)) for own in self.captions]

    def train(self, work: Path, fold: int) -> None:
        """The model of a fold."""
        work.mkdir(parents=True, exist_ok=True)
        pairs = work / f"flickr8k-{fold}.json"
        gone = (self.fold == fold) & (self.split != "test")
        images = [
            image | {"split": "left out" if g else image["split"]} for image, g in zip(self.listed, gone, strict=True)
        ]
        pairs.write_text(json.dumps({"images": images}), encoding="utf-8")
        given = [
            f"data.images={self.folder / 'efflite0_224_fp16.npy'}",
            f"data.texts={self.texts}",
            f"data.path={pairs}",
        ]
        train(load_recipe(find_recipe("small"), [*given, "train.seed=0"]), work / f"run-{fold}")


def features(values: np.ndarray) -> RaggedStore:
    return RaggedStore(np.ascontiguousarray(values), np.arange(len(values)), np.ones(len(values), np.int64))


class Lists:
    """Queries of one length against a gallery without texts."""

    def __init__(
        self, texts: list[str], vectors: np.ndarray, logit: np.ndarray, yes: np.ndarray, there: np.ndarray
    ) -> None:
        self.image, self.yes, self.there = logit.astype(np.float64), yes, there
        self.n_words = np.array([max(1, len(word_stems(text))) for text in texts])
        calibration = fits.FitsCalibration.packaged()
        self.prior, self.near = calibration.query_prior(vectors), calibration.nearness(vectors)

    def weights(self, shape: tuple[int, ...]) -> np.ndarray:
        """Of hits by rank, so that absent queries have their part."""
        part = np.where(self.there, (1 - ABSENT) / self.there.sum(), ABSENT / (~self.there).sum())
        return np.broadcast_to(part[:, None] / np.arange(1, shape[1] + 1), shape)

    def pairs(self) -> np.ndarray:
        by_query = np.stack([1 / self.n_words, self.prior], 1)[:, None]
        return np.concatenate([self.image[..., None], np.broadcast_to(by_query, (*self.image.shape, 2))], 2)

    def hits(self, pair: np.ndarray) -> np.ndarray:
        """(q, k) places of the best."""
        return np.argsort(-pair, axis=1)[:, : fits.N_NEAR]

    def listed(self, pair: np.ndarray) -> np.ndarray:
        near = np.take_along_axis(pair, self.hits(pair), 1)
        return np.column_stack([fits.list_features(near, self.n_words, self.prior), self.near])


def lists_of(data: Data, work: Path, fold: int) -> dict[int, list[Lists]]:
    """By number of words, the lists of a fold's model."""
    model = load_model(work / f"run-{fold}")
    assert model.calibration is not None
    scorer = Scorer(model.calibration.logit_scale, model.calibration.logit_bias, model.calibration)
    new = np.flatnonzero((data.fold == fold) & (data.split != "test"))
    old = np.flatnonzero((data.fold != fold) & (data.split == "val"))
    texts, images = (np.load(path, mmap_mode="r") for path in (data.texts, data.folder / "efflite0_224_fp16.npy"))

    def logits(gallery: Any, rows: np.ndarray) -> np.ndarray:
        distance = get_distance("csd").matrix(model.model.text.embed(features(rows)).tensors(), gallery)
        return as_numpy(scorer.pair_logit(distance, REFERENCE_SIZE))

    drawn, backbone = random.Random(fold), text_backbone("minilm-l6-v2", pooled=True, layers=(0, 2, 4, 6))
    known = {n: Counter(g for i in (*new, *old) for c in data.captions[i] for g in grams(c, n)) for n in (1, 2)}
    found: dict[int, list[Lists]] = {1: [], 2: [], 3: []}
    for size, galleries in SIZES:
        for seed in range(galleries):
            own = [i for part in (new, old) for i in drawn.sample(part.tolist(), min(size // 2, len(part)))]
            rest = sorted({*new.tolist(), *old.tolist()} - {*own})
            embedded = model.model.image.embed(features(images[own])).tensors()

            asked = [
                i
                for of in (own, rest)
                for part in (new, old)
                for i in drawn.sample(sorted({*of} & {*part.tolist()}), QUERIES // 2)
            ]
            yes = fitting(data.vectors[asked, 4], data.vectors[own])
            there = np.array([i in own for i in asked])
            yes[there, [own.index(i) for i in np.array(asked)[there]]] = 1
            rows = texts[[5 * i + 4 for i in asked]]
            found[3].append(
                Lists([data.captions[i][4] for i in asked], data.vectors[asked, 4], logits(embedded, rows), yes, there)
            )
            for n, words in known.items():
                shown, none = dict[str, list[bool]](), dict[str, list[bool]]()
                for word in shuffled(words, 100 * fold + seed):
                    stems = word_stems(word)
                    here = [
                        says(data.stems[i], stems) and any(is_close(stems, c) for c in data.captions[i]) for i in own
                    ]
                    if (into := shown if any(here) else none) is shown or len(none) < WORDS // 2:
                        into[word] = here
                    if len(shown) >= WORDS:
                        break
                both = shown | none
                rows = np.concatenate(backbone(list(both))).astype(np.float16)
                yes = np.array(list(both.values()), float)
                found[n].append(
                    Lists(list(both), sentence_vectors(list(both)), logits(embedded, rows), yes, yes.max(1) > 0)
                )
    return found


def fit(some: list[Lists]) -> tuple[Any, Any]:
    """pair_without and hit_without."""
    rows = [
        (x.pairs().reshape(-1, 3), x.yes.ravel(), np.repeat(x.weights((len(x.yes), 1)), x.yes.shape[1])) for x in some
    ]
    pair, hits = fitted(rows), list[Any]()
    for x in some:
        logit = pair.of(x.image, x.pairs()[..., 1:])
        place = x.hits(logit)
        of_list = np.broadcast_to(x.listed(logit)[:, None], (*place.shape, 6))
        columns = np.concatenate([np.take_along_axis(logit, place, 1)[..., None], of_list], 2)
        hits.append(
            (columns.reshape(-1, 7), np.take_along_axis(x.yes, place, 1).ravel(), x.weights(place.shape).ravel())
        )
    return pair, fitted(hits)


def first_hits(pair: Any, hit: Any, some: list[Lists]) -> dict[str, Any]:
    """What is said of first hits, and what is right."""
    found = dict[str, list[np.ndarray]]()
    for x in some:
        logit = pair.of(x.image, x.pairs()[..., 1:])
        of_list = x.listed(logit)[:, None, : len(hit.weights)]
        p, best = sigmoid(hit.of(logit, of_list)), logit.argmax(1)[:, None]
        one = np.column_stack([np.take_along_axis(values, best, 1)[:, 0] for values in (p, x.yes)])
        for name, rows in (("describes", x.there), ("something else", ~x.there), ("both", x.there | True)):
            found.setdefault(name, []).append(one[rows])
    return {name: summary(np.concatenate(parts)) for name, parts in found.items()}


def summary(first: np.ndarray) -> dict[str, float]:
    p, y = (torch.from_numpy(column) for column in first.T)
    sure = quality(p, y)
    above = p >= LINE
    return {key: round(sure[key], 3) for key in ("n", "said", "right", "error", "auroc")} | {
        "one half": round(float(above.double().mean()), 3), "right of them": round(float(y[above].mean()), 3)
    }  # fmt: skip


def refit(data: Data, work: Path, write: bool) -> dict[str, Any]:
    """Cross-fitted figures over folds; with write the constants and the captions of the package."""
    place = Path(fits.__file__).parent
    if write:
        of_train = data.vectors[data.split == "train"].reshape(-1, 384)
        kept = of_train[np.random.default_rng(0).permutation(len(of_train))[:2000]]
        np.save(place / "captions.npy", np.round(kept * 127 / np.abs(kept).max()).astype(np.int8))
    good = [f for f in range(FOLDS) if rsum(work / f"run-{f}") >= LEAST_RSUM]
    by_fold, packaged = {f: lists_of(data, work, f) for f in good}, fits.FitsCalibration.packaged()
    result: dict[str, Any] = {"folds": good}
    lengths = list(packaged.lengths)
    for n in fits.LENGTHS:
        every = [x for f in good for x in by_fold[f][n]]
        old = lengths[n - 1]
        result[f"{n}, before"] = first_hits(old.pair_without, old.hit_without, every)
        own = [first_hits(*fit([x for g in good if g != f for x in by_fold[g][n]]), by_fold[f][n]) for f in good]
        result[f"{n}, fitted on other folds"] = own
        pair, hit = fit(every)
        lengths[n - 1] = replace(old, pair_without=pair, hit_without=hit)
    if write:
        found = asdict(replace(packaged, lengths=tuple(lengths)))
        (place / "fits.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return result


def rsum(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    return max(100 * float(line.get("val/rsum", 0)) for line in lines)


def coco(folder: Path, others: Path) -> dict[str, Any]:
    """Sentences that describe one of COCO's photographs, and others, asked of the photographs without captions."""
    own: dict[str, list[str]] = {}
    for path in sorted(folder.glob("annotations/captions_*.json")):
        for one in json.loads(path.read_text("utf-8"))["annotations"]:
            own.setdefault(f"{one['image_id']:012d}.jpg", []).append(one["caption"])
    paths = sorted(path for path in folder.rglob("*.jpg") if path.name in own)
    captions = [own[path.name][:5] for path in paths]
    known = {caption for some in captions for caption in some}
    apart = [line for line in others.read_text("utf-8").splitlines() if line not in known]
    queries = [c for some in captions for c in some] + random.Random(0).sample(apart, 600)
    vectors = sentence_vectors(queries)
    flat = vectors[: len(queries) - 600].reshape(len(paths), 5, -1)
    yes = fitting(vectors, flat)
    yes[np.arange(len(queries) - 600), np.repeat(np.arange(len(paths)), 5)] = 1
    model, column = sfumato.load("small"), {path.name: i for i, path in enumerate(paths)}
    assert model.calibration is not None
    with tempfile.TemporaryDirectory() as temporary:
        images = model.embed_images(paths)
        store = GaussianCollection.create(
            Path(temporary) / "index",
            d=images.d,
            calibration=model.calibration,
            metadata={"calibrated": True},
            texts=True,
        )
        with store:
            store.upsert(images, [path.name for path in paths])
            answers = store.search(model.embed_texts(queries), 10, about=QueryInfo.of_texts(queries))
    first = np.array([[a[0].match_probability, yes[q, column[a[0].id]]] for q, a in enumerate(answers)])
    kinds = [a.verdict.kind if a.verdict else "" for a in answers]
    n, expected = len(queries) - 600, np.array([a.expected_matches for a in answers])
    result: dict[str, Any] = {}
    for name, rows in (("describes", slice(n)), ("something else", slice(n, None)), ("both", slice(100, None))):
        result[name] = summary(first[rows]) | {
            "expected over true": round(float(expected[rows].sum() / yes[rows].sum()), 3),
            "few or many": round(float(np.isin(kinds[rows], ["few", "many"]).mean()), 3),
            "nothing": round(float(np.mean([kind == "nothing" for kind in kinds[rows]])), 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "fit", "coco"))
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.what == "coco":
        print(json.dumps(coco(*given.paths), indent=1))
        return
    folder, texts, work = given.paths
    data = Data(folder, texts)
    if given.what == "fit":
        print(json.dumps(refit(data, work, given.write), indent=1))
    for fold in range(FOLDS) if given.what == "train" else ():
        data.train(work, fold)


if __name__ == "__main__":
    main()
