"""What every loss shares: its result, its interface, its shares and the checks of its inputs. No formula lives here."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfumato.distances import Distance, get_distance
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype

MAX_PAIRS = 2**22
"""Pairs whose distances, logits and labels a loss holds in memory at a time: about 200 MB in float32."""


@dataclass(frozen=True)
class LossOutput:
    """A loss and what it is made of.

    Attributes:
        total: () the number to minimise.
        terms: name -> () weighted term; they sum to total.
        stats: name -> () detached numbers worth logging (counts, scales), no part of the total.
    """

    total: Tensor
    terms: dict[str, Tensor]
    stats: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PairShare:
    """The share of a batch's pairs that is computed together: some images with all texts, and some texts with all images.

    The shares of several processes, or of blocks that fit into memory, add up to the batch. Every loss is a sum over images
    (rows) and over texts (columns), so that none needs all n * m pairs at once.

    Attributes:
        image, text: (r, d) and (c, d) embeddings of this share.
        images, texts: (n, d) and (m, d) embeddings of the batch.
        match_i2t: (r, m) labels in [0, 1].
        match_t2i: (c, n) labels in [0, 1], rows are texts.
        first_image, first_text: where this share's images and texts, which are neighbours, begin in the batch.
    """

    image: GaussianEmbedding
    text: GaussianEmbedding
    images: GaussianEmbedding
    texts: GaussianEmbedding
    match_i2t: Tensor
    match_t2i: Tensor
    first_image: int = 0
    first_text: int = 0

    @classmethod
    def whole(cls, image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, who: str) -> "PairShare":
        """A batch as one share, after the checks of its labels."""
        match = check_match(image, text, match, who)
        return cls(image, text, image, text, match, match.T)

    def n_positives(self) -> Tensor:
        """(1,) float64: how many pairs of this share's images with all texts match."""
        return (self.match_i2t >= 0.5).sum().double().unsqueeze(0)

    def distances(self, distance: Distance) -> tuple[Tensor, Tensor]:
        """(r, m) and (c, n) distances; of a whole batch the second is the first transposed, not computed again."""
        i2t = distance.matrix(self.image, self.texts)
        whole = self.image is self.images and self.text is self.texts
        return i2t, i2t.T if whole else distance.matrix(self.images, self.text).T

    def blocks(self, max_pairs: int) -> Iterator["PairShare"]:
        """Shares of at most about max_pairs pairs a direction that add up to this one."""
        pairs = max(self.match_i2t.numel(), self.match_t2i.numel(), 1)
        parts = min(math.ceil(pairs / max_pairs), max(self.image.n, self.text.n, 1))
        if parts == 1:
            yield self
            return
        for k in range(parts):
            rows = slice(k * self.image.n // parts, (k + 1) * self.image.n // parts)
            columns = slice(k * self.text.n // parts, (k + 1) * self.text.n // parts)
            yield replace(
                self,
                image=self.image[rows],
                text=self.text[columns],
                match_i2t=self.match_i2t[rows],
                match_t2i=self.match_t2i[columns],
                first_image=self.first_image + rows.start,
                first_text=self.first_text + columns.start,
            )


class MatchLoss(nn.Module, ABC):
    """A loss over a batch of images and texts and the matrix of which pairs match.

    Subclasses hold their learnable logits, if any, and call one pure function.

    Args:
        distance: name in DISTANCES by which images and texts are compared.
    """

    def __init__(self, distance: str) -> None:
        super().__init__()
        self.distance: Distance = get_distance(distance)

    def forward(
        self, image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, *, epoch: int | None = None
    ) -> LossOutput:
        """The loss of a batch.

        Args:
            image: (n, d) embeddings.
            text: (m, d) embeddings.
            match: (n, m) labels in [0, 1], rows are images.
            epoch: 0-based epoch, for losses that change after a warm-up; None means after every warm-up.
        """
        share = PairShare.whole(image, text, match, type(self).__name__)
        return self.part(share, self.counts(share), epoch=epoch)

    def advance(self) -> None:
        """Called after each training step, on all processes; a loss that draws at random draws anew from then on."""

    @abstractmethod
    def counts(self, share: PairShare) -> Tensor:
        """(k,) float64 numbers that the loss divides by; those of shares add up to those of the batch."""

    @abstractmethod
    def part(self, share: PairShare, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """What a share adds to the batch's loss.

        Args:
            share: a share of the pairs.
            counts: :meth:`counts` of the whole batch.
            epoch: see :meth:`forward`.
        """


def loss_of_share(
    loss: MatchLoss,
    share: PairShare,
    *,
    epoch: int | None = None,
    max_pairs: int = MAX_PAIRS,
    total: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> LossOutput:
    """What a share adds to the loss, computed in blocks whose intermediate results are recomputed in the backward pass.

    Args:
        loss: any.
        share: of a batch; its shares add up to the value and the gradients of ``loss(image, text, match)``.
        epoch: 0-based.
        max_pairs: pairs in memory at a time; a smaller share is one block and nothing is recomputed.
        total: adds up the counts of the processes that hold the other shares.
    """
    blocks = list(share.blocks(max_pairs))
    counts = total(torch.stack([loss.counts(block) for block in blocks]).sum(0))
    if len(blocks) == 1:
        return loss.part(share, counts, epoch=epoch)
    outputs = [
        checkpoint(loss.part, block, counts, epoch=epoch, use_reentrant=False, preserve_rng_state=False)
        for block in blocks
    ]
    return LossOutput(
        torch.stack([output.total for output in outputs]).sum(),
        {name: torch.stack([output.terms[name] for output in outputs]).sum() for name in outputs[0].terms},
        {name: torch.stack([output.stats[name] for output in outputs]).sum(0) for name in outputs[0].stats},
    )


def check_match(image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, who: str) -> Tensor:
    """match on the device of the images, after its checks."""
    if match.shape != (image.n, text.n):
        raise ValueError(
            f"{who}: match must have shape (images, texts) = ({image.n}, {text.n}), got {tuple(match.shape)}"
        )
    if image.n == 0 or text.n == 0:
        raise ValueError(f"{who}: got an empty batch of {image.n} images and {text.n} texts")
    if not ((match >= 0) & (match <= 1)).all():
        raise ValueError(
            f"{who}: match must lie in [0, 1], got values from {match.min():.4g} to {match.max():.4g};"
            " labels of -1 and 1 become (match + 1) / 2"
        )
    return match.to(device=image.device)


def vib_loss(x: GaussianEmbedding) -> Tensor:
    r"""KL divergence to the standard normal, averaged over embeddings and dimensions.

        vib = -1/2 mean(1 + log_var - mean^2 - exp(log_var))

    The divergence KL(x || N(0, I)) sums over d; this divides it by d, as the published code does.

    Args:
        x: (n, d) embeddings with positive variances; infinite for points.

    Returns:
        () value >= 0 in nats per dimension.

    Example:
        >>> vib_loss(GaussianEmbedding(torch.ones(1, 4), torch.zeros(1, 4)))
        tensor(0.5000)

    Paper: Chun 2024, section 2.3 (Oh et al., "Modeling uncertainty with hedged instance embedding", 2019).
    """
    return vib_sums(x).mean() / x.d


def vib_sums(x: GaussianEmbedding) -> Tensor:
    """(n,) KL divergences of the embeddings to the standard normal, in nats."""
    dtype = accumulation_dtype(x.dtype)
    mean, log_var = x.mean.to(dtype), x.log_var.to(dtype)
    return (mean.square() + log_var.expm1() - log_var).sum(-1) / 2


def vib_of_share(share: PairShare) -> Tensor:
    """() what a share adds to the sum of :func:`vib_loss` of the batch's images and of its texts."""
    image = vib_sums(share.image).sum() / (share.images.n * share.images.d)
    return image + vib_sums(share.text).sum() / (share.texts.n * share.texts.d)
