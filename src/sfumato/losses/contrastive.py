"""The contrastive objectives of CLIP (InfoNCE) and of ProLIP (sigmoids on the logits of Gaussians, with inclusion).

Three deviations of the released code of ProLIP are left out: an inclusion test with nearly no part of the means, a
bottleneck with wrongly halved log variances, and the inclusion and bottleneck of other processes' mismatched pairs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.losses import base
from sfumato.losses.tiles import PairTerms, Tile, Tiles, matched_rows, pair_sums
from sfumato.matching import match_logit

LARGEST_SCALE = "largest scale of the InfoNCE loss; 0: no limit. 50 is CLIP's and open_clip's limit, 100 on the cosine"
"""Description of the limit of the scale, for InfoNCE alone and beside PCME++."""

NO_POSITIVE = "infonce_loss: no pair of the batch matches; InfoNCE needs at least one positive"


@dataclass(frozen=True)
class InfoNCEOptions(base.LossOptions):
    """InfoNCE with a learnable temperature.

    Attributes: each field states its default, its meaning and its range.
    """

    distance: str = base.option("squared_l2", "name of the distance; any differentiable one")
    logit_scale: float = base.option(5.0, "initial scale; 1 on squared_l2 is a temperature of 0.5 on the cosine", gt=0)
    largest_scale: float = base.option(0.0, LARGEST_SCALE, ge=0)
    free_scale: bool = base.option(False, base.FREE_SCALE)


def infonce_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: InfoNCEOptions = InfoNCEOptions(),
    *,
    logit_scale: Tensor | float | None = None,
) -> base.LossOutput:
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
    distance, label = base.whole_batch(options, image, text, match, "infonce_loss")
    logit, terms = match_logit(distance, base.or_start(logit_scale, options.logit_scale), 0.0), {}
    for name, x, y in (("i2t", logit, label), ("t2i", logit.T, label.T)):
        total = y.sum(1)
        if not total.any():
            raise ValueError(NO_POSITIVE)
        x, y, total = x[total > 0], y[total > 0], total[total > 0]
        terms[name] = -(y / total.unsqueeze(1) * x.log_softmax(1)).sum(1).mean() / 2
    return base.sum_of_terms(terms)


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
        sides = zip(self._log_sum, self._total, matched, strict=True)
        losses = [torch.where(n > 0, log_sum - own / n, 0).sum(dtype=torch.float64) for log_sum, n, own in sides]
        return torch.stack(losses)

    def gradient(self, tile: Tile, upstream: Tensor) -> Tensor:
        gradient = torch.zeros_like(tile.logit)
        for k, axis in enumerate(self.axes):
            log_sum, total = (x[k][tile.ranges[axis]].unsqueeze(1 - axis) for x in (self._log_sum, self._total))
            weight = torch.where(total > 0, upstream[k], 0)  # Rows without a match do not count.
            gradient += (tile.logit - log_sum).exp_().mul_(weight)
            gradient -= tile.label * (weight / torch.where(total > 0, total, 1))
        return gradient


class InfoNCELoss(base.MatchLoss):
    """:func:`infonce_loss` with a learnable scale."""

    options: InfoNCEOptions
    Options, tiled = InfoNCEOptions, True

    def __init__(self, options: InfoNCEOptions | None = None) -> None:
        super().__init__(options)
        self.logits.logit_bias.requires_grad_(False)

    def counts(self, block: base.PairBlock) -> Tensor:
        """The number of images, and of texts, that have a match. See :meth:`MatchLoss.counts`."""
        return torch.stack([matched_rows(match).sum() for match in (block.match_i2t, block.match_t2i)]).double()

    def part(self, block: base.PairBlock, counts: Tensor, *, epoch: int | None = None) -> base.LossOutput:
        """See :meth:`MatchLoss.part`."""
        if not counts.all():
            raise ValueError(NO_POSITIVE)
        terms = {}
        for image, text, labels, axes in block.rectangles():
            sums = pair_sums(self.distance, self.logits, (image, text), _CrossEntropies(labels, axes), block.max_pairs)
            for axis, total in zip(axes, sums, strict=True):
                terms["t2i" if axis else "i2t"] = total / (2 * counts[axis].to(total.dtype))
        return base.sum_of_terms(terms)


def log_inclusion(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""Logarithm of the integral of p_x(t)^2 p_y(t) over t, for each pair of rows and each dimension.

        v = var_x + 2 var_y:   -log(2 pi) - log_var_x / 2 - log(v) / 2 - (mean_x - mean_y)^2 / v

    Paper: Chun et al., "Probabilistic language-image pre-training" (ProLIP), ICLR 2025.

    x (n, d), y (n, d) -> (n, d).
    """
    if x.mean.shape != y.mean.shape or x.dtype != y.dtype or x.device != y.device:
        first, second = (f"{tuple(e.mean.shape)} {e.dtype} on {e.device}" for e in (x, y))
        raise ValueError(f"log_inclusion: x is {first} and y is {second}; n, d, dtype and device must be equal")
    x, y = (e.to(accumulation_dtype(e.dtype)) for e in (x, y))
    log_v = torch.logaddexp(x.log_var, y.log_var + math.log(2))
    # Divided before squaring: small variances do not overflow.
    over = ((x.mean - y.mean) * (-log_v / 2).exp()).square()
    return -math.log(2 * math.pi) - (x.log_var + log_v) / 2 - over


