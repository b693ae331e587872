"""Results of single queries as a table in a file, and what two such tables, or several seeds, tell: which difference is more than chance.

A table has a row for each truth, direction and query. Two tables are compared query by query: how often a query was hard for both is
taken out, which leaves far less noise than two separate intervals.
"""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.errors import UserError
from sfumato.evaluation.benchmarks import BenchmarkRanks
from sfumato.files import write_atomically
from sfumato.metrics.bootstrap import Interval, bootstrap, mean_statistic
from sfumato.metrics.retrieval import UNLISTED

COMPARED = ("recall@1", "recall@5", "recall@10", "r_precision", "map@r")
"""Figures of a query that are compared; larger is better."""

PER_QUERY_ENDINGS = (".parquet", ".csv")
"""Endings of files of single queries."""

_KEYS = ("truth", "direction", "query", "group")
_METRICS = (*COMPARED, "best_rank")
_CHUNK = 2**22


@dataclass(frozen=True, eq=False)
class PerQuery:
    """Figures of single queries, one row for each truth, direction and query that has a relevant item.

    Attributes:
        truth, direction, query: (r,) strings: the key of a row.
        group: (r,) strings; queries of a truth and direction with the same relevant items, as the captions of an image, share one.
            They are not independent, and are drawn together.
        figures: by name (r,) float64, NaN where undefined: "recall@K", "r_precision", "map@r"; "best_rank" of the closest relevant
            item from 0, infinite where none is in the gallery; "uncertainty", the query's total variance.

    Raises:
        ValueError: columns differ in length, or a key occurs twice.
    """

    truth: np.ndarray
    direction: np.ndarray
    query: np.ndarray
    group: np.ndarray
    figures: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        for name, values in self.columns().items():
            if values.shape != self.query.shape:
                raise ValueError(f"PerQuery: column {name} has {len(values)} rows, query has {len(self.query)}")
        seen = set()
        for key in self.keys():
            if key in seen:
                raise ValueError(f"PerQuery: {_named(key)} occurs twice")
            seen.add(key)

    def __len__(self) -> int:
        return len(self.query)

    def keys(self) -> list[tuple[str, str, str]]:
        """(truth, direction, query) of every row."""
        return list(zip(self.truth.tolist(), self.direction.tolist(), self.query.tolist(), strict=True))

    def columns(self) -> dict[str, np.ndarray]:
        """All columns by name, the keys first."""
        return {name: getattr(self, name) for name in _KEYS} | self.figures

    def select(self, index: np.ndarray) -> "PerQuery":
        """Rows at these positions, in this order."""
        columns = self.columns()
        return _from_columns({name: values[index] for name, values in columns.items()})


def _from_columns(columns: Mapping[str, np.ndarray]) -> PerQuery:
    truth, direction, query, group = (columns[name] for name in _KEYS)
    figures = {name: values for name, values in columns.items() if name not in _KEYS}
    return PerQuery(truth, direction, query, group, figures)


def per_query_table(ranks: BenchmarkRanks, uncertainty: Mapping[str, Mapping[str, float]] | None = None) -> PerQuery:
    """The table of single queries of one evaluation.

    Args:
        ranks: by truth and direction, of rank_ground_truths and its like.
        uncertainty: {"i2t": {image id: number}, "t2i": {text id: number}}; None leaves the column undefined.

    Returns:
        All figures where whole rankings are known. Of ranked lists those that they determine for every query: the truth's own at
        least, or it is refused.

    Raises:
        ValueError: a list is too short for a figure that its truth reports.
    """
    parts: list[PerQuery] = []
    for name, both in ranks.items():
        for direction, of in both.items():
            ids, figures = of.per_query(_METRICS if all(p.depth is None for p in of.parts) else None)
            if "best_rank" in figures:
                best = figures["best_rank"]
                figures["best_rank"] = np.where(best >= UNLISTED, np.where(np.isinf(best), np.inf, np.nan), best)
            missing = np.full(len(ids), np.nan)
            own = (uncertainty or {}).get(direction)
            spread = missing if own is None else np.array([own.get(i, math.nan) for i in ids], float)
            columns = {metric: figures.get(metric, missing) for metric in _METRICS} | {"uncertainty": spread}
            groups = [group for part in of.parts for group in _groups(part.relevance, part.queries)]
            names = of.ground_truth.image_ids if direction == "i2t" else of.ground_truth.text_ids
            parts.append(
                PerQuery(
                    np.full(len(ids), name), np.full(len(ids), direction), _strings(ids),
                    _strings([names[g] for g in groups]), columns,
                )
            )  # fmt: skip
    if not parts:
        raise ValueError("per_query_table: there is no truth")
    columns_of = [part.columns() for part in parts]
    return _from_columns({name: np.concatenate([c[name] for c in columns_of]) for name in columns_of[0]})


