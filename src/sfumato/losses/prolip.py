"""The ProLIP objective: the sigmoid loss of SigLIP on the logits of Gaussians, inclusion and information bottleneck.

Its two published deviations are left out: a bottleneck that halves the log variance of a formula that was right, and the inclusion
and bottleneck of other processes' mismatched pairs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.inclusion import inclusion_losses
from sfumato.losses.base import LossOutput, MatchLoss, PairShare, vib_of_share
from sfumato.matching import MatchingLogits, match_logit


def prolip_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    *,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    distance: str = "csd",
    beta: float = 1e-4,
    inclusion_weight: float = 0.0,
    inclusion_scale: float = 1000.0,
    released_eps: float | None = None,
) -> LossOutput:
    r"""match + inclusion_weight * inclusion(image in text) + beta * (vib_image + vib_text).

    The match term (PPCL) is the binary cross-entropy of the logits summed over all pairs and divided by the mean of n and m, so
    by n in a batch of pairs. ProLIP writes its logit as scale * (mean_i . mean_j - (sum(var_i) + sum(var_j)) / 2) + bias. For
    unit means that is ours, logit_bias - logit_scale * csd, with

        logit_scale = scale / 2    and    logit_bias = bias + scale

    The inclusion term is the mean over the pairs with a label of at least 1/2, and takes memory for their number times d; a batch
    without any has none.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        logit_scale: a > 0.
        logit_bias: b.
        distance: name of any differentiable distance.
        beta: weight of the information bottleneck; 0 leaves it out, as points need.
        inclusion_weight: of the inclusion of images in their texts; 0 leaves it out, as points need. 1e-7 as published.
        inclusion_scale, released_eps: see :func:`sfumato.inclusion.inclusion_loss`.

    Returns:
        Terms "match", "inclusion", "vib"; stat "included", the share of the dimensions in which an image's variance is below
        its text's.

    Raises:
        ValueError: shapes do not fit, or the batch is empty.

    Example:
        >>> e = GaussianEmbedding(torch.eye(2), torch.full((2, 2), -9.0))
        >>> prolip_loss(e, e, torch.eye(2), logit_scale=5.0, logit_bias=5.0).terms["match"]
        tensor(0.0134)

    Paper: Chun et al., "Probabilistic language-image pre-training", ICLR 2025. The released bottleneck is vib_loss of halved log
    variances, which is no divergence.
    """
    share = PairShare.whole(image, text, match, "prolip_loss")
    return _part(
        share,
        share.n_positives(),
        logit_scale=logit_scale,
        logit_bias=logit_bias,
        distance=distance,
        beta=beta,
        inclusion_weight=inclusion_weight,
        inclusion_scale=inclusion_scale,
        released_eps=released_eps,
    )


def _part(
    share: PairShare,
    counts: Tensor,
    *,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    distance: str,
    beta: float,
    inclusion_weight: float,
    inclusion_scale: float,
    released_eps: float | None,
) -> LossOutput:
    logit = match_logit(get_distance(distance).matrix(share.image, share.texts), logit_scale, logit_bias)
    cross_entropy = functional.binary_cross_entropy_with_logits(logit, share.match_i2t.to(logit.dtype), reduction="sum")
    terms = {"match": 2 * cross_entropy / (share.images.n + share.texts.n)}
    stats: dict[str, Tensor] = {}
    if inclusion_weight:
        rows, columns = (share.match_i2t >= 0.5).nonzero(as_tuple=True)
        inner, outer = share.image[rows], share.texts[columns]
        losses = inclusion_losses(inner, outer, scale=inclusion_scale, released_eps=released_eps)
        pairs = counts[0].clamp_min(1).to(losses.dtype)
        terms["inclusion"] = inclusion_weight * losses.sum() / pairs
        stats["included"] = (inner.log_var < outer.log_var).sum() / (pairs * inner.d)
    if beta:
        terms["vib"] = beta * vib_of_share(share)
    return LossOutput(torch.stack(list(terms.values())).sum(), terms, stats)


class ProLIPLoss(MatchLoss):
    """:func:`prolip_loss` with learnable logits.

    Args:
        distance, beta, inclusion_weight, inclusion_scale, released_eps: see :func:`prolip_loss`.
        logit_scale, logit_bias: initial values of the learnable logits; 5 and 0 are ProLIP's scale 10 and bias -10.
    """

    def __init__(
        self,
        *,
        distance: str = "csd",
        beta: float = 1e-4,
        inclusion_weight: float = 0.0,
        inclusion_scale: float = 1000.0,
        released_eps: float | None = None,
        logit_scale: float = 5.0,
        logit_bias: float = 0.0,
    ) -> None:
        super().__init__(distance)
        self.logits = MatchingLogits(logit_scale, logit_bias)
        self.beta = beta
        self.inclusion_weight, self.inclusion_scale, self.released_eps = inclusion_weight, inclusion_scale, released_eps

    def counts(self, share: PairShare) -> Tensor:
        """See :class:`MatchLoss`."""
        return share.n_positives()

    def part(self, share: PairShare, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`MatchLoss`."""
        return _part(
            share,
            counts,
            logit_scale=self.logits.logit_scale,
            logit_bias=self.logits.logit_bias,
            distance=self.distance.name,
            beta=self.beta,
            inclusion_weight=self.inclusion_weight,
            inclusion_scale=self.inclusion_scale,
            released_eps=self.released_eps,
        )
