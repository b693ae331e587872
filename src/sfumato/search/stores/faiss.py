"""FAISS over lifted vectors: flat (exact), HNSW (graph) and IVF (lists). Needs the extra `faiss`; knows only vectors and positions."""

import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import UserError

FAISS_ENGINES = ("flat", "hnsw", "ivf")
"""Engines of :class:`FaissStore`."""

_POINTS_PER_LIST = 39
"""Below this many training vectors a list, FAISS warns that its k-means is poor."""


@dataclass(frozen=True)
class FaissOptions:
    """How thorough an approximate engine is; each engine reads its own.

    Attributes:
        m: hnsw, links of a node.
        ef_construction: hnsw, candidates while building.
        ef_search: hnsw, candidates while searching; never fewer than the results asked for.
        n_lists: ivf, number of lists; about the square root of the gallery if None.
        n_probe: ivf, lists that a search looks into; an eighth of them, at least 8, if None.
        seed: ivf, of the k-means that makes the lists.

    Raises:
        ValueError: a number is below 1 (m: below 2).
    """

    m: int = 32
    ef_construction: int = 200
    ef_search: int = 64
    n_lists: int | None = None
    n_probe: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("m", 2), ("ef_construction", 1), ("ef_search", 1), ("n_lists", 1), ("n_probe", 1)):
            value = getattr(self, name)
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
        """Index vectors.

        Args:
            vectors: (m, e) float32, m >= 1.
            engine: one of FAISS_ENGINES.
            options: see :class:`FaissOptions`.

        Raises:
            UserError: faiss is not installed.
            ValueError: unknown engine, or more lists than vectors.
        """
        faiss = _faiss()
        options = options or FaissOptions()
        m, e = vectors.shape
        if engine == "flat":
            index = faiss.IndexFlatL2(e)
        elif engine == "hnsw":
            index = faiss.IndexHNSWFlat(e, options.m)
            index.hnsw.efConstruction = options.ef_construction
        elif engine == "ivf":
            n_lists = options.n_lists or max(1, min(round(math.sqrt(m)), m // _POINTS_PER_LIST))
            if n_lists > m:
                raise ValueError(f"FaissStore: {n_lists} lists for {m} vectors; n_lists must not exceed their number")
            index = faiss.IndexIVFFlat(faiss.IndexFlatL2(e), e, n_lists)
            index.cp.seed = options.seed
        else:
            raise ValueError(f"unknown engine {engine!r}; FAISS has {', '.join(FAISS_ENGINES)}")
        data = vectors.detach().cpu().contiguous().numpy()
        if engine == "ivf":
            index.train(data)
        index.add(data)
        return cls(index, engine, options)

    @property
    def n(self) -> int:
        """Number of vectors m."""
        return int(self._index.ntotal)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest vectors that the engine finds.

        Args:
            queries: (n, e) float32.
            k: 1 <= k <= m.

        Returns:
            ((n, k) squared L2 ascending, (n, k) positions); position -1 where the engine found fewer than k.
        """
        faiss = _faiss()
        parameters = None
        if self.engine == "hnsw":
            parameters = faiss.SearchParametersHNSW(efSearch=max(self.options.ef_search, k))
        elif self.engine == "ivf":
            n_lists = int(self._index.nlist)
            parameters = faiss.SearchParametersIVF(
                nprobe=min(n_lists, self.options.n_probe or max(8, math.ceil(n_lists / 8)))
            )
        squared_l2, positions = self._index.search(queries.detach().cpu().contiguous().numpy(), k, params=parameters)
        return torch.from_numpy(squared_l2), torch.from_numpy(positions)

    def write(self, path: Path) -> None:
        """Write FAISS's own file; not forced to disk."""
        _faiss().write_index(self._index, str(path))

    @classmethod
    def read(cls, path: Path, engine: str, options: FaissOptions) -> "FaissStore":
        """Read a file of :meth:`write`; check its checksum first, FAISS trusts what it reads.

        Raises:
            UserError: faiss is not installed.
            ValueError: FAISS cannot read it.
        """
        faiss = _faiss()
        try:
            return cls(faiss.read_index(str(path)), engine, options)
        except RuntimeError as error:
            raise ValueError(f"{path}: FAISS cannot read this file ({error}); build the index again") from error


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise UserError(
            "engines flat, hnsw and ivf need FAISS: pip install 'sfumato[faiss]', or use engine exact"
        ) from error
