"""Sums over all pairs of images and texts in tiles, for distances that are squared L2 distances of vectors.

A tile is a range of images with a range of texts. No pass holds an (n, m) array that is larger than a tile: the
backward pass computes the distances of each tile again, unless there is only one. What is summed, a loss says by its
:class:`PairTerms`. For other distances the sums come from the whole matrix. There
are no second derivatives.

Matrices of labels are dense or sparse: a large batch has few matches, and no room for a number of every pair.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sfumato.distances.distance import Distance, centred, checked, squared_l2_of_centred
from sfumato.gaussian import Sides
from sfumato.matching import match_logit

CPU_PAIRS = 2**20
"""Largest number of pairs of a tile on a CPU: arrays of 4 MB stay in its caches, which saves more than recomputing."""


class MatchingLogits(nn.Module):
    """The learnable scale and bias of the match logits.

    The scale a is stored as its logarithm, so that it stays positive. A step of Adam then changes a by about a times
    the learning rate. In the released code, which learns a itself, it changes a by about the learning rate. Neither
    parameter has weight decay.

    Args:
        logit_scale: initial a > 0 (5 in Chun 2024, table B.1).
        logit_bias: initial b (5 there).
        free: learn a itself, as the released code does. An update across zero would reverse the order of all
            distances, so :meth:`constrain` refuses it.
        largest: largest a, which :meth:`constrain` enforces; infinite for no limit.

    Raises:
        ValueError: logit_scale is not a positive number, or above the largest.
    """

    def __init__(
        self, logit_scale: float = 5.0, logit_bias: float = 5.0, *, free: bool = False, largest: float = math.inf
    ) -> None:
        super().__init__()
        if not (logit_scale > 0 and math.isfinite(logit_scale)):
            raise ValueError(f"MatchingLogits: logit_scale must be positive, got {logit_scale}; closer is likelier")
        if logit_scale > largest:
            raise ValueError(f"MatchingLogits: logit_scale must be at most {largest:g}, the largest, got {logit_scale}")
        self.free, self.largest = free, largest
        if free:
            self.free_logit_scale = nn.Parameter(torch.tensor(float(logit_scale)))
        else:
            self.log_logit_scale = nn.Parameter(torch.tensor(math.log(logit_scale)))
        self.logit_bias = nn.Parameter(torch.tensor(float(logit_bias)))

    @property
    def logit_scale(self) -> Tensor:
        """() the scale a > 0, differentiable."""
        return self.free_logit_scale if self.free else self.log_logit_scale.exp()

    @torch.no_grad()
    def constrain(self) -> None:
        """Limit the scale after an update of the parameters.

        Raises:
            ArithmeticError: a free scale is no longer positive.
        """
        if self.free and not self.free_logit_scale > 0:
            found = f"is {float(self.free_logit_scale):g}, which reverses all distances"
            ways = "learn its logarithm (loss.free_scale=false), or lower optim.lr or optim.logits_lr_multiplier"
            raise ArithmeticError(f"the free scale of the match logits {found}; {ways}")
        if self.free:
            self.free_logit_scale.clamp_(max=self.largest)
        else:
            self.log_logit_scale.clamp_(max=math.log(self.largest))

    def forward(self, distance: Tensor) -> Tensor:
        """Logits of distances.

        Args:
            distance: any shape, smaller is closer.

        Returns:
            Logits of the shape of distance.
        """
        return match_logit(distance, self.logit_scale, self.logit_bias)


@dataclass(frozen=True)
class Tile:
    """Some images with some texts."""

    ranges: tuple[slice, slice]  # of its r images (axis 0) and of its c texts (axis 1)
    label: Tensor  # (r, c) labels in [0, 1]
    distance: Tensor  # (r, c) distances
    logit: Tensor  # (r, c) match logits


class Tiles:
    """The labels, distances and logits of n images and m texts, tile by tile."""

    def __init__(self, tensors: tuple[Tensor, ...], labels: Tensor, max_pairs: int, whole: Tensor | None) -> None:
        self._x, self._y, self._x_offset, self._y_offset, self._scale, self._bias = tensors
        self._labels, self.shape, self.whole = labels, labels.shape, whole
        if whole is None:
            self._squares = [torch.linalg.vector_norm(v, dim=-1).square() for v in tensors[:2]]  # No (n, k) copy.
        n, m = self.shape
        max_pairs = min(max_pairs, CPU_PAIRS) if labels.device.type == "cpu" else max_pairs
        self._height = max(1, min(n, max(int(max_pairs**0.5), max_pairs // max(m, 1))))
        self._width = max(1, min(m, max_pairs // self._height))

    def ranges(self) -> Iterator[tuple[slice, slice]]:
        """The ranges of all tiles."""
        n, m = self.shape
        for i in range(0, n, self._height):
            for j in range(0, m, self._width):
                yield slice(i, min(i + self._height, n)), slice(j, min(j + self._width, m))

    def zeros(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros on the device of the distances. Returns (size,)."""
        return self._x.new_zeros(size, dtype=dtype)

    def label(self, ranges: tuple[slice, slice]) -> Tensor:
        """The labels of a tile. Returns (r, c)."""
        return dense_labels(self._labels, *ranges).to(self._x.dtype)

    def distance(self, ranges: tuple[slice, slice]) -> Tensor:
        """The distances of a tile. Returns (r, c)."""
        if self.whole is not None:
            return self.whole
        (rows, columns), (x_squares, y_squares) = ranges, self._squares
        distance = squared_l2_of_centred(self._x[rows], self._y[columns], x_squares[rows], y_squares[columns])
        distance.add_(self._x_offset[rows].unsqueeze(1)).add_(self._y_offset[columns])
        if distance.shape == self.shape:
            self.whole = distance
        return distance

    def __iter__(self) -> Iterator[Tile]:
        for ranges in self.ranges():
            distance = self.distance(ranges)
            yield Tile(ranges, self.label(ranges), distance, match_logit(distance, self._scale, self._bias))


