"""The objective of PVSE: the triplet hinge between items of K embeddings, and two terms that shape these embeddings."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.distances import get_distance, squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.losses.base import LossOutput, PairBlock, option, sum_of_terms
from sfumato.losses.triplet import TripletLoss, TripletOptions, triplet_loss

GAMMA = 0.5
"""Of the kernel of the discrepancy, as released."""


@dataclass(frozen=True)
class PVSEOptions(TripletOptions):
    """PVSE: triplet hinge between items of K embeddings, discrepancy of the sides, diversity within an item.

    Attributes: each field states its default, its meaning and its range.
    """

    distance: str = option("squared_l2", "nearest_of_K for model.embeddings=K above 1; any other for one embedding")
    margin: float = option(
        0.2, "margin in units of the distance; 0.2 on squared_l2 of unit means is 0.1 on the cosine", gt=0
    )
    mmd_weight: float = option(
        0.02,
        "weight of the discrepancy between images and texts; 0 leaves it out, 0.02 is the released 0.01 on the cosine",
        ge=0,
    )
    diversity_weight: float = option(
        0.2,
        "weight of the likeness of an item's embeddings; 0 leaves it out, 0.2 is the released 0.1 on the cosine",
        ge=0,
    )


def pvse_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: PVSEOptions = PVSEOptions(),
    *,
    epoch: int | None = None,
) -> LossOutput:
    r"""Triplet hinges by the distance of the nearest of K x K embeddings, plus discrepancy and diversity.

        triplet + mmd_weight * mmd + diversity_weight * (diversity(images) + diversity(texts))
        mmd = mean k(a, a') - 2 mean k(a, b) + mean k(b, b'),   k(a, b) = exp(-1/2 ||a - b||^2)
        diversity = mean over items of 1/K^2 || U U^T - I ||_F

    a runs over all embeddings of all images, b over those of all texts; U are an item's K embeddings at unit length.
    The paper measures diversity on the residual of each embedding beyond the common part; a loss has only the
    embeddings. The released weights stand beside hinges on the cosine. Hinges on squared distances of unit means are
    twice as large, and so are the weights here (docs/concepts/losses.md).

    Paper: Song and Soleymani, "Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval", CVPR 2019.

    image (n, K d), text (m, K d), match (n, m).
    """
    triplet = triplet_loss(image, text, match, options, epoch=epoch)
    terms, k = dict(triplet.terms), get_distance(options.distance).embeddings
    if options.mmd_weight and k > 1:
        a, b = _single(image, k), _single(text, k)
        terms["mmd"] = options.mmd_weight * (_kernel(a, a).mean() - 2 * _kernel(a, b).mean() + _kernel(b, b).mean())
    if options.diversity_weight and k > 1:
        likeness = _diversities(image, k).mean() + _diversities(text, k).mean()
        terms["diversity"] = options.diversity_weight * likeness
    return sum_of_terms(terms, triplet.stats)


def _kernel(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    return (-GAMMA * squared_l2_matrix(x, y)).exp()


def _mmd(block: PairBlock, k: int) -> Tensor:
    """() the contribution of a block's rows of the three kernels; rows between images and texts have weight 1/2."""
    own, everything = (block.image, block.text), (block.images, block.texts)
    parts = []
    for side in (0, 1):
        for other in (0, 1):
            kernel = _kernel(_single(own[side], k), _single(everything[other], k))
            mean = kernel.sum() / (everything[side].n * everything[other].n * k**2)
            parts.append(mean if side == other else -mean)
    return torch.stack(parts).sum()


def _diversities(x: GaussianEmbedding, k: int) -> Tensor:
    """(n,) 1/K^2 || U U^T - I ||_F; its gradient at 0 is 0."""
    mean = x.mean.to(accumulation_dtype(x.dtype))
    unit = functional.normalize(mean.unflatten(1, (k, x.d // k)), dim=-1)
    cosine = (unit.unsqueeze(1) * unit.unsqueeze(2)).sum(-1)
    others = cosine.masked_fill(torch.eye(k, dtype=torch.bool, device=cosine.device), 0)
    norm: Tensor = torch.linalg.vector_norm(others, dim=(1, 2))
    return norm / k**2


def _single(x: GaussianEmbedding, k: int) -> GaussianEmbedding:
    """(n K, d) points: the embeddings of all items, one a row."""
    return GaussianEmbedding.point(x.mean.reshape(x.n * k, x.d // k))


class PVSELoss(TripletLoss):
    """:func:`pvse_loss` as a module; it has no parameters."""

    options: PVSEOptions
    Options = PVSEOptions

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        triplet = super().part(block, counts, epoch=epoch)
        terms, k = dict(triplet.terms), self.distance.embeddings
        if self.options.mmd_weight and k > 1:
            terms["mmd"] = self.options.mmd_weight * _mmd(block, k)
        if self.options.diversity_weight and k > 1:
            sides = ((block.image, block.images.n), (block.text, block.texts.n))
            image, text = (_diversities(x, k).sum() / n for x, n in sides)
            terms["diversity"] = self.options.diversity_weight * (image + text)
        return sum_of_terms(terms, triplet.stats)
