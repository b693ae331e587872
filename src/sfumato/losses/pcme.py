"""The PCME objective: soft contrastive loss of sampled match probabilities in log space, bottleneck and uniformity.

What is random here follows from a seed and the number of the step, so that all processes and blocks use the same draws.
"""

import math
import zlib
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.distances import reduce_sample_distances
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.losses.base import LossOutput, MatchLoss, PairShare, vib_of_share
from sfumato.matching import MatchingLogits, match_logit

SIGMOIDS = {"plain": 1.0, "compressed": 2.0}
"""By what either convention multiplies a logit: sigmoid(x), and exp(x) / (exp(x) + exp(-x)) = sigmoid(2 x) as released."""

Sigmoid = Literal["plain", "compressed"]


def pcme_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    *,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    n_samples: int = 7,
    sigmoid: Sigmoid = "plain",
    beta: float = 1e-4,
    uniformity_weight: float = 0.0,
    match_weight: float = 2.0,
    generator: torch.Generator | None = None,
    noise: tuple[Tensor, Tensor] | None = None,
) -> LossOutput:
    r"""match_weight * match + beta * (vib_image + vib_text) + uniformity_weight * uniformity.

        p = 1/s^2 sum_jk sigmoid(b - a ||z_i^j - z_l^k||)
        match = mean over pairs of -label ln p - (1 - label) ln(1 - p)
        uniformity = ln mean over pairs of two draws of exp(-2 ||z - z'||^2), images' and texts' together

    Both logarithms are log-sum-exps over the s^2 logits, so that neither p nor 1 - p underflows. Blocks of draws are
    recomputed in the backward pass.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1], soft ones welcome.
        logit_scale: a > 0; initially 15 in the paper for COCO, 5 for CUB.
        logit_bias: b; the same.
        n_samples: s draws of each embedding.
        sigmoid: "plain", or "compressed", the released sigmoid(2 x).
        beta: weight of the information bottleneck; 0 leaves it out, as points need.
        uniformity_weight: weight of the uniformity of all draws; 0 leaves it out, 10 as published for CUB.
        match_weight: 2 counts both directions; 2 n m gives the released sum over pairs.
        generator: source of the draws.
        noise: (n, s, d) and (m, s, d) standard normal numbers in place of draws; n_samples and generator play no part then.

    Returns:
        Terms "match", "vib", "uniformity".

    Raises:
        ValueError: shapes do not fit, the batch is empty, or the sigmoid is unknown.

    Example:
        >>> e = GaussianEmbedding(torch.eye(2), torch.full((2, 2), -99.0))
        >>> pcme_loss(e, e, torch.eye(2), logit_scale=5.0, logit_bias=5.0, beta=0).terms["match"]
        tensor(0.1255)

    Paper: Chun et al., CVPR 2021, Eq. 1-3 and A.1.
    """
    share = PairShare.whole(image, text, match, "pcme_loss")
    if noise is None:
        noise = _draw(share, n_samples, generator)
    _check_noise(share, noise)
    counts = _counts(share, noise, uniformity_weight)
    return _part(
        share,
        counts,
        noise,
        logit_scale=logit_scale,
        logit_bias=logit_bias,
        sigmoid=sigmoid,
        beta=beta,
        uniformity_weight=uniformity_weight,
        match_weight=match_weight,
    )


