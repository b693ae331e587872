"""Bootstrap intervals of any figure over queries, selective prediction (how well an uncertainty predicts errors), and
correlations with an uncertainty.

A statistic is a function of the count of each query in a resample, so that a thousand resamples need only one sort: see
:data:`Statistic` and :func:`bootstrap`; :func:`on_all` is its value. The inputs are arrays with one number for each
query.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]
"""(b, n) float64 counts, whole numbers: how often each of n queries is in each of b resamples -> (b,) values, NaN where
undefined."""


@dataclass(frozen=True)
class Interval:
    """A value with its bootstrap confidence interval."""

    value: float | None
    low: float | None
    high: float | None


def mean_statistic(values: np.ndarray, weight: np.ndarray | None = None) -> Statistic:
    """The mean of values, to be resampled. values (n,), weight (n,).

    With weights of one over the probability that a value is sampled, it is the estimate of Hajek (1971).
    """
    values = np.asarray(values, float)
    weight = np.ones_like(values) if weight is None else np.asarray(weight, float)

    def statistic(counts: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.asarray(counts @ (weight * values) / (counts @ weight), float)

    return statistic


def remembered(statistic: Statistic) -> Statistic:
    """A statistic that is computed once for the same array of counts, if others are made of it."""
    last: list[np.ndarray] = []

    def once(counts: np.ndarray) -> np.ndarray:
        if not last or last[0] is not counts:
            last[:] = counts, statistic(counts)
        return last[1]

    return once


def bootstrap(
    statistics: Mapping[str, Statistic],
    n: int,
    *,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    groups: np.ndarray | None = None,
    max_counts: int = 2**20,
) -> dict[str, Interval]:
    """Percentile confidence intervals of several statistics from the same resamples of n queries, with replacement.

    Paper: Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13.

    groups (n,).
    """
    if groups is not None and len(groups) != n:
        raise ValueError(f"bootstrap: got {len(groups)} groups for {n} queries; give one for each")
    whole = {name: on_all(statistic, n) for name, statistic in statistics.items()}
    which = np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]
    units = int(which.max()) + 1 if n else 0
    random = np.random.default_rng(seed)
    resampled: dict[str, list[np.ndarray]] = {name: [] for name in statistics}
    step = max(1, max_counts // max(n, 1))
    for start in range(0, n_resamples if n else 0, step):
        b = min(step, n_resamples - start)
        picked = random.integers(units, size=(b, units)) + units * np.arange(b)[:, None]
        times = np.bincount(picked.ravel(), minlength=b * units).reshape(b, units)
        counts = (times if groups is None else times[:, which]).astype(float)
        for name, statistic in statistics.items():
            resampled[name].append(statistic(counts))
    every = {name: np.concatenate(parts or [np.empty(0)]) for name, parts in resampled.items()}
    return {name: percentile_interval(whole[name], values, level) for name, values in every.items()}


def percentile_interval(value: float, resampled: np.ndarray, level: float = 0.95) -> Interval:
    """The interval between the percentiles of resampled values. resampled (b,)."""
    if np.isnan(value):
        return Interval(None, None, None)
    defined = resampled[~np.isnan(resampled)]
    if len(defined) == 0 or 2 * len(defined) < len(resampled):
        return Interval(float(value), None, None)
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))


def on_all(statistic: Statistic, n: int) -> float:
    """The value of a statistic on the data without resampling."""
    return float(statistic(np.ones((1, n)))[0])


# ---------------------------------------------------------------- correlations
def average_ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values get the mean of their ranks. x (n,) -> (n,)."""
    _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[which]


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson correlation. x, y (n,)."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman rank correlation, ties by average ranks. x, y (n,)."""
    return pearson(average_ranks(np.asarray(x)), average_ranks(np.asarray(y)))


