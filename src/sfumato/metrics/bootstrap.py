"""Bootstrap intervals of any figure over queries.

A statistic is a function of the count of each query in a resample, so that a thousand resamples need only one sort: see
:data:`Statistic` and :func:`bootstrap`. The inputs are arrays with one number for each query.
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
    if n_resamples < 0:
        raise ValueError(f"bootstrap: n_resamples must not be negative, got {n_resamples}")
    if not 0 < level < 1:
        raise ValueError(f"bootstrap: level must be between 0 and 1, got {level}")
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
    return {
        name: percentile_interval(whole[name], np.concatenate(parts or [np.empty(0)]), level)
        for name, parts in resampled.items()
    }


@dataclass(frozen=True)
class Resampling:
    """Options of the intervals."""

    n_resamples: int = 1000
    level: float = 0.95
    seed: int = 0

    def intervals(
        self, statistics: Mapping[str, Statistic], n: int, groups: np.ndarray | None = None
    ) -> dict[str, Interval]:
        """The interval of each statistic of n queries; those of a group are resampled together. groups (n,)."""
        return bootstrap(statistics, n, n_resamples=self.n_resamples, level=self.level, seed=self.seed, groups=groups)


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
