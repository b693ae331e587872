"""Does the uncertainty of a text or an image follow the number of its matches that people know? All estimators.

    python benchmarks/uncertainty_multiplicity.py WORK --data FOLDER [--seeds 0 1 2] [--only MODEL ...] [--posthoc 4]
        [--json FILE] [--plot FILE.png]
    python benchmarks/uncertainty_multiplicity.py FILE.json

FOLDER has flickr8k/ (dataset_flickr8k.json, images_128.tar, the features of its images and captions),
flickr8k_judgements/ (crowd.csv) and coco5k_text/ (captions, ECCV Caption, CxC). Runs and the numbers of every query are
kept in WORK, so that the command resumes. --posthoc N fits the post-hoc methods on the means of the PCME++ runs,
adapters in N epochs; 0 leaves them out. FILE.json prints the tables of a file of --json again.

Scenes: emoji texts and images with their true matches; Flickr8k's test captions with the images that most of three or
more people said they describe, and the images with such captions (a caption's own image left out); COCO's test captions
with the images that ECCV Caption or CxC lists. COCO's images are not there: the gallery of its captions is Flickr8k's
test images, and the model one of Flickr8k.
"""

import argparse
import csv
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image

from sfumato.encoders.frozen import text_backbone
from sfumato.evaluation.ambiguity import baselines
from sfumato.evaluation.estimators import Matching, estimate_uncertainty
from sfumato.evaluation.trust import words_of
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.bootstrap import (
    Interval,
    Statistic,
    bootstrap,
    percentile_interval,
    resampled_balanced_spearman,
)
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.metrics.selective import auroc_statistic, decile_statistic, spearman_statistic
from sfumato.metrics.uncertainty import balanced_spearman, recall_by_uncertainty, spearman
from sfumato.models.calibrate import calibrate_split
from sfumato.models.embed import embed_split, load_split
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import Run, load_run
from sfumato.posthoc import METHODS, Side
from sfumato.search.exact import rank_relevant
from sfumato.studies.contestants import DIRECTION_OF, fit_contestant, pair_calibration
from sfumato.studies.frozen_model import FrozenSplit, freeze, layer_inputs
from sfumato.studies.referee import adapter_epochs
from sfumato.training.loop import fit

EMOJI = ["train.epochs=30", "train.evaluate_every=30"]
FLICKR8K = [
    "data.source=embeddings", 'model.image={kind="embeddings",whiten=0}', 'model.text={kind="embeddings",whiten=0}',
    "train.epochs=10",
]  # fmt: skip
TAUGHT = [
    "model.variance=true", "model.variance_hidden=512", "loss.distance=squared_l2",
    "variance_stage.teacher=expected_matches", "variance_stage.epochs=10", "variance_stage.floor=0.1",
    "variance_stage.lr=2e-3", "variance_stage.weight_decay=1e-2",
]  # fmt: skip
MODELS: dict[str, tuple[str, list[str]]] = {
    "emoji-pcmepp": ("emoji-pcmepp", EMOJI),
    "emoji-pcme": ("emoji-pcme", EMOJI),
    "emoji-probabilistic-vsepp": ("emoji-probabilistic-vsepp", EMOJI),
    "flickr8k-pcmepp": ("flickr8k-pcmepp", FLICKR8K),
    "flickr8k-pcmepp-pseudo": ("flickr8k-pcmepp", [*FLICKR8K, "loss.alpha=0.1"]),
    "flickr8k-taught": ("flickr8k-infonce", [*FLICKR8K, *TAUGHT]),
}
"""Name -> recipe and changes."""

POSTHOC = ("emoji-pcmepp", "flickr8k-pcmepp")
"""Models whose means the post-hoc methods are fitted on."""

FLICKR8K_FILES = {"images": "efflite0_224_fp16.npy", "texts": "minilm_l6_v2_fp16.npy", "path": "dataset_flickr8k.json"}