def balanced_spearman(
    x: np.ndarray, multiplicity: np.ndarray, *, per_bin: int = 20, n_sets: int = 200, seed: int = 0
) -> float:
    """Spearman correlation with a multiplicity, over sets with about equal numbers of items in each power of two.

    Most tags match one or two concepts, so ambiguous tags have little weight in a plain correlation. Items are binned
    by floor(log2(multiplicity)). A set takes at most per_bin random items of each bin; the correlations of n_sets sets
    are averaged.

    x (n,), multiplicity (n,).
    """
    x, multiplicity = np.asarray(x, float), np.asarray(multiplicity)
    if len(multiplicity) and multiplicity.min() < 1:
        raise ValueError(f"balanced_spearman: multiplicities must be at least 1, got {multiplicity.min()}")
    bins = np.floor(np.log2(multiplicity)).astype(int)
    members = [np.flatnonzero(bins == b) for b in np.unique(bins)]
    if len(members) < 2:
        return float("nan")
    random = np.random.default_rng(seed)
    sets = (np.concatenate([random.permutation(m)[:per_bin] for m in members]) for _ in range(n_sets))
    return float(np.mean([spearman(x[chosen], multiplicity[chosen]) for chosen in sets]))


def resampled_balanced_spearman(
    scores: Mapping[str, np.ndarray],
    multiplicity: np.ndarray,
    *,
    per_bin: int = 20,
    n_resamples: int = 1000,
    n_sets: int = 10,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Resampled values of :func:`balanced_spearman`, for :func:`percentile_interval`.

    Queries are resampled within each power of two of the multiplicity, so that every resample has all of these bins.
    From each resample n_sets balanced sets are taken instead of 200.

    multiplicity (n,) -> (b,).
    """
    multiplicity = np.asarray(multiplicity)
    bins = np.floor(np.log2(multiplicity)).astype(int)
    members = [np.flatnonzero(bins == k) for k in np.unique(bins)]
    if len(members) < 2:
        return {name: np.full(n_resamples, np.nan) for name in scores}
    random = np.random.default_rng(seed)
    parts = []
    for own in members:
        resample = own[random.integers(len(own), size=(n_resamples, len(own)))]
        size = min(per_bin, len(own))
        # A resample is in random order, so its consecutive parts (with wrap-around) are random sets.
        positions = (np.arange(n_sets)[:, None] * size + np.arange(size)) % len(own)
        parts.append(resample[:, positions])
    together = np.concatenate(parts, axis=2)
    chosen = together.reshape(n_resamples * n_sets, together.shape[2])  # With -1, no resample would have no shape.
    ground_truth = _row_ranks(multiplicity, chosen)
    found = {name: _row_pearson(_row_ranks(x, chosen), ground_truth) for name, x in scores.items()}
    return {name: values.reshape(n_resamples, n_sets).mean(1) for name, values in found.items()}


def _row_ranks(x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Average ranks from 0 within each row of x[chosen]. x (n,), chosen (r, k) -> (r, k)."""
    row = np.arange(len(chosen))[:, None]
    every = average_ranks((average_ranks(x)[chosen] + row * len(x)).ravel())
    return np.asarray(every.reshape(chosen.shape) - row * chosen.shape[1])


def _row_pearson(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    variances = (a * a).sum(1) * (b * b).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(variances > 0, (a * b).sum(1) / np.sqrt(variances), np.nan), float)


def none_if_nan(value: float) -> float | None:
    """None for an undefined number: JSON has no NaN."""
    return None if np.isnan(value) else value


# ---------------------------------------------------------------- wrong answers by uncertainty
def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """Probability that a positive item has a higher score than a negative one; ties count one half.

    score (n,), positive (n,).
    """
    return on_all(auroc_statistic(score, positive), len(score))


def auroc_statistic(score: np.ndarray, positive: np.ndarray) -> Statistic:
    """:func:`auroc` as a statistic for the bootstrap."""
    score, positive = _checked(score, positive, "auroc")
    if not np.isin(positive, (0.0, 1.0)).all():
        raise ValueError("auroc: positive must be 0 or 1 (or bool) for every item")
    order, starts = _groups(score)
    sign = positive[order]

    def statistic(counts: np.ndarray) -> np.ndarray:
        resampled = counts[:, order]
        above, below = _sums(resampled * sign, starts), _sums(resampled * (1 - sign), starts)
        before = np.cumsum(below, axis=1) - below / 2
        with np.errstate(invalid="ignore"):
            return _array((above * before).sum(1) / (above.sum(1) * below.sum(1)))

    return statistic


def paired_auroc(low: np.ndarray, high: np.ndarray) -> Statistic:
    """AUROC of the second score of each query against its first; both scores of a query are resampled together."""
    statistic = auroc_statistic(np.concatenate([low, high]), np.repeat([0, 1], len(low)))
    return lambda counts: statistic(np.tile(counts, 2))


def aurc_statistic(uncertainty: np.ndarray, error: np.ndarray) -> Statistic:
    """Area under the risk-coverage curve: the mean, over k = 1..n, of the mean error of the k most certain items.

    Equal uncertainties have the expected error of any order of them.

    Paper: Geifman, Uziel and El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019.

    uncertainty (n,), error (n,).
    """
    uncertainty, error = _checked(uncertainty, error, "aurc")
    order, starts = _groups(uncertainty)
    ordered = error[order]

    def statistic(counts: np.ndarray) -> np.ndarray:
        resampled = counts[:, order]
        w, e = _sums(resampled, starts), _sums(resampled * ordered, starts)
        end = np.cumsum(w, axis=1)
        errors_before, before = np.cumsum(e, axis=1) - e, end - w
        # In a group of w items with e errors in all, the j-th adds (errors_before + j e / w) / (before + j). The sum
        # over j has a closed form with the harmonic numbers 0, 1, 1 + 1/2, ...
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, int(end.max(initial=0)) + 1))])
        steps = harmonic[end.astype(np.int64)] - harmonic[before.astype(np.int64)]
        rate = np.divide(e, w, out=np.zeros_like(e), where=w > 0)
        with np.errstate(invalid="ignore"):
            return _array(((errors_before - rate * before) * steps + e).sum(1) / w.sum(1))

    return statistic


