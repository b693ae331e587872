r"""The score -S*R^2 of post-hoc papers: correlation of an uncertainty with recall, over bins.

    S = Spearman(bin number, recall@1 of the bin),    R2 = squared Pearson of the same,    score = -S * R2

It is 1 if recall falls linearly from bin to bin, and does not ask how far it falls: bins with a recall of .50, .49, .48
score as well as .9, .5, .1. The same numbers can score .7 or 0 by the binning alone. Report a binning by its name, with
the sizes of the bins, an interval, and an AUROC beside it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from sfumato.metrics.bootstrap import Interval, Statistic, bootstrap, none_if_nan, pearson, spearman

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
