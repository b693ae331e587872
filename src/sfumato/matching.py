"""From a distance to the probability of a match: the only place where "smaller is closer" turns into "larger is likelier".

    logit = logit_bias - logit_scale * distance        probability = sigmoid(logit)

It knows nothing of where distances come from, except in the sampled probability of PCME, which averages over draws.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.distances import DEFAULT_MEMORY_MB, reduce_sample_distances
from sfumato.gaussian import GaussianEmbedding


def match_logit(distance: Tensor, logit_scale: Tensor | float, logit_bias: Tensor | float) -> Tensor:
    """logit_bias - logit_scale * distance, of any shape; the one sign flip of the package."""
    return logit_bias - logit_scale * distance


def match_probability(distance: Tensor, logit_scale: Tensor | float, logit_bias: Tensor | float) -> Tensor:
    """Probability that a pair at this distance matches, sigmoid(logit_bias - logit_scale * distance).

    Args:
        distance: any shape, smaller is closer.
        logit_scale: a > 0.
        logit_bias: b, the logit at distance 0.

    Returns:
        Probabilities in [0, 1], of the shape of distance.

    Example:
        >>> match_probability(torch.tensor([1.0, 2.0]), 5.0, 5.0)
        tensor([0.5000, 0.0067])
    """
    return torch.sigmoid(match_logit(distance, logit_scale, logit_bias))


class MatchingLogits(nn.Module):
    """The learnable scale and bias of the match logits.

    The scale is stored as its logarithm: it stays positive whatever the optimiser does, while the published code leaves it
    free, so that a step across zero would turn distances upside down. Neither takes part in weight decay.

    Args:
        logit_scale: initial a > 0 (5 in Chun 2024, table B.1).
        logit_bias: initial b (5 there).

    Raises:
        ValueError: logit_scale is not a positive number.
    """

    def __init__(self, logit_scale: float = 5.0, logit_bias: float = 5.0) -> None:
        super().__init__()
        if not (logit_scale > 0 and math.isfinite(logit_scale)):
            raise ValueError(
                f"MatchingLogits: logit_scale must be positive, got {logit_scale}; smaller distances must be likelier matches"
            )
        self.log_logit_scale = nn.Parameter(torch.tensor(math.log(logit_scale)))
        self.logit_bias = nn.Parameter(torch.tensor(float(logit_bias)))

    @property
    def logit_scale(self) -> Tensor:
        """() the scale a > 0, differentiable."""
        return self.log_logit_scale.exp()

    def forward(self, distance: Tensor) -> Tensor:
        """Logits of the shape of distance."""
        return match_logit(distance, self.logit_scale, self.logit_bias)


def sampled_match_log_probability(
    x: GaussianEmbedding,
    y: GaussianEmbedding,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    n_samples: int = 8,
    generator: torch.Generator | None = None,
    memory_mb: float = DEFAULT_MEMORY_MB,
) -> Tensor:
    r"""Logarithm of PCME's match probability, E sigmoid(b - a ||z_x - z_y||), between all pairs; not squared.

        log p(i, l) = log 1/s^2 sum_jk sigmoid(b - a ||x_i^j - y_l^k||)

    Args:
        x: (n, d) embeddings.
        y: (m, d) embeddings; same d, dtype and device.
        logit_scale: a > 0.
        logit_bias: b.
        n_samples: s draws of each embedding.
        generator: source of the draws.
        memory_mb: working memory for blocks of n * m * s^2 values.

    Returns:
        (n, m) log probabilities <= 0, summed in log space so that none underflows; its negative ranks like a distance.

    Raises:
        ValueError: d, dtype or device differ.

    Paper: Chun et al., CVPR 2021, Eq. 2 and 3 (s = 7); Chun 2024, A.3 (s = 8). The released code of PCME uses
    sigmoid(2 logit): pass 2 a and 2 b for it.
    """
    if x.d != y.d or x.dtype != y.dtype or x.device != y.device:
        raise ValueError(
            f"sampled_match_log_probability: x is (., {x.d}) {x.dtype} on {x.device} and y is (., {y.d}) {y.dtype} on"
            f" {y.device}; both must have the same d, dtype and device"
        )
    samples = x.sample(n_samples, generator=generator), y.sample(n_samples, generator=generator)

    def reduce(distance: Tensor) -> Tensor:
        log_sigmoid = functional.logsigmoid(match_logit(distance, logit_scale, logit_bias))
        return log_sigmoid.flatten(2).logsumexp(-1) - 2 * math.log(n_samples)

    return reduce_sample_distances(*samples, reduce, memory_mb=memory_mb)


def fit_logits(distance: Tensor, match: Tensor, *, weight: Tensor | None = None) -> tuple[float, float]:
    """Calibrate: the (logit_scale, logit_bias) that maximise the likelihood of known matches (Platt scaling).

    A convex problem in two numbers, solved by L-BFGS in float64; fit on held-out pairs, never on the training pairs. The
    probabilities then hold for pairs drawn as these were: among few candidates or many, the share of matches differs.

    Args:
        distance: (k,) or any shape; flattened.
        match: labels in [0, 1] of the same shape.
        weight: how much each pair counts, same shape; all alike if None.

    Returns:
        (logit_scale > 0, logit_bias) as floats.

    Raises:
        ValueError: shapes differ, values are not finite, there are only matches or only non-matches, or matches are on
            average not closer than non-matches, so that no positive scale fits.
    """
    distance, match = distance.detach().flatten().double(), match.detach().flatten().double()
    weight = torch.ones_like(match) if weight is None else weight.detach().flatten().double()
    if distance.shape != match.shape or weight.shape != match.shape:
        raise ValueError(
            f"fit_logits: got {distance.numel()} distances, {match.numel()} labels and {weight.numel()} weights; they must be as many"
        )
    if not torch.isfinite(distance).all() or not ((match >= 0) & (match <= 1)).all():
        raise ValueError("fit_logits: distances must be finite and match must lie in [0, 1]")
    positive, negative = weight * match, weight * (1 - match)
    if positive.sum() == 0 or negative.sum() == 0:
        raise ValueError("fit_logits: needs matching and non-matching pairs, got only one kind")
    means = (positive * distance).sum() / positive.sum(), (negative * distance).sum() / negative.sum()
    if not means[0] < means[1]:
        raise ValueError(
            f"fit_logits: matches (mean distance {means[0]:.4g}) are not closer than non-matches ({means[1]:.4g}); train the model further"
        )
    # Standardised distances make the problem well scaled; a weak prior keeps separable data finite.
    centre, spread = distance.mean(), distance.std(correction=0).clamp_min(1e-12)
    z, total = (distance - centre) / spread, weight.sum()
    prior = (positive.sum() / negative.sum()).log()
    parameters = torch.stack([torch.ones_like(prior), prior]).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [parameters], max_iter=200, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        logit = match_logit(z, parameters[0], parameters[1])
        losses = functional.binary_cross_entropy_with_logits(logit, match, reduction="none")
        objective = (weight * losses).sum() / total + 1e-9 * parameters[0].square()
        objective.backward()
        return objective

    with torch.enable_grad():
        optimiser.step(closure)
    scale, bias = (parameters.detach()[0] / spread).item(), (parameters[1] + parameters[0] * centre / spread).item()
    if not scale > 0:
        raise ValueError(
            "fit_logits: the best scale is not positive; the distances do not separate matches from non-matches"
        )
    return scale, bias