def risk_coverage_statistics(u: np.ndarray, error: np.ndarray, best: Statistic | None = None) -> dict[str, Statistic]:
    """Three figures that share what they compute; best is the remembered AURC of a perfect order, if it is known.

        e_aurc = aurc - best aurc    (excess area, the paper of aurc_statistic)
        prr = (mean error - aurc) / (mean error - best aurc)    (prediction rejection ratio)

    Paper: Malinin, "Uncertainty estimation in deep learning with application to spoken language assessment", 2019, for
        the ratio.
    """
    own, mean = remembered(aurc_statistic(u, error)), mean_statistic(error)
    least = remembered(aurc_statistic(error, error)) if best is None else best

    def prr(counts: np.ndarray) -> np.ndarray:
        chance, perfect = mean(counts), least(counts)
        # With equal errors the difference is only rounding, and no order has a gain.
        room = np.where(chance - perfect > 1e-12 * np.maximum(1, np.abs(chance)), chance - perfect, np.nan)
        return _array((chance - own(counts)) / room)

    return {"aurc": own, "e_aurc": lambda counts: own(counts) - least(counts), "prr": prr}


def risk_statistic(uncertainty: np.ndarray, error: np.ndarray, coverage: float) -> Statistic:
    """Mean error of the ceil(coverage * n) most certain items; for ties at the limit, the expectation."""
    uncertainty, error = _checked(uncertainty, error, "risk_at_coverage")
    order, starts = _groups(uncertainty)
    ordered = error[order]

    def statistic(counts: np.ndarray) -> np.ndarray:
        resampled = counts[:, order]
        w, e = _sums(resampled, starts), _sums(resampled * ordered, starts)
        wanted = np.ceil(coverage * w.sum(1) - 1e-9)
        with np.errstate(invalid="ignore"):
            return _array(_first(w, e, wanted[:, None])[:, 0] / wanted)

    return statistic


