r"""Two distributions on the unit sphere of d dimensions, around a direction mu with a concentration kappa.

von Mises-Fisher:    log p(x) = kappa mu . x + ln c(kappa)
power spherical:     log p(x) = kappa log(1 + mu . x) + ln c(kappa)
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Distribution = Literal["vmf", "power_spherical"]
"""von Mises-Fisher, or power spherical."""

_TERMS = 512


def log_normaliser(kappa: Tensor, d: int, distribution: Distribution) -> Tensor:
    r"""ln c(kappa): that of the power spherical exactly, that of von Mises-Fisher up to a constant.

    For von Mises-Fisher it is the approximation of the released code, with r = (d - 1) / 2 and r' = (d + 1) / 2:

        r/2 log(r + sqrt(r^2 + k^2)) - sqrt(r^2 + k^2)/2 + r/2 log(r + sqrt(r'^2 + k^2)) - sqrt(r'^2 + k^2)/2

    It exceeds the exact value by a constant within 0.1, for kappa up to 3000 and d from 10 to 768.

    Paper: Ju et al., "Exploiting the asymmetric uncertainty structure of pre-trained VLMs on the unit hypersphere",
    2025 (AsymVLM).
    """
    check_distribution(distribution)
    r = (d - 1) / 2
    if distribution == "vmf":
        near, far = ((x * x + kappa.square()).sqrt() for x in (r, r + 1))
        return r / 2 * ((r + near).log() + (r + far).log()) - (near + far) / 2
    a = r + kappa
    log_beta = torch.lgamma(a) - torch.lgamma(a + r)
    return -((a + r) * math.log(2) + log_beta + r * math.log(math.pi))


def mean_length(kappa: Tensor, d: int, distribution: Distribution) -> Tensor:
    r"""The length R of the mean of the distribution; E ||X - mean||^2 = 1 - R^2.

    I_{d/2}(kappa) / I_{d/2-1}(kappa) for von Mises-Fisher, by its continued fraction; kappa / (d - 1 + kappa) for the
    power spherical.
    """
    check_distribution(distribution)
    if distribution == "power_spherical":
        return kappa / (d - 1 + kappa)
    kappa = kappa.double()
    # I_v / I_{v-1} = 1 / (2 v / kappa + I_{v+1} / I_v), backwards from a large order. There the Riccati equation
    # R' = 1 - R^2 - 2 h R / kappa, h = v - 1/2, is solved with the R' of its solution for R' = 0.
    h = d / 2 + _TERMS - 0.5
    root = (h**2 + kappa.square()).sqrt()
    steady = 1 - h / (root * (root + h))
    ratio = kappa * steady / (h + (h**2 + kappa.square() * steady).sqrt())
    for k in range(_TERMS - 1, -1, -1):
        ratio = kappa / (2 * (d / 2 + k) + kappa * ratio)
    return ratio


def log_likelihoods(points: Tensor, direction: Tensor, kappa: Tensor, distribution: Distribution) -> Tensor:
    """Log likelihoods of all points under all distributions. points (n, d), direction (m, d), kappa (m,) -> (n, m)."""
    cosine = points @ direction.T
    normaliser = log_normaliser(kappa, points.shape[1], distribution)
    if distribution == "vmf":
        return cosine * kappa + normaliser
    # The antipode has no likelihood; a bound keeps its logarithm finite.
    return torch.log1p(cosine.clamp_min(-1 + torch.finfo(cosine.dtype).eps)) * kappa + normaliser


def check_distribution(distribution: str) -> None:
    """Refuse an unknown distribution."""
    if distribution not in get_args(Distribution):
        raise ValueError(f"unknown distribution {distribution!r}; known: {', '.join(get_args(Distribution))}")
