"""Correlation of an uncertainty with recall and with a known ambiguity."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sfumato.charts import draw_intervals, styled_axes
from sfumato.gaussian import Array, as_tensor
from sfumato.metrics.reliability import wilson_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def average_ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values get the mean of their ranks. x (n,) -> (n,)."""
    _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = (ends - (counts + 1) / 2)[which]
    return ranks


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson correlation. x, y (n,)."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.shape != y.shape:
        raise ValueError(f"pearson: got {x.shape} and {y.shape} values; the shapes must be equal")
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
    if x.shape != multiplicity.shape:
        raise ValueError(
            f"balanced_spearman: got {x.shape} values for {multiplicity.shape} multiplicities; the shapes must be equal"
        )
    if min(per_bin, n_sets) < 1:
        raise ValueError(f"balanced_spearman: per_bin and n_sets must be at least 1, got {per_bin} and {n_sets}")
    if len(multiplicity) and multiplicity.min() < 1:
        raise ValueError(f"balanced_spearman: multiplicities must be at least 1, got {multiplicity.min()}")
    bins = np.floor(np.log2(multiplicity)).astype(int)
    members = [np.flatnonzero(bins == b) for b in np.unique(bins)]
    if len(members) < 2:
        return float("nan")
    random = np.random.default_rng(seed)
    values = []
    for _ in range(n_sets):
        chosen = np.concatenate([random.permutation(m)[:per_bin] for m in members])
        values.append(spearman(x[chosen], multiplicity[chosen]))
    return float(np.mean(values))


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
    return {
        name: _row_pearson(_row_ranks(x, chosen), ground_truth).reshape(n_resamples, n_sets).mean(1)
        for name, x in scores.items()
    }


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


@dataclass(frozen=True)
class RecallByUncertainty:
    """Recall in groups of queries, from the most certain to the least, as in figure 3 of PCME++.

    Make one with :meth:`of` or :meth:`LoadedModel.recall_by_uncertainty`, or of the figures that an evaluation has
    counted: ``RecallByUncertainty(**evaluation.uncertainty["t2i"])``.

    Attributes:
        bins: a dictionary for each group, {"uncertainty": its mean, None if it is infinite, "recall": recall@1,
            "count": number of queries}.
        correlation: Pearson correlation of the number of the group and its recall; -1 is good, None if undefined.
        spearman: of the uncertainties and the single results; None if undefined.
    """

    bins: tuple[dict[str, Any], ...]
    correlation: float | None
    spearman: float | None

    @classmethod
    def of(cls, uncertainty: Array, hit: Array, *, n_bins: int = 10) -> "RecallByUncertainty":
        """Group queries by their uncertainty.

        Args:
            uncertainty: (n,) any measure, larger is less certain.
            hit: (n,) 1 where the first hit of a query is right, else 0; NaN for queries without a match, which are left
                out.
            n_bins: number of groups of equal size.

        Returns:
            The groups.

        Raises:
            ValueError: the shapes differ, n_bins is below 1, or there is no query.
        """
        who = "RecallByUncertainty.of"
        if n_bins < 1:
            raise ValueError(f"{who}: n_bins must be at least 1, got {n_bins}")
        u, y = (
            as_tensor(x, name, who).double().cpu().numpy() for x, name in ((uncertainty, "uncertainty"), (hit, "hit"))
        )
        if u.shape != y.shape:
            raise ValueError(f"{who}: got {u.shape} uncertainties for {y.shape} hits; the shapes must be equal")
        u, y = u[~np.isnan(y)], y[~np.isnan(y)]
        if not len(u):
            raise ValueError(f"{who}: got no query that has a match")
        parts = [part for part in np.array_split(np.argsort(u, kind="stable"), n_bins) if len(part)]
        means = [float(u[p].mean()) for p in parts]
        bins = tuple(
            {"uncertainty": mean if np.isfinite(mean) else None, "recall": float(y[p].mean()), "count": len(p)}
            for p, mean in zip(parts, means, strict=True)
        )
        constant = len(u) < 2 or u.min() == u.max()
        correlation = float("nan") if constant else pearson(np.arange(len(bins)), np.array([b["recall"] for b in bins]))
        return cls(bins, none_if_nan(correlation), none_if_nan(spearman(u, y)))

    def __repr__(self) -> str:
        n = sum(b["count"] for b in self.bins)
        first, last = (f"{b['recall']:.1%}" for b in (self.bins[0], self.bins[-1]))
        return (
            f"RecallByUncertainty({n} queries in {len(self.bins)} groups: recall@1 {first} of the most certain, {last}"
            f" of the least; correlation {_digits(self.correlation)})"
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw recall@1 of each group with its 95 % interval.

        Args:
            ax: axes of matplotlib to draw on; new ones if None.

        Returns:
            The axes.

        Raises:
            UserError: matplotlib is not installed.
        """
        with styled_axes(ax, 5.4, 4.2) as axes:
            from matplotlib.ticker import PercentFormatter

            recall, x = [b["recall"] for b in self.bins], range(1, len(self.bins) + 1)
            low, high = zip(*(wilson_interval(b["recall"], b["count"]) for b in self.bins), strict=True)
            draw_intervals(axes, x, recall, low, high)
            ticks = ["∞" if b["uncertainty"] is None else f"{b['uncertainty']:.3g}" for b in self.bins]
            axes.set_xticks(list(x), ticks)
            axes.tick_params(axis="x", labelsize=8)
            sizes = " or ".join(map(str, sorted({b["count"] for b in self.bins})))
            axes.set(xlabel=f"mean uncertainty of each group of {sizes} queries", ylabel="recall@1")
            axes.set_ylim(0, min(1.03, 1.1 * max(high)))
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
            correlations = _digits(self.correlation), _digits(self.spearman)
            title = "correlation of group and recall {}; of query and result {}".format(*correlations)
            axes.set_title(title, loc="left", fontsize=9)
            axes.grid(True, axis="y")
        return axes


def _digits(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"


def none_if_nan(value: float) -> float | None:
    """None for an undefined number: JSON has no NaN."""
    return None if np.isnan(value) else value
