"""What a run is worth: the table of several runs over seeds, and the uncertainty benchmark of a model on a split.

Figures of the table come from evaluation-SPLIT-DISTANCE.json in the folders of the runs; the file is made where it is
missing or older than the weights. The benchmark embeds the items that it needs, and uses no labels for its estimates:
the match logits are fitted on the validation split.
"""

import difflib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.calibration.calibrator import Calibration
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.data.splits import WORDINGS, images_of_part
from sfumato.distances import get_distance
from sfumato.errors import UserError, did_you_mean, say
from sfumato.evaluation import trust
from sfumato.evaluation.estimators import Matching, usable_estimators
from sfumato.evaluation.hits import Fold, HitFigures, measure_hits, without_nearest
from sfumato.evaluation.protocols import EmbeddedSplit
from sfumato.files import MODEL, RECIPE, read_json
from sfumato.gaussian import GaussianEmbedding, Sides
from sfumato.ids import DIRECTION_OF, Side
from sfumato.metrics.relevance import Relevance
from sfumato.models.build import build_loss
from sfumato.models.calibrate import calibrate_split, embed_reference, queries_of
from sfumato.models.embed import embed_split, evaluate_run, load_split
from sfumato.models.model import Model
from sfumato.models.recipe import BOOKKEEPING, Recipe, differing_keys, leaves, load_recipe, recipe_values
from sfumato.models.run import Run, load_run
from sfumato.models.sections import UnknownLossConfig

METRICS = ("rsum", "t2i.recall@1", "i2t.recall@1")

_WITHOUT_EFFECT = ("train.seed", "name", "prefer", "train.threads", "train.device", *BOOKKEEPING)
"""Keys that name a run or say where it was trained, but not how."""

_NAMED = 5
"""Number of differing keys that a message names."""

_TAGS = (".name", ".kind")
"""Ends of keys that decide which other keys their section has."""


@dataclass(frozen=True)
class OverSeeds:
    """A figure over several seeds."""

    mean: float  # of the values
    deviation: float | None  # their standard deviation (n - 1); None for a single value
    values: tuple[float, ...]  # in the order of the runs, without undefined ones

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.deviation is None else f"{self.mean:.2f} ± {self.deviation:.2f}"


def over_seeds(results: Sequence[Mapping[str, float | None]]) -> dict[str, OverSeeds]:
    """Mean and standard deviation of every figure over several runs."""
    summary = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = tuple(float(value) for result in results if (value := result.get(name)) is not None)
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else None
            summary[name] = OverSeeds(statistics.mean(values), deviation, values)
    return summary


@dataclass(frozen=True)
class SavedRun:
    """A run folder of which only the recipe is read."""

    folder: Path
    recipe: Recipe

    @property
    def distance(self) -> str:
        """The name of the distance that it ranks by."""
        loss = self.recipe.loss
        return loss.distance if isinstance(loss, UnknownLossConfig) else build_loss(self.recipe).distance.name


@dataclass(frozen=True)
class Row:
    """A method: runs that differ in their seed alone."""

    label: tuple[Any, ...]  # the value of each key; None where a recipe lacks it
    runs: tuple[str, ...]  # their folders
    figures: dict[str, OverSeeds]  # by metric

    def to_json(self, keys: Sequence[str]) -> dict[str, Any]:
        """The row as JSON values; recalls and precisions are fractions, rsum at most 6."""
        figures = {name: asdict(value) for name, value in self.figures.items()}
        return {"label": dict(zip(keys, self.label, strict=True)), "runs": list(self.runs), "figures": figures}


def table_of_runs(
    folders: Iterable[str | Path], keys: Sequence[str] = (), metrics: Sequence[str] = METRICS, *, split: str = "test"
) -> list[Row]:
    """The rows of a table: runs grouped by keys of their recipes, and their figures. Evaluates those that were not."""
    rows = []
    for label, members in group_runs(read_runs(folders), keys).items():
        figures = [figures_of(figures_file(run, split), metrics) for run in members]
        rows.append(Row(label, tuple(str(run.folder) for run in members), over_seeds(figures)))
    return rows


def figures_file(run: SavedRun, split: str) -> Path:
    """The file with the figures of a run, made if it is missing or older than the weights."""
    path = run.folder / f"evaluation-{split}-{run.distance}.json"
    if not path.is_file() or path.stat().st_mtime_ns < (run.folder / MODEL).stat().st_mtime_ns:
        say(f"evaluating {run.folder} on {split}")
        return evaluate_run(load_run(run.folder, device="auto"), split)[1]
    return path


