"""InfoNCE, the contrastive objective of CLIP, over any distance and any number of positives."""

import torch
from torch import Tensor

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOutput, MatchLoss, PairShare
from sfumato.matching import MatchingLogits, match_logit


def infonce_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    *,
    logit_scale: Tensor | float,
    distance: str = "squared_l2",
) -> LossOutput:
    r"""Softmax cross-entropy over the batch in both directions, averaged.

    A row's target distribution is its labels divided by their sum, so several positives share it; rows without a positive do
    not count. On unit means squared_l2 = 2 - 2 cos, so a scale a here is a temperature of 1 / (2 a) on the cosine.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        logit_scale: a > 0; logits are -a * distance.
        distance: name of any differentiable distance.

    Returns:
        Terms "i2t" and "t2i".

    Raises:
        ValueError: shapes do not fit, the batch is empty, or no pair in it matches.

    Paper: van den Oord et al. 2018; Radford et al. 2021 (CLIP).
    """
    share = PairShare.whole(image, text, match, "infonce_loss")
    return _part(share, _counts(share), logit_scale, distance)


def _counts(share: PairShare) -> Tensor:
    """Numbers of images and of texts with a match."""
    return torch.stack([(match.sum(1) > 0).sum() for match in (share.match_i2t, share.match_t2i)]).double()


def _part(share: PairShare, counts: Tensor, logit_scale: Tensor | float, distance: str) -> LossOutput:
    if not counts.all():
        raise ValueError("infonce_loss: no pair of the batch matches; InfoNCE needs at least one positive")
    i2t, t2i = share.distances(get_distance(distance))
    directions = {"i2t": (i2t, share.match_i2t), "t2i": (t2i, share.match_t2i)}
    terms = {
        name: _cross_entropy(match_logit(pairs, logit_scale, 0.0), match.to(pairs.dtype)) / (2 * count.to(pairs.dtype))
        for (name, (pairs, match)), count in zip(directions.items(), counts, strict=True)
    }
    return LossOutput(terms["i2t"] + terms["t2i"], terms)


def _cross_entropy(logit: Tensor, match: Tensor) -> Tensor:
    """Summed over the rows that have a match."""
    total = match.sum(1, keepdim=True)
    target = match / torch.where(total > 0, total, 1)
    return -(target * logit.log_softmax(1)).sum()


class InfoNCELoss(MatchLoss):
    """:func:`infonce_loss` with a learnable scale.

    Args:
        distance: name of any differentiable distance.
        logit_scale: initial a; 1 on squared_l2 is a softmax temperature of 0.5 on the cosine.
    """

    def __init__(self, *, distance: str = "squared_l2", logit_scale: float = 5.0) -> None:
        super().__init__(distance)
        self.logits = MatchingLogits(logit_scale, 0.0)
        self.logits.logit_bias.requires_grad_(False)

    def counts(self, share: PairShare) -> Tensor:
        """See :class:`MatchLoss`."""
        return _counts(share)

    def part(self, share: PairShare, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`MatchLoss`."""
        return _part(share, counts, self.logits.logit_scale, self.distance.name)
