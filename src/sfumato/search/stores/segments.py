"""What a folder's store looks at while it searches: files of vectors as one transaction sees them, filters over them, and the exact scan.

Knows the table of items and where a position lies, and only reads: what writes files and transactions is in search/stores/local.py.
"""

import functools
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sfumato.search.stores.protocol import Filter, Records

ROW_BITS = 32
"""A position is shard << ROW_BITS | row."""

_FILTERS = 8
"""Filters of which is remembered what they let through."""

BLOCK = 2**20
"""Numbers that a scan reads at a time: small enough for the processor's cache."""

_SAMPLE = 64
"""Rows whose median is the centre of a scan."""

Rows = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
NO_ROWS: Rows = np.empty(0, dtype=np.int64)

SELECT = "SELECT position, id, uncertainty, payload FROM items"
LIST = "(SELECT value FROM json_each(?))"


@dataclass(frozen=True)
class Shard:
    """A file of vectors as one transaction sees it."""

    number: int
    vectors: Vectors
    indexed: int
    index_bytes: int
    dead: Rows

    @property
    def first(self) -> int:
        """Position of the first row."""
        return self.number << ROW_BITS

    @functools.cached_property
    def alive(self) -> npt.NDArray[np.bool_]:
        """Of each row, whether it is not dead."""
        alive = np.ones(len(self.vectors), dtype=bool)
        alive[self.dead] = False
        return alive

    @functools.cached_property
    def live(self) -> Rows:
        """Rows that are not dead, ascending."""
        return self.alive.nonzero()[0]


@dataclass(frozen=True)
class _Fitting:
    """Which rows of each shard a filter lets through, of the first so many that were looked at."""

    version: int
    looked_at: dict[int, int]
    rows: dict[int, Rows]


@dataclass(frozen=True)
class View:
    """All shards as one transaction sees them, `seen` being the last entry about the dead that it knows."""

    version: int
    seen: int
    shards: dict[int, Shard]
    remembered: dict[str, _Fitting] = field(default_factory=dict)
    memory: threading.Lock = field(default_factory=threading.Lock)

    def allowed(self, connection: sqlite3.Connection, filter: Filter) -> dict[int, Rows]:
        """By shard, the rows that fit a filter, ascending.

        What an earlier view knew of it stays true, rows never change but die; so only later rows are looked at.
        """
        where, values = condition_of(filter)
        key = json.dumps([where, values])
        with self.memory:
            known = self.remembered.get(key, _Fitting(-1, {}, {}))
        if known.version == self.version:
            return known.rows
        fitting = _Fitting(self.version, {}, {})
        for shard in self.shards.values():
            looked_at, rows = known.looked_at.get(shard.number, 0), known.rows.get(shard.number, NO_ROWS)
            condition = f"position >= ? AND position < ? AND {where} ORDER BY position"
            ends = (shard.first + looked_at, shard.first + len(shard.vectors))
            found = connection.execute(f"SELECT position FROM items WHERE {condition}", (*ends, *values))
            later = np.fromiter((row[0] - shard.first for row in found), dtype=np.int64)
            fitting.looked_at[shard.number] = len(shard.vectors)
            fitting.rows[shard.number] = np.concatenate([rows[shard.alive[rows]], later])
        with self.memory:
            while len(self.remembered) >= _FILTERS:
                self.remembered.pop(next(iter(self.remembered)))
            self.remembered[key] = fitting
        return fitting.rows

    def records(self, rows: Sequence[tuple[int, str, float, str]], dim: int) -> Records:
        """The records of rows of SELECT."""
        vectors = np.empty((len(rows), dim), dtype=np.float32)
        for i, (position, *_) in enumerate(rows):
            vectors[i] = self.shards[position >> ROW_BITS].vectors[position & (1 << ROW_BITS) - 1]
        return Records(
            tuple(row[1] for row in rows),
            torch.from_numpy(vectors),
            torch.tensor([row[2] for row in rows], dtype=torch.float32),
            tuple(json.loads(row[3]) for row in rows),
        )


def listed(values: Sequence[Any]) -> str:
    """For LIST."""
    return json.dumps(list(values), ensure_ascii=False)


