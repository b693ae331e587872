"""Does the uncertainty of a text or an image follow the number of its matches that people know? All estimators.

    python -m papers.benchmarks.uncertainty_multiplicity WORK --data FOLDER [--seeds 0 1 2] [--only MODEL ...]
        [--posthoc 4] [--json FILE] [--plot FILE.png]
    python -m papers.benchmarks.uncertainty_multiplicity FILE.json [--page] [--plot FILE.png]

FOLDER has flickr8k/ (dataset_flickr8k.json, images_128.tar, the features of its images and captions),
flickr8k_judgements/ (crowd.csv) and coco5k_text/ (captions, ECCV Caption, CxC). Runs and the numbers of every query are
kept in WORK, so that the command resumes. --posthoc N fits the post-hoc methods on the means of the PCME++ runs,
adapters in N epochs; 0 leaves them out. FILE.json prints the tables of a file of --json again,
and --page writes them into papers/docs/uncertainty.md.

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
from statistics import fmean
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image

from papers.benchmarks.ambiguity import baselines
from papers.posthoc import METHODS
from papers.posthoc.contestants import fit_contestant, pair_calibration
from papers.posthoc.frozen_model import FrozenSplit, freeze, layer_inputs
from papers.posthoc.referee import adapter_epochs
from sfumato.encoders.backbones import text_backbone
from sfumato.evaluation.estimators import Matching, estimate_uncertainty
from sfumato.evaluation.trust import words_of
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import DIRECTION_OF, Side
from sfumato.metrics.bootstrap import (
    Interval,
    Statistic,
    auroc_statistic,
    balanced_spearman,
    bootstrap,
    decile_statistic,
    percentile_interval,
    resampled_balanced_spearman,
    spearman,
    spearman_statistic,
)
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import RecallByUncertainty
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.models.calibrate import calibrate_split
from sfumato.models.embed import embed_split, load_split
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import Run, load_run
from sfumato.search.exact import rank_relevant
from sfumato.training.loop import fit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "uncertainty.md"

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

NEIGHBOURS = "similar test items"

Figure = Literal["all", "balanced", "beside words", "beside neighbours"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
"""Spearman correlations with the number of matches: over all queries, over sets balanced over powers of two, and over
all queries with the ranks of a baseline, few words or NEIGHBOURS, taken out of both (partial correlation)."""

TAKEN_OUT: dict[Figure, str] = {"beside words": "baseline: few words", "beside neighbours": f"baseline: {NEIGHBOURS}"}

RESAMPLES = 200


@dataclass(frozen=True)
class Scene:
    """Queries whose matches people know.

    Attributes:
        rows: (n,) positions of the queries in the arrays of scores.
        counts: (n,) numbers of matches, or their share of the pairs that people were asked about.
        groups: (n,) queries with one number are resampled together.
    """

    rows: np.ndarray
    counts: np.ndarray
    groups: np.ndarray


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
            found[f"{side}/{method}"] = contestant.uncertainty(test, side, None)
        if coco is not None:
            found[f"coco/{method}"] = contestant.uncertainty(coco, "text", None)
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
def similarity(features: np.ndarray, training: np.ndarray, owners: np.ndarray) -> Scores:
    """Mean cosine with all training items, with the ten nearest, and with the ten nearest of the test items.

    Test items of one owner, as the captions of an image, are no neighbours of each other.
    """
    x, y = (f / np.maximum(np.linalg.norm(f, axis=1, keepdims=True), 1e-12) for f in (features, training))
    in_training, in_test = np.empty(len(x)), np.empty(len(x))
    for start in range(0, len(x), 1000):
        block = slice(start, start + 1000)
        in_training[block] = np.partition(x[block] @ y.T, -10, axis=1)[:, -10:].mean(1)
        own = owners[block, None] == owners
        in_test[block] = np.partition(np.where(own, -1, x[block] @ x.T), -10, axis=1)[:, -10:].mean(1)
    return {"similar to training": x @ y.mean(0), "similar training items": in_training, NEIGHBOURS: in_test}


def of_texts(texts: Sequence[str], corpus: Sequence[str], similar: Scores) -> Scores:
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
        **similar,
        "random": np.random.default_rng(0).random(len(texts)),
    }


def of_images(pictures: Sequence[bytes], similar: Scores) -> Scores:
    """Bytes of the file, edges, similarity, and random numbers."""
    edges = []
    for data in pictures:
        grey = np.asarray(Image.open(io.BytesIO(data)).convert("RGB").convert("L"), float)
        edges.append(np.abs(np.diff(grey, axis=0)).mean() + np.abs(np.diff(grey, axis=1)).mean())
    return {
        "bytes of the file": np.array([float(len(data)) for data in pictures]),
        "edges": np.array(edges),
        **similar,
        "random": np.random.default_rng(1).random(len(pictures)),
    }


def of_kinds(**kinds: Scores) -> Scores:
    return {f"{kind}/{name}": values for kind, found in kinds.items() for name, values in found.items()}


# ---------------------------------------------------------------- the scenes
def emoji_scenes(run: Run) -> tuple[dict[str, Scene], Scores]:
    """Texts and images of the emoji set with their baselines."""
    train, test = (load_split(run.model, run.recipe.data, split) for split in ("train", "test"))
    images = [part.images.batch(np.arange(len(part.images))).values.mean(1).numpy() for part in (test, train)]
    texts = [embedded(part.data.texts) for part in (test, train)]
    corpus, n, m = train.data.texts, len(test.data.image_ids), len(test.data.texts)
    counts = train.data.relevance().transpose().counts
    trivial = of_kinds(
        text=of_texts(test.data.texts, corpus, similarity(texts[0], texts[1], np.arange(m)))
        | baselines(test.data.texts, texts[0], corpus, texts[1], counts),
        image=of_images(
            [source.read_bytes() for source in test.data.images], similarity(images[0], images[1], np.arange(n))
        ),
    )
    relevance = test.data.relevance()
    scenes = {
        "emoji texts": Scene(np.arange(m), relevance.transpose().counts, np.arange(m)),
        "emoji images": Scene(np.arange(n), relevance.counts, np.arange(n)),
    }
    return scenes, trivial


def flickr8k_scenes(run: Run, work: Path, data: Path) -> tuple[dict[str, Scene], Scores]:
    """Captions and images of Flickr8k with what people said, COCO's captions, and the baselines of all."""
    entries = json.loads((data / "flickr8k" / "dataset_flickr8k.json").read_text())["images"]
    parts = {split: [entry for entry in entries if entry["split"] == split] for split in ("test", "train")}
    images, texts = (np.load(data / "flickr8k" / FLICKR8K_FILES[key]) for key in ("images", "texts"))
    place = {entry["filename"]: k for k, entry in enumerate(entries)}
    of_image = [images[[place[entry["filename"]] for entry in part]].astype(np.float32) for part in parts.values()]
    of_text = [texts[[k for entry in part for k in entry["sentids"]]].astype(np.float32) for part in parts.values()]
    test, corpus = captions_of(parts["test"]), list(captions_of(parts["train"]).values())
    files = [entry["filename"] for entry in parts["test"]]
    check = load_split(run.model, run.recipe.data, "test").data
    assert list(check.texts) == list(test.values()) and list(check.image_ids) == files
    with tarfile.open(data / "flickr8k" / "images_128.tar") as tar:
        inside = {Path(member.name).name: member for member in tar.getmembers() if member.isfile()}
        pictures = [tar.extractfile(inside[name]).read() for name in files]  # type: ignore[union-attr]
    coco, coco_texts = coco_captions(data), np.load(coco_features(work, data))
    owners = np.array([int(i) for i in (data / "coco5k_text" / "testall_ids.txt").read_text().split()])
    trivial = of_kinds(
        text=of_texts(list(test.values()), corpus, similarity(of_text[0], of_text[1], resampled_together(run, "text"))),
        image=of_images(pictures, similarity(of_image[0], of_image[1], np.arange(len(files)))),
        coco=of_texts(coco, corpus, similarity(coco_texts, of_text[1], owners)),
    )
    scenes, asked = judged_scenes(data, list(test), files)
    return scenes | coco_scenes(data, owners), trivial | asked


