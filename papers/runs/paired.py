"""Runs compared query by query: paired tests, and the single queries that they read."""

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.errors import UserError, need_pyarrow
from sfumato.evaluation.benchmarks import (
    COMPARED,
    KEYS,
    NEEDS_PYARROW,
    BenchmarkRanks,
    check_per_query_path,
    per_query_table,
    strings,
)
from sfumato.ids import DIRECTIONS
from sfumato.metrics.bootstrap import Interval, bootstrap, mean_statistic
from sfumato.metrics.retrieval import RECALLS

_CHUNK = 2**22
"""Number of random signs in memory at once."""


@dataclass(frozen=True, eq=False)
class PerQuery:
    """Metrics of single queries, one row for each ground truth, direction and query that has a relevant item."""

    ground_truth: np.ndarray  # (r,) names of ground truths; ground truth, direction and query are the key of a row
    direction: np.ndarray  # (r,) "i2t" or "t2i"
    query: np.ndarray  # (r,) ids
    group: np.ndarray
    figures: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        for key, n in Counter(self.keys()).items():
            if n > 1:
                raise ValueError(f"PerQuery: {query_name(key)} occurs twice")

    def __len__(self) -> int:
        return len(self.query)

    def keys(self) -> list[tuple[str, str, str]]:
        """List the keys. Returns (ground truth, direction, query)."""
        return list(zip(self.ground_truth.tolist(), self.direction.tolist(), self.query.tolist(), strict=True))

    def columns(self) -> dict[str, np.ndarray]:
        """List the columns. Returns (r,)."""
        keys = self.ground_truth, self.direction, self.query, self.group
        return dict(zip(KEYS, keys, strict=True)) | self.figures

    def select(self, index: np.ndarray) -> "PerQuery":
        """Choose rows. index (k,)."""
        return from_columns({name: values[index] for name, values in self.columns().items()})


def from_columns(columns: Mapping[str, np.ndarray]) -> PerQuery:
    """Make a table of columns by their names on disk."""
    figures = {name: values for name, values in columns.items() if name not in KEYS}
    truth, direction, query, group = (columns[name] for name in KEYS)
    return PerQuery(truth, direction, query, group, figures)


def query_name(key: tuple[str, str, str]) -> str:
    """Name a row in a message."""
    return f"query {key[2]!r} ({key[0]}, {key[1]})"


def queries_by_image(ranks: BenchmarkRanks) -> PerQuery:
    """The table of single queries of one ground truth; the queries of an image are one group in both directions.

    Images with the same texts are one image. A text of several images goes with the first of them.
    """
    table = from_columns(per_query_table(ranks))
    (both,) = ranks.values()
    truth = next(iter(both.values())).ground_truth
    images = table.direction == "i2t"
    group = dict(zip(table.query[images].tolist(), table.group[images].tolist(), strict=True))
    first: dict[str, str] = {}
    for i, image in enumerate(truth.image_ids):
        for text in truth.i2t.indices[truth.i2t.indptr[i] : truth.i2t.indptr[i + 1]]:
            first.setdefault(truth.text_ids[text], group.get(image, image))
    names = [
        group[query] if direction == "i2t" else first[query]
        for direction, query in zip(table.direction.tolist(), table.query.tolist(), strict=True)
    ]
    return replace(table, group=strings(names))


RSUM = "rsum"

BOTH = "both"
"""The direction of the rows of :func:`with_rsum`."""


def with_rsum(table: PerQuery) -> PerQuery:
    """The table, and below it what each query adds to the rsum of both directions: its mean over these rows is rsum."""
    weight = np.zeros(len(table))
    for direction in DIRECTIONS:
        chosen = table.direction == direction
        weight[chosen] = len(table) / max(1, int(chosen.sum()))
    nothing = np.full(len(table), np.nan)
    rsum = weight * sum(table.figures[name] for name in RECALLS)
    names = strings([f"{d} {q}" for d, q in zip(table.direction.tolist(), table.query.tolist(), strict=True)])
    figures = {name: np.concatenate([table.figures[name], nothing]) for name in COMPARED}
    return PerQuery(
        np.concatenate([table.ground_truth] * 2),
        np.concatenate([table.direction, np.full(len(table), BOTH)]),
        np.concatenate([table.query, names]),
        np.concatenate([table.group] * 2),
        figures | {RSUM: np.concatenate([nothing, rsum])},
    )


def mean_per_query(tables: Sequence[PerQuery]) -> PerQuery:
    """The mean of each query over several runs."""
    same = [table.select(_aligned(tables[0], table)) for table in tables]
    figures = {name: np.mean([table.figures[name] for table in same], axis=0) for name in tables[0].figures}
    return replace(tables[0], figures=figures)


