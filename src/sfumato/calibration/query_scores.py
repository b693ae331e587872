"""Scores of held-out queries in a gallery, and the guarantees on new queries that are counted from them.

The guarantees are conformal sets, and distance limits for a wanted precision or risk. Several limits are tested, each
at the level (1 - confidence) divided by their number. So all limits that pass are valid simultaneously, and the loosest
of them is used.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from sfumato.arrays import Array, as_numpy
from sfumato.metrics.reliability import betting_p_value, binomial_tail, mean_loss_p_value

N_STEPS = 20
"""Number of limits that are tried for a precision or a risk, at equal steps of the fraction of answered queries."""

NEAR = math.log2(1.25)
"""Largest number of doublings to a gallery of another size, within which means of scores are compared."""

_PER_QUERY = ("closest_match", "farthest_match", "closest_other")
_PLAIN = ("n_gallery", "n_left_out", "matches_per_query", "growth", "precision")


@dataclass(frozen=True)
class QueryScores:
    """The scores of held-out queries of one direction in a gallery, the basis of every guarantee.

    Attributes:
        n_gallery: number of items m of the gallery.
        n_left_out: number of queries without a match in it, which no search can answer; they are not in the lists
            below.
        matches_per_query: mean number of true matches R.
        growth: exponent g of how R grows with the gallery, R ~ m^g: 0 if a larger gallery has no further matches of a
            query.
        closest_match, farthest_match: (q,) distance of each query to its closest and its farthest true match.
        closest_other: (q,) distance to the closest item that is no match; infinite if all are.
        precision: (N_STEPS,) for each of :attr:`limits` the mean, over the queries with an item below it, of the
            fraction of true matches among the items below it. With groups the mean over the groups of their means.
        group: (q,) queries with equal numbers are not independent, like the captions of one image; empty if all are.
    """

    n_gallery: int
    n_left_out: int
    matches_per_query: float
    growth: float
    closest_match: tuple[float, ...]
    farthest_match: tuple[float, ...]
    closest_other: tuple[float, ...]
    precision: tuple[float, ...]
    group: tuple[int, ...] = ()

    def __repr__(self) -> str:
        sizes = f"{len(self.closest_match)} queries, {self.n_gallery} items"
        return f"QueryScores({sizes}, {self.matches_per_query:.2f} matches per query)"

    @classmethod
    def fit(
        cls, distance: Array, match: Array, *, growth: float | None = None, group: np.ndarray | None = None
    ) -> "QueryScores":
        """Scores from all distances between some queries and a gallery.

        Args:
            distance: (q, m) smaller is closer, a tensor or an array; kept in float32.
            match: (q, m) bool, or 0 and 1.
            growth: see :class:`QueryScores`; None measures it by halving the gallery in expectation.
            group: (q,) see :class:`QueryScores`; None if all queries are independent.

        Returns:
            The scores of the queries with a match.

        Raises:
            ValueError: shapes differ, a distance is not finite, labels are not 0 and 1, or no query has a match.
        """
        d, y = as_numpy(distance, "distance", "QueryScores"), as_numpy(match, "match", "QueryScores")
        return cls.from_blocks(lambda: [(d, y)], growth=growth, group=group)

    @classmethod
    def from_blocks(
        cls,
        blocks: Callable[[], Iterable[tuple[Array, Array]]],
        *,
        growth: float | None = None,
        group: np.ndarray | None = None,
    ) -> "QueryScores":
        """Scores from distances that do not fit into memory, see :meth:`fit`.

        Args:
            blocks: called twice; gives (distance, match) of a few queries at a time, always to the whole gallery.
            growth, group: see :meth:`fit`.

        Returns:
            The scores of the queries with a match.

        Raises:
            ValueError: as for :meth:`fit`; or there are no blocks, or they are of different galleries.
        """
        parts = [_scores_of(*_checked(distance, match)) for distance, match in blocks()]
        if not parts:
            raise ValueError("QueryScores: got no queries")
        sizes = {m for m, _ in parts}
        if len(sizes) > 1:
            raise ValueError(f"QueryScores: blocks have galleries of {sorted(sizes)} items; they must be of one")
        every = np.concatenate([scores for _, scores in parts], axis=1)
        count, kept = every[0], every[:, every[0] > 0]
        if not kept.shape[1]:
            raise ValueError("QueryScores: no query has a match in the gallery")
        m = sizes.pop()
        if group is not None and len(group) != len(count):
            raise ValueError(f"QueryScores: got {len(group)} groups for {len(count)} queries; give one for each")
        together = np.arange(len(count)) if group is None else np.unique(group, return_inverse=True)[1]
        together = together[count > 0]
        limits = limits_of(np.minimum(kept[1], kept[3]))
        checked = (_checked(distance, match) for distance, match in blocks())
        precision = np.concatenate([_precision(d[y.any(1)], y[y.any(1)], limits) for d, y in checked])
        return cls(
            n_gallery=m, n_left_out=int((count == 0).sum()), matches_per_query=float(kept[0].mean()),
            growth=growth_by_halving(kept[0], m) if growth is None else float(growth),
            **{name: tuple(values.tolist()) for name, values in zip(_PER_QUERY, kept[1:], strict=True)},
            precision=tuple(_mean_of_groups(precision, together).tolist()),
            group=() if group is None else tuple(together.tolist()),
        )  # fmt: skip

    @cached_property
    def nearest(self) -> np.ndarray:
        """(q,) distance of each query to its closest item."""
        return np.minimum(self.closest_match, self.closest_other)

    @cached_property
    def groups(self) -> np.ndarray:
        """(q,) number of the group of each query, from 0 on; each its own if all queries are independent."""
        return np.unique(self.group, return_inverse=True)[1] if self.group else np.arange(len(self.nearest))

    @cached_property
    def limits(self) -> np.ndarray:
        """(N_STEPS,) ascending distances that are tried as limits, see :func:`limits_of`."""
        return limits_of(self.nearest)

    def to_json(self) -> dict[str, Any]:
        """The scores as plain values.

        Returns:
            JSON values; infinite distances become null.
        """
        values = {name: getattr(self, name) for name in (*_PLAIN, "group")}
        for name in _PER_QUERY:  # Each a float32, with the fewest digits that distinguish it from all others.
            values[name] = [None if math.isinf(x) else float(str(np.float32(x))) for x in getattr(self, name)]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "QueryScores":
        """Make scores from plain values, equal bit for bit.

        Args:
            values: output of :meth:`to_json`.

        Returns:
            The scores.

        Raises:
            ValueError: the number of groups is not that of the queries.
        """
        read: dict[str, Any] = {name: values[name] for name in _PLAIN}
        read["precision"], read["group"] = tuple(values["precision"]), tuple(values["group"])
        for name in _PER_QUERY:
            read[name] = tuple(math.inf if x is None else float(np.float32(x)) for x in values[name])
        if len(read["group"]) not in (0, len(read["closest_match"])):
            found = f"got {len(read['group'])} groups for {len(read['closest_match'])} queries"
            raise ValueError(f"QueryScores: {found}; calibrate again")
        return cls(**read)


def growth_by_halving(n_matches: np.ndarray, n_gallery: int) -> float:
    """The growth exponent g of R ~ m^g, from the expected numbers of matches in a random half of the gallery.

    In a random half, queries without a remaining match are left out. The mean number of matches of the others is
    sum(R h / m) / sum(1 - P(no match remains)), with h = m // 2 and a hypergeometric P.

    n_matches (q,).
    """
    half = n_gallery // 2
    if half == 0:
        return 0.0
    r = np.asarray(n_matches).astype(np.int64)
    drawn = np.arange(r.max())  # The j-th match is in the other half, too, of the n_gallery - j items that are left.
    none = np.cumprod(np.maximum(n_gallery - half - drawn, 0) / (n_gallery - drawn))
    fewer = float((r * half / n_gallery).sum() / (1 - np.append(1.0, none)[r]).sum())
    return min(1.0, max(0.0, math.log(float(r.mean()) / fewer) / math.log(n_gallery / half)))


def limits_of(nearest: np.ndarray) -> np.ndarray:
    """The distances that are tested as limits. nearest (q,) -> (N_STEPS,)."""
    ranks = -(-np.arange(1, N_STEPS + 1) * len(nearest) // N_STEPS)
    return np.sort(nearest)[ranks - 1]


def _checked(distance: Array, match: Array) -> tuple[np.ndarray, np.ndarray]:
    """(q, m) float32 distances and bool labels."""
    d, y = as_numpy(distance), as_numpy(match)
    if d.ndim != 2 or d.shape != y.shape:
        raise ValueError(f"QueryScores: got {d.shape} distances and {y.shape} labels; both must be (q, m)")
    if not np.isfinite(d).all():
        raise ValueError("QueryScores: distances must be finite")
    if not ((y == 0) | (y == 1)).all():
        raise ValueError("QueryScores: match must be 0 or 1 (or bool) for every pair")
    return d.astype(np.float32, copy=False), y.astype(bool, copy=False)


def _scores_of(distance: np.ndarray, match: np.ndarray) -> tuple[int, np.ndarray]:
    """(m, (4, q) number of matches, closest match, farthest match, closest other)."""
    rows = [
        match.sum(1),
        np.where(match, distance, np.inf).min(1),
        np.where(match, distance, -np.inf).max(1),
        np.where(match, np.inf, distance).min(1),
    ]
    return distance.shape[1], np.stack(rows).astype(np.float64)


def _precision(distance: np.ndarray, match: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """(q, limits) fraction of matches among the items of each query below each limit; NaN where there is none."""
    at = limits.astype(np.float32)
    row, column = np.nonzero(distance < at[-1])  # Mostly few: the others are below no limit.
    first = row * len(at) + np.searchsorted(at, distance[row, column], side="right")
    right = first[match[row, column]]
    cells = len(distance) * len(at)
    below, right = (np.bincount(which, minlength=cells).reshape(-1, len(at)).cumsum(1) for which in (first, right))
    with np.errstate(invalid="ignore"):
        return np.asarray(right / below)


def _mean_of_groups(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(limits,) mean over groups of the means of their values that are not NaN; 0 where there are none."""
    n = int(groups.max()) + 1
    means = []
    for column in values.T:
        known = ~np.isnan(column)
        count = np.bincount(groups[known], minlength=n)
        total = np.bincount(groups[known], column[known], minlength=n)
        means.append((total[count > 0] / count[count > 0]).mean() if known.any() else 0.0)
    return np.array(means)


