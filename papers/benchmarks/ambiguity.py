"""Does a number of a query say how many things it could mean? Rank correlations with the true number of matches.

Every figure should stand beside :func:`baselines`: an estimator that a lookup of the training counts beats has learnt
no ambiguity, and one that is not tried on wordings that training lacked may be such a lookup.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from sfumato.evaluation.trust import words_of
from sfumato.metrics.bootstrap import Interval, balanced_spearman, percentile_interval, spearman
from sfumato.metrics.relevance import Relevance

FIGURES = ("balanced", "balanced_below_16", "all")
"""Spearman correlations with the number of matches: over sets of queries balanced over powers of two, the same of
queries with fewer than 16 matches, and over all queries."""


def measure_ambiguity(
    scores: Mapping[str, np.ndarray], relevance: Relevance, *, n_resamples: int = 200, seed: int = 0
) -> dict[str, dict[str, Interval]]:
    """Correlate numbers of queries with their true number of matches.

    Intervals resample queries and, independently, the items of the gallery, which changes the numbers of matches.
    """
    whole = {name: _figures(values, relevance.counts, seed) for name, values in scores.items()}
    random = np.random.default_rng(seed)
    resampled = {name: np.full((n_resamples, len(FIGURES)), np.nan) for name in scores}
    query = relevance.query_of_item
    n = relevance.n_gallery
    for k in range(n_resamples):
        weight = np.bincount(random.integers(n, size=n), minlength=n)
        counts = np.bincount(query, weights=weight[relevance.indices], minlength=relevance.n_queries).astype(int)
        chosen = random.integers(relevance.n_queries, size=relevance.n_queries)
        for name, values in scores.items():
            resampled[name][k] = _figures(values[chosen], counts[chosen], seed)
    return {
        name: {figure: percentile_interval(whole[name][i], resampled[name][:, i]) for i, figure in enumerate(FIGURES)}
        for name in scores
    }


def _figures(values: np.ndarray, counts: np.ndarray, seed: int) -> list[float]:
    """The FIGURES of the queries with a match."""
    values, counts = values[counts > 0], counts[counts > 0]
    few = counts < 16
    return [
        balanced_spearman(values, counts, n_sets=50, seed=seed),
        balanced_spearman(values[few], counts[few], n_sets=50, seed=seed),
        spearman(values, counts) if len(values) > 1 else float("nan"),
    ]


def baselines(
    texts: Sequence[str],
    features: np.ndarray,
    training_texts: Sequence[str],
    training_features: np.ndarray,
    training_counts: np.ndarray,
) -> dict[str, np.ndarray]:
    """Trivial predictors of the number of matches of texts, which need no model of images.

    features (n, c), training_features (m, c), training_counts (m,) -> (n,).
    """
    log_count = np.log(np.maximum(training_counts, 1))
    own = dict(zip(training_texts, log_count.tolist(), strict=True))
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (features, training_features))
    nearest = np.argpartition(-(a @ b.T), 5, axis=1)[:, :5]
    return {
        "lookup": np.array([own.get(text, 0.0) for text in texts]),
        "nearest texts": log_count[nearest].mean(1),
        "few words": -np.array([float(len(words_of(text))) for text in texts]),
    }
