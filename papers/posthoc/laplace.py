r"""A Laplace posterior of the two projection layers (BayesVLM): what the data left open about the last matrix.

An embedding is f = W a (+ bias + residual), with the input a of the projection layer. A (p x p) and B (q x q) are the
Kronecker factors of the curvature, n the pseudo-data count, lambda the prior precision, theta all parameters:

    posterior precision    A' (x) B',  A' = sqrt(n) A + sqrt(lambda) I,  B' = sqrt(n) B + sqrt(lambda) I
    log evidence           -lambda ||theta||^2 / 2 + p q / 2 log lambda - [q log det A' + p log det B'] / 2

The posterior of W makes f a Gaussian with covariance (a^T A'^-1 a) B'^-1. (The released evidence lacks the factor 1/2
and swaps the exponents.) The derivative of the evidence for log lambda falls monotonically, so the maximum is unique.
It says nothing about n. One pass over pairs and one search for lambda; no gradient step. With final embeddings alone
the method is not available.

The factors are sums over pairs. For a source x (not normalised) and the C unit targets Y of its class batch the logits
are z = s Y x / ||x|| (+ b), and

    J = s Y (I - u u^T) / ||x||,    u = x / ||x||
    softmax (CLIP):     H = J^T (diag p - p p^T) J,    p = softmax(z)
    sigmoid (SigLIP):   H = J^T diag(sigmoid(z) sigmoid(-z)) J

H is the generalised Gauss-Newton matrix of -log p(target | source): the curvature of the normalisation is left out, so
it is never indefinite. The sum over sources is taken by matrix products in O(n C d). Labels have no influence.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from papers.posthoc.method import FrozenPairs, PosthocMethod, unit
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.ids import OTHER_SIDE, Side

_CLASS_BATCH, _PSEUDO_DATA, _MIN_PAIRS = 4096, 10.0, 16


# ---------------------------------------------------------------- curvature
_MAX_ENTRIES = 2**24
"""Entries of the matrix of sources by targets that are in memory at a time, in three copies."""


class KroneckerFactors(NamedTuple):
    """A sum of curvatures over n items as a Kronecker product."""

    activations: Tensor  # (P, P) A, the sum of a a^T over the inputs a of the projection layer, divided by sqrt(n)
    gradients: Tensor  # (d, d) B, the sum of H divided by sqrt(n)


@torch.no_grad()
def summed_curvature(
    sources: Tensor, targets: Tensor, *, logit_scale: float, logit_bias: float | None = None
) -> Tensor:
    """The sum of H over sources that share their targets.

    Paper: Baumann et al., "Post-hoc probabilistic vision-language models", 2025 (BayesVLM); the order of the sums is
    ours.

    sources (n, d), targets (c, d) -> (d, d).
    """
    y = unit(targets)
    if logit_bias is None:
        y = y - y.mean(0)  # Softmax and curvature stay the same, and the differences below lose fewer digits.
    c, d = y.shape
    total, weights = y.new_zeros(d, d, dtype=torch.float64), y.new_zeros(c, dtype=torch.float64)
    for x in sources.to(y.dtype).split(max(1, _MAX_ENTRIES // max(1, c))):
        u, w = unit(x), (logit_scale / x.norm(dim=1, keepdim=True)).square()
        cosine = u @ y.T
        if logit_bias is None:
            q = torch.softmax(logit_scale * cosine, dim=1)
            centre = q @ y
        else:
            p = torch.sigmoid(logit_scale * cosine + logit_bias)
            q, centre = p * (1 - p), torch.zeros_like(u)
        weights += (w.T @ q).squeeze(0)
        cosine.mul_(q)
        v = cosine @ y - centre * cosine.sum(1, keepdim=True)
        total -= centre.T @ (w * centre)
        cross = u.T @ (w * v)
        total -= cross + cross.T
        total += u.T @ (w * (u * v).sum(1, keepdim=True) * u)
    y = y.double()
    return total + y.T @ (weights.unsqueeze(1) * y)


@torch.no_grad()
def kronecker_factors(
    sources: Tensor,
    hidden: Tensor,
    targets: Tensor,
    *,
    logit_scale: float,
    logit_bias: float | None = None,
    bias_column: bool = False,
    class_batch: int,
) -> KroneckerFactors:
    """The factors of one side.

    Row i of the three matrices is one pair. Consecutive rows form class batches, of equal size up to one.

    sources (n, d), hidden (n, P), targets (n, d).
    """
    n = len(sources)
    b = torch.zeros(sources.shape[1], sources.shape[1], dtype=torch.float64, device=sources.device)
    for chosen in torch.arange(n, device=sources.device).tensor_split(-(-n // class_batch)):
        b += summed_curvature(sources[chosen], targets[chosen], logit_scale=logit_scale, logit_bias=logit_bias)
    p = hidden.shape[1] + bias_column
    a = torch.zeros(p, p, dtype=torch.float64, device=hidden.device)
    for rows in hidden.split(8192):
        inputs = with_bias_column(rows.to(accumulation_dtype(rows.dtype)), bias_column)
        a += inputs.T @ inputs
    return KroneckerFactors(a / n**0.5, (b + b.T) / 2 / n**0.5)


def with_bias_column(hidden: Tensor, bias_column: bool) -> Tensor:
    """The inputs of a projection layer, with a last column of ones if the layer has a bias. hidden (n, P) -> (n, P)."""
    return torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1) if bias_column else hidden


# ---------------------------------------------------------------- posterior
def best_prior_precision(a: Tensor, b: Tensor, squared_norm: float, *, pseudo_data: float = 1.0) -> float:
    """The prior precision with the largest evidence, given eigenvalues a (p,), b (q,) of the factors."""
    root_n, p, q = math.sqrt(pseudo_data), len(a), len(b)
    a, b = root_n * a.detach().double().clamp_min(0), root_n * b.detach().double().clamp_min(0)

    def slope(log_value: float) -> float:
        root = math.exp(log_value / 2)
        shrunk = (q * float((root / (a + root)).sum()) + p * float((root / (b + root)).sum())) / 4
        return -(root**2) * squared_norm / 2 + p * q / 2 - shrunk

    low, high = -80.0, 80.0  # Of log lambda.
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

        The softmax of CLIP or, with pairs.logit_bias, the sigmoid of SigLIP. A layer with a bias gets a bias column. An
        item counts once for each of its pairs.
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
            own, targets = pairs.embeddings(side)[rows[side]], pairs.embeddings(other)[rows[other]]
            biased = bias is not None
            factors = kronecker_factors(
                own, hidden[rows[side]], targets, logit_scale=pairs.logit_scale, logit_bias=pairs.logit_bias,
                bias_column=biased, class_batch=_CLASS_BATCH,
            )  # fmt: skip
            norm = sum(float(x.double().square().sum()) for x in (matrix, bias) if x is not None)
            a, b = (torch.linalg.eigvalsh(x.double()) for x in factors)
            best = best_prior_precision(a, b, norm, pseudo_data=_PSEUDO_DATA)
            found[side] = ProjectionPosterior(*factors, best, _PSEUDO_DATA, biased)
        return cls(found)

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """See :meth:`PosthocMethod.embed`; the scale is that of the class docstring, the dtype that of x or better."""
        assert hidden is not None
        mean, var = x.double(), self.posteriors[side].variance(hidden)
        length = mean.square().sum(1, keepdim=True) + var.sum(1, keepdim=True)
        found = GaussianEmbedding(mean / length.sqrt(), var.log() - length.log())
        return found if x.dtype == torch.float64 else found.to(torch.float32)

    def uncertainty(self, side: Side, x: Tensor, gallery: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`; the total variance of :meth:`embed`."""
        return self.embed(side, x, hidden=hidden).total_variance

    def tensors(self) -> list[Tensor]:
        """See :meth:`PosthocMethod.tensors`."""
        return [x for own in self.posteriors.values() for x in (own.activations, own.gradients)]
