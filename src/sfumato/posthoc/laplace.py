r"""A Laplace posterior of the two projection layers (BayesVLM): what the data left open about the last matrix.

An embedding is f = W a (+ bias + residual), with the input a of the projection layer. A (p x p) and B (q x q) are the
Kronecker factors of the curvature, n the pseudo-data count, lambda the prior precision, theta all parameters:

    posterior precision    A' (x) B',  A' = sqrt(n) A + sqrt(lambda) I,  B' = sqrt(n) B + sqrt(lambda) I
    log evidence           -lambda ||theta||^2 / 2 + p q / 2 log lambda - [q log det A' + p log det B'] / 2

The posterior of W makes f a Gaussian with covariance (a^T A'^-1 a) B'^-1. (The released evidence lacks the factor 1/2
and swaps the exponents.) The derivative of the evidence for log lambda falls monotonically, so the maximum is unique.
It says nothing about n. One pass over pairs and one search for lambda; no gradient step. With final embeddings alone
the method is not available.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import OTHER_SIDE, Side
from sfumato.posthoc.curvature import kronecker_factors, with_bias_column
from sfumato.posthoc.method import FrozenPairs, PosthocMethod, check_rows

_CLASS_BATCH, _PSEUDO_DATA, _MIN_PAIRS = 4096, 10.0, 16

_LOWEST, _HIGHEST = -80.0, 80.0
"""Range of log lambda that is searched."""


def best_prior_precision(a: Tensor, b: Tensor, squared_norm: float, *, pseudo_data: float = 1.0) -> float:
    """The prior precision with the largest evidence, given eigenvalues a (p,), b (q,) of the factors."""
    root_n, p, q = math.sqrt(pseudo_data), len(a), len(b)
    a, b = root_n * a.detach().double().clamp_min(0), root_n * b.detach().double().clamp_min(0)

    def slope(log_value: float) -> float:
        root = math.exp(log_value / 2)
        shrunk = (q * float((root / (a + root)).sum()) + p * float((root / (b + root)).sum())) / 4
        return -(root**2) * squared_norm / 2 + p * q / 2 - shrunk

    low, high = _LOWEST, _HIGHEST
    if not slope(low) > 0 > slope(high):
        raise ValueError(
            "best_prior_precision: the evidence has no maximum; the factors and the parameters must not be zero"
        )
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return math.exp(middle)


@dataclass(frozen=True, eq=False)
class ProjectionPosterior:
    """The posterior of one projection layer."""

    activations: Tensor  # (P, P) factor A; (P + 1, P + 1) with a bias column
    gradients: Tensor  # (d, d) factor B
    prior_precision: float  # lambda
    pseudo_data: float = _PSEUDO_DATA  # n, how often the data count
    bias_column: bool = False  # whether a 1 is appended to the layer's inputs

    @cached_property
    def _inverses(self) -> tuple[Tensor, Tensor, Tensor]:
        """(P,) eigenvalues and (P, P) eigenvectors of A'^-1, and the (d,) diagonal of B'^-1."""
        (alpha, u), (beta, v) = (torch.linalg.eigh(x.double()) for x in (self.activations, self.gradients))
        a, b = (self.pseudo_data**0.5 * x.clamp_min(0) + self.prior_precision**0.5 for x in (alpha, beta))
        return a.reciprocal(), u, v.square() @ b.reciprocal()

    def variance(self, hidden: Tensor) -> Tensor:
        """The diagonal of the covariance of embeddings. hidden (n, P) -> (n, d)."""
        check_rows(hidden, "laplace", "hidden", d=len(self.activations) - self.bias_column)
        a, u, b = self._inverses
        own = (with_bias_column(hidden.double(), self.bias_column) @ u).square() @ a
        return torch.outer(own, b)


class LaplaceProjections(PosthocMethod):
    r"""Embeddings with the posterior variance of their projection layer.

    :meth:`embed` gives mean = f / sqrt(m), var = v / m with m = ||f||^2 + sum(v), so that ||mean||^2 + sum(var) = 1 and
    csd = 2 - 2 * expected cosine. The means point as the frozen embeddings do, and are shorter for uncertain items:
    csd and the inner product rank by the expected cosine, the cosine of the means as the frozen model.

    Paper: Baumann et al., "Post-hoc probabilistic vision-language models", 2025 (BayesVLM).
    """

    name = "laplace"
    summary = "total posterior variance of the item's embedding, relative to its squared length, in [0, 1]"
    per_item = True
    needs_hidden = True

    def __init__(self, posteriors: Mapping[Side, ProjectionPosterior]) -> None:
        self.posteriors = dict(posteriors)

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0) -> Self:
        """Factors by one pass over the pairs, prior precisions by the evidence.

        The softmax of CLIP or, with pairs.logit_bias, the sigmoid of SigLIP. A layer with a bias gets a bias column.
        An item counts once for each of its pairs.
        """
        pairs.at_least(_MIN_PAIRS, cls.name)
        missing = [name for name in ("image_hidden", "text_hidden", "logit_scale") if getattr(pairs, name) is None]
        missing += [] if pairs.projections else ["projections"]
        if missing or pairs.logit_scale is None:
            raise ValueError(
                f"laplace: the pairs have no {', '.join(missing)}. It needs the inputs and the matrices of the"
                " projection layers and the logit scale of the model; with final embeddings alone it is not available"
            )
        order = pairs.pairs[torch.randperm(len(pairs.pairs), generator=torch.Generator().manual_seed(seed))]
        rows: dict[Side, Tensor] = {"image": order[:, 0], "text": order[:, 1]}
        found: dict[Side, ProjectionPosterior] = {}
        for side, other in OTHER_SIDE.items():
            hidden, (matrix, bias) = pairs.hidden(side), pairs.projections[side]
            assert hidden is not None
            factors = kronecker_factors(
                pairs.embeddings(side)[rows[side]],
                hidden[rows[side]],
                pairs.embeddings(other)[rows[other]],
                logit_scale=pairs.logit_scale,
                logit_bias=pairs.logit_bias,
                bias_column=bias is not None,
                class_batch=_CLASS_BATCH,
            )
            norm = sum(float(x.double().square().sum()) for x in (matrix, bias) if x is not None)
            a, b = (torch.linalg.eigvalsh(x.double()) for x in factors)
            best = best_prior_precision(a, b, norm, pseudo_data=_PSEUDO_DATA)
            found[side] = ProjectionPosterior(*factors, best, _PSEUDO_DATA, bias is not None)
        return cls(found)

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed`; the scale is that of the class docstring, the dtype that of x or better."""
        own = self.posteriors["text" if side == "text" else "image"]
        self.check(side, x, d=len(own.gradients))
        if hidden is None:
            raise ValueError("laplace: needs the inputs of the projection layer; pass hidden=")
        check_rows(hidden, self.name, "hidden", n=len(x))
        mean, var = x.double(), own.variance(hidden)
        length = mean.square().sum(1, keepdim=True) + var.sum(1, keepdim=True)
        found = GaussianEmbedding(mean / length.sqrt(), var.log() - length.log())
        return found if x.dtype == torch.float64 else found.to(torch.float32)

    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`; the total variance of :meth:`embed`."""
        return self.embed(side, queries, hidden=hidden).total_variance

    def tensors(self) -> list[Tensor]:
        """See :meth:`PosthocMethod.tensors`."""
        return [x for own in self.posteriors.values() for x in (own.activations, own.gradients)]