def _strings(values: Sequence[str]) -> np.ndarray:
    return np.array(values, dtype=np.str_) if len(values) else np.empty(0, np.str_)


def _groups(relevance: Any, queries: np.ndarray) -> list[int]:
    """For each query that has a relevant item, the first query of the part with the same relevant items."""
    first: dict[bytes, int] = {}
    outside = relevance.totals - relevance.counts
    groups = []
    for i in np.flatnonzero(relevance.totals > 0):
        items = relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]
        # Items outside of the gallery have no name: such a query stands alone.
        key = items.tobytes() if not outside[i] else b"outside %d" % i
        groups.append(first.setdefault(key, int(queries[i])))
    return groups


# ---------------------------------------------------------------- files


def write_per_query(path: str | Path, table: PerQuery) -> None:
    """Write a table, atomically; its ending says how: .parquet (needs the extra `parquet`) or .csv. Undefined figures are empty.

    Raises:
        UserError: another ending, or pyarrow is not installed.
        FileNotFoundError: the folder does not exist.
    """
    path = Path(path)
    check_per_query_path(path)
    columns = table.columns()
    if path.suffix == ".parquet":
        arrow, parquet = _pyarrow()
        arrays = {
            name: arrow.array(values.tolist(), arrow.string())
            if name in _KEYS
            else arrow.array(values, arrow.float64(), from_pandas=True)
            for name, values in columns.items()
        }
        sink = io.BytesIO()
        parquet.write_table(arrow.table(arrays), sink)
        write_atomically(path, sink.getvalue())
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    # repr of a float is the shortest that reads back as the same number.
    shown = [
        values.tolist() if name in _KEYS else ["" if math.isnan(v) else repr(v) for v in values.tolist()]
        for name, values in columns.items()
    ]
    writer.writerows(zip(*shown, strict=True))
    write_atomically(path, text.getvalue())


def check_per_query_path(path: Path) -> None:
    """Refuse an ending that :func:`write_per_query` does not know, or .parquet without pyarrow, before anything is computed."""
    if path.suffix not in PER_QUERY_ENDINGS:
        raise UserError(
            f"{path}: results of single queries are .parquet or .csv files, not {path.suffix or 'without ending'}"
        )
    if path.suffix == ".parquet":
        _pyarrow()


def read_per_query(path: str | Path) -> PerQuery:
    """Read a file of :func:`write_per_query`.

    Raises:
        UserError: it is missing, damaged or another file, or pyarrow is not installed.
    """
    path = Path(path)
    check_per_query_path(path)
    if not path.is_file():
        raise UserError(
            f"there are no results of single queries at {path}; write them with `sfumato evaluate ... --per-query`"
        )
    columns: dict[str, list[Any]]
    if path.suffix == ".parquet":
        arrow, parquet = _pyarrow()
        try:
            columns = parquet.read_table(io.BytesIO(path.read_bytes())).to_pydict()
        except (arrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a whole Parquet file ({error})") from error
    else:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, strict=True)
                header = next(reader, [])
                rows = list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not CSV in UTF-8 ({error})") from error
        for number, row in enumerate(rows, 2):
            if len(row) != len(header):
                raise UserError(f"{path}:{number}: {len(row)} values for {len(header)} columns")
        columns = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    if lacking := [name for name in _KEYS if name not in columns]:
        raise UserError(f"{path}: no column {lacking[0]!r}; expected {', '.join(_KEYS)} and figures")
    figures = {}
    for name in columns.keys() - set(_KEYS):
        try:
            figures[name] = np.array([math.nan if v in (None, "") else float(v) for v in columns[name]], float)
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: column {name!r} holds what is no number ({error})") from error
    try:
        return _from_columns({name: _strings([str(v) for v in columns[name]]) for name in _KEYS} | figures)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "Parquet files need pyarrow: pip install 'sfumato[parquet]', or use a name that ends in .csv"
        ) from error
    return pyarrow, pyarrow.parquet


