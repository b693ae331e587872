"""What finds the nearest vectors, by positions alone: exact products with bounds on their rounding error, and FAISS.

The caller defines where vectors are stored and the meaning of a position (search/stores/local.py). FAISS needs the
extra `faiss`: HNSW (graph), IVF (lists) and IVF-PQ (lists of compressed vectors). IVF-PQ, and HNSW over compressed
vectors, return approximate distances: the caller must fetch several times the wanted number of candidates and re-rank
them by the full vectors.
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


FAISS_ENGINES = ("hnsw", "ivf")
"""Engines of :class:`FaissStore` that return distances of the full vectors, unless they are compressed."""

STORE_ENGINES = (*FAISS_ENGINES, "ivf-pq")
"""All engines of :class:`FaissStore`."""

_POINTS_PER_LIST, _MOST_PER_LIST = 39, 256
"""With fewer training vectors per list, FAISS warns that its k-means is poor; it reads no more."""

_TRAINING, _BLOCK = 65_536, 65_536
"""Numbers of training vectors, and of vectors that are added at a time."""

_KEPT = 0.99
"""Fraction of the variance that is kept of compressed vectors."""

COMPRESSIONS = ("none", "int8")


@dataclass(frozen=True)
class FaissOptions:
    """The options of the FAISS engines; each engine uses only its own."""

    compress: str = "none"  # hnsw: int8 keeps the main components of the vectors, one byte each
    m: int = 32  # hnsw: links of a node
    ef_construction: int = 200  # hnsw: candidates while building
    ef_search: int = 64  # hnsw: candidates while searching; never fewer than the requested results
    n_lists: int | None = None  # ivf, ivf-pq: lists; about the square root of the number of vectors if None
    n_probe: int | None = None  # ivf, ivf-pq: lists that a search scans; an eighth of them, at least 8, if None
    seed: int = 0  # ivf, ivf-pq: of the k-means for lists and codes, and of the rotation
    code_size: int | None = None  # ivf-pq: bytes of a compressed vector; a quarter of its dimensions if None

    def __post_init__(self) -> None:
        for name in ("m", "ef_construction", "ef_search", "n_lists", "n_probe", "code_size", "seed"):
            value, least = getattr(self, name), {"m": 2, "seed": 0}.get(name, 1)
            if value is not None and value < least:
                raise ValueError(f"FaissOptions: {name} must be at least {least}, got {value}")
        if self.compress not in COMPRESSIONS:
            raise ValueError(f"FaissOptions: compress must be {' or '.join(COMPRESSIONS)}, got {self.compress!r}")


class FaissStore:
    """A FAISS index of (m, e) float32 vectors under squared Euclidean distance.

    Make one with :meth:`build` or :meth:`read`.
    """

    def __init__(self, index: Any, engine: str, options: FaissOptions) -> None:
        self._index, self.engine, self.options = index, engine, options

    @classmethod
    def build(cls, vectors: Tensor, engine: str, options: FaissOptions | None = None) -> "FaissStore":
        """Index vectors. vectors (m, e)."""
        data = vectors.detach().cpu().contiguous().numpy()
        return cls.build_from(data.__getitem__, len(data), data.shape[1], engine, options or FaissOptions())

    @classmethod
    def build_from(cls, fetch: Fetch, m: int, e: int, engine: str, options: FaissOptions) -> "FaissStore":
        """Index the vectors at positions 0 to m - 1, e numbers each, fetched in blocks."""
        faiss = require_faiss()
        if engine not in STORE_ENGINES:
            raise ValueError(f"unknown engine {engine!r}; FAISS has {', '.join(STORE_ENGINES)}")
        n_lists = options.n_lists or max(1, min(round(math.sqrt(m)), m // _POINTS_PER_LIST))
        if engine != "hnsw" and n_lists > m:
            raise ValueError(f"FaissStore: {n_lists} lists for {m} vectors; n_lists must not exceed their number")
        n = max(_TRAINING, _MOST_PER_LIST * n_lists) if engine == "ivf" else _TRAINING
        generator = torch.Generator().manual_seed(options.seed)
        sample = fetch(torch.randperm(m, generator=generator)[:n].sort()[0].numpy())
        if engine == "hnsw":
            index = _graph(faiss, sample, options)
        elif engine == "ivf":
            index = faiss.IndexIVFFlat(faiss.IndexFlatL2(e), e, n_lists)
            index.cp.seed = options.seed
        else:
            index = _compressed(faiss, m, e, n_lists, options)
        if not index.is_trained:
            index.train(sample)
        for start in range(0, m, _BLOCK):
            index.add(fetch(np.arange(start, min(m, start + _BLOCK))))
        return cls(index, engine, options)

    @property
    def n(self) -> int:
        """Number of vectors m."""
        return int(self._index.ntotal)

    def search(self, queries: Tensor, k: int, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k nearest vectors that the engine finds. queries (n, e), among (c,)."""
        faiss = require_faiss()
        effort, selector = 1.0, None
        if among is not None:
            allowed = np.zeros(self.n, dtype=bool)
            allowed[among.numpy()] = True
            effort, selector = self.n / len(among), faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        if self.engine == "hnsw":
            ef_search = math.ceil(max(self.options.ef_search, k) * effort)
            parameters = faiss.SearchParametersHNSW(efSearch=min(self.n, ef_search), sel=selector)
        else:
            n_lists = int(faiss.extract_index_ivf(self._index).nlist)
            n_probe = math.ceil((self.options.n_probe or max(8, math.ceil(n_lists / 8))) * effort)
            parameters = faiss.SearchParametersIVF(nprobe=min(n_lists, n_probe), sel=selector)
        if isinstance(self._index, faiss.IndexPreTransform):
            parameters = faiss.SearchParametersPreTransform(index_params=parameters)
        wanted, threads = queries.detach().cpu().contiguous().numpy(), torch.get_num_threads()
        try:  # For one query, threads cost more than they bring. The number is this thread's, and torch's as well.
            faiss.omp_set_num_threads(1 if len(wanted) == 1 else threads)
            squared_l2, positions = self._index.search(wanted, k, params=parameters)
        finally:
            faiss.omp_set_num_threads(threads)
        return torch.from_numpy(squared_l2), torch.from_numpy(positions)

    def write(self, path: Path) -> None:
        """Write FAISS's file, without forcing it to disk."""
        try:
            require_faiss().write_index(self._index, str(path))
        except RuntimeError as error:
            raise OSError(f"FAISS cannot write {path}: {str(error).strip()}") from error

    @classmethod
    def read(cls, path: Path, engine: str, options: FaissOptions, *, mapped: bool = False) -> "FaissStore":
        """Read a file of :meth:`write`. Check its checksum or size first: FAISS trusts the content."""
        faiss = require_faiss()
        flags = 0
        if mapped:
            # FAISS without MMAP_IFC maps the lists of IVF, but reads HNSW completely.
            flags = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP) | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
        try:
            return cls(faiss.read_index(str(path), flags), engine, options)
        except RuntimeError as error:
            raise ValueError(f"{path}: FAISS cannot read this file ({error}); build the index again") from error


