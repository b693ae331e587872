"""Exact nearest neighbours in blocks of vectors, by matrix products with bounds on their rounding error.

This module handles vectors and their positions. The caller defines where they are stored and the meaning of a position
(search/stores/local.py).
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SAMPLE = 64
"""Vectors whose median is the centre of a block."""

Positions = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Fetch = Callable[[Positions], Vectors]
"""From (m,) distinct positions, ascending, their (m, e) vectors."""

NO_POSITIONS: Positions = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Block:
    """Some vectors, prepared for products. Make one with :meth:`of`."""

    positions: Positions  # (b,) distinct positions, ascending
    centred: Tensor  # (b, e) vectors less the centre
    norm: Tensor  # (b,) squared lengths of the centred vectors
    centre: Tensor  # (e,)
    allowed: npt.NDArray[np.bool_] | None = None  # (b,) bool, the vectors that may be found; all if None

    @staticmethod
    def of(positions: Positions, vectors: Vectors) -> "Block":
        """A block of vectors. positions (b,), vectors (b, e)."""
        given = torch.from_numpy(vectors)
        # Not the mean, which a single outlier moves.
        centre = given[:: -(-len(given) // _SAMPLE)].median(dim=0).values
        centred = given.sub_(centre)
        return Block(positions, centred, centred.square().sum(1), centre)

    def among(self, allowed: Positions) -> "Block":
        """Restrict the vectors of the block that may be found. allowed (m,)."""
        inside = is_in(self.positions, allowed)
        if self.allowed is not None:
            inside &= self.allowed
        if 2 * inside.sum() >= len(inside):
            return replace(self, allowed=inside)
        rows = torch.from_numpy(inside.nonzero()[0])
        return Block(self.positions[inside], self.centred[rows], self.norm[rows], self.centre)

    @functools.cached_property
    def n_allowed(self) -> int:
        """Number of vectors that may be found."""
        return len(self.positions) if self.allowed is None else int(self.allowed.sum())

    def lower_bounds(self, queries: Tensor) -> Tensor:
        """Lower bounds of the squared distances.

        In float32, ||x||^2 + ||q||^2 - 2 <x, q> is wrong by at most (e + 8) eps of ||x||^2 + ||q||^2, in whatever order
        it is summed, the rounding of x and q to the centre included. So the bounds are loose for vectors far from the
        centre.

        queries (n, e) -> (n, b).
        """
        exactly = 1 - (queries.shape[1] + 8) * torch.finfo(torch.float32).eps
        wanted = queries - self.centre
        bounds = torch.addmm(exactly * self.norm, wanted, self.centred.T, alpha=-2)
        bounds.add_(wanted.square().sum(1, keepdim=True), alpha=exactly)
        bounds.nan_to_num_(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        return bounds if self.allowed is None else bounds.masked_fill_(torch.from_numpy(~self.allowed), torch.inf)


class Nearest:
    """The k nearest vectors to each query among all that were added or scanned, by differences in float64.

    Of equally near vectors the one with the smaller position comes first.
    """

    def __init__(self, queries: Tensor, k: int, fetch: Fetch) -> None:
        self._queries, self._k, self._fetch = queries, k, fetch
        self._distance = [np.empty(0)] * len(queries)
        self.positions: list[Positions] = [NO_POSITIONS] * len(queries)
        """For each query at most k positions, nearest first."""

    def add(self, positions: Positions) -> None:
        """Consider some vectors. positions (n, c)."""
        distinct = np.unique(positions[positions >= 0])
        vectors = self._fetch(distinct)
        for i, row in enumerate(positions):
            self._consider(i, row[row >= 0], vectors[np.searchsorted(distinct, row[row >= 0])])

    def scan(self, blocks: Callable[[], Iterable[Block]]) -> None:
        """Consider all vectors of some blocks.

        The products give a few more than k candidates for each query. If the bounds do not exclude that another vector
        is among the k nearest, the distances of all such vectors are computed by differences. This happens with
        outliers, distant clusters, and many equal vectors.
        """
        n, c, seen = len(self._queries), self._k + max(8, self._k // 4), 0
        bound, candidates = torch.full((n, c), torch.inf), torch.full((n, c), -1)
        for block in blocks():
            lower = block.lower_bounds(self._queries)
            near, rows = lower.topk(min(c, block.n_allowed), largest=False)
            bound, best = torch.cat([bound, near], dim=1).topk(c, largest=False)
            candidates = torch.cat([candidates, torch.from_numpy(block.positions)[rows]], dim=1).gather(1, best)
            seen += block.n_allowed
        self.add(candidates.numpy())
        reach = np.array([found[-1] if len(found) == self._k else np.inf for found in self._distance])
        complete = (candidates >= 0).sum(1).numpy() == min(c, seen)
        sure = complete & ((seen <= c) | (bound[:, -1].double().numpy() > reach))
        if not sure.all():
            self._scan_by_differences(blocks(), (~sure).nonzero()[0], reach)

    def _scan_by_differences(self, blocks: Iterable[Block], unsure: Positions, reach: npt.NDArray[np.float64]) -> None:
        """Consider, for some of the queries, all vectors that may be among the nearest."""
        for block in blocks:
            lower = block.lower_bounds(self._queries[unsure]).double().numpy()
            near = lower <= reach[unsure, None]
            if block.allowed is not None:
                near &= block.allowed
            wanted = block.positions[near.any(axis=0)]
            vectors = self._fetch(wanted)
            for i, inside in zip(unsure, near, strict=True):
                positions = block.positions[inside]
                self._consider(i, positions, vectors[np.searchsorted(wanted, positions)])

    def _consider(self, i: int, positions: Positions, vectors: Vectors) -> None:
        """Merge some vectors into the k nearest of a query; vectors that are already there are skipped."""
        new = ~np.isin(positions, self.positions[i])
        distance = np.append(self._distance[i], squared_l2(vectors[new], self._queries[i].numpy()))
        position = np.append(self.positions[i], positions[new])
        first = np.lexsort((position, distance))[: self._k]
        self._distance[i], self.positions[i] = distance[first], position[first]


def squared_l2(vectors: Vectors, query: Vectors) -> npt.NDArray[np.float64]:
    """Squared distances by differences in float64. vectors (m, e), query (e,) -> (m,)."""
    difference = np.subtract(vectors, query, dtype=np.float64)
    squared: npt.NDArray[np.float64] = np.square(difference).sum(1)
    return squared


def is_in(positions: Positions, allowed: Positions) -> npt.NDArray[np.bool_]:
    """Test which positions are allowed. positions (b,), allowed (m,) -> (b,)."""
    if not len(allowed):
        return np.zeros(len(positions), dtype=bool)
    places = np.searchsorted(allowed, positions)
    inside: npt.NDArray[np.bool_] = allowed[np.minimum(places, len(allowed) - 1)] == positions
    return inside
