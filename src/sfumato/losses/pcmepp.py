"""The PCME++ objective: match loss, pseudo-positives, information bottleneck, and optionally InfoNCE."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import (
    FREE_SCALE,
    LossOptions,
    LossOutput,
    MatchLoss,
    PairBlock,
    option,
    sum_of_terms,
    vib_sums,
)
from sfumato.losses.infonce import LARGEST_SCALE, InfoNCELoss, InfoNCEOptions, infonce_counts, infonce_part
from sfumato.matching import MatchingLogits, match_logit

VIB_LIMIT = 1e4
"""A bottleneck of a modality above this many nats per dimension is left out of the step, as in the released code."""


@dataclass(frozen=True)
class PCMEPPOptions(LossOptions):
    """PCME++: match loss, pseudo-positives, information bottleneck.

    Attributes: each field states its default, its meaning and its range.
    """

    alpha: float = option(0.1, "weight of the pseudo-positive terms; 0 leaves them out", ge=0)
    beta: float = option(1e-4, "weight of the information bottleneck; 0 leaves it out, as points need", ge=0)
    match_weight: float = option(
        2.0, "weight of the match term; 2 as released, which counts both directions; the paper prints 1", ge=0
    )
    logit_scale: float = option(5.0, "initial scale of the match logits", gt=0)
    logit_bias: float = option(5.0, "initial bias of the match logits")
    free_scale: bool = option(False, FREE_SCALE)
    pseudo_positives_from: int = option(0, "first epoch (0-based) with the pseudo-positive terms", ge=0)
    infonce_weight: float = option(0.0, "weight of an additional InfoNCE loss of the means; 0 leaves it out", ge=0)
    infonce_scale: float = option(
        5.0, "initial scale of the InfoNCE loss; it is learnt separately from that of the match logits", gt=0
    )
    infonce_largest_scale: float = option(0.0, LARGEST_SCALE, ge=0)


def pseudo_positives(distance: Tensor, match: Tensor) -> Tensor:
    r"""Labels with pseudo-positives: items at least as close as a row's ground truth also count as matches.

    The ground truth of row i is the first column g of its largest label. Every column j with distance_ij <= distance_ig
    takes that label, the others keep theirs. For the other direction pass the transposes.

    Args:
        distance: (n, m), smaller is closer.
        match: (n, m) labels in [0, 1].

    Returns:
        (n, m) labels >= match, without gradient.

    Example:
        >>> pseudo_positives(torch.tensor([[2.0, 1.0, 3.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor([[1., 1., 0.]])

    Paper: Chun 2024, section 2.3. Its pseudo-code compares along the wrong axis; the threshold belongs to the row.
    """
    label, ground_truth = match.detach().max(dim=1, keepdim=True)
    closer = distance.detach() <= distance.detach().gather(1, ground_truth)
    return torch.where(closer, label, match.detach())


def pcmepp_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: PCMEPPOptions = PCMEPPOptions(),
    *,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    infonce_scale: Tensor | float | None = None,
    epoch: int | None = None,
) -> LossOutput:
    r"""match_weight * match + alpha * (pseudo_i2t + pseudo_t2i) + beta * (vib_image + vib_text) [+ InfoNCE].

    The match and pseudo-positive terms are binary cross-entropies of the logits, averaged over all n * m pairs.

    An untrained model places nearly everything closer than the ground truth, and early pseudo-positives flood the
    labels (docs/concepts/losses.md): options.pseudo_positives_from delays them.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1]; soft labels are allowed.
        options: see :class:`PCMEPPOptions`.
        logit_scale: a > 0; options.logit_scale is only the initial value of the module.
        logit_bias: b; likewise.
        infonce_scale: scale of the InfoNCE loss; options.infonce_scale if None.
        epoch: 0-based epoch; None means after every warm-up.

    Returns:
        Terms "match", "pseudo_positive", "vib", "infonce_i2t" and "infonce_t2i"; a term of weight 0 is left out. Stats
        "pseudo_positives_i2t" and "_t2i", the number of labels raised; "vib_ignored", the number of modalities whose
        bottleneck is above VIB_LIMIT.

    Raises:
        ValueError: shapes do not fit, the batch is empty, or InfoNCE finds no match in it.

    Example:
        >>> e = GaussianEmbedding(torch.eye(2), torch.full((2, 2), -9.0))
        >>> pcmepp_loss(e, e, torch.eye(2), logit_scale=5.0, logit_bias=5.0).terms["match"]
        tensor(0.0134)

    Paper: Chun, ICLR 2024, arXiv 2305.18171, Eq. 2 and 3, A.4.
    """
    block = PairBlock.whole(image, text, match, "pcmepp_loss")
    scale = options.infonce_scale if infonce_scale is None else infonce_scale
    return _part(block, _counts(block, options), options, logit_scale, logit_bias, scale, epoch)


def _counts(block: PairBlock, options: PCMEPPOptions) -> Tensor:
    """The divisors: number of pairs; with a bottleneck both modalities' sums, to test VIB_LIMIT; those of InfoNCE."""
    values = [torch.tensor(float(block.match_i2t.numel()))]
    if options.beta:
        values += [vib_sums(x).detach().double().sum() for x in (block.image, block.text)]
    own = torch.stack([value.double().to(block.match_i2t.device) for value in values])
    return torch.cat([own, infonce_counts(block)]) if options.infonce_weight else own


def _part(
    block: PairBlock,
    counts: Tensor,
    options: PCMEPPOptions,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    infonce_scale: Tensor | float,
    epoch: int | None,
) -> LossOutput:
    i2t, t2i = block.distances(get_distance(options.distance))
    pairs = counts[0].to(i2t.dtype)
    match_i2t, match_t2i = block.match_i2t.to(i2t.dtype), block.match_t2i.to(i2t.dtype)
    logit = match_logit(i2t, logit_scale, logit_bias)
    terms = {"match": options.match_weight * _cross_entropy(logit, match_i2t) / pairs}
    stats: dict[str, Tensor] = {}
    if options.alpha and (epoch is None or epoch >= options.pseudo_positives_from):
        raised_i2t, raised_t2i = pseudo_positives(i2t, match_i2t), pseudo_positives(t2i, match_t2i)
        reverse = match_logit(t2i, logit_scale, logit_bias)
        both = _cross_entropy(logit, raised_i2t) + _cross_entropy(reverse, raised_t2i)
        terms["pseudo_positive"] = options.alpha * both / pairs
        stats["pseudo_positives_i2t"] = (raised_i2t > match_i2t).sum()
        stats["pseudo_positives_t2i"] = (raised_t2i > match_t2i).sum()
    if options.beta:
        vib, ignored = _bottleneck(block, counts[1:3])
        terms["vib"] = options.beta * vib
        stats["vib_ignored"] = ignored * block.match_i2t.numel() / pairs  # It is counted once for all blocks.
    if options.infonce_weight:
        beside = infonce_part(block, counts[-2:], InfoNCEOptions(), infonce_scale)
        terms |= {f"infonce_{name}": options.infonce_weight * term for name, term in beside.terms.items()}
    return sum_of_terms(terms, stats)


def _bottleneck(block: PairBlock, sums: Tensor) -> tuple[Tensor, Tensor]:
    """(() the block's part of both modalities' bottlenecks, () the number of modalities that are left out)."""
    sizes = [x.n * x.d for x in (block.images, block.texts)]
    ignored = [total / size > VIB_LIMIT for total, size in zip(sums, sizes, strict=True)]
    # Omitted terms are not computed, because 0 times an infinite gradient would be NaN.
    kept = [
        vib_sums(GaussianEmbedding(x.mean.masked_fill(skip, 0), x.log_var.masked_fill(skip, 0))).sum() / size
        for x, skip, size in zip((block.image, block.text), ignored, sizes, strict=True)
    ]
    return kept[0] + kept[1], torch.stack(ignored).sum()


def _cross_entropy(logit: Tensor, label: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logit, label, reduction="sum")


class PCMEPPLoss(MatchLoss):
    """:func:`pcmepp_loss` with learnable logits.

    Args:
        options: see :class:`PCMEPPOptions`.
    """

    def __init__(self, options: PCMEPPOptions = PCMEPPOptions()) -> None:
        super().__init__(options)
        self.options = options
        self.logits = MatchingLogits(options.logit_scale, options.logit_bias, free=options.free_scale)
        beside = InfoNCEOptions(logit_scale=options.infonce_scale, largest_scale=options.infonce_largest_scale)
        self.infonce = InfoNCELoss(beside) if options.infonce_weight else None

    def counts(self, block: PairBlock) -> Tensor:
        """See :class:`MatchLoss`."""
        return _counts(block, self.options)

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`MatchLoss`."""
        scale = self.options.infonce_scale if self.infonce is None else self.infonce.logits.logit_scale
        return _part(block, counts, self.options, self.logits.logit_scale, self.logits.logit_bias, scale, epoch)