def _graph(faiss: Any, sample: Vectors, options: FaissOptions) -> Any:
    """An empty HNSW index, for int8 over the main components of the vectors. sample (n, e)."""
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
    return index


def _main_components(sample: Vectors) -> tuple[Vectors, Vectors]:
    """(d, e) the fewest orthonormal directions that keep most of the variance, and (e,) the mean. sample (n, e)."""
    values = torch.from_numpy(sample).double()
    centre = values.mean(0)
    variance, directions = torch.linalg.eigh((values - centre).T @ (values - centre) / len(values))
    kept = variance.flip(0).cumsum(0) / variance.sum().clamp_min(torch.finfo(torch.float64).tiny)
    d = min(len(variance), 1 + int((kept < _KEPT).sum()))
    return directions.flip(1)[:, :d].T.float().contiguous().numpy(), centre.float().numpy()


def _compressed(faiss: Any, m: int, e: int, n_lists: int, options: FaissOptions) -> Any:
    """An untrained IVF-PQ index behind a random rotation, which balances the variance over the parts of the code."""
    if m < 16:
        raise ValueError(f"FaissStore: ivf-pq learns its codes from at least 16 vectors, got {m}")
    code_size = min(e, options.code_size or math.ceil(e / 4))
    wide = code_size * math.ceil(e / code_size)
    bits = max(4, min(8, int(math.log2(m / _POINTS_PER_LIST))))
    rotation = faiss.RandomRotationMatrix(e, wide)
    rotation.init(options.seed + 1)
    index = faiss.IndexIVFPQ(faiss.IndexFlatL2(wide), wide, n_lists, code_size, bits)
    index.cp.seed = index.pq.cp.seed = options.seed
    whole = faiss.IndexPreTransform(rotation, index)
    # Python must not free what C++ points to; FAISS writes and reads both as one.
    whole.referenced_objects = (rotation, index)
    return whole


def require_faiss() -> Any:
    """Import FAISS."""
    with need("faiss", "engines hnsw, ivf and ivf-pq need FAISS", ", or use engine exact"):
        return importlib.import_module("faiss")
