r"""Distances that separate into matrix products: squared_l2, nearest_of_K, csd, wasserstein2, kl and the like.

Each formula is here once, in row form (n,) and between all pairs, ``_matrix`` (n, m). Sums run over d in float32 or
better, whatever the dtype of the input and any autocast.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sfumato.distances.distance import Lift, checked, checked_rows, safe_sqrt, squared_l2_product
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype


def squared_l2(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Squared Euclidean distance of the means, row by row; the variances have no effect. x, y (n, d) -> (n,)."""
    x, y = checked_rows(x, y, "squared_l2")
    return (x.mean - y.mean).square().sum(-1)


def squared_l2_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Squared Euclidean distance of the means between all pairs; 2 - 2 cos for unit means, and valid for any means.

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "squared_l2_matrix")
    return squared_l2_product(x.mean, y.mean)


def nearest(x: GaussianEmbedding, y: GaussianEmbedding, *, embeddings: int) -> Tensor:
    """Squared Euclidean distance of the nearest two of K embeddings, row by row: see :func:`nearest_matrix`.

    x, y (n, d) -> (n,).
    """
    x, y = checked_rows(x, y, "nearest")
    sides = (_split(x, embeddings, "nearest"), _split(y, embeddings, "nearest"))
    return _minimum([(a - b).square().sum(-1) for a in sides[0] for b in sides[1]])


def nearest_matrix(x: GaussianEmbedding, y: GaussianEmbedding, *, embeddings: int) -> Tensor:
    r"""Squared Euclidean distance of the nearest two of K embeddings, for all pairs of items.

        nearest(i, j) = min over k, l < K of ||mean_i[k] - mean_j[l]||^2

    An item's mean holds its K embeddings side by side. Variances have no effect. Recipes name it nearest_of_K. It is
    the distance of multiple-instance learning.

    Paper: Song and Soleymani, "Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval", CVPR 2019.

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "nearest_matrix")
    sides = (_split(x, embeddings, "nearest_matrix"), _split(y, embeddings, "nearest_matrix"))
    return _minimum([squared_l2_product(a, b) for a in sides[0] for b in sides[1]])


def csd(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Closed-form sampled distance row by row, ||mean_x - mean_y||^2 + sum(var_x) + sum(var_y): see :func:`csd_matrix`.

    x, y (n, d) -> (n,).
    """
    x, y = checked_rows(x, y, "csd")
    return (x.mean - y.mean).square().sum(-1) + x.total_variance + y.total_variance


def csd_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""Closed-form sampled distance between all pairs: the mean squared distance of one sample from each side.

        csd(i, j) = ||mean_i - mean_j||^2 + sum(var_i) + sum(var_j)

    Not a metric: csd(a, a) = 2 * a.total_variance.

    Paper: Chun, ICLR 2024, arXiv 2305.18171, Eq. 1.

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "csd_matrix")
    return squared_l2_product(x.mean, y.mean) + x.total_variance.unsqueeze(1) + y.total_variance


def wasserstein2(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Squared 2-Wasserstein distance row by row: see :func:`wasserstein2_matrix`. x, y (n, d) -> (n,)."""
    x, y = checked_rows(x, y, "wasserstein2")
    return (_mean_and_std(x) - _mean_and_std(y)).square().sum(-1)


def wasserstein2_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""Squared 2-Wasserstein distance between all pairs: Euclidean in [mean, std], 2 d dimensions.

        wasserstein2(i, j) = ||mean_i - mean_j||^2 + ||std_i - std_j||^2

    Paper: Chun 2024, section 2.2; Chun et al., CVPR 2021, appendix B.

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "wasserstein2_matrix")
    return squared_l2_product(_mean_and_std(x), _mean_and_std(y))


def wasserstein2_root(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """2-Wasserstein distance row by row, the root of :func:`wasserstein2`: see :func:`wasserstein2_root_matrix`.

    x, y (n, d) -> (n,).
    """
    x, y = checked_rows(x, y, "wasserstein2_root")
    return safe_sqrt((_mean_and_std(x) - _mean_and_std(y)).square().sum(-1))


def wasserstein2_root_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""2-Wasserstein distance between all pairs, sqrt(||mean_i - mean_j||^2 + ||std_i - std_j||^2).

    A metric, and the root of :func:`wasserstein2_matrix`: both rank alike, but a margin means something else.

    Paper: Pishdad et al., Eq. 7, for diagonal covariances.

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "wasserstein2_root_matrix")
    return safe_sqrt(squared_l2_product(_mean_and_std(x), _mean_and_std(y)))


def wasserstein2_printed(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """The "2-Wasserstein" as one paper prints it, row by row: see :func:`wasserstein2_printed_matrix`.

    x, y (n, d) -> (n,).
    """
    x, y = checked_rows(x, y, "wasserstein2_printed")
    return safe_sqrt((_mean_and_var(x) - _mean_and_var(y)).square().sum(-1))


def wasserstein2_printed_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""sqrt(||mean_i - mean_j||^2 + ||var_i - var_j||^2): variances where the true distance has standard deviations.

    Only for reproducing results that were obtained with it; use :func:`wasserstein2_matrix` otherwise.

    Paper: Pishdad et al., "Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations", Eq. 8.

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "wasserstein2_printed_matrix")
    return safe_sqrt(squared_l2_product(_mean_and_var(x), _mean_and_var(y)))


def kl(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Kullback-Leibler divergence KL(x || y) row by row: see :func:`kl_matrix`. x, y (n, d) -> (n,)."""
    x, y = checked_rows(x, y, "kl", points="refused")
    difference = x.log_var - y.log_var
    terms = difference.expm1() - difference + (x.mean - y.mean).square() * (-y.log_var).exp()
    return terms.sum(-1) / 2


def kl_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""Kullback-Leibler divergence between all pairs. Not symmetric.

        kl(i, j) = KL(x_i || y_j) = 1/2 sum [ var_i / var_j - ln(var_i / var_j) + (mean_i - mean_j)^2 / var_j - 1 ]

    Paper: Pishdad et al., Eq. 5.

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "kl_matrix", points="refused")
    return _kl_matrix(x, y)


