r"""Every distance between diagonal Gaussians, as its formula and by name: DISTANCES. Smaller is closer, everywhere.

A formula takes sides that broadcast, of tensors or of arrays of NumPy: rows (n, d) with (n, d) give (n,), and
(n, 1, d) with (m, d) give all pairs (n, m), by way of an (n, m, d) array. A product gives all pairs of whole embeddings
without one. The tests hold the two equal. How a formula is computed for all pairs is in ``distance``. Half precision
in, float32 out. Formulas and sources are also in docs/concepts/distances.md. A distance does not depend on labels,
logits or probabilities.

To add a distance: its formula; an entry in DISTANCES; a slow loop in the tests' references; the formula and its source
in docs/concepts/distances.md.
"""

import difflib
import functools
import math
from typing import get_args

from sfumato.arrays import Array, as_numpy, as_tensor, is_tensor, namespace
from sfumato.distances import distance as pairwise
from sfumato.distances.distance import Distance, Form, Gaussians, Lift, Points, Side, closed_form, safe_sqrt
from sfumato.gaussian import GaussianEmbedding
from sfumato.imports import HOW, claim_name, load_plugins


def squared_l2(x: Side, y: Side) -> Array:
    """||mean_x - mean_y||^2; 2 - 2 cos for unit means, and valid for any means. The variances have no effect."""
    return ((x.mean - y.mean) ** 2).sum(-1)


def _csd(x: Side, y: Side) -> Array:
    """||mean_x - mean_y||^2 + sum(var_x) + sum(var_y): the mean squared distance of one sample from each side.

    Paper: Chun, ICLR 2024, arXiv 2305.18171, Eq. 1.
    """
    return squared_l2(x, y) + x.var.sum(-1) + y.var.sum(-1)


def wasserstein2(x: Side, y: Side) -> Array:
    """||mean_x - mean_y||^2 + ||std_x - std_y||^2, squared: Euclidean in [mean, std], 2 d dimensions.

    Paper: Chun 2024, section 2.2; Chun et al., CVPR 2021, appendix B.
    """
    exp = namespace(x.log_var).exp
    return squared_l2(x, y) + ((exp(x.log_var / 2) - exp(y.log_var / 2)) ** 2).sum(-1)


def wasserstein2_root(x: Side, y: Side) -> Array:
    """The root of wasserstein2, a metric: both rank alike, but a margin means something else.

    Paper: Pishdad et al., Eq. 7, for diagonal covariances.
    """
    return safe_sqrt(wasserstein2(x, y))


def wasserstein2_printed(x: Side, y: Side) -> Array:
    """sqrt(||mean_x - mean_y||^2 + ||var_x - var_y||^2): variances where the true distance has standard deviations.

    Only for reproducing results that were obtained with it.

    Paper: Pishdad et al., "Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations", Eq. 8.
    """
    return safe_sqrt(squared_l2(x, y) + ((x.var - y.var) ** 2).sum(-1))


def kl(x: Side, y: Side) -> Array:
    """KL(x || y) = 1/2 sum [ var_x / var_y - ln(var_x / var_y) + (mean_x - mean_y)^2 / var_y - 1 ]. Not symmetric.

    Paper: Pishdad et al., Eq. 5.
    """
    xp, log_ratio = namespace(x.mean), x.log_var - y.log_var
    return (xp.expm1(log_ratio) - log_ratio + (x.mean - y.mean) ** 2 * xp.exp(-y.log_var)).sum(-1) / 2


def kl_reversed(x: Side, y: Side) -> Array:
    """KL(y || x): of texts from images, as images come first.

    Paper: Pishdad et al., table 6, where it retrieves worse than KL(image || text).
    """
    return kl(y, x)


def min_kl(x: Side, y: Side) -> Array:
    """The smaller of KL(x || y) and KL(y || x) (Pishdad et al., Eq. 6)."""
    return namespace(x.mean).minimum(kl(x, y), kl(y, x))


