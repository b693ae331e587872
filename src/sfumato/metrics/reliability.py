"""Agreement of probabilities and uncertainties with outcomes, and exact bounds of binomial rates.

The inputs are predictions and outcomes of any source. :class:`Reliability` and :class:`RecallByUncertainty` draw them.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sfumato.arrays import Array, as_numpy, log_sum_exp
from sfumato.charts import FAINT, draw_intervals, styled_axes
from sfumato.metrics.bootstrap import Statistic, none_if_nan, pearson, spearman

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Binning = Literal["width", "count"]
"""Bins of equal width, or with equally many predictions."""

N_BINS = 15
"""Bins of every calibration error, unless a caller asks for others. They have equally many predictions."""


def reliability_curve(
    probability: Array, match: Array, *, n_bins: int = N_BINS, binning: Binning = "count"
) -> list[dict[str, Any]]:
    """The reliability curve: predicted probability and observed fraction in each bin. probability (k,), match (k,)."""
    probability, match = _predictions("reliability_curve", probability, match)
    if n_bins < 1:
        raise ValueError(f"reliability_curve: n_bins must be at least 1, got {n_bins}")
    if not ((probability >= 0) & (probability <= 1)).all():
        raise ValueError("reliability_curve: probabilities must lie in [0, 1]")
    which = _which_bin(probability, n_bins, binning)
    count = np.bincount(which, minlength=n_bins)
    sums = [np.bincount(which, weights=v, minlength=n_bins) for v in (probability, match)]
    bins = []
    for b in range(n_bins):
        if size := int(count[b]):
            predicted, observed = (float(of[b]) / size for of in sums)
            low, high = wilson_interval(observed, size)
            bins.append({"probability": predicted, "observed": observed, "low": low, "high": high, "count": size})
    return bins


def _which_bin(probability: np.ndarray, n_bins: int, binning: Binning) -> np.ndarray:
    """(k,) number of the bin of each prediction."""
    if binning == "width":
        return np.minimum((probability * n_bins).astype(np.int64), n_bins - 1)
    return probability.argsort(kind="stable").argsort() * n_bins // max(1, len(probability))


def expected_calibration_error(
    probability: Array, match: Array, *, n_bins: int = N_BINS, binning: Binning = "count"
) -> float:
    """Mean gap between predicted and observed over the bins of :func:`reliability_curve`, weighted by their size (ECE).

    Paper: Naeini, Cooper and Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning", AAAI 2015.
    """
    probability, match = _predictions("expected_calibration_error", probability, match)
    curve = reliability_curve(probability, match, n_bins=n_bins, binning=binning)
    return float(sum(b["count"] * abs(b["probability"] - b["observed"]) for b in curve)) / len(probability)


def calibration_error_statistic(probability: Array, match: Array, weight: Array, *, n_bins: int) -> Statistic:
    """The ECE of predictions with weights, to be resampled within the bins of all. probability, match, weight (k,)."""
    p, y = _predictions("calibration_error_statistic", probability, match)
    weights = as_numpy(weight)
    by_bin = (weights * (p - y))[:, None] * (_which_bin(p, n_bins, "count")[:, None] == np.arange(n_bins))

    def statistic(counts: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(counts @ by_bin).sum(1) / (counts @ weights))

    return statistic


def brier_score(probability: Array, match: Array) -> float:
    """Mean squared gap between prediction and label: 0 is perfect, 0.25 is a constant prediction of one half.

    probability (k,), match (k,).
    """
    p, y = _predictions("brier_score", probability, match)
    return float(((p - y) ** 2).mean())


def log_loss(probability: Array, match: Array) -> float:
    """Mean negative logarithm of the probability of what happened, in nats; predictions of 0 and 1 count as 1e-12.

    probability (k,), match (k,).
    """
    p, y = _predictions("log_loss", probability, match)
    p = p.clip(1e-12, 1 - 1e-12)
    return float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())


def simulated_calibration_errors(probability: Array, true_probability: Array, *, n_samples: int = 100) -> np.ndarray:
    """The ECE over sets of outcomes that are drawn from other probabilities. probability (k,) -> (n_samples,)."""
    p, q = _predictions("simulated_calibration_errors", probability, true_probability)
    random, bins = np.random.default_rng(0), _which_bin(p, N_BINS, "count")
    gaps = (p - (random.random(len(p)) < q) for _ in range(n_samples))
    return np.array([np.abs(np.bincount(bins, of_sample)).sum() / len(p) for of_sample in gaps])


def calibration_error_by_chance(probability: Array) -> float:
    """The ECE of perfect probabilities, to compare an ECE with: few outcomes in a bin differ even from these. (k,)."""
    p = as_numpy(probability, "probability", "calibration_error_by_chance")
    return float(simulated_calibration_errors(p, p).mean())


def wilson_interval(fraction: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of 95 % of a fraction of n independent cases; approximate, and never outside of [0, 1].

    Paper: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.

    Returns (low, high).
    """
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    centre, shrink = fraction + z * z / (2 * n), 1 + z * z / n
    half = z * math.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / shrink), min(1.0, (centre + half) / shrink)


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(X <= k) for a binomial X: successes in n trials with probability p each. It is summed in log space."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0:
        return 1.0
    if p >= 1:
        return 0.0
    i = np.arange(1, k + 1)
    log_ways = np.cumsum(np.log((n + 1 - i) / i) + math.log(p) - math.log1p(-p))
    return min(1.0, float(np.exp(log_sum_exp(np.append(log_ways, 0)) + n * math.log1p(-p))))


