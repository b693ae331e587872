"""The triplet hinge losses of VSE0 (sum), VSE++ and VSE-infinity (hardest negative), and FaceNet (semi-hard)."""

from typing import Literal, get_args

import torch
from torch import Tensor

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOutput, MatchLoss, PairShare

Mining = Literal["hardest", "sum", "semi-hard"]


def triplet_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    *,
    margin: float = 0.4,
    mining: Mining = "hardest",
    distance: str = "squared_l2",
    soft_margin: bool = False,
) -> LossOutput:
    r"""Hinge [margin + d(anchor, positive) - d(anchor, negative)]_+ in both directions, averaged over the positive pairs.

    A pair is positive when its label is at least 1/2, negative otherwise. Which negatives of an anchor count:

    - "hardest": the closest one (VSE++);
    - "sum": all, their hinges added up (VSE0);
    - "semi-hard": the closest of those farther than the positive but within the margin; none, no loss (FaceNet).

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        margin: in units of the distance. On unit means squared_l2 = 2 - 2 cos: 0.4 here is the usual 0.2 on the cosine.
        mining: which negatives count.
        distance: name of any differentiable distance.
        soft_margin: the margin to a negative is margin * (1 - 2 * label), smaller the more it is a match after all; for graded
            labels, see ``data.graded``.

    Returns:
        Terms "i2t" and "t2i"; stat "active", the share of anchors with a loss (1 with a loss of 2 * margin: collapsed).

    Raises:
        ValueError: shapes do not fit, the batch is empty, no pair of it matches, or mining is unknown.

    Paper: Faghri et al., "VSE++", BMVC 2018; Schroff et al., "FaceNet", CVPR 2015.
    """
    if mining not in get_args(Mining):
        raise ValueError(f"triplet_loss: unknown mining {mining!r}; known: {', '.join(get_args(Mining))}")
    share = PairShare.whole(image, text, match, "triplet_loss")
    distances = share.distances(get_distance(distance))
    return _part(share, distances, share.n_positives(), margin, mining, soft_margin)


def _part(
    share: PairShare,
    distances: tuple[Tensor, Tensor],
    counts: Tensor,
    margin: float,
    mining: Mining,
    soft_margin: bool,
) -> LossOutput:
    if not counts[0] > 0:
        raise ValueError("triplet_loss: no pair of the batch matches; a triplet needs at least one positive")
    positives = counts[0].to(distances[0].dtype)
    sums = [
        _direction(pairs, match >= 0.5, margin * (1 - 2 * match.to(pairs.dtype)) if soft_margin else margin, mining)
        for pairs, match in zip(distances, (share.match_i2t, share.match_t2i), strict=True)
    ]
    terms = {name: hinges / positives for name, (hinges, _) in zip(("i2t", "t2i"), sums, strict=True)}
    return LossOutput(terms["i2t"] + terms["t2i"], terms, {"active": (sums[0][1] + sums[1][1]) / (2 * positives)})


def _direction(distance: Tensor, positive: Tensor, margin: Tensor | float, mining: Mining) -> tuple[Tensor, Tensor]:
    """(sum of the hinges of the p positive pairs, number of them with a loss); anchors are rows, of a margin too."""
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
    """:func:`triplet_loss` with a warm-up that sums over all negatives first, without which hardest mining may collapse.

    Args:
        distance, margin, mining, soft_margin: see :func:`triplet_loss`.
        sum_epochs: epochs at the start in which all negatives count (VSE-infinity: 1).
    """

    def __init__(
        self,
        *,
        distance: str = "squared_l2",
        margin: float = 0.4,
        mining: Mining = "hardest",
        sum_epochs: int = 0,
        soft_margin: bool = False,
    ) -> None:
        super().__init__(distance)
        self.margin, self.mining, self.sum_epochs, self.soft_margin = margin, mining, sum_epochs, soft_margin

    def counts(self, share: PairShare) -> Tensor:
        """See :class:`MatchLoss`."""
        return share.n_positives()

    def part(self, share: PairShare, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`MatchLoss`."""
        return self._hinges(share, share.distances(self.distance), counts, epoch)

    def _hinges(
        self, share: PairShare, distances: tuple[Tensor, Tensor], counts: Tensor, epoch: int | None
    ) -> LossOutput:
        early = epoch is not None and epoch < self.sum_epochs
        mining: Mining = "sum" if early else self.mining
        return _part(share, distances, counts, self.margin, mining, self.soft_margin)
