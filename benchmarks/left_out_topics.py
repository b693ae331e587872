"""Fit the constants of target "fits" for photographs without texts on topics that `small` has not seen, and test them.

    python benchmarks/left_out_topics.py train FLICKR8K TEXTS WORK [--seed N] [--recipe NAME]   five models, each
        without some topics
    python benchmarks/left_out_topics.py fit FLICKR8K TEXTS WORK [--write]
    python benchmarks/left_out_topics.py coco FOLDER CAPTIONS           the packaged constants on COCO's photographs

FLICKR8K as for fits_prior.py; TEXTS is the texts.npy of scripts/make_small.py; for the recipe embeddings it is
minilm_l6_v2_fp16.npy of FLICKR8K. Topics are 25 clusters of the mean
vectors of a photograph's captions. Galleries have 100, 400 and 1,000 photographs, half of topics that were left out,
half of the validation split's others, with captions for none or a part. Sentences describe a photograph of the gallery
or, with a third of the weight, another one. A sentence fits a photograph with the probability that its captions give
(logistic of maximum and mean of MiniLM's cosines, fitted on people's verdicts). FOLDER holds COCO's photographs and
annotations/captions_*.json; CAPTIONS is a file with a caption of other photographs a line.
"""

import argparse
import functools
import json
import random
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fits_prior import fitted, quality
from people import words

import sfumato
from sfumato.arrays import as_numpy, sigmoid
from sfumato.calibration import fits
from sfumato.calibration.calibrator import Scorer
from sfumato.calibration.logits import LinearLogit, Rows
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import RaggedStore
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.files import RECIPE
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import load_model
from sfumato.search.answer import LINE, Answer, QueryInfo
from sfumato.search.candidates import REFERENCE_SIZE
from sfumato.search.collection import GaussianCollection
from sfumato.search.texts import ItemTexts, says, word_stems
from sfumato.training.loop import fit as train

FOLDS = 5
SIZES = ((100, 5), (400, 3), (1000, 1))
"""Photographs of a gallery, and number of galleries."""

QUERIES = 60
"""Sentences of each of four kinds: of topics left out or not, describing a photograph of the gallery or not."""

TEXTS = ((0, 0), (0.5, 1), (0.5, 4), (0.9, 1), (0.9, 4))
"""Fractions of the photographs that have texts, and numbers of captions of each."""

PACKAGED = fits.FitsCalibration.packaged()
CONSTANTS = PACKAGED.of(3)

NOUNS = [
    "cat", "dog", "horse", "train", "bus", "car", "truck", "boat", "pizza", "cake", "sandwich", "banana", "toilet",
    "sink", "kitchen", "bathroom", "bed", "bedroom", "couch", "chair", "table", "laptop", "computer", "phone",
    "clock", "vase", "flower", "bird", "elephant", "giraffe", "zebra", "bear", "cow", "sheep", "kite", "surfboard",
    "skateboard", "snowboard", "ski", "tennis", "baseball", "frisbee", "umbrella", "bench", "street", "sign", "beach",
    "snow", "grass", "woman", "man", "child", "boy", "girl", "people", "food", "plate", "window", "bicycle",
    "motorcycle", "airplane", "tree", "water",
]  # fmt: skip
"""Words for what photographs of COCO show."""

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

    def train(self, work: Path, fold: int, seed: int, recipe: str) -> None:
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
        train(load_recipe(find_recipe(recipe), [*given, f"train.seed={seed}"]), work / f"run-{fold}")


def features(values: np.ndarray) -> RaggedStore:
    return RaggedStore(np.ascontiguousarray(values), np.arange(len(values)), np.ones(len(values), np.int64))


class Lists:
    """Sentences against a gallery: logits of pairs, what lists say, which items have texts, and what is right."""

    def __init__(self, evidence: fits.Evidence, near: np.ndarray, yes: np.ndarray, there: np.ndarray) -> None:
        self.pair, self.has, self.yes, self.there = CONSTANTS.of_pairs(evidence), evidence.has_texts, yes, there
        best = -np.sort(-self.pair, axis=1)[:, : fits.N_NEAR]
        self.listed = np.column_stack([fits.list_features(best, evidence.n_words, evidence.prior), near])


def kept_captions(data: Data, fold: int | None) -> np.ndarray:
    """2,000 captions of the photographs that a model was trained on, of all or without a fold's topics."""
    of_train = data.vectors[(data.split == "train") & (data.fold != fold)].reshape(-1, 384)
    return np.asarray(of_train[np.random.default_rng(0).permutation(len(of_train))[:2000]])