def _draw(share: PairShare, n_samples: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Noise for all images and all texts of the batch, in float32 whatever the embeddings are."""
    if n_samples < 1:
        raise ValueError(f"pcme_loss: n_samples must be at least 1, got {n_samples}")
    device = share.images.device if generator is None else generator.device
    image, text = (
        torch.randn((x.n, n_samples, x.d), generator=generator, device=device).to(x.device)
        for x in (share.images, share.texts)
    )
    return image, text


def _check_noise(share: PairShare, noise: tuple[Tensor, Tensor]) -> None:
    for name, x, values in zip(("images", "texts"), (share.images, share.texts), noise, strict=True):
        if values.ndim != 3 or (len(values), values.shape[2]) != (x.n, x.d):
            raise ValueError(
                f"pcme_loss: noise of {name} must have shape ({x.n}, n_samples, {x.d}), got {tuple(values.shape)}"
            )


def _samples(x: GaussianEmbedding, noise: Tensor) -> Tensor:
    """(n, s, d) draws mean + sqrt(var) * noise."""
    dtype = accumulation_dtype(x.dtype)
    mean, log_var = x.mean.to(dtype), x.log_var.to(dtype)
    return torch.addcmul(mean.unsqueeze(1), (log_var / 2).exp().unsqueeze(1), noise.to(dtype))


def _own_and_all(share: PairShare, noise: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Draws of the share's images and of its texts, then those of all images and all texts; equal items, equal draws."""
    own_image = noise[0][share.first_image : share.first_image + share.image.n]
    own_text = noise[1][share.first_text : share.first_text + share.text.n]
    own = _samples(share.image, own_image), _samples(share.text, own_text)
    return own, (_samples(share.images, noise[0]), _samples(share.texts, noise[1]))


def _uniformity_sum(share: PairShare, noise: tuple[Tensor, Tensor]) -> Tensor:
    """() sum over the share's draws and all other draws of exp(-2 ||z - z'||^2)."""
    own, everything = _own_and_all(share, noise)

    def reduce(distance: Tensor) -> Tensor:
        return (-2 * distance.square()).exp().sum((2, 3))

    total = torch.stack([reduce_sample_distances(a, b, reduce).double().sum() for a in own for b in everything]).sum()
    return total - sum(a.shape[0] * a.shape[1] for a in own)  # Less every draw with itself, exp(0) each.


def _counts(share: PairShare, noise: tuple[Tensor, Tensor], uniformity_weight: float) -> Tensor:
    """Number of pairs, and with uniformity the sum within its logarithm."""
    values = [torch.tensor(float(share.match_i2t.numel()), dtype=torch.float64, device=share.images.device)]
    if uniformity_weight:
        with torch.no_grad():
            values.append(_uniformity_sum(share, noise).detach())
    return torch.stack(values)


def _part(
    share: PairShare,
    counts: Tensor,
    noise: tuple[Tensor, Tensor],
    *,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    sigmoid: Sigmoid,
    beta: float,
    uniformity_weight: float,
    match_weight: float,
) -> LossOutput:
    if sigmoid not in SIGMOIDS:
        raise ValueError(f"pcme_loss: sigmoid must be one of {', '.join(SIGMOIDS)}, got {sigmoid!r}")
    (own_image, _), (_, texts) = _own_and_all(share, noise)
    log_pairs = math.log(own_image.shape[1] * texts.shape[1])

    def log_probability(sign: float) -> Tensor:
        """(r, m) ln p for sign 1, ln(1 - p) for -1."""

        def reduce(distance: Tensor) -> Tensor:
            logit = sign * SIGMOIDS[sigmoid] * match_logit(distance, logit_scale, logit_bias)
            return functional.logsigmoid(logit).flatten(2).logsumexp(-1) - log_pairs

        return reduce_sample_distances(own_image, texts, reduce)

    label = share.match_i2t.to(own_image.dtype)
    likelihood = label * log_probability(1.0) + (1 - label) * log_probability(-1.0)
    terms = {"match": -match_weight * likelihood.sum() / counts[0].to(likelihood.dtype)}
    if beta:
        terms["vib"] = beta * vib_of_share(share)
    if uniformity_weight:
        draws = sum(x.shape[0] * x.shape[1] for x in noise)
        whole = counts[1].clamp_min(1e-300)
        part = _uniformity_sum(share, noise) / whole
        # The share of the logarithm that this part is of; its gradient is that of the logarithm of the whole sum.
        value = part.detach() * (whole / (draws * (draws - 1))).log() + (part - part.detach())
        terms["uniformity"] = uniformity_weight * value.to(likelihood.dtype)
    return LossOutput(torch.stack(list(terms.values())).sum(), terms)


class PCMELoss(MatchLoss):
    """:func:`pcme_loss` with learnable logits.

    Draws follow from ``seed`` and ``step``, a buffer that :meth:`advance` moves on after every training step and that
    checkpoints keep: within a step every process, block and recomputation uses the same draws, two equal runs are bitwise
    equal, and so is a resumed one.

    Args:
        distance: by which a trained model ranks; the loss itself compares draws by their Euclidean distance.
        n_samples, sigmoid, beta, uniformity_weight, match_weight: see :func:`pcme_loss`.
        logit_scale, logit_bias: initial values of the learnable logits.
        seed: of the draws.
    """

    step: Tensor

    def __init__(
        self,
        *,
        distance: str = "csd",
        n_samples: int = 7,
        sigmoid: Sigmoid = "plain",
        beta: float = 1e-4,
        uniformity_weight: float = 0.0,
        match_weight: float = 2.0,
        logit_scale: float = 5.0,
        logit_bias: float = 5.0,
        seed: int = 0,
    ) -> None:
        super().__init__(distance)
        self.logits = MatchingLogits(logit_scale, logit_bias)
        self.n_samples, self.seed = n_samples, seed
        self.sigmoid: Sigmoid = sigmoid
        self.beta, self.uniformity_weight, self.match_weight = beta, uniformity_weight, match_weight
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def advance(self) -> None:
        """New draws from now on."""
        self.step += 1

    def _noise(self, share: PairShare) -> tuple[Tensor, Tensor]:
        # A checksum of both: a generator on the CPU takes 32 bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {int(self.step)}".encode()))
        return _draw(share, self.n_samples, generator)

    def counts(self, share: PairShare) -> Tensor:
        """See :class:`MatchLoss`."""
        return _counts(share, self._noise(share) if self.uniformity_weight else _NO_NOISE, self.uniformity_weight)

    def part(self, share: PairShare, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`MatchLoss`."""
        return _part(
            share,
            counts,
            self._noise(share),
            logit_scale=self.logits.logit_scale,
            logit_bias=self.logits.logit_bias,
            sigmoid=self.sigmoid,
            beta=self.beta,
            uniformity_weight=self.uniformity_weight,
            match_weight=self.match_weight,
        )


_NO_NOISE = (torch.empty(0), torch.empty(0))
