r"""Every distance between diagonal Gaussians, each once: in row form (n,) and between all pairs, ``_matrix`` (n, m).

Smaller is closer, everywhere. Sums run over d in float32 or better, whatever the input's dtype and any autocast; half
precision in, float32 out. The separable distances (squared_l2, csd, wasserstein2, kl, min_kl, js) are matrix products;
elk and bhattacharyya, which do not separate, and the sampled ones are computed in blocks under a stated memory budget, in the
backward pass too. Formulas and sources stand in docs/concepts/distances.md. This module knows nothing of labels, logits or probabilities.
"""

import difflib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sfumato.direction import Direction
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype

DEFAULT_MEMORY_MB = 64.0
"""Working memory of the sampled distances, beside inputs and result."""

STREAM_MEMORY_MB = 16.0
"""Working memory of elk and bhattacharyya: few blocks, yet each fits in a cache."""


def squared_l2(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Squared Euclidean distance of the means, row by row; the variances play no part.

    Args:
        x, y: (n, d) embeddings; same n, d, dtype and device.

    Returns:
        (n,) distances >= 0.

    Raises:
        ValueError: shape, dtype or device differ.
    """
    x, y = _checked_rows(x, y, "squared_l2")
    return (x.mean - y.mean).square().sum(-1)


def squared_l2_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Squared Euclidean distance of the means between all pairs; 2 - 2 cos for unit means, and right for any others.

    Args:
        x: (n, d) embeddings.
        y: (m, d) embeddings; same d, dtype and device.

    Returns:
        (n, m) distances >= 0. One matrix product about the centre c of y's means: differences below
        1e-6 * (||mean_i - c||^2 + ||mean_j - c||^2) are rounding in float32.

    Raises:
        ValueError: d, dtype or device differ.
    """
    x, y = _checked(x, y, "squared_l2_matrix")
    return _squared_l2_matrix(x.mean, y.mean)


def nearest(x: GaussianEmbedding, y: GaussianEmbedding, *, pieces: int) -> Tensor:
    """Squared Euclidean distance of the nearest pieces of the means, row by row: see :func:`nearest_matrix`.

    Args:
        x, y: (n, d) embeddings; same n, d, dtype and device.
        pieces: K, a divisor of d.

    Returns:
        (n,) distances >= 0.

    Raises:
        ValueError: shape, dtype or device differ, or d is not a multiple of pieces.
    """
    x, y = _checked_rows(x, y, "nearest")
    sides = (_pieces(x, pieces, "nearest"), _pieces(y, pieces, "nearest"))
    return _minimum([(a - b).square().sum(-1) for a in sides[0] for b in sides[1]])


def nearest_matrix(x: GaussianEmbedding, y: GaussianEmbedding, *, pieces: int) -> Tensor:
    r"""Items of K embeddings, side by side in one mean: the squared Euclidean distance of the nearest two, for all pairs of items.

        nearest(i, j) = min over k, l < K of ||mean_i[k] - mean_j[l]||^2

    It is the best of K^2 of multiple-instance learning. The variances play no part. Recipes name it nearest_of_K.

    Args:
        x: (n, d) embeddings.
        y: (m, d) embeddings; same d, dtype and device.
        pieces: K, a divisor of d; the k-th embedding is the k-th run of d / K dimensions.

    Returns:
        (n, m) distances >= 0. K^2 matrix products, with the rounding of :func:`squared_l2_matrix`.

    Raises:
        ValueError: d, dtype or device differ, or d is not a multiple of pieces.

    Example:
        >>> x = GaussianEmbedding.point(torch.tensor([[0.0, 0.0, 5.0, 5.0]]))
        >>> y = GaussianEmbedding.point(torch.tensor([[9.0, 9.0, 0.0, 1.0]]))
        >>> nearest_matrix(x, y, pieces=2)
        tensor([[1.]])

    Paper: Song and Soleymani, "Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval", CVPR 2019.
    """
    x, y = _checked(x, y, "nearest_matrix")
    sides = (_pieces(x, pieces, "nearest_matrix"), _pieces(y, pieces, "nearest_matrix"))
    return _minimum([_squared_l2_matrix(a, b) for a in sides[0] for b in sides[1]])


def csd(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Closed-form sampled distance row by row, ||mean_x - mean_y||^2 + sum(var_x) + sum(var_y): see :func:`csd_matrix`.

    Args:
        x, y: (n, d) embeddings; same n, d, dtype and device.

    Returns:
        (n,) distances >= 0.

    Raises:
        ValueError: shape, dtype or device differ.
    """
    x, y = _checked_rows(x, y, "csd")
    return (x.mean - y.mean).square().sum(-1) + x.total_variance + y.total_variance


def csd_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""Closed-form sampled distance between all pairs: the mean squared distance of one draw from each side.

        csd(i, j) = ||mean_i - mean_j||^2 + sum(var_i) + sum(var_j)

    Not a metric: csd(a, a) = 2 * a.total_variance.

    Args:
        x: (n, d) embeddings.
        y: (m, d) embeddings; same d, dtype and device.

    Returns:
        (n, m) distances >= 0, smaller is closer. One matrix product, with the rounding of :func:`squared_l2_matrix`.

    Raises:
        ValueError: d, dtype or device differ.

    Example:
        >>> a = GaussianEmbedding(torch.zeros(1, 2), torch.zeros(1, 2))
        >>> b = GaussianEmbedding.point(torch.tensor([[3.0, 4.0]]))
        >>> csd_matrix(a, b)
        tensor([[27.]])

    Paper: Chun, ICLR 2024, arXiv 2305.18171, Eq. 1.
    """
    x, y = _checked(x, y, "csd_matrix")
    return _squared_l2_matrix(x.mean, y.mean) + x.total_variance.unsqueeze(1) + y.total_variance


def wasserstein2(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Squared 2-Wasserstein distance row by row: see :func:`wasserstein2_matrix`.

    Args:
        x, y: (n, d) embeddings; same n, d, dtype and device.

    Returns:
        (n,) distances >= 0.

    Raises:
        ValueError: shape, dtype or device differ.
    """
    x, y = _checked_rows(x, y, "wasserstein2")
    return (_mean_and_std(x) - _mean_and_std(y)).square().sum(-1)


def wasserstein2_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""Squared 2-Wasserstein distance between all pairs: Euclidean in [mean, std], 2 d dimensions.

        wasserstein2(i, j) = ||mean_i - mean_j||^2 + ||std_i - std_j||^2

    Args:
        x: (n, d) embeddings.
        y: (m, d) embeddings; same d, dtype and device.

    Returns:
        (n, m) distances >= 0; 0 for equal Gaussians. Rounding as in :func:`squared_l2_matrix`, over 2 d dimensions.

    Raises:
        ValueError: d, dtype or device differ.

    Paper: Chun 2024, section 2.2; Chun et al., CVPR 2021, appendix B.
    """
    x, y = _checked(x, y, "wasserstein2_matrix")
    return _squared_l2_matrix(_mean_and_std(x), _mean_and_std(y))


def wasserstein2_printed(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """The "2-Wasserstein" as one paper prints it, row by row: see :func:`wasserstein2_printed_matrix`.

    Args:
        x, y: (n, d) embeddings; same n, d, dtype and device.

    Returns:
        (n,) distances >= 0.

    Raises:
        ValueError: shape, dtype or device differ.
    """
    x, y = _checked_rows(x, y, "wasserstein2_printed")
    return _sqrt((_mean_and_var(x) - _mean_and_var(y)).square().sum(-1))


def wasserstein2_printed_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""sqrt(||mean_i - mean_j||^2 + ||var_i - var_j||^2): variances where the true distance has standard deviations.

    Only for reproducing results that were obtained with it; use :func:`wasserstein2_matrix` otherwise.

    Args:
        x: (n, d) embeddings.
        y: (m, d) embeddings; same d, dtype and device.

    Returns:
        (n, m) distances >= 0; the gradient at distance 0 is 0.

    Raises:
        ValueError: d, dtype or device differ.

    Paper: Pishdad et al., "Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations", Eq. 8.
    """
    x, y = _checked(x, y, "wasserstein2_printed_matrix")
    return _sqrt(_squared_l2_matrix(_mean_and_var(x), _mean_and_var(y)))


def kl(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Kullback-Leibler divergence KL(x || y) row by row: see :func:`kl_matrix`.

    Args:
        x, y: (n, d) embeddings with positive variances; same n, d, dtype and device.

    Returns:
        (n,) divergences >= 0 in nats.

    Raises:
        ValueError: shape, dtype or device differ, or a variance is 0.
    """
    x, y = _checked_rows(x, y, "kl", spread=True)
    difference = x.log_var - y.log_var
    terms = difference.expm1() - difference + (x.mean - y.mean).square() * (-y.log_var).exp()
    return terms.sum(-1) / 2


def kl_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""Kullback-Leibler divergence between all pairs. Not symmetric.

        kl(i, j) = KL(x_i || y_j) = 1/2 sum [ var_i / var_j - ln(var_i / var_j) + (mean_i - mean_j)^2 / var_j - 1 ]

    Args:
        x: (n, d) embeddings with positive variances; by convention the images.
        y: (m, d) embeddings with positive variances; same d, dtype and device.

    Returns:
        (n, m) divergences >= 0 in nats. Inner products of expanded features: differences below
        1e-6 * sum((var_i + (mean_i - c)^2) / var_j) are rounding in float32, c the centre of y's means.

    Raises:
        ValueError: d, dtype or device differ, or a variance is 0.

    Paper: Pishdad et al., Eq. 5.
    """
    x, y = _checked(x, y, "kl_matrix", spread=True)
    return _kl_matrix(x, y)


def min_kl(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """The smaller of KL(x || y) and KL(y || x), row by row (Pishdad et al., Eq. 6).

    Args:
        x, y: (n, d) embeddings with positive variances; same n, d, dtype and device.

    Returns:
        (n,) divergences >= 0 in nats.

    Raises:
        ValueError: shape, dtype or device differ, or a variance is 0.
    """
    return torch.minimum(kl(x, y), kl(y, x))


def min_kl_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """The smaller of KL(x_i || y_j) and KL(y_j || x_i) for all pairs (Pishdad et al., Eq. 6).

    Args:
        x: (n, d) embeddings with positive variances.
        y: (m, d) embeddings with positive variances; same d, dtype and device.

    Returns:
        (n, m) divergences >= 0 in nats, with the rounding of :func:`kl_matrix`.

    Raises:
        ValueError: d, dtype or device differ, or a variance is 0.
    """
    x, y = _checked(x, y, "min_kl_matrix", spread=True)
    return torch.minimum(_kl_matrix(x, y), _kl_matrix(y, x).T)


def js(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """The mean of KL(x || y) and KL(y || x), row by row: see :func:`js_matrix`.

    Args:
        x, y: (n, d) embeddings with positive variances; same n, d, dtype and device.

    Returns:
        (n,) divergences >= 0 in nats.

    Raises:
        ValueError: shape, dtype or device differ, or a variance is 0.
    """
    return (kl(x, y) + kl(y, x)) / 2


def js_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """What the literature of this field calls "JS": the mean of both Kullback-Leibler divergences, for all pairs.

    It is half the Jeffreys divergence, not the Jensen-Shannon divergence (which has no closed form for Gaussians).

    Args:
        x: (n, d) embeddings with positive variances.
        y: (m, d) embeddings with positive variances; same d, dtype and device.

    Returns:
        (n, m) divergences >= 0 in nats, with the rounding of :func:`kl_matrix`.

    Raises:
        ValueError: d, dtype or device differ, or a variance is 0.

    Paper: Chun et al., CVPR 2021, appendix B.
    """
    x, y = _checked(x, y, "js_matrix", spread=True)
    return (_kl_matrix(x, y) + _kl_matrix(y, x).T) / 2


def elk(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Negative log expected likelihood kernel row by row: see :func:`elk_matrix`.

    Args:
        x, y: (n, d) embeddings, variances positive on at least one side; same n, d, dtype and device.

    Returns:
        (n,) values, possibly negative.

    Raises:
        ValueError: shape, dtype or device differ, or both sides are points.
    """
    x, y = _checked_rows(x, y, "elk", spread="either")
    return _elk_terms(x.mean, x.var, y.mean, y.var).sum(-1) / 2 + x.d / 2 * math.log(2 * math.pi)


def elk_matrix(x: GaussianEmbedding, y: GaussianEmbedding, *, memory_mb: float = STREAM_MEMORY_MB) -> Tensor:
    r"""Negative logarithm of the expected likelihood kernel, the integral of p_i(z) p_j(z), between all pairs.

        elk(i, j) = 1/2 sum [ (mean_i - mean_j)^2 / (var_i + var_j) + ln(var_i + var_j) ] + d/2 ln(2 pi)

    Args:
        x: (n, d) embeddings, variances positive on at least one side.
        y: (m, d) embeddings; same d, dtype and device.
        memory_mb: working memory; it does not separate, so it is streamed in blocks of n * m * d values.

    Returns:
        (n, m) values, smaller is closer; negative for concentrated densities.

    Raises:
        ValueError: d, dtype or device differ, or both sides are points.

    Paper: Chun et al., CVPR 2021, appendix B (there without the constant).
    """
    x, y = _checked(x, y, "elk_matrix", spread="either")

    def block(mean_x: Tensor, var_x: Tensor, mean_y: Tensor, var_y: Tensor) -> Tensor:
        return _elk_terms(mean_x.unsqueeze(1), var_x.unsqueeze(1), mean_y, var_y).sum(-1)

    total = _blockwise(block, (x.mean, x.var), (y.mean, y.var), floats_per_pair=8 * x.d, memory_mb=memory_mb)
    return total / 2 + x.d / 2 * math.log(2 * math.pi)


def bhattacharyya(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Bhattacharyya distance row by row: see :func:`bhattacharyya_matrix`.

    Args:
        x, y: (n, d) embeddings with positive variances; same n, d, dtype and device.

    Returns:
        (n,) distances >= 0.

    Raises:
        ValueError: shape, dtype or device differ, or a variance is 0.
    """
    x, y = _checked_rows(x, y, "bhattacharyya", spread=True)
    return _bhattacharyya_terms(x.mean, x.var, y.mean, y.var).sum(-1) / 4


def bhattacharyya_matrix(x: GaussianEmbedding, y: GaussianEmbedding, *, memory_mb: float = STREAM_MEMORY_MB) -> Tensor:
    r"""Bhattacharyya distance, -ln of the integral of sqrt(p_i(z) p_j(z)), between all pairs.

        bhattacharyya(i, j) = sum [ 1/4 (mean_i - mean_j)^2 / (var_i + var_j) + 1/2 ln((var_i + var_j) / (2 std_i std_j)) ]

    Args:
        x: (n, d) embeddings with positive variances.
        y: (m, d) embeddings with positive variances; same d, dtype and device.
        memory_mb: working memory; it does not separate, so it is streamed in blocks of n * m * d values.

    Returns:
        (n, m) distances >= 0, exactly 0 for equal Gaussians.

    Raises:
        ValueError: d, dtype or device differ, or a variance is 0.

    Paper: Chun et al., CVPR 2021, appendix B (there up to a constant).
    """
    x, y = _checked(x, y, "bhattacharyya_matrix", spread=True)

    def block(mean_x: Tensor, var_x: Tensor, mean_y: Tensor, var_y: Tensor) -> Tensor:
        return _bhattacharyya_terms(mean_x.unsqueeze(1), var_x.unsqueeze(1), mean_y, var_y).sum(-1)

    return _blockwise(block, (x.mean, x.var), (y.mean, y.var), floats_per_pair=10 * x.d, memory_mb=memory_mb) / 4


def average_l2(
    x: GaussianEmbedding, y: GaussianEmbedding, *, n_samples: int = 8, generator: torch.Generator | None = None
) -> Tensor:
    """Mean Euclidean distance of samples, row by row: see :func:`average_l2_matrix`, which draws the same samples.

    Args:
        x, y: (n, d) embeddings; same n, d, dtype and device.
        n_samples: s draws of each embedding; all s^2 pairs are averaged.
        generator: source of the draws.

    Returns:
        (n,) distances >= 0.

    Raises:
        ValueError: shape, dtype or device differ.
    """
    x, y = _checked_rows(x, y, "average_l2")
    a, b = x.sample(n_samples, generator=generator), y.sample(n_samples, generator=generator)
    squared = torch.stack([(a - b[:, [j]]).square().sum(-1) for j in range(n_samples)])
    return _sqrt(squared).mean((0, 2))


def average_l2_matrix(
    x: GaussianEmbedding,
    y: GaussianEmbedding,
    *,
    n_samples: int = 8,
    generator: torch.Generator | None = None,
    memory_mb: float = DEFAULT_MEMORY_MB,
) -> Tensor:
    r"""Mean Euclidean distance of samples between all pairs: 1/s^2 sum_jk ||x_i^j - y_l^k||, not squared.

    Args:
        x: (n, d) embeddings.
        y: (m, d) embeddings; same d, dtype and device.
        n_samples: s draws of each embedding; all s^2 pairs are averaged.
        generator: source of the draws; the same seed gives the same distances.
        memory_mb: working memory for blocks of n * m * s^2 values.

    Returns:
        (n, m) distances >= 0; the gradient of a distance of 0 is 0.

    Raises:
        ValueError: d, dtype or device differ.

    Paper: Chun et al., CVPR 2021, table 1.
    """
    x, y = _checked(x, y, "average_l2_matrix")
    samples = x.sample(n_samples, generator=generator), y.sample(n_samples, generator=generator)
    return reduce_sample_distances(*samples, lambda distance: distance.mean((2, 3)), memory_mb=memory_mb)


def reduce_sample_distances(
    x_samples: Tensor, y_samples: Tensor, reduce: Callable[[Tensor], Tensor], *, memory_mb: float = DEFAULT_MEMORY_MB
) -> Tensor:
    """Euclidean distances of all sample pairs, reduced block by block so that (n, m, s, s) never exists at once.

    Args:
        x_samples: (n, s, d).
        y_samples: (m, s', d); same d, dtype and device.
        reduce: (rows, columns, s, s') distances -> (rows, columns) values.
        memory_mb: working memory, in the backward pass too.

    Returns:
        (n, m) reduced values.
    """
    dtype = accumulation_dtype(x_samples.dtype)
    s, t = x_samples.shape[1], y_samples.shape[1]

    def block(a: Tensor, b: Tensor) -> Tensor:
        squared = _squared_l2_matrix(a.flatten(0, 1), b.flatten(0, 1))
        return reduce(_sqrt(squared).unflatten(0, (len(a), s)).unflatten(2, (len(b), t)).transpose(1, 2))

    # Counted in the backward pass: six values for each pair of samples, five copies of the samples of each block.
    return _blockwise(
        block,
        (x_samples.to(dtype),),
        (y_samples.to(dtype),),
        floats_per_pair=6 * s * t,
        floats_per_row=5 * max(s, t) * x_samples.shape[2],
        memory_mb=memory_mb,
    )


@dataclass(frozen=True)
class Lift:
    """How a distance becomes a squared L2 distance between longer vectors, plus a number of the query alone.

        distance(q, g) = ||[mean_q, query(q)] - [mean_g, gallery(g)]||^2 + constant(q)

    Attributes:
        gallery: (m, d) embeddings -> (m, c) float32 columns behind the means of items.
        query: (n, d) embeddings -> (n, c) float32 columns behind the means of queries.
        constant: (n, d) embeddings -> (n,) float32.
    """

    gallery: Callable[[GaussianEmbedding], Tensor]
    query: Callable[[GaussianEmbedding], Tensor]
    constant: Callable[[GaussianEmbedding], Tensor]


def _total_variance(x: GaussianEmbedding) -> Tensor:
    return x.log_var.float().exp().sum(1)


def _total_deviation(x: GaussianEmbedding) -> Tensor:
    return _total_variance(x).sqrt().unsqueeze(1)


def _deviations(x: GaussianEmbedding) -> Tensor:
    return (x.log_var.float() / 2).exp()


def _zero_column(x: GaussianEmbedding) -> Tensor:
    return x.mean.new_zeros(x.n, 1, dtype=torch.float32)


def _no_columns(x: GaussianEmbedding) -> Tensor:
    return x.mean.new_zeros(x.n, 0, dtype=torch.float32)


def _nothing(x: GaussianEmbedding) -> Tensor:
    return x.mean.new_zeros(x.n, dtype=torch.float32)


@dataclass(frozen=True)
class Distance:
    """A named distance: its row form, its matrix form, and what it asks of its inputs.

    Attributes:
        name: key in DISTANCES and in recipes.
        row: (n, d), (n, d) -> (n,).
        matrix: (n, d), (m, d) -> (n, m).
        symmetric: distance(x, y) = distance(y, x); if not, images come first.
        lift: how it becomes a squared L2 distance that any vector engine can search; None if it does not.
        direction: side of the first argument: "i2t" for images as queries, "t2i" for texts; see :meth:`for_direction`.
        needs_variance: points (variance 0) are refused.
        sampled: random; takes n_samples and generator.
        pieces: how many embeddings of equal size an item's mean is cut into; 1 but for ``nearest_of_K``.
    """

    name: str
    row: Callable[..., Tensor]
    matrix: Callable[..., Tensor]
    symmetric: bool = True
    needs_variance: bool = False
    sampled: bool = False
    pieces: int = 1
    lift: Lift | None = None
    direction: Direction = "i2t"

    def for_direction(self, direction: Direction) -> "Distance":
        """The same distance with queries first: row and matrix take (queries, gallery) of this direction of retrieval.

        Only an asymmetric distance, such as kl, computes something else: it always compares images with texts.

        Args:
            direction: "i2t" if images are the queries, "t2i" if texts are.
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


DISTANCES: dict[str, Distance] = {
    distance.name: distance
    for distance in (
        Distance("csd", csd, csd_matrix, lift=Lift(_total_deviation, _zero_column, _total_variance)),
        Distance("squared_l2", squared_l2, squared_l2_matrix, lift=Lift(_no_columns, _no_columns, _nothing)),
        Distance("wasserstein2", wasserstein2, wasserstein2_matrix, lift=Lift(_deviations, _deviations, _nothing)),
        Distance("wasserstein2_printed", wasserstein2_printed, wasserstein2_printed_matrix),
        Distance("kl", kl, kl_matrix, symmetric=False, needs_variance=True),
        Distance("min_kl", min_kl, min_kl_matrix, needs_variance=True),
        Distance("js", js, js_matrix, needs_variance=True),
        Distance("elk", elk, elk_matrix, needs_variance=True),
        Distance("bhattacharyya", bhattacharyya, bhattacharyya_matrix, needs_variance=True),
        Distance("average_l2", average_l2, average_l2_matrix, sampled=True),
    )
}
"""Every distance by name; recipes and commands choose from these, or take nearest_of_K for items of K embeddings."""


def get_distance(name: str | Distance) -> Distance:
    """The distance of that name: one of DISTANCES, or nearest_of_2, nearest_of_3, ... (:func:`nearest_matrix`).

    Args:
        name: a name; a distance is handed back as it is.

    Raises:
        ValueError: there is none; the message names the nearest and lists all.
    """
    if isinstance(name, Distance):
        return name
    pieces = name.removeprefix("nearest_of_")
    if pieces != name and pieces.isdecimal() and not pieces.startswith("0"):
        row, matrix = (functools.partial(form, pieces=int(pieces)) for form in (nearest, nearest_matrix))
        return Distance(name, row, matrix, pieces=int(pieces))
    if name not in DISTANCES:
        near = difflib.get_close_matches(name, DISTANCES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown distance {name!r}{hint} Known: {', '.join(DISTANCES)}, nearest_of_K")
    return DISTANCES[name]


def _checked(
    x: GaussianEmbedding, y: GaussianEmbedding, who: str, *, spread: bool | str = False
) -> tuple[GaussianEmbedding, GaussianEmbedding]:
    """The two sides in the dtype of accumulation, after the checks that every distance shares."""
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, GaussianEmbedding):
            raise TypeError(
                f"{who}: {name} must be a GaussianEmbedding, got {type(value).__name__}; wrap means in GaussianEmbedding.point"
            )
    if x.d != y.d or x.dtype != y.dtype or x.device != y.device:
        sides = [f"(., {e.d}) {e.dtype} on {e.device}" for e in (x, y)]
        raise ValueError(f"{who}: x is {sides[0]} and y is {sides[1]}; both must have the same d, dtype and device")
    if spread:
        points = [bool(torch.isneginf(e.log_var).any()) for e in (x, y)]
        if all(points) if spread == "either" else any(points):
            raise ValueError(
                f"{who}: needs positive variances{' on one side at least' if spread == 'either' else ''}, got points"
                " (log_var = -inf); use csd, squared_l2 or wasserstein2 for deterministic embeddings"
            )
    dtype = accumulation_dtype(x.dtype)
    return (x, y) if dtype == x.dtype else (x.to(dtype), y.to(dtype))


def _checked_rows(
    x: GaussianEmbedding, y: GaussianEmbedding, who: str, *, spread: bool | str = False
) -> tuple[GaussianEmbedding, GaussianEmbedding]:
    checked = _checked(x, y, who, spread=spread)
    if x.n != y.n:
        raise ValueError(
            f"{who}: x has {x.n} rows and y has {y.n}; row by row they must be equal, for all pairs use {who}_matrix"
        )
    return checked


def _pieces(e: GaussianEmbedding, pieces: int, who: str) -> tuple[Tensor, ...]:
    """K means of (n, d / K)."""
    if pieces < 1 or e.d % pieces:
        raise ValueError(f"{who}: {pieces} embeddings an item cannot share d = {e.d} dimensions equally")
    return e.mean.chunk(pieces, dim=1)


def _minimum(distances: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.minimum, distances)


def _mean_and_std(e: GaussianEmbedding) -> Tensor:
    return torch.cat([e.mean, (e.log_var / 2).exp()], dim=1)


def _mean_and_var(e: GaussianEmbedding) -> Tensor:
    return torch.cat([e.mean, e.var], dim=1)


def _sqrt(squared: Tensor) -> Tensor:
    """Square root whose gradient at 0 is 0 instead of infinite."""
    zero = squared <= 0
    return squared.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _squared_l2_matrix(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||^2 by one matrix product about the centre of b, which keeps precision far from the origin."""
    centre = b.detach().mean(0) if len(b) else 0
    a, b = a - centre, b - centre
    with torch.autocast(a.device.type, enabled=False):
        squares = a.square().sum(-1).unsqueeze(1) + b.square().sum(-1)
        return torch.addmm(squares, a, b.T, alpha=-2).clamp_min(0)


def _kl_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    centre = y.mean.detach().mean(0) if y.n else 0
    a, b = x.mean - centre, y.mean - centre
    precision = (-y.log_var).exp()
    features = torch.cat([x.var + a.square(), a], dim=1)
    weights = torch.cat([precision, -2 * b * precision], dim=1)
    constant = (b.square() * precision + y.log_var).sum(-1) - x.log_var.sum(-1).unsqueeze(1) - x.d
    with torch.autocast(a.device.type, enabled=False):
        return (torch.addmm(constant, features, weights.T) / 2).clamp_min(0)


# Written in place where no gradient needs the parts: at this size fresh memory for each costs more than the arithmetic.


def _elk_terms(mean_x: Tensor, var_x: Tensor, mean_y: Tensor, var_y: Tensor) -> Tensor:
    var, gap = var_x + var_y, mean_x - mean_y
    if var.requires_grad or gap.requires_grad:
        return gap.square() / var + var.log()
    return gap.square_().div_(var).add_(var.log_())


def _bhattacharyya_terms(mean_x: Tensor, var_x: Tensor, mean_y: Tensor, var_y: Tensor) -> Tensor:
    """4 x the summand; (var_x + var_y)^2 / (4 var_x var_y) as 1 + r is exact for equal variances."""
    var, gap, spread = var_x + var_y, mean_x - mean_y, var_x - var_y
    if var.requires_grad or gap.requires_grad:
        return gap.square() / var + (spread.square() / (4 * var_x * var_y)).log1p()
    gap.square_().div_(var)
    return gap.add_(spread.square_().div_(torch.mul(4 * var_x, var_y, out=var)).log1p_())


def _blockwise(
    function: Callable[..., Tensor],
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    *,
    floats_per_pair: int,
    floats_per_row: int = 0,
    memory_mb: float,
) -> Tensor:
    """function on square blocks of x and y, its (rows, columns) results put together; recomputed in the backward pass."""
    n, m = len(x[0]), len(y[0])
    if n == 0 or m == 0:
        return x[0].new_zeros(n, m)
    if memory_mb <= 0:
        raise ValueError(f"memory_mb must be positive, got {memory_mb}")
    budget = memory_mb * 2**20 / x[0].element_size()
    # side^2 * floats_per_pair + 2 * side * floats_per_row = budget; a side cut short leaves more for the other.
    side = (math.sqrt(floats_per_row**2 + floats_per_pair * budget) - floats_per_row) / floats_per_pair

    def other(cut: float) -> float:
        return (budget - cut * floats_per_row) / (cut * floats_per_pair + floats_per_row)

    rows = max(1, min(n, int(other(m) if m < side else side)))
    columns = max(1, min(m, int(other(rows))))
    x_blocks, y_blocks = (list(zip(*(t.split(k) for t in part), strict=True)) for part, k in ((x, rows), (y, columns)))
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*x, *y)):
        recompute = functools.partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([torch.cat([recompute(*a, *b) for b in y_blocks], dim=1) for a in x_blocks])
    result = x[0].new_empty(n, m)
    for i, a in enumerate(x_blocks):
        for j, b in enumerate(y_blocks):
            result[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = function(*a, *b)
    return result