def js(x: Side, y: Side) -> Array:
    """The mean of KL(x || y) and KL(y || x), which the literature of this field calls "JS".

    It is half the Jeffreys divergence, not the Jensen-Shannon divergence (which has no closed form for Gaussians).

    Paper: Chun et al., CVPR 2021, appendix B.
    """
    return (kl(x, y) + kl(y, x)) / 2


def elk(x: Side, y: Side) -> Array:
    """Negative logarithm of the expected likelihood kernel, the integral of p_x(z) p_y(z).

        1/2 sum [ (mean_x - mean_y)^2 / (var_x + var_y) + ln(var_x + var_y) ] + d/2 ln(2 pi)

    Paper: Chun et al., CVPR 2021, appendix B (there without the constant).
    """
    v = x.var + y.var
    return ((x.mean - y.mean) ** 2 / v + namespace(v).log(v)).sum(-1) / 2 + x.mean.shape[-1] / 2 * math.log(2 * math.pi)


def bhattacharyya(x: Side, y: Side) -> Array:
    """Bhattacharyya distance, -ln of the integral of sqrt(p_x(z) p_y(z)).

        v = var_x + var_y:   sum [ 1/4 (mean_x - mean_y)^2 / v + 1/2 ln(v / (2 std_x std_y)) ]

    v^2 / (4 var_x var_y) as 1 + r is exact for equal variances.

    Paper: Chun et al., CVPR 2021, appendix B (there up to a constant).
    """
    r = (x.var - y.var) ** 2 / (4 * x.var * y.var)
    return ((x.mean - y.mean) ** 2 / (x.var + y.var) + namespace(r).log1p(r)).sum(-1) / 4


def nearest(x: Side, y: Side, *, embeddings: int) -> Array:
    """min over k, l < K of ||mean_x[k] - mean_y[l]||^2; an item's mean holds its K embeddings side by side.

    Paper: Song and Soleymani, "Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval", CVPR 2019.
    """
    xp = namespace(x.mean)
    a, b = (xp.stack(_split(e.mean, embeddings), axis=-2) for e in (x, y))
    return xp.min(((a[..., :, None, :] - b[..., None, :, :]) ** 2).sum(-1), axis=(-2, -1))


def _split(mean: Array, embeddings: int) -> tuple[Array, ...]:
    """K means of (..., d / K)."""
    if embeddings < 1 or mean.shape[-1] % embeddings:
        parts = f"{embeddings} embeddings of equal size per item"
        raise ValueError(f"nearest_of_{embeddings}: d = {mean.shape[-1]} dimensions cannot be divided into {parts}")
    width = mean.shape[-1] // embeddings
    return tuple(mean[..., i * width : (i + 1) * width] for i in range(embeddings))


# In place, for tensors without gradients: for blocks of their size new memory takes longer than the arithmetic.


def elk_in_place(x: Side, y: Side) -> Array:
    """:func:`elk`."""
    v, terms = x.var + y.var, x.mean - y.mean
    terms.square_().div_(v).add_(v.log_())
    return terms.sum(-1) / 2 + x.mean.shape[-1] / 2 * math.log(2 * math.pi)


def bhattacharyya_in_place(x: Side, y: Side) -> Array:
    """:func:`bhattacharyya`."""
    v, terms, r = x.var + y.var, x.mean - y.mean, x.var - y.var
    terms.square_().div_(v)
    return terms.add_(r.square_().div_(v.copy_(4 * x.var).mul_(y.var)).log1p_()).sum(-1) / 4


# All pairs by matrix products: (n, d) and (m, d) embeddings -> (n, m).


def nearest_product(x: GaussianEmbedding, y: GaussianEmbedding, *, embeddings: int) -> Array:
    """:func:`nearest`."""
    sides = _split(x.mean, embeddings), _split(y.mean, embeddings)
    pairs = (pairwise.squared_l2_product(a, b) for a in sides[0] for b in sides[1])
    return functools.reduce(namespace(x.mean).minimum, pairs)


