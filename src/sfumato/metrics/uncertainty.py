r"""Correlation of an uncertainty with recall and with a known ambiguity, and the score -S*R^2 of post-hoc papers.

    S = Spearman(bin number, recall@1 of the bin),    R2 = squared Pearson of the same,    score = -S * R2

It is 1 if recall falls linearly from bin to bin, and does not ask how far it falls: bins with a recall of .50, .49, .48
score as well as .9, .5, .1. The same numbers can score .7 or 0 by the binning alone. Report a binning by its name, with
the sizes of the bins, an interval, and an AUROC beside it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from sfumato.charts import draw_intervals, styled_axes
from sfumato.gaussian import Array, as_tensor
from sfumato.metrics.bootstrap import Interval, Statistic, bootstrap
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


def recall_by_uncertainty(uncertainty: np.ndarray, hit: np.ndarray, *, n_bins: int = 10) -> dict[str, Any]:
    """Recall in bins of equal size, from the most to the least certain queries. uncertainty (n,), hit (n,)."""
    if n_bins < 1:
        raise ValueError(f"recall_by_uncertainty: n_bins must be at least 1, got {n_bins}")
    uncertainty, hit = np.asarray(uncertainty, float), np.asarray(hit, float)
    if uncertainty.shape != hit.shape:
        raise ValueError(
            f"recall_by_uncertainty: got {uncertainty.shape} uncertainties for {hit.shape} hits;"
            " the shapes must be equal"
        )
    uncertainty, hit = uncertainty[~np.isnan(hit)], hit[~np.isnan(hit)]
    order = np.argsort(uncertainty, kind="stable")
    parts = [part for part in np.array_split(order, n_bins) if len(part)]
    means = [float(uncertainty[p].mean()) for p in parts]
    bins = [
        {"uncertainty": mean if np.isfinite(mean) else None, "recall": float(hit[p].mean()), "count": len(p)}
        for p, mean in zip(parts, means, strict=True)
    ]
    constant = len(uncertainty) < 2 or uncertainty.min() == uncertainty.max()
    correlation = float("nan") if constant else pearson(np.arange(len(bins)), np.array([b["recall"] for b in bins]))
    return {"bins": bins, "correlation": none_if_nan(correlation), "spearman": none_if_nan(spearman(uncertainty, hit))}


@dataclass(frozen=True)
class RecallByUncertainty:
    """Recall in groups of queries, from the most certain to the least, as in figure 3 of PCME++.

    Make one with :meth:`of`, :meth:`of_figures` or :meth:`LoadedModel.recall_by_uncertainty`.

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
        u, y = (
            as_tensor(x, name, who).double().cpu().numpy() for x, name in ((uncertainty, "uncertainty"), (hit, "hit"))
        )
        return cls.of_figures(recall_by_uncertainty(u, y, n_bins=n_bins))

    @classmethod
    def of_figures(cls, figures: Mapping[str, Any]) -> "RecallByUncertainty":
        """The groups that an evaluation has counted.

        Args:
            figures: one direction of an evaluation's figures: ``evaluation.uncertainty["t2i"]`` of
                :func:`evaluate_retrieval`, or ``json["uncertainty"]["t2i"]`` of a file that `sfumato evaluate` wrote.

        Returns:
            The groups.

        Raises:
            ValueError: figures has no groups.
        """
        if not figures.get("bins"):
            raise ValueError(
                "RecallByUncertainty: figures has no bins; give those of one direction, evaluation.uncertainty['t2i']"
            )
        return cls(tuple(figures["bins"]), figures.get("correlation"), figures.get("spearman"))

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


RecallBinning = Literal["count", "width", "uclip", "probvlm_spacing", "probvlm_samples", "asymvlm"]
"""How queries come into bins. The first two put every query into exactly one bin; the others are kept to reproduce.

"count": equally many, the first bins one more where the number does not divide; equal uncertainties in their order.
"width": equal widths between the least and the greatest uncertainty, left-closed, the last one closed.
"uclip": as "width", of the confidences -u, with edges in float32 as released; the extreme queries may be lost.
"probvlm_spacing": nested bins up to each of n_bins edges, as released by ProbVLM and GroVE: bin 0 has only the minimum,
the last one everything. That smooths the recall and inflates S.
"probvlm_samples": their equal numbers, which lose a query at every border, and fill bin 0 twice and the last bin not
where the number does not divide.
"asymvlm": floor(n / n_bins) queries a bin, as released by AsymVLM; the most uncertain remainder is left out.
"""


@dataclass(frozen=True)
class BinnedRecall:
    """Recall in bins of ascending uncertainty."""

    binning: RecallBinning  # see :data:`RecallBinning`
    n_bins: int  # number of bins that were asked for
    counts: tuple[int, ...]  # number of queries in each of them; with "uclip" by ascending uncertainty too
    recall: tuple[float, ...]  # recall@1 of the bins that are not empty
    spearman: float | None  # S of their number and recall; None if it is undefined
    r_squared: float | None  # R2 of them, likewise
    score: Interval  # -S * R2, with its interval

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)