# ---------------------------------------------------------------- guarantees
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
    _check_open(precision=precision, confidence=confidence)
    answered = [len(np.unique(scores.groups[scores.nearest < limit])) for limit in scores.limits]
    level = (1 - confidence) / len(answered)

    limits = sorted(zip(scores.limits.tolist(), answered, scores.precision, strict=True), reverse=True)

    def loosest(wanted: float) -> float | None:
        return next((limit for limit, n, p in limits if mean_loss_p_value(1 - p, n, 1 - wanted) <= level), None)

    if (limit := loosest(precision)) is None:
        best = _strictest(lambda allowed: loosest(1 - allowed) is not None, 1 - precision)
        found = f"a precision of {precision:g} with confidence {confidence:g} on {len(scores.nearest)} held-out queries"
        most = "" if best is None else f" the largest that works is {1 - best:.2f};"
        raise ValueError(f"threshold: no limit has {found};{most} give a lower precision, or calibrate on more queries")
    return limit


def answer_limit(scores: QueryScores, risk: float, *, confidence: float = 0.9, absent: float = 0.0) -> float:
    """The loosest distance of the closest item below which queries can be answered.

    Risk is the fraction of answered queries whose closest item is no match. A limit passes with an exact binomial
    p-value; with groups of queries, where the groups are independent and count alike, with the p-value of a bet on
    their means (:func:`~sfumato.metrics.reliability.betting_p_value`). A query whose closest item is farther than
    that of every held-out query is never answered, because no held-out query gives evidence for it.
    """
    _check_open(risk=risk, confidence=confidence)
    nearest, right = _with_absent(scores, absent)
    limits = sorted(limits_of(nearest).tolist(), reverse=True)
    level = (1 - confidence) / len(limits)

    def loosest(allowed: float) -> float | None:
        return next((x for x in limits if _risk_p_value(nearest < x, ~right, allowed, scores.groups) <= level), None)

    if (limit := loosest(risk)) is None:
        best = _strictest(lambda allowed: loosest(allowed) is not None, risk)
        found = f"a risk of at most {risk:g} with confidence {confidence:g} on {len(nearest)} held-out queries"
        least = "" if best is None else f" the smallest that works is {best:.2f};"
        raise ValueError(f"abstention: no limit has {found};{least} allow more risk, or calibrate on more queries")
    return limit


