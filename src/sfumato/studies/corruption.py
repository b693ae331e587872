"""The corruption study: the change of an uncertainty when images are erased or blurred, and words dropped or replaced.

The corruptions and their figures are those of `sfumato trust`, which measures every estimator. This study follows one
estimator and adds a curve with intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sfumato.evaluation.estimators import Estimator, Matching, estimate_uncertainty
from sfumato.evaluation.trust import Corrupted, follow_corruption
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.bootstrap import Interval, bootstrap
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.search.exact import rank_relevant


@dataclass(frozen=True)
class CorruptionCurve:
    """The response of one estimator to one corruption."""

    n: int  # number of corrupted items
    strengths: list[float]  # ascending, from 0 for the clean items
    mean: list[Interval]  # mean uncertainty at each strength
    recall: list[float]  # recall@1 of the items as queries at each strength
    spearman: Interval
    rises: Interval
    monotone: Interval  # fraction of items whose uncertainty rises and never falls from one strength to the next
    auroc: Interval  # of items at the greatest strength against the same items clean

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)


def corruption_curves(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    relevance: Relevance,
    matching: Matching,
    corrupted: Sequence[Corrupted],
    *,
    estimator: Estimator,
    groups: np.ndarray | None = None,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, CorruptionCurve]:
    """Follow one estimator through several corruptions.

    Args:
        queries: (n, d) embeddings of the clean items.
        gallery: (m, d) embeddings of the other side, for the recall and for estimators that use them.
        relevance: query -> its true items.
        matching: the distance and the match logits.
        corrupted: some queries, each with a true item, embedded from corrupted inputs.
        estimator: of uncertainty.
        groups: (n,) numbers; queries with the same number are resampled together, as the captions of an image. None
            resamples each query by itself.
        n_resamples: number of bootstrap resamples of the intervals.
        level: coverage of the intervals.
        seed: of the resamples and of sampled estimators.

    Returns:
        A curve for each corruption, by its name.
    """
    curves = {}
    estimators: Mapping[str, Estimator] = {estimator.name: estimator}
    for c in corrupted:
        own, ground_truth = queries[torch.from_numpy(c.index)], relevance.select_queries(c.index)
        ranks = rank_relevant(own, gallery, ground_truth, matching.oriented_distance)
        found = follow_corruption(
            c,
            estimate_uncertainty(own, gallery, matching, estimators=estimators, seed=seed),
            gallery,
            ground_truth,
            matching,
            estimators=estimators,
            recall=float(np.mean(per_query_metrics(ranks, ground_truth)["recall@1"])),
            resample=partial(
                bootstrap, n=len(c.index), n_resamples=n_resamples, level=level, seed=seed,
                groups=None if groups is None else groups[c.index],
            ),
            seed=seed,
        )  # fmt: skip
        figures = found.estimators[estimator.name]
        curves[c.name] = CorruptionCurve(found.n, found.strengths, found.means[estimator.name], found.recall, **figures)
    return curves
