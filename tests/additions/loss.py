"""A contrastive loss on distances: positives near, negatives at least a margin away."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOptions, LossOutput, MatchLoss, PairBlock, option, sum_of_terms, whole_batch


@dataclass(frozen=True)
class MineOptions(LossOptions):
    """Every field is a key of the recipe's section [loss]."""

    margin: float = option(1.0, "distance from which on a negative costs nothing", gt=0)


def mine_loss(
    image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, options: MineOptions = MineOptions()
) -> LossOutput:
    """The mean over all pairs of y D + (1 - y) max(margin - D, 0). image (n, d), text (m, d), match (n, m)."""
    distance, y = whole_batch(options, image, text, match, "mine_loss")
    return sum_of_terms({"match": _cost(distance, y, options.margin).mean()})


def _cost(distance: Tensor, y: Tensor, margin: float) -> Tensor:
    y = y.to(distance.dtype)
    return y * distance + (1 - y) * (margin - distance).clamp(min=0)


class MineLoss(MatchLoss):
    """:func:`mine_loss` in blocks: a block adds its images' rows, divided by the number of pairs of the batch."""

    options: MineOptions
    Options = MineOptions

    def counts(self, block: PairBlock) -> Tensor:
        """Nothing that a block must know of the others. Returns (0,)."""
        return torch.zeros(0, dtype=torch.float64)

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`MatchLoss`."""
        block = block.with_dense_labels()
        cost = _cost(self.distance.matrix(block.image, block.texts), block.match_i2t, self.options.margin)
        return sum_of_terms({"match": cost.sum() / (block.images.n * block.texts.n)})