def _strictest(works: Callable[[float], bool], above: float) -> float | None:
    """The smallest hundredth above a level that works, by bisection; None if none does."""
    levels = [k / 100 for k in range(1, 100) if k / 100 > above]
    if not levels or not works(levels[-1]):
        return None
    return levels[bisect_left(levels, True, key=works)]


def answered_fraction(scores: QueryScores, limit: float, *, absent: float = 0.0) -> float:
    """Fraction of the held-out queries that are answered under a limit."""
    nearest, _ = _with_absent(scores, absent)
    return float((nearest < limit).sum()) / len(nearest)


def _risk_p_value(answered: np.ndarray, wrong: np.ndarray, risk: float, groups: np.ndarray) -> float:
    """The p-value of "the risk of the answered queries exceeds the allowed one"."""
    sizes = np.bincount(groups)
    if len(sizes) == len(groups):
        return binomial_tail(int((answered & wrong).sum()), int(answered.sum()), risk)
    # Of each group: the fraction of wrong answers minus the allowed one, raised by risk, so in [0, 1].
    excess = np.bincount(groups, np.where(answered, wrong - risk, 0.0)) / sizes
    return betting_p_value(excess + risk, risk)


def _with_absent(scores: QueryScores, absent: float) -> tuple[np.ndarray, np.ndarray]:
    """((q,) distance to the closest item, (q,) whether it is a match), some queries without matches; a tie is wrong."""
    if not 0 <= absent < 1:
        raise ValueError(f"abstention: absent must be at least 0 and below 1, got {absent}")
    match, other = np.array(scores.closest_match), np.array(scores.closest_other)
    gone = np.random.default_rng(0).random(len(match)) < absent
    return np.where(gone, other, np.minimum(match, other)), (match < other) & ~gone


def _check_open(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1:
            raise ValueError(f"calibration: {name} must be between 0 and 1, got {value}")
