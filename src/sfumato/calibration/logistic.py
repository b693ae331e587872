"""Logistic regression in NumPy: the one solver of every fitted probability, and the formula of a score calibrator.

:mod:`~sfumato.calibration.score_lists` has the formula in words. NumPy is all that it needs.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.arrays import sigmoid

Floats = npt.NDArray[np.float64]

_MAX_STEPS, _TOLERANCE = 100, 1e-18

_SMALL = 1e-9
"""Standard deviation, as a fraction of the largest number, below which numbers count as equal."""


def log_losses(logit: Floats, target: Floats) -> Floats:
    """(k,) log losses. logit (k,), target (k,) 0 to 1."""
    return np.logaddexp(0, logit) - target * logit


def deviations(x: Floats) -> Floats:
    """(f,) standard deviations of the columns of x (n, f); infinite where rounding alone tells numbers apart.

    Divided by it, such a column is 0, and so is its weight.
    """
    found = x.std(0)
    return np.where(found > _SMALL * np.abs(x).max(0, initial=0), found, np.inf)


def newton(
    x: Floats, target: Floats, weight: Floats, ridge: Floats, start: Floats, *, centre: Floats, offset: Floats
) -> Floats:
    r"""The parameters p that minimise sum(weight * log loss of offset + x p) + sum(ridge * (p - centre)^2) / 2.

    The problem is convex. Newton steps are halved until the objective falls, so that every step is an improvement. Use
    standardised features: the solver does not scale them.

    x (k, f), target (k,) 0 to 1, weight (k,), offset (k,); ridge, start and centre (f,).
    """

    def objective(parameters: Floats) -> float:
        losses = log_losses(offset + x @ parameters, target)
        return float(weight @ losses + ridge @ (parameters - centre) ** 2 / 2)

    found, value = start, objective(start)
    for _ in range(_MAX_STEPS):
        p = sigmoid(offset + x @ found)
        gradient = x.T @ (weight * (p - target)) + ridge * (found - centre)
        hessian = (x * (weight * p * (1 - p))[:, None]).T @ x + np.diag(ridge)
        # Features may be linear in each other.
        hessian[np.diag_indices(len(ridge))] += 1e-13 * hessian.diagonal().mean() + 1e-300
        step = np.linalg.solve(hessian, gradient)
        if gradient @ step <= _TOLERANCE * weight.sum():
            break
        size = 1.0
        while size > 1e-6 and not (new := objective(found - size * step)) < value:
            size /= 2
        if size <= 1e-6:
            break
        found, value = found - size * step, new
    return found


SHAPE = ("gap", "order", "lead", "height", "crowd")
"""Features of a hit in its list."""

SEGMENTS = ("low", "middle", "high")
"""The score below the first knot, between the knots, and above the second."""

_RISING = frozenset(("gap", "order", *SEGMENTS))
"""Features that rise with the score of the hit: their weights are not negative."""

_FOLDS, _FEWEST = 5, 20
"""Folds for the decision whether scores are comparable, and lists below which it is not made."""


@dataclass(frozen=True, eq=False)
class HitLists:
    """Hits ordered by list, then by falling score."""

    order: npt.NDArray[np.intp]  # (n,) positions of the hits in the input
    start: npt.NDArray[np.intp]  # (q,) first hit of each list
    list_of: npt.NDArray[np.intp]  # (n,) the list of each hit
    place: npt.NDArray[np.intp]  # (q,) of each list in the order of their names, which no order of the input changes
    score: Floats  # (n,)
    evidence: Floats  # (n, e) further columns

    @classmethod
    def of(cls, score: Floats, groups: npt.NDArray[Any], evidence: Floats) -> "HitLists":
        """The lists in the order of their first hits."""
        first, inverse = np.unique(groups, return_index=True, return_inverse=True)[1:]
        place = np.empty(len(first), np.intp)
        place[first.argsort()] = np.arange(len(first))
        number = place[inverse.reshape(-1)]
        order = np.lexsort((-score, number))
        start = np.searchsorted(number[order], np.arange(len(first)))
        return cls(order, start, number[order], first.argsort(), score[order], evidence[order])

    def is_upside_down(self, label: Floats) -> bool:
        """Whether matches have smaller scores than the others of their lists, by more than two standard errors."""
        match, other = label == 1, (label == 0).astype(np.float64)
        before = np.cumsum(other) - other
        above = self.sums(match * (before - before[self.start][self.list_of]))
        pairs = self.sums(match.astype(np.float64)) * self.sums(other)
        differ = np.maximum.reduceat(self.score, self.start) > np.minimum.reduceat(self.score, self.start)
        known = (pairs > 0) & differ
        if known.sum() < 2:
            return False
        share = above[known] / pairs[known]
        return bool(share.mean() - 2 * share.std() / math.sqrt(len(share)) > 0.5)

    def sums(self, values: Floats) -> Floats:
        """(q,) sums over each list. values (n,)."""
        return np.add.reduceat(values, self.start) if len(values) else np.empty(0)

    def rank(self) -> Floats:
        """(n,) one more than the number of larger scores in the list."""
        new = np.ones(len(self.score), bool)
        new[1:] = (self.score[1:] != self.score[:-1]) | (self.list_of[1:] != self.list_of[:-1])
        first = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
        return (first - self.start[self.list_of] + 1).astype(np.float64)

    def shape(self) -> Floats:
        """(n, 5) the features SHAPE."""
        size = np.diff(np.append(self.start, len(self.score)))
        top, second = self.score[self.start], self.score[self.start + (size > 1)]
        away = self.score - top[self.list_of]
        mean = self.sums(away) / size
        deviation = np.sqrt(self.sums((away - mean[self.list_of]) ** 2) / size)
        deviation = np.where(deviation > _SMALL * np.abs(top), deviation, 1.0)
        gap = away / deviation[self.list_of]
        of_list = (top - second) / deviation, -mean / deviation, -np.log(self.sums(np.exp(gap)))
        return np.stack([gap, -np.log(self.rank()), *(value[self.list_of] for value in of_list)], axis=1)

    def features(self, knots: tuple[float, float] | None) -> Floats:
        """(n, f) SHAPE, SEGMENTS if there are knots, and the evidence."""
        columns = [self.shape()]
        if knots is not None:
            low, high = knots
            score = self.score
            columns += [np.minimum(score, low), np.clip(score, low, high) - low, np.maximum(score, high) - high]
        return np.column_stack([*columns, self.evidence])

    def summary(self, logit: Floats) -> Floats:
        """(q, 2) the largest logit of each list, and the logarithm of its expected matches. logit (n,)."""
        expected = np.maximum(self.sums(sigmoid(logit)), 1e-12)
        return np.stack([np.maximum.reduceat(logit, self.start), np.log(expected)], axis=1)


@dataclass(frozen=True)
class ScoreFormula:
    """A fitted formula: the logit is the intercept plus the weighted features."""

    weights: Mapping[str, float]  # by feature: of SHAPE, of SEGMENTS, and "evidence 1", ...
    intercept: float
    knots: tuple[float, float] | None  # of SEGMENTS; None if scores of different queries are not comparable
    nothing: tuple[float, float, float]  # intercept, and weights of the first hit's logit and of log(expected matches)

    @property
    def n_evidence(self) -> int:
        """Number of further columns."""
        return sum(name.startswith("evidence") for name in self.weights)

    def logit(self, lists: HitLists) -> Floats:
        """(n,) logits of hits, in the order of the lists."""
        return np.asarray(self.intercept + lists.features(self.knots) @ np.array(list(self.weights.values())))

    def nothing_matches(self, lists: HitLists, logit: Floats) -> Floats:
        """(q,) probabilities that no hit of a list matches. logit (n,)."""
        summary = lists.summary(logit)
        return sigmoid(np.minimum(self.nothing[0] + summary @ np.array(self.nothing[1:]), -summary[:, 0]))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self) | {"weights": dict(self.weights)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ScoreFormula":
        """The reverse; it raises an error if the values are not such."""
        weights = {str(name): float(weight) for name, weight in values["weights"].items()}
        knots = None if values["knots"] is None else (float(values["knots"][0]), float(values["knots"][1]))
        own = [name for name in weights if not name.startswith("evidence")]
        if own != [*SHAPE, *(SEGMENTS if knots else ())]:
            raise ValueError(f"unknown features {own}")
        a, b, c = map(float, values["nothing"])
        numbers = (*weights.values(), *(knots or ()), float(values["intercept"]), a, b, c)
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a number is not finite")
        return cls(weights, float(values["intercept"]), knots, (a, b, c))


@cache
def priors() -> dict[str, ScoreFormula]:
    """The formulas that come with the package, by kind of score."""
    text = resources.files("sfumato.calibration").joinpath("score_priors.json").read_text(encoding="utf-8")
    return {kind: ScoreFormula.from_json(values) for kind, values in json.loads(text).items()}


def fit_formula(
    lists: HitLists, label: Floats, *, comparable: bool | str, penalty: float, prior: ScoreFormula | None
) -> ScoreFormula:
    """Fit on lists with labels 0, 1 and NaN, in their order; "auto" decides whether scores are comparable."""
    if isinstance(comparable, str):
        comparable = _is_comparable(lists, label, penalty, prior)
    low, high = np.quantile(lists.score[lists.start], [1 / 3, 2 / 3]).tolist()
    knots = (low, high) if comparable and low < high else None
    names = [*SHAPE, *(SEGMENTS if knots else ()), *(f"evidence {i}" for i in range(1, lists.evidence.shape[1] + 1))]
    features = lists.features(knots)
    centre = np.array([0.0 if prior is None else prior.weights.get(name, 0.0) for name in names])
    rising = np.array([name in _RISING for name in names])
    judged, label = ~np.isnan(label), np.nan_to_num(label)
    weights, intercept = _regression(features, label, judged / lists.rank(), penalty, centre, rising)
    has = lists.sums(label) > 0
    known = np.where(has, 1.0, lists.sums(1.0 - judged) == 0)  # Else one that nobody judged may match.
    summary = lists.summary(intercept + features @ weights)
    empty = (np.where(has, 0.0, 1.0) * len(has) + 0.5) / (len(has) + 1)  # As if one list more were half empty.
    slopes, start = _regression(summary, empty, known, penalty, np.array([-1.0, 0.0]))
    nothing = start, float(slopes[0]), float(slopes[1])
    return ScoreFormula(dict(zip(names, weights.tolist(), strict=True)), intercept, knots, nothing)


def _is_comparable(lists: HitLists, label: Floats, penalty: float, prior: ScoreFormula | None) -> bool:
    """Whether the log loss of held-out lists is lower with the scores themselves, by more than a standard error."""
    q = len(lists.start)
    if q < _FEWEST:
        return False
    fold = (np.random.default_rng(0).permutation(q) % _FOLDS)[lists.place]
    better = np.zeros(q)
    for k in range(_FOLDS):
        inside = fold[lists.list_of] != k
        if not 0 < np.nanmean(label[inside]) < 1:
            return False
        part = HitLists.of(lists.score[inside], lists.list_of[inside], lists.evidence[inside])
        for sign, comparable in ((1, False), (-1, True)):
            formula = fit_formula(part, label[inside], comparable=comparable, penalty=penalty, prior=prior)
            loss = lists.sums(np.nan_to_num(log_losses(formula.logit(lists), label)) / lists.rank())
            better += sign * np.where(fold == k, loss, 0)
    return bool(better.mean() > better.std() / math.sqrt(q))


def _regression(
    features: Floats,
    label: Floats,
    weight: Floats,
    penalty: float,
    centre: Floats,
    rising: npt.NDArray[np.bool_] | None = None,
) -> tuple[Floats, float]:
    """Weights and intercept of a logistic regression whose ridge penalty is around a centre.

    The penalty is on weights of standardised features. A rising feature whose weight would be negative is left out,
    the most negative first.

    features (n, f), label (n,), weight (n,), centre (f,), rising (f,).
    """
    mean, deviation = features.mean(0), deviations(features)
    columns = np.concatenate([(features - mean) / deviation, np.ones((len(features), 1))], axis=1)
    start = np.append(centre * np.where(np.isfinite(deviation), deviation, 0.0), 0.0)
    ridge = np.append(np.full(features.shape[1], penalty), 1e-9)
    none = np.zeros(len(label))
    used = np.ones(len(start), bool)
    while True:
        solution = np.where(used, start, 0.0)
        own = start[used]
        solution[used] = newton(columns[:, used], label, weight, ridge[used], own, centre=own, offset=none)
        wrong = np.zeros(len(start), bool) if rising is None else np.append(rising, False) & (solution < 0)
        if not wrong.any():
            break
        used[np.where(wrong, solution, 0.0).argmin()] = False
    weights = solution[:-1] / deviation
    return weights, float(solution[-1] - mean @ weights)