def figures_of(path: Path, metrics: Sequence[str]) -> dict[str, float | None]:
    """Numbers of a file of figures by their paths, e.g. t2i.recall@1."""
    values = read_json(path)
    known = {key: value for key, value in leaves(values) if value is None or isinstance(value, int | float)}
    for metric in metrics:
        if metric not in known and values.get(metric.partition(".")[0], 0) is not None:
            near = difflib.get_close_matches(metric, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"{path} has no metric {metric!r}; {hint}Known: {', '.join(known)}")
    return {metric: known.get(metric) for metric in metrics}


def read_runs(folders: Iterable[str | Path]) -> list[SavedRun]:
    """The recipes of runs; a run that is given twice is refused."""
    places: dict[Path, Path] = {}
    for folder in map(Path, folders):
        for name in (RECIPE, MODEL):
            if not (folder / name).is_file():
                raise UserError(f"{folder} is not a trained run (no {name} in it)")
        if (other := places.setdefault(folder.resolve(), folder)) is not folder:
            raise UserError(f"{other} and {folder} are the same run; give it once")
    return [SavedRun(folder, load_recipe(folder / RECIPE)) for folder in places.values()]


def different_keys(first: Recipe, second: Recipe) -> list[str]:
    """The keys in which two recipes differ, but for the seed, what has no effect, and what follows from a new kind."""
    keys = [key for key in differing_keys(first, second) if key not in _WITHOUT_EFFECT]
    sections = tuple(key.rpartition(".")[0] + "." for key in keys if key.endswith(_TAGS))
    return [key for key in keys if key.endswith(_TAGS) or not key.startswith(sections)]


def group_runs(runs: Sequence[SavedRun], keys: Sequence[str]) -> dict[tuple[Any, ...], list[SavedRun]]:
    """The runs by their values of some keys, in the order of the runs. Those of a group differ in their seed alone."""
    values = [recipe_values(run.recipe) for run in runs]
    known = sorted(set().union(*values))
    if unknown := next((key for key in keys if key not in known), None):
        hint = did_you_mean(unknown, known, "`cat RUN/recipe.toml` shows them")
        raise UserError(f"--group {unknown}: no recipe of these runs has this key; {hint}")
    groups: dict[tuple[Any, ...], list[SavedRun]] = {}
    for run, own in zip(runs, values, strict=True):
        label = tuple(tuple(v) if isinstance(v := own.get(key), list) else v for key in keys)
        groups.setdefault(label, []).append(run)
    for first, second in (pair for members in groups.values() for pair in combinations(members, 2)):
        if differing := different_keys(first.recipe, second.recipe):
            both = differing_keys(first.recipe, second.recipe)
            named = [f"{key} ({both[key][0]}, {both[key][1]})" for key in differing[:_NAMED]]
            rest = f", and {len(differing) - _NAMED} more keys" if len(differing) > _NAMED else ""
            found = f"{first.folder} and {second.folder} differ in more than train.seed"
            way = f"give each its row: --group {','.join([*keys, *differing[:_NAMED]])}"
            raise UserError(f"{found}, so their mean is not one over seeds: {', '.join(named)}{rest}; {way}")
        if (seed := first.recipe.train.seed) == second.recipe.train.seed:
            same = f"have the same recipe and the same train.seed={seed}, so they are not two seeds"
            raise UserError(f"{first.folder} and {second.folder} {same}; leave one of them out")
    return groups


_SIDES: tuple[Side, ...] = ("text", "image")
"""Sides of the queries."""

_LEVEL = 0.95

_HIT_IMAGES, _HIT_PAIRS = 5_000, 50_000_000
"""Largest number of images, and of pairs with all texts, in which the probabilities of hits are measured."""


def trust_model(
    retrieval_model: Model, data: DataConfig, split: str, *, n_resamples: int = 1000, seed: int = 0
) -> trust.TrustReport:
    """Measure the quality of a model's uncertainties on a split of any data."""
    model = retrieval_model.model
    prepared = load_split(model, data, split)
    embedded = EmbeddedSplit(*embed_split(model, prepared), prepared.data.relevance())
    spelt = prepared.data.texts if _worded(prepared.data) else None
    estimators = usable_estimators(embedded.images, embedded.texts, texts=spelt)
    left_out = len(estimators) < len(usable_estimators(texts=spelt))
    notes = ["estimators that need variances are left out: some embeddings are points"] if left_out else []
    many = trust.many_to_many(embedded.relevance)
    proxies = {} if many else _proxies(embedded.texts, prepared.data, embedded.relevance)
    logits = retrieval_model.distance, retrieval_model.logit_scale, retrieval_model.logit_bias
    directions: dict[str, trust.DirectionTrust] = {}
    for side in _SIDES:
        query = embedded.query(DIRECTION_OF[side])
        values, groups = proxies, trust.resampled_together(embedded.relevance, prepared.data.groups, side == "text")
        if side == "text" and groups is not None:  # A caption has the proxies of its image, if it has an image.
            lacking = np.full(embedded.texts.n, np.nan)
            values = {k: np.append(v, lacking)[groups] for k, v in proxies.items()}
        directions[query.direction] = trust.measure_trust(
            query.queries, query.gallery, query.relevance, Matching(*logits, query.direction),
            texts=spelt if side == "text" else None, multiplicity=many, proxies=values, groups=groups,
            n_resamples=n_resamples, level=_LEVEL, seed=seed,
        )  # fmt: skip
    hits, unmeasured = _hits(retrieval_model, data, embedded, prepared.data, split, seed)
    return trust.TrustReport(
        split=split,
        distance=retrieval_model.distance,
        calibrated=retrieval_model.calibrated,
        n_images=embedded.images.n,
        n_texts=embedded.texts.n,
        n_resamples=n_resamples,
        level=_LEVEL,
        seed=seed,
        estimators=trust.described(estimators),
        directions=directions,
        notes=[*notes, *unmeasured],
        hits=hits,
    )


