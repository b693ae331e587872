"""Inclusion of one Gaussian in another, by dimension: how much the outer one covers the inner one.

The measure is the integral of p_inner^2 * p_outer. It is larger than that of p_outer^2 * p_inner where the inner
Gaussian is the narrower one.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding, accumulation_dtype


def log_inclusion(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""Logarithm of the integral of p_x(t)^2 p_y(t) over t, for each pair of rows and each dimension.

        v = var_x + 2 var_y:   -log(2 pi) - log_var_x / 2 - log(v) / 2 - (mean_x - mean_y)^2 / v

    Paper: Chun et al., "Probabilistic language-image pre-training" (ProLIP), ICLR 2025.

    x (n, d), y (n, d) -> (n, d).
    """
    x, y = _checked(x, y, "log_inclusion")
    log_v = torch.logaddexp(x.log_var, y.log_var + math.log(2))
    return -math.log(2 * math.pi) - (x.log_var + log_v) / 2 - _over(x, y, log_v)


def inclusion_test(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""log_inclusion(x, y) - log_inclusion(y, x): positive where x is included in y.

    Its sign is that of log_var_y - log_var_x for all means. The means only change its size, which grows with their
    distance.

    Args:
        x, y: (n, d) embeddings; see :func:`log_inclusion`.

    Returns:
        (n, d) tests; inclusion_test(y, x) is the negative.

    Raises:
        ValueError: shape, dtype or device differ.

    Example:
        >>> narrow, wide = (GaussianEmbedding(torch.zeros(1, 1), torch.full((1, 1), v)) for v in (-4.0, 0.0))
        >>> inclusion_test(narrow, wide)
        tensor([[1.6669]])

    Paper: see :func:`log_inclusion`.
    """
    return log_inclusion(x, y) - log_inclusion(y, x)


def inclusion_losses(inner: GaussianEmbedding, outer: GaussianEmbedding, *, scale: float = 1000.0) -> Tensor:
    r"""Inclusion of every inner embedding in its outer one: an image in its text, a whole in its masked view.

        -log sigmoid(scale * inclusion_test(inner, outer)), averaged over d

    It orders variances and has little effect on means: see :func:`inclusion_test`. The released code has a test of the
    same sign, which is larger by (log_var_y - log_var_x) / 2. What the means add is multiplied there by exp(-10) or
    exp(-20).

    Paper: see :func:`log_inclusion`.

    inner (n, d), outer (n, d) -> (n,).
    """
    return -functional.logsigmoid(scale * inclusion_test(inner, outer)).mean(1)


def _over(x: GaussianEmbedding, y: GaussianEmbedding, log_v: Tensor) -> Tensor:
    """(n, d) squared differences of the means over v, divided before squaring: small variances do not overflow."""
    return ((x.mean - y.mean) * (-log_v / 2).exp()).square()


def _checked(x: GaussianEmbedding, y: GaussianEmbedding, who: str) -> tuple[GaussianEmbedding, GaussianEmbedding]:
    """Both in the dtype of the sums."""
    if x.mean.shape != y.mean.shape or x.dtype != y.dtype or x.device != y.device:
        raise ValueError(
            f"{who}: x is {tuple(x.mean.shape)} {x.dtype} on {x.device} and y is {tuple(y.mean.shape)} {y.dtype} on"
            f" {y.device}; both must have the same n, d, dtype and device"
        )
    dtype = accumulation_dtype(x.dtype)
    return x.to(dtype), y.to(dtype)
