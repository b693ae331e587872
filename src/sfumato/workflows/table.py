"""A table of runs: a row for each method, a column for each metric, mean and deviation over seeds, and what is best.

Figures come from evaluation-SPLIT-DISTANCE.json in the folders of the runs, single queries from
queries-SPLIT-DISTANCE.csv beside them; both are made where they are missing or older than the weights.
"""

import difflib
import glob
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.errors import UserError, counted
from sfumato.evaluation.compare import (
    BOTH,
    COMPARED,
    RSUM,
    Difference,
    OverSeeds,
    PerQuery,
    compare_per_query,
    mean_per_query,
    over_seeds,
    queries_by_image,
    query_name,
    read_per_query,
    with_rsum,
    write_per_query,
)
from sfumato.evaluation.embedded_input import measure
from sfumato.evaluation.ground_truth import ALL_METRICS
from sfumato.files import read_json
from sfumato.models.build import build_loss
from sfumato.models.evaluate import embed_for_evaluation, evaluate_run
from sfumato.models.recipe import Recipe, absolute_recipe, find_recipe, load_recipe
from sfumato.models.run import LOG, MODEL, RECIPE, load_run
from sfumato.models.sections import UnknownLossConfig
from sfumato.models.seeds import SavedRun, different_keys, group_runs, read_runs, without_followers
from sfumato.progress import say
from sfumato.training.loop import fit
from sfumato.training.step import DivergedError

LEVEL = 0.05
"""Level of the tests of a table."""

TESTED = {RSUM: (BOTH, RSUM)} | {f"{side}.{name}": (side, name) for side in ("t2i", "i2t") for name in COMPARED}
"""By metric the direction and the name of its single queries. Larger is better; fractions, and rsum of at most 6."""

_OF_DATA = ("uncertainty", "multiplicity", "total_variance", "t2i_by_kind", "i2t_by_kind")
"""Parts of an evaluation whose names depend on the data and the model."""

METRICS = (RSUM, "t2i.recall@1", "i2t.recall@1")


@dataclass(frozen=True)
class TableOptions:
    """What a table shows."""

    metrics: tuple[str, ...] = METRICS  # paths in the file of an evaluation, e.g. t2i.recall@1
    distances: tuple[str, ...] = ()  # to rank by; empty: each run by its own
    split: str = "test"


@dataclass(frozen=True)
class Row:
    """A method: runs that differ in their seed alone."""

    label: tuple[Any, ...]  # the value of each key; None where a recipe lacks it
    runs: tuple[str, ...]  # their folders
    figures: dict[str, OverSeeds]  # by column


@dataclass(frozen=True)
class Best:
    """The row with the highest mean in a column, and the tests that compare each other row with it."""

    row: int
    others: dict[int, Difference]  # by row; other - best

    @property
    def differs(self) -> bool:
        """Whether it differs from every other row."""
        return bool(self.others) and all(one.p_value < LEVEL for one in self.others.values())


@dataclass(frozen=True)
class RunsTable:
    """A table of runs."""

    keys: tuple[str, ...]  # by which the runs are grouped
    columns: tuple[str, ...]  # a metric, and "by DISTANCE" if there are several distances
    split: str
    distances: tuple[str, ...]  # that the runs were ranked by
    rows: tuple[Row, ...]
    best: dict[str, Best]  # by column; only metrics of single queries
    n_queries: int  # of both directions
    n_groups: int  # images, of which the queries of one count together
    also: tuple[str, ...] = ()  # other keys in which rows differ
    notes: tuple[str, ...] = ()  # what is missing, and why

    def to_json(self) -> dict[str, Any]:
        """The table as JSON values; recalls and precisions are fractions, rsum at most 6."""
        rows = [
            {"label": dict(zip(self.keys, row.label, strict=True)), "runs": list(row.runs)}
            | {"figures": {name: asdict(value) for name, value in row.figures.items()}}
            for row in self.rows
        ]
        best = {
            column: {
                "row": one.row,
                "differs": one.differs,
                "others": [{"row": row} | difference.to_json() for row, difference in one.others.items()],
            }
            for column, one in self.best.items()
        }
        plain = ("columns", "split", "distances", "n_queries", "n_groups", "also", "notes")
        return {"group": list(self.keys), "level": LEVEL, "rows": rows, "best": best} | {
            name: value if isinstance(value := getattr(self, name), str | int) else list(value) for name in plain
        }