def _hits(
    retrieval_model: Model, data: DataConfig, split_embeddings: EmbeddedSplit, pairs: PairData, split: str, seed: int
) -> tuple[dict[str, list[HitFigures]], list[str]]:
    """The probabilities beside hits, by what they are computed from, and notes on them.

    Queries that the calibration was fitted on have the probabilities of a fit on the other half of them.
    """
    calibration = retrieval_model.calibration
    if split == WORDINGS and isinstance(retrieval_model, Run) and retrieval_model.training_calibration is not None:
        calibration = retrieval_model.training_calibration
    if calibration is None:
        return {}, ["the probabilities of hits are left out: the model has no calibration"]
    images, texts = split_embeddings.images, split_embeddings.texts
    n, m = images.n, texts.n
    some = np.random.default_rng([seed, 2]).permutation(n)
    chosen = np.sort(some[: min(_HIT_IMAGES, n, max(2, _HIT_PAIRS // m))])
    own = calibration.metadata.get("split") == split
    match = pairs.match(chosen, np.arange(m))
    beside = match.astype(bool).any(0) if own or len(chosen) < n else np.ones(m, bool)
    embedded = images[chosen].numpy(), texts[beside].numpy()
    name = retrieval_model.distance
    distance = get_distance(name).matrix(*embedded)
    match, notes = match[:, beside], list[str]()
    folds: Sequence[Fold] = [Fold(calibration, *(np.arange(size) for size in match.shape))]
    if own:
        reference = embed_reference(retrieval_model.model, data) if calibration.tensors() else None
        population = calibration.metadata.get("queries", "planted")
        fit = partial(calibrate_split, split=split, population=population, reference=reference)
        try:
            folds = cross_fitted(embedded, pairs.keep_images(chosen), name, fit, seed)
        except ValueError as error:
            return {}, [f"the probabilities of hits are left out: {error}"]
        notes.append(f"the calibration was fitted on {split}: each half has the probabilities of a fit on the other")
    alone = [replace(fold, calibration=without_nearest(fold.calibration)) for fold in folds]
    both = {"served": folds, "distance": alone}
    measured = {kind: measure_hits(own, distance, match, embedded=embedded, seed=seed) for kind, own in both.items()}
    if len(chosen) < n:
        notes.append(f"the probabilities of hits are those among {len(chosen)} random images")
    return measured, notes


def _worded(data: PairData) -> bool:
    """Whether the data have texts; those of rows of features may have only ids."""
    return not data.text_rows or data.texts != data.text_ids


def _proxies(texts: GaussianEmbedding, data: PairData, relevance: Relevance) -> dict[str, np.ndarray]:
    """Ambiguity of an image by its captions, for data with one image for each text."""
    words = {"caption_words": trust.caption_words(data.texts, relevance)} if _worded(data) else {}
    return {"caption_distance": trust.caption_distance(texts, relevance)} | words


def cross_fitted(sides: Sides, data: PairData, distance: str, fit: Callable[..., Calibration], seed: int) -> list[Fold]:
    """Calibrate on the queries of each half of the images of a split, in the gallery of all.

    Groups of images are not divided. A text with images in both halves is in neither. fit is :func:`calibrate_split`.
    """
    halves = [images_of_part(data, part, 2, seed=seed) for part in (0, 1)]
    queries = [queries_of(data, half) for half in halves]
    if not all(len(texts) for _, texts in queries):
        raise ValueError("the split cannot be halved: all texts of one half have images in the other too")
    fitted = (fit(sides, data, distance, of_images=half, seed=seed) for half in halves)
    return [Fold(calibration, *other) for calibration, other in zip(fitted, reversed(queries), strict=True)]