# ---------------------------------------------------------------- two runs


@dataclass(frozen=True)
class Difference:
    """How two runs differ in a figure, on the same queries.

    Attributes:
        truth, direction, metric: which figure; larger is better.
        n_queries: that have it.
        n_groups: of queries that were drawn together.
        first, second: the means over queries.
        difference: second - first, with its bootstrap interval.
        p_value: two-sided, of the hypothesis that the runs are interchangeable on every group: the share of random swaps of them that
            differ at least as much. It is at least 1 / (n_resamples + 1).
    """

    truth: str
    direction: str
    metric: str
    n_queries: int
    n_groups: int
    first: float
    second: float
    difference: Interval
    p_value: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        shallow = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "difference"}
        return shallow | {"difference": self.difference.value, "low": self.difference.low, "high": self.difference.high}


def compare_per_query(
    first: PerQuery,
    second: PerQuery,
    *,
    metrics: Sequence[str] = COMPARED,
    n_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> list[Difference]:
    """Compare two runs query by query: bootstrap intervals of the difference, and a test by random swaps of the runs.

    Args:
        first, second: tables with the same rows, in any order.
        metrics: figures to compare; those that a truth's queries do not all have in both runs are left out.
        n_resamples: of both; groups of queries are drawn, with replacement, and swapped as wholes.
        level: coverage of the intervals.
        seed: of the draws.

    Returns:
        A Difference for each truth, direction and metric, in the order of the first table.

    Raises:
        ValueError: the tables have different queries (the first that is missing is named) or groups, n_resamples < 1, or there is
            nothing to compare.
    """
    if n_resamples < 1:
        raise ValueError(f"compare_per_query: n_resamples must be at least 1, got {n_resamples}")
    second = second.select(_aligned(first, second))
    if (other := np.flatnonzero(first.group != second.group)).size:
        i = int(other[0])
        raise ValueError(
            f"compare_per_query: {_named(first.keys()[i])} is in group {str(first.group[i])!r} of the first run and in"
            f" {str(second.group[i])!r} of the second; were they evaluated against the same truth?"
        )
    results = []
    for ground_truth, direction in dict.fromkeys(zip(first.truth.tolist(), first.direction.tolist(), strict=True)):
        chosen = np.flatnonzero((first.truth == ground_truth) & (first.direction == direction))
        groups = np.unique(first.group[chosen], return_inverse=True)[1]
        pairs = {}
        for metric in metrics:
            if metric in first.figures and metric in second.figures:
                a, b = first.figures[metric][chosen], second.figures[metric][chosen]
                if np.isfinite(a).all() and np.isfinite(b).all():
                    pairs[metric] = (a, b)
        if not pairs:
            continue
        gaps = {metric: b - a for metric, (a, b) in pairs.items()}
        intervals = bootstrap(
            {metric: mean_statistic(gap) for metric, gap in gaps.items()},
            len(chosen), n_resamples=n_resamples, level=level, seed=seed, groups=groups,
        )  # fmt: skip
        p_values = swap_test(gaps, groups, n_resamples=n_resamples, seed=seed)
        results += [
            Difference(
                ground_truth, direction, metric, len(chosen), int(groups.max()) + 1,
                float(a.mean()), float(b.mean()), intervals[metric], p_values[metric],
            )
            for metric, (a, b) in pairs.items()
        ]  # fmt: skip
    if not results:
        raise ValueError(
            f"compare_per_query: no figure among {', '.join(metrics)} is defined for all queries of both runs"
        )
    return results


def swap_test(
    gaps: Mapping[str, np.ndarray], groups: np.ndarray, *, n_resamples: int = 2000, seed: int = 0
) -> dict[str, float]:
    """Paired randomisation test: how often is a mean gap as large when the sign of every group's gaps is random?

    Args:
        gaps: by name, (n,) differences of two runs on the same queries.
        groups: (n,) whole numbers from 0; queries with the same one are swapped together.
        n_resamples: b random assignments of signs, the same for all names.
        seed: of the signs.

    Returns:
        Two-sided p-values (1 + assignments at least as extreme) / (b + 1): never 0, and never too small.

    Paper: Smucker, Allan and Carterette, "A comparison of statistical significance tests for information retrieval evaluation", CIKM
    2007.
    """
    names = list(gaps)
    g = int(groups.max(initial=-1)) + 1
    sums = np.stack([np.bincount(groups, weights=gaps[name], minlength=g) for name in names], axis=1)
    total = sums.sum(0)
    # A group without a gap changes nothing, whatever its sign.
    sums = sums[(sums != 0).any(1)]
    random, extreme = np.random.default_rng(seed), np.zeros(len(names))
    step = max(1, _CHUNK // max(len(sums), 1))
    for start in range(0, n_resamples, step):
        b = min(step, n_resamples - start)
        bits = np.unpackbits(random.integers(256, size=(b, -(-len(sums) // 8)), dtype=np.uint8), axis=1)[:, : len(sums)]
        swapped = total - 2 * (bits.astype(float) @ sums)
        # Sums that are equal but for rounding count as equal.
        extreme += (np.abs(swapped) >= np.abs(total) - 1e-9 * np.abs(sums).sum(0)).sum(0)
    return {name: float((1 + count) / (n_resamples + 1)) for name, count in zip(names, extreme, strict=True)}


def _aligned(first: PerQuery, second: PerQuery) -> np.ndarray:
    """Where the first table's rows are in the second."""
    place = {key: i for i, key in enumerate(second.keys())}
    own = first.keys()
    if missing := next((key for key in own if key not in place), None):
        raise ValueError(f"compare_per_query: {_named(missing)} is in the first run but not in the second")
    if len(place) != len(own):
        known = set(own)
        extra = next(key for key in place if key not in known)
        raise ValueError(f"compare_per_query: {_named(extra)} is in the second run but not in the first")
    return np.array([place[key] for key in own], np.int64)


def _named(key: tuple[str, str, str]) -> str:
    return f"query {key[2]!r} ({key[0]}, {key[1]})"


# ---------------------------------------------------------------- several seeds


@dataclass(frozen=True)
class OverSeeds:
    """A figure over several seeds.

    Attributes:
        mean: of the values.
        deviation: their standard deviation (n - 1); None of a single value.
        values: in the order of the runs, those that were undefined left out.
    """

    mean: float
    deviation: float | None
    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.deviation is None else f"{self.mean:.2f} ± {self.deviation:.2f}"


def main_figures(result: Mapping[str, Any]) -> dict[str, float | None]:
    """What several runs are summed up by, from the JSON of one evaluation: per cent, except for correlations.

    Args:
        result: of :meth:`~sfumato.evaluation.protocols.Evaluation.to_json`.
    """
    chosen: dict[str, float | None] = {}
    for direction in ("t2i", "i2t"):
        for name in ("recall@1", "recall@5", "recall@10", "r_precision", "map@r"):
            chosen[f"{direction} {name}"] = 100 * result[direction][name]
    if "name" in result["i2t_by_kind"]:
        for name in ("recall@1", "recall@5", "recall@10"):
            chosen[f"i2name {name}"] = 100 * result["i2t_by_kind"]["name"][name]
    chosen["rsum"] = 100 * result["rsum"]
    uncertainty, multiplicity = result["uncertainty"], result["multiplicity"]
    for direction in ("i2t", "t2i"):
        chosen[f"{direction} ten-bin correlation"] = uncertainty[direction]["correlation"] if uncertainty else None
    for name in ("all", "balanced"):
        chosen[f"multiplicity {name}"] = multiplicity[name] if multiplicity else None
    return chosen


def over_seeds(results: Sequence[Mapping[str, float | None]]) -> dict[str, OverSeeds]:
    """Mean and standard deviation of every figure over several runs.

    Args:
        results: figures by name of each run; None, or a name that is missing, is undefined there.

    Returns:
        By name in the order of the runs; names that are undefined in all runs are left out.

    Example:
        >>> print(over_seeds([{"rsum": 500.0}, {"rsum": 503.0}])["rsum"])
        501.50 ± 2.12
    """
    summary = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values = tuple(float(value) for result in results if (value := result.get(name)) is not None)
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else None
            summary[name] = OverSeeds(statistics.mean(values), deviation, values)
    return summary
