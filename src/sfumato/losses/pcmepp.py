"""The PCME++ objective: match loss, pseudo-positives, information bottleneck, and optionally InfoNCE."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses import base
from sfumato.losses.contrastive import LARGEST_SCALE, InfoNCELoss, InfoNCEOptions, infonce_loss
from sfumato.losses.tiles import PairTerms, Tile, Tiles, pair_sums
from sfumato.matching import match_logit

VIB_LIMIT = 1e4
"""A bottleneck of a modality above this many nats per dimension is left out of the step, as in the released code."""


@dataclass(frozen=True)
class PCMEPPOptions(base.LossOptions):
    """PCME++: match loss, pseudo-positives, information bottleneck.

    Attributes: each field states its default, its meaning and its range.
    """

    alpha: float = base.option(0.1, "weight of the pseudo-positive terms; 0 leaves them out", ge=0)
    beta: float = base.option(1e-4, "weight of the information bottleneck; 0 leaves it out, as points need", ge=0)
    logit_scale: float = base.option(5.0, "initial scale of the match logits", gt=0)
    logit_bias: float = base.option(5.0, "initial bias of the match logits")
    free_scale: bool = base.option(False, base.FREE_SCALE)
    pseudo_positives_from: int = base.option(0, "first epoch (0-based) with the pseudo-positive terms", ge=0)
    infonce_weight: float = base.option(0.0, "weight of an additional InfoNCE loss of the means; 0 leaves it out", ge=0)
    infonce_scale: float = base.option(5.0, "initial scale of the InfoNCE loss; learnt apart from logit_scale", gt=0)
    infonce_largest_scale: float = base.option(0.0, LARGEST_SCALE, ge=0)


def pseudo_positives(distance: Tensor, match: Tensor) -> Tensor:
    r"""Labels with pseudo-positives: items at least as close as a row's ground truth also count as matches.

    The ground truth of row i is the first column g of its largest label. Every column j with distance_ij <= distance_ig
    takes that label, the others keep theirs. For the other direction pass the transposes.

    Paper: Chun 2024, section 2.3. Its pseudo-code compares along the wrong axis; the threshold belongs to the row.

    distance (n, m), match (n, m) -> (n, m).
    """
    label, ground_truth = match.detach().max(dim=1, keepdim=True)
    return torch.where(distance.detach() <= distance.detach().gather(1, ground_truth), label, match.detach())


def pcmepp_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: PCMEPPOptions = PCMEPPOptions(),
    *,
    logit_scale: Tensor | float | None = None,
    logit_bias: Tensor | float | None = None,
    infonce_scale: Tensor | float | None = None,
    epoch: int | None = None,
) -> base.LossOutput:
    r"""2 * match + alpha * (pseudo_i2t + pseudo_t2i) + beta * (vib_image + vib_text) [+ InfoNCE].

    The match and pseudo-positive terms are binary cross-entropies of the logits, averaged over all n * m pairs. The
    match counts twice, for both directions, as in the released code; the paper prints it once.

    An untrained model places nearly everything closer than the ground truth, and early pseudo-positives flood the
    labels (docs/concepts/losses.md): options.pseudo_positives_from delays them.

    Paper: Chun, ICLR 2024, arXiv 2305.18171, Eq. 2 and 3, A.4.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        options: the weights and other options, see its fields.
        logit_scale: scale of the match logits; None: that of the options.
        logit_bias: bias of the match logits; None: that of the options.
        infonce_scale: scale of the InfoNCE loss; None: that of the options.
        epoch: number from 0 of the epoch; None: later than all that the options delay.

    Returns:
        The loss with its weighted terms and statistics.
    """
    distance, label = base.whole_batch(options, image, text, match, "pcmepp_loss")
    scale, bias = base.or_start(logit_scale, options.logit_scale), base.or_start(logit_bias, options.logit_bias)
    logit = match_logit(distance, scale, bias)
    cross_entropy = functools.partial(functional.binary_cross_entropy_with_logits, logit)
    terms = {"match": 2 * cross_entropy(label)}
    if options.alpha and (epoch is None or epoch >= options.pseudo_positives_from):
        raised = pseudo_positives(distance, label), pseudo_positives(distance.T, label.T).T
        terms["pseudo_positive"] = options.alpha * (cross_entropy(raised[0]) + cross_entropy(raised[1]))
    if options.beta:
        kept = [vib for vib in map(base.vib_loss, (image, text)) if vib <= VIB_LIMIT]
        terms["vib"] = options.beta * sum(kept, torch.zeros_like(logit[0, 0]))
    if options.infonce_weight:
        beside = infonce_loss(image, text, match, logit_scale=base.or_start(infonce_scale, options.infonce_scale)).terms
        terms |= {f"infonce_{name}": options.infonce_weight * term for name, term in beside.items()}
    return base.sum_of_terms(terms)


class _CrossEntropies(PairTerms):
    """(2,) sums: cross-entropies with the labels; with those with pseudo-positives of each axis.

    Once summed, raised (2,) is the number of labels that the pseudo-positives of each axis raise.
    """

    def of_matrix(self, distance: Tensor, logit: Tensor, label: Tensor) -> Tensor:
        sums, self.raised = [_cross_entropy(logit, label)], distance.new_zeros(2, dtype=torch.float64)
        for axis in self.axes:
            raised = pseudo_positives(distance, label) if axis == 0 else pseudo_positives(distance.T, label.T).T
            self.raised[axis] = (raised > label).sum()
            sums.append(_cross_entropy(logit, raised))
        return torch.stack([sums[0], sum(sums[1:], torch.zeros_like(sums[0]))])

    def of_tiles(self, tiles: Tiles) -> Tensor:
        if self.axes:
            self._find_ground_truths(tiles)
        sums, self.raised = tiles.zeros(2, torch.float64), tiles.zeros(2, torch.float64)
        for tile in tiles:
            # max(l, 0) - y l + ln(1 + exp(-|l|)): no difference of nearly equal numbers.
            positive = tile.logit.relu()
            rest = functional.softplus(tile.logit.abs().neg_()).sum()
            sums[0] += rest + torch.addcmul(positive, tile.label, tile.logit, value=-1).sum()
            for axis in self.axes:
                raised = self._raised(tile, axis)
                self.raised[axis] += torch.gt(raised, tile.label, out=torch.empty_like(raised)).sum()
                sums[1] += rest + torch.addcmul(positive, raised, tile.logit, value=-1).sum()
        return sums

    def gradient(self, tile: Tile, upstream: Tensor) -> Tensor:
        gradient = tile.logit.sigmoid_().mul_(upstream[0] + len(self.axes) * upstream[1]).sub_(tile.label * upstream[0])
        for axis in self.axes:
            gradient.sub_(self._raised(tile, axis).mul_(upstream[1]))
        return gradient

    def _find_ground_truths(self, tiles: Tiles) -> None:
        """Each row's (axis 0) and column's (axis 1) largest label, and the distance of the first that has it."""
        self._largest = [tiles.zeros(size) for size in tiles.shape]
        self._threshold = [torch.full_like(label, -torch.inf) for label in self._largest]
        for ranges in tiles.ranges():
            label = tiles.label(ranges)
            for axis in self.axes:
                largest, threshold = self._largest[axis][ranges[axis]], self._threshold[axis][ranges[axis]]
                better = label.amax(1 - axis) > largest
                if better.any():  # To find a maximum's place is slow, and most tiles of a large batch have no match.
                    found, where = label.max(1 - axis, keepdim=True)
                    own = tiles.distance(ranges).gather(1 - axis, where)
                    threshold[better], largest[better] = own.flatten()[better], found.flatten()[better]

    def _raised(self, tile: Tile, axis: int) -> Tensor:
        """(r, c) labels with pseudo-positives."""
        threshold, largest = (x[axis][tile.ranges[axis]].unsqueeze(1 - axis) for x in (self._threshold, self._largest))
        closer = torch.le(tile.distance, threshold, out=torch.empty_like(tile.distance))  # As numbers: faster.
        return torch.maximum(closer.mul_(largest), tile.label)


def _bottleneck(block: base.PairBlock, sums: Tensor) -> tuple[Tensor, Tensor]:
    """(() the block's part of both modalities' bottlenecks, () the number of modalities that are left out)."""
    sizes = [x.n * x.d for x in (block.images, block.texts)]
    number, kept = torch.stack([total / size > VIB_LIMIT for total, size in zip(sums, sizes, strict=True)]), []
    for x, skip, size in zip((block.image, block.text), number, sizes, strict=True):
        if skip:  # Omitted terms are not computed, because 0 times an infinite gradient would be NaN.
            x = GaussianEmbedding(x.mean.masked_fill(skip, 0), x.log_var.masked_fill(skip, 0))
        kept.append(base.vib_sums(x).sum() / size)
    return kept[0] + kept[1], number.sum()


def _cross_entropy(logit: Tensor, label: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logit, label, reduction="sum")


class PCMEPPLoss(base.MatchLoss):
    """:func:`pcmepp_loss` with learnable logits, for blocks of any size."""

    options: PCMEPPOptions
    Options, tiled = PCMEPPOptions, True

    def __init__(self, options: PCMEPPOptions | None = None) -> None:
        super().__init__(options)
        scale, largest = self.options.infonce_scale, self.options.infonce_largest_scale
        beside = InfoNCEOptions(logit_scale=scale, largest_scale=largest)
        self.infonce = InfoNCELoss(beside) if self.options.infonce_weight else None

    def counts(self, block: base.PairBlock) -> Tensor:
        """The number of pairs; with a bottleneck both modalities' sums, to test VIB_LIMIT; those of InfoNCE.

        See :meth:`MatchLoss.counts`.
        """
        values = [torch.tensor(float(block.match_i2t.numel()))]
        if self.options.beta:
            values += [base.vib_sums(x).detach().double().sum() for x in (block.image, block.text)]
        own = torch.stack([value.double().to(block.match_i2t.device) for value in values])
        return own if self.infonce is None else torch.cat([own, self.infonce.counts(block)])

    def part(self, block: base.PairBlock, counts: Tensor, *, epoch: int | None = None) -> base.LossOutput:
        """See :meth:`MatchLoss.part`."""
        terms, stats = self._cross_entropies(block, counts[0], epoch)
        if self.options.beta:
            vib, ignored = _bottleneck(block, counts[1:3])
            terms["vib"] = self.options.beta * vib
            stats["vib_ignored"] = ignored * block.match_i2t.numel() / counts[0]  # It is counted once for all blocks.
        if self.infonce is not None:
            beside = self.infonce.part(block, counts[-2:])
            terms |= {f"infonce_{name}": self.options.infonce_weight * term for name, term in beside.terms.items()}
        return base.sum_of_terms(terms, stats)

    def _cross_entropies(
        self, block: base.PairBlock, pairs: Tensor, epoch: int | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Terms and statistics of the logits."""
        options = self.options
        raises = bool(options.alpha) and (epoch is None or epoch >= options.pseudo_positives_from)
        match, pseudo, raised = [], [], []
        for image, text, labels, axes in block.rectangles():
            if not raises and 0 not in axes:
                continue
            sums_of = _CrossEntropies(labels, axes if raises else ())
            sums = pair_sums(self.distance, self.logits, (image, text), sums_of, block.max_pairs)
            match += [sums[0]] if 0 in axes else []
            pseudo.append(sums[1])
            raised.append(sums_of.raised)
        pairs = pairs.to(match[0].dtype)
        terms = {"match": 2 * match[0] / pairs}
        if not raises:
            return terms, {}
        terms["pseudo_positive"] = options.alpha * torch.stack(pseudo).sum() / pairs
        numbers = torch.stack(raised).sum(0)
        return terms, {"pseudo_positives_i2t": numbers[0], "pseudo_positives_t2i": numbers[1]}
