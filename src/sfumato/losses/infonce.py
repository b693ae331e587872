"""InfoNCE, the contrastive objective of CLIP, over any distance and any number of positives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import (
    FREE_SCALE,
    LossOptions,
    LossOutput,
    MatchLoss,
    PairBlock,
    option,
    or_start,
    sum_of_terms,
    whole_batch,
)
from sfumato.losses.tiles import PairTerms, Tile, Tiles, matched_rows, pair_sums
from sfumato.matching import match_logit

LARGEST_SCALE = "largest scale of the InfoNCE loss; 0: no limit. 50 is CLIP's and open_clip's limit, 100 on the cosine"
"""Description of the limit of the scale, for InfoNCE alone and beside PCME++."""

NO_POSITIVE = "infonce_loss: no pair of the batch matches; InfoNCE needs at least one positive"


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
    free_scale: bool = option(False, FREE_SCALE)


def infonce_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: InfoNCEOptions = InfoNCEOptions(),
    *,
    logit_scale: Tensor | float | None = None,
) -> LossOutput:
    r"""Softmax cross-entropy over the batch in both directions, averaged.

    A row's target distribution is its labels divided by their sum, so several positives have equal probabilities; rows
    without a positive do not count. On unit means squared_l2 = 2 - 2 cos, so a scale a here is a temperature of 1 / (2
    a) on the cosine.

    Paper: van den Oord et al. 2018; Radford et al. 2021 (CLIP).

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        options: the weights and other options, see its fields.
        logit_scale: scale of the match logits; None: that of the options.

    Returns:
        The loss with its weighted terms and statistics.

    Raises:
        ValueError: no pair of the batch matches.
    """
    distance, label = whole_batch(options, image, text, match, "infonce_loss")
    logit, terms = match_logit(distance, or_start(logit_scale, options.logit_scale), 0.0), {}
    for name, x, y in (("i2t", logit, label), ("t2i", logit.T, label.T)):
        total = y.sum(1)
        if not total.any():
            raise ValueError(NO_POSITIVE)
        x, y, total = x[total > 0], y[total > 0], total[total > 0]
        terms[name] = -(y / total.unsqueeze(1) * x.log_softmax(1)).sum(1).mean() / 2
    return sum_of_terms(terms)


class _CrossEntropies(PairTerms):
    """For each axis the cross-entropies of the softmax, summed over the rows (or columns) that have a match."""

    def of_matrix(self, distance: Tensor, logit: Tensor, label: Tensor) -> Tensor:
        sums = []
        for axis in self.axes:
            total = label.sum(1 - axis, keepdim=True)
            target = label / torch.where(total > 0, total, 1)
            sums.append(-(target * logit.log_softmax(1 - axis)).sum())
        return torch.stack(sums)

    def of_tiles(self, tiles: Tiles) -> Tensor:
        sizes = [tiles.shape[axis] for axis in self.axes]
        # Of each row or column: logarithm of the sum of exp(logit), sum of the labels, sum of label * logit.
        self._log_sum = [tiles.zeros(size).fill_(-torch.inf) for size in sizes]
        self._total, matched = [tiles.zeros(size) for size in sizes], [tiles.zeros(size) for size in sizes]
        for tile in tiles:
            weighted = tile.label * tile.logit
            for k, axis in enumerate(self.axes):
                own = tile.ranges[axis]
                self._log_sum[k][own] = torch.logaddexp(self._log_sum[k][own], tile.logit.logsumexp(1 - axis))
                self._total[k][own] += tile.label.sum(1 - axis)
                matched[k][own] += weighted.sum(1 - axis)
        losses = [
            torch.where(total > 0, log_sum - label_sum / total, 0).sum(dtype=torch.float64)
            for log_sum, total, label_sum in zip(self._log_sum, self._total, matched, strict=True)
        ]
        return torch.stack(losses)

    def gradient(self, tile: Tile, upstream: Tensor) -> Tensor:
        gradient = torch.zeros_like(tile.logit)
        for k, axis in enumerate(self.axes):
            log_sum, total = (x[k][tile.ranges[axis]].unsqueeze(1 - axis) for x in (self._log_sum, self._total))
            weight = torch.where(total > 0, upstream[k], 0)  # Rows without a match do not count.
            gradient += (tile.logit - log_sum).exp_().mul_(weight)
            gradient -= tile.label * (weight / torch.where(total > 0, total, 1))
        return gradient


class InfoNCELoss(MatchLoss):
    """:func:`infonce_loss` with a learnable scale."""

    options: InfoNCEOptions
    Options, tiled = InfoNCEOptions, True

    def __init__(self, options: InfoNCEOptions | None = None) -> None:
        super().__init__(options)
        self.logits.logit_bias.requires_grad_(False)

    def counts(self, block: PairBlock) -> Tensor:
        """The number of images, and of texts, that have a match. See :meth:`MatchLoss.counts`."""
        return torch.stack([matched_rows(match).sum() for match in (block.match_i2t, block.match_t2i)]).double()

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :meth:`MatchLoss.part`."""
        if not counts.all():
            raise ValueError(NO_POSITIVE)
        terms = {}
        for image, text, labels, axes in block.rectangles():
            sums_of = _CrossEntropies(labels, axes)
            sums = pair_sums(self.distance, image, text, sums_of, logits=self.logits, max_pairs=block.max_pairs)
            for axis, total in zip(axes, sums, strict=True):
                terms["t2i" if axis else "i2t"] = total / (2 * counts[axis].to(total.dtype))
        return sum_of_terms(terms)
