"""DAA: beside the triplet hinge, an image's texts and a text's images shall be ranked as their meanings are."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import MAX_PAIRS, LossOutput, PairShare
from sfumato.losses.triplet import Mining, TripletLoss


def daa_loss(
    image: GaussianEmbedding,
    text: GaussianEmbedding,
    match: Tensor,
    *,
    margin: float = 0.4,
    mining: Mining = "hardest",
    distance: str = "squared_l2",
    asp_weight: float = 0.2,
    temperature: float = 0.02,
) -> LossOutput:
    r"""The triplet hinge, and for each query how far the ranks by distance lie from the ranks by label.

        triplet + asp_weight * (2 - ASP(images) - ASP(texts))
        ASP(queries) = mean over queries and their gallery of min(rank, rank') / max(rank, rank')

    rank counts from 1 by distance, with sigmoid((d_i - d_j) / temperature) in the place of "j is closer than i", so that it has a
    gradient; rank' counts by label, the larger the earlier, equal ones sharing the mean of their ranks. What the term learns from are
    graded labels (``data.graded``): of labels that are 0 and 1 it wants all non-matches equally far.

    The released code weighs it 25 (COCO) and 10 (Flickr30K) beside a hinge summed over 128 pairs; ours is their mean, which makes 0.2
    and 0.08. Its temperature of 0.001, of similarities, leaves a gradient to near ties only.

    Args:
        image: (n, d) embeddings.
        text: (m, d) embeddings.
        match: (n, m) labels in [0, 1].
        margin, mining, distance: see :func:`~sfumato.losses.triplet.triplet_loss`.
        asp_weight: of the ranks' disagreement, which lies in [0, 1) for each direction.
        temperature: in units of the distance.

    Returns:
        Terms "i2t", "t2i" and "asp"; stat "active" of the triplet loss.

    Raises:
        ValueError: as the triplet loss, or temperature is not positive.

    Paper: Li et al., "A Differentiable Semantic Metric Approximation in Probabilistic Embedding for Cross-Modal Retrieval",
    NeurIPS 2022.
    """
    share = PairShare.whole(image, text, match, "daa_loss")
    loss = DAALoss(distance=distance, margin=margin, mining=mining, asp_weight=asp_weight, temperature=temperature)
    return loss.part(share, loss.counts(share))


def _disagreement(distance: Tensor, label: Tensor, temperature: float) -> Tensor:
    """() 1 - min / max of the ranks, averaged over the gallery and summed over the queries, which are rows."""
    queries, gallery = distance.shape
    rows = max(1, MAX_PAIRS // max(gallery**2, 1))
    parts = [(distance[i : i + rows], label[i : i + rows]) for i in range(0, queries, rows)]
    if len(parts) == 1:
        return _disagreement_of_rows(distance, label, temperature)
    sums = [checkpoint(_disagreement_of_rows, *part, temperature, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() if sums else distance.sum()


def _disagreement_of_rows(distance: Tensor, label: Tensor, temperature: float) -> Tensor:
    itself = torch.eye(distance.shape[1], dtype=torch.bool, device=distance.device)
    before = ((distance.unsqueeze(2) - distance.unsqueeze(1)) / temperature).sigmoid()  # (q, i, j): j is before i
    rank, meant = 1 + before.masked_fill(itself, 0).sum(2), _label_ranks(label).to(distance.dtype)
    return (1 - torch.minimum(rank, meant) / torch.maximum(rank, meant)).mean(1).sum()


def _label_ranks(label: Tensor) -> Tensor:
    """(q, g) ranks from 1 within each row, the largest label first; equal ones share the mean of their ranks."""
    label = label.float().contiguous()
    ascending = label.sort(1).values.contiguous()
    below, up_to = (torch.searchsorted(ascending, label, right=right) for right in (False, True))
    return label.shape[1] - (below + up_to) / 2 + 0.5


def _check(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"daa_loss: temperature must be positive, got {temperature}")


class DAALoss(TripletLoss):
    """:func:`daa_loss`, with the warm-up of the triplet loss.

    Args:
        distance, margin, mining, sum_epochs, soft_margin: see :class:`~sfumato.losses.triplet.TripletLoss`.
        asp_weight, temperature: see :func:`daa_loss`.

    Raises:
        ValueError: temperature is not positive.
    """

    def __init__(
        self,
        *,
        distance: str = "squared_l2",
        margin: float = 0.4,
        mining: Mining = "hardest",
        sum_epochs: int = 0,
        soft_margin: bool = False,
        asp_weight: float = 0.2,
        temperature: float = 0.02,
    ) -> None:
        _check(temperature)
        super().__init__(
            distance=distance, margin=margin, mining=mining, sum_epochs=sum_epochs, soft_margin=soft_margin
        )
        self.asp_weight, self.temperature = asp_weight, temperature

    def part(self, share: PairShare, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """See :class:`~sfumato.losses.base.MatchLoss`."""
        distances = share.distances(self.distance)
        triplet = self._hinges(share, distances, counts, epoch)
        sides = zip(distances, (share.match_i2t, share.match_t2i), strict=True)
        i2t, t2i = (_disagreement(distance, label, self.temperature) for distance, label in sides)
        asp = self.asp_weight * (i2t / share.images.n + t2i / share.texts.n)
        return LossOutput(triplet.total + asp, {**triplet.terms, "asp": asp}, triplet.stats)
