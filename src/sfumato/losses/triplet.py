"""The triplet hinges of VSE0 (sum), VSE++ and VSE-infinity (hardest negative), and FaceNet (semi-hard); PVSE and DAA.

PVSE adds two terms that shape the K embeddings of an item. DAA adds ranks by distance that agree with ranks by labels.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sfumato.distances import squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.losses.base import MAX_PAIRS, LossOptions, LossOutput, MatchLoss, PairBlock, option, sum_of_terms

Mining = Literal["hardest", "sum", "semi-hard"]
"""Which negatives of an anchor count; see :func:`triplet_loss`."""


@dataclass(frozen=True)
class TripletOptions(LossOptions):
    """Triplet hinge.

    Attributes: each field states its default, its meaning and its range.
    """

    distance: str = option("squared_l2", "name of the distance; any differentiable one")
    margin: float = option(0.4, "margin in units of the distance; 0.4 on squared_l2 is 0.2 on the cosine", gt=0)
    mining: Mining = option("hardest", "which negatives count: hardest, sum of all, or semi-hard")  # noqa: RUF009
    sum_epochs: int = option(0, "number of first epochs in which all negatives count; VSE-infinity: 1", ge=0)


def triplet_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: TripletOptions = TripletOptions(),
    *,
    epoch: int | None = None,
) -> LossOutput:
    r"""Hinge on the difference of the distances of a positive and a negative, in both directions.

        mean over positive pairs of [margin + d(anchor, positive) - d(anchor, negative)]_+

    A pair is positive when its label is at least 1/2, negative otherwise. The negatives of an anchor that count:

    - "hardest": the closest one (VSE++);
    - "sum": all negatives, with summed hinges (VSE0);
    - "semi-hard": the closest negative beyond the positive and within the margin; no loss without one (FaceNet).

    Hardest mining may collapse at the start of a training; options.sum_epochs sums over all negatives first.

    Paper: Faghri et al., "VSE++", BMVC 2018; Schroff et al., "FaceNet", CVPR 2015.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        options: the weights and other options, see its fields.
        epoch: number from 0 of the epoch; None: later than all that the options delay.

    Returns:
        The loss with its weighted terms and statistics.
    """
    return TripletLoss(options).forward(image, text, match, epoch=epoch)


def hinges(
    distances: tuple[Tensor, Tensor], block: PairBlock, positives: Tensor, options: TripletOptions, epoch: int | None
) -> LossOutput:
    """The hinges of images and of texts, over the number of positive pairs. distances (r, m), positives ()."""
    if not positives > 0:
        raise ValueError("triplet_loss: no pair of the batch matches; a triplet needs at least one positive")
    mining: Mining = "sum" if epoch is not None and epoch < options.sum_epochs else options.mining
    positives = positives.to(distances[0].dtype)
    terms, active = {}, torch.zeros_like(positives)
    labels = block.match_i2t, block.match_t2i
    for name, distance, label in zip(("i2t", "t2i"), distances, labels, strict=True):
        total, number = _direction(distance, label >= 0.5, options.margin, mining)
        terms[name], active = total / positives, active + number
    return sum_of_terms(terms, {"active": active / (2 * positives)})


def _direction(distance: Tensor, positive: Tensor, margin: float, mining: Mining) -> tuple[Tensor, Tensor]:
    """(sum of the hinges of the p positive pairs, number of pairs with a loss); anchors are the rows."""
    anchor, ground_truth = positive.nonzero(as_tuple=True)
    own = distance[anchor, ground_truth].unsqueeze(1)  # (p, 1)
    others = distance[anchor].masked_fill(positive[anchor], torch.inf)  # (p, m)
    reached = others - margin  # a negative as far as own counts
    if mining == "hardest":
        reached = reached.min(dim=1, keepdim=True).values
    elif mining == "semi-hard":
        reached = reached.masked_fill((others <= own) | (reached >= own), torch.inf).min(dim=1, keepdim=True).values
    hinge = (own - reached).clamp_min(0).sum(1)
    return hinge.sum(), (hinge.detach() > 0).to(hinge.dtype).sum()


class TripletLoss(MatchLoss):
    """:func:`triplet_loss` as a module; it has no parameters."""

    options: TripletOptions
    Options: ClassVar[type[TripletOptions]] = TripletOptions

    def counts(self, block: PairBlock) -> Tensor:
        """See :meth:`MatchLoss.counts`."""
        return block.n_positives()

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :meth:`MatchLoss.part`."""
        return hinges(block.distances(self.distance), block, counts[0], self.options, epoch)


