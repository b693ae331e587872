"""The triplet hinge losses of VSE0 (sum), VSE++ and VSE-infinity (hardest negative), and FaceNet (semi-hard)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOptions, LossOutput, MatchLoss, PairBlock, option, sum_of_terms, whole_batch

Mining = Literal["hardest", "sum", "semi-hard"]
"""Which negatives of an anchor count; see :func:`triplet_loss`."""


@dataclass(frozen=True)
class TripletOptions(LossOptions):
    """Triplet hinge.

    Attributes: each field states its default, its meaning and its range.
    """

    distance: str = option("squared_l2", "name of the distance; any differentiable one")
    margin: float = option(
        0.4, "margin in units of the distance; 0.4 on squared_l2 of unit means is 0.2 on the cosine", gt=0
    )
    mining: Mining = option("hardest", "which negatives count: hardest, sum of all, or semi-hard")  # noqa: RUF009
    sum_epochs: int = option(0, "number of first epochs in which all negatives count; VSE-infinity: 1", ge=0)
    soft_margin: bool = option(
        False, "with graded labels: the margin to a negative is margin * (1 - 2 * label), smaller for a near match"
    )


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

    image (n, d), text (m, d), match (n, m).
    """
    distance, label = whole_batch(options, image, text, match, "triplet_loss")
    return hinges((distance, distance.T), (label, label.T), (label >= 0.5).sum(), options, epoch)


def hinges(
    distances: tuple[Tensor, Tensor],
    labels: tuple[Tensor, Tensor],
    positives: Tensor,
    options: TripletOptions,
    epoch: int | None,
) -> LossOutput:
    """The hinges of images and of texts, over the number of positive pairs. distances, labels (r, m), positives ()."""
    if not positives > 0:
        raise ValueError("triplet_loss: no pair of the batch matches; a triplet needs at least one positive")
    mining: Mining = "sum" if epoch is not None and epoch < options.sum_epochs else options.mining
    positives = positives.to(distances[0].dtype)
    terms, active = {}, torch.zeros_like(positives)
    for name, distance, label in zip(("i2t", "t2i"), distances, labels, strict=True):
        margin = options.margin * (1 - 2 * label.to(distance.dtype)) if options.soft_margin else options.margin
        total, number = _direction(distance, label >= 0.5, margin, mining)
        terms[name], active = total / positives, active + number
    return sum_of_terms(terms, {"active": active / (2 * positives)})


def _direction(distance: Tensor, positive: Tensor, margin: Tensor | float, mining: Mining) -> tuple[Tensor, Tensor]:
    """(sum of the hinges of the p positive pairs, number of pairs with a loss); anchors are the rows."""
    anchor, ground_truth = positive.nonzero(as_tuple=True)
    own = distance[anchor, ground_truth].unsqueeze(1)  # (p, 1)
    others = distance[anchor].masked_fill(positive[anchor], torch.inf)  # (p, m)
    reached = others - (margin[anchor] if isinstance(margin, Tensor) else margin)  # a negative as far as own counts
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
        return block.n_positives()

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        labels = block.match_i2t, block.match_t2i
        return hinges(block.distances(self.distance), labels, counts[0], self.options, epoch)