def kl_product(x: GaussianEmbedding, y: GaussianEmbedding) -> Array:
    """:func:`kl`."""
    xp = namespace(x.mean)
    a, b = pairwise.centred(x.mean, y.mean)
    precision = xp.exp(-y.log_var)
    features = xp.concat([x.var + a**2, a], axis=1)
    weights = xp.concat([precision, -2 * b * precision], axis=1)
    constant = (b**2 * precision + y.log_var).sum(-1) - x.log_var.sum(-1)[:, None] - x.d
    return xp.clip(pairwise.added_product(constant, features, weights) / 2, 0, None)


def _min_kl_product(x: GaussianEmbedding, y: GaussianEmbedding) -> Array:
    return namespace(x.mean).minimum(kl_product(x, y), kl_product(y, x).T)


_WITH_STD = Lift(columns=lambda e: namespace(e.log_var).exp(e.log_var / 2))
_WITH_VAR = Lift(columns=lambda e: e.var)

DISTANCES: dict[str, Distance] = {
    distance.name: distance
    for distance in (
        closed_form(_csd, name="csd", lift=Lift(offset=lambda e: e.total_variance)),
        closed_form(squared_l2, lift=Lift()),
        closed_form(wasserstein2, lift=_WITH_STD),
        closed_form(wasserstein2_root, lambda x, y: safe_sqrt(_WITH_STD.product(x, y))),
        closed_form(wasserstein2_printed, lambda x, y: safe_sqrt(_WITH_VAR.product(x, y))),
        closed_form(kl, kl_product, points="refused", symmetric=False),
        closed_form(kl_reversed, lambda x, y: kl_product(y, x).T, points="refused", symmetric=False),
        closed_form(min_kl, _min_kl_product, points="refused"),
        closed_form(js, lambda x, y: (kl_product(x, y) + kl_product(y, x).T) / 2, points="refused"),
        closed_form(elk, in_place=elk_in_place, points="on one side"),
        closed_form(bhattacharyya, in_place=bhattacharyya_in_place, points="refused"),
        pairwise.sampled(
            "average_l2", lambda distance: distance.mean((2, 3))
        ),  # Chun et al., CVPR 2021, table 1; not squared
    )
}
"""Every distance by name; recipes and commands choose from these, or take nearest_of_K for items of K embeddings."""

squared_l2_matrix = DISTANCES["squared_l2"].matrix


def csd(x: GaussianEmbedding, y: GaussianEmbedding) -> Array:
    """Closed-form sampled distance row by row, ||mean_x - mean_y||^2 + sum(var_x) + sum(var_y): see :func:`csd_matrix`.

    Args:
        x, y: (n, d) embeddings; same n, d, dtype and device.

    Returns:
        (n,) distances >= 0, in float32 or better; smaller is closer.

    Raises:
        ValueError: n, d, dtype or device differ.

    Example:
        >>> import numpy as np
        >>> a = GaussianEmbedding(np.zeros((1, 2)), np.zeros((1, 2)))
        >>> b = GaussianEmbedding.point(np.array([[3.0, 4.0]]))
        >>> csd(a, b)
        array([27.])
    """
    return DISTANCES["csd"].row(x, y)


def csd_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Array:
    r"""Closed-form sampled distance between all pairs: the mean squared distance of one sample from each side.

        csd(i, j) = ||mean_i - mean_j||^2 + sum(var_i) + sum(var_j)

    Not a metric: csd(a, a) = 2 * a.total_variance. One matrix product, by the lift of csd in DISTANCES.

    Args:
        x: (n, d) embeddings.
        y: (m, d) embeddings; same d, dtype and device.

    Returns:
        (n, m) distances >= 0, in float32 or better; smaller is closer.

    Raises:
        ValueError: d, dtype or device differ.

    Paper: Chun, ICLR 2024, arXiv 2305.18171, Eq. 1.
    """
    return DISTANCES["csd"].matrix(x, y)


