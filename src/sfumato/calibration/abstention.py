"""Guarantees on new queries: conformal sets, and distance limits for a wanted precision or risk.

Several limits are tested, each at the level (1 - confidence) divided by their number. So all limits that pass are valid
simultaneously, and the loosest of them is used.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Literal

import numpy as np

from sfumato.calibration.query_scores import QueryScores, limits_of
from sfumato.metrics.reliability import betting_p_value, binomial_tail, mean_loss_p_value


def conformal_radius(scores: QueryScores, alpha: float, *, contains: Literal["any", "all"] = "any") -> float:
    """Distance within which a query's match lies with a probability of at least 1 - alpha.

    Split conformal prediction: the ceil((q + 1)(1 - alpha))-th smallest of q held-out scores. The probability is over
    the held-out queries and the new one, which must be exchangeable; equal scores only raise it. With groups of queries
    the groups must be exchangeable, and the queries within a group; each group counts once, a query of it in part.

    Paper: Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005; Papadopoulos et al., ECML 2002;
        groups: Lee, Barber and Willett, "Distribution-free inference with hierarchical data", 2023.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"conformal_radius: alpha must be between 0 and 1, got {alpha}")
    if contains not in ("any", "all"):
        raise ValueError(f"conformal_radius: contains must be 'any' or 'all', got {contains!r}")
    values, groups = np.array(scores.closest_match if contains == "any" else scores.farthest_match), scores.groups
    order, sizes = np.argsort(values, kind="stable"), np.bincount(groups)
    # Each group has the weight 1, and the new query's group too, at infinity.
    weight = np.cumsum(1 / sizes[groups[order]])
    rank = int(np.searchsorted(weight, (len(sizes) + 1) * (1 - alpha) - 1e-9))
    return float(values[order[rank]]) if rank < len(values) else math.inf


def precision_limit(scores: QueryScores, precision: float, *, confidence: float = 0.9) -> float:
    """The loosest distance below which items have the wanted precision.

    The precision is the mean, over the queries with an item below the limit, of the fraction of true matches among
    their items below the limit; with groups of queries the mean over the groups. A limit passes with a
    Hoeffding-Bentkus p-value.
    """
    _check_open("precision", precision)
    _check_open("confidence", confidence)
    answered = [len(np.unique(scores.groups[scores.nearest < limit])) for limit in scores.limits]
    level = (1 - confidence) / len(answered)

    limits = sorted(zip(scores.limits.tolist(), answered, scores.precision, strict=True), reverse=True)

    def loosest(wanted: float) -> float | None:
        passing = (limit for limit, n, value in limits if mean_loss_p_value(1 - value, n, 1 - wanted) <= level)
        return next(passing, None)

    if (found := loosest(precision)) is None:
        best = _strictest(lambda allowed: loosest(1 - allowed) is not None, 1 - precision)
        raise ValueError(
            f"threshold: no limit has a precision of {precision:g} with confidence {confidence:g} on"
            f" {len(scores.nearest)} held-out queries;"
            + ("" if best is None else f" the largest that works is {1 - best:.2f};")
            + " give a lower precision, or calibrate on more queries"
        )
    return found


def answer_limit(scores: QueryScores, risk: float, *, confidence: float = 0.9, absent: float = 0.0) -> float:
    """The loosest distance of the closest item below which queries can be answered.

    Risk is the fraction of answered queries whose closest item is no match. A limit passes with an exact binomial
    p-value; with groups of queries, where the groups are independent and count alike, with the p-value of a bet on
    their means (:func:`~sfumato.metrics.reliability.betting_p_value`). A query whose closest item is farther than
    that of every held-out query is never answered, because no held-out query gives evidence for it.
    """
    _check_open("risk", risk)
    _check_open("confidence", confidence)
    nearest, right = _with_absent(scores, absent)
    limits = sorted(limits_of(nearest).tolist(), reverse=True)
    level = (1 - confidence) / len(limits)

    def loosest(allowed: float) -> float | None:
        passing = (x for x in limits if _risk_p_value(nearest < x, ~right, allowed, scores.groups) <= level)
        return next(passing, None)

    if (found := loosest(risk)) is None:
        best = _strictest(lambda allowed: loosest(allowed) is not None, risk)
        raise ValueError(
            f"abstention: no limit has a risk of at most {risk:g} with confidence {confidence:g} on {len(nearest)}"
            " held-out queries;"
            + ("" if best is None else f" the smallest that works is {best:.2f};")
            + " allow more risk, or calibrate on more queries"
        )
    return found


def _strictest(works: Callable[[float], bool], above: float) -> float | None:
    """The smallest hundredth above a level that works, by bisection; None if none does."""
    levels = [k / 100 for k in range(1, 100) if k / 100 > above]
    if not levels or not works(levels[-1]):
        return None
    return levels[bisect_left(levels, True, key=works)]


def answered_fraction(scores: QueryScores, limit: float, *, absent: float = 0.0) -> float:
    """Fraction of the held-out queries that are answered under a limit."""
    nearest, _ = _with_absent(scores, absent)
    return float(_below(nearest, np.array([limit]))[0]) / len(nearest)


def _risk_p_value(answered: np.ndarray, wrong: np.ndarray, risk: float, groups: np.ndarray) -> float:
    """The p-value of "the risk of the answered queries exceeds the allowed one"."""
    sizes = np.bincount(groups)
    if len(sizes) == len(groups):
        return binomial_tail(int((answered & wrong).sum()), int(answered.sum()), risk)
    # Of each group: the fraction of wrong answers minus the allowed one, raised by risk, so in [0, 1].
    excess = np.bincount(groups, np.where(answered, wrong - risk, 0.0)) / sizes
    return betting_p_value(excess + risk, risk)


def _below(values: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Number of values strictly below each limit."""
    counts: np.ndarray = np.searchsorted(np.sort(values), limits, side="left")
    return counts


def _with_absent(scores: QueryScores, absent: float) -> tuple[np.ndarray, np.ndarray]:
    """((q,) distance to the closest item, (q,) whether it is a match), some queries without matches; a tie is wrong."""
    if not 0 <= absent < 1:
        raise ValueError(f"abstention: absent must be at least 0 and below 1, got {absent}")
    match, other = np.array(scores.closest_match), np.array(scores.closest_other)
    gone = np.random.default_rng(0).random(len(match)) < absent
    return np.where(gone, other, np.minimum(match, other)), (match < other) & ~gone


def _check_open(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"calibration: {name} must be between 0 and 1, got {value}")
