"""Vectors prepared for exact search by bounds (search/screening.py): centres, codes, and products.

The products are taken in float32 by NumPy. Where torch is loaded and a short trial finds that faster, they are those of
int8 codes with a scale for each vector.
"""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sfumato.arrays import n_threads
from sfumato.distances.distance import Lift
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.exact import in_parallel

LARGEST = 127
"""The largest code of int8."""

NARROW = 16
"""Numbers of a vector below which products are taken in float32: those of int8 gain nothing, and of one are wrong."""

_ROWS = 8192
"""Vectors that are prepared at a time."""

_SAMPLE = 64
"""Vectors whose median is the centre of a block."""

Read = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | float]]
"""From the positions of r items, (r, e) vectors, and (r,) what of their distances depends on the item alone."""


@dataclass(frozen=True, eq=False)
class Block:
    """Vectors near a centre, prepared for products, in the order of their weights. Make one with :meth:`of`."""

    item: np.ndarray  # (r,) position of each
    coded: np.ndarray  # (r, e) vectors less the centre, in the dtype of the products
    scale: np.ndarray  # (r,) float32 factors of the codes
    weight: np.ndarray  # (r,) lower bounds of w, see search/screening.py
    length: np.ndarray  # (r,) upper bounds of the lengths of the coded vectors
    rounding: np.ndarray  # (r,) upper bounds of the lengths of what coding rounded away
    centre: np.ndarray  # (e,) float32
    allowed: np.ndarray | None = None  # (r,) which may be found; all if None

    @staticmethod
    def of(item: np.ndarray, read: Read, centre: np.ndarray, dtype: Any) -> "Block":
        """Some items. item (r,), centre (e,)."""
        r, e = len(item), len(centre)
        weight, length, rounding, scale = (np.empty(r, np.float32) for _ in range(4))
        for part in _parts(r):
            vectors, alone = read(item[part])
            weight[part] = _squares((vectors - centre).astype(np.float32, copy=False)) + alone
        item, coded, more = item[weight.argsort(kind="stable")], np.empty((r, e), dtype), 1 + sum_error(e)
        for part in _parts(r):
            vectors, alone = read(item[part])
            residual = (vectors - centre).astype(np.float32, copy=False)
            coded[part], factor = codes_of(residual, coded.dtype, LARGEST)
            back = coded[part].astype(np.float32) * factor
            scale[part] = factor[:, 0]
            length[part] = np.sqrt(_squares(back)) * more
            rounding[part] = np.sqrt(_squares(residual - back)) * more + 2**-23 * length[part]
            weight[part] = (_squares(residual) + alone) * (1 - sum_error(e))
        return Block(item, coded, scale, weight, length, rounding, centre)

    @classmethod
    def of_vectors(cls, item: np.ndarray, vectors: np.ndarray) -> "Block":
        """Some items by their vectors, vectors (r, e)."""
        # About the median of a sample, not the mean, which a single outlier moves.
        centre = np.median(vectors[:: -(-len(vectors) // _SAMPLE)], axis=0)
        block = cls.of(np.arange(len(vectors)), lambda rows: (vectors[rows], 0.0), centre, np.float32)
        return replace(block, item=item[block.item])

    @functools.cached_property
    def n_allowed(self) -> int:
        """Number of vectors that may be found."""
        return len(self.item) if self.allowed is None else int(self.allowed.sum())

    def among(self, items: np.ndarray) -> "Block":
        """The same where only some items may be found; their rows are copied if they are few. items (s,), ascending."""
        inside = np.isin(self.item, items)
        if 2 * int(inside.sum()) >= len(inside):
            return replace(self, allowed=inside)
        columns = ("item", "coded", "scale", "weight", "length", "rounding")
        return replace(self, allowed=None, **{name: getattr(self, name)[inside] for name in columns})


def _parts(n: int) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, n, _ROWS)]


def _squares(vectors: np.ndarray) -> np.ndarray:
    """(n,) squared lengths."""
    return np.asarray(np.einsum("ij,ij->i", vectors, vectors))


def sum_error(n: int) -> float:
    """A bound of the relative error of a float32 sum of n numbers of one sign, in any order, and of its terms."""
    return (n + 32) * 2**-23


def product_dtype() -> np.dtype[Any]:
    """The dtype in which this machine takes products faster."""
    return _fastest() if "torch" in sys.modules else np.dtype(np.float32)


@functools.cache
def _fastest() -> np.dtype[Any]:
    """int8 or float32, by a short trial in the threads of a search."""
    coded, plain = np.dtype(np.int8), np.dtype(np.float32)
    if not largest_code():
        return plain

    def seconds(dtype: np.dtype[Any]) -> float:
        rows, queries = np.ones((2048, 512), dtype), np.ones((32, 512), dtype)
        best = math.inf
        for _ in range(5):
            start = time.perf_counter()
            multiplied(rows, queries)
            best = min(best, time.perf_counter() - start)
        return best

    fast = min(in_parallel(lambda _: seconds(coded), n_threads()))
    return coded if fast < 0.8 * min(in_parallel(lambda _: seconds(plain), n_threads())) else plain


@functools.cache
def largest_code() -> int:
    """The largest code of queries whose products with rows of any codes are right here; 0 if none is.

    AVX2 adds two products of 8 bits in 16 bits, and keeps the largest number of 16 bits where the sum is larger.
    """
    shapes = [(n, e, b) for n in (1, 17, 300) for e in (NARROW, 33, 512) for b in (1, 3, 32)]
    with contextlib.suppress(AttributeError, RuntimeError):  # This torch has no such product.
        return next((code for code in (LARGEST, 64) if all(_is_right(code, *shape) for shape in shapes)), 0)
    return 0


def _is_right(code: int, n: int, e: int, b: int) -> bool:
    """Whether products of large codes are those of float64, of equal signs and of random ones."""
    random = np.random.default_rng(0)
    signs = [2 * random.integers(2, size=(m, e)) - 1 for m in (n, b)]
    signs[0][0], signs[1][0] = 1, 1
    rows, queries = signs[0] * LARGEST, signs[1] * code
    return np.array_equal(multiplied(rows.astype(np.int8), queries.astype(np.int8)), rows @ queries.T)


def multiplied(rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """(n, b) products, those of codes in int32. rows (n, e), queries (b, e)."""
    if rows.dtype == np.int8:
        import torch

        return np.asarray(torch._int_mm(torch.from_numpy(rows), torch.from_numpy(queries).T))
    if len(queries) == 1:  # Twice as fast as BLAS.
        return np.asarray(np.einsum("ne,e->n", rows, queries[0]))[:, None]
    return np.asarray(rows @ queries.T)


def codes_of(vectors: np.ndarray, dtype: np.dtype[Any], most: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, e) codes of vectors, integers up to `most`, and (n, 1) float32 scales by which they are multiplied."""
    if dtype.kind == "f":
        return vectors.astype(dtype, copy=False), np.ones((len(vectors), 1), np.float32)
    scale = (np.abs(vectors).max(1, keepdims=True, initial=0) / most).astype(np.float32)
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    return np.clip(np.rint(vectors / scale), -most, most).astype(dtype), scale


def lifted_vectors(gallery: GaussianEmbedding, lift: Lift) -> tuple[np.ndarray, np.ndarray | float]:
    """(m, e) lifted vectors without the columns that queries meet with zeros, and (m,) the squares of these."""
    columns = lift.query(gallery[:1])
    if columns.shape[1] and (columns != 0).any():
        wide = gallery.to(np.float64)
        return np.concatenate([wide.mean, lift.gallery(wide)], axis=1), 0.0
    return gallery.mean, _squares(lift.gallery(gallery))


def centres_of(gallery: GaussianEmbedding, lift: Lift) -> np.ndarray:
    """(c, e) float32 centres: one, or up to 256 where these are much closer to the items."""
    random = np.random.default_rng(0)
    chosen = random.permutation(gallery.n)[: 2**14]
    points = lifted_vectors(gallery[chosen], lift)[0].astype(np.float32)
    centre: np.ndarray = np.median(points[: 2**12], axis=0)[None]
    c = min(256, gallery.n // 128)
    if c < 2 or not np.abs(points).max() < 1e15:
        return centre
    points = points - centre
    means = _k_means(points[: 64 * c], _seeds(points[: 2**11], c, random))
    many = np.median(_squares(points - means[_nearest_centre(points, means)]))
    return centre + means if many < np.median(_squares(points)) / 4 else centre


def _seeds(points: np.ndarray, c: int, random: np.random.Generator) -> np.ndarray:
    """Some of the points, each drawn by its squared distance to those before: as few of c as are nearly as close."""
    squares = _squares(points)
    seeds, apart, medians = [0], np.full(len(points), np.inf), list[float]()
    while True:
        seed = seeds[-1]
        apart = np.minimum(apart, np.maximum(squares + squares[seed] - 2 * (points @ points[seed]), 0))
        apart[seed] = 0
        medians.append(float(np.median(apart)))
        if len(seeds) == c or not apart.sum() > 0:
            break
        seeds.append(int(random.choice(len(points), p=apart / apart.sum())))
    enough = next(i for i, median in enumerate(medians, 1) if median <= 4 * medians[-1])
    return points[seeds[: 2 * enough]]


def _k_means(points: np.ndarray, means: np.ndarray) -> np.ndarray:
    """(c, e) means after four rounds from the given ones."""
    for _ in range(4):
        label = _nearest_centre(points, means)
        counts = np.bincount(label, minlength=len(means))
        order, some = label.argsort(kind="stable"), counts > 0
        sums = np.add.reduceat(points[order], (counts.cumsum() - counts)[some], axis=0)
        means = means.copy()
        means[some] = sums / counts[some, None]
    return means


def labels_of(gallery: GaussianEmbedding, lift: Lift, centres: np.ndarray) -> np.ndarray:
    """(m,) positions of the centres nearest to the items of a gallery."""
    parts = (lifted_vectors(gallery[part], lift)[0].astype(np.float32) for part in _parts(gallery.n))
    return np.concatenate([_nearest_centre(part, centres) for part in parts])


def _nearest_centre(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """(n,) positions of the nearest centres."""
    if len(centres) == 1:
        return np.zeros(len(points), np.int64)
    middle = centres.mean(0)
    points, centres = points - middle, centres - middle
    return np.asarray((_squares(centres) - 2 * (points @ centres.T)).argmin(1))