GAMMA = 0.5
"""Of the kernel of the discrepancy, as released."""


@dataclass(frozen=True)
class PVSEOptions(TripletOptions):
    """PVSE: triplet hinge between items of K embeddings, discrepancy of the sides, diversity within an item.

    Attributes: each field states its default, its meaning and its range.
    """

    distance: str = option("squared_l2", "nearest_of_K for model.embeddings=K above 1; any other for one embedding")
    margin: float = option(0.2, "margin in units of the distance; 0.2 on squared_l2 is 0.1 on the cosine", gt=0)
    mmd_weight: float = option(
        0.02, "weight of the discrepancy of images and texts; 0: left out; 0.02: the released 0.01 on the cosine", ge=0
    )
    diversity_weight: float = option(
        0.2, "weight of the likeness of an item's embeddings; 0: left out; 0.2: the released 0.1 on the cosine", ge=0
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

    Args:
        image: (n, K d) embeddings.
        text: (m, K d) embeddings.
        match: (n, m) labels in [0, 1].
        options: the weights and other options, see its fields.
        epoch: number from 0 of the epoch; None: later than all that the options delay.

    Returns:
        The loss with its weighted terms and statistics.
    """
    return PVSELoss(options).forward(image, text, match, epoch=epoch)


def _mmd(block: PairBlock, k: int) -> Tensor:
    """() the contribution of a block's rows of the three kernels; rows between images and texts have weight 1/2."""
    own, everything = (block.image, block.text), (block.images, block.texts)
    parts = []
    for side in (0, 1):
        for other in (0, 1):
            kernel = (-GAMMA * squared_l2_matrix(_single(own[side], k), _single(everything[other], k))).exp()
            mean = kernel.sum() / (everything[side].n * everything[other].n * k**2)
            parts.append(mean if side == other else -mean)
    return torch.stack(parts).sum()


def _diversities(x: GaussianEmbedding, k: int) -> Tensor:
    """(n,) 1/K^2 || U U^T - I ||_F; its gradient at 0 is 0."""
    unit = functional.normalize(x.mean.to(accumulation_dtype(x.dtype)).unflatten(1, (k, x.d // k)), dim=-1)
    cosine = (unit.unsqueeze(1) * unit.unsqueeze(2)).sum(-1)
    others = cosine.masked_fill(torch.eye(k, dtype=torch.bool, device=cosine.device), 0)
    return torch.linalg.vector_norm(others, dim=(1, 2)) / k**2


def _single(x: GaussianEmbedding, k: int) -> GaussianEmbedding:
    """(n K, d) points: the embeddings of all items, one a row."""
    return GaussianEmbedding.point(x.mean.reshape(x.n * k, x.d // k))


class PVSELoss(TripletLoss):
    """:func:`pvse_loss` as a module; it has no parameters."""

    options: PVSEOptions
    Options = PVSEOptions

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :meth:`MatchLoss.part`."""
        triplet = super().part(block, counts, epoch=epoch)
        terms, k = dict(triplet.terms), self.distance.embeddings
        if self.options.mmd_weight and k > 1:
            terms["mmd"] = self.options.mmd_weight * _mmd(block, k)
        if self.options.diversity_weight and k > 1:
            sides = ((block.image, block.images.n), (block.text, block.texts.n))
            image, text = (_diversities(x, k).sum() / n for x, n in sides)
            terms["diversity"] = self.options.diversity_weight * (image + text)
        return sum_of_terms(terms, triplet.stats)


TEMPERATURE = 0.02
"""Of the comparisons of distances by :func:`daa_loss`, in units of the distance."""


@dataclass(frozen=True)
class DAAOptions(TripletOptions):
    """DAA: a triplet hinge, and ranks by distance that agree with ranks by graded labels.

    Attributes: each field states its default, its meaning and its range.
    """

    asp_weight: float = option(
        0.39,
        "weight of the ranks' disagreement, in [0, 1) per direction; 0.39: COCO's released 25 in batches of 128",
        ge=0,
    )


def daa_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    options: DAAOptions = DAAOptions(),
    *,
    epoch: int | None = None,
) -> LossOutput:
    r"""The triplet hinge, and for each query the disagreement of the ranks by distance with the ranks by label.

        triplet + asp_weight * (2 - ASP(images) - ASP(texts))
        ASP(queries) = mean over queries and their gallery of min(rank, rank') / max(rank, rank')

    rank counts from 1 by distance, with sigmoid((d_i - d_j) / 0.02) in place of "j is closer than i", so that it
    has a gradient. rank' counts by label, the largest label first; equal labels get the mean of their ranks. The term
    learns from graded labels (``data.graded``): with labels of 0 and 1 it favours equal distances of all non-matches.

    The released code weights it by 25 (COCO) and 10 (Flickr30K), with a hinge on similarities summed over 128 pairs.
    The hinge here is a mean on squared distances, which are twice as far apart, so that these weights become 25 * 2 /
    128 = 0.39 and 0.156 (docs/concepts/losses.md). With the released temperature of 0.001, for similarities, only near
    ties have a gradient.

    Paper: Li et al., "A Differentiable Semantic Metric Approximation in Probabilistic Embedding for Cross-Modal
    Retrieval", NeurIPS 2022.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        options: the weights and other options, see its fields.
        epoch: number from 0 of the epoch; None: later than all that the options delay.

    Returns:
        The loss with its weighted terms and statistics.
    """
    return DAALoss(options).forward(image, text, match, epoch=epoch)


def _disagreement(distance: Tensor, label: Tensor) -> Tensor:
    """() 1 - min / max of the ranks, averaged over the gallery and summed over the queries, which are rows."""
    queries, gallery = distance.shape
    rows = max(1, MAX_PAIRS // max(gallery**2, 1))
    parts = [(distance[i : i + rows], label[i : i + rows]) for i in range(0, queries, rows)]
    if len(parts) == 1:
        return _disagreement_of_rows(distance, label)
    sums = [checkpoint(_disagreement_of_rows, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() if sums else distance.sum()


def _disagreement_of_rows(distance: Tensor, label: Tensor) -> Tensor:
    itself = torch.eye(distance.shape[1], dtype=torch.bool, device=distance.device)
    before = ((distance.unsqueeze(2) - distance.unsqueeze(1)) / TEMPERATURE).sigmoid()  # (q, i, j): j is before i
    rank, wanted = 1 + before.masked_fill(itself, 0).sum(2), _label_ranks(label).to(distance.dtype)
    return (1 - torch.minimum(rank, wanted) / torch.maximum(rank, wanted)).mean(1).sum()


def _label_ranks(label: Tensor) -> Tensor:
    """(q, g) ranks from 1 within each row, the largest label first; equal ones get the mean of their ranks."""
    label = label.float().contiguous()
    ascending = label.sort(1).values.contiguous()
    below, up_to = (torch.searchsorted(ascending, label, right=right) for right in (False, True))
    return label.shape[1] - (below + up_to) / 2 + 0.5


class DAALoss(TripletLoss):
    """:func:`daa_loss` as a module; it has no parameters."""

    options: DAAOptions
    Options = DAAOptions

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :meth:`MatchLoss.part`."""
        distances = block.distances(self.distance)
        triplet = hinges(distances, block, counts[0], self.options, epoch)
        i2t, t2i = _disagreement(distances[0], block.match_i2t), _disagreement(distances[1], block.match_t2i)
        asp = self.options.asp_weight * (i2t / block.images.n + t2i / block.texts.n)
        return sum_of_terms({**triplet.terms, "asp": asp}, triplet.stats)
