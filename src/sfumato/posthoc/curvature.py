r"""Kronecker factors of the curvature of a contrastive loss in the embeddings of its sources.

For a source x (not normalised) and the C unit targets Y of its class batch the logits are z = s Y x / ||x|| (+ b), and

    J = s Y (I - u u^T) / ||x||,    u = x / ||x||
    softmax (CLIP):     H = J^T (diag p - p p^T) J,    p = softmax(z)
    sigmoid (SigLIP):   H = J^T diag(sigmoid(z) sigmoid(-z)) J

H is the generalised Gauss-Newton matrix of -log p(target | source), source by source: the curvature of the
normalisation is left out, so it is never indefinite. The sum over all sources is taken by matrix products in
O(n C d), without a d x d matrix of any source. Labels have no influence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sfumato.gaussian import accumulation_dtype
from sfumato.posthoc.method import check_embeddings, check_rows, unit

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
            q = torch.sigmoid(logit_scale * cosine + logit_bias)
            q.mul_(1 - q)
            centre = None
        weights += (w.T @ q).squeeze(0)
        cosine.mul_(q)
        v = cosine @ y
        if centre is not None:
            v -= centre * cosine.sum(1, keepdim=True)
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
    who = "kronecker_factors"
    check_embeddings(sources, who, "sources")
    check_embeddings(targets, who, "targets", d=sources.shape[1])
    check_rows(hidden, who, "hidden", n=len(sources))
    if len(targets) != len(sources) or not len(sources) or class_batch < 1:
        raise ValueError(
            f"{who}: needs as many sources as targets and a class batch of at least 1, got {len(sources)} sources,"
            f" {len(targets)} targets and {class_batch}"
        )
    n = len(sources)
    b = torch.zeros(sources.shape[1], sources.shape[1], dtype=torch.float64, device=sources.device)
    for rows in torch.arange(n, device=sources.device).tensor_split(-(-n // class_batch)):
        b += summed_curvature(sources[rows], targets[rows], logit_scale=logit_scale, logit_bias=logit_bias)
    a = _second_moment(hidden, bias_column)
    return KroneckerFactors(a / n**0.5, (b + b.T) / 2 / n**0.5)


def _second_moment(hidden: Tensor, bias_column: bool) -> Tensor:
    """(P, P) sum of a a^T in float64."""
    total = torch.zeros(hidden.shape[1] + bias_column, hidden.shape[1] + bias_column, dtype=torch.float64)
    total = total.to(hidden.device)
    for rows in hidden.split(8192):
        a = with_bias_column(rows.to(accumulation_dtype(rows.dtype)), bias_column)
        total += a.T @ a
    return total


def with_bias_column(hidden: Tensor, bias_column: bool) -> Tensor:
    """The inputs of a projection layer, with a last column of ones if the layer has a bias. hidden (n, P) -> (n, P)."""
    return torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1) if bias_column else hidden
