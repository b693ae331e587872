"""InfoNCE, the contrastive objective of CLIP, over any distance and any number of positives."""

import torch
from torch import Tensor

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOutput, MatchLoss, check_match
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
    match = check_match(image, text, match, "infonce_loss")
    if not match.any():
        raise ValueError("infonce_loss: no pair of the batch matches; InfoNCE needs at least one positive")
    logit = match_logit(get_distance(distance).matrix(image, text), logit_scale, 0.0)
    match = match.to(logit.dtype)
    terms = {"i2t": _cross_entropy(logit, match) / 2, "t2i": _cross_entropy(logit.T, match.T) / 2}
    return LossOutput(terms["i2t"] + terms["t2i"], terms)


def _cross_entropy(logit: Tensor, match: Tensor) -> Tensor:
    total = match.sum(1, keepdim=True)
    target = match / torch.where(total > 0, total, 1)
    return -(target * logit.log_softmax(1)).sum() / (total > 0).sum()


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

    def forward(
        self, image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, *, epoch: int | None = None
    ) -> LossOutput:
        """See :class:`MatchLoss`."""
        return infonce_loss(image, text, match, logit_scale=self.logits.logit_scale, distance=self.distance.name)