def captions_of(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """ "FILE#NUMBER" -> caption."""
    return {f"{e['filename']}#{k}": sentence["raw"] for e in entries for k, sentence in enumerate(e["sentences"])}


def judged_scenes(data: Path, captions: list[str], files: list[str]) -> tuple[dict[str, Scene], Scores]:
    """What people said of Flickr8k; how many pairs they were asked about is a baseline."""
    text_of, image_of = ({name: k for k, name in enumerate(names)} for names in (captions, files))
    with (data / "flickr8k_judgements" / "crowd.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["caption_id"] in text_of and row["image"] in image_of]
    rows = [row for row in rows if row["caption_id"].split("#")[0] != row["image"]]
    text = np.array([text_of[row["caption_id"]] for row in rows])
    image = np.array([image_of[row["image"]] for row in rows])
    yes = np.array([int(row["yes"]) > int(row["no"]) for row in rows])
    scenes, found = {}, {}
    for name, side, query, n in (
        ("flickr8k captions", "text", text, len(captions)),
        ("flickr8k images", "image", image, len(files)),
    ):
        pairs, counts = np.bincount(query, minlength=n), np.bincount(query[yes], minlength=n)
        asked = np.flatnonzero(pairs)
        scenes[name] = Scene(asked, counts[asked], asked)
        scenes[f"{name}, share"] = Scene(asked, counts[asked] / pairs[asked], asked)
        found[f"{side}/pairs asked about"] = pairs.astype(float)
    return scenes, found


def coco_scenes(data: Path, owners: np.ndarray) -> dict[str, Scene]:
    """COCO's captions with ECCV Caption and CxC."""
    folder = data / "coco5k_text"
    place = {str(k): row for row, k in enumerate(np.load(folder / "coco_test_ids.npy").tolist())}
    scenes = {}
    for name in ("eccv", "cxc"):
        listed = json.loads((folder / f"{name}_caption_to_image.json").read_text())
        counts = {place[k]: len(images) for k, images in listed.items() if k in place}
        rows = np.array(sorted(counts))
        scenes[f"coco captions, {name}"] = Scene(rows, np.array([counts[row] for row in rows]), owners[rows])
    return scenes


KIND_OF = {
    "emoji texts": "text",
    "emoji images": "image",
    "flickr8k captions": "text",
    "flickr8k images": "image",
    "flickr8k captions, share": "text",
    "flickr8k images, share": "image",
    "coco captions, eccv": "coco",
    "coco captions, cxc": "coco",
}
"""Scene -> kind of its scores."""


# ---------------------------------------------------------------- the figures
def measure(scene: Scene, scores: Mapping[str, Sequence[np.ndarray]], n_resamples: int) -> dict[str, Any]:
    """By name the figures, means over seeds, with intervals over queries; each seed's; and ten bins."""
    counts = scene.counts
    own = {name: [x[scene.rows] for x in seeds] for name, seeds in scores.items()}
    statistics = {f"{name}/all": mean_of([spearman_statistic(x, counts) for x in own[name]]) for name in own}
    for figure, baseline in TAKEN_OUT.items():
        statistics |= {
            f"{name}/{figure}": mean_of([partial_statistic(x, counts, own[baseline][0]) for x in own[name]])
            for name in own
            if baseline in own and name != baseline
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
        bins = [[b["recall"] for b in RecallByUncertainty.of(x, hit).bins] for x, hit in pairs]
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
            counts = what.counts
            report["scenes"][scene] = {
                "n": len(counts), "mean": float(counts.mean()), "largest": float(counts.max()),
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
GALLERY = ("expected_matches", "match_entropy", "top1_mismatch", "margin", "nearest_mean")
POSTHOC_SHOWN = ("laplace", "probvlm", "asymvlm", "pfe", "pcmepp", "prolip")
ROWS = {
    **{
        f"*baseline:* {name}": f"baseline: {name}"
        for name in (
            "few words", "common words", "bytes of the file", "edges", "similar to training", "similar training items",
            NEIGHBOURS, "nearest texts", "lookup", "pairs asked about", "random",
        )
    },
    "PCME++: total variance": "FAMILY-pcmepp: total_variance",
    "PCME++: ln det": "FAMILY-pcmepp: log_det",
    "PCME++ with pseudo-positives: total variance": "FAMILY-pcmepp-pseudo: total_variance",
    "PCME: geometric mean of sigma": "FAMILY-pcme: geometric_std",
    "probabilistic VSE++: ln det": "FAMILY-probabilistic-vsepp: log_det",
    "taught by expected matches: total variance": "FAMILY-taught: total_variance",
    **{f"gallery: `{name}`": f"FAMILY-pcmepp: {name}" for name in GALLERY},
    **{f"post-hoc: `{name}`": f"FAMILY-pcmepp + post-hoc: {name}" for name in POSTHOC_SHOWN},
}  # fmt: skip
"""Label of a row -> name of its scores."""

COLUMNS: dict[str, list[tuple[str, str, Figure]]] = {
    "texts": [
        ("emoji: balanced", "emoji texts", "balanced"),
        ("emoji: all", "emoji texts", "all"),
        ("Flickr8k: people", "flickr8k captions", "all"),
        ("share", "flickr8k captions, share", "all"),
        ("ECCV Caption", "coco captions, eccv", "all"),
        ("CxC", "coco captions, cxc", "all"),
    ],
    "texts, a baseline taken out": [
        (f"{head}: {figure.removeprefix('beside ')}", scene, figure)
        for head, scene in (
            ("emoji", "emoji texts"),
            ("Flickr8k", "flickr8k captions"),
            ("ECCV Caption", "coco captions, eccv"),
        )
        for figure in TAKEN_OUT
    ],
    "images": [
        ("emoji: balanced", "emoji images", "balanced"),
        ("emoji: all", "emoji images", "all"),
        ("Flickr8k: people", "flickr8k images", "all"),
        ("share", "flickr8k images, share", "all"),
    ],
}
"""Table -> its columns: heading, scene, figure."""


def cell(interval: Mapping[str, float | None] | None) -> str:
    if interval is None or interval["value"] is None:
        return "–"
    return f"{short(interval['value'])} [{short(interval['low'])}, {short(interval['high'])}]"


def short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}".replace("0.", ".", 1).replace("-", "−")


def family_of(name: str) -> str:
    return "emoji" if name.startswith("emoji") else "flickr8k"


def table(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table in Markdown, without rows that have nothing."""
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    return "\n".join([*lines, *(f"| {row} | {' | '.join(c)} |" for row, c in rows.items() if set(c) != {"–"})])


def scores_of(report: Mapping[str, Any], scene: str) -> dict[str, Any]:
    found: dict[str, Any] = report["scenes"].get(scene, {"scores": {}})["scores"]
    return found


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """The tables of papers/docs/uncertainty.md by their titles."""
    found = {}
    for title, columns in COLUMNS.items():
        rows = {
            label: [
                cell(scores_of(report, scene).get(name.replace("FAMILY", family_of(scene)), {}).get(figure))
                for _, scene, figure in columns
            ]
            for label, name in ROWS.items()
            if not ("taken out" in title and "baseline" in name)
        }
        found[title] = table(["number of the query", *(head for head, _, _ in columns)], rows)
    for kind in ("text", "image"):
        models = [f"emoji-pcmepp, {kind}", f"flickr8k-pcmepp, {kind}"]
        rows = {}
        for label, name in ROWS.items():
            own = [report["recall"].get(model, {}).get(name.replace("FAMILY-pcmepp: ", "")) for model in models]
            rows[label] = [cell(f and f[figure]) for f in own for figure in ("bins", "auroc")]
        heads = [f"{data}: {figure}" for data in ("emoji", "Flickr8k") for figure in ("bins", "AUROC")]
        found[f"recall@1 of {kind}s"] = table(["number of the query", *heads], rows)
    rows = {
        scene: [str(found["n"]), f"{found['mean']:.2f}", f"{found['largest']:g}", str(found["none"])]
        for scene, found in report["scenes"].items()
        if "share" not in scene
    }
    found["queries"] = table(["queries", "number", "matches on average", "at most", "without any"], rows)
    return found


def page(report: Mapping[str, Any], text: str) -> str:
    """The page with those tables of a report for which it has comments."""
    for title, lines in tables(report).items():
        before, begin, rest = text.partition(f"<!-- table: {title} -->")
        if not begin:
            continue
        _, end, after = rest.partition("<!-- end of the table -->")
        assert end, title
        text = f"{before}{begin}\n\n{lines}\n\n{end}{after}"
    return text


LINES = {
    "learnt variance (PCME++)": "PCMEPP: total_variance",
    "variance taught by expected matches": "TAUGHT: total_variance",
    "gallery: expected matches": "PCMEPP: expected_matches",
    "gallery: first hit wrong?": "PCMEPP: top1_mismatch",
    "baseline: few words, or bytes of the file": "baseline: few words|bytes of the file",
    f"baseline: {NEIGHBOURS}": f"baseline: {NEIGHBOURS}",
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
        family = family_of(name)
        scores = report["recall"][name] if below else report["scenes"][name]["scores"]
        for k, (label, wanted) in enumerate(LINES.items()):
            wanted = wanted.replace("PCMEPP", f"{family}-pcmepp").replace("TAUGHT", f"{family}-taught")
            model, _, ends = wanted.partition(": ")
            keys = [end if below and model != "baseline" else f"{model}: {end}" for end in ends.split("|")]
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
    parser.add_argument("--page", action="store_true", help="write the tables into papers/docs/uncertainty.md")
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
    for title, text in tables(report).items():
        print(f"## {title}\n\n{text}\n")
    if options.page:
        write_atomically(PAGE, page(report, PAGE.read_text(encoding="utf-8")))
    if options.plot:
        plot(report, options.plot)


if __name__ == "__main__":
    main()
