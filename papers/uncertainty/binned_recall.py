r"""The score -S*R^2 of post-hoc papers: correlation of an uncertainty with recall, over bins.

    S = Spearman(bin number, recall@1 of the bin),    R2 = squared Pearson of the same,    score = -S * R2

It is 1 if recall falls linearly from bin to bin, and does not ask how far it falls: bins with a recall of .50, .49, .48
score as well as .9, .5, .1. The same numbers can score .7 or 0 by the binning alone. Report a binning by its name, with
the sizes of the bins, an interval, and an AUROC beside it.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sfumato.metrics.bootstrap import Interval, Statistic, bootstrap, none_if_nan, pearson, spearman

RecallBinning = Literal["count", "width"]
"""How queries come into bins, every query into exactly one.

"count": equally many, the first bins one more where the number does not divide; equal uncertainties in their order.
"width": equal widths between the least and the greatest uncertainty, left-closed, the last one closed.
"""


@dataclass(frozen=True)
class BinnedRecall:
    """Recall in bins of ascending uncertainty."""

    binning: RecallBinning  # see :data:`RecallBinning`
    n_bins: int  # number of bins that were asked for
    counts: tuple[int, ...]  # number of queries in each of them
    recall: tuple[float, ...]  # recall@1 of the bins that are not empty
    spearman: float | None  # S of their number and recall; None if it is undefined
    r_squared: float | None  # R2 of them, likewise
    score: Interval  # -S * R2, with its interval


def binned_recall(
    uncertainty: np.ndarray,
    hit: np.ndarray,
    *,
    binning: RecallBinning = "count",
    n_bins: int = 10,
    n_resamples: int = 1000,
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> BinnedRecall:
    """Recall in bins of ascending uncertainty, and -S*R^2 with its bootstrap interval.

    Source: ProbVLM (ICCV 2023) and its issue 3.

    uncertainty (n,), hit (n,).
    """
    order = np.argsort(uncertainty, kind="stable")
    members = _members(uncertainty[order], binning, n_bins)
    recall = np.array([hit[order][m].mean() for m in members if len(m)])
    s, r2 = (float("nan"),) * 2 if np.ptp(uncertainty) == 0 else _score(recall)[:2]
    statistic = binned_recall_statistic(uncertainty, hit, binning=binning, n_bins=n_bins)
    score = bootstrap({"score": statistic}, len(hit), n_resamples=n_resamples, groups=groups, seed=seed)["score"]
    counts = tuple(len(m) for m in members)
    return BinnedRecall(binning, n_bins, counts, tuple(recall.tolist()), none_if_nan(s), none_if_nan(r2), score)


def binned_recall_statistic(
    uncertainty: np.ndarray, hit: np.ndarray, *, binning: RecallBinning = "count", n_bins: int = 10
) -> Statistic:
    """-S*R^2 as a statistic for the bootstrap."""
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
    if binning == "count":
        return np.array_split(np.arange(len(ordered)), n_bins)
    edges = np.linspace(ordered[0], ordered[-1], n_bins + 1)[1:-1]
    return np.split(np.arange(len(ordered)), np.searchsorted(ordered, edges))