def find_runs(paths: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """The run folders among paths and patterns, or in a single folder; and what else was named, in words."""
    found: list[Path] = []
    others: list[str] = []
    for path in map(Path, paths):
        matches = [path] if path.exists() else [Path(one) for one in sorted(glob.glob(str(path)))]
        if not matches:
            raise UserError(f"--runs {path}: there is no such folder")
        for one in matches:
            inside = [one] if (one / RECIPE).is_file() else []
            if not inside and len(paths) == 1 and one == path:  # Of many, a folder of other runs is none of them.
                inside = sorted(file.parent for file in one.glob(f"*/{RECIPE}"))
            found += inside
            others += [] if inside else [str(one)]
    if not found:
        raise UserError(f"--runs {paths[0]}: no run there; a run is a folder that `sfumato train` has written")
    return found, [f"Left out, because they are no runs: {', '.join(others)}."] if others else []


def table_of_runs(
    folders: Sequence[Path],
    keys: Sequence[str],
    options: TableOptions | None = None,
    *,
    notes: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> RunsTable:
    """Group runs by keys of their recipes, evaluate those that were not, and test what is best."""
    options = options or TableOptions()
    check_metrics(options.metrics)
    if twice := next((key for key in keys if list(keys).count(key) > 1), None):
        raise UserError(f"--group names {twice} twice")
    runs = read_runs(folders)
    groups = group_runs(runs, keys)
    results = _all_results(runs, options, device)
    _check_same_queries(runs, results)
    columns = {
        f"{metric} by {distance}" if len(options.distances) > 1 else metric: (distance, metric)
        for distance in options.distances or ("",)
        for metric in options.metrics
    }
    rows, best = [], {}
    for label, members in groups.items():
        figures = [
            {column: _figure(results[run.folder][d].figures, metric, run) for column, (d, metric) in columns.items()}
            for run in members
        ]
        rows.append(Row(label, tuple(str(run.folder) for run in members), over_seeds(figures)))
    for column, (distance, metric) in columns.items():
        if metric in TESTED:
            queries = [[results[run.folder][distance].queries for run in members] for members in groups.values()]
            best[column] = _best(rows, column, [mean_per_query(one) for one in queries], *TESTED[metric])
    one = next(iter(results[runs[0].folder].values())).queries
    used = dict.fromkeys(options.distances or (own_distance(run.recipe) for run in runs))
    return RunsTable(
        tuple(keys), tuple(columns), options.split, tuple(used), tuple(rows), best,
        int((one.direction != BOTH).sum()), len(set(one.group.tolist())), _also(list(groups.values()), keys),
        (*notes, *filter(None, map(_unfinished, runs))),
    )  # fmt: skip


def check_metrics(metrics: Sequence[str]) -> None:
    """Refuse, before any work, a metric that no evaluation has; parts that depend on the data are checked later."""
    known = [*TESTED, *(f"{side}.{name}" for side in ("t2i", "i2t") for name in ALL_METRICS if name not in COMPARED)]
    for i, metric in enumerate(metrics):
        if metric in metrics[:i]:
            raise UserError(f"--metrics names {metric} twice")
        if metric not in known and metric.partition(".")[0] not in _OF_DATA:
            near = difflib.get_close_matches(metric, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            others = ", ".join(f"{name}.NAME" for name in _OF_DATA)
            raise UserError(f"unknown metric {metric!r}{hint} Known: {', '.join(known)}, {others}")


def own_distance(recipe: Recipe) -> str:
    """The distance that a run ranks by, by its recipe."""
    return recipe.loss.distance if isinstance(recipe.loss, UnknownLossConfig) else build_loss(recipe).distance.name


def _unfinished(run: SavedRun) -> str:
    """What is to be said of a run whose training has not ended."""
    log = run.folder / LOG
    epochs = len(log.read_text(encoding="utf-8").splitlines()) if log.is_file() else run.recipe.train.epochs
    wanted = run.recipe.train.epochs
    return f"{run.folder} has {epochs} of its {counted(wanted, 'epoch')}." if epochs < wanted else ""


@dataclass(frozen=True, eq=False)
class _Result:
    """What a run reaches by one distance."""

    figures: dict[str, Any]  # of evaluation-SPLIT-DISTANCE.json
    queries: PerQuery  # with the rows of the rsum


def _all_results(
    runs: Sequence[SavedRun], options: TableOptions, device: torch.device | str
) -> dict[Path, dict[str, _Result]]:
    """By folder and distance the results of all runs; the distance is "" where each run has its own."""
    found: dict[Path, dict[str, _Result]] = {}
    for number, run in enumerate(runs, 1):
        names = {distance: distance for distance in options.distances} or {"": own_distance(run.recipe)}
        _evaluate_missing(run, tuple(names.values()), options.split, f"run {number} of {len(runs)}", device)
        found[run.folder] = {}
        for key, distance in names.items():
            figures, queries = _files(run, options.split, distance)
            found[run.folder][key] = _Result(read_json(figures), with_rsum(read_per_query(queries)))
    return found


def _files(run: SavedRun, split: str, distance: str) -> tuple[Path, Path]:
    return run.folder / f"evaluation-{split}-{distance}.json", run.folder / f"queries-{split}-{distance}.csv"


def _evaluate_missing(
    run: SavedRun, distances: Sequence[str], split: str, place: str, device: torch.device | str
) -> None:
    """Evaluate a run by the distances whose files are missing, or older than its weights."""
    written = (run.folder / MODEL).stat().st_mtime_ns
    fits = {
        distance: all(file.is_file() and file.stat().st_mtime_ns >= written for file in _files(run, split, distance))
        for distance in distances
    }
    if missing := [distance for distance in distances if not fits[distance]]:
        say(f"{place}: evaluating {run.folder} on {split}, by {', '.join(missing)}")
        loaded = load_run(run.folder, device=device)
        embedded = embed_for_evaluation(loaded, loaded.recipe.data, split)
        for distance in missing:
            evaluate_run(loaded, split, distance, embedded=embedded)
            measured = measure(embedded, loaded.ranking_distance(distance))
            write_per_query(_files(run, split, distance)[1], queries_by_image(measured.ranks))


def _figure(found: Mapping[str, Any], metric: str, run: SavedRun) -> float | None:
    """A number of an evaluation by its path; None where the evaluation has nothing of that part."""
    known = dict(_numbers(found))
    if metric in known or found.get(metric.partition(".")[0], run) is None:
        return known.get(metric)
    names = [name for name in known if name.startswith(metric.partition(".")[0])]
    raise UserError(f"the evaluation of {run.folder} has no {metric}; it has {', '.join(names) or 'no such part'}")


def _numbers(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float | None]]:
    found: list[tuple[str, float | None]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, int | float):
            found.append((f"{prefix}{key}", value))
    return found


def _check_same_queries(runs: Sequence[SavedRun], results: Mapping[Path, Mapping[str, _Result]]) -> None:
    """Refuse runs of different data."""
    keys = []
    for run in runs:
        table = next(iter(results[run.folder].values())).queries
        keys.append(
            {key: group for key, group in zip(table.keys(), table.group.tolist(), strict=True) if key[1] != BOTH}
        )
    for run, own in zip(runs[1:], keys[1:], strict=True):
        if own != keys[0]:
            lone = min(keys[0].keys() ^ own.keys(), default=None)
            why = "the queries have other matches" if lone is None else f"{query_name(lone)} is in one of them only"
            raise UserError(
                f"{runs[0].folder} and {run.folder} were measured on different data: {why}. A table needs the same"
                " split of the same data for all runs"
            )


def _best(rows: Sequence[Row], column: str, means: Sequence[PerQuery], direction: str, metric: str) -> Best:
    """The row with the highest mean, compared with each other row query by query."""
    best = max(range(len(rows)), key=lambda k: rows[k].figures[column].mean)
    sides = [mean.select(np.flatnonzero(mean.direction == direction)) for mean in means]
    tests = {k: compare_per_query(sides[best], sides[k], metrics=(metric,)) for k in range(len(rows)) if k != best}
    return Best(best, {k: test for k, (test,) in tests.items()})


def _also(groups: Sequence[Sequence[SavedRun]], keys: Sequence[str]) -> tuple[str, ...]:
    """Keys in which rows differ beside those that they are grouped by."""
    firsts = [members[0].recipe for members in groups]
    found = dict.fromkeys(key for other in firsts[1:] for key in different_keys(firsts[0], other))
    return tuple(key for key in without_followers([*found, *keys]) if key not in keys)


# ---------------------------------------------------------------- a grid of runs


def read_vary(given: Sequence[str]) -> dict[str, list[str]]:
    """The values of each KEY=VALUE,VALUE; commas within brackets do not divide."""
    grid: dict[str, list[str]] = {}
    for one in given:
        key, equals, text = one.partition("=")
        values = [value.strip() for value in re.split(r",(?![^\[]*\])", text)]
        if not equals or not all(values):
            raise UserError(f"--vary {one}: expected KEY=VALUE,VALUE, e.g. loss.alpha=0,0.1")
        if key.strip() in grid or key.strip() == "train.seed":
            why = "--seeds N gives the seeds" if key.strip() == "train.seed" else "give all values of a key at once"
            raise UserError(f"--vary {one}: {why}")
        grid[key.strip()] = values
    return grid


def plan_grid(recipe: str, overrides: Sequence[str], grid: Mapping[str, Sequence[str]], n_seeds: int) -> list[Recipe]:
    """The recipes of all combinations of values, each with its seeds."""
    planned: list[Recipe] = []
    for values in itertools.product(*grid.values()):
        changes = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
        one = load_recipe(find_recipe(recipe), [*overrides, *changes], own=True)
        for seed in range(one.train.seed, one.train.seed + n_seeds):
            planned.append(one.model_copy(update={"train": one.train.model_copy(update={"seed": seed})}))
            if planned[-1] in planned[:-1]:
                raise UserError(f"--vary: {' '.join(changes)} is a recipe that is there already; give each value once")
    return planned


def table_of_grid(
    recipes: Sequence[Recipe],
    keys: Sequence[str],
    runs: Path,
    options: TableOptions | None = None,
    *,
    device: torch.device | str = "cpu",
) -> RunsTable:
    """Train the runs of a grid that are not finished, and make their table; a run that diverges is left out."""
    folders, failed = train_missing(recipes, runs)
    if not folders:
        raise UserError("all runs diverged:\n" + "\n".join(failed))
    notes = [f"Left out: {reason}." for reason in failed]
    return table_of_runs(folders, keys, options, notes=notes, device=device)


def run_folder(recipe: Recipe, runs: Path) -> Path:
    """The folder of a recipe's run: equal recipes of all tables share it."""
    values = recipe.model_dump(mode="json")
    seed = values["train"].pop("seed")
    for key in ("tracker", "save_minutes", "save_steps"):
        del values["train"][key]
    if not values["imports"]:  # Folders of versions without these keys stay those of the same recipes.
        del values["imports"]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return runs / f"{recipe.name}-{digest}-{seed}"


def train_missing(recipes: Sequence[Recipe], runs: Path) -> tuple[list[Path], list[str]]:
    """Train what is not finished, resume what was interrupted; the folders, and why others have none."""
    folders, failed = [], []
    for recipe in map(absolute_recipe, recipes):
        folder = run_folder(recipe, runs)
        try:
            if not finished(folder, recipe):
                say(f"{folder}: training")
                fit(recipe, folder)
            folders.append(folder)
        except DivergedError as error:
            failed.append(f"{folder.name}: {error}")
            say(failed[-1])
    return folders, failed


def finished(folder: Path, recipe: Recipe) -> bool:
    """Whether all epochs of exactly this recipe are done; :func:`fit` handles every other case."""
    if not all((folder / name).is_file() for name in (RECIPE, LOG, MODEL)):
        return False
    epochs = len((folder / LOG).read_text(encoding="utf-8").splitlines())
    return load_recipe(folder / RECIPE) == recipe and epochs == recipe.train.epochs