def get_distance(name: str | Distance) -> Distance:
    """The distance of that name: one of DISTANCES, or nearest_of_2, nearest_of_3, ... for items of several embeddings.

    Args:
        name: a name; a distance is returned unchanged.

    Returns:
        The distance, with images as its first argument.

    Raises:
        ValueError: the name is unknown; the message names the nearest and lists all.

    Example:
        >>> get_distance("nearest_of_3").embeddings
        3
    """
    if isinstance(name, Distance):
        return name
    count = name.removeprefix("nearest_of_")
    if count != name and count.isdecimal() and not count.startswith("0"):
        forms = (functools.partial(form, embeddings=int(count)) for form in (nearest, nearest_product))
        return closed_form(*forms, name=name, embeddings=int(count))
    if name not in DISTANCES:
        load_plugins()
    if name not in DISTANCES:
        near = difflib.get_close_matches(name, DISTANCES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"unknown distance {name!r}{hint} known: {', '.join(DISTANCES)}, nearest_of_K; {HOW}")
    return DISTANCES[name]


def _of_tensors(function: Form) -> Form:
    """A function that gets tensors from arrays of NumPy, too, because it was written for these."""

    def converted(*sides: Side) -> Array:
        if is_tensor(sides[0].mean):
            return function(*sides)
        tensors = ([as_tensor(v, "x", "x") for v in (e.mean, e.log_var, e.var)] for e in sides)
        return as_numpy(function(*(Gaussians(*values) for values in tensors)))

    return converted


def register_distance(
    name: str, formula: Form, *, points: Points = "allowed", symmetric: bool = True, lift: Lift | None = None
) -> Distance:
    """Make a distance of your own known by its name: in recipes, commands, and every function that takes a distance.

    Args:
        name: its name; the module or file that took it may define it again, for example in a notebook.
        formula: a differentiable function of two sides with the tensors ``mean``, ``log_var`` and ``var``, (..., d)
            each, which broadcast against each other; it returns (...) distances, smaller is closer. All pairs are
            computed in blocks under a memory budget.
        points: whether the sides may have variance 0: "allowed", "on one side" or "refused".
        symmetric: whether distance(x, y) = distance(y, x); if not, images come first.
        lift: the distance as one of longer vectors, by which stores can search: see
            :class:`~sfumato.distances.distance.Lift`. All pairs are then a matrix product.

    Returns:
        The distance.

    Raises:
        ValueError: another module or file has taken the name, it is no identifier, or points has another value.
        TypeError: formula is no function.

    Example:
        >>> import numpy as np
        >>> register_distance("city_block", lambda x, y: abs(x.mean - y.mean).sum(-1)).name
        'city_block'
        >>> a = GaussianEmbedding.point(np.array([[0.0, 0.0], [1.0, 1.0]]))
        >>> DISTANCES.pop("city_block").matrix(a, a[:1])
        array([[0.],
               [2.]])
    """
    if name.startswith("nearest_of_"):
        raise ValueError(f"register_distance: {name!r} is a distance already; choose another name")
    if not callable(formula):
        raise TypeError(f"register_distance: formula is {formula!r}; expected a function of two sides")
    if points not in get_args(Points):
        raise ValueError(f"register_distance: points is {points!r}, expected one of {', '.join(get_args(Points))}")
    claim_name("distance", name, DISTANCES, formula)
    if lift is not None:
        columns, offset = (None if one is None else _of_tensors(one) for one in (lift.columns, lift.offset))
        lift = Lift(columns, offset)
    DISTANCES[name] = closed_form(_of_tensors(formula), name=name, points=points, symmetric=symmetric, lift=lift)
    return DISTANCES[name]
