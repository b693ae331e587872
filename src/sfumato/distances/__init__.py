r"""Every distance between diagonal Gaussians, by name: DISTANCES. Smaller is closer, everywhere.

The formulas are in ``formulas``; how they are computed for all pairs, in ``distance``. Half precision in, float32 out.
Formulas and sources are also in docs/concepts/distances.md. A distance does not depend on labels, logits or
probabilities.

To add a distance: its formula; an entry in DISTANCES; a slow loop in the tests' references; the formula and its source
in docs/concepts/distances.md.
"""

import difflib
import functools
from typing import get_args

from torch import Tensor

from sfumato.distances import formulas
from sfumato.distances.distance import (
    DEFAULT_MEMORY_MB,
    Distance,
    Form,
    Lift,
    Points,
    closed_form,
    reduce_sample_distances,
    safe_sqrt,
    sampled,
    seeded_samples,
)
from sfumato.distances.formulas import kl_product, nearest_product
from sfumato.gaussian import GaussianEmbedding
from sfumato.imports import HOW, claim_name, load_plugins

_WITH_STD, _WITH_VAR = Lift(columns=lambda e: (e.log_var / 2).exp()), Lift(columns=lambda e: e.var)

DISTANCES: dict[str, Distance] = {
    distance.name: distance
    for distance in (
        closed_form(formulas.csd, lift=Lift(offset=lambda e: e.total_variance)),
        closed_form(formulas.squared_l2, lift=Lift()),
        closed_form(formulas.wasserstein2, lift=_WITH_STD),
        closed_form(formulas.wasserstein2_root, lambda x, y: safe_sqrt(_WITH_STD.product(x, y))),
        closed_form(formulas.wasserstein2_printed, lambda x, y: safe_sqrt(_WITH_VAR.product(x, y))),
        closed_form(formulas.kl, kl_product, points="refused", symmetric=False),
        closed_form(formulas.kl_reversed, lambda x, y: kl_product(y, x).T, points="refused", symmetric=False),
        closed_form(formulas.min_kl, lambda x, y: kl_product(x, y).minimum(kl_product(y, x).T), points="refused"),
        closed_form(formulas.js, lambda x, y: (kl_product(x, y) + kl_product(y, x).T) / 2, points="refused"),
        closed_form(formulas.elk, in_place=formulas.elk_in_place, points="on one side"),
        closed_form(formulas.bhattacharyya, in_place=formulas.bhattacharyya_in_place, points="refused"),
        sampled("average_l2", lambda distance: distance.mean((2, 3))),  # Chun et al., CVPR 2021, table 1; not squared
    )
}
"""Every distance by name; recipes and commands choose from these, or take nearest_of_K for items of K embeddings."""

squared_l2_matrix = DISTANCES["squared_l2"].matrix


def csd(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Closed-form sampled distance row by row, ||mean_x - mean_y||^2 + sum(var_x) + sum(var_y): see :func:`csd_matrix`.

    Args:
        x, y: (n, d) embeddings; same n, d, dtype and device.

    Returns:
        (n,) distances >= 0, in float32 or better; smaller is closer.

    Raises:
        ValueError: n, d, dtype or device differ.

    Example:
        >>> import torch
        >>> a = GaussianEmbedding(torch.zeros(1, 2), torch.zeros(1, 2))
        >>> b = GaussianEmbedding.point(torch.tensor([[3.0, 4.0]]))
        >>> csd(a, b)
        tensor([27.])
    """
    return DISTANCES["csd"].row(x, y)


def csd_matrix(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
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
        forms = (functools.partial(form, embeddings=int(count)) for form in (formulas.nearest, nearest_product))
        return closed_form(*forms, name=name, embeddings=int(count))
    if name not in DISTANCES:
        load_plugins()
    if name not in DISTANCES:
        near = difflib.get_close_matches(name, DISTANCES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"unknown distance {name!r}{hint} known: {', '.join(DISTANCES)}, nearest_of_K; {HOW}")
    return DISTANCES[name]


def register_distance(
    name: str, formula: Form, *, points: Points = "allowed", symmetric: bool = True, lift: Lift | None = None
) -> Distance:
    """Make a distance of your own known by its name: in recipes, commands, and every function that takes a distance.

    Args:
        name: its name; the module or file that took it may define it again, for example in a notebook.
        formula: a differentiable function of two sides with ``mean``, ``log_var`` and ``var``, (..., d) each, which
            broadcast against each other; it returns (...) distances, smaller is closer. All pairs are computed in
            blocks under a memory budget.
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
        >>> import torch
        >>> register_distance("city_block", lambda x, y: (x.mean - y.mean).abs().sum(-1)).name
        'city_block'
        >>> a = GaussianEmbedding.point(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        >>> DISTANCES.pop("city_block").matrix(a, a[:1])
        tensor([[0.],
                [2.]])
    """
    if name.startswith("nearest_of_"):
        raise ValueError(f"register_distance: {name!r} is a distance already; choose another name")
    if not callable(formula):
        raise TypeError(f"register_distance: formula is {formula!r}; expected a function of two sides")
    if points not in get_args(Points):
        raise ValueError(f"register_distance: points is {points!r}, expected one of {', '.join(get_args(Points))}")
    claim_name("distance", name, DISTANCES, formula)
    DISTANCES[name] = closed_form(formula, name=name, points=points, symmetric=symmetric, lift=lift)
    return DISTANCES[name]


__all__ = [
    "DEFAULT_MEMORY_MB",
    "DISTANCES",
    "Distance",
    "Lift",
    "csd",
    "csd_matrix",
    "get_distance",
    "reduce_sample_distances",
    "register_distance",
    "sampled",
    "seeded_samples",
    "squared_l2_matrix",
]
