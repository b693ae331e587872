"""A plane for Gaussians: that of the first two principal components of their means, and the Gaussians projected onto it.

It knows arithmetic on embeddings, and nothing of where they come from or how they are drawn.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding

_ROUNDING = 1e-20
"""Scatter of the means relative to their squared norms: float64 rounding of equal means is below, any float32 difference above."""


@dataclass(frozen=True, eq=False)
class Projection:
    """A plane in the space of the embeddings.

    Attributes:
        centre: (d,) float64, the mean of the means; it lies at (0, 0).
        axes: (d, 2) float64 orthonormal columns; the largest entry of each is positive. With d = 1 the second one is 0.
        explained: shares of the variance of the means along the two axes; 0 and 0 if the means are all equal.
    """

    centre: Tensor
    axes: Tensor
    explained: tuple[float, float]

    @cached_property
    def version(self) -> str:
        """Of the plane: places on planes of equal version can be compared, others cannot."""
        numbers = torch.cat([self.centre.unsqueeze(1), self.axes], 1).numpy().tobytes()
        return hashlib.blake2b(numbers, digest_size=8).hexdigest()

    def ellipses(self, embeddings: GaussianEmbedding) -> list[tuple[float, float, float, float, float]]:
        r"""The shadows of diagonal Gaussians on the plane.

            covariance = axes^T diag(var) axes,  a 2 x 2 matrix with eigenvalues a^2 >= b^2

        Args:
            embeddings: (n, d); same d as the plane.

        Returns:
            n times (x, y, a, b, angle): the centre, the half axes a >= b >= 0 of one standard deviation, and the angle of the first
            one in radians, above -pi/2 and at most pi/2. A point (variance 0) has a = b = 0 and angle 0.

        Raises:
            ValueError: another d.
        """
        if embeddings.d != self.centre.shape[0]:
            raise ValueError(
                f"ellipses: embeddings have {embeddings.d} dimensions, the map has {self.centre.shape[0]}; fit it to the same model"
            )
        var = embeddings.log_var.detach().to("cpu", torch.float64).exp()
        position = (embeddings.mean.detach().to("cpu", torch.float64) - self.centre) @ self.axes  # (n, 2)
        u, v = self.axes.unbind(1)
        xx, yy, xy = var @ u.square(), var @ v.square(), var @ (u * v)  # (n,) each: the covariance
        middle, spread = (xx + yy) / 2, torch.hypot((xx - yy) / 2, xy)  # eigenvalues are middle +- spread
        a, b = (middle + spread).sqrt(), (middle - spread).clamp(min=0).sqrt()
        angle = torch.atan2(2 * xy, xx - yy) / 2
        rows: list[list[float]] = torch.stack([*position.unbind(1), a, b, angle], 1).tolist()
        return [(row[0], row[1], row[2], row[3], row[4]) for row in rows]


def fit_map(embeddings: GaussianEmbedding) -> Projection:
    """The plane of the first two principal components of the means.

    Args:
        embeddings: at least one. Two equal calls give equal planes: the sign of an axis is that which makes its largest entry positive.

    Raises:
        ValueError: there are no embeddings.
    """
    mean = embeddings.mean.detach().to("cpu", torch.float64)
    n, d = mean.shape
    if n == 0:
        raise ValueError("fit_map: got no embeddings, expected at least one")
    centre = mean.mean(0)
    offset = mean - centre
    shares, vectors = torch.linalg.eigh(offset.T @ offset)  # ascending
    axes = torch.zeros(d, 2, dtype=torch.float64)
    axes[:, : min(d, 2)] = vectors[:, -2:].flip(1)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    axes = torch.where(largest < 0, -axes, axes)
    total = float(offset.square().sum())
    if total <= _ROUNDING * float(mean.square().sum()):
        return Projection(centre, axes, (0.0, 0.0))
    first, second = [*shares.clamp(min=0).flip(0)[:2].tolist(), 0.0][:2]
    return Projection(centre, axes, (first / total, second / total))
