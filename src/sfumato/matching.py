"""The probability of a match from a distance: the only sign flip, from smaller is closer to larger is likelier.

    logit = logit_bias - logit_scale * distance        probability = sigmoid(logit)

It does not depend on the formula of the distance, except in the sampled probability of PCME, which averages over
samples.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.distances.distance import Distance, sampled
from sfumato.gaussian import Array, as_tensor

MATCH_PROBABILITY = "match_probability"
"""Name of :func:`match_probability_distance`, which needs the logits of a model and is therefore not in DISTANCES."""


class SampledLogits(NamedTuple):
    """Match logits that were learnt on distances of samples, as PCME's."""

    logit_scale: float  # a > 0, for the plain sigmoid
    logit_bias: float  # b
    n_samples: int  # number of samples of each embedding at test time


def match_logit(distance: Tensor, logit_scale: Tensor | float, logit_bias: Tensor | float) -> Tensor:
    """logit_bias - logit_scale * distance, the one sign flip of the package."""
    return logit_bias - logit_scale * distance


def match_probability(distance: Array, logit_scale: Tensor | float, logit_bias: Tensor | float) -> Tensor:
    """Probability that a pair at this distance matches, sigmoid(logit_bias - logit_scale * distance).

    Args:
        distance: any shape, a tensor or an array; smaller is closer.
        logit_scale: a > 0.
        logit_bias: b, the logit at distance 0.

    Returns:
        Probabilities in [0, 1], of the shape of distance.

    Example:
        >>> match_probability(torch.tensor([1.0, 2.0]), 5.0, 5.0)
        tensor([0.5000, 0.0067])
    """
    distance = as_tensor(distance, "distance", "match_probability")
    return torch.sigmoid(match_logit(distance, logit_scale, logit_bias))


class MatchingLogits(nn.Module):
    """The learnable scale and bias of the match logits.

    The scale a is stored as its logarithm, so that it stays positive. A step of Adam then changes a by about a times
    the learning rate. In the released code, which learns a itself, it changes a by about the learning rate. Neither
    parameter has weight decay.

    Args:
        logit_scale: initial a > 0 (5 in Chun 2024, table B.1).
        logit_bias: initial b (5 there).
        free: learn a itself, as the released code does. An update across zero would reverse the order of all
            distances, so :meth:`constrain` refuses it.
        largest: largest a, which :meth:`constrain` enforces; infinite for no limit.

    Raises:
        ValueError: logit_scale is not a positive number, or above the largest.
    """

    def __init__(
        self, logit_scale: float = 5.0, logit_bias: float = 5.0, *, free: bool = False, largest: float = math.inf
    ) -> None:
        super().__init__()
        if not (logit_scale > 0 and math.isfinite(logit_scale)):
            raise ValueError(
                f"MatchingLogits: logit_scale must be positive, got {logit_scale};"
                " smaller distances must be likelier matches"
            )
        if logit_scale > largest:
            raise ValueError(f"MatchingLogits: logit_scale must be at most {largest:g}, the largest, got {logit_scale}")
        self.free, self.largest = free, largest
        if free:
            self.free_logit_scale = nn.Parameter(torch.tensor(float(logit_scale)))
        else:
            self.log_logit_scale = nn.Parameter(torch.tensor(math.log(logit_scale)))
        self.logit_bias = nn.Parameter(torch.tensor(float(logit_bias)))

    @property
    def logit_scale(self) -> Tensor:
        """() the scale a > 0, differentiable."""
        return self.free_logit_scale if self.free else self.log_logit_scale.exp()

    @torch.no_grad()
    def constrain(self) -> None:
        """Limit the scale after an update of the parameters.

        Raises:
            ArithmeticError: a free scale is no longer positive.
        """
        if self.free and not self.free_logit_scale > 0:
            raise ArithmeticError(
                f"the free scale of the match logits is {float(self.free_logit_scale):g}, which reverses all distances;"
                " learn its logarithm (loss.free_scale=false), or lower optim.lr or optim.logits_lr_multiplier"
            )
        if self.free:
            self.free_logit_scale.clamp_(max=self.largest)
        else:
            self.log_logit_scale.clamp_(max=math.log(self.largest))

    def forward(self, distance: Tensor) -> Tensor:
        """Logits of distances.

        Args:
            distance: any shape, smaller is closer.

        Returns:
            Logits of the shape of distance.
        """
        return match_logit(distance, self.logit_scale, self.logit_bias)


def match_probability_distance(
    logit_scale: Tensor | float, logit_bias: Tensor | float, *, n_samples: int = 8
) -> Distance:
    r"""PCME's match probability E sigmoid(b - a ||z_x - z_y||) as a distance to rank by.

        -log 1/s^2 sum_jk sigmoid(b - a ||x_i^j - y_l^k||)

    Paper: Chun et al., CVPR 2021, Eq. 2 and 3, 3.2.3 and table 1, "Match prob" (s = 7; figure E.1 varies s); Chun 2024,
    A.3 (s = 8). The released code of PCME uses sigmoid(2 logit): give 2 a and 2 b for it.
    """
    if not logit_scale > 0 or n_samples < 1:
        raise ValueError(
            f"match_probability_distance: needs logit_scale > 0 and n_samples >= 1, got {logit_scale} and {n_samples}"
        )

    def reduce(distance: Tensor) -> Tensor:
        """(n, m, s, s) distances of samples -> (n, m) negative logarithms of the mean match probability."""
        log_sigmoid = functional.logsigmoid(match_logit(distance, logit_scale, logit_bias)).flatten(2)
        return math.log(log_sigmoid.shape[-1]) - log_sigmoid.logsumexp(-1)

    return sampled(MATCH_PROBABILITY, reduce, n_samples=n_samples)
