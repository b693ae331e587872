"""The checks of the two sides of a distance, and the product and the root that several distances use."""

from typing import Literal

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding, accumulation_dtype

Points = Literal["allowed", "on one side", "refused"]
"""Whether a side may hold points, whose variance is 0."""


def checked(
    x: GaussianEmbedding, y: GaussianEmbedding, who: str, *, points: Points = "allowed"
) -> tuple[GaussianEmbedding, GaussianEmbedding]:
    """The two sides in the dtype of accumulation, after the checks that every distance needs.

    Args:
        x: (n, d) embeddings.
        y: (m, d) embeddings; same d, dtype and device.
        who: name of the distance, for error messages.
        points: whether both sides, one side or neither may hold points.

    Returns:
        Both sides, in float32 if they were in half precision.

    Raises:
        TypeError: a side is no GaussianEmbedding.
        ValueError: d, dtype or device differ, or there are points that are refused.
    """
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
    """:func:`checked` for the row form, which also needs equally many rows.

    Args:
        x, y: (n, d) embeddings; same n, d, dtype and device.
        who, points: see :func:`checked`.

    Returns:
        Both sides, in float32 if they were in half precision.

    Raises:
        TypeError: a side is no GaussianEmbedding.
        ValueError: as for :func:`checked`, or n differs.
    """
    x, y = checked(x, y, who, points=points)
    if x.n != y.n:
        raise ValueError(
            f"{who}: x has {x.n} rows and y has {y.n}; row by row they must be equal, for all pairs use {who}_matrix"
        )
    return x, y


def safe_sqrt(squared: Tensor) -> Tensor:
    """Square root whose gradient at 0 is 0 instead of infinite.

    Args:
        squared: any shape; negative values count as 0.

    Returns:
        Roots of the same shape.
    """
    zero = squared <= 0
    return squared.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def squared_l2_product(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||^2 by one matrix product about the centre of b, which keeps precision far from the origin.

    Args:
        a: (n, d) vectors.
        b: (m, d) vectors.

    Returns:
        (n, m) squared distances >= 0.
    """
    centre = b.detach().mean(0) if len(b) else 0
    a, b = a - centre, b - centre
    with torch.autocast(a.device.type, enabled=False):
        squares = a.square().sum(-1).unsqueeze(1) + b.square().sum(-1)
        return torch.addmm(squares, a, b.T, alpha=-2).clamp_min(0)