Figure = Literal["all", "balanced", "beside words"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
"""Spearman correlations with the number of matches: over all queries, over sets balanced over powers of two, and over
all queries with the ranks of the number of words taken out of both (partial correlation)."""

RESAMPLES = 1000


@dataclass(frozen=True)
class Scene:
    """Queries whose number of matches people know.

    Attributes:
        matches: query -> matches, of n queries.
        rows: (n,) positions of the queries in the arrays of scores.
        groups: (n,) queries with one number are resampled together.
        words: (n,) numbers of words; None for images.
    """

    matches: Relevance
    rows: np.ndarray
    groups: np.ndarray
    words: np.ndarray | None


Scores = dict[str, np.ndarray]


def trained(work: Path, data: Path, name: str, seed: int) -> Run:
    """The run of a model, trained unless it is there."""
    recipe, changes = MODELS[name]
    run = work / "runs" / f"{name}-seed{seed}"
    if not (run / "model.safetensors").exists():
        files = [f"data.{key}={data / 'flickr8k' / file}" for key, file in FLICKR8K_FILES.items()]
        own = files if name.startswith("flickr8k") else []
        fit(load_recipe(find_recipe(recipe), [*changes, *own, f"train.seed={seed}"]), run)
    return load_run(run)


def npy_bytes(row: np.ndarray) -> bytes:
    with io.BytesIO() as file:
        np.save(file, row.reshape(1, -1).astype(np.float32))
        return file.getvalue()


def of_model(work: Path, data: Path, name: str, seed: int) -> Scores:
    """The numbers of all queries of a run by "KIND/NAME", and "KIND/hit"; kind is text, image or coco."""
    file = work / f"{name}-seed{seed}.npz"
    if file.exists():
        return dict(np.load(file))
    run = trained(work, data, name, seed)
    val, test = (load_split(run.model, run.recipe.data, split) for split in ("val", "test"))
    calibration = calibrate_split(embed_split(run.model, val), val.data, run.distance, split="val")
    images, texts = embed_split(run.model, test)
    matching = Matching(run.distance, calibration.logit_scale, calibration.logit_bias)
    found: Scores = {}
    sides: dict[Side, tuple[GaussianEmbedding, GaussianEmbedding, Relevance]] = {
        "image": (images, texts, test.data.relevance()),
        "text": (texts, images, test.data.relevance().transpose()),
    }
    for side, (queries, gallery, truth) in sides.items():
        oriented = replace(matching, direction=DIRECTION_OF[side])
        found |= {f"{side}/{k}": v for k, v in estimate_uncertainty(queries, gallery, oriented).items()}
        ranks = rank_relevant(queries, gallery, truth, oriented.oriented_distance)
        found[f"{side}/hit"] = per_query_metrics(ranks, truth)["recall@1"]
    if name.startswith("flickr8k"):
        captions = np.load(coco_features(work, data))
        store, _ = run.model.text.processor.read([partial(npy_bytes, row) for row in captions])
        of_coco = estimate_uncertainty(run.model.text.embed(store), images, replace(matching, direction="t2i"))
        found |= {f"coco/{k}": v for k, v in of_coco.items()}
    np.savez(file, allow_pickle=False, **found)
    return found


def of_posthoc(work: Path, data: Path, name: str, seed: int, epochs: int) -> Scores:
    """The numbers of the post-hoc methods, fitted on the means of a run; each method is kept when it is done."""
    file = work / f"{name}-posthoc-seed{seed}.npz"
    found: Scores = dict(np.load(file)) if file.exists() else {}
    missing = [method for method in METHODS if not any(key.endswith(f"/{method}") for key in found)]
    if not missing:
        return found
    run = trained(work, data, name, seed)
    model = freeze(run, run.recipe.data, ("test",), name=name)
    test, calibration = model.tests["test"], pair_calibration(model, reference=False)
    coco = None
    if name.startswith("flickr8k"):
        store, _ = run.model.text.processor.read(
            [partial(npy_bytes, row) for row in np.load(coco_features(work, data))]
        )
        hidden, (matrix, bias) = layer_inputs(run.model.text, store), model.projections["text"]
        coco = FrozenSplit(
            test.images, hidden @ matrix.T + bias, np.zeros((1, 2), np.int64), text_hidden=hidden,
            image_hidden=test.image_hidden,
        )  # fmt: skip
    for method in missing:
        contestant = fit_contestant(
            method, model, calibration, seed=seed, options=adapter_epochs(epochs).get(method, {})
        )
        for side in contestant.sides:
            found[f"{side}/{method}"] = contestant.uncertainty(test, side)
        if coco is not None:
            found[f"coco/{method}"] = contestant.uncertainty(coco, "text")
        np.savez(file, allow_pickle=False, **found)
        print(f"  {name} seed {seed}: {method}", flush=True)
    return found


def coco_captions(data: Path) -> list[str]:
    """The 25,000 captions of COCO's test split."""
    return (data / "coco5k_text" / "testall_caps.txt").read_text(encoding="utf-8").splitlines()


def coco_features(work: Path, data: Path) -> Path:
    """The file of their MiniLM features, averages of the tokens."""
    file = work / "coco-minilm.npy"
    if not file.exists():
        np.save(file, embedded(coco_captions(data)))
    return file


def embedded(texts: Sequence[str]) -> np.ndarray:
    """(n, 384) MiniLM features of texts, short ones first so that batches are of one length."""
    backbone = text_backbone("minilm-l6-v2", pooled=True)
    order = np.argsort([len(text) for text in texts])
    parts = np.array_split(order, max(1, len(texts) // 250))
    found = np.concatenate([np.concatenate(backbone([texts[k] for k in part])) for part in parts])
    return np.asarray(found[np.argsort(order)], np.float32)


# ---------------------------------------------------------------- the trivial baselines
def similarity(features: np.ndarray) -> Scores:
    """Mean cosine with all items of the side, and with the ten nearest others."""
    x = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    nearest = np.empty(len(x))
    for start in range(0, len(x), 1000):
        block = x[start : start + 1000] @ x.T
        nearest[start : start + 1000] = np.sort(np.partition(block, -11, axis=1)[:, -11:], axis=1)[:, :-1].mean(1)
    return {"mean similarity": x @ x.mean(0), "nearest similarity": nearest}


def of_texts(texts: Sequence[str], features: np.ndarray, corpus: Sequence[str]) -> Scores:
    """Few words, common words (by the documents of a corpus), similarity, and random numbers."""
    words = [words_of(text) for text in texts]
    documents: dict[str, int] = {}
    for text in corpus:
        for word in set(words_of(text)):
            documents[word] = documents.get(word, 0) + 1
    rarity = [[np.log((1 + len(corpus)) / (1 + documents.get(w, 0))) for w in own] or [0.0] for own in words]
    return {
        "few words": -np.array([float(len(own)) for own in words]),
        "common words": -np.array([fmean(own) for own in rarity]),
        **similarity(features),
        "random": np.random.default_rng(0).random(len(texts)),
    }


def of_images(pictures: Sequence[bytes], features: np.ndarray) -> Scores:
    """Bytes of the file, edges, similarity, and random numbers."""
    edges = []
    for data in pictures:
        grey = np.asarray(Image.open(io.BytesIO(data)).convert("RGB").convert("L"), float)
        edges.append(np.abs(np.diff(grey, axis=0)).mean() + np.abs(np.diff(grey, axis=1)).mean())
    found: Scores = similarity(features) | {"random": np.random.default_rng(1).random(len(features))}
    if pictures:
        found |= {"bytes of the file": np.array([float(len(data)) for data in pictures]), "edges": np.array(edges)}
    return found


# ---------------------------------------------------------------- the scenes
def emoji_scenes(run: Run) -> tuple[dict[str, Scene], Scores]:
    """Texts and images of the emoji set with their baselines."""
    prepared = load_split(run.model, run.recipe.data, "test")
    train, test = load_split(run.model, run.recipe.data, "train").data, prepared.data
    pictures = [source.read_bytes() for source in test.images]
    pooled = prepared.images.batch(np.arange(len(pictures))).values.mean(1).numpy()
    texts, training = embedded(test.texts), embedded(train.texts)
    counts = train.relevance().transpose().counts
    more = baselines(test.texts, texts, train.texts, training, counts)
    found = {f"text/{k}": v for k, v in (of_texts(test.texts, texts, train.texts) | more).items()}
    found |= {f"image/{k}": v for k, v in of_images(pictures, pooled).items()}
    words = np.array([len(words_of(text)) for text in test.texts])
    relevance, n, m = test.relevance(), len(test.image_ids), len(test.texts)
    scenes = {
        "emoji texts": Scene(relevance.transpose(), np.arange(m), np.arange(m), words),
        "emoji images": Scene(relevance, np.arange(n), np.arange(n), None),
    }
    return scenes, found


def flickr8k_scenes(run: Run, work: Path, data: Path) -> tuple[dict[str, Scene], Scores]:
    """Captions and images of Flickr8k with what people said, COCO's captions, and the baselines of all."""
    train, test = (load_split(run.model, run.recipe.data, split).data for split in ("train", "test"))
    entries = json.loads((data / "flickr8k" / "dataset_flickr8k.json").read_text())["images"]
    captions = {split: captions_of(entries, split) for split in ("train", "test")}
    assert len(captions["test"]) == len(test.texts) and len(captions["train"]) == len(train.texts)
    rows = np.concatenate([entry["sentids"] for entry in entries if entry["split"] == "test"])
    image_rows = [k for k, entry in enumerate(entries) if entry["split"] == "test"]
    features = {key: np.load(data / "flickr8k" / FLICKR8K_FILES[key]) for key in ("images", "texts")}
    texts = list(captions["test"].values())
    found = {
        f"text/{k}": v
        for k, v in of_texts(texts, features["texts"][rows].astype(np.float32), [*captions["train"].values()]).items()
    }
    files = [entries[k]["filename"] for k in image_rows]
    with tarfile.open(data / "flickr8k" / "images_128.tar") as tar:
        inside = {Path(member.name).name: member for member in tar.getmembers() if member.isfile()}
        pictures = [tar.extractfile(inside[name]).read() for name in files]  # type: ignore[union-attr]
    of_side = of_images(pictures, features["images"][image_rows].astype(np.float32))
    found |= {f"image/{k}": v for k, v in of_side.items()}
    scenes, asked = judged_scenes(data, captions["test"], files)
    found |= asked
    scenes |= coco_scenes(data)
    coco = coco_captions(data)
    found |= {f"coco/{k}": v for k, v in of_texts(coco, np.load(coco_features(work, data)), coco).items()}
    return scenes, found


def captions_of(entries: Sequence[Mapping[str, Any]], split: str) -> dict[str, str]:
    """ "FILE#NUMBER" -> caption of a split."""
    return {
        f"{entry['filename']}#{k}": sentence["raw"]
        for entry in entries
        if entry["split"] == split
        for k, sentence in enumerate(entry["sentences"])
    }


def judged_scenes(data: Path, captions: dict[str, str], files: list[str]) -> tuple[dict[str, Scene], Scores]:
    """What people said of Flickr8k; how many pairs they were asked about is a baseline."""
    text_of, image_of = ({name: k for k, name in enumerate(names)} for names in (captions, files))
    with (data / "flickr8k_judgements" / "crowd.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["caption_id"] in text_of and row["image"] in image_of]
    rows = [row for row in rows if row["caption_id"].split("#")[0] != row["image"]]
    text, image = (
        np.array([position[row[key]] for row in rows])
        for key, position in (("caption_id", text_of), ("image", image_of))
    )
    yes = np.array([int(row["yes"]) > int(row["no"]) for row in rows])
    words = np.array([len(words_of(caption)) for caption in captions.values()])
    scenes, found = {}, {}
    for name, side, query, item, n, m in (
        ("flickr8k captions", "text", text, image, len(captions), len(files)),
        ("flickr8k images", "image", image, text, len(files), len(captions)),
    ):
        matches = Relevance.from_pairs(query[yes], item[yes], n_queries=n, n_gallery=m)
        asked = np.unique(query)
        scenes[name] = Scene(
            matches.select_queries(asked), asked, np.arange(len(asked)), words[asked] if side == "text" else None
        )
        found[f"{side}/pairs asked about"] = np.bincount(query, minlength=n).astype(float)
    return scenes, found


def coco_scenes(data: Path) -> dict[str, Scene]:
    """COCO's captions with ECCV Caption and CxC."""
    folder = data / "coco5k_text"
    place = {str(k): row for row, k in enumerate(np.load(folder / "coco_test_ids.npy").tolist())}
    own = (folder / "testall_ids.txt").read_text().split()
    words = np.array([len(words_of(caption)) for caption in coco_captions(data)])
    scenes = {}
    for name in ("eccv", "cxc"):
        listed = json.loads((folder / f"{name}_caption_to_image.json").read_text())
        listed = {place[k]: images for k, images in listed.items() if k in place}
        rows = np.array(sorted(listed))
        items = {k: row for row, k in enumerate(sorted({k for images in listed.values() for k in images}))}
        matches = Relevance.from_lists([[items[k] for k in listed[row]] for row in rows], n_gallery=len(items))
        groups = np.unique([own[row] for row in rows], return_inverse=True)[1]
        scenes[f"coco captions, {name}"] = Scene(matches, rows, groups, words[rows])
    return scenes


KIND_OF = {
    "emoji texts": "text",
    "emoji images": "image",
    "flickr8k captions": "text",
    "flickr8k images": "image",
    "coco captions, eccv": "coco",
    "coco captions, cxc": "coco",
}
"""Scene -> kind of its scores."""


# ---------------------------------------------------------------- the figures
def measure(scene: Scene, scores: Mapping[str, Sequence[np.ndarray]], n_resamples: int) -> dict[str, Any]:
    """By name the figures, means over seeds, with intervals over queries; each seed's; and ten bins."""
    counts = scene.matches.counts
    own = {name: [x[scene.rows] for x in seeds] for name, seeds in scores.items()}
    statistics = {f"{name}/all": mean_of([spearman_statistic(x, counts) for x in own[name]]) for name in own}
    if scene.words is not None:
        words = scene.words
        statistics |= {
            f"{name}/beside words": mean_of([partial_statistic(x, counts, words) for x in own[name]])
            for name in own
            if name != "baseline: few words"
        }
    found = bootstrap(statistics, len(counts), n_resamples=n_resamples, groups=scene.groups)
    if counts.min() > 0 and counts.max() >= 16:
        for name, seeds in own.items():
            value = fmean(balanced_spearman(x, counts) for x in seeds)
            each = {str(k): x for k, x in enumerate(seeds)}
            resampled = resampled_balanced_spearman(each, counts, n_resamples=n_resamples)
            found[f"{name}/balanced"] = percentile_interval(value, np.mean([*resampled.values()], axis=0))
    undefined = Interval(None, None, None)
    return {
        name: {figure: vars(found.get(f"{name}/{figure}", undefined)) for figure in FIGURES}
        | {"seeds": [spearman(x, counts) for x in own[name]], "deciles": deciles(own[name], counts)}
        for name in own
    }


def partial_statistic(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> Statistic:
    """The rank correlation of x and y with the ranks of z taken out of both, as a statistic."""
    of_xy, of_xz, of_yz = (spearman_statistic(a, b) for a, b in ((x, y), (x, z), (y, z)))

    def statistic(counts: np.ndarray) -> np.ndarray:
        xy, xz, yz = of_xy(counts), of_xz(counts), of_yz(counts)
        return np.asarray((xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2)))

    return statistic


def deciles(scores: Sequence[np.ndarray], counts: np.ndarray) -> list[float]:
    """The mean number of matches in ten bins of ascending uncertainty, mean over seeds."""
    orders = [np.array_split(np.argsort(x, kind="stable"), 10) for x in scores]
    found = np.mean([[counts[part].mean() for part in order] for order in orders], axis=0)
    return [float(value) for value in found]


def recalls(
    scores: Mapping[str, Sequence[np.ndarray]], hits: Sequence[np.ndarray], groups: np.ndarray, n_resamples: int
) -> dict[str, Any]:
    """By name recall@1 in ten bins, their correlation and the AUROC of wrong first hits, means over seeds."""
    found: dict[str, Any] = {}
    for name, seeds in scores.items():
        seeds = [*seeds] * (len(hits) if len(seeds) == 1 else 1)
        pairs = list(zip(seeds, hits, strict=True))
        known = ~np.isnan(hits[0])
        statistics = {
            "bins": mean_of([decile_statistic(x[known], hit[known]) for x, hit in pairs]),
            "auroc": mean_of([auroc_statistic(x[known], 1 - hit[known]) for x, hit in pairs]),
        }
        figures = bootstrap(statistics, int(known.sum()), n_resamples=n_resamples, groups=groups[known])
        bins = [[b["recall"] for b in recall_by_uncertainty(x, hit)["bins"]] for x, hit in pairs]
        found[name] = {key: vars(value) for key, value in figures.items()}
        found[name]["recall"] = [float(value) for value in np.mean(bins, axis=0)]
    return found


def mean_of(statistics: Sequence[Statistic]) -> Statistic:
    """The mean of statistics, of one a seed."""
    return lambda counts: np.asarray(np.mean([statistic(counts) for statistic in statistics], axis=0))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the page shows."""
    work, data = options.work, options.data
    report: dict[str, Any] = {"commit": commit(), "seeds": options.seeds, "scenes": {}, "recall": {}}
    for family in ("emoji", "flickr8k"):
        names = [name for name in options.only if name.startswith(family)]
        if not names:
            continue
        run = trained(work, data, names[0], options.seeds[0])
        scenes, trivial = emoji_scenes(run) if family == "emoji" else flickr8k_scenes(run, work, data)
        models = {name: [of_model(work, data, name, seed) for seed in options.seeds] for name in names}
        hits = {name: models[name] for name in names}
        for name in [name for name in names if name in POSTHOC and options.posthoc]:
            seeds = [of_posthoc(work, data, name, seed, options.posthoc) for seed in options.posthoc_seeds]
            models[f"{name} + post-hoc"] = seeds
        for scene, what in scenes.items():
            scores = of_kind(KIND_OF[scene], trivial, models)
            print(f"{scene}: {len(what.rows)} queries, {len(scores)} numbers of each", flush=True)
            counts = what.matches.counts
            report["scenes"][scene] = {
                "n": len(counts), "mean": float(counts.mean()), "largest": int(counts.max()),
                "none": int((counts == 0).sum()), "scores": measure(what, scores, options.resamples),
            }  # fmt: skip
        for kind in ("text", "image"):
            groups = resampled_together(run, kind)
            for name, seeds in hits.items():
                scores = of_kind(kind, trivial, {name: seeds})
                found = recalls(scores, [seed[f"{kind}/hit"] for seed in seeds], groups, options.resamples)
                report["recall"][f"{name}, {kind}"] = {key.removeprefix(f"{name}: "): v for key, v in found.items()}
    return report


def of_kind(kind: str, trivial: Scores, models: Mapping[str, list[Scores]]) -> dict[str, list[np.ndarray]]:
    """The scores of a kind by "MODEL: NAME", one array a seed, without those that are infinite."""
    found = {f"baseline: {k.split('/')[1]}": [v] for k, v in trivial.items() if k.startswith(f"{kind}/")}
    for name, seeds in models.items():
        for key in [k for k in seeds[0] if k.startswith(f"{kind}/") and not k.endswith("/hit")]:
            found[f"{name}: {key.split('/')[1]}"] = [seed[key] for seed in seeds]
    return {name: seeds for name, seeds in found.items() if np.isfinite(seeds[0]).all()}


def resampled_together(run: Run, kind: str) -> np.ndarray:
    """Queries that are resampled together: captions of one image; emoji texts match several and go alone."""
    test = load_split(run.model, run.recipe.data, "test").data
    if kind == "image" or run.recipe.data.source == "emoji":
        return np.arange(len(test.image_ids) if kind == "image" else len(test.texts))
    matches = test.relevance().transpose()
    image: np.ndarray = matches.indices[matches.indptr[:-1]]
    return image


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


# ---------------------------------------------------------------- tables and the picture
def cell(interval: Mapping[str, float | None]) -> str:
    if interval["value"] is None:
        return "–"
    low, high = interval["low"], interval["high"]
    between = "" if low is None or high is None else f" [{short(low)}, {short(high)}]"
    return short(interval["value"]) + between


def short(value: float | None) -> str:
    return f"{value:.2f}".replace("0.", ".", 1).replace("-", "−") if value is not None else "–"


def print_tables(report: Mapping[str, Any]) -> None:
    """The tables of docs/results/uncertainty.md."""
    for scene, found in report["scenes"].items():
        print(f"\n## {scene}: {found['n']} queries, {found['mean']:.2f} matches on average, {found['largest']} at most")
        print(f"\n| number of the query | {' | '.join(FIGURES)} | over seeds |\n| --- |" + " ---: |" * 4)
        for name, figures in sorted(found["scores"].items(), key=lambda x: -(x[1]["all"]["value"] or -2)):
            over = short(stdev(figures["seeds"])) if len(figures["seeds"]) > 1 else ""
            print(f"| {name} | {' | '.join(cell(figures[f]) for f in FIGURES)} | {over} |")
    for which, scores in report["recall"].items():
        print(f"\n## recall@1 by ten bins: {which}\n")
        print("| number | bins | AUROC | first, last bin |\n| --- | ---: | ---: | --- |")
        for name, figures in scores.items():
            ends = f"{figures['recall'][0]:.2f}, {figures['recall'][-1]:.2f}"
            print(f"| {name} | {cell(figures['bins'])} | {cell(figures['auroc'])} | {ends} |")


LINES = {
    "learnt variance (PCME++)": "PCMEPP: total_variance",
    "variance taught by expected matches": "TAUGHT: total_variance",
    "gallery: expected matches": "PCMEPP: expected_matches",
    "gallery: first hit wrong?": "PCMEPP: top1_mismatch",
    "baseline: few words, or small file": "baseline: few words|bytes of the file",
    "baseline: mean similarity": "baseline: mean similarity",
}
"""Label -> name of the scores; PCMEPP and TAUGHT are those of the family."""

UPPER = ("emoji texts", "flickr8k captions", "coco captions, eccv", "coco captions, cxc")
LOWER = ("emoji-pcmepp, text", "emoji-pcmepp, image", "flickr8k-pcmepp, text", "flickr8k-pcmepp, image")


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Ten bins: the mean number of matches above, recall@1 below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(15, 6.6))
    shown: dict[str, Any] = {}
    for axis, name in zip(axes.flat, (*UPPER, *LOWER), strict=True):
        below = name in LOWER
        family = "emoji" if name.startswith("emoji") else "flickr8k"
        scores = report["recall"][name] if below else report["scenes"][name]["scores"]
        for k, (label, wanted) in enumerate(LINES.items()):
            wanted = wanted.replace("PCMEPP", f"{family}-pcmepp").replace("TAUGHT", f"{family}-taught")
            model, _, ends = wanted.partition(": ")
            keys = [end if below else f"{model}: {end}" for end in ends.split("|")]
            for key in [key for key in keys if key in scores and not (below and "taught" in model)]:
                values = scores[key]["recall" if below else "deciles"]
                style = "--" if "baseline" in label else "-"
                [shown[label]] = axis.plot(range(1, 11), values, style, marker=".", color=f"C{k}")
        axis.set_title(f"{'recall@1' if below else 'matches'}: {name}", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("decile, most certain first", fontsize=9)
    figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=3, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=90)


def rounded(value: Any) -> Any:
    """Numbers with four digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.4g}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--posthoc", type=int, default=4, help="epochs of adapters; 0: no post-hoc methods")
    parser.add_argument("--posthoc-seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    parser.add_argument("--scores", action="store_true", help="compute the numbers of the queries, and no figures")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.work.is_file():
        report = json.loads(options.work.read_text(encoding="utf-8"))
    elif options.scores:
        for name in options.only:
            for seed in options.seeds:
                of_model(options.work, options.data, name, seed)
                print(f"{name} seed {seed}", flush=True)
        for name in [name for name in options.only if name in POSTHOC and options.posthoc]:
            for seed in options.posthoc_seeds:
                of_posthoc(options.work, options.data, name, seed, options.posthoc)
        return
    else:
        report = rounded(measured(options))
        if options.json:
            write_atomically(options.json, json.dumps(report, separators=(",", ":")) + "\n")
    print_tables(report)
    if options.plot:
        plot(report, options.plot)


if __name__ == "__main__":
    main()
