"""FAISS engines over lifted vectors: flat (exact), HNSW and IVF. Needs the extra ``faiss``."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from sfumato.errors import UserError

FaissEngine = Literal["flat", "hnsw", "ivf"]


class FaissStore:
    """Vectors in a FAISS index, searched by squared L2.

    Args:
        index: the FAISS index.
        engine: which kind it is.
    """

    def __init__(self, index: Any, engine: FaissEngine) -> None:
        self._index, self.engine = index, engine

    @classmethod
    def build(cls, vectors: np.ndarray, engine: FaissEngine, options: dict[str, int]) -> "FaissStore":
        """Index (m, l) float32 vectors.

        Args:
            vectors: what to index; at least one.
            engine: flat, hnsw or ivf.
            options: hnsw: m (32), ef_construction (200), ef_search (64); ivf: n_lists (4 sqrt of the number of vectors, at
                most one for every 39 of them), n_probe (a quarter of the lists up to 64).

        Raises:
            ValueError: an option is not one of the engine's.
        """
        faiss = _faiss()
        n, width = vectors.shape
        lists = max(1, min(int(4 * n**0.5), n // 39))
        defaults: dict[FaissEngine, dict[str, int]] = {
            "flat": {},
            "hnsw": {"m": 32, "ef_construction": 200, "ef_search": 64},
            "ivf": {"n_lists": lists, "n_probe": max(1, min(64, options.get("n_lists", lists) // 4))},
        }
        if unknown := set(options) - set(defaults[engine]):
            raise ValueError(f"engine {engine!r} has no option {sorted(unknown)}; it has {sorted(defaults[engine]) or 'none'}")
        chosen = defaults[engine] | options
        if engine == "flat":
            index = faiss.IndexFlatL2(width)
        elif engine == "hnsw":
            index = faiss.IndexHNSWFlat(width, chosen["m"])
            index.hnsw.efConstruction, index.hnsw.efSearch = chosen["ef_construction"], chosen["ef_search"]
        else:
            quantizer = faiss.IndexFlatL2(width)
            index = faiss.IndexIVFFlat(quantizer, width, chosen["n_lists"])
            index.cp.seed = 0
            index.train(vectors)
            index.nprobe = chosen["n_probe"]
        index.add(vectors)
        return cls(index, engine)

    def search(self, vectors: np.ndarray, k: int) -> np.ndarray:
        """(n, l) query vectors -> (n, k) positions of the candidates, -1 where an engine found fewer."""
        if self.engine == "hnsw":
            self._index.hnsw.efSearch = max(self._index.hnsw.efSearch, k)
        positions: np.ndarray = self._index.search(np.ascontiguousarray(vectors, dtype=np.float32), k)[1]
        return positions

    def save(self, path: Path) -> None:
        """Write the FAISS file."""
        _faiss().write_index(self._index, str(path))

    @classmethod
    def load(cls, path: Path, engine: FaissEngine) -> "FaissStore":
        """Read the FAISS file."""
        return cls(_faiss().read_index(str(path)), engine)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UserError("the engines flat, hnsw and ivf need FAISS: pip install 'sfumato[faiss]'; the engine 'exact' needs nothing") from error
    return faiss