def lists_of(data: Data, work: Path, fold: int) -> list[Lists]:
    """The lists of a fold's model."""
    model = load_model(work / f"run-{fold}")
    assert model.calibration is not None
    scorer = Scorer(model.calibration.logit_scale, model.calibration.logit_bias, model.calibration)
    new = np.flatnonzero((data.fold == fold) & (data.split != "test")).tolist()
    old = np.flatnonzero((data.fold != fold) & (data.split == "val")).tolist()
    texts, images = (np.load(path, mmap_mode="r") for path in (data.texts, data.folder / "efflite0_224_fp16.npy"))
    drawn, found, known = random.Random(fold), list[Lists](), kept_captions(data, fold)
    for size in (size for size, galleries in SIZES for _ in range(galleries)):
        own = [i for part in (new, old) for i in drawn.sample(part, min(size // 2, len(part)))]
        rest = sorted({*new, *old} - {*own})
        parts = [sorted({*of} & {*part}) for of in (own, rest) for part in (new, old)]
        asked = [i for part in parts for i in drawn.sample(part, min(QUERIES, len(part)))]
        yes, there = fitting(data.vectors[asked, 4], data.vectors[own]), np.array([i in own for i in asked])
        yes[there, [own.index(i) for i in np.array(asked)[there]]] = 1
        queries = model.model.text.embed(features(texts[[5 * i + 4 for i in asked]])).tensors()
        gallery = model.model.image.embed(features(images[own])).tensors()
        image = scorer.pair_logit(get_distance("csd").matrix(queries, gallery), REFERENCE_SIZE)
        sentences, vectors = [data.captions[i][4] for i in asked], data.vectors[asked, 4]
        prior, near = PACKAGED.query_prior(vectors), -np.sort(-vectors @ known.T)[:, : fits.N_CLOSE].mean(1)
        for fraction, n in TEXTS:
            has = np.isin(range(len(own)), drawn.sample(range(len(own)), round(fraction * len(own))))
            items = texts_of(data, own, has, n)
            evidence = items.evidence(sentences, vectors, as_numpy(image), prior, items.rarity)
            found.append(Lists(evidence, near, yes, there))
    return found


def texts_of(data: Data, own: list[int], has: np.ndarray, n: int) -> ItemTexts:
    """The first n captions of some of the photographs."""
    mean = data.vectors[own, :n].sum(1)
    mean = np.where(has[:, None], mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-9), 0)
    captions = ["\n".join(data.captions[i][:n]) for i in own]
    return ItemTexts.of(mean, [{"captions": c} if h else {} for c, h in zip(captions, has, strict=True)])


def fit(some: list[Lists]) -> LinearLogit:
    """hit_bare."""
    rows: list[Rows] = []
    for x in some:
        place = np.argsort(-x.pair, axis=1)[:, : fits.N_NEAR]
        of_list = np.broadcast_to(x.listed[:, None], (*place.shape, x.listed.shape[1]))
        columns = np.concatenate([np.take_along_axis(x.pair, place, 1)[..., None], of_list], 2)
        part = np.where(x.there, (1 - ABSENT) / x.there.sum(), ABSENT / (~x.there).sum())
        weight, use = part[:, None] / np.arange(1, place.shape[1] + 1), ~np.take_along_axis(x.has, place, 1)
        rows.append((columns[use], np.take_along_axis(x.yes, place, 1)[use], weight[use]))
    return fitted(rows)


def first_hits(hit: LinearLogit, some: list[Lists]) -> dict[str, Any]:
    """What is said of first hits, and what is right."""
    found = dict[str, list[np.ndarray]]()
    for x in some:
        p = sigmoid(replace(CONSTANTS, hit_bare=hit).of_hits(x.pair, x.has, x.listed[:, :-1], x.listed[:, -1]))
        best, kind = p.argmax(1)[:, None], "with texts for a part" if x.has.any() else "without texts"
        one = np.column_stack([np.take_along_axis(values, best, 1)[:, 0] for values in (p, x.yes)])
        for name, rows in (("describes", x.there), ("something else", ~x.there), ("both", x.there | True)):
            found.setdefault(f"{kind}, {name}", []).append(one[rows])
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
    by_fold = [lists_of(data, work, f) for f in range(FOLDS)]
    every = [x for lists in by_fold for x in lists]
    others = ([x for g, lists in enumerate(by_fold) if g != f for x in lists] for f in range(FOLDS))
    own = [first_hits(fit(rest), lists) for rest, lists in zip(others, by_fold, strict=True)]
    result = {"as it is": first_hits(CONSTANTS.hit_bare, every), "fitted on the other folds": own}
    result["without nearness"] = first_hits(fits.with_zero(CONSTANTS.hit_without, len(fits.LIST_FEATURES) + 1), every)
    if write:
        kept = kept_captions(data, None)
        np.save(place / "captions.npy", fits.in_bytes(kept))
        found = asdict(replace(PACKAGED, lengths=(*PACKAGED.lengths[:-1], replace(CONSTANTS, hit_bare=fit(every)))))
        (place / "fits.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return result


def coco(folder: Path, others: Path) -> dict[str, Any]:
    """Sentences that describe one of COCO's photographs, and others, asked of the photographs with some captions."""
    own: dict[str, list[str]] = {}
    for path in sorted(folder.glob("annotations/captions_*.json")):
        for one in json.loads(path.read_text("utf-8"))["annotations"]:
            own.setdefault(f"{one['image_id']:012d}.jpg", []).append(one["caption"])
    paths = sorted(path for path in folder.rglob("*.jpg") if path.name in own)
    captions = [own[path.name][:5] for path in paths]
    known = {caption for some in captions for caption in some}
    apart = [line for line in others.read_text("utf-8").splitlines() if line not in known]
    apart, images = random.Random(0).sample(apart, 600), sfumato.load("small").embed_images(paths)
    return {f"{n} captions": coco_with(n, paths, captions, apart, images) for n in (0, 1, 4)} | {
        f"things, texts for {part:.0%}": coco_things(part, paths, captions, images)
        for part in (0, 0.1, 0.2, 0.3, 0.5, 1)
    }


def coco_things(
    part: float, paths: list[Path], captions: list[list[str]], images: GaussianEmbedding
) -> dict[str, float]:
    """NOUNS that captions have, asked of the photographs with four captions each for a part of them."""
    has = random.Random(1).sample(range(len(paths)), round(part * len(paths)))
    stems = [word_stems(" ".join(some)) for some in captions]
    there = {thing: {str(i) for i, own in enumerate(stems) if says(own, word_stems(thing))} for thing in NOUNS}
    known = [thing for thing in NOUNS if there[thing]]
    shown = [captions[i][:4] if i in has else [] for i in range(len(paths))]
    return words(answers_of([*map(str, range(len(paths)))], images, shown, known), [there[thing] for thing in known])


def answers_of(
    ids: list[str], images: GaussianEmbedding, captions: list[list[str]], queries: list[str]
) -> list[Answer]:
    """What a collection of images with some captions answers to queries."""
    model, state = sfumato.load("small"), {"calibrated": True, "run": "small"}
    with tempfile.TemporaryDirectory() as folder:
        make = functools.partial(GaussianCollection.create, calibration=model.calibration, metadata=state, texts=True)
        with make(f"{folder}/a", d=images.d) as store:
            store.upsert(images, ids, payloads=[{"captions": "\n".join(some)} if some else {} for some in captions])
            return store.search(model.embed_texts(queries), 10, about=QueryInfo.of_texts(queries))


def coco_with(
    n: int, paths: list[Path], captions: list[list[str]], apart: list[str], images: GaussianEmbedding
) -> dict[str, Any]:
    """The same of photographs with n captions, by the others of these."""
    column = {path.name: i for i, path in enumerate(paths)}
    asked, of = [c for some in captions for c in some[n:]], np.repeat(np.arange(len(paths)), 5 - n)
    theirs = sentence_vectors([c for some in captions for c in some]).reshape(len(paths), 5, -1)
    yes = fitting(sentence_vectors(asked + apart), theirs)
    yes[np.arange(len(asked)), of] = 1
    answers = answers_of([*column], images, [some[:n] for some in captions], asked + apart)
    first = np.array([[a[0].match_probability, yes[q, column[a[0].id]]] for q, a in enumerate(answers)])
    kinds = np.array([a.verdict.kind if a.verdict else "" for a in answers])
    number, expected, result = len(asked), np.array([a.expected_matches for a in answers]), dict[str, Any]()
    equal = np.r_[np.random.default_rng(0).permutation(number)[:500], number + np.arange(600)[: min(number, 500)]]
    rows_of = {"describes": np.arange(number), "something else": number + np.arange(600), "half of each": equal}
    for name, rows in rows_of.items():
        result[name] = summary(first[rows]) | {
            "expected over true": round(float(expected[rows].sum() / yes[rows].sum()), 3),
            "few or many": round(float(np.isin(kinds[rows], ["few", "many"]).mean()), 3),
            "nothing": round(float(np.mean(kinds[rows] == "nothing")), 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "fit", "coco"))
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", default="small")
    given = parser.parse_args()
    if given.write and load_recipe(given.paths[2] / "run-0" / RECIPE).name != "small":
        parser.error("--write is for models of the recipe small")
    if given.what == "coco":
        print(json.dumps(coco(*given.paths), indent=1))
        return
    folder, texts, work = given.paths
    data = Data(folder, texts)
    if given.what == "fit":
        print(json.dumps(refit(data, work, given.write), indent=1))
    for fold in range(FOLDS) if given.what == "train" else ():
        data.train(work, fold, given.seed, given.recipe)


if __name__ == "__main__":
    main()
