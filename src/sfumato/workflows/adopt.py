"""Adopting a frozen model: calibrated probabilities for embeddings or encoders that somebody already has.

An adopted model is a run folder whose means are the frozen model's own embeddings, scaled to unit length. Nothing of
its ranking is learnt or changed; what is fitted are the probabilities. So every command that takes a run takes it.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from safetensors.numpy import save

from sfumato import files
from sfumato.arrays import Array, as_numpy
from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.logits import Population
from sfumato.data.coco import coco_images, json_kind
from sfumato.data.feature_tables import open_table, resolved_table
from sfumato.data.images import Problems
from sfumato.data.layouts import Fractions
from sfumato.data.pairs import PairData
from sfumato.data.sources import is_dataset_folder
from sfumato.data.splits import images_of_part
from sfumato.distances import get_distance
from sfumato.encoders.frozen import described_by
from sfumato.errors import UserError, need
from sfumato.evaluation.hits import HitFigures, first_hits, measure_hits, without_nearest, without_reference
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval
from sfumato.files import CALIBRATION, ENCODER, MODEL, RECIPE, is_unused, read_json, write_atomically, write_json
from sfumato.gaussian import Sides
from sfumato.ids import Direction
from sfumato.metrics.bootstrap import Interval, bootstrap, mean_statistic
from sfumato.models.calibrate import calibrate_split, embed_reference, some_positions
from sfumato.models.embed import embed_split, load_splits, prepare_split
from sfumato.models.model import remember_words
from sfumato.models.recipe import Recipe, check_recipe, save_recipe
from sfumato.models.run import ENCODERS, PROBLEMS, WORDS, Run, frozen_towers, load_run, with_whole_paths
from sfumato.workflows.search import LoadedModel

ADOPTED = "adopted.json"
"""File of a run folder with the figures of an adoption."""

VAL_FRACTION, TEST_FRACTION = 0.5, 0.3
"""Fractions of the images that calibrate and that measure, where the pairs name no splits."""

METHODS: dict[str, str] = {
    "reference": "distance, nearest items and reference queries",
    "nearest": "distance and nearest items",
    "distance": "distance and size of the gallery",
}
"""What the probability of each method but "auto" reads."""

_MOST_CALIBRATING, _MOST_MEASURING = 5_000, 3_000
"""Largest number of images, with their texts, that calibrate, and that measure."""

_MOST_WORDED = 20_000
"""Largest number of texts from which the model's subwords of words are learnt."""

MOST_QUERIES = 1_500
"""Largest number of queries of either side whose hits and scores calibrate, unless another is given."""


@dataclass(frozen=True)
class Comparison:
    """A method on the half of the calibrating images that it was not fitted on."""

    log_loss: float  # mean over the first hits of both directions, in nats; each direction has the same weight
    worse: Interval


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AdoptedModel(LoadedModel):
    """A frozen model with calibrated probabilities; :func:`adopt` makes one, and :func:`load` opens its folder again.

    It embeds the vectors of the frozen model, as texts and as images.
    """

    run: Run  # its run folder, loaded
    method: str  # what its probabilities read, one of METHODS
    comparison: Mapping[str, Comparison]  # by method, on the calibrating images; empty if the method was given
    retrieval: Evaluation | None  # recalls of the frozen model on the images that measure
    hits: Mapping[str, Sequence[HitFigures]]
    n_images: Mapping[str, int]
    n_texts: Mapping[str, int]
    n_queries: Mapping[Direction, int]
    n_left_out: int  # number of rows that no model can use; problems.jsonl names them
    seconds: float  # time of the adoption

    def __repr__(self) -> str:
        images, texts = sum(self.n_images.values()), sum(self.n_texts.values())
        return f"AdoptedModel({str(self.run.folder)!r}, {images} images, {texts} texts, method={self.method!r})"

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {
            "method": self.method,
            "comparison": {name: asdict(found) for name, found in self.comparison.items()},
            "retrieval": None if self.retrieval is None else asdict(self.retrieval),
            "hits": {name: [asdict(f) for f in found] for name, found in self.hits.items()},
            **{name: dict(getattr(self, name)) for name in ("n_images", "n_texts", "n_queries")},
            "n_left_out": self.n_left_out,
            "seconds": self.seconds,
        }


