"""What finds the nearest vectors, by positions alone: exact products with bounds on their rounding error, and FAISS.

The caller defines where vectors are stored and the meaning of a position (search/stores/local.py). FAISS's graph needs
the extra `faiss`. The distances of compressed vectors are approximate: the caller must fetch several times the wanted
number of candidates and re-rank them by the full vectors.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sfumato.errors import need

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


_TRAINING, _BLOCK = 65_536, 65_536
"""Numbers of training vectors, and of vectors that are added at a time."""

_KEPT = 0.99
"""Fraction of the variance that is kept of compressed vectors."""


@dataclass(frozen=True)
class GraphOptions:
    """The options of FAISS's graph."""

    compress: str = "int8"  # int8 keeps the main components of the vectors, one byte each; none the vectors
    m: int = 32  # links of a node
    ef_construction: int = 64  # candidates while building
    ef_search: int = 1024  # candidates while searching; never fewer than the requested results


class Graph:
    """HNSW, a graph of FAISS over (m, e) float32 vectors, which finds most of the nearest by squared L2.

    Make one with :meth:`build` or :meth:`read`. The distances of compressed vectors are approximate.
    """

    def __init__(self, index: Any, options: GraphOptions) -> None:
        self._index, self._options = index, options

    @classmethod
    def build(cls, fetch: Fetch, m: int, options: GraphOptions) -> "Graph":
        """Index the vectors at positions 0 to m - 1, fetched in blocks."""
        faiss = require_faiss()
        sample = fetch(torch.randperm(m, generator=torch.Generator().manual_seed(0))[:_TRAINING].sort()[0].numpy())
        e = sample.shape[1]
        if options.compress == "none":
            graph = index = faiss.IndexHNSWFlat(e, options.m)
        else:
            components, centre = _main_components(sample)
            d = len(components)
            graph = faiss.IndexHNSWSQ(d, faiss.ScalarQuantizer.QT_8bit, options.m)
            turn = faiss.LinearTransform(e, d, True)
            faiss.copy_array_to_vector(components.ravel(), turn.A)
            faiss.copy_array_to_vector(-components @ centre, turn.b)
            turn.is_trained = True
            index = faiss.IndexPreTransform(turn, graph)
            index.referenced_objects = (turn, graph)  # Python must not free what C++ points to.
        graph.hnsw.efConstruction = options.ef_construction
        if not index.is_trained:
            index.train(sample)
        for start in range(0, m, _BLOCK):
            index.add(fetch(np.arange(start, min(m, start + _BLOCK))))
        return cls(index, options)

    def search(self, queries: Tensor, k: int, among: Tensor | None = None) -> Positions:
        """(n, k) positions, the nearest that it finds, -1 behind the last. queries (n, e), among (c,)."""
        faiss, n = require_faiss(), int(self._index.ntotal)
        effort, selector = 1.0, None
        if among is not None:
            allowed = np.zeros(n, dtype=bool)
            allowed[among.numpy()] = True
            effort, selector = n / len(among), faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        ef_search = math.ceil(max(self._options.ef_search, k) * effort)
        parameters = faiss.SearchParametersHNSW(efSearch=min(n, ef_search), sel=selector)
        if isinstance(self._index, faiss.IndexPreTransform):
            parameters = faiss.SearchParametersPreTransform(index_params=parameters)
        wanted, threads = queries.contiguous().numpy(), torch.get_num_threads()
        try:  # For one query, threads cost more than they bring. The number is this thread's, and torch's as well.
            faiss.omp_set_num_threads(1 if len(wanted) == 1 else threads)
            positions: Positions = self._index.search(wanted, k, params=parameters)[1]
        finally:
            faiss.omp_set_num_threads(threads)
        return positions

    def write(self, path: Path) -> None:
        """Write FAISS's file, without forcing it to disk."""
        try:
            require_faiss().write_index(self._index, str(path))
        except RuntimeError as error:
            raise OSError(f"FAISS cannot write {path}: {str(error).strip()}") from error

    @classmethod
    def read(cls, path: Path, options: GraphOptions) -> "Graph":
        """Map a file of :meth:`write` into memory. Check its size first: FAISS trusts the content."""
        faiss = require_faiss()
        # FAISS without MMAP_IFC reads HNSW completely.
        flags = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP)
        try:
            return cls(faiss.read_index(str(path), flags), options)
        except RuntimeError as error:
            raise ValueError(f"{path}: FAISS cannot read this file ({error}); build the index again") from error


def _main_components(sample: Vectors) -> tuple[Vectors, Vectors]:
    """(d, e) the fewest orthonormal directions that keep most of the variance, and (e,) the mean. sample (n, e)."""
    values = torch.from_numpy(sample).double()
    centre = values.mean(0)
    variance, directions = torch.linalg.eigh((values - centre).T @ (values - centre) / len(values))
    kept = variance.flip(0).cumsum(0) / variance.sum().clamp_min(torch.finfo(torch.float64).tiny)
    d = min(len(variance), 1 + int((kept < _KEPT).sum()))
    return directions.flip(1)[:, :d].T.float().contiguous().numpy(), centre.float().numpy()


def require_faiss() -> Any:
    """Import FAISS."""
    with need("faiss", "engine hnsw needs FAISS", ", or use engine flat"):
        return importlib.import_module("faiss")
