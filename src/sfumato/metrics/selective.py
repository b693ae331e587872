"""Can an uncertainty tell what goes wrong? AUROC, risk against coverage, and bootstrap intervals of any such figure.

It knows arrays with one number for each query, and nothing of models. A statistic that is to be resampled is a function of how often
each query was drawn, so that a thousand resamples cost one sort: see :data:`Statistic` and :func:`bootstrap`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]
"""(b, n) float64 counts, whole numbers: how often each of n queries was drawn in each of b resamples -> (b,) values, NaN where
undefined."""

_CHUNK = 2**20


@dataclass(frozen=True)
class Interval:
    """A figure with its bootstrap confidence interval.

    Attributes:
        value: on the data as it is; None where it is undefined, as for a constant.
        low, high: percentiles over the resamples; None where value is, or where most resamples are undefined.
    """

    value: float | None
    low: float | None
    high: float | None


def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """Probability that a positive item has a higher score than a negative one; ties count one half.

    Args:
        score: (n,) higher should mean positive.
        positive: (n,) bool, or 0 and 1.

    Returns:
        A number in [0, 1], 0.5 for chance; NaN if there are only positives or only negatives.

    Raises:
        ValueError: shapes differ, a score is NaN, or positive is neither 0 nor 1.

    Example:
        >>> auroc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([0, 0, 1, 1]))
        0.875
    """
    return _on_all(auroc_statistic(score, positive), len(score))


def aurc(uncertainty: np.ndarray, error: np.ndarray) -> float:
    """Area under the risk-coverage curve: the mean, over k = 1..n, of the mean error of the k most certain items.

    Args:
        uncertainty: (n,) higher is less certain.
        error: (n,) loss of each item, 0 and 1 for right and wrong.

    Returns:
        Between the area of the best order and that of the worst; the mean error for an order that says nothing. Items that tie
        are taken in random order, and the expectation over it is returned, so that a constant gets the mean error. NaN for n = 0.

    Raises:
        ValueError: shapes differ, or a value is NaN.

    Paper: Geifman, Uziel and El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019.
    """
    return _on_all(aurc_statistic(uncertainty, error), len(uncertainty))


def excess_aurc(uncertainty: np.ndarray, error: np.ndarray) -> float:
    """:func:`aurc` less that of the best possible order of the same errors: 0 is perfect.

    Args:
        uncertainty, error: see :func:`aurc`.
    """
    return _on_all(excess_aurc_statistic(uncertainty, error), len(uncertainty))


def selective_gain(uncertainty: np.ndarray, error: np.ndarray) -> float:
    """Share of what a perfect order would gain over chance: 1 - excess_aurc / (mean error - best aurc).

    Args:
        uncertainty, error: see :func:`aurc`.

    Returns:
        1 for the best order, 0 for one that says nothing, negative if the uncertain items are the right ones; NaN if all errors
        are equal, when there is nothing to gain.
    """
    return _on_all(gain_statistic(uncertainty, error), len(uncertainty))


def risk_at_coverage(uncertainty: np.ndarray, error: np.ndarray, coverage: float) -> float:
    """Mean error of the ceil(coverage * n) most certain items; of items that tie at the edge, the expectation.

    Args:
        uncertainty, error: see :func:`aurc`.
        coverage: in (0, 1], the share of items that are answered.

    Raises:
        ValueError: as there, or coverage is outside of (0, 1].
    """
    return _on_all(risk_statistic(uncertainty, error, coverage), len(uncertainty))


def risk_coverage_curve(uncertainty: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The curve whose mean is :func:`aurc`.

    Args:
        uncertainty, error: see :func:`aurc`.

    Returns:
        ((n,) coverages 1/n, 2/n ... 1, (n,) expected mean errors of as many of the most certain items).
    """
    uncertainty, error = _checked(uncertainty, error, "risk_coverage_curve")
    n = len(error)
    order, starts = _groups(uncertainty)
    sizes = np.diff(np.append(starts, n))
    spread = np.repeat(np.add.reduceat(error[order], starts) / sizes, sizes) if n else error
    accepted = np.arange(1, n + 1)
    return accepted / max(n, 1), np.cumsum(spread) / accepted


