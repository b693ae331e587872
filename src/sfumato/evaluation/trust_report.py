"""The figures of a trust report, and proxies of ambiguity from captions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sfumato.evaluation.estimators import Estimator
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.bootstrap import Interval
from sfumato.metrics.relevance import Relevance


def caption_distance(texts: GaussianEmbedding, relevance: Relevance) -> np.ndarray:
    """Mean squared distance between the means of an image's captions, over all pairs of captions.

    It is a proxy of an image's ambiguity for data without counts of the true matches. It uses the ground truth, namely
    the captions of the image. So it can be used to measure estimators, but is not an estimator.

    Args:
        texts: (m, d) embeddings.
        relevance: image -> its texts.

    Returns:
        (n,) squared distances, one per image; NaN for an image with fewer than two texts.
    """
    mean = texts.mean.double().cpu().numpy()
    result = np.full(relevance.n_queries, np.nan)
    for i, count in enumerate(relevance.counts):
        if count > 1:
            own = mean[relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]]
            result[i] = 2 * count / (count - 1) * np.square(own - own.mean(0)).sum(1).mean()
    return result


def caption_words(texts: Sequence[str], relevance: Relevance) -> np.ndarray:
    """One minus the mean Jaccard overlap of the word sets of an image's captions, over all pairs of captions.

    It is a proxy of ambiguity like :func:`caption_distance`, but needs no model.

    Args:
        texts: m captions.
        relevance: image -> its texts.

    Returns:
        (n,) in [0, 1], one per image; NaN for an image with fewer than two texts.

    Example:
        >>> caption_words(["A red dog.", "a dog"], Relevance.from_lists([[0, 1]], n_gallery=2)).round(3)
        array([0.333])
    """
    words = [set(words_of(text)) for text in texts]
    result = np.full(relevance.n_queries, np.nan)
    for i, count in enumerate(relevance.counts):
        if count > 1:
            own = [words[t] for t in relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]]
            overlaps = [len(a & b) / max(len(a | b), 1) for k, a in enumerate(own) for b in own[:k]]
            result[i] = 1 - sum(overlaps) / len(overlaps)
    return result


def words_of(text: str) -> list[str]:
    """Split a text into lower-case words, which are runs of letters and digits.

    Args:
        text: any text.

    Returns:
        The words in the order of the text.

    Example:
        >>> words_of("A dog's ball, 2x")
        ['a', 'dog', 's', 'ball', '2x']
    """
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


FIGURES: dict[str, str] = {
    "wrong_auroc": "AUROC of wrong against right best items: 0.5 chance, 1 perfect",
    "wrong_aurc": "area under the risk-coverage curve, smaller is better; chance is the error rate",
    "wrong_excess_aurc": "excess AURC (E-AURC): wrong_aurc minus that of a perfect order",
    "wrong_gain": "prediction rejection ratio (PRR): fraction of a perfect order's gain, 0 chance, 1 perfect",
    "risk_at_half": "error rate of the more certain half of the queries",
    "deciles": "Pearson correlation of decile of uncertainty and recall@1; negative if uncertain queries fail",
    "multiplicity": "Spearman with the true number of matches",
    "multiplicity_balanced": "as multiplicity, over sets of queries balanced over powers of two of this number",
    "caption_distance": "Spearman with the mean squared distance between an image's own captions, a proxy of ambiguity",
    "caption_words": "Spearman with 1 - mean word overlap (Jaccard) of an image's own captions; needs no model",
    "out_of_gallery": "AUROC of unanswerable queries, their true matches removed, against the same queries with them",
}
"""The figures that are measured of each estimator. Only the benchmark knows the ground truth behind them."""


@dataclass(frozen=True)
class CorruptionTrust:
    """The response of the estimators to a corruption of the queries.

    Attributes:
        n: number of corrupted queries.
        strengths: ascending, from 0 for the clean inputs.
        recall: recall@1 at each strength, which shows whether the queries become harder.
        estimators: by name, "spearman" (of strength and uncertainty within a query, mean over queries), "rises"
            (fraction of queries that are less certain at the greatest strength than clean; a tie counts one half),
            "monotone" (fraction whose uncertainty rises and never falls from one strength to the next) and "auroc"
            (greatest strength against clean).
        medians: by name, the median uncertainty at each strength.
        means: by name, the mean uncertainty at each strength; None where it is infinite.
    """

    n: int
    strengths: list[float]
    recall: list[float]
    estimators: dict[str, dict[str, Interval]]
    medians: dict[str, list[float]]
    means: dict[str, list[Interval]]


@dataclass(frozen=True)
class DirectionTrust:
    """The figures of one direction.

    Attributes:
        n_queries: number of queries with a true match; the others are left out.
        n_gallery: size of the gallery.
        recall: recall@1 of these queries.
        risk_best: area under the risk-coverage curve of a perfect order; a random order has 1 - recall.
        right_pairs: AUROC of the match probability of a true pair against that of a random wrong pair; one of both per
            query.
        n_out_of_gallery: number of queries in the figure out_of_gallery.
        estimators: by name, the figures of :data:`FIGURES` that are defined here; empty for a constant estimator.
        deciles: by name, recall@1 in ten bins from the most certain queries to the least.
        corruptions: by name.
    """

    n_queries: int
    n_gallery: int
    recall: Interval
    risk_best: Interval
    right_pairs: Interval
    n_out_of_gallery: int
    estimators: dict[str, dict[str, Interval]]
    deciles: dict[str, list[float]]
    corruptions: dict[str, CorruptionTrust]


@dataclass(frozen=True)
class TrustReport:
    """The quality of a model's uncertainties on a split.

    Attributes:
        split: name of the split.
        distance: name of the model's distance.
        calibrated: whether the match logits were fitted on held-out pairs.
        n_images: number of images.
        n_texts: number of texts.
        n_resamples: number of bootstrap resamples of the intervals.
        level: coverage of the intervals.
        seed: seed of all random choices.
        estimators: by name {"estimates": formula, "kind", "cost"}.
        directions: figures by "t2i" and "i2t", or by one of them.
        notes: omitted parts, with reasons.
    """

    split: str
    distance: str
    calibrated: bool
    n_images: int
    n_texts: int
    n_resamples: int
    level: float
    seed: int
    estimators: dict[str, dict[str, str]]
    directions: dict[str, DirectionTrust]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values.

        Returns:
            Plain numbers, strings, lists and dictionaries.
        """
        return asdict(self)


def described(estimators: Mapping[str, Estimator]) -> dict[str, dict[str, str]]:
    """Describe estimators for a report.

    Args:
        estimators: by name.

    Returns:
        By name {"estimates": formula, "kind", "cost"}.
    """
    return {name: {"estimates": e.formula, "kind": e.kind, "cost": e.cost} for name, e in estimators.items()}
