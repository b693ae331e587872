"""Logistic regression by damped Newton steps in NumPy: the one solver of every fitted probability of sfumato."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_MAX_STEPS, _TOLERANCE = 100, 1e-18


def sigmoid(logit: Floats) -> Floats:
    """1 / (1 + exp(-logit)) without overflow."""
    found: Floats = 0.5 * (1 + np.tanh(0.5 * logit))
    return found


def log_losses(logit: Floats, target: Floats) -> Floats:
    """(k,) log losses. logit (k,), target (k,) 0 to 1."""
    found: Floats = np.logaddexp(0, logit) - target * logit
    return found


def newton(
    x: Floats, target: Floats, weight: Floats, ridge: Floats, start: Floats, *, centre: Floats, offset: Floats
) -> Floats:
    r"""The parameters p that minimise sum(weight * log loss of offset + x p) + sum(ridge * (p - centre)^2) / 2.

    The problem is convex. Newton steps are halved until the objective falls, so that every step is an improvement. Use
    standardised features: the solver does not scale them.

    x (k, f), target (k,) 0 to 1, weight (k,), offset (k,); ridge, start and centre (f,).
    """

    def objective(parameters: Floats) -> float:
        losses = log_losses(offset + x @ parameters, target)
        return float(weight @ losses + ridge @ (parameters - centre) ** 2 / 2)

    found, value = start, objective(start)
    for _ in range(_MAX_STEPS):
        p = sigmoid(offset + x @ found)
        gradient = x.T @ (weight * (p - target)) + ridge * (found - centre)
        hessian = (x * (weight * p * (1 - p))[:, None]).T @ x + np.diag(ridge)
        # Features may be linear in each other.
        hessian[np.diag_indices(len(ridge))] += 1e-13 * hessian.diagonal().mean() + 1e-300
        step = np.linalg.solve(hessian, gradient)
        if gradient @ step <= _TOLERANCE * weight.sum():
            break
        size = 1.0
        while size > 1e-6 and not (new := objective(found - size * step)) < value:
            size /= 2
        if size <= 1e-6:
            break
        found, value = found - size * step, new
    return found