def adopt(
    images: str | Path | Array,
    texts: str | Path | Array,
    pairs: str | Path | Sequence[tuple[int, int]] | None = None,
    out: str | Path = "runs/adopted",
    *,
    method: str = "auto",
    val_fraction: float = VAL_FRACTION,
    test_fraction: float = TEST_FRACTION,
    population: str = "planted",
    max_queries: int = MOST_QUERIES,
    seed: int = 0,
) -> AdoptedModel:
    """Give the embeddings of a frozen model calibrated match probabilities.

    Args:
        images: (n, c) embeddings of images, or a file of them, see
            :func:`~sfumato.data.feature_tables.open_table`. Arrays are written into the folder.
        texts: (m, c) embeddings of texts, or a file of them.
        pairs: (image row, text row) of true pairs; or a file, see
            :func:`~sfumato.data.layouts.read_embedding_pairs`; None pairs row i with row i.
        out: folder of the run, new or empty.
        method: what probabilities read; "auto" fits all on one half of the calibrating images, and keeps the one whose
            first hits have the smallest log loss on the other half.
        val_fraction: fraction of the images that calibrate, where the pairs name no split "val".
        test_fraction: fraction of the images that measure, where they name no split "test". The others are the
            reference queries.
        population: see :func:`~sfumato.models.calibrate.calibrate_split`.
        max_queries: largest number of images, and of texts, of the split val that are queries of the fit. More make
            the probabilities of large data a little better; time grows with their number times the items.
        seed: of all random choices.

    Returns:
        The adopted model; it is written into the folder.

    Raises:
        UserError: a file is missing or damaged, sizes do not fit, nothing can be calibrated, or the folder is not
            empty.
        ValueError: an argument is out of range.
    """
    with _run_folder(Path(out), (images, texts, pairs)) as folder:
        tables = {name: _named_file(value, folder, name) for name, value in (("images", images), ("texts", texts))}
        channels = [open_table(table).table.channels for table in tables.values()]
        if channels[0] != channels[1]:
            found = f"images have {channels[0]} channels and texts {channels[1]}"
            way = "To bring two models into one space, train heads: sfumato train embeddings"
            raise UserError(f"{found}; embeddings of one frozen model have equally many. {way}")
        data = {"source": "embeddings", **tables, "path": _pair_file(pairs, folder), "equal_texts": "separate"}
        recipe = _recipe(data, channels[0], {"kind": "embeddings"}, (val_fraction, test_fraction), seed)
        return adopt_recipe(recipe, folder, method=method, population=population, max_queries=max_queries)


def _recipe(data: dict[str, str], channels: int, side: dict[str, Any], fractions: Fractions, seed: int) -> Recipe:
    """The recipe of a model whose means are its features; fractions (val, test)."""
    divided = data | {"val_fraction": fractions[0], "test_fraction": fractions[1]}
    means = {"dim": channels, "pooling": "average", "identity": True, "variance": False, "image": side, "text": side}
    values = {"name": "adopted", "data": divided, "train": {"seed": seed}, "model": means}
    return check_recipe(values | {"loss": {"name": "infonce", "distance": "squared_l2"}}, "adopt", of_run=True)