class PairTerms(ABC):
    """Sums over the pairs of a batch, as a function of their distances, logits and labels."""

    def __init__(self, labels: Tensor, axes: tuple[int, ...]) -> None:
        self.labels, self.axes = labels, axes

    @abstractmethod
    def of_matrix(self, distance: Tensor, logit: Tensor, label: Tensor) -> Tensor:
        """The sums, by operations that autograd knows. distance, logit, label (n, m) -> (k,)."""

    @abstractmethod
    def of_tiles(self, tiles: Tiles) -> Tensor:
        """The sums, without gradient. What :meth:`gradient` needs of the whole batch is kept. Returns (k,)."""

    @abstractmethod
    def gradient(self, tile: Tile, upstream: Tensor) -> Tensor:
        """The derivative of the weighted sums by the logits; :meth:`of_tiles` comes first. upstream (k,) -> (r, c)."""


def pair_sums(distance: Distance, logits: MatchingLogits, sides: Sides, terms: PairTerms, max_pairs: int) -> Tensor:
    """Sums over all pairs: in tiles if the distance has vectors, otherwise from the whole matrix.

    sides ((n, d) images, (m, d) texts) -> (k,).
    """
    if distance.lift is None:
        matrix = distance.matrix(*sides)
        return terms.of_matrix(matrix, logits(matrix), dense_labels(terms.labels).to(matrix.dtype))
    image, text = checked(*sides, distance.name)
    (x, x_offset), (y, y_offset) = distance.lift.vectors(image), distance.lift.vectors(text)
    tensors = (*_about_centre(x, y), x_offset, y_offset, logits.logit_scale, logits.logit_bias)
    return _PairSums.apply(terms, max_pairs, *tensors)[0]  # type: ignore[no-untyped-call]


