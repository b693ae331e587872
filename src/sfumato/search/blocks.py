"""Vectors prepared for exact search by bounds (search/screening.py): centres, codes, and products.

The products are taken of int8 codes with a scale for each vector, in bfloat16, or in float32, by a short trial.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sfumato.distances.distance import Lift
from sfumato.gaussian import GaussianEmbedding

LARGEST = 127
"""The largest code of int8."""

NARROW = 16
"""Numbers of a vector below which products are taken in float32: those of int8 gain nothing, and of one are wrong."""

_ROWS = 8192
"""Vectors that are prepared at a time."""

_SAMPLE = 64
"""Vectors whose median is the centre of a block."""

Read = Callable[[Tensor], tuple[Tensor, Tensor | float]]
"""From the positions of r items, (r, e) vectors, and (r,) what of their distances depends on the item alone."""


@dataclass(frozen=True, eq=False)
class Block:
    """Vectors near a centre, prepared for products, in the order of their weights. Make one with :meth:`of`."""

    item: Tensor  # (r,) position of each
    coded: Tensor  # (r, e) vectors less the centre, in the dtype of the products
    scale: Tensor  # (r,) float32 factors of the codes
    weight: Tensor  # (r,) lower bounds of w, see search/screening.py
    length: Tensor  # (r,) upper bounds of the lengths of the coded vectors
    rounding: Tensor  # (r,) upper bounds of the lengths of what coding rounded away
    centre: Tensor  # (e,) float32
    allowed: Tensor | None = None  # (r,) which may be found; all if None

    @staticmethod
    @torch.no_grad()
    def of(item: Tensor, read: Read, centre: Tensor, dtype: torch.dtype) -> "Block":
        """Some items. item (r,), centre (e,)."""
        r, e = len(item), len(centre)
        weight, length, rounding, scale = (torch.empty(r) for _ in range(4))
        for part in _parts(r):
            vectors, alone = read(item[part])
            weight[part] = (vectors - centre).float().square().sum(1) + alone
        item, coded, more = item[weight.argsort(stable=True)], torch.empty(r, e, dtype=dtype), 1 + sum_error(e)
        for part in _parts(r):
            vectors, alone = read(item[part])
            residual = (vectors - centre).float()
            coded[part], factor = codes_of(residual, dtype, LARGEST)
            back = coded[part].float() * factor
            scale[part] = factor.squeeze(1)
            length[part] = torch.linalg.vector_norm(back, dim=1) * more
            rounding[part] = torch.linalg.vector_norm(residual - back, dim=1) * more + 2**-23 * length[part]
            weight[part] = (residual.square().sum(1) + alone) * (1 - sum_error(e))
        return Block(item, coded, scale, weight, length, rounding, centre)

    @classmethod
    def of_vectors(cls, item: Tensor, vectors: np.ndarray) -> "Block":
        """Some items by their vectors, vectors (r, e)."""
        given = torch.from_numpy(vectors)
        # About the median of a sample, not the mean, which a single outlier moves.
        centre = given[:: -(-len(given) // _SAMPLE)].median(dim=0).values
        block = cls.of(torch.arange(len(given)), lambda rows: (given[rows], 0.0), centre, torch.float32)
        return replace(block, item=item[block.item])

    @functools.cached_property
    def n_allowed(self) -> int:
        """Number of vectors that may be found."""
        return len(self.item) if self.allowed is None else int(self.allowed.sum())

    def among(self, items: Tensor) -> "Block":
        """The same where only some items may be found; their rows are copied if they are few. items (s,), ascending."""
        place = torch.searchsorted(items, self.item).clamp_max(len(items) - 1)
        inside = items[place] == self.item if len(items) else torch.zeros(len(self.item), dtype=torch.bool)
        if 2 * int(inside.sum()) >= len(inside):
            return replace(self, allowed=inside)
        columns = ("item", "coded", "scale", "weight", "length", "rounding")
        return replace(self, allowed=None, **{name: getattr(self, name)[inside] for name in columns})


def _parts(n: int) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, n, _ROWS)]


def sum_error(n: int) -> float:
    """A bound of the relative error of a float32 sum of n numbers of one sign, in any order, and of its terms."""
    return (n + 32) * 2**-23


@functools.cache
def product_dtype() -> torch.dtype:
    """The dtype in which this machine takes products faster, by a short trial."""
    times = {torch.float32: math.inf, torch.bfloat16: math.inf, **({torch.int8: math.inf} if largest_code() else {})}
    for dtype in times:
        rows, queries = torch.ones(2048, 512, dtype=dtype), torch.ones(32, 512, dtype=dtype)
        for _ in range(5):
            start = time.perf_counter()
            multiplied(rows, queries)
            times[dtype] = min(times[dtype], time.perf_counter() - start)
    fastest = min(times, key=times.__getitem__)
    return fastest if times[fastest] < 0.8 * times[torch.float32] else torch.float32


@functools.cache
def largest_code() -> int:
    """The largest code of int8 for queries whose products with rows of any codes are right here; 0 if none is.

    AVX2 adds two products of 8 bits in 16 bits, and keeps the largest number of 16 bits where the sum is larger.
    """
    shapes = [(n, e, b) for n in (1, 17, 300) for e in (NARROW, 33, 512) for b in (1, 3, 32)]
    with contextlib.suppress(AttributeError, RuntimeError):  # This torch has no such product.
        return next((code for code in (LARGEST, 64) if all(_is_right(code, *shape) for shape in shapes)), 0)
    return 0


def _is_right(code: int, n: int, e: int, b: int) -> bool:
    """Whether products of large codes are those of float64, of equal signs and of random ones."""
    generator = torch.Generator().manual_seed(0)
    signs = [2 * torch.randint(2, (m, e), generator=generator, dtype=torch.int8) - 1 for m in (n, b)]
    signs[0][0], signs[1][0] = 1, 1
    rows, queries = signs[0] * LARGEST, signs[1] * code
    return torch.equal(multiplied(rows, queries).double(), rows.double() @ queries.double().T)


def multiplied(rows: Tensor, queries: Tensor, out: Tensor | None = None) -> Tensor:
    """(n, b) products, those of int8 in int32. rows (n, e), queries (b, e)."""
    multiply = torch._int_mm if rows.dtype == torch.int8 else torch.mm
    found: Tensor = multiply(rows, queries.T, out=out)
    return found


def codes_of(vectors: Tensor, dtype: torch.dtype, most: int) -> tuple[Tensor, Tensor]:
    """(n, e) codes of vectors, those of int8 up to `most`, and (n, 1) float32 scales by which they are multiplied."""
    if dtype.is_floating_point:
        return vectors.to(dtype), torch.ones(len(vectors), 1)
    scale = (vectors.abs().amax(1, keepdim=True) / most).float().clamp_min(torch.finfo(torch.float32).tiny)
    return (vectors / scale).round_().clamp_(-most, most).to(torch.int8), scale


def lifted_vectors(gallery: GaussianEmbedding, lift: Lift) -> tuple[Tensor, Tensor | float]:
    """(m, e) lifted vectors without the columns that queries meet with zeros, and (m,) the squares of these."""
    columns = lift.query(gallery[:1])
    if columns.shape[1] and bool((columns != 0).any()):
        wide = gallery.to(torch.float64)
        return torch.cat([wide.mean, lift.gallery(wide)], dim=1), 0.0
    return gallery.mean, lift.gallery(gallery).square().sum(1)


def centres_of(gallery: GaussianEmbedding, lift: Lift) -> Tensor:
    """(c, e) centres: one, or up to 256 where these are much closer to the items."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(gallery.n, generator=generator)[: 2**14]
    points = lifted_vectors(gallery[chosen], lift)[0].float()
    centre = points[: 2**12].median(dim=0).values.unsqueeze(0)
    c = min(256, gallery.n // 128)
    if c < 2 or not points.abs().amax() < 1e15:
        return centre
    points = points - centre
    means = _k_means(points[: 64 * c], _seeds(points[: 2**11], c, generator))
    many = torch.linalg.vector_norm(points - means[_nearest_centre(points, means)], dim=1).median()
    return centre + means if many < torch.linalg.vector_norm(points, dim=1).median() / 2 else centre


def _seeds(points: Tensor, c: int, generator: torch.Generator) -> Tensor:
    """Some of the points, each drawn by its squared distance to those before: as few of c as are nearly as close."""
    squares = points.square().sum(1)
    seeds, apart, medians = [0], torch.full((len(points),), torch.inf), list[float]()
    while True:
        seed = seeds[-1]
        apart = torch.minimum(apart, (squares + squares[seed] - 2 * (points @ points[seed])).clamp_min(0))
        apart[seed] = 0
        medians.append(float(apart.median()))
        if len(seeds) == c or not bool(apart.sum() > 0):
            break
        seeds.append(int(torch.multinomial(apart, 1, generator=generator)))
    enough = next(i for i, median in enumerate(medians, 1) if median <= 4 * medians[-1])
    return points[torch.tensor(seeds[: 2 * enough])]


def _k_means(points: Tensor, means: Tensor) -> Tensor:
    """(c, e) means after four rounds from the given ones."""
    for _ in range(4):
        label = _nearest_centre(points, means)
        sums = torch.zeros_like(means).index_add_(0, label, points)
        counts = torch.bincount(label, minlength=len(means)).unsqueeze(1)
        means = torch.where(counts > 0, sums / counts.clamp_min(1), means)
    return means


def labels_of(gallery: GaussianEmbedding, lift: Lift, centres: Tensor) -> Tensor:
    """(m,) positions of the centres nearest to the items of a gallery."""
    return torch.cat(
        [_nearest_centre(lifted_vectors(gallery[part], lift)[0].float(), centres) for part in _parts(gallery.n)]
    )


def _nearest_centre(points: Tensor, centres: Tensor) -> Tensor:
    """(n,) positions of the nearest centres."""
    if len(centres) == 1:
        return torch.zeros(len(points), dtype=torch.long)
    middle = centres.mean(0)
    points, centres = points - middle, centres - middle
    return torch.addmm(centres.square().sum(1), points, centres.T, alpha=-2).argmin(1)
