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

CLASS_BATCH = 32768
"""Published number of targets that share a softmax."""

_MAX_ENTRIES = 2**24
"""Entries of the matrix of sources by targets that are in memory at a time, in three copies."""


class KroneckerFactors(NamedTuple):
    """A sum of curvatures over n items as a Kronecker product.

    Attributes:
        activations: (P, P) A, the sum of a a^T over the inputs a of the projection layer, divided by sqrt(n).
        gradients: (d, d) B, the sum of H divided by sqrt(n).
    """

    activations: Tensor
    gradients: Tensor


@torch.no_grad()
def summed_curvature(
    sources: Tensor, targets: Tensor, *, logit_scale: float, logit_bias: float | None = None
) -> Tensor:
    """The sum of H over sources that share their targets.

    Args:
        sources: (n, d) raw embeddings.
        targets: (c, d) raw embeddings of the other side.
        logit_scale: s, the factor of the cosine.
        logit_bias: b of the sigmoid loss (SigLIP); None for the softmax (CLIP).

    Returns:
        (d, d) float64. Matrix products are in the dtype of the input.

    Example:
        >>> summed_curvature(torch.tensor([[2.0, 0.0]]), torch.eye(2), logit_scale=2.0).diagonal().round(decimals=4)
        tensor([0.0000, 0.1050], dtype=torch.float64)

    Paper: Baumann et al., "Post-hoc probabilistic vision-language models", 2025 (BayesVLM); the order of the sums is
    ours.
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
    class_batch: int = CLASS_BATCH,
    official_batch: int | None = None,
) -> KroneckerFactors:
    """The factors of one side.

    Row i of the three matrices is one pair. Consecutive rows form class batches, of equal size up to one.

    Args:
        sources: (n, d) raw embeddings of the side.
        hidden: (n, P) inputs of its projection layer.
        targets: (n, d) raw embeddings of the other side.
        logit_scale, logit_bias: see :func:`summed_curvature`.
        bias_column: append a 1 to the inputs, for a projection layer with a bias; A is then (P + 1, P + 1).
        class_batch: largest number of targets that share a softmax. Their number has an influence on B.
        official_batch: None keeps all items. A number b leaves out what the released code does with batches of b: the
            last n mod class_batch items, and of every class batch the last class_batch mod b in B alone.

    Returns:
        The factors in float64; their product is the sum over the n items.

    Raises:
        ValueError: numbers of rows differ, there are no rows or no whole class batch, or values are not finite.
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
    if official_batch is None:
        batches = list(torch.arange(n).tensor_split(-(-n // class_batch)))
    else:
        n -= n % class_batch
        batches = list(torch.arange(n).split(class_batch))
    if not batches:
        raise ValueError(f"{who}: the released code needs a whole class batch of {class_batch} items, got {n}")
    b = torch.zeros(sources.shape[1], sources.shape[1], dtype=torch.float64, device=sources.device)
    for batch in batches:
        rows = slice(int(batch[0]), int(batch[-1]) + 1)
        used = len(batch) - (len(batch) % official_batch if official_batch else 0)
        own = sources[rows][:used]
        b += summed_curvature(own, targets[rows], logit_scale=logit_scale, logit_bias=logit_bias)
    a = _second_moment(hidden[:n], bias_column)
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
    """The inputs of a projection layer, with a last column of ones if the layer has a bias.

    Args:
        hidden: (n, P).
        bias_column: whether to append it.

    Returns:
        (n, P) or (n, P + 1).
    """
    return torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1) if bias_column else hidden
