"""A table of runs: a row for each method, a column for each metric, mean and deviation over seeds, and what is best.

Figures come from evaluation-SPLIT-DISTANCE.json in the folders of the runs, single queries from
queries-SPLIT-DISTANCE.csv beside them; both are made where they are missing or older than the weights.
"""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from papers.runs.paired import (
    BOTH,
    RSUM,
    Difference,
    PerQuery,
    compare_per_query,
    mean_per_query,
    queries_by_image,
    query_name,
    read_per_query,
    with_rsum,
)
from sfumato.errors import UserError, counted, say
from sfumato.evaluation.benchmarks import COMPARED, write_per_query
from sfumato.evaluation.embedded_input import measure
from sfumato.files import MODEL, read_json
from sfumato.metrics.retrieval import ALL_METRICS
from sfumato.models.embed import embed_for_evaluation, evaluate_run
from sfumato.models.run import LOG, load_run
from sfumato.workflows.evaluation import METRICS, Row, SavedRun, different_keys, group_runs, over_seeds, read_runs

LEVEL = 0.05
"""Level of the tests of a table."""

TESTED = {RSUM: (BOTH, RSUM)} | {f"{side}.{name}": (side, name) for side in ("t2i", "i2t") for name in COMPARED}
"""By metric the direction and the name of its single queries. Larger is better; fractions, and rsum of at most 6."""

_OF_DATA = ("uncertainty", "multiplicity", "total_variance", "t2i_by_kind", "i2t_by_kind")
"""Parts of an evaluation whose names depend on the data and the model."""


@dataclass(frozen=True)
class TableOptions:
    """What a table shows."""

    metrics: tuple[str, ...] = METRICS  # paths in the file of an evaluation, e.g. t2i.recall@1
    distances: tuple[str, ...] = ()  # to rank by; empty: each run by its own
    split: str = "test"


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
        best = {
            column: {
                "row": one.row,
                "differs": one.differs,
                "others": [{"row": row} | difference.to_json() for row, difference in one.others.items()],
            }
            for column, one in self.best.items()
        }
        plain = ("columns", "split", "distances", "n_queries", "n_groups", "also", "notes")
        return {
            "group": list(self.keys),
            "level": LEVEL,
            "rows": [row.to_json(self.keys) for row in self.rows],
            "best": best,
        } | {name: value if isinstance(value := getattr(self, name), str | int) else list(value) for name in plain}


def table_of_runs(
    folders: Sequence[Path],
    keys: Sequence[str],
    options: TableOptions,
    *,
    notes: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> RunsTable:
    """Group runs by keys of their recipes, evaluate those that were not, and test what is best."""
    check_metrics(options.metrics)
    if twice := next((key for key in keys if list(keys).count(key) > 1), None):
        raise UserError(f"--group names {twice} twice")
    runs = read_runs(folders)
    _check_weights(runs)
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
    used = dict.fromkeys(options.distances or (run.distance for run in runs))
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
        names = {distance: distance for distance in options.distances} or {"": run.distance}
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
            write_per_query(_files(run, split, distance)[1], queries_by_image(measured.ranks).columns())


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
    tables = [next(iter(results[run.folder].values())).queries for run in runs]
    groups = [zip(table.keys(), table.group.tolist(), strict=True) for table in tables]
    keys = [{key: group for key, group in of_run if key[1] != BOTH} for of_run in groups]
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
    sections = tuple(key.rpartition(".")[0] + "." for key in keys if key.endswith((".name", ".kind")))
    return tuple(key for key in found if key not in keys and not key.startswith(sections))


def _check_weights(runs: Sequence[SavedRun]) -> None:
    """Refuse runs whose weights are equal: csd and squared_l2 train the same points, for example."""
    weights: dict[bytes, Path] = {}
    for run in runs:
        with (run.folder / MODEL).open("rb") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))  # The header holds the epoch and its score, too.
            digest = hashlib.file_digest(file, "sha256").digest()
        if (other := weights.setdefault(digest, run.folder)) is not run.folder:
            raise UserError(
                f"{other} and {run.folder} have equal weights, so they are one run and not two; leave one of them out"
            )
