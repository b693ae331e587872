"""Do probabilities mean what they say? It knows predictions and outcomes, not where either came from."""

from typing import Any

import torch
from torch import Tensor


def reliability_curve(probability: Tensor, match: Tensor, *, n_bins: int = 15) -> list[dict[str, Any]]:
    """Predicted against observed, in bins of equal width.

    Args:
        probability: (k,) predictions in [0, 1].
        match: (k,) labels in [0, 1].
        n_bins: number of bins.

    Returns:
        For each bin that holds anything {"probability", "observed", "count"}: means and size.

    Raises:
        ValueError: shapes differ, a probability is outside of [0, 1], or n_bins < 1.
    """
    if n_bins < 1:
        raise ValueError(f"reliability_curve: n_bins must be at least 1, got {n_bins}")
    if probability.shape != match.shape or probability.ndim != 1:
        raise ValueError(
            f"reliability_curve: got {tuple(probability.shape)} probabilities for {tuple(match.shape)} labels; both must be (k,)"
        )
    if not ((probability >= 0) & (probability <= 1)).all():
        raise ValueError("reliability_curve: probabilities must lie in [0, 1]")
    which = (probability * n_bins).long().clamp_max(n_bins - 1)
    count = torch.bincount(which, minlength=n_bins)
    sums = [torch.bincount(which, weights=v.double(), minlength=n_bins) for v in (probability, match)]
    return [
        {"probability": float(sums[0][b] / count[b]), "observed": float(sums[1][b] / count[b]), "count": int(count[b])}
        for b in range(n_bins)
        if count[b]
    ]


def expected_calibration_error(probability: Tensor, match: Tensor, *, n_bins: int = 15) -> float:
    """Mean gap between predicted and observed over the bins of :func:`reliability_curve`, weighted by their size; in [0, 1].

    Args:
        probability, match, n_bins: see :func:`reliability_curve`.

    Raises:
        ValueError: as there, or there is nothing to average.
    """
    if not len(probability):
        raise ValueError("expected_calibration_error: got no probabilities")
    curve = reliability_curve(probability, match, n_bins=n_bins)
    return float(sum(b["count"] * abs(b["probability"] - b["observed"]) for b in curve)) / len(probability)


def brier_score(probability: Tensor, match: Tensor) -> float:
    """Mean squared gap between prediction and label: 0 for a perfect oracle, 0.25 for always saying one half.

    Args:
        probability: (k,) predictions in [0, 1].
        match: (k,) labels in [0, 1].

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: shapes differ, or there is nothing to average.
    """
    if probability.shape != match.shape or probability.ndim != 1 or not len(probability):
        raise ValueError(
            f"brier_score: got {tuple(probability.shape)} probabilities for {tuple(match.shape)} labels; both must be (k,), k >= 1"
        )
    return float((probability.double() - match.double()).square().mean())