def auroc_statistic(score: np.ndarray, positive: np.ndarray) -> Statistic:
    """:func:`auroc` to be resampled."""
    score, positive = _checked(score, positive, "auroc")
    if not np.isin(positive, (0.0, 1.0)).all():
        raise ValueError("auroc: positive must be 0 or 1 (or bool) for every item")
    order, starts = _groups(score)
    sign = positive[order]

    def statistic(counts: np.ndarray) -> np.ndarray:
        drawn = counts[:, order]
        above, below = _sums(drawn * sign, starts), _sums(drawn * (1 - sign), starts)
        before = np.cumsum(below, axis=1) - below / 2
        with np.errstate(invalid="ignore"):
            return _array((above * before).sum(1) / (above.sum(1) * below.sum(1)))

    return statistic


def aurc_statistic(uncertainty: np.ndarray, error: np.ndarray) -> Statistic:
    """:func:`aurc` to be resampled."""
    uncertainty, error = _checked(uncertainty, error, "aurc")
    order, starts = _groups(uncertainty)
    ordered = error[order]

    def statistic(counts: np.ndarray) -> np.ndarray:
        drawn = counts[:, order]
        w, e = _sums(drawn, starts), _sums(drawn * ordered, starts)
        end = np.cumsum(w, axis=1)
        errors_before, before = np.cumsum(e, axis=1) - e, end - w
        # Of a group of w items with e errors in all, the j-th adds (errors_before + j e / w) / (before + j): a sum over j in
        # closed form, with harmonic numbers.
        harmonic = _harmonic(int(end.max(initial=0)))
        steps = harmonic[end.astype(np.int64)] - harmonic[before.astype(np.int64)]
        rate = np.divide(e, w, out=np.zeros_like(e), where=w > 0)
        with np.errstate(invalid="ignore"):
            return _array(((errors_before - rate * before) * steps + e).sum(1) / w.sum(1))

    return statistic


def excess_aurc_statistic(uncertainty: np.ndarray, error: np.ndarray) -> Statistic:
    """:func:`excess_aurc` to be resampled."""
    own, best = aurc_statistic(uncertainty, error), aurc_statistic(error, error)
    return lambda counts: own(counts) - best(counts)


def gain_statistic(uncertainty: np.ndarray, error: np.ndarray) -> Statistic:
    """:func:`selective_gain` to be resampled."""
    own, best, mean = aurc_statistic(uncertainty, error), aurc_statistic(error, error), mean_statistic(error)

    def statistic(counts: np.ndarray) -> np.ndarray:
        chance, perfect = mean(counts), best(counts)
        # Equal errors leave rounding only, no room to gain.
        room = np.where(chance - perfect > 1e-12 * np.maximum(1, np.abs(chance)), chance - perfect, np.nan)
        return _array((chance - own(counts)) / room)

    return statistic


def risk_statistic(uncertainty: np.ndarray, error: np.ndarray, coverage: float) -> Statistic:
    """:func:`risk_at_coverage` to be resampled."""
    if not 0 < coverage <= 1:
        raise ValueError(f"risk_at_coverage: coverage must be in (0, 1], got {coverage}")
    uncertainty, error = _checked(uncertainty, error, "risk_at_coverage")
    order, starts = _groups(uncertainty)
    ordered = error[order]

    def statistic(counts: np.ndarray) -> np.ndarray:
        drawn = counts[:, order]
        w, e = _sums(drawn, starts), _sums(drawn * ordered, starts)
        wanted = np.ceil(coverage * w.sum(1) - 1e-9)
        with np.errstate(invalid="ignore"):
            return _array(_first(w, e, wanted[:, None])[:, 0] / wanted)

    return statistic


