"""The objective of PVSE: the triplet hinge between items of K embeddings, and two terms that shape these."""

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.distances import squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.losses.base import LossOutput, PairShare
from sfumato.losses.triplet import Mining, TripletLoss, triplet_loss

GAMMA = 0.5
"""Of the kernel of the discrepancy, as released."""


def pvse_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    *,
    pieces: int,
    margin: float = 0.2,
    mining: Mining = "hardest",
    mmd_weight: float = 0.01,
    diversity_weight: float = 0.1,
) -> LossOutput:
    r"""Triplet hinges by the distance of the nearest of K x K embeddings, plus discrepancy and diversity.

        triplet + mmd_weight * mmd + diversity_weight * (diversity(images) + diversity(texts))
        mmd = mean k(a, a') - 2 mean k(a, b) + mean k(b, b'),   k(a, b) = exp(-1/2 ||a - b||^2)
        diversity = mean over items of 1/K^2 || U U^T - I ||_F

    a runs over all embeddings of all images, b over those of all texts; U are an item's K embeddings at unit length. The paper
    measures diversity on what each adds to what all share; here an embedding is all that a loss sees.

    Args:
        image: (n, K d) embeddings, K of d dimensions side by side.
        text: (m, K d) embeddings.
        match: (n, m) labels in [0, 1].
        pieces: K; 1 leaves the diversity out, which is 0.
        margin, mining: see :func:`~sfumato.losses.triplet.triplet_loss`.
        mmd_weight: 0 leaves the discrepancy out; 0.01 as released.
        diversity_weight: 0 leaves the diversity out; 0.1 as released.

    Returns:
        Terms "i2t", "t2i", "mmd" and "diversity"; stat "active" of the triplet loss.

    Raises:
        ValueError: as the triplet loss, or the embeddings have no K equal pieces.

    Paper: Song and Soleymani, "Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval", CVPR 2019.
    """
    share = PairShare.whole(image, text, match, "pvse_loss")
    triplet = triplet_loss(image, text, match, margin=margin, mining=mining, distance=f"nearest_of_{pieces}")
    return _with_shape(triplet, share, pieces, mmd_weight, diversity_weight)


def _with_shape(
    triplet: LossOutput, share: PairShare, pieces: int, mmd_weight: float, diversity_weight: float
) -> LossOutput:
    terms = dict(triplet.terms)
    if mmd_weight:
        terms["mmd"] = mmd_weight * _mmd(share, pieces)
    if diversity_weight and pieces > 1:
        sides = ((share.image, share.images.n), (share.text, share.texts.n))
        image, text = (_diversities(x, pieces).sum() / n for x, n in sides)
        terms["diversity"] = diversity_weight * (image + text)
    return LossOutput(torch.stack(list(terms.values())).sum(), terms, triplet.stats)


def _mmd(share: PairShare, pieces: int) -> Tensor:
    """() what a share's rows of the three kernels add; between images and texts each side's rows count half."""
    own, everything = (share.image, share.text), (share.images, share.texts)
    parts = []
    for side in (0, 1):
        for other in (0, 1):
            kernel = (-GAMMA * squared_l2_matrix(_apart(own[side], pieces), _apart(everything[other], pieces))).exp()
            mean = kernel.sum() / (everything[side].n * everything[other].n * pieces**2)
            parts.append(mean if side == other else -mean)
    return torch.stack(parts).sum()


def _diversities(x: GaussianEmbedding, pieces: int) -> Tensor:
    """(n,) 1/K^2 || U U^T - I ||_F; its gradient at 0 is 0."""
    mean = x.mean.to(accumulation_dtype(x.dtype))
    unit = functional.normalize(mean.unflatten(1, (pieces, x.d // pieces)), dim=-1)
    cosine = (unit.unsqueeze(1) * unit.unsqueeze(2)).sum(-1)
    others = cosine.masked_fill(torch.eye(pieces, dtype=torch.bool, device=cosine.device), 0)
    norm: Tensor = torch.linalg.vector_norm(others, dim=(1, 2))
    return norm / pieces**2


def _apart(x: GaussianEmbedding, pieces: int) -> GaussianEmbedding:
    """(n K, d) points."""
    return GaussianEmbedding.point(x.mean.reshape(x.n * pieces, x.d // pieces))


class PVSELoss(TripletLoss):
    """:func:`pvse_loss`, with the warm-up of the triplet loss.

    Args:
        distance: nearest_of_K for K embeddings an item; any other for one, which leaves the diversity out.
        margin, mining, sum_epochs: see :class:`~sfumato.losses.triplet.TripletLoss`.
        mmd_weight, diversity_weight: see :func:`pvse_loss`.
    """

    def __init__(
        self,
        *,
        distance: str = "squared_l2",
        margin: float = 0.2,
        mining: Mining = "hardest",
        sum_epochs: int = 0,
        mmd_weight: float = 0.01,
        diversity_weight: float = 0.1,
    ) -> None:
        super().__init__(distance=distance, margin=margin, mining=mining, sum_epochs=sum_epochs)
        self.mmd_weight, self.diversity_weight = mmd_weight, diversity_weight

    def part(self, share: PairShare, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`~sfumato.losses.base.MatchLoss`."""
        triplet = super().part(share, counts, epoch=epoch)
        return _with_shape(triplet, share, self.distance.pieces, self.mmd_weight, self.diversity_weight)
