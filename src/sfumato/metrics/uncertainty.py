"""Correlation of an uncertainty with recall and with a known ambiguity."""

from typing import Any

import numpy as np


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


def none_if_nan(value: float) -> float | None:
    """None for an undefined number: JSON has no NaN."""
    return None if np.isnan(value) else value
