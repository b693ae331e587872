r"""csd of densities that are not Gaussian, in closed form and by samples.

csd is the mean squared distance of two independent samples. Of any densities with second moments it is

    E ||X - Y||^2 = ||E X - E Y||^2 + E ||X - E X||^2 + E ||Y - E Y||^2

so Gaussians with the same mean and total variance have the same csd: distances, losses and indices that use csd need
nothing else.
"""

import math

from torch import Tensor

from sfumato import GaussianEmbedding, csd_matrix


def laplace(mean: Tensor, scale: Tensor) -> GaussianEmbedding:
    """Gaussians with the csd of n Laplace densities: mean (n, d), scale (n, d), variance 2 scale^2.

    >>> import torch
    >>> csd_matrix(laplace(torch.zeros(1, 2), torch.ones(1, 2)), GaussianEmbedding.point(torch.tensor([[3.0, 4.0]])))
    tensor([[29.]])
    """
    return GaussianEmbedding(mean, 2 * scale.log() + math.log(2))


def von_mises_fisher(direction: Tensor, concentration: Tensor) -> GaussianEmbedding:
    """Isotropic Gaussians with the csd of n densities p(z) ~ exp(k <direction, z>) on the unit sphere.

    Their means are A direction, their total variances 1 - A^2, with A of :func:`bessel_ratio`: direction (n, d) of
    length 1, concentration (n,).
    """
    d = direction.shape[1]
    ratio = bessel_ratio(concentration.double(), d).unsqueeze(1)
    log_var = (1 - ratio.square()).log() - math.log(d)
    return GaussianEmbedding(ratio * direction.double(), log_var.expand(-1, d))


def bessel_ratio(concentration: Tensor, d: int) -> Tensor:
    """A = I_{d/2}(k) / I_{d/2 - 1}(k), the length of the mean: (n,) float64, relative error below 1e-10 up to k = 1e8.

    By A_d = k / (d + k A_{d+2}) (DLMF 10.29.1), downwards from the approximation of Amos (1974): the Bessel functions
    themselves underflow where d is 1024 and k is 10.
    """
    top = d + 128
    half, root = (top - 1) / 2, (concentration.square() + top**2 / 4).sqrt()
    rest = 1 - (half + top**2 / 4 / root) / (half + root).square()
    ratio = concentration * rest / (half + (half**2 + concentration.square() * rest).sqrt())
    for dim in range(top - 2, d - 1, -2):
        ratio = concentration / (dim + concentration * ratio)
    return ratio


def sampled_csd_matrix(x: Tensor, y: Tensor) -> Tensor:
    """(n, m) mean squared distances over all pairs of samples, x (n, s, d) and y (m, s, d), without forming the pairs.

    The identity above holds for the samples too: it is the csd of their means and mean squared deviations.
    """
    moments = []
    for samples in (x, y):
        mean = samples.mean(1)
        total = (samples - mean.unsqueeze(1)).square().sum(2).mean(1, keepdim=True)
        moments.append(GaussianEmbedding(mean, (total / mean.shape[1]).log().expand_as(mean)))
    return csd_matrix(*moments)
