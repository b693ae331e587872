"""The probability of a match from a distance: the only sign flip, from smaller is closer to larger is likelier.

    logit = logit_bias - logit_scale * distance        probability = sigmoid(logit)

It does not depend on the formula of the distance, except in the sampled probability of PCME, which averages over
samples.
"""

import math
from typing import NamedTuple

from sfumato.arrays import Array, as_array, is_tensor, sigmoid
from sfumato.distances.distance import Distance, sampled

MATCH_PROBABILITY = "match_probability"
"""Name of :func:`match_probability_distance`, which needs the logits of a model and is therefore not in DISTANCES."""


class SampledLogits(NamedTuple):
    """Match logits that were learnt on distances of samples, as PCME's."""

    logit_scale: float  # a > 0, for the plain sigmoid
    logit_bias: float  # b
    n_samples: int  # number of samples of each embedding at test time


def match_logit(distance: Array, logit_scale: Array, logit_bias: Array) -> Array:
    """logit_bias - logit_scale * distance, the one sign flip of the package."""
    return logit_bias - logit_scale * distance


def match_probability(distance: Array, logit_scale: Array, logit_bias: Array) -> Array:
    """Probability that a pair at this distance matches, sigmoid(logit_bias - logit_scale * distance).

    Args:
        distance: any shape, a tensor or an array; smaller is closer.
        logit_scale: a > 0.
        logit_bias: b, the logit at distance 0.

    Returns:
        Probabilities in [0, 1], of the shape of distance.

    Example:
        >>> import numpy as np
        >>> match_probability(np.array([1.0, 2.0]), 5.0, 5.0).round(4)
        array([0.5   , 0.0067])
    """
    logit = match_logit(as_array(distance, "distance", "match_probability"), logit_scale, logit_bias)
    return logit.sigmoid() if is_tensor(logit) else sigmoid(logit)


def match_probability_distance(logit_scale: Array, logit_bias: Array, *, n_samples: int = 8) -> Distance:
    r"""PCME's match probability E sigmoid(b - a ||z_x - z_y||) as a distance to rank by.

        -log 1/s^2 sum_jk sigmoid(b - a ||x_i^j - y_l^k||)

    Paper: Chun et al., CVPR 2021, Eq. 2 and 3, 3.2.3 and table 1, "Match prob" (s = 7; figure E.1 varies s); Chun 2024,
    A.3 (s = 8). The released code of PCME uses sigmoid(2 logit): give 2 a and 2 b for it.
    """
    if not logit_scale > 0 or n_samples < 1:
        given = f"got {logit_scale} and {n_samples}"
        raise ValueError(f"match_probability_distance: needs logit_scale > 0 and n_samples >= 1, {given}")

    def reduce(distance: Array) -> Array:
        """(n, m, s, s) distances of samples -> (n, m) negative logarithms of the mean match probability."""
        from torch.nn import functional

        log_sigmoid = functional.logsigmoid(match_logit(distance, logit_scale, logit_bias)).flatten(2)
        return math.log(log_sigmoid.shape[-1]) - log_sigmoid.logsumexp(-1)

    return sampled(MATCH_PROBABILITY, reduce, n_samples=n_samples)
