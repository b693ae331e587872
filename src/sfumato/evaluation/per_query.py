"""Results of single queries, in memory and as Parquet or CSV."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.errors import UserError, need
from sfumato.evaluation.benchmarks import BenchmarkRanks
from sfumato.files import write_atomically
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import UNLISTED

COMPARED = ("recall@1", "recall@5", "recall@10", "r_precision", "map@r")
"""Metrics of single queries that are compared; larger is better."""

PER_QUERY_ENDINGS = (".parquet", ".csv")
"""Endings of the files of single queries."""

KEYS = {"truth": "ground_truth", "direction": "direction", "query": "query", "group": "group"}
"""Attribute of :class:`PerQuery` by name of the column on disk."""
_METRICS = (*COMPARED, "best_rank")


@dataclass(frozen=True, eq=False)
class PerQuery:
    """Metrics of single queries, one row for each ground truth, direction and query that has a relevant item."""

    ground_truth: np.ndarray  # (r,) names of ground truths; ground truth, direction and query are the key of a row
    direction: np.ndarray  # (r,) "i2t" or "t2i"
    query: np.ndarray  # (r,) ids
    group: np.ndarray
    figures: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        for name, values in self.columns().items():
            if values.shape != self.query.shape:
                raise ValueError(f"PerQuery: column {name} has {len(values)} rows, query has {len(self.query)}")
        seen = set()
        for key in self.keys():
            if key in seen:
                raise ValueError(f"PerQuery: {query_name(key)} occurs twice")
            seen.add(key)

    def __len__(self) -> int:
        return len(self.query)

    def keys(self) -> list[tuple[str, str, str]]:
        """List the keys. Returns (ground truth, direction, query)."""
        return list(zip(self.ground_truth.tolist(), self.direction.tolist(), self.query.tolist(), strict=True))

    def columns(self) -> dict[str, np.ndarray]:
        """List the columns. Returns (r,)."""
        return {name: getattr(self, attribute) for name, attribute in KEYS.items()} | self.figures

    def select(self, index: np.ndarray) -> "PerQuery":
        """Choose rows. index (k,)."""
        columns = self.columns()
        return from_columns({name: values[index] for name, values in columns.items()})


def from_columns(columns: Mapping[str, np.ndarray]) -> PerQuery:
    """Make a table of columns by their names on disk."""
    keys = {attribute: columns[name] for name, attribute in KEYS.items()}
    figures = {name: values for name, values in columns.items() if name not in KEYS}
    return PerQuery(**keys, figures=figures)


def query_name(key: tuple[str, str, str]) -> str:
    """Name a row in a message."""
    return f"query {key[2]!r} ({key[0]}, {key[1]})"


def per_query_table(ranks: BenchmarkRanks, uncertainty: Mapping[str, Mapping[str, float]] | None = None) -> PerQuery:
    """Make the table of single queries of one evaluation."""
    parts: list[PerQuery] = []
    for name, both in ranks.items():
        for direction, of in both.items():
            ids, figures = of.per_query(_METRICS if all(p.depth is None for p in of.parts) else None)
            if "best_rank" in figures:
                best = figures["best_rank"]
                figures["best_rank"] = np.where(best >= UNLISTED, np.where(np.isinf(best), np.inf, np.nan), best)
            missing = np.full(len(ids), np.nan)
            own = (uncertainty or {}).get(direction)
            values = missing if own is None else np.array([own.get(i, math.nan) for i in ids], float)
            columns = {metric: figures.get(metric, missing) for metric in _METRICS} | {"uncertainty": values}
            groups = [group for part in of.parts for group in _groups(part.relevance, part.queries)]
            names = of.ground_truth.image_ids if direction == "i2t" else of.ground_truth.text_ids
            parts.append(
                PerQuery(
                    np.full(len(ids), name), np.full(len(ids), direction), strings(ids),
                    strings([names[g] for g in groups]), columns,
                )
            )  # fmt: skip
    if not parts:
        raise ValueError("per_query_table: there is no ground truth")
    columns_of = [part.columns() for part in parts]
    return from_columns({name: np.concatenate([c[name] for c in columns_of]) for name in columns_of[0]})


def strings(values: Sequence[str]) -> np.ndarray:
    """(n,) array of strings, also of none."""
    return np.array(values, dtype=np.str_) if len(values) else np.empty(0, np.str_)


def _groups(relevance: Relevance, queries: np.ndarray) -> list[int]:
    """For each query that has a relevant item, the first query of the part with the same relevant items."""
    first: dict[bytes, int] = {}
    outside = relevance.totals - relevance.counts
    groups = []
    for i in np.flatnonzero(relevance.totals > 0):
        items = relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]
        # Items outside of the gallery are unknown, so a query that has some is a group of its own.
        key = items.tobytes() if not outside[i] else b"outside %d" % i
        groups.append(first.setdefault(key, int(queries[i])))
    return groups


def write_per_query(path: str | Path, table: PerQuery) -> None:
    """Write a table atomically as Parquet or CSV. Undefined metrics are empty."""
    path = Path(path)
    check_per_query_path(path)
    columns = table.columns()
    if path.suffix == ".parquet":
        arrow, parquet = need_pyarrow()
        arrays = {
            name: arrow.array(values.tolist(), arrow.string())
            if name in KEYS
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
    # repr of a float is the shortest text that reads back as the same number.
    shown = [
        values.tolist() if name in KEYS else ["" if math.isnan(v) else repr(v) for v in values.tolist()]
        for name, values in columns.items()
    ]
    writer.writerows(zip(*shown, strict=True))
    write_atomically(path, text.getvalue())


def check_per_query_path(path: Path) -> None:
    """Check before the computation that :func:`write_per_query` can write this file."""
    if path.suffix not in PER_QUERY_ENDINGS:
        raise UserError(
            f"{path}: results of single queries must be a .parquet or .csv file, got {path.suffix or 'no ending'}"
        )
    if path.suffix == ".parquet":
        need_pyarrow()


def need_pyarrow() -> tuple[Any, Any]:
    """The packages pyarrow and pyarrow.parquet."""
    with need("parquet", "Parquet files need pyarrow", ", or use a name that ends in .csv"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow, pyarrow.parquet
