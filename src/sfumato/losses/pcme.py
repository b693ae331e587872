"""The PCME objective: soft contrastive loss of sampled match probabilities in log space, bottleneck and uniformity.

The random samples depend only on the number of the step, so that all processes and blocks use the same samples.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.distances.distance import blockwise, by_pair, reduce_sample_distances, squared_l2_product
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype, reparametrised
from sfumato.losses import base
from sfumato.losses.tiles import dense_labels
from sfumato.matching import match_logit

SIGMOIDS = {"plain": 1.0, "compressed": 2.0}
"""Factor of the logit in either convention: sigmoid(x), and exp(x) / (exp(x) + exp(-x)) = sigmoid(2 x) as released."""

Sigmoid = Literal["plain", "compressed"]


@dataclass(frozen=True)
class PCMEOptions(base.LossOptions):
    """PCME: soft contrastive loss of sampled match probabilities, bottleneck, uniformity.

    Attributes: each field states its default, its meaning and its range.
    """

    distance: str = base.option("csd", "distance to rank by; the loss compares samples by Euclidean distance")
    n_samples: int = base.option(7, "number of samples of each embedding", ge=1)
    sigmoid: Sigmoid = base.option("plain", "plain, or compressed: the released sigmoid(2 logit)")  # noqa: RUF009
    beta: float = base.option(
        1e-4, "weight of the bottleneck; 0 leaves it out, as points need; COCO's released 1e-5 is 8e-5 here", ge=0
    )
    uniformity_weight: float = base.option(
        0.0, "weight of the uniformity of all samples; 0 leaves it out; CUB's published 10 is 4.4e-4 here", ge=0
    )
    logit_scale: float = base.option(5.0, "initial scale of the match logits; the paper: 15 for COCO, 5 for CUB", gt=0)
    logit_bias: float = base.option(5.0, "initial bias of the match logits; the paper: 15 for COCO, 5 for CUB")
    free_scale: bool = base.option(False, base.FREE_SCALE)


def pcme_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: PCMEOptions = PCMEOptions(),
    *,
    logit_scale: Tensor | float | None = None,
    logit_bias: Tensor | float | None = None,
    step: int = 0,
    noise: tuple[Tensor, Tensor] | None = None,
) -> base.LossOutput:
    r"""2 * match + beta * (vib_image + vib_text) + uniformity_weight * uniformity.

        p = 1/s^2 sum_jk sigmoid(b - a ||z_i^j - z_l^k||)
        match = mean over pairs of -label ln p - (1 - label) ln(1 - p)
        uniformity = ln mean over pairs of two samples of exp(-2 ||z - z'||^2), images' and texts' together

    All logarithms are log-sum-exps, so that neither p nor 1 - p nor the uniformity's mean underflows.

    The released loss has sums in the place of the means over pairs and over embeddings and dimensions.
    docs/concepts/losses.md converts its weights.

    Paper: Chun et al., CVPR 2021, Eq. 1-3 and A.1.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        options: the weights and other options, see its fields.
        logit_scale: scale of the match logits; None: that of the options.
        logit_bias: bias of the match logits; None: that of the options.
        step: number of the training step, on which the samples depend.
        noise: (n, s, d) and (m, s, d) standard normal noise of the samples; None: drawn by the step.

    Returns:
        The loss with its weighted terms and statistics.

    Raises:
        ValueError: the noise has another shape.
    """
    label = dense_labels(base.check_match(image, text, match, "pcme_loss"))
    noise = _sampled_noise(image, text, options, step) if noise is None else noise
    for name, e, z in zip(("images", "texts"), (image, text), noise, strict=True):
        if z.ndim != 3 or (len(z), z.shape[2]) != (e.n, e.d):
            raise ValueError(f"pcme_loss: noise of {name} must be ({e.n}, n_samples, {e.d}), got {tuple(z.shape)}")
    x, y = (reparametrised(e.to(accumulation_dtype(e.dtype)), z) for e, z in zip((image, text), noise, strict=True))
    logits = base.or_start(logit_scale, options.logit_scale), base.or_start(logit_bias, options.logit_bias)
    likelihood = _log_likelihood(x, y, label, options, *logits)
    terms = {"match": -2 * likelihood.mean()}
    if options.beta:
        terms["vib"] = options.beta * (base.vib_loss(image) + base.vib_loss(text))
    if options.uniformity_weight:
        samples = [reparametrised(e.to(torch.float64), z) for e, z in zip((image, text), noise, strict=True)]
        z = torch.cat([x.flatten(0, 1) for x in samples])
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        exponent = (-2 * squared_l2_product(z, z)).masked_fill(itself, -torch.inf)
        uniformity = exponent.logsumexp((0, 1)) - math.log(len(z) * (len(z) - 1))
        terms["uniformity"] = options.uniformity_weight * uniformity.to(likelihood.dtype)
    return base.sum_of_terms(terms)


def _sampled_noise(
    images: GaussianEmbedding, texts: GaussianEmbedding, options: PCMEOptions, step: int
) -> tuple[Tensor, Tensor]:
    """(n, s, d) and (m, s, d) noise for all images and all texts of the batch, always in float32."""
    # A checksum, as equal seeds of several generators would be correlated: a generator on the CPU takes 32 bits.
    generator = torch.Generator().manual_seed(zlib.crc32(f"0 {step}".encode()))
    shape = options.n_samples, images.d
    image, text = (torch.randn((x.n, *shape), generator=generator).to(x.device) for x in (images, texts))
    return image, text


def _log_likelihood(
    x: Tensor, y: Tensor, label: Tensor, options: PCMEOptions, logit_scale: Tensor | float, logit_bias: Tensor | float
) -> Tensor:
    """(n, m) label ln p + (1 - label) ln(1 - p) of samples x (n, s, d) and y (m, s', d)."""
    log_pairs = math.log(x.shape[1] * y.shape[1])

    def log_probability(sign: float) -> Tensor:
        """(n, m) ln p for sign 1, ln(1 - p) for -1."""

        def reduce(distance: Tensor) -> Tensor:
            logit = sign * SIGMOIDS[options.sigmoid] * match_logit(distance, logit_scale, logit_bias)
            return functional.logsigmoid(logit).flatten(2).logsumexp(-1) - log_pairs

        return reduce_sample_distances(x, y, reduce)

    label = label.to(x.dtype)
    return label * log_probability(1.0) + (1 - label) * log_probability(-1.0)


def _own_and_all(
    block: base.PairBlock, noise: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Samples of the block's images and texts, then of all images and all texts; equal items have equal samples."""
    own_image = noise[0][block.first_image : block.first_image + block.image.n]
    own_text = noise[1][block.first_text : block.first_text + block.text.n]
    pairs = (block.image, own_image), (block.text, own_text), (block.images, noise[0]), (block.texts, noise[1])
    image, text, images, texts = (reparametrised(e.to(dtype), z) for e, z in pairs)
    return (image, text), (images, texts)


def _exponents(block: base.PairBlock, noise: tuple[Tensor, Tensor], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """(k,) values of reduce, (r, c, s, s') exponents -2 ||z - z'||^2 of the block's and of all samples -> (r, c).

    A sample with itself has the exponent -inf. Exponents reach thousands and their differences matter, hence float64.
    """
    own, everything = _own_and_all(block, noise, torch.float64)
    sizes = [x.shape[0] * x.shape[1] for x in noise]
    numbers = torch.arange(sum(sizes), device=block.images.device).split(sizes)  # One for each sample of the batch.
    all_numbers = [number.view(x.shape[:2]) for number, x in zip(numbers, noise, strict=True)]
    first, second = block.first_image, block.first_text
    own_numbers = all_numbers[0][first : first + block.image.n], all_numbers[1][second : second + block.text.n]

    def exponents(a: Tensor, a_number: Tensor, b: Tensor, b_number: Tensor) -> Tensor:
        exponent = -2 * squared_l2_product(a.flatten(0, 1), b.flatten(0, 1))
        exponent = exponent.masked_fill(a_number.view(-1, 1) == b_number.flatten(), -torch.inf)
        return reduce(by_pair(exponent, a, b))

    parts = [
        blockwise(exponents, (a, a_number), (b, b_number)).flatten()
        for a, a_number in zip(own, own_numbers, strict=True)
        for b, b_number in zip(everything, all_numbers, strict=True)
    ]
    return torch.cat(parts)


class PCMELoss(base.MatchLoss):
    """:func:`pcme_loss` with learnable logits.

    Samples depend only on ``step``, a buffer that :meth:`advance` increments after every training step
    and that checkpoints keep. So within a step every process, block and recomputation uses the same samples, two equal
    runs are bitwise equal, and so is a resumed one.
    """

    options: PCMEOptions
    Options = PCMEOptions
    step: Tensor

    def __init__(self, options: PCMEOptions | None = None) -> None:
        super().__init__(options)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def advance(self) -> None:
        """See :class:`MatchLoss`; the following steps use new samples."""
        super().advance()
        self.step += 1

    def match_logits(self) -> tuple[float, float] | None:
        """The learnt logits as a linear function of csd: the tangent at the csd where a match is as likely as not.

        The loss learns p(D) = sigmoid(c (b - a D)) of the distance D of two samples (c = 2 for the compressed sigmoid),
        and csd is the mean of D^2. So p = sigmoid(c (b - a sqrt(csd))) up to the dispersion of D, which the tangent at
        csd = (b / a)^2, where p = 1/2, turns into a scale of c a^2 / (2 b) and a bias of c b / 2.

        Returns:
            (logit_scale, logit_bias), or None if no distance is as likely a match as not.
        """
        scale, bias = self.logits.logit_scale.item(), self.logits.logit_bias.item()
        if self.distance.name != "csd" or bias <= 0:
            return None
        factor = SIGMOIDS[self.options.sigmoid]
        return factor * scale**2 / (2 * bias), factor * bias / 2

    def counts(self, block: base.PairBlock) -> Tensor:
        """Number of pairs, and with uniformity the logarithm of the sum of the exponentials.

        See :meth:`MatchLoss.counts`.
        """
        values = [torch.tensor(float(block.match_i2t.numel()), dtype=torch.float64, device=block.images.device)]
        if self.options.uniformity_weight:
            noise = self._noise(block)
            with torch.no_grad():
                values.append(_exponents(block, noise, lambda x: x.logsumexp((2, 3))).logsumexp(0))
        return torch.stack(values)

    def combine(self, counts: Tensor) -> Tensor:
        """Pairs add up, and so do the exponentials of the uniformity's logarithms. See :meth:`MatchLoss.combine`."""
        return torch.cat([counts[:, :1].sum(0), counts[:, 1:].logsumexp(0)])

    def part(self, block: base.PairBlock, counts: Tensor, *, epoch: int | None = None) -> base.LossOutput:
        """See :meth:`MatchLoss.part`."""
        options, noise = self.options, self._noise(block)
        (own_image, _), (_, texts) = _own_and_all(block, noise, accumulation_dtype(block.images.dtype))
        logits = self.logits.logit_scale, self.logits.logit_bias
        likelihood = _log_likelihood(own_image, texts, block.match_i2t, options, *logits)
        terms = {"match": -2 * likelihood.sum() / counts[0].to(likelihood.dtype)}
        if options.beta:
            terms["vib"] = options.beta * base.vib_of_block(block)
        if options.uniformity_weight:
            samples = sum(x.shape[0] * x.shape[1] for x in noise)
            # The block's fraction of the whole sum; its gradient is that of the logarithm of the whole sum.
            part = _exponents(block, noise, lambda x: (x - counts[1]).exp().sum((2, 3))).sum()
            value = part.detach() * (counts[1] - math.log(samples * (samples - 1))) + (part - part.detach())
            terms["uniformity"] = options.uniformity_weight * value.to(likelihood.dtype)
        return base.sum_of_terms(terms)

    def _noise(self, block: base.PairBlock) -> tuple[Tensor, Tensor]:
        return _sampled_noise(block.images, block.texts, self.options, int(self.step))
