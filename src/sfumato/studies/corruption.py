"""Does an uncertainty rise when pictures are erased or blurred, and when words are dropped or unknown?

What is corrupted, and how an estimator follows it, is that of `sfumato trust`, which asks it of every estimator; here one of them gets a
curve with intervals.
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
    """How one estimator follows one corruption.

    Attributes:
        n: items that were corrupted.
        strengths: from 0, the items as they are.
        mean: uncertainty at each strength, averaged over items.
        recall: recall@1 of the items as queries at each strength.
        spearman: of strength and uncertainty within an item, averaged over items; an item that never changes counts 0.
        rises: share of items less certain at the greatest strength than as they are; ties one half.
        monotone: share that never falls from one strength to the next, and rises.
        auroc: of items at the greatest strength against the same items as they are.
    """

    n: int
    strengths: list[float]
    mean: list[Interval]
    recall: list[float]
    spearman: Interval
    rises: Interval
    monotone: Interval
    auroc: Interval

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and dictionaries."""
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
        queries: (n, d) embeddings of the items as they are.
        gallery: (m, d) embeddings of the other side, for estimators that look at it and for recall.
        relevance: query -> its true items.
        matching: distance and match logits.
        corrupted: some queries, each with a true item, embedded from corrupted inputs.
        estimator: of uncertainty.
        groups: (n,) queries that are resampled together, as the captions of an image; None resamples each by itself.
        n_resamples, level, seed: of the bootstrap intervals.

    Returns:
        A curve for each corruption, by its name.
    """
    curves = {}
    estimators: Mapping[str, Estimator] = {estimator.name: estimator}
    resample = partial(bootstrap, n_resamples=n_resamples, level=level, seed=seed)
    for c in corrupted:
        own, ground_truth = queries[torch.from_numpy(c.index)], relevance.select_queries(c.index)
        ranks = rank_relevant(own, gallery, ground_truth, matching.oriented_distance)
        found = follow_corruption(
            c,
            estimate_uncertainty(own, gallery, matching, estimators=estimators),
            gallery,
            ground_truth,
            matching,
            estimators=estimators,
            recall=float(np.mean(per_query_metrics(ranks, ground_truth)["recall@1"])),
            resample=partial(resample, groups=None if groups is None else groups[c.index]),
        )
        figures = found.estimators[estimator.name]
        curves[c.name] = CorruptionCurve(found.n, found.strengths, found.means[estimator.name], found.recall, **figures)
    return curves
