"""DAA: a triplet hinge, and ranks by distance that agree with ranks by graded labels."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import MAX_PAIRS, LossOutput, PairBlock, option, sum_of_terms, whole_batch
from sfumato.losses.triplet import TripletLoss, TripletOptions, hinges


@dataclass(frozen=True)
class DAAOptions(TripletOptions):
    """DAA: a triplet hinge, and ranks by distance that agree with ranks by graded labels.

    Attributes: each field states its default, its meaning and its range.
    """

    asp_weight: float = option(
        0.39,
        "weight of the disagreement of the ranks, which lies in [0, 1) for each direction; 0.39 is the released 25 for"
        " COCO with batches of 128",
        ge=0,
    )
    temperature: float = option(0.02, "temperature of the comparisons of distances, in units of the distance", gt=0)


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

    rank counts from 1 by distance, with sigmoid((d_i - d_j) / temperature) in place of "j is closer than i", so that it
    has a gradient. rank' counts by label, the largest label first; equal labels get the mean of their ranks. The term
    learns from graded labels (``data.graded``): with labels of 0 and 1 it favours equal distances of all non-matches.

    The released code weights it by 25 (COCO) and 10 (Flickr30K), with a hinge on similarities summed over 128 pairs.
    The hinge here is a mean on squared distances, which are twice as far apart, so that these weights become 25 * 2 /
    128 = 0.39 and 0.156 (docs/concepts/losses.md). With the released temperature of 0.001, for similarities, only near
    ties have a gradient.

    Paper: Li et al., "A Differentiable Semantic Metric Approximation in Probabilistic Embedding for Cross-Modal
    Retrieval", NeurIPS 2022.

    image (n, d), text (m, d), match (n, m).
    """
    distance, label = whole_batch(options, image, text, match, "daa_loss")
    sides = (distance, distance.T), (label, label.T)
    triplet = hinges(*sides, (label >= 0.5).sum(), options, epoch)
    i2t, t2i = (_disagreement(d, y, options.temperature) / len(d) for d, y in zip(*sides, strict=True))
    return sum_of_terms({**triplet.terms, "asp": options.asp_weight * (i2t + t2i)}, triplet.stats)


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
        sides = block.distances(self.distance), (block.match_i2t, block.match_t2i)
        triplet = hinges(*sides, counts[0], self.options, epoch)
        temperature = self.options.temperature
        i2t, t2i = (_disagreement(d, y, temperature) for d, y in zip(*sides, strict=True))
        asp = self.options.asp_weight * (i2t / block.images.n + t2i / block.texts.n)
        return sum_of_terms({**triplet.terms, "asp": asp}, triplet.stats)