def spearman_statistic(x: np.ndarray, y: np.ndarray) -> Statistic:
    """Spearman rank correlation as a statistic for the bootstrap: ties by average ranks, ranks within the resample.

    x, y (n,).
    """
    x, y = _checked(x, y, "spearman")
    ranks_of = [_ranker(values) for values in (x, y)]

    def statistic(counts: np.ndarray) -> np.ndarray:
        centre = (counts.sum(1, keepdims=True) - 1) / 2
        a, b = (ranks(counts) - centre for ranks in ranks_of)
        weighted = counts * a
        variances = (weighted * a).sum(1) * (counts * b * b).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return _array(np.where(variances > 0, (weighted * b).sum(1) / np.sqrt(variances), np.nan))

    return statistic


def decile_statistic(uncertainty: np.ndarray, hit: np.ndarray, *, n_bins: int = 10) -> Statistic:
    """Pearson correlation of bin number and recall as a statistic for the bootstrap.

    See :class:`~sfumato.metrics.reliability.RecallByUncertainty`.

    uncertainty (n,), hit (n,).
    """
    uncertainty, hit = _checked(uncertainty, hit, "decile_statistic")
    order = np.argsort(uncertainty, kind="stable")
    ordered = hit[order]

    def statistic(counts: np.ndarray) -> np.ndarray:
        resampled = counts[:, order]
        total = resampled.sum(1).astype(np.int64)[:, None]
        number = np.arange(n_bins + 1)
        edges = (number * (total // n_bins) + np.minimum(number, total % n_bins)).astype(float)
        sums = np.diff(_first(resampled, resampled * ordered, edges), axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            recall = sums / np.diff(edges, axis=1)
            a, b = np.arange(n_bins) - (n_bins - 1) / 2, recall - recall.mean(1, keepdims=True)
            norm = np.sqrt((b * b).sum(1) * (a * a).sum())
            return _array(np.where(np.ptp(recall, axis=1) > 0, (b @ a) / norm, np.nan))

    return statistic


def _checked(x: np.ndarray, y: np.ndarray, who: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"{who}: got {x.shape} and {y.shape} values; both must be (n,)")
    if np.isnan(x).any() or np.isnan(y).any():
        raise ValueError(f"{who}: a value is NaN; leave such queries out")
    return x, y


def _groups(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """((n,) ascending order, (g,) start of each group of equal values in this order)."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    new = np.ones(len(values), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(new)


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(b, n) -> (b, g) sums of the groups."""
    return values if len(starts) == values.shape[1] else np.add.reduceat(values, starts, axis=1)


def _first(w: np.ndarray, e: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(b, g) sizes and totals of groups, (b, k) numbers of first items -> (b, k) totals, with groups divided evenly."""
    end, total = np.cumsum(w, axis=1), np.cumsum(e, axis=1)
    rows = np.arange(len(w))
    result = np.zeros(wanted.shape)
    for k in range(wanted.shape[1]):
        group = np.minimum((end < wanted[:, k : k + 1]).sum(1), w.shape[1] - 1)
        size, own = w[rows, group], e[rows, group]
        inside = np.divide(own, size, out=np.zeros_like(own), where=size > 0) * (wanted[:, k] - end[rows, group] + size)
        result[:, k] = total[rows, group] - own + inside
    return result


def _ranker(values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """(b, n) counts -> (b, n) average ranks from 0 of each item within its resample."""
    order, starts = _groups(values)
    which = np.empty(len(values), np.int64)
    which[order] = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(values))))

    def ranks(counts: np.ndarray) -> np.ndarray:
        w = _sums(counts[:, order], starts)
        return _array((np.cumsum(w, axis=1) - (w + 1) / 2)[:, which])

    return ranks


def _array(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, float)