def adopt_encoders(
    model: str | Path | Any,
    data: str | Path,
    out: str | Path = "runs/adopted",
    *,
    method: str = "auto",
    val_fraction: float = VAL_FRACTION,
    test_fraction: float = TEST_FRACTION,
    population: str = "planted",
    max_queries: int = MOST_QUERIES,
    seed: int = 0,
) -> AdoptedModel:
    """Give a CLIP or SigLIP model calibrated match probabilities on images and captions of yours.

    Its embeddings are computed once, and cached by content: an interrupted adoption goes on where it was. Searches
    then embed their queries with the model.

    Args:
        model: hub name or local folder, of ONNX graphs as immich and transformers.js have them, or VISION+TEXT, two
            of fastembed, which need no torch; of transformers or sentence-transformers (CLIP); or of open_clip, see
            :func:`~sfumato.encoders.joint.is_open_clip`. Or a model in memory, whose weights are copied into the
            folder: a SentenceTransformer of images and texts, or the architecture and the model of open_clip, such as
            ("ViT-B-32", model).
        data: images with captions: a manifest (.csv, .jsonl, .parquet), a folder of images with .txt files, a
            Karpathy JSON or COCO's own captions beside the images, or a folder of
            :func:`~sfumato.data.sources.read_dataset`.
        out, method, val_fraction, test_fraction, population, max_queries, seed: see :func:`adopt`.

    Returns:
        The adopted model; it is written into the folder.

    Raises:
        UserError: the model or the data are missing, or a model in memory has settings that its copy would not have;
            or see :func:`adopt`.
        TypeError: model is an object of another kind, or data is no path.
    """
    if not isinstance(data, str | Path):
        way = "save a data set first, data.save_to_disk(FOLDER), and give its folder"
        raise TypeError(f"data: got a {type(data).__name__}, expected a path; {way}")
    path = Path(data)
    if not path.exists():
        known = "a manifest (.csv, .jsonl), a folder of images, a Karpathy JSON, COCO's own captions (.json)"
        raise UserError(f"no data at {path}; give {known}, or a folder of the package datasets")
    source, images = "datasets" if is_dataset_folder(path) else "folder", dict[str, str]()
    if path.suffix.lower() == ".json":
        source = "coco" if json_kind(read_json(path)) == "coco" else "karpathy"
        images = {"images": str(coco_images(path) if source == "coco" else path.resolve().parent)}
    pairs = {"source": source, "path": str(path.resolve()), "equal_texts": "merged", **images}
    named = isinstance(model, str | Path)
    with _run_folder(Path(out), (model, data)) as folder:
        if not named:
            with need("train", "a model in memory needs torch"):
                from sfumato.encoders.joint import save_model_object
            save_model_object(model, folder / ENCODER)
        towers = frozen_towers(name := str(model) if named else str(folder / ENCODER))
        if towers.image.dim != towers.text.dim:
            raise UserError(f"{name} embeds images and texts with different numbers of channels; it has no joint space")
        side = {"kind": "frozen", "backbone": with_whole_paths(name) if named else ENCODER, "projected": True}
        recipe = _recipe(pairs, towers.text.dim, side, (val_fraction, test_fraction), seed)
        return adopt_recipe(recipe, folder, method=method, population=population, max_queries=max_queries)