def condition_of(filter: Filter | None) -> tuple[str, list[Any]]:
    """A filter as a condition of SQL and its values."""
    conditions, values = ["1"], list[Any]()
    if filter is not None and filter.max_uncertainty is not None:
        conditions.append("uncertainty <= ?")
        values.append(filter.max_uncertainty)
    for name, texts in filter.where.items() if filter is not None else ():
        conditions.append(f"EXISTS (SELECT 1 FROM json_each(payload) WHERE key = ? AND atom IN {LIST})")
        values += [name, listed(texts)]
    return " AND ".join(conditions), values


def scan(vectors: Vectors, rows: Rows, queries: Tensor, k: int, c: int) -> Tensor:
    """(n, c) of these rows, surely among them the k nearest to each query; -1 behind them if there are fewer.

    A matrix product ranks the rows by a lower bound of their distance, in float32 and therefore wide of it for what is far from the
    centre of the rows. Where the c-th bound leaves open whether a row that was left out is among the k nearest, the distances of all
    rows that may be are computed by differences: after outliers, in heaps far from each other, and among many equal vectors.
    """
    if len(rows) <= c:
        nearest = torch.full((len(queries), c), -1)
        nearest[:, : len(rows)] = torch.from_numpy(rows)
        return nearest
    e = vectors.shape[1]
    sample = torch.from_numpy(vectors[rows[:: -(-len(rows) // _SAMPLE)]])
    centre = sample.median(dim=0).values  # not the mean, which a single outlier moves
    # Computed in float32, in whatever order of summation, ||x||^2 + ||q||^2 - 2 <x, q> is wrong by at most this share of
    # ||x||^2 + ||q||^2, the rounding of x and q to the centre included.
    error = (e + 4) * torch.finfo(torch.float32).eps
    own = (1 - error) * (queries - centre).double().square().sum(1).numpy()
    bound = torch.full((len(queries), c), torch.inf)
    nearest = torch.full((len(queries), c), -1)
    for some, lower in _lower_bounds(vectors, rows, queries, centre, error):
        near, order = lower.topk(min(c, len(some)), largest=False)
        bound, best = torch.cat([bound, near], dim=1).topk(c, largest=False)
        nearest = torch.cat([nearest, torch.from_numpy(some)[order]], dim=1).gather(1, best)
    found = nearest.numpy()
    reach = np.full(len(queries), np.inf)
    for i, query in enumerate(queries.numpy()):
        if (found[i] >= 0).all():
            reach[i] = np.partition(squared_l2(vectors[found[i]], query), k - 1)[k - 1] - own[i]
    unsure = (~(bound[:, -1].double().numpy() > reach)).nonzero()[0]
    if len(unsure):
        distances, positions = [np.empty(0)] * len(unsure), [NO_ROWS] * len(unsure)
        for some, lower in _lower_bounds(vectors, rows, queries[unsure], centre, error):
            for i, near in enumerate(~(lower.double().numpy() > reach[unsure, None])):
                distance = np.append(distances[i], squared_l2(vectors[some[near]], queries[unsure[i]].numpy()))
                position = np.append(positions[i], some[near])
                first = np.lexsort((position, distance))[:k]
                distances[i], positions[i] = distance[first], position[first]
        found[unsure, :k], found[unsure, k:] = np.stack(positions), -1
    return nearest


def _lower_bounds(
    vectors: Vectors, rows: Rows, queries: Tensor, centre: Tensor, error: float
) -> Iterator[tuple[Rows, Tensor]]:
    """Some of the rows at a time and (n, b) that their squared distances are at least, less (1 - error) ||q||^2, the same for all rows."""
    wanted, step = queries - centre, max(256, BLOCK // vectors.shape[1])
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        dense = some[-1] - some[0] == len(some) - 1
        block = torch.from_numpy(vectors[some[0] : some[-1] + 1] if dense else vectors[some]) - centre
        yield some, torch.addmm((1 - error) * block.square().sum(1), wanted, block.T, alpha=-2)


def squared_l2(vectors: Vectors, query: Vectors) -> npt.NDArray[np.float64]:
    """(m,) of (m, e) vectors, by differences in float64."""
    difference = np.subtract(vectors, query, dtype=np.float64)
    squared: npt.NDArray[np.float64] = np.square(difference).sum(1)
    return squared