def _about_centre(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`centred`, but without its copies where the centre has half of y's squared lengths or less.

    The product then loses one bit at most. To look is cheap on a CPU only.
    """
    if y.device.type == "cpu":
        fixed = y.detach()
        if 2 * fixed.mean(0).square().sum() * len(fixed) <= torch.linalg.vector_norm(fixed).square():
            return x, y
    return centred(x, y)


class _PairSums(torch.autograd.Function):
    """:func:`pair_sums` in tiles; tensors as in :class:`Tiles`."""

    @staticmethod
    def forward(terms: PairTerms, max_pairs: int, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        tiles = Tiles(tensors, terms.labels, max_pairs, None)
        return terms.of_tiles(tiles).to(tensors[0].dtype), tiles.whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        ctx.terms, ctx.max_pairs, *tensors = inputs
        if output[1] is not None:
            ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, whole = ctx.saved_tensors
        tiles = Tiles(tuple(tensors), ctx.terms.labels, ctx.max_pairs, whole)
        with torch.autocast(upstream.device.type, enabled=False):
            return None, None, *_gradients(ctx.terms, tiles, tensors, upstream, ctx.needs_input_grad[2:])


def _gradients(
    terms: PairTerms, tiles: Tiles, tensors: list[Tensor], upstream: Tensor, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    vectors, scale = tensors[:2], tensors[4]
    sums = [v.new_zeros(len(v)) for v in vectors]
    empty = torch.zeros_like if 0 in tiles.shape else torch.empty_like  # The first tiles overwrite.
    products = [empty(v) if need else None for v, need in zip(vectors, needed[:2], strict=True)]
    by_logits = torch.zeros(2, dtype=torch.float64, device=upstream.device)
    for tile in tiles:
        gradient = terms.gradient(tile, upstream)
        if needed[4] or needed[5]:
            by_logits += torch.stack([-(gradient * tile.distance).sum(), gradient.sum()])
        gradient.mul_(-scale)  # From here on by the distances.
        for axis, product in enumerate(products):
            own, other = tile.ranges[axis], tile.ranges[1 - axis]
            total = gradient.sum(1 - axis)
            sums[axis][own] += total
            if product is None:
                continue
            if other.start == 0:
                torch.mul(vectors[axis][own], 2 * total.unsqueeze(1), out=product[own])
            else:
                product[own].addcmul_(vectors[axis][own], total.unsqueeze(1), value=2)
            product[own].addmm_(gradient if axis == 0 else gradient.T, vectors[1 - axis][other], alpha=-2)
    return [*products, *sums, *(g.to(t.dtype).to(t.device) for g, t in zip(by_logits, tensors[4:], strict=True))]


def canonical(match: Tensor) -> Tensor:
    """A sparse matrix in the one layout that the functions here read; a dense one as it is. match (n, m)."""
    return match if match.layout == torch.strided else match.to_sparse_coo().coalesce()


def transposed(match: Tensor) -> Tensor:
    """The labels with rows and columns swapped. match (n, m) -> (m, n)."""
    return canonical(match.t())


def label_rows(match: Tensor, rows: slice) -> Tensor:
    """Some rows of a matrix of labels. match (n, m) -> (r, m)."""
    if not match.is_sparse:
        return match[rows]
    indices, values = _within(match, rows)
    size = rows.stop - rows.start, match.shape[1]
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=True, check_invariants=False)


def dense_labels(match: Tensor, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
    """A dense part of a matrix of labels. match (n, m) -> (r, c)."""
    if not match.is_sparse:
        return match[rows, columns]
    rows, columns = (slice(*r.indices(size)[:2]) for r, size in zip((rows, columns), match.shape, strict=True))
    (i, j), values = _within(match, rows)
    inside = (j >= columns.start) & (j < columns.stop)
    part = values.new_zeros(rows.stop - rows.start, columns.stop - columns.start)
    part[i[inside], j[inside] - columns.start] = values[inside]
    return part


def matched_rows(match: Tensor) -> Tensor:
    """Which rows have a match. match (n, m) -> (n,)."""
    if not match.is_sparse:
        return match.sum(1) > 0
    found = torch.zeros(match.shape[0], dtype=torch.bool, device=match.device)
    found[match.indices()[0][match.values() > 0]] = True
    return found


def _within(match: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Indices, counted from the first of the rows, and values; the indices of a coalesced matrix are sorted."""
    ends = torch.tensor([rows.start, rows.stop], device=match.device)
    first, last = torch.searchsorted(match.indices()[0].contiguous(), ends).tolist()
    indices = match.indices()[:, first:last].clone()
    indices[0] -= rows.start
    return indices, match.values()[first:last]
