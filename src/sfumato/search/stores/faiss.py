"""FAISS over lifted vectors: HNSW (graph), IVF (lists) and IVF-PQ (lists of compressed vectors).

This module needs the extra `faiss` and handles only vectors and positions. IVF-PQ returns approximate distances: its
caller must fetch several times the wanted number of candidates and re-rank them by the full vectors (as
search/stores/local.py does), so it is not in FAISS_ENGINES.
"""

import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import need

FAISS_ENGINES = ("hnsw", "ivf")
"""Engines of :class:`FaissStore` that return distances of the full vectors."""

STORE_ENGINES = (*FAISS_ENGINES, "ivf-pq")
"""All engines of :class:`FaissStore`."""

_POINTS_PER_LIST = 39
"""With fewer training vectors per list, FAISS warns that its k-means is poor."""

_TRAINING, _BLOCK = 65_536, 65_536
"""ivf-pq: number of training vectors, and of vectors that are rotated and added at a time."""


@dataclass(frozen=True)
class FaissOptions:
    """The options of the FAISS engines; each engine uses only its own.

    Attributes:
        m: hnsw, links of a node.
        ef_construction: hnsw, candidates while building.
        ef_search: hnsw, candidates while searching; never fewer than the requested results.
        n_lists: ivf and ivf-pq, number of lists; about the square root of the number of vectors if None.
        n_probe: ivf and ivf-pq, number of lists that a search scans; an eighth of the lists, at least 8, if None.
        seed: ivf and ivf-pq, seed of the k-means for lists and codes, and of the rotation.
        code_size: ivf-pq, bytes of a compressed vector; a quarter of its dimensions if None.

    Raises:
        ValueError: a number is below 1 (m: below 2; seed: below 0).
    """

    m: int = 32
    ef_construction: int = 200
    ef_search: int = 64
    n_lists: int | None = None
    n_probe: int | None = None
    seed: int = 0
    code_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("m", "ef_construction", "ef_search", "n_lists", "n_probe", "code_size", "seed"):
            value, least = getattr(self, name), {"m": 2, "seed": 0}.get(name, 1)
            if value is not None and value < least:
                raise ValueError(f"FaissOptions: {name} must be at least {least}, got {value}")


class FaissStore:
    """A FAISS index of (m, e) float32 vectors under squared Euclidean distance.

    Make one with :meth:`build` or :meth:`read`.
    """

    def __init__(self, index: Any, engine: str, options: FaissOptions) -> None:
        self._index, self.engine, self.options = index, engine, options

    @classmethod
    def build(cls, vectors: Tensor, engine: str, options: FaissOptions | None = None) -> "FaissStore":
        """Index vectors. vectors (m, e)."""
        faiss = require_faiss()
        options = options or FaissOptions()
        m, e = vectors.shape
        if engine == "hnsw":
            index = faiss.IndexHNSWFlat(e, options.m)
            index.hnsw.efConstruction = options.ef_construction
        elif engine in ("ivf", "ivf-pq"):
            n_lists = options.n_lists or max(1, min(round(math.sqrt(m)), m // _POINTS_PER_LIST))
            if n_lists > m:
                raise ValueError(f"FaissStore: {n_lists} lists for {m} vectors; n_lists must not exceed their number")
            if engine == "ivf-pq":
                index = _compressed(faiss, m, e, n_lists, options)
            else:
                index = faiss.IndexIVFFlat(faiss.IndexFlatL2(e), e, n_lists)
                index.cp.seed = options.seed
        else:
            raise ValueError(f"unknown engine {engine!r}; FAISS has {', '.join(STORE_ENGINES)}")
        data = vectors.detach().cpu().contiguous().numpy()
        if engine == "ivf":
            index.train(data)
        if engine == "ivf-pq":
            generator = torch.Generator().manual_seed(options.seed)
            index.train(data[torch.randperm(m, generator=generator)[:_TRAINING].sort()[0].numpy()])
            for start in range(0, m, _BLOCK):
                index.add(data[start : start + _BLOCK])
        else:
            index.add(data)
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
        if self.engine == "ivf-pq":
            parameters = faiss.SearchParametersPreTransform(index_params=parameters)
        squared_l2, positions = self._index.search(queries.detach().cpu().contiguous().numpy(), k, params=parameters)
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
