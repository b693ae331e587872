r"""The evidence of a Kronecker-factored Laplace posterior as a function of the precision of its prior.

A (p x p) and B (q x q) are the factors, n the pseudo-data count, lambda the prior precision, theta all parameters:

    split damping:   precision A' (x) B',  A' = sqrt(n) A + sqrt(lambda) I,  B' = sqrt(n) B + sqrt(lambda) I
        corrected    -lambda ||theta||^2 / 2 + p q / 2 log lambda - [q log det A' + p log det B'] / 2
        official     -lambda ||theta||^2 / 2 + p q / 2 log lambda - [p log det A' + q log det B']
    exact damping:   precision n A (x) B + lambda I
        corrected    -lambda ||theta||^2 / 2 + p q / 2 log lambda - sum_ij log(n a_i b_j + lambda) / 2

The official form of the released code lacks the factor 1/2 and swaps the exponents. Each derivative for log lambda
falls monotonically, so the maximum is unique. The evidence says nothing about n.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Damping = Literal["split", "exact"]
"""Where the prior precision enters: in both factors (published), or in their product."""

EvidenceForm = Literal["corrected", "official"]
"""The evidence, or what the released code maximises."""

_LOWEST, _HIGHEST = -80.0, 80.0
"""Range of log lambda that is searched."""


def log_evidence(
    prior_precision: Tensor,
    a: Tensor,
    b: Tensor,
    squared_norm: float,
    *,
    pseudo_data: float = 1.0,
    damping: Damping = "split",
    form: EvidenceForm = "corrected",
) -> Tensor:
    """The evidence up to terms without the prior precision. prior_precision (l,), a, b (p,) -> (l,)."""
    _check(damping, form)
    value = prior_precision.double().unsqueeze(1)
    a, b = a.double().clamp_min(0), b.double().clamp_min(0)
    p, q = len(a), len(b)
    found = -value[:, 0] * squared_norm / 2 + p * q / 2 * value[:, 0].log()
    if damping == "exact":
        return found - (pseudo_data * torch.outer(a, b).flatten() + value).log().sum(1) / 2
    log_det_a, log_det_b = ((math.sqrt(pseudo_data) * x + value.sqrt()).log().sum(1) for x in (a, b))
    if form == "official":
        return found - (p * log_det_a + q * log_det_b)
    return found - (q * log_det_a + p * log_det_b) / 2


def best_prior_precision(
    a: Tensor,
    b: Tensor,
    squared_norm: float,
    *,
    pseudo_data: float = 1.0,
    damping: Damping = "split",
    form: EvidenceForm = "corrected",
) -> float:
    """The prior precision with the largest evidence: the root of the derivative for log lambda, by bisection."""
    _check(damping, form)
    a, b = a.detach().double().clamp_min(0), b.detach().double().clamp_min(0)
    p, q = len(a), len(b)
    product = pseudo_data * torch.outer(a, b)

    def slope(log_value: float) -> float:
        value = math.exp(log_value)
        if damping == "exact":
            shrunk = float((value / (product + value)).sum()) / 2
        else:
            parts = [float((value**0.5 / (pseudo_data**0.5 * x + value**0.5)).sum()) / 2 for x in (a, b)]
            shrunk = p * parts[0] + q * parts[1] if form == "official" else (q * parts[0] + p * parts[1]) / 2
        return -value * squared_norm / 2 + p * q / 2 - shrunk

    low, high = _LOWEST, _HIGHEST
    if not slope(low) > 0 > slope(high):
        raise ValueError(
            "best_prior_precision: the evidence has no maximum; the factors and the parameters must not be zero"
        )
    while high - low > 1e-14 * max(1.0, abs(low), abs(high)):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def _check(damping: str, form: str) -> None:
    for what, value, known in (
        ("damping", damping, get_args(Damping)),
        ("form of the evidence", form, get_args(EvidenceForm)),
    ):
        if value not in known:
            raise ValueError(f"unknown {what} {value!r}; known: {', '.join(known)}")
    if damping == "exact" and form == "official":
        raise ValueError("the official evidence is defined for split damping only; use damping='split'")