def adopt_recipe(
    recipe: Recipe, folder: Path, *, method: str = "auto", population: str = "planted", max_queries: int = MOST_QUERIES
) -> AdoptedModel:
    """Adopt the model and the data of a recipe, see :func:`adopt`."""
    if method != "auto" and method not in METHODS:
        raise UserError(f"adopt: unknown method {method!r}; known: auto, {', '.join(METHODS)}")
    if population not in get_args(Population):
        raise UserError(f"adopt: unknown queries {population!r}; known: {', '.join(get_args(Population))}")
    if max_queries < 1:
        raise UserError(f"adopt: max_queries must be at least 1, got {max_queries}")
    how = cast(Population, population), max_queries
    started, problems = time.monotonic(), Problems()
    splits = load_splits(recipe.data, problems)
    if "val" not in splits:
        found = f"the pairs have no split 'val' to calibrate on; they have {', '.join(splits)}"
        raise UserError(f"{found}. Leave the column split out, or name some pairs val")
    run, seed = _new_run(recipe, folder, splits), recipe.train.seed
    calibrating = _embedded(run, splits["val"], problems, "val", _MOST_CALIBRATING)
    reference = embed_reference(run.model, recipe.data, seed=seed)
    comparison = dict[str, Comparison]()
    try:
        if method == "auto":
            comparison = _compare(calibrating, reference, run.distance, how, seed)
        chosen = method if method != "auto" else min(comparison, key=lambda name: comparison[name].log_loss)
        calibration = _calibrate(calibrating, reference, run.distance, how, chosen)
    except ValueError as error:
        found = f"cannot calibrate on the {calibrating.sides[0].n} images of the split val: {error}. Either the pairs"
        ways = "are wrong, or they are too few, or the model does not bring the pairs closer together than others"
        raise UserError(f"{found} {ways}") from error
    calibration.save(folder / CALIBRATION)
    retrieval, hits = None, dict[str, list[HitFigures]]()
    if "test" in splits:
        split = _embedded(run, splits["test"], problems, "test", _MOST_MEASURING)
        sides, (d, match) = split.sides, split.pairs(run.distance)
        retrieval = evaluate_retrieval(*sides, split.data.relevance(), distance=run.distance)
        measure = partial(measure_hits, distance=d, match=match, embedded=sides, sizes=(), population=population)
        hits = {"served": measure(calibration), "distance": measure(without_nearest(calibration))}
    problems.write(folder / PROBLEMS)
    run = load_run(folder)
    adopted = AdoptedModel(
        **{f.name: getattr(run, f.name) for f in fields(LoadedModel)},
        run=run,
        method=chosen,
        comparison=comparison,
        retrieval=retrieval,
        hits=hits,
        n_images={name: len(data.image_ids) for name, data in splits.items()},
        n_texts={name: len(data.text_ids) for name, data in splits.items()},
        n_queries={direction: len(fit.scores.nearest) for direction, fit in calibration.directions.items()},
        n_left_out=len(problems),
        seconds=time.monotonic() - started,
    )
    write_json(folder / ADOPTED, adopted.to_json())
    return adopted


def _new_run(recipe: Recipe, folder: Path, splits: Mapping[str, PairData]) -> Run:
    """Write the folder of a run whose means are the frozen model's, and load it."""
    if described := described_by(next(iter(splits.values()))):
        write_json(folder / ENCODERS, described)
    # No weights; the logits of a loss without training, for versions that read them.
    logits = {"loss/logits.log_logit_scale": np.float32(np.log(5)), "loss/logits.logit_bias": np.float32(0)}
    note = {"state": json.dumps({"about": {"epoch": 0}, "optimiser": {}})}
    write_atomically(folder / MODEL, save({name: np.array(value) for name, value in logits.items()}, note))
    save_recipe(recipe, folder / RECIPE)
    run = load_run(folder)
    remember_words(run.model, [text for data in splits.values() for text in data.texts][:_MOST_WORDED], folder / WORDS)
    return run


@dataclass(frozen=True, eq=False)
class _Split:
    """Some images of a split with their texts, embedded."""

    sides: Sides
    data: PairData

    def part(self, images: np.ndarray) -> "_Split":
        """Some of the images, with their texts."""
        texts = np.unique(self.data.pairs[np.isin(self.data.pairs[:, 0], images), 1])
        return _Split((self.sides[0][images], self.sides[1][texts]), self.data.keep_images(images))

    def pairs(self, distance: str) -> tuple[Array, np.ndarray]:
        """(n, m) distances and matches."""
        return get_distance(distance).matrix(*self.sides), self.data.relevance().to_dense()


def _embedded(run: Run, data: PairData, problems: Problems, name: str, most: int) -> _Split:
    """A random part of a split, of at most that many images."""
    chosen = some_positions(len(data.image_ids), most, run.recipe.train.seed)
    prepared = prepare_split(run.model, data.keep_images(chosen), problems, name)
    return _Split(embed_split(run.model, prepared), prepared.data)