def mean_loss_p_value(mean: float, n: int, limit: float) -> float:
    """The p-value of "the expected loss is at least `limit`", from the mean of n independent losses in [0, 1].

    The Hoeffding-Bentkus bound: valid for losses of any shape, hence looser than the binomial tail for 0 and 1.

    Paper: Bates et al., "Distribution-free, risk-controlling prediction sets", JACM 2021, section 3.1.
    """
    if n == 0 or mean >= limit:
        return 1.0
    gap = (1 - mean) * math.log((1 - mean) / (1 - limit)) + (mean * math.log(mean / limit) if mean > 0 else 0.0)
    # n times the mean of n float losses may be slightly above the exact integer.
    return min(1.0, math.exp(-n * gap), math.e * binomial_tail(math.ceil(n * mean - 1e-9), n, limit))


def betting_p_value(values: np.ndarray, limit: float, *, seed: int = 0) -> float:
    """The p-value of "the mean of values in [0, 1] is at least the limit", small if they are clearly below it.

    A gambler bets on the next value being below the limit, with a stake that depends on the values so far. If the mean
    is at least the limit, the capital grows c-fold with a probability of at most 1 / c. Unlike a bound that knows only
    the range, the stake follows the variance.

    Paper: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024.

    values (n,).
    """
    x = np.random.default_rng(seed).permutation(np.asarray(values, dtype=float))
    before = np.arange(len(x)) + 1
    mean = (limit + np.concatenate([[0.0], np.cumsum(x)[:-1]])) / before
    squares = (0.25 + np.concatenate([[0.0], np.cumsum((x - mean) ** 2)[:-1]])) / before
    lead = np.maximum(limit - mean, 0.0)
    stake = np.minimum(lead / (squares + lead**2), 0.75 / (1 - limit))
    capital = np.cumsum(np.log1p(stake * (limit - x)))
    return float(np.exp(-max(0.0, float(capital.max(initial=0.0)))))


