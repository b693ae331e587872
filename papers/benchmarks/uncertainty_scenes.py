"""Queries whose number of matches people know, and the numbers of each: by models, post-hoc methods and baselines.

Emoji texts and images have their true matches. Flickr8k's test captions and images have what most of three or more
people said (a caption's own image left out). COCO's test captions have what ECCV Caption and CxC list; COCO's images
are not there, so the gallery of its captions is Flickr8k's test images, and the model one of Flickr8k.
"""

import csv
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from PIL import Image

from papers.benchmarks.ambiguity import baselines
from papers.benchmarks.referee import FLICKR8K, npy_bytes
from papers.posthoc import METHODS
from papers.posthoc.contestants import fit_contestant, pair_calibration
from papers.posthoc.frozen_model import FrozenSplit, freeze, layer_inputs
from papers.posthoc.referee import adapter_epochs
from sfumato.encoders.backbones import text_backbone
from sfumato.encoders.encoder_protocol import Store
from sfumato.evaluation.estimators import Matching, estimate_uncertainty
from sfumato.evaluation.trust import words_of
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import DIRECTION_OF, Side
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.models.calibrate import calibrate_split
from sfumato.models.embed import embed_split, load_split
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import Run, load_run
from sfumato.search.exact import rank_relevant
from sfumato.training.loop import fit

EMOJI = ["train.epochs=30", "train.evaluate_every=30"]
FEATURES = [
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
    "flickr8k-pcmepp": ("flickr8k-pcmepp", FEATURES),
    "flickr8k-pcmepp-pseudo": ("flickr8k-pcmepp", [*FEATURES, "loss.alpha=0.1"]),
    "flickr8k-taught": ("flickr8k-infonce", [*FEATURES, *TAUGHT]),
}
"""Name -> recipe and changes."""

POSTHOC = ("emoji-pcmepp", "flickr8k-pcmepp")
"""Models whose means the post-hoc methods are fitted on."""

NEIGHBOURS = "similar test items"


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
        files = [f"data.{key}={data / 'flickr8k' / file}" for key, file in FLICKR8K.items()]
        own = files if name.startswith("flickr8k") else []
        fit(load_recipe(find_recipe(recipe), [*changes, *own, f"train.seed={seed}"]), run)
    return load_run(run)


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
        texts = run.model.text.embed(coco_store(run, work, data))
        of_coco = estimate_uncertainty(texts, images, replace(matching, direction="t2i"))
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
        hidden, (matrix, bias) = layer_inputs(run.model.text, coco_store(run, work, data)), model.projections["text"]
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


def coco_store(run: Run, work: Path, data: Path) -> Store:
    """The captions of COCO as the text tower of a run reads them."""
    return run.model.text.processor.read([partial(npy_bytes, row) for row in np.load(coco_features(work, data))])[0]


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
    images, texts = (np.load(data / "flickr8k" / FLICKR8K[key]) for key in ("images", "texts"))
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


def resampled_together(run: Run, kind: str) -> np.ndarray:
    """Queries that are resampled together: captions of one image; emoji texts match several and go alone."""
    test = load_split(run.model, run.recipe.data, "test").data
    if kind == "image" or run.recipe.data.source == "emoji":
        return np.arange(len(test.image_ids) if kind == "image" else len(test.texts))
    matches = test.relevance().transpose()
    image: np.ndarray = matches.indices[matches.indptr[:-1]]
    return image