def inclusion_test(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    r"""log_inclusion(x, y) - log_inclusion(y, x): positive where x is included in y.

    Its sign is that of log_var_y - log_var_x for all means. The means only change its size, which grows with their
    distance.

    Args:
        x, y: (n, d) embeddings; see :func:`log_inclusion`.

    Returns:
        (n, d) tests; inclusion_test(y, x) is the negative.

    Raises:
        ValueError: shape, dtype or device differ.

    Example:
        >>> narrow, wide = (GaussianEmbedding(torch.zeros(1, 1), torch.full((1, 1), v)) for v in (-4.0, 0.0))
        >>> inclusion_test(narrow, wide)
        tensor([[1.6669]])

    Paper: see :func:`log_inclusion`.
    """
    return log_inclusion(x, y) - log_inclusion(y, x)


def inclusion_losses(inner: GaussianEmbedding, outer: GaussianEmbedding, *, scale: float = 1000.0) -> Tensor:
    r"""Inclusion of every inner embedding in its outer one: an image in its text, a whole in its masked view.

        -log sigmoid(scale * inclusion_test(inner, outer)), averaged over d

    It orders variances and has little effect on means: see :func:`inclusion_test`. The released code has a test of the
    same sign, which is larger by (log_var_y - log_var_x) / 2. What the means add is multiplied there by exp(-10) or
    exp(-20).

    Paper: see :func:`log_inclusion`.

    inner (n, d), outer (n, d) -> (n,).
    """
    return -functional.logsigmoid(scale * inclusion_test(inner, outer)).mean(1)


@dataclass(frozen=True)
class ProLIPOptions(base.LossOptions):
    """ProLIP: the sigmoid loss of SigLIP on the logits of Gaussians, with inclusion.

    Attributes: each field states its default, its meaning and its range.
    """

    beta: float = base.option(1e-4, "weight of the information bottleneck; 0 leaves it out, as points need", ge=0)
    inclusion_weight: float = base.option(
        0.0, "weight of the inclusion of images in their texts; 0 leaves it out, as points need; published: 1e-7", ge=0
    )
    logit_scale: float = base.option(5.0, "initial scale; 5 and a bias of 0 are ProLIP's scale 10 and bias -10", gt=0)
    logit_bias: float = base.option(0.0, "initial bias of the match logits")


def prolip_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: ProLIPOptions = ProLIPOptions(),
    *,
    logit_scale: Tensor | float | None = None,
    logit_bias: Tensor | float | None = None,
) -> base.LossOutput:
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

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        options: the weights and other options, see its fields.
        logit_scale: scale of the match logits; None: that of the options.
        logit_bias: bias of the match logits; None: that of the options.

    Returns:
        The loss with its weighted terms and statistics.
    """
    distance, label = base.whole_batch(options, image, text, match, "prolip_loss")
    scale, bias = base.or_start(logit_scale, options.logit_scale), base.or_start(logit_bias, options.logit_bias)
    logit = match_logit(distance, scale, bias)
    cross_entropy = functional.binary_cross_entropy_with_logits(logit, label, reduction="sum")
    terms = {"match": 2 * cross_entropy / (image.n + text.n)}
    if options.inclusion_weight:
        rows, columns = (label >= 0.5).nonzero(as_tuple=True)
        losses = inclusion_losses(image[rows], text[columns])
        terms["inclusion"] = options.inclusion_weight * losses.sum() / max(len(losses), 1)
    if options.beta:
        terms["vib"] = options.beta * (base.vib_loss(image) + base.vib_loss(text))
    return base.sum_of_terms(terms)


class ProLIPLoss(base.MatchLoss):
    """:func:`prolip_loss` with learnable logits."""

    options: ProLIPOptions
    Options = ProLIPOptions

    def counts(self, block: base.PairBlock) -> Tensor:
        """See :meth:`MatchLoss.counts`."""
        return block.n_positives()

    def part(self, block: base.PairBlock, counts: Tensor, *, epoch: int | None = None) -> base.LossOutput:
        """See :meth:`MatchLoss.part`."""
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
            terms["vib"] = options.beta * base.vib_of_block(block)
        return base.sum_of_terms(terms, stats)
