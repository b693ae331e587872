"""InfoNCE, the contrastive objective of CLIP, over any distance and any number of positives."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOptions, LossOutput, MatchLoss, PairBlock, option, sum_of_terms
from sfumato.matching import MatchingLogits, match_logit

LARGEST_SCALE = "largest scale of the InfoNCE loss; 0: no limit. 50 is CLIP's and open_clip's limit, 100 on the cosine"
"""Description of the limit of the scale, for InfoNCE alone and beside PCME++."""


@dataclass(frozen=True)
class InfoNCEOptions(LossOptions):
    """InfoNCE with a learnable temperature.

    Attributes: each field states its default, its meaning and its range.
    """

    distance: str = option("squared_l2", "name of the distance; any differentiable one")
    logit_scale: float = option(
        5.0, "initial scale; a scale of 1 on squared_l2 is a softmax temperature of 0.5 on the cosine", gt=0
    )
    largest_scale: float = option(0.0, LARGEST_SCALE, ge=0)


def infonce_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: InfoNCEOptions = InfoNCEOptions(),
    *,
    logit_scale: Tensor | float,
) -> LossOutput:
    r"""Softmax cross-entropy over the batch in both directions, averaged.

    A row's target distribution is its labels divided by their sum, so several positives have equal probabilities; rows
    without a positive do not count. On unit means squared_l2 = 2 - 2 cos, so a scale a here is a temperature of 1 / (2
    a) on the cosine.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        options: see :class:`InfoNCEOptions`.
        logit_scale: a > 0; logits are -a * distance. options.logit_scale is only the initial value of the module.

    Returns:
        Terms "i2t" and "t2i".

    Raises:
        ValueError: shapes do not fit, the batch is empty, or no pair in it matches.

    Example:
        >>> e = GaussianEmbedding.point(torch.eye(2))
        >>> infonce_loss(e, e, torch.eye(2), logit_scale=1.0).total
        tensor(0.1269)

    Paper: van den Oord et al. 2018; Radford et al. 2021 (CLIP).
    """
    block = PairBlock.whole(image, text, match, "infonce_loss")
    return infonce_part(block, infonce_counts(block), options, logit_scale)


def infonce_counts(block: PairBlock) -> Tensor:
    """The divisors of InfoNCE.

    Args:
        block: a block of the pairs.

    Returns:
        (2,) float64 numbers of images and of texts with a match.
    """
    return torch.stack([(match.sum(1) > 0).sum() for match in (block.match_i2t, block.match_t2i)]).double()


def infonce_part(block: PairBlock, counts: Tensor, options: InfoNCEOptions, logit_scale: Tensor | float) -> LossOutput:
    """The contribution of a block to :func:`infonce_loss`.

    Args:
        block: a block of the pairs.
        counts: (2,) :func:`infonce_counts` of the whole batch.
        options: see :class:`InfoNCEOptions`.
        logit_scale: a > 0.

    Returns:
        Terms "i2t" and "t2i".

    Raises:
        ValueError: no pair of the batch matches.
    """
    if not counts.all():
        raise ValueError("infonce_loss: no pair of the batch matches; InfoNCE needs at least one positive")
    i2t, t2i = block.distances(get_distance(options.distance))
    directions = {"i2t": (i2t, block.match_i2t), "t2i": (t2i, block.match_t2i)}
    terms = {
        name: _cross_entropy(match_logit(pairs, logit_scale, 0.0), match.to(pairs.dtype)) / (2 * count.to(pairs.dtype))
        for (name, (pairs, match)), count in zip(directions.items(), counts, strict=True)
    }
    return sum_of_terms(terms)


def _cross_entropy(logit: Tensor, match: Tensor) -> Tensor:
    """The cross-entropy, summed over the rows that have a match."""
    total = match.sum(1, keepdim=True)
    target = match / torch.where(total > 0, total, 1)
    return -(target * logit.log_softmax(1)).sum()


class InfoNCELoss(MatchLoss):
    """:func:`infonce_loss` with a learnable scale.

    Args:
        options: see :class:`InfoNCEOptions`.
    """

    def __init__(self, options: InfoNCEOptions = InfoNCEOptions()) -> None:
        super().__init__(options)
        self.options = options
        self.logits = MatchingLogits(options.logit_scale, 0.0, largest=options.largest_scale or math.inf)
        self.logits.logit_bias.requires_grad_(False)

    def counts(self, block: PairBlock) -> Tensor:
        """See :class:`MatchLoss`."""
        return infonce_counts(block)

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`MatchLoss`."""
        return infonce_part(block, counts, self.options, self.logits.logit_scale)
