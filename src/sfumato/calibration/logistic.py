"""Logistic regression by Newton's method: the one solver of every fitted probability of sfumato."""

import torch
from torch import Tensor
from torch.nn import functional

_MAX_STEPS, _TOLERANCE = 100, 1e-18


def fit_logistic(
    features: Tensor, target: Tensor, *, weight: Tensor | None = None, penalty: float = 0.0
) -> tuple[Tensor, float]:
    r"""The weights w and the bias b that minimise the mean log loss of sigmoid(x w + b) plus penalty/2 ||w||^2.

    The problem is convex. Newton steps are halved until the objective falls, so that every step is an improvement. Use
    standardised features: the penalty treats all alike.

    features (k, f), target (k,), weight (k,).
    """
    x, y = features.detach().double(), target.detach().double()
    w = torch.ones_like(y) if weight is None else weight.detach().double()
    if x.ndim != 2 or y.shape != x.shape[:1] or w.shape != y.shape:
        raise ValueError(
            f"fit_logistic: got features {tuple(x.shape)}, target {tuple(y.shape)} and weight {tuple(w.shape)};"
            " expected (k, f), (k,) and (k,)"
        )
    if not w.sum() > 0:
        raise ValueError("fit_logistic: the weights of the rows add up to 0")
    w = w / w.sum()
    x = torch.cat([x, torch.ones_like(y).unsqueeze(1)], dim=1)
    ridge = torch.full((x.shape[1],), penalty, dtype=torch.float64, device=x.device)
    ridge[-1] = 0
    found = torch.zeros_like(ridge)
    rate = ((w * y).sum() + 1e-6) / (1 + 2e-6)
    found[-1] = torch.logit(rate)

    def objective(parameters: Tensor) -> Tensor:
        losses = functional.binary_cross_entropy_with_logits(x @ parameters, y, reduction="none")
        return (w * losses).sum() + (ridge * parameters.square()).sum() / 2

    value = objective(found)
    for _ in range(_MAX_STEPS):
        p = torch.sigmoid(x @ found)
        gradient = x.T @ (w * (p - y)) + ridge * found
        curvature = (w * p * (1 - p)).unsqueeze(1)
        hessian = x.T @ (curvature * x) + torch.diag(ridge)
        hessian.diagonal().add_(1e-13 * hessian.diagonal().mean() + 1e-300)  # Features may be linear in each other.
        step = torch.linalg.solve(hessian, gradient)
        if float(gradient @ step) <= _TOLERANCE:
            break
        size = 1.0
        while size > 1e-6 and not (new := objective(found - size * step)) < value:
            size /= 2
        if size <= 1e-6:
            break
        found, value = found - size * step, new
    return found[:-1].clone(), float(found[-1])
