"""Platt scaling: the logit scale and bias with the maximum likelihood on held-out pairs."""

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.matching import match_logit


def fit_logits(distance: Tensor, match: Tensor, *, weight: Tensor | None = None) -> tuple[float, float]:
    """The (logit_scale, logit_bias) that maximise the likelihood of known matches (Platt scaling).

    A convex problem in two numbers, solved by L-BFGS in float64. Fit on held-out pairs, never on the training pairs.
    The probabilities are valid for pairs from the same distribution; with another fraction of matches they need a
    shift.

    Args:
        distance: (k,) or any shape; flattened.
        match: labels in [0, 1] of the same shape.
        weight: of each pair, same shape; 1 for all if None.

    Returns:
        (logit_scale > 0, logit_bias).

    Raises:
        ValueError: shapes differ, values are not finite, there are only matches or only non-matches, or matches are on
            average not closer than non-matches, so that no positive scale fits.

    Paper: Platt, "Probabilistic outputs for support vector machines", 1999.
    """
    distance, match = distance.detach().flatten().double(), match.detach().flatten().double()
    weight = torch.ones_like(match) if weight is None else weight.detach().flatten().double()
    if distance.shape != match.shape or weight.shape != match.shape:
        raise ValueError(
            f"fit_logits: got {distance.numel()} distances, {match.numel()} labels and {weight.numel()} weights;"
            " the numbers must be equal"
        )
    if not torch.isfinite(distance).all() or not ((match >= 0) & (match <= 1)).all():
        raise ValueError("fit_logits: distances must be finite and match must lie in [0, 1]")
    positive, negative = weight * match, weight * (1 - match)
    if positive.sum() == 0 or negative.sum() == 0:
        raise ValueError("fit_logits: needs matching and non-matching pairs, got only one kind")
    means = (positive * distance).sum() / positive.sum(), (negative * distance).sum() / negative.sum()
    if not means[0] < means[1]:
        raise ValueError(
            f"fit_logits: matches (mean distance {means[0]:.4g}) are not closer than non-matches ({means[1]:.4g});"
            " train the model further"
        )
    # Standardised distances make the problem well scaled; a weak prior keeps separable data finite.
    centre, deviation = distance.mean(), distance.std(correction=0).clamp_min(1e-12)
    z, total = (distance - centre) / deviation, weight.sum()
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
    scale, bias = (
        (parameters.detach()[0] / deviation).item(),
        (parameters[1] + parameters[0] * centre / deviation).item(),
    )
    if not scale > 0:
        raise ValueError(
            "fit_logits: the best scale is not positive; the distances do not separate matches from non-matches"
        )
    return scale, bias
