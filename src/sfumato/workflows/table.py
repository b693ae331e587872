"""A table of runs: mean and standard deviation over seeds of what `sfumato evaluate run` measures.

Figures come from evaluation-SPLIT-DISTANCE.json in the folders of the runs. The file is made where it is missing or
older than the weights.
"""

import difflib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from sfumato.errors import UserError, say
from sfumato.files import MODEL, RECIPE, read_json
from sfumato.models.build import build_loss
from sfumato.models.embed import evaluate_run
from sfumato.models.recipe import BOOKKEEPING, Recipe, differing_keys, leaves, load_recipe, recipe_values
from sfumato.models.run import load_run
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
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`cat RUN/recipe.toml` shows them"
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
            raise UserError(
                f"{first.folder} and {second.folder} differ in more than train.seed, so their mean is not one over"
                f" seeds: {', '.join(named)}{rest}; give each its row: --group {','.join([*keys, *differing[:_NAMED]])}"
            )
        if (seed := first.recipe.train.seed) == second.recipe.train.seed:
            same = f"have the same recipe and the same train.seed={seed}, so they are not two seeds"
            raise UserError(f"{first.folder} and {second.folder} {same}; leave one of them out")
    return groups
