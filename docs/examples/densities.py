r"""Laplace and von Mises-Fisher densities: how to sample from them, and csd by sampling.

csd is the mean squared distance of two independent draws. Of any densities with second moments it is

    E ||X - Y||^2 = ||E X - E Y||^2 + E ||X - E X||^2 + E ||Y - E Y||^2

so that Gaussians with the same mean and total variance, which ``gaussian()`` of a density gives, have the same csd:
distances, losses and indices that go by csd need nothing else. Draws are for what has no closed form. Sources stand in
docs/concepts/distances.md.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sfumato.distances import squared_l2, squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype

_UNIT = 1e-2
"""How far from 1 the length of a direction may be, in half precision too."""

_STEPS = 64
"""Of the continued fraction: errors below 1e-10 for every d and concentration."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_WIDTHS = 12.0
"""Length of the integrals in standard deviations: what lies farther is below exp(-12^2 / 2)."""


class Density(Protocol):
    """n densities in d dimensions that can be drawn from; :class:`~sfumato.gaussian.GaussianEmbedding` is one."""

    @property
    def n(self) -> int:
        """Number of densities."""
        ...

    @property
    def d(self) -> int:
        """Number of dimensions."""
        ...

    def sample(self, n_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        """(n, s, d) independent draws, reparametrised."""
        ...


@dataclass(frozen=True, eq=False)
class Laplace:
    r"""n Laplace densities in d independent dimensions, each with a variance of its own.

        p(z) = prod exp(-|z - mean| / b) / (2 b),    b = sqrt(exp(log_var) / 2)

    Args:
        mean: (n, d) floating point.
        log_var: (n, d) natural logarithm of the variance 2 b^2, not of the scale b; same shape, dtype and device. -inf
            is a point.

    Raises:
        TypeError, ValueError: as :class:`~sfumato.gaussian.GaussianEmbedding`.
    """

    mean: Tensor
    log_var: Tensor

    def __post_init__(self) -> None:
        self.gaussian()

    @property
    def n(self) -> int:
        """Number of densities."""
        return self.mean.shape[0]

    @property
    def d(self) -> int:
        """Number of dimensions."""
        return self.mean.shape[1]

    def gaussian(self) -> GaussianEmbedding:
        """The Gaussians with the same means and variances, and therefore the same csd."""
        return GaussianEmbedding(self.mean, self.log_var)

    def sample(self, n_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        """(n, s, d) reparametrised draws; gradients flow to mean and log_var.

        Args:
            n_samples: s >= 1 draws of each density.
            generator: source of the noise, on the same device; the global one if None.
        """
        _check_samples(n_samples)
        # Each exponential is an inverse distribution function, -ln u; their difference is the standard Laplace.
        shape = (2, self.n, n_samples, self.d)
        halves = torch.empty(shape, dtype=self.mean.dtype, device=self.mean.device).exponential_(generator=generator)
        scale = ((self.log_var - math.log(2)) / 2).exp()
        return torch.addcmul(self.mean.unsqueeze(1), scale.unsqueeze(1), halves[0] - halves[1])


@dataclass(frozen=True, eq=False)
class VonMisesFisher:
    r"""n von Mises-Fisher densities on the unit sphere of R^d.

        p(z) ~ exp(kappa <direction, z>),  ||z|| = 1,    kappa = exp(log_concentration)

    Args:
        direction: (n, d) floating point unit vectors, d >= 2.
        log_concentration: (n,) natural logarithm of the concentration, up to ln 1e8; same dtype and device. -inf is
            uniform.

    Raises:
        TypeError: an argument is not a floating point tensor.
        ValueError: shapes, dtypes or devices do not fit, or a direction is no unit vector.
    """

    direction: Tensor
    log_concentration: Tensor

    def __post_init__(self) -> None:
        a, b = self.direction, self.log_concentration
        for name, value in (("direction", a), ("log_concentration", b)):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                came = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"VonMisesFisher: {name} must be a floating point tensor, got {came}")
        if a.ndim != 2 or a.shape[1] < 2 or b.shape != a.shape[:1]:
            raise ValueError(
                "VonMisesFisher: direction must have shape (n, d) with d >= 2 and log_concentration (n,), got"
                f" {tuple(a.shape)}"
                f" and {tuple(b.shape)}"
            )
        if a.dtype != b.dtype or a.device != b.device:
            raise ValueError(
                f"VonMisesFisher: direction is {a.dtype} on {a.device}, log_concentration {b.dtype} on"
                f" {b.device}; move one with .to()"
            )
        length = a.detach().to(accumulation_dtype(a.dtype)).norm(dim=1)
        if not ((length - 1).abs() < _UNIT).all():
            raise ValueError(
                "VonMisesFisher: direction must be unit vectors, got lengths from"
                f" {length.min():.4g} to {length.max():.4g};"
                " use torch.nn.functional.normalize"
            )

    @property
    def n(self) -> int:
        """Number of densities."""
        return self.direction.shape[0]

    @property
    def d(self) -> int:
        """Number of dimensions."""
        return self.direction.shape[1]

    @property
    def resultant_length(self) -> Tensor:
        """(n,) length of the mean, A_d(kappa) = I_{d/2}(kappa) / I_{d/2 - 1}(kappa) in [0, 1)."""
        ratio = bessel_ratio(self.log_concentration.double().exp(), self.d)
        return ratio.to(accumulation_dtype(self.direction.dtype))

    def gaussian(self) -> GaussianEmbedding:
        """The isotropic Gaussians with means A direction and total variances 1 - A^2, which have the same csd.

        Their covariance is not that of the densities, which is larger across the direction than along it.
        """
        ratio = bessel_ratio(self.log_concentration.double().exp(), self.d).unsqueeze(1)
        log_var = (1 - ratio.square()).log() - math.log(self.d)
        mean = ratio * self._unit
        dtype = self.direction.dtype
        return GaussianEmbedding(mean.to(dtype), log_var.expand_as(mean).to(dtype))

    def sample(self, n_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        r"""(n, s, d) draws, exact by rejection; gradients flow to direction and log_concentration.

        A direction u that is uniform on the sphere, t = <u, direction>, is pushed to w = (x + t) / (1 + x t) along the
        direction and accepted with probability exp((d - 1) (q / (1 + q) - ln(1 + q))), q = x t; x = 2 kappa / (d - 1 +
        sqrt((d - 1)^2 + 4 kappa^2)). About two of three are, in every d. The gradient of w is that of its quantile at a
        fixed level, that of the direction is of a rotation: both without bias.

        Args:
            n_samples: s >= 1 draws of each density.
            generator: source of the noise, on the same device; the global one if None.

        Paper: Wood, "Simulation of the von Mises Fisher distribution", 1994; the gradient: Figurnov et al., "Implicit
        reparameterization gradients", NeurIPS 2018.
        """
        _check_samples(n_samples)
        direction = self._unit.repeat_interleave(n_samples, dim=0)
        kappa = self.log_concentration.double().exp().repeat_interleave(n_samples)
        with torch.no_grad():
            angle, across = _wood(direction, kappa, generator)
        if kappa.requires_grad:
            angle = angle + _quantile_slope(angle, kappa.detach(), self.d) * (kappa - kappa.detach())
        # Nothing but a gradient, that of a small rotation: `across` stays at right angles to the direction.
        across = across - (across * direction).sum(1, keepdim=True) * direction
        along, aside = (part.unsqueeze(1).to(direction.dtype) for part in (angle.cos(), angle.sin()))
        draws = (along * direction + aside * across).to(self.direction.dtype)
        return draws.view(self.n, n_samples, self.d)

    @property
    def _unit(self) -> Tensor:
        unit: Tensor = functional.normalize(self.direction.to(accumulation_dtype(self.direction.dtype)), dim=1)
        return unit


def sampled_csd(x: Density, y: Density, *, n_samples: int = 8, generator: torch.Generator | None = None) -> Tensor:
    """csd by drawing, row by row: see :func:`sampled_csd_matrix`, which draws the same samples.

    Args:
        x, y: n densities each; same d, dtype and device.
        n_samples: s draws of each density; all s^2 pairs are averaged.
        generator: source of the draws.

    Returns:
        (n,) distances >= 0.

    Raises:
        ValueError: shape, dtype or device differ.
    """
    _check_sides(x, y, "sampled_csd", rows=True)
    a, spread_a = _drawn_moments(x, n_samples, generator)
    b, spread_b = _drawn_moments(y, n_samples, generator)
    return squared_l2(a, b) + spread_a + spread_b


def sampled_csd_matrix(
    x: Density, y: Density, *, n_samples: int = 8, generator: torch.Generator | None = None
) -> Tensor:
    r"""csd by drawing, between all pairs: 1/s^2 sum_jk ||x_i^j - y_l^k||^2, without bias whatever the densities are.

    The sum over pairs of draws is never formed: it is the csd of the draws themselves, the squared distance of their
    means plus the mean squared distances of both sides' draws to them. That is exact, and one matrix product whatever s
    is; draws are made one at a time.

    Args:
        x: n densities.
        y: m densities; same d, dtype and device. They may be of another kind.
        n_samples: s draws of each density; all s^2 pairs are averaged.
        generator: source of the draws; the same seed gives the same distances.

    Returns:
        (n, m) distances >= 0, smaller is closer, differentiable where the draws are. Of Gaussian, Laplace and von
        Mises-Fisher densities csd_matrix(x.gaussian(), y.gaussian()) is what they tend to.

    Raises:
        ValueError: d, dtype or device differ.

    Example:
        >>> x = Laplace(torch.zeros(1, 2), torch.full((1, 2), -torch.inf))
        >>> y = Laplace(torch.tensor([[3.0, 4.0]]), torch.full((1, 2), -torch.inf))
        >>> sampled_csd_matrix(x, y)
        tensor([[25.]])

    Paper: Chun 2024, arXiv 2305.18171, appendix D.
    """
    _check_sides(x, y, "sampled_csd_matrix")
    a, spread_a = _drawn_moments(x, n_samples, generator)
    b, spread_b = _drawn_moments(y, n_samples, generator)
    return squared_l2_matrix(a, b) + spread_a.unsqueeze(1) + spread_b


def bessel_ratio(kappa: Tensor, d: int) -> Tensor:
    r"""A_d(kappa) = I_{d/2}(kappa) / I_{d/2 - 1}(kappa), the mean resultant length of a von Mises-Fisher density.

    By A_d = kappa / (d + kappa A_{d+2}), from an approximation for d + 128 downwards. No Bessel function is formed,
    whose logarithm is beyond -2000 where d is 1024 and kappa 10.

    Args:
        kappa: (n,) float64 concentrations from 0 to 1e8.
        d: dimensions >= 2.

    Returns:
        (n,) in [0, 1), relative error below 1e-10, that of 1 - A^2 below 1e-6; differentiable.

    Source: the recurrence is DLMF 10.29.1; as a start Amos, "Computation of modified Bessel functions and their
    ratios", 1974, whose bounds have the same form, improved by one step of A' = 1 - A^2 - (d - 1) A / kappa.
    """
    top = d + 2 * _STEPS
    half = (top - 1) / 2
    root = (kappa.square() + top**2 / 4).sqrt()
    rest = 1 - (half + top**2 / 4 / root) / (half + root).square()
    ratio = kappa * rest / (half + (half**2 + kappa.square() * rest).sqrt())
    for k in reversed(range(_STEPS)):
        ratio = kappa / (d + 2 * k + kappa * ratio)
    return ratio


def _check_samples(n_samples: int) -> None:
    if n_samples < 1:
        raise ValueError(f"sample: n_samples must be at least 1, got {n_samples}")


def _check_sides(x: Density, y: Density, who: str, *, rows: bool = False) -> None:
    if x.d != y.d or (rows and x.n != y.n):
        needed = "n and d" if rows else "d"
        raise ValueError(f"{who}: x is ({x.n}, {x.d}) and y is ({y.n}, {y.d}); both must have the same {needed}")


def _drawn_moments(x: Density, n_samples: int, generator: torch.Generator | None) -> tuple[GaussianEmbedding, Tensor]:
    """(n, d) means of the samples as points, and (n,) mean squared distances to them, by Welford's method."""
    _check_samples(n_samples)
    mean = _draw(x, generator)
    spread = mean.new_zeros(x.n)
    for k in range(2, n_samples + 1):
        draw = _draw(x, generator)
        gap = draw - mean
        mean = mean + gap / k
        spread = spread + (gap * (draw - mean)).sum(-1)
    return GaussianEmbedding.point(mean), spread / n_samples


def _draw(x: Density, generator: torch.Generator | None) -> Tensor:
    draw = x.sample(1, generator=generator).squeeze(1)
    return draw.to(accumulation_dtype(draw.dtype))


def _wood(direction: Tensor, kappa: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """(n,) float64 angles of draws from their directions, and (n, d) unit vectors at right angles to these."""
    d = direction.shape[1]
    root = ((d - 1) ** 2 + 4 * kappa.square()).sqrt()
    x, rest = 2 * kappa / (d - 1 + root), 2 * (d - 1) / (d - 1 + root)  # rest = 1 - x^2
    angle, across = torch.empty_like(kappa), torch.empty_like(direction)
    waiting = torch.arange(len(kappa), device=direction.device)
    while len(waiting):
        mu = direction[waiting]
        u = torch.randn(mu.shape, generator=generator, dtype=mu.dtype, device=mu.device)
        level = torch.rand(len(waiting), generator=generator, dtype=torch.float64, device=mu.device)
        part = (u * mu).sum(1, keepdim=True)
        aside = u - part * mu
        aside = aside - (aside * mu).sum(1, keepdim=True) * mu  # Again: what rounding has left.
        length = aside.norm(dim=1, keepdim=True)
        uniform = torch.atan2(length.double(), part.double()).squeeze(1)
        q = x[waiting] * uniform.cos()
        accepted = ((d - 1) * (q / (1 + q) - q.log1p()) >= level.log()) & (length.squeeze(1) > 0)
        chosen = waiting[accepted]
        angle[chosen], across[chosen] = uniform[accepted], (aside / length)[accepted]
        waiting = waiting[~accepted]
    # (x + t) / (1 + x t) of the cosine t shrinks the tangent of half the angle.
    return 2 * torch.atan(rest.sqrt() / (1 + x) * (angle / 2).tan()), across


def _quantile_slope(angle: Tensor, kappa: Tensor, d: int) -> Tensor:
    r"""(n,) derivative by kappa of the angle theta at a fixed quantile; p ~ exp(kappa cos) sin^(d - 2).

        dtheta/dkappa = -1/p(theta) int_0^theta (cos - A) p    or equally    -1/p(theta) int_theta^pi (A - cos) p

    Of these the one away from the bulk, by Gauss-Legendre, with p(.)/p(theta) from its logarithm.
    """
    mean = bessel_ratio(kappa, d)
    inside = angle.cos() > mean
    length = torch.where(inside, angle, math.pi - angle).minimum(_WIDTHS / (d - 2 + kappa).sqrt())
    nodes, weights = (kappa.new_tensor(values) for values in (_NODES, _WEIGHTS))
    step = (torch.where(inside, -length, length) / 2).unsqueeze(1) * (nodes + 1)
    angle, kappa = angle.unsqueeze(1), kappa.unsqueeze(1)
    fall = -2 * (angle + step / 2).sin() * (step / 2).sin()  # cos(angle + step) - cos(angle), with all its digits.
    log_p = kappa * fall + (d - 2) * ((angle + step).sin().log() - angle.sin().log())
    integrand = (angle.cos() + fall - mean.unsqueeze(1)).abs() * log_p.exp()
    return -(integrand * weights).sum(1) * length / 2