_How = tuple[Population, int]
"""The population of queries that a calibration is for, and their largest number."""


def _calibrate(split: _Split, reference: Sides | None, distance: str, how: _How, method: str) -> Calibration:
    """Fit the probabilities of a method."""
    (population, most), known = how, reference if method == "reference" else None
    fitted = calibrate_split(
        split.sides, split.data, distance, split="val", max_queries=most, population=population, reference=known
    )
    return without_nearest(fitted) if method == "distance" else fitted


def _compare(split: _Split, reference: Sides | None, distance: str, how: _How, seed: int) -> dict[str, Comparison]:
    """Fit every method on half of the images, and compare their first hits on the other half."""
    half, other = (split.part(images_of_part(split.data, part, 2, seed=seed)) for part in (0, 1))
    d, match = other.pairs(distance)
    fitted = _calibrate(half, reference, distance, how, "reference")
    methods = {"nearest": without_reference(fitted), "distance": without_nearest(fitted)}
    methods |= {"reference": fitted} if fitted.tensors() else {}
    losses, weights, group = dict[str, np.ndarray](), np.empty(0), np.empty(0)
    hits_of = partial(first_hits, distance=d, match=match, embedded=other.sides, population=how[0])
    for name, calibration in methods.items():
        found = [hits_of(calibration, direction=direction) for direction in get_args(Direction)]
        losses[name] = np.concatenate([hits.log_loss() for hits in found])
        weights = np.concatenate([np.full(len(hits.queries), 1 / len(hits.queries)) for hits in found])
        group = np.concatenate([hits.image(match) for hits in found])
    best = min(methods, key=lambda name: float(weights @ losses[name]))
    statistics = {name: mean_statistic(losses[name] - losses[best], weights) for name in methods}
    worse = bootstrap(statistics, len(weights), groups=group, seed=seed)
    listed = [name for name in METHODS if name in methods]
    return {name: Comparison(float(weights @ losses[name] / weights.sum()), worse[name]) for name in listed}


@contextlib.contextmanager
def _run_folder(folder: Path, inputs: Sequence[Any]) -> Iterator[Path]:
    """An empty folder for an adopted model. If the block fails, all is as before, but for open files on Windows."""
    for value in inputs:
        if isinstance(value, str | Path) and Path(value).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{value} lies in {folder}; give another folder with --out")
    if not is_unused(folder):
        raise UserError(f"{folder} exists already; give a new or empty folder with --out, or remove it")
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=bool(files.IN_USE))  # Errors hold tables open.
        if existed:
            folder.mkdir(exist_ok=True)
        raise


def _named_file(value: str | Path | Array, folder: Path, name: str) -> str:
    """The absolute path of a table; an array is written into the folder."""
    if isinstance(value, str | Path):
        return resolved_table(str(value))
    array = as_numpy(value)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{name}: got an array of {array.shape} {array.dtype}; expected (n, c) floating numbers")
    path = folder / f"{name}.npy"
    np.save(path, array, allow_pickle=False)
    return str(path.resolve())


def _pair_file(pairs: str | Path | Sequence[tuple[int, int]] | None, folder: Path) -> str:
    """The absolute path of the pairs; "" for row i with row i. Rows are written into the folder."""
    if pairs is None:
        return ""
    if isinstance(pairs, str | Path):
        return str(Path(pairs).resolve())
    rows = np.asarray(pairs)
    if rows.ndim != 2 or rows.shape[1] != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise UserError(f"pairs: got {rows.shape} {rows.dtype}; expected (p, 2) rows of an image and a text")
    path = folder / "pairs.csv"
    np.savetxt(path, rows, "%d", delimiter=",", header="image,text", comments="")
    return str(path.resolve())