def kl_reversed(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Kullback-Leibler divergence KL(y || x) row by row: see :func:`kl_reversed_matrix`. x, y (n, d) -> (n,)."""
    x, y = checked_rows(x, y, "kl_reversed", points="refused")
    return kl(y, x)


def kl_reversed_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Kullback-Leibler divergence KL(y_j || x_i) between all pairs: of texts from images, as images come first.

    Paper: Pishdad et al., table 6, where it retrieves worse than KL(image || text).

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "kl_reversed_matrix", points="refused")
    return _kl_matrix(y, x).T


def min_kl(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """The smaller of KL(x || y) and KL(y || x), row by row (Pishdad et al., Eq. 6). x, y (n, d) -> (n,)."""
    return torch.minimum(kl(x, y), kl(y, x))


def min_kl_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """The smaller of KL(x_i || y_j) and KL(y_j || x_i) for all pairs (Pishdad et al., Eq. 6).

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "min_kl_matrix", points="refused")
    return torch.minimum(_kl_matrix(x, y), _kl_matrix(y, x).T)


def js(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """The mean of KL(x || y) and KL(y || x), row by row: see :func:`js_matrix`. x, y (n, d) -> (n,)."""
    return (kl(x, y) + kl(y, x)) / 2


def js_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """What the literature of this field calls "JS": the mean of both Kullback-Leibler divergences, for all pairs.

    It is half the Jeffreys divergence, not the Jensen-Shannon divergence (which has no closed form for Gaussians).

    Paper: Chun et al., CVPR 2021, appendix B.

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "js_matrix", points="refused")
    return (_kl_matrix(x, y) + _kl_matrix(y, x).T) / 2


def _split(e: GaussianEmbedding, embeddings: int, who: str) -> tuple[Tensor, ...]:
    """K means of (n, d / K)."""
    if embeddings < 1 or e.d % embeddings:
        raise ValueError(
            f"{who}: d = {e.d} dimensions cannot be divided into {embeddings} embeddings of equal size per item"
        )
    return e.mean.chunk(embeddings, dim=1)


def _minimum(distances: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.minimum, distances)


def _mean_and_std(e: GaussianEmbedding) -> Tensor:
    return torch.cat([e.mean, (e.log_var / 2).exp()], dim=1)


def _mean_and_var(e: GaussianEmbedding) -> Tensor:
    return torch.cat([e.mean, e.var], dim=1)


def _kl_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    centre = y.mean.detach().mean(0) if y.n else 0
    a, b = x.mean - centre, y.mean - centre
    precision = (-y.log_var).exp()
    features = torch.cat([x.var + a.square(), a], dim=1)
    weights = torch.cat([precision, -2 * b * precision], dim=1)
    constant = (b.square() * precision + y.log_var).sum(-1) - x.log_var.sum(-1).unsqueeze(1) - x.d
    with torch.autocast(a.device.type, enabled=False):
        return (torch.addmm(constant, features, weights.T) / 2).clamp_min(0)


def _total_variance(x: GaussianEmbedding) -> Tensor:
    """(n,) in float32 or better."""
    return x.total_variance


def _total_deviation(x: GaussianEmbedding) -> Tensor:
    """(n, 1) root of the total variance."""
    return _total_variance(x).sqrt().unsqueeze(1)


def _deviations(x: GaussianEmbedding) -> Tensor:
    """(n, d) standard deviations in float32 or better."""
    return (x.log_var.to(accumulation_dtype(x.dtype)) / 2).exp()


def _zero_column(x: GaussianEmbedding) -> Tensor:
    return x.mean.new_zeros(x.n, 1, dtype=torch.float32)


def _no_columns(x: GaussianEmbedding) -> Tensor:
    return x.mean.new_zeros(x.n, 0, dtype=torch.float32)


def _zeros(x: GaussianEmbedding) -> Tensor:
    return x.mean.new_zeros(x.n, dtype=torch.float32)


def csd_vectors(x: GaussianEmbedding) -> tuple[Tensor, Tensor]:
    """csd as a squared L2 distance of means plus total variances; see ``Distance.vectors``. x (n, d) -> (n, d)."""
    return x.mean, x.total_variance


def squared_l2_vectors(x: GaussianEmbedding) -> tuple[Tensor, Tensor]:
    """squared_l2 as a squared L2 distance of means; see ``Distance.vectors``. x (n, d) -> (n, d)."""
    return x.mean, _zeros(x)


def wasserstein2_vectors(x: GaussianEmbedding) -> tuple[Tensor, Tensor]:
    """wasserstein2 as a squared L2 distance of means and deviations; see ``Distance.vectors``. x (n, d) -> (n, 2 d)."""
    return _mean_and_std(x), _zeros(x)


CSD_LIFT = Lift(gallery=_total_deviation, query=_zero_column, constant=_total_variance)
"""csd(q, g) = ||mean_q - mean_g||^2 + (0 - sqrt(sum(var_g)))^2 + sum(var_q)."""

SQUARED_L2_LIFT = Lift(gallery=_no_columns, query=_no_columns, constant=_zeros)
"""squared_l2 is a squared L2 distance of the means as they are."""

WASSERSTEIN2_LIFT = Lift(gallery=_deviations, query=_deviations, constant=_zeros)
"""wasserstein2(q, g) = ||mean_q - mean_g||^2 + ||std_q - std_g||^2."""
