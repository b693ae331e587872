"""The ProLIP objective: the sigmoid loss of SigLIP on the logits of Gaussians, inclusion and information bottleneck.

Three deviations of the released code are left out: an inclusion test with nearly no part of the means, a bottleneck
with wrongly halved log variances, and the inclusion and bottleneck of other processes' mismatched pairs.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding
from sfumato.inclusion import inclusion_losses
from sfumato.losses.base import (
    LossOptions,
    LossOutput,
    MatchLoss,
    PairBlock,
    option,
    or_start,
    sum_of_terms,
    vib_loss,
    vib_of_block,
    whole_batch,
)
from sfumato.matching import match_logit


@dataclass(frozen=True)
class ProLIPOptions(LossOptions):
    """ProLIP: the sigmoid loss of SigLIP on the logits of Gaussians, with inclusion.

    Attributes: each field states its default, its meaning and its range.
    """

    beta: float = option(1e-4, "weight of the information bottleneck; 0 leaves it out, as points need", ge=0)
    inclusion_weight: float = option(
        0.0,
        "weight of the inclusion of images in their texts; 0 leaves it out, as points need; 1e-7 as published",
        ge=0,
    )
    logit_scale: float = option(5.0, "initial scale; 5 and a bias of 0 are ProLIP's scale 10 and bias -10", gt=0)
    logit_bias: float = option(0.0, "initial bias of the match logits")


def prolip_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: ProLIPOptions = ProLIPOptions(),
    *,
    logit_scale: Tensor | float | None = None,
    logit_bias: Tensor | float | None = None,
) -> LossOutput:
    r"""match + inclusion_weight * inclusion(image in text) + beta * (vib_image + vib_text).

    The match term (PPCL) is the binary cross-entropy of the logits, summed over all pairs and divided by the mean of n
    and m: by n in a batch of pairs. ProLIP writes its logit as
    scale * (mean_i . mean_j - (sum(var_i) + sum(var_j)) / 2) + bias. For unit means that equals our logit,
    logit_bias - logit_scale * csd, with

        logit_scale = scale / 2    and    logit_bias = bias + scale

    The inclusion term is the mean over the pairs with a label of at least 1/2, and takes memory for their number times
    d; it is 0 for a batch without such a pair.

    Paper: Chun et al., "Probabilistic language-image pre-training", ICLR 2025. The released bottleneck is vib_loss of
    halved log variances, which is not a divergence.

    image (n, d), text (m, d), match (n, m).
    """
    distance, label = whole_batch(options, image, text, match, "prolip_loss")
    logit = match_logit(distance, or_start(logit_scale, options.logit_scale), or_start(logit_bias, options.logit_bias))
    cross_entropy = functional.binary_cross_entropy_with_logits(logit, label, reduction="sum")
    terms = {"match": 2 * cross_entropy / (image.n + text.n)}
    if options.inclusion_weight:
        rows, columns = (label >= 0.5).nonzero(as_tuple=True)
        losses = inclusion_losses(image[rows], text[columns])
        terms["inclusion"] = options.inclusion_weight * losses.sum() / max(len(losses), 1)
    if options.beta:
        terms["vib"] = options.beta * (vib_loss(image) + vib_loss(text))
    return sum_of_terms(terms)


class ProLIPLoss(MatchLoss):
    """:func:`prolip_loss` with learnable logits."""

    options: ProLIPOptions
    Options = ProLIPOptions

    def counts(self, block: PairBlock) -> Tensor:
        return block.n_positives()

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        options = self.options
        logit = self.logits(self.distance.matrix(block.image, block.texts))
        label = block.match_i2t.to(logit.dtype)
        cross_entropy = functional.binary_cross_entropy_with_logits(logit, label, reduction="sum")
        terms, stats = {"match": 2 * cross_entropy / (block.images.n + block.texts.n)}, {}
        if options.inclusion_weight:
            rows, columns = (block.match_i2t >= 0.5).nonzero(as_tuple=True)
            inner, outer = block.image[rows], block.texts[columns]
            losses = inclusion_losses(inner, outer)
            pairs = counts[0].clamp_min(1).to(losses.dtype)
            terms["inclusion"] = options.inclusion_weight * losses.sum() / pairs
            stats["included"] = (inner.log_var < outer.log_var).sum() / (pairs * inner.d)
        if options.beta:
            terms["vib"] = options.beta * vib_of_block(block)
        return sum_of_terms(terms, stats)