def read_per_query(path: str | Path) -> PerQuery:
    """Read a file of :func:`write_per_query`."""
    path = Path(path)
    check_per_query_path(path)
    if not path.is_file():
        raise UserError(
            f"there are no results of single queries at {path}; write them with `sfumato evaluate ... --per-query`"
        )
    columns = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    if lacking := [name for name in KEYS if name not in columns]:
        raise UserError(f"{path}: no column {lacking[0]!r}; expected {', '.join(KEYS)} and metrics")
    figures = {}
    for name in columns.keys() - set(KEYS):
        try:
            figures[name] = np.array([math.nan if v in (None, "") else float(v) for v in columns[name]], float)
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: column {name!r} holds a value that is not a number ({error})") from error
    try:
        return from_columns({name: strings([str(v) for v in columns[name]]) for name in KEYS} | figures)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    arrow = need_pyarrow(*NEEDS_PYARROW)
    try:
        return dict(arrow.parquet.read_table(io.BytesIO(path.read_bytes())).to_pydict())
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a complete Parquet file ({error})") from error


def _read_csv(path: Path) -> dict[str, list[Any]]:
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
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


@dataclass(frozen=True)
class Difference:
    """The difference of two runs in a metric on the same queries."""

    ground_truth: str  # its name
    direction: str  # "i2t" or "t2i"
    metric: str  # its name; larger is better
    n_queries: int  # number of queries that have it
    n_groups: int  # number of groups of queries that were resampled together
    first: float  # mean of the first run over queries
    second: float  # mean of the second run over queries
    difference: Interval  # second - first, with its bootstrap interval
    p_value: float

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("ground_truth", "difference")}
        gap = self.difference
        return {"truth": self.ground_truth} | plain | {"difference": gap.value, "low": gap.low, "high": gap.high}


def compare_per_query(
    first: PerQuery,
    second: PerQuery,
    *,
    metrics: Sequence[str] = COMPARED,
    n_resamples: int = 2000,
    seed: int = 0,
) -> list[Difference]:
    """Compare two runs query by query: bootstrap intervals of the difference, and a test by random swaps."""
    second = second.select(_aligned(first, second))
    if (other := np.flatnonzero(first.group != second.group)).size:
        i = int(other[0])
        raise ValueError(
            f"compare_per_query: {query_name(first.keys()[i])} is in group {str(first.group[i])!r} of the first run and"
            f" in {str(second.group[i])!r} of the second; were they evaluated against the same ground truth?"
        )
    results = []
    sides = zip(first.ground_truth.tolist(), first.direction.tolist(), strict=True)
    for ground_truth, direction in dict.fromkeys(sides):
        chosen = np.flatnonzero((first.ground_truth == ground_truth) & (first.direction == direction))
        groups = np.unique(first.group[chosen], return_inverse=True)[1]
        shared = [metric for metric in metrics if metric in first.figures and metric in second.figures]
        both = {metric: (first.figures[metric][chosen], second.figures[metric][chosen]) for metric in shared}
        pairs = {metric: values for metric, values in both.items() if np.isfinite(values).all()}
        if not pairs:
            continue
        gaps = {metric: b - a for metric, (a, b) in pairs.items()}
        intervals = bootstrap(
            {metric: mean_statistic(gap) for metric, gap in gaps.items()},
            len(chosen), n_resamples=n_resamples, seed=seed, groups=groups,
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
            f"compare_per_query: no metric among {', '.join(metrics)} is defined for all queries of both runs"
        )
    return results


def swap_test(
    gaps: Mapping[str, np.ndarray], groups: np.ndarray, *, n_resamples: int = 2000, seed: int = 0
) -> dict[str, float]:
    """Paired randomisation test of the mean difference, with a random sign for every group of queries.

    Paper: Smucker, Allan and Carterette, "A comparison of statistical significance tests for information retrieval
    evaluation", CIKM 2007.

    groups (n,).
    """
    names = list(gaps)
    g = int(groups.max(initial=-1)) + 1
    sums = np.stack([np.bincount(groups, weights=gaps[name], minlength=g) for name in names], axis=1)
    total = sums.sum(0)
    # A group with a difference of 0 has no effect with either sign.
    sums = sums[(sums != 0).any(1)]
    random, extreme = np.random.default_rng(seed), np.zeros(len(names))
    step = max(1, _CHUNK // max(len(sums), 1))
    for start in range(0, n_resamples, step):
        b = min(step, n_resamples - start)
        bits = np.unpackbits(random.integers(256, size=(b, -(-len(sums) // 8)), dtype=np.uint8), axis=1)[:, : len(sums)]
        swapped = total - 2 * (bits.astype(float) @ sums)
        # The tolerance lets sums that differ by rounding count as equal.
        extreme += (np.abs(swapped) >= np.abs(total) - 1e-9 * np.abs(sums).sum(0)).sum(0)
    return {name: float((1 + count) / (n_resamples + 1)) for name, count in zip(names, extreme, strict=True)}


def _aligned(first: PerQuery, second: PerQuery) -> np.ndarray:
    """(r,) positions of the first table's rows in the second."""
    position = {key: i for i, key in enumerate(second.keys())}
    own = first.keys()
    if missing := next((key for key in own if key not in position), None):
        raise ValueError(f"compare_per_query: {query_name(missing)} is in the first run but not in the second")
    if len(position) != len(own):
        known = set(own)
        extra = next(key for key in position if key not in known)
        raise ValueError(f"compare_per_query: {query_name(extra)} is in the second run but not in the first")
    return np.array([position[key] for key in own], np.int64)