def binned_recall(
    uncertainty: np.ndarray,
    hit: np.ndarray,
    *,
    binning: RecallBinning = "count",
    n_bins: int = 10,
    n_resamples: int = 1000,
    level: float = 0.95,
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> BinnedRecall:
    """Recall in bins of ascending uncertainty, and -S*R^2 with its bootstrap interval.

    Source: ProbVLM (ICCV 2023) and its issue 3; the released binnings of uCLIP, ProbVLM, GroVE and AsymVLM.

    uncertainty (n,), hit (n,).
    """
    uncertainty, hit = _checked(uncertainty, hit, binning, n_bins)
    if not len(hit):
        raise ValueError("binned_recall: got no queries")
    order = np.argsort(uncertainty, kind="stable")
    members = _members(uncertainty[order], binning, n_bins)
    recall = np.array([hit[order][m].mean() for m in members if len(m)])
    s, r2 = (float("nan"),) * 2 if np.ptp(uncertainty) == 0 else _score(recall)[:2]
    score = bootstrap(
        {"score": binned_recall_statistic(uncertainty, hit, binning=binning, n_bins=n_bins)},
        len(hit), n_resamples=n_resamples, level=level, groups=groups, seed=seed,
    )["score"]  # fmt: skip
    return BinnedRecall(
        binning, n_bins, tuple(len(m) for m in members), tuple(recall.tolist()), none_if_nan(s), none_if_nan(r2), score
    )


def binned_recall_statistic(
    uncertainty: np.ndarray, hit: np.ndarray, *, binning: RecallBinning = "count", n_bins: int = 10
) -> Statistic:
    """-S*R^2 as a statistic for the bootstrap."""
    uncertainty, hit = _checked(uncertainty, hit, binning, n_bins)
    order = np.argsort(uncertainty, kind="stable")
    ordered, hits = uncertainty[order], hit[order]

    def score(counts: np.ndarray) -> float:
        rows = np.repeat(np.arange(len(order)), counts[order].astype(np.int64))
        if not len(rows) or ordered[rows[0]] == ordered[rows[-1]]:
            return float("nan")
        found = hits[rows]
        members = _members(ordered[rows], binning, n_bins)
        return _score(np.array([found[m].mean() for m in members if len(m)]))[2]

    return lambda counts: np.array([score(row) for row in counts])


def _score(recall: np.ndarray) -> tuple[float, float, float]:
    """(S, R2, -S * R2) of the recalls of bins."""
    number = np.arange(len(recall))
    s, r = spearman(number, recall), pearson(number, recall)
    return s, r * r, -s * r * r


def _members(ordered: np.ndarray, binning: RecallBinning, n_bins: int) -> list[np.ndarray]:
    """The positions of each bin, given (n,) ascending uncertainties."""
    n, every = len(ordered), np.arange(len(ordered))
    if not n:
        return [every] * n_bins
    if binning == "count":
        return np.array_split(every, n_bins)
    if binning == "asymvlm":
        return [every[k * (n // n_bins) : (k + 1) * (n // n_bins)] for k in range(n_bins)]
    if binning == "probvlm_samples":
        return _released_samples(every, n_bins)
    if binning == "probvlm_spacing":
        ends = np.searchsorted(ordered, np.linspace(ordered[0], ordered[-1], n_bins), side="right")
        return [every[:end] for end in ends]
    if binning == "width":
        inner = np.searchsorted(ordered, np.linspace(ordered[0], ordered[-1], n_bins + 1)[1:-1])
        return np.split(every, inner)
    confidence = -ordered[::-1]
    edges = np.linspace(np.float32(confidence[0]), np.float32(confidence[-1]), n_bins + 1, dtype=np.float32)
    last = np.arange(n_bins) == n_bins - 1
    inside = [
        (confidence >= low) & ((confidence <= high) if closed else (confidence < high))
        for low, high, closed in zip(edges[:-1], edges[1:], last, strict=True)
    ]
    return [every[::-1][which] for which in inside[::-1]]


def _released_samples(every: np.ndarray, n_bins: int) -> list[np.ndarray]:
    """The segments between lost queries; the first two share bin 0 where the number does not divide."""
    n, size = len(every), len(every) // n_bins
    lost = np.arange(size + 1, n, size) if size else every[:0]
    segments = [part[part != lost[k - 1]] if k else part for k, part in enumerate(np.split(every, lost))]
    if n % n_bins and len(segments) > 1:
        segments = [np.concatenate(segments[:2]), *segments[2:]]
    return (segments + [every[:0]] * n_bins)[:n_bins]


def _checked(uncertainty: np.ndarray, hit: np.ndarray, binning: str, n_bins: int) -> tuple[np.ndarray, np.ndarray]:
    uncertainty, hit = np.asarray(uncertainty, float), np.asarray(hit, float)
    if binning not in get_args(RecallBinning):
        raise ValueError(f"binned_recall: unknown binning {binning!r}; known: {', '.join(get_args(RecallBinning))}")
    if n_bins < 1:
        raise ValueError(f"binned_recall: n_bins must be at least 1, got {n_bins}")
    if uncertainty.shape != hit.shape or uncertainty.ndim != 1:
        raise ValueError(
            f"binned_recall: got {uncertainty.shape} uncertainties for {hit.shape} hits; both must be (n,)"
        )
    if np.isnan(uncertainty).any() or np.isnan(hit).any():
        raise ValueError("binned_recall: a value is NaN; leave such queries out")
    return uncertainty, hit
