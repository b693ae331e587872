"""The protocol of a distance, and how any formula becomes one: checks, matrix products, blocks under a memory budget.

No (n, m, d) array ever exists, not in the backward pass either: blocks are recomputed there.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from array_api_compat import device

from sfumato.arrays import Array, is_tensor, like, namespace
from sfumato.gaussian import GaussianEmbedding, Sides, accumulation_dtype, reparametrised
from sfumato.ids import Direction

if TYPE_CHECKING:
    import torch

DEFAULT_MEMORY_MB = 64.0
"""Working memory of the sampled distances, beside inputs and result."""

STREAM_MEMORY_MB = 16.0
"""Working memory of formulas in blocks: few blocks, yet each fits in a cache."""

_NOISE_ROWS = 64
"""Number of consecutive items that share a generator of noise."""

Points = Literal["allowed", "on one side", "refused"]
"""Whether a side may hold points, whose variance is 0."""


class Gaussians(NamedTuple):
    """Diagonal Gaussians of any shape (..., d)."""

    mean: Array
    log_var: Array
    var: Array


Side = GaussianEmbedding | Gaussians
"""What a formula takes."""

Form = Callable[..., Array]


@dataclass(frozen=True)
class Lift:
    """A distance as a squared L2 distance between longer vectors, plus a number of either side.

        distance(x, y) = ||[mean, columns]_x - [mean, columns]_y||^2 + offset_x + offset_y

    The root of a gallery item's offset can be a last column, opposite to 0 in the query. The query's own offset does
    not change the order of its results, so that any vector engine can search by the distance.
    """

    columns: Callable[[GaussianEmbedding], Array] | None = None  # (n, d) embeddings -> (n, c)
    offset: Callable[[GaussianEmbedding], Array] | None = None  # (n, d) embeddings -> (n,) float32 or better

    def vectors(self, e: GaussianEmbedding) -> tuple[Array, Array]:
        """The vectors (n, d + c), and the offsets (n,)."""
        vectors = e.mean if self.columns is None else namespace(e.mean).concat([e.mean, self.columns(e)], axis=1)
        return vectors, self.constant(e)

    def product(self, x: GaussianEmbedding, y: GaussianEmbedding) -> Array:
        """The distances of all pairs by one matrix product. x (n, d), y (m, d) -> (n, m)."""
        (a, a_offset), (b, b_offset) = self.vectors(x), self.vectors(y)
        squared = squared_l2_product(a, b)
        return squared if self.offset is None else squared + a_offset[:, None] + b_offset

    def gallery(self, e: GaussianEmbedding) -> Array:
        """(n, c') columns beside the means of a gallery."""
        constant = self.constant(e)
        return self._columns(e, namespace(constant).sqrt(constant))

    def query(self, e: GaussianEmbedding) -> Array:
        """(n, c') columns beside the means of queries."""
        return self._columns(e, _zeros(e))

    def constant(self, e: GaussianEmbedding) -> Array:
        """(n,) offsets in float32 or better."""
        return _zeros(e) if self.offset is None else self.offset(e)

    def _columns(self, e: GaussianEmbedding, last: Array) -> Array:
        own = [] if self.columns is None else [self.columns(e.to(accumulation_dtype(e.dtype)))]
        last = last[:, None][:, : 0 if self.offset is None else 1]
        return namespace(last).concat([*own, last], axis=1) if own else last


def _zeros(e: GaussianEmbedding) -> Array:
    """(n,) float32."""
    return like(np.zeros(e.n, np.float32), e.mean)


@dataclass(frozen=True)
class Distance:
    """The protocol of a distance: its row form, its matrix form, and what it needs and allows.

    Losses, search and evaluation use only these attributes of a distance, never its name.
    """

    name: str  # key in DISTANCES and in recipes
    row: Form  # (n, d), (n, d) -> (n,) distances of corresponding rows
    matrix: Form  # (n, d), (m, d) -> (n, m) distances between all pairs
    symmetric: bool = True  # distance(x, y) = distance(y, x); if not, images come first
    needs_variance: bool = False  # points (variance 0) are refused
    of_samples: Callable[[Array, Array], Array] | None = None
    n_samples: int = 8  # number s of samples of each embedding when a sampled distance ranks
    seed: int = 0  # of these samples
    embeddings: int = 1
    lift: Lift | None = None
    direction: Direction = "i2t"

    @property
    def sampled(self) -> bool:
        """Whether it is estimated from random samples."""
        return self.of_samples is not None

    def with_samples(self, n_samples: int | None, seed: int) -> "Distance":
        """The same distance with other samples when it ranks; a closed form is returned unchanged."""
        return replace(self, n_samples=n_samples or self.n_samples, seed=seed) if self.sampled else self

    def for_direction(self, direction: Direction) -> "Distance":
        """The same distance with queries first: row and matrix take (queries, gallery) of this direction of retrieval.

        It always compares images with texts, so that only the result of an asymmetric distance, such as kl, changes.
        """
        if direction == self.direction:
            return self
        if self.symmetric:
            return replace(self, direction=direction)
        row, matrix = self.row, self.matrix
        return replace(self, direction=direction, row=lambda x, y: row(y, x), matrix=lambda x, y: matrix(y, x).T)


def closed_form(
    formula: Form,
    product: Form | None = None,
    *,
    in_place: Form | None = None,
    name: str = "",
    points: Points = "allowed",
    symmetric: bool = True,
    embeddings: int = 1,
    lift: Lift | None = None,
) -> Distance:
    """A distance from its formula, which broadcasts. All pairs come from the lift, else the product, else in blocks."""
    name = name or formula.__name__

    def row(x: GaussianEmbedding, y: GaussianEmbedding) -> Array:
        return formula(*checked_rows(x, y, name, points=points))

    def matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Array:
        assert product is not None
        return product(*checked(x, y, name, points=points))

    def streamed(x: GaussianEmbedding, y: GaussianEmbedding, *, memory_mb: float = STREAM_MEMORY_MB) -> Array:
        x, y = checked(x, y, name, points=points)
        sides = [(e.mean, e.log_var, e.var) for e in (x, y)]
        return blockwise(block, *sides, floats_per_pair=10 * x.d, memory_mb=memory_mb)

    def block(*tensors: Array) -> Array:
        plain = any(not is_tensor(t) or t.requires_grad for t in tensors)
        form = formula if in_place is None or plain else in_place
        return form(Gaussians(*(t[:, None] for t in tensors[:3])), Gaussians(*tensors[3:]))

    if lift is not None:
        product = lift.product
    form = streamed if product is None else matrix
    return Distance(name, row, form, symmetric, points != "allowed", embeddings=embeddings, lift=lift)


def sampled(name: str, reduce: Callable[[Array], Array], *, n_samples: int = 8) -> Distance:
    """A distance of samples: reduce takes the Euclidean distances of all pairs of samples, (n, m, s, s) -> (n, m)."""
    s = n_samples

    def of_samples(a: Array, b: Array, *, memory_mb: float = DEFAULT_MEMORY_MB) -> Array:
        return reduce_sample_distances(a, b, reduce, memory_mb=memory_mb)

    def matrix(
        x: GaussianEmbedding,
        y: GaussianEmbedding,
        *,
        n_samples: int = s,
        generator: "torch.Generator | None" = None,
        memory_mb: float = DEFAULT_MEMORY_MB,
    ) -> Array:
        a, b = (e.sample(n_samples, generator=generator) for e in checked(x, y, name))
        return of_samples(a, b, memory_mb=memory_mb)

    def row(
        x: GaussianEmbedding, y: GaussianEmbedding, *, n_samples: int = s, generator: "torch.Generator | None" = None
    ) -> Array:
        a, b = (e.sample(n_samples, generator=generator) for e in checked_rows(x, y, name))
        import torch

        return reduce(torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").unsqueeze(1)).squeeze(1)

    return Distance(name, row, matrix, of_samples=of_samples, n_samples=n_samples)


def check_embedding(value: object, who: str, name: str) -> None:
    """Refuse anything but an embedding."""
    if not isinstance(value, GaussianEmbedding):
        found = f"{name} must be a GaussianEmbedding, got {type(value).__name__}"
        raise TypeError(f"{who}: {found}; wrap means in GaussianEmbedding.point")


def checked(x: GaussianEmbedding, y: GaussianEmbedding, who: str, *, points: Points = "allowed") -> Sides:
    """The two sides in the dtype of accumulation, after the checks that every distance needs. x (n, d), y (m, d)."""
    check_embedding(x, who, "x")
    check_embedding(y, who, "y")
    if is_tensor(x.mean) != is_tensor(y.mean):
        x, y = x.tensors(), y.tensors()
    if x.d != y.d or x.dtype != y.dtype or x.device != y.device:
        sides = [f"(., {e.d}) {e.dtype} on {e.device}" for e in (x, y)]
        raise ValueError(f"{who}: x is {sides[0]} and y is {sides[1]}; both must have the same d, dtype and device")
    if points != "allowed":
        found = [bool((e.log_var == -math.inf).any()) for e in (x, y)]
        if all(found) if points == "on one side" else any(found):
            where = " on at least one side" if points == "on one side" else ""
            ways = "use csd, squared_l2 or wasserstein2 for deterministic embeddings"
            raise ValueError(f"{who}: needs positive variances{where}, got points (log_var = -inf); {ways}")
    dtype = accumulation_dtype(x.dtype)
    return (x, y) if dtype == x.dtype else (x.to(dtype), y.to(dtype))


def checked_rows(x: GaussianEmbedding, y: GaussianEmbedding, who: str, *, points: Points = "allowed") -> Sides:
    """:func:`checked` for the row form, which also needs equally many rows. x, y (n, d)."""
    x, y = checked(x, y, who, points=points)
    if x.n != y.n:
        way = "row by row they must be equal, for all pairs use the matrix form"
        raise ValueError(f"{who}: x has {x.n} rows and y has {y.n}; {way}")
    return x, y


def safe_sqrt(squared: Array) -> Array:
    """Square root whose gradient at 0 is 0 instead of infinite."""
    xp, zero = namespace(squared), squared <= 0
    return xp.where(zero, 0.0, xp.sqrt(xp.where(zero, 1.0, squared)))


def squared_l2_product(a: Array, b: Array) -> Array:
    """||a_i - b_j||^2 by one matrix product about the centre of b, which keeps precision far from the origin.

    a (n, d), b (m, d) -> (n, m).
    """
    a, b = centred(a, b)
    return squared_l2_of_centred(a, b, (a**2).sum(-1), (b**2).sum(-1))


def centred(a: Array, b: Array) -> tuple[Array, Array]:
    """Both sides about the centre of b, which has no gradient. a (n, d), b (m, d)."""
    centre = (b.detach() if is_tensor(b) else b).mean(0) if len(b) else 0
    return a - centre, b - centre


def squared_l2_of_centred(a: Array, b: Array, a_squares: Array, b_squares: Array) -> Array:
    """||a_i||^2 + ||b_j||^2 - 2 a_i . b_j, for vectors about their centre.

    a (n, d), b (m, d), a_squares, b_squares (n,) -> (n, m).
    """
    squares = added_product(a_squares[:, None] + b_squares, a, b, -2)
    return squares.clamp_min_(0) if is_tensor(a) else np.maximum(squares, 0, out=squares)


def added_product(constant: Array, a: Array, b: Array, factor: float = 1) -> Array:
    """constant + factor * a b^T, in the memory of constant. a (n, d), b (m, d), constant (n, m) -> (n, m)."""
    if is_tensor(a):
        import torch

        with torch.autocast(a.device.type, enabled=False):
            return constant.addmm_(a, b.T, alpha=factor)
    constant += (factor * a) @ b.T
    return constant


def seeded_samples(
    x: GaussianEmbedding, n_samples: int, *, seed: int, side: Literal["image", "text"], first: int = 0
) -> Array:
    """Samples of embeddings whose noise depends on the seed, the side and the position of the item, on nothing else.

    So every division of the items into blocks or among processes, on every device, gives an item the same samples.

    x (n, d) -> (n, s, d).
    """
    import torch

    x = x.tensors()
    parts = []
    for chunk in range(first // _NOISE_ROWS, -(-(first + x.n) // _NOISE_ROWS)) if x.n else range(0):
        state = np.random.SeedSequence([seed, 0 if side == "image" else 1, chunk]).generate_state(1)
        noise = torch.randn(_NOISE_ROWS, n_samples, x.d, generator=torch.Generator().manual_seed(int(state[0])))
        start = chunk * _NOISE_ROWS
        parts.append(noise[max(first - start, 0) : first + x.n - start])
    noise = torch.cat([torch.empty(0, n_samples, x.d), *parts])
    return reparametrised(x.to(accumulation_dtype(x.dtype)), noise)


def reduce_sample_distances(
    x_samples: Array, y_samples: Array, reduce: Callable[[Array], Array], *, memory_mb: float = DEFAULT_MEMORY_MB
) -> Array:
    """Euclidean distances of all sample pairs, reduced block by block so that (n, m, s, s) never exists at once.

    x_samples (n, s, d) -> (n, m).
    """
    dtype = accumulation_dtype(x_samples.dtype)

    def block(a: Array, b: Array) -> Array:
        return reduce(by_pair(safe_sqrt(squared_l2_product(a.flatten(0, 1), b.flatten(0, 1))), a, b))

    return blockwise(block, (x_samples.to(dtype),), (y_samples.to(dtype),), memory_mb=memory_mb)


def by_pair(values: Array, a: Array, b: Array) -> Array:
    """The values of all samples (n s, m t) by pairs of items. a (n, s, d), b (m, t, d) -> (n, m, s, t)."""
    return values.unflatten(0, a.shape[:2]).unflatten(2, b.shape[:2]).transpose(1, 2)


def blockwise(
    function: Callable[..., Array],
    x: Sequence[Array],
    y: Sequence[Array],
    *,
    floats_per_pair: int = 0,
    memory_mb: float = DEFAULT_MEMORY_MB,
) -> Array:
    """A function of all pairs in square blocks of x and y, recomputed in the backward pass.

    Its memory for a pair is given, or counted for samples (n, s, d) with (m, t, d), backward pass included: six values
    for each pair of samples, five copies of the samples of each block.

    function (rows, ...) -> (n, m).
    """
    n, m, xp = len(x[0]), len(y[0]), namespace(x[0])
    if n == 0 or m == 0:
        return xp.zeros((n, m), dtype=x[0].dtype, device=device(x[0]))
    if memory_mb <= 0:
        raise ValueError(f"memory_mb must be positive, got {memory_mb}")
    floats_per_row = 0
    if not floats_per_pair:
        s, t = x[0].shape[1], y[0].shape[1]
        floats_per_pair, floats_per_row = 6 * s * t, 5 * max(s, t) * x[0].shape[2]
    budget: float = memory_mb * 2**20 / xp.finfo(x[0].dtype).bits * 8
    # side^2 * floats_per_pair + 2 * side * floats_per_row = budget; a side cut short leaves more for the other.
    side = (math.sqrt(floats_per_row**2 + floats_per_pair * budget) - floats_per_row) / floats_per_pair

    def other(cut: float) -> float:
        return (budget - cut * floats_per_row) / (cut * floats_per_pair + floats_per_row)

    rows = max(1, min(n, int(other(m) if m < side else side)))
    columns = max(1, min(m, int(other(rows))))
    x_blocks, y_blocks = (
        [tuple(t[i : i + k] for t in part) for i in range(0, len(part[0]), k)] for part, k in ((x, rows), (y, columns))
    )
    if any(is_tensor(t) and t.requires_grad for t in (*x, *y)):
        import torch
        from torch.utils.checkpoint import checkpoint

        if torch.is_grad_enabled():
            recompute = functools.partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
            return torch.cat([torch.cat([recompute(*a, *b) for b in y_blocks], dim=1) for a in x_blocks])
    result = xp.empty((n, m), dtype=x[0].dtype, device=device(x[0]))
    for i, a in enumerate(x_blocks):
        for j, b in enumerate(y_blocks):
            result[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = function(*a, *b)
    return result