@dataclass(frozen=True)
class Reliability:
    """Predicted probabilities against outcomes; make one with :meth:`of` or :meth:`LoadedModel.reliability`.

    Attributes:
        curve: bins of equally many predictions, see :func:`reliability_curve`.
        ece: expected calibration error, in N_BINS bins however many the curve has: the figure of `sfumato trust`.
        ece_by_chance: what perfect probabilities of as many cases would show.
        n: number of predictions.
        mean_probability: mean prediction.
        rate: fraction of matches.
    """

    curve: tuple[dict[str, Any], ...]
    ece: float
    ece_by_chance: float
    n: int
    mean_probability: float
    rate: float

    @classmethod
    def of(cls, probability: Array, match: Array, *, n_bins: int = N_BINS) -> "Reliability":
        """Compare predictions with outcomes.

        Args:
            probability: (k,) predictions in [0, 1], a tensor or an array.
            match: (k,) outcomes in [0, 1].
            n_bins: number of bins of the curve, each with equally many predictions.

        Returns:
            The comparison.

        Raises:
            ValueError: see :func:`reliability_curve`.
        """
        p, y = _predictions("Reliability.of", probability, match)
        return cls(
            tuple(reliability_curve(p, y, n_bins=n_bins)), expected_calibration_error(p, y),
            calibration_error_by_chance(p), len(p), float(p.mean()), float(y.mean()),
        )  # fmt: skip

    def __repr__(self) -> str:
        hits = f"{self.n} hits, {self.mean_probability:.1%} probable on average, right in {self.rate:.1%}"
        errors = f"calibration error {self.ece:.3f}, of perfect probabilities {self.ece_by_chance:.3f}"
        return f"Reliability({hits}; {errors})"

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the curve with the 95 % intervals and the number of cases of each bin.

        Args:
            ax: axes of matplotlib to draw on; new ones if None.

        Returns:
            The axes.

        Raises:
            UserError: matplotlib is not installed.
        """
        with styled_axes(ax, 4.4, 4.2) as axes:
            from matplotlib.ticker import PercentFormatter

            names = "probability", "observed", "low", "high", "count"
            x, y, low, high, count = ([b[name] for b in self.curve] for name in names)
            axes.plot([0, 1], [0, 1], linestyle="--", color=FAINT, zorder=1)
            draw_intervals(axes, x, y, low, high)
            beside = [f"n = {size}" if i == 0 else str(size) for i, size in enumerate(count)]
            for at, top, text in zip(x, high, beside, strict=True):
                axes.annotate(text, (at, top), (0, 4), textcoords="offset points", ha="center", fontsize=8, color=FAINT)
            axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.1))
            axes.set(xlabel="predicted probability", ylabel="fraction of matches")
            axes.xaxis.set_major_formatter(PercentFormatter(1))
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            title = f"calibration error {self.ece:.3f}, of perfect probabilities {self.ece_by_chance:.3f}"
            axes.set_title(title, loc="left", fontsize=9)
            axes.grid(True)
        return axes


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

    bins: list[dict[str, Any]]
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
        u, y = (as_numpy(x, name, who).astype(np.float64) for x, name in ((uncertainty, "uncertainty"), (hit, "hit")))
        if u.shape != y.shape:
            raise ValueError(f"{who}: got {u.shape} uncertainties for {y.shape} hits; the shapes must be equal")
        u, y = u[~np.isnan(y)], y[~np.isnan(y)]
        if not len(u):
            raise ValueError(f"{who}: got no query that has a match")
        parts = [part for part in np.array_split(np.argsort(u, kind="stable"), n_bins) if len(part)]
        bins = []
        for p in parts:
            mean = float(u[p].mean()) if np.isfinite(u[p].mean()) else None
            bins.append({"uncertainty": mean, "recall": float(y[p].mean()), "count": len(p)})
        constant = len(u) < 2 or u.min() == u.max()
        correlation = float("nan") if constant else pearson(np.arange(len(bins)), np.array([b["recall"] for b in bins]))
        return cls(bins, none_if_nan(correlation), none_if_nan(spearman(u, y)))

    def __repr__(self) -> str:
        n = sum(b["count"] for b in self.bins)
        first, last = (f"{b['recall']:.1%}" for b in (self.bins[0], self.bins[-1]))
        found = f"recall@1 {first} of the most certain, {last} of the least; correlation {_digits(self.correlation)}"
        return f"RecallByUncertainty({n} queries in {len(self.bins)} groups: {found})"

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


def _predictions(who: str, probability: Array, match: Array) -> tuple[np.ndarray, np.ndarray]:
    """Checked, in float64."""
    p, y = as_numpy(probability, "probability", who), as_numpy(match, "match", who)
    if p.shape != y.shape or p.ndim != 1 or not len(p):
        raise ValueError(f"{who}: got {p.shape} probabilities for {y.shape} labels; both must be (k,), k >= 1")
    return p.astype(np.float64), y.astype(np.float64)