def mean_statistic(values: np.ndarray) -> Statistic:
    """The mean of (n,) values, to be resampled."""
    values = np.asarray(values, float)

    def statistic(counts: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return _array(counts @ values / counts.sum(1))

    return statistic


def spearman_statistic(x: np.ndarray, y: np.ndarray) -> Statistic:
    """Spearman rank correlation of two (n,) arrays, ties by average ranks, to be resampled: ranks are those of the resample."""
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
    """Pearson correlation of bin number and recall, as in :func:`~sfumato.metrics.uncertainty.recall_by_uncertainty`, to be resampled."""
    uncertainty, hit = _checked(uncertainty, hit, "decile_statistic")
    order = np.argsort(uncertainty, kind="stable")
    ordered = hit[order]

    def statistic(counts: np.ndarray) -> np.ndarray:
        drawn = counts[:, order]
        total = drawn.sum(1).astype(np.int64)[:, None]
        number = np.arange(n_bins + 1)
        edges = (number * (total // n_bins) + np.minimum(number, total % n_bins)).astype(float)
        sums = np.diff(_first(drawn, drawn * ordered, edges), axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            recall = sums / np.diff(edges, axis=1)
            a, b = np.arange(n_bins) - (n_bins - 1) / 2, recall - recall.mean(1, keepdims=True)
            spread = np.sqrt((b * b).sum(1) * (a * a).sum())
            return _array(np.where(np.ptp(recall, axis=1) > 0, (b @ a) / spread, np.nan))

    return statistic


def any_statistic(function: Callable[..., float], *arrays: np.ndarray) -> Statistic:
    """Any function of (k,) arrays, to be resampled: called once for each resample, with its drawn items in place of the arrays.

    Args:
        function: of as many 1-D arrays as are given; NaN where undefined.
        arrays: (n,) each.
    """
    own = [np.asarray(a) for a in arrays]

    def statistic(counts: np.ndarray) -> np.ndarray:
        rows = (np.repeat(np.arange(counts.shape[1]), row.astype(np.int64)) for row in counts)
        return np.array([function(*(a[index] for a in own)) for index in rows], float)

    return statistic


def bootstrap(
    statistics: Mapping[str, Statistic],
    n: int,
    *,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    groups: np.ndarray | None = None,
) -> dict[str, Interval]:
    """Percentile confidence intervals of several statistics from the same resamples of n queries, drawn with replacement.

    Args:
        statistics: by name; see :data:`Statistic`.
        n: number of queries.
        n_resamples: number of resamples; 0 gives values without intervals.
        level: coverage that the intervals aim at. Percentile intervals are somewhat narrow for few queries and skew statistics.
        seed: of the draws.
        groups: (n,) queries with equal entries are drawn together, as the five captions of an image, which are not independent; None
            draws each by itself.

    Returns:
        An :class:`Interval` for each name. Resamples where a statistic is undefined are left out.

    Raises:
        ValueError: n_resamples < 0, level is outside of (0, 1), or groups has another length.
    """
    if n_resamples < 0:
        raise ValueError(f"bootstrap: n_resamples must not be negative, got {n_resamples}")
    if not 0 < level < 1:
        raise ValueError(f"bootstrap: level must be between 0 and 1, got {level}")
    if groups is not None and len(groups) != n:
        raise ValueError(f"bootstrap: got {len(groups)} groups for {n} queries; give one for each")
    whole = {name: _on_all(statistic, n) for name, statistic in statistics.items()}
    which = np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]
    units = int(which.max()) + 1 if n else 0
    random = np.random.default_rng(seed)
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in statistics}
    step = max(1, _CHUNK // max(n, 1))
    for start in range(0, n_resamples if n else 0, step):
        b = min(step, n_resamples - start)
        picked = random.integers(units, size=(b, units)) + units * np.arange(b)[:, None]
        times = np.bincount(picked.ravel(), minlength=b * units).reshape(b, units)
        counts = (times if groups is None else times[:, which]).astype(float)
        for name, statistic in statistics.items():
            drawn[name].append(statistic(counts))
    return {
        name: percentile_interval(whole[name], np.concatenate(parts or [np.empty(0)]), level)
        for name, parts in drawn.items()
    }


def percentile_interval(value: float, resampled: np.ndarray, level: float = 0.95) -> Interval:
    """The interval between the percentiles of (b,) resampled values; NaN are left out, and if most are there is none."""
    if np.isnan(value):
        return Interval(None, None, None)
    defined = resampled[~np.isnan(resampled)]
    if len(defined) == 0 or 2 * len(defined) < len(resampled):
        return Interval(float(value), None, None)
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))


def balanced_spearman_draws(
    scores: Mapping[str, np.ndarray],
    multiplicity: np.ndarray,
    *,
    per_bin: int = 20,
    n_resamples: int = 1000,
    n_draws: int = 10,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Resampled values of :func:`~sfumato.metrics.uncertainty.balanced_spearman`, for :func:`percentile_interval`.

    Queries are resampled within each power of two of the multiplicity, so that every resample has all of them; of each resample
    n_draws balanced sets are taken instead of 200.

    Args:
        scores: by name, (n,) uncertainties.
        multiplicity: (n,) true numbers of matches, at least 1.
        per_bin: largest number of queries of a bin in a balanced set.
        n_resamples: b resamples.
        n_draws: sets of each.
        seed: of the draws, which all scores share.

    Returns:
        (b,) values for each name; all NaN if there is only one bin.
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
        # A resample is in random order: consecutive stretches of it, wrapped around, are sets drawn from it.
        places = (np.arange(n_draws)[:, None] * size + np.arange(size)) % len(own)
        parts.append(resample[:, places])
    chosen = np.concatenate(parts, axis=2).reshape(n_resamples * n_draws, -1)
    ground_truth = _row_ranks(multiplicity[chosen])
    return {
        name: _row_pearson(_row_ranks(np.asarray(x, float)[chosen]), ground_truth).reshape(n_resamples, n_draws).mean(1)
        for name, x in scores.items()
    }


def _on_all(statistic: Statistic, n: int) -> float:
    return float(statistic(np.ones((1, n)))[0])


def _checked(x: np.ndarray, y: np.ndarray, who: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"{who}: got {x.shape} and {y.shape} values; both must be (n,)")
    if np.isnan(x).any() or np.isnan(y).any():
        raise ValueError(f"{who}: a value is NaN; leave such queries out")
    return x, y


def _groups(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """((n,) ascending order, (g,) where in it each group of equal values starts)."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    new = np.ones(len(values), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(new)


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(b, n) -> (b, g) sums of the groups."""
    return values if len(starts) == values.shape[1] else np.add.reduceat(values, starts, axis=1)


def _first(w: np.ndarray, e: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(b, g) sizes and totals of groups, (b, k) numbers of items -> (b, k) totals of as many first items, a group in even parts."""
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


def _row_ranks(x: np.ndarray) -> np.ndarray:
    """(r, k) average ranks from 0 within each row."""
    order = np.argsort(x, axis=1, kind="stable")
    ordered = np.take_along_axis(x, order, 1)
    k = x.shape[1]
    new = np.ones(x.shape, bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    start = np.maximum.accumulate(np.where(new, np.arange(k), 0), axis=1)
    last = np.ones(x.shape, bool)
    last[:, :-1] = new[:, 1:]
    end = np.minimum.accumulate(np.where(last, np.arange(k), k)[:, ::-1], axis=1)[:, ::-1]
    ranks = np.empty(x.shape)
    np.put_along_axis(ranks, order, (start + end) / 2, 1)
    return ranks


def _row_pearson(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    variances = (a * a).sum(1) * (b * b).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return _array(np.where(variances > 0, (a * b).sum(1) / np.sqrt(variances), np.nan))


def _harmonic(n: int) -> np.ndarray:
    """(n + 1,) 0, 1, 1 + 1/2, ..."""
    return np.concatenate([[0.0], np.cumsum(1 / np.arange(1, n + 1))])


def _array(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, float)
