"""Conformal result sets: a distance within which a query's match lies with a stated probability."""

import math
from typing import Literal

import numpy as np

from sfumato.calibration.query_scores import QueryScores


def conformal_radius(scores: QueryScores, alpha: float, *, contains: Literal["any", "all"] = "any") -> float:
    """Distance within which a query's match lies with a probability of at least 1 - alpha.

    Split conformal prediction: the ceil((q + 1)(1 - alpha))-th smallest of q held-out scores. The probability is over
    the held-out queries and the new one, which must be exchangeable; equal scores only raise it.

    Args:
        scores: of q held-out queries.
        alpha: fraction of queries whose set may miss, in (0, 1).
        contains: "any" for a set that contains at least one of the query's matches; "all" for all of them.

    Returns:
        The radius; the set contains every item within it. It is infinite (the whole gallery) if q < 1/alpha - 1.

    Raises:
        ValueError: alpha is outside of (0, 1), or contains is neither.

    Paper: Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005; Papadopoulos et al., ECML 2002.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"conformal_radius: alpha must be between 0 and 1, got {alpha}")
    if contains not in ("any", "all"):
        raise ValueError(f"conformal_radius: contains must be 'any' or 'all', got {contains!r}")
    values = np.sort(scores.closest_match if contains == "any" else scores.farthest_match)
    rank = math.ceil((len(values) + 1) * (1 - alpha) - 1e-9)
    return float(values[rank - 1]) if rank <= len(values) else math.inf
