"""The protocol of a distance: its row and matrix forms, its lift, its direction, and the checks of its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sfumato.direction import Direction
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype

Points = Literal["allowed", "on one side", "refused"]
"""Whether a side may hold points, whose variance is 0."""


def checked(
    x: GaussianEmbedding, y: GaussianEmbedding, who: str, *, points: Points = "allowed"
) -> tuple[GaussianEmbedding, GaussianEmbedding]:
    """The two sides in the dtype of accumulation, after the checks that every distance needs. x (n, d), y (m, d)."""
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, GaussianEmbedding):
            raise TypeError(
                f"{who}: {name} must be a GaussianEmbedding, got {type(value).__name__};"
                " wrap means in GaussianEmbedding.point"
            )
    if x.d != y.d or x.dtype != y.dtype or x.device != y.device:
        sides = [f"(., {e.d}) {e.dtype} on {e.device}" for e in (x, y)]
        raise ValueError(f"{who}: x is {sides[0]} and y is {sides[1]}; both must have the same d, dtype and device")
    if points != "allowed":
        found = [bool(torch.isneginf(e.log_var).any()) for e in (x, y)]
        if all(found) if points == "on one side" else any(found):
            where = " on at least one side" if points == "on one side" else ""
            raise ValueError(
                f"{who}: needs positive variances{where}, got points (log_var = -inf);"
                " use csd, squared_l2 or wasserstein2 for deterministic embeddings"
            )
    dtype = accumulation_dtype(x.dtype)
    return (x, y) if dtype == x.dtype else (x.to(dtype), y.to(dtype))


def checked_rows(
    x: GaussianEmbedding, y: GaussianEmbedding, who: str, *, points: Points = "allowed"
) -> tuple[GaussianEmbedding, GaussianEmbedding]:
    """:func:`checked` for the row form, which also needs equally many rows. x, y (n, d)."""
    x, y = checked(x, y, who, points=points)
    if x.n != y.n:
        raise ValueError(
            f"{who}: x has {x.n} rows and y has {y.n}; row by row they must be equal, for all pairs use {who}_matrix"
        )
    return x, y


def safe_sqrt(squared: Tensor) -> Tensor:
    """Square root whose gradient at 0 is 0 instead of infinite."""
    zero = squared <= 0
    return squared.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def squared_l2_product(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||^2 by one matrix product about the centre of b, which keeps precision far from the origin.

    a (n, d), b (m, d) -> (n, m).
    """
    a, b = centred(a, b)
    return squared_l2_of_centred(a, b, a.square().sum(-1), b.square().sum(-1))


def centred(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides about the centre of b, which has no gradient. a (n, d), b (m, d)."""
    centre = b.detach().mean(0) if len(b) else 0
    return a - centre, b - centre


def squared_l2_of_centred(a: Tensor, b: Tensor, a_squares: Tensor, b_squares: Tensor) -> Tensor:
    """||a_i||^2 + ||b_j||^2 - 2 a_i . b_j, for vectors about their centre.

    a (n, d), b (m, d), a_squares, b_squares (n,) -> (n, m).
    """
    with torch.autocast(a.device.type, enabled=False):
        squares = a_squares.unsqueeze(1) + b_squares
        return squares.addmm_(a, b.T, alpha=-2).clamp_min_(0)


@dataclass(frozen=True)
class Lift:
    """The conversion of a distance to a squared L2 distance between longer vectors, plus a constant of the query.

        distance(q, g) = ||[mean_q, query(q)] - [mean_g, gallery(g)]||^2 + constant(q)

    The constant does not change the order of a query's results, so that any vector engine can search by the distance.
    """

    gallery: Callable[[GaussianEmbedding], Tensor]
    query: Callable[[GaussianEmbedding], Tensor]  # (n, d) embeddings -> (n, c) columns behind the means of queries
    constant: Callable[[GaussianEmbedding], Tensor]  # (n, d) embeddings -> (n,) float32 or better


@dataclass(frozen=True)
class Distance:
    """The protocol of a distance: its row form, its matrix form, and what it needs and allows.

    Losses, search and evaluation use only these attributes of a distance, never its name.
    """

    name: str  # key in DISTANCES and in recipes
    row: Callable[..., Tensor]  # (n, d), (n, d) -> (n,) distances of corresponding rows
    matrix: Callable[..., Tensor]  # (n, d), (m, d) -> (n, m) distances between all pairs
    symmetric: bool = True  # distance(x, y) = distance(y, x); if not, images come first
    needs_variance: bool = False  # points (variance 0) are refused
    of_samples: Callable[[Tensor, Tensor], Tensor] | None = None
    n_samples: int = 8  # number s of samples of each embedding when a sampled distance ranks
    seed: int = 0  # of these samples
    embeddings: int = 1
    lift: Lift | None = None
    vectors: Callable[[GaussianEmbedding], tuple[Tensor, Tensor]] | None = None
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
        return replace(
            self,
            direction=direction,
            row=lambda queries, items: row(items, queries),
            matrix=lambda queries, gallery: matrix(gallery, queries).T,
        )
