"""NCR: pairs whose loss is large are divided off by a mixture, and get a soft margin by what the model itself thinks.

    sfumato train flickr8k-triplet loss.name=ncr data.noise_rate=0.5 --import papers/methods/ncr.py

Paper: Huang et al., "Learning with Noisy Correspondence for Cross-modal Matching", NeurIPS 2021.

For every pair (i, t) that the data list, with its distance d and the distances of its negatives:

    loss(i, t)   = mean over negatives of [margin + d - d(i, t')]_+  +  the same over images i'      warm-up
    clean(i, t)  = posterior of the component of the lower mean, of two Gaussians over the latest losses
    gap(i, t)    = (d(i, nearest t') + d(nearest i', t)) / 2 - d
    own(i, t)    = gap / (mean of the largest tenth of the gaps of the batch), within [0, 1]
    label        = clean + (1 - clean) own if clean > 1/2, otherwise own
    soft margin  = (base^label - 1) / (base - 1) margin
    loss'(i, t)  = [soft margin + d - d(i, nearest t')]_+  +  the same over images i'                after the warm-up

Pairs with clean <= 1/2 do not count before noisy_from.

Read between the lines, or different: the paper has two networks, each divided by the losses of the other; here one
divides its own pairs, "NCR, one network". A loss does not know which pair it was given, so the mixture is fitted at
every step to the latest losses as they came, and not after an epoch to those of all pairs. Captions of one image are no
negatives of each other. That noisy pairs wait is in the released code.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import sfumato
from sfumato.losses.base import LossOptions, LossOutput, MatchLoss, PairBlock, option, sum_of_terms


@dataclass(frozen=True)
class NCROptions(LossOptions):
    """The keys of section [loss]."""

    distance: str = option("squared_l2", "name of the distance; any differentiable one")
    margin: float = option(0.4, "largest margin in units of the distance; 0.4 is 0.2 on the cosine", gt=0)
    base: float = option(10.0, "base m of the soft margin", gt=1)
    warmup_epochs: int = option(5, "number of first epochs in which all pairs count alike, with all negatives", ge=0)
    noisy_from: int = option(
        10, "epoch from 0 from which pairs that are called noisy count; half of the training", ge=0
    )
    memory: int = option(2**12, "number of latest losses that a mixture is fitted to", ge=2)


def soft_margin(label: Tensor, margin: float, base: float) -> Tensor:
    """Margins of pairs by their labels in [0, 1]: 0 of label 0, the whole margin of label 1."""
    return ((label * math.log(base)).exp() - 1) / (base - 1) * margin


def fit_mixture(values: Tensor, *, n_steps: int = 30) -> Tensor:
    """Two Gaussians over (n,) values by expectation maximisation, the one of the lower mean first.

    Returns (3, 2) weights, means and variances; no variance falls below a ten-thousandth of the squared range.
    """
    low, high = values.min(), values.max()
    floor = (1e-4 * (high - low).square()).clamp_min(1e-12)
    mixture = torch.stack([values.new_full((2,), 0.5), torch.stack([low, high]), floor.expand(2) * 500])
    for _ in range(n_steps):
        shares = posterior(values, mixture)
        total = shares.sum(0).clamp_min(1e-8)
        mean = (shares * values.unsqueeze(1)).sum(0) / total
        var = (shares * (values.unsqueeze(1) - mean).square()).sum(0) / total + floor
        mixture = torch.stack([total / len(values), mean, var])
    return mixture[:, mixture[1].argsort()]


def posterior(values: Tensor, mixture: Tensor) -> Tensor:
    """(n, 2) probabilities of the components of a (3, 2) mixture."""
    weight, mean, var = mixture
    density = weight.log() - var.log() / 2 - (values.unsqueeze(1) - mean).square() / (2 * var)
    return density.softmax(1)


class Pairs:
    """The p listed pairs of a batch: own distances (p,), and those to all texts and images (p, .)."""

    def __init__(self, distance: Tensor, match: Tensor) -> None:
        self.image, self.text = (match >= 0.5).nonzero(as_tuple=True)
        self.own = distance[self.image, self.text]
        known = match > 0
        self.others = distance[self.image], distance.T[self.text]
        self.known = known[self.image], known.T[self.text]

    def losses(self, margin: float) -> Tensor:
        """(p,) the hinges with all negatives, averaged over each side."""
        found = torch.zeros_like(self.own)
        for others, known in zip(self.others, self.known, strict=True):
            hinge = (margin + self.own.unsqueeze(1) - others).clamp_min(0).masked_fill(known, 0)
            found = found + hinge.sum(1) / (~known).sum(1).clamp_min(1)
        return found

    def nearest(self) -> tuple[Tensor, Tensor]:
        """(p,) distances to the nearest negative text and to the nearest negative image; infinite if there is none."""
        texts, images = (
            others.masked_fill(known, torch.inf).min(1).values
            for others, known in zip(self.others, self.known, strict=True)
        )
        return texts, images

    def predicted(self) -> Tensor:
        """(p,) in [0, 1]: how far a pair is ahead of its nearest negatives, beside the best tenth of the batch."""
        gap = (torch.stack(self.nearest()).mean(0) - self.own).detach().nan_to_num(posinf=0)
        best = gap.topk(max(1, len(gap) // 10)).values.mean()
        return (gap / best).clamp(0, 1) if best > 0 else torch.zeros_like(gap)


class NCRLoss(MatchLoss):
    """See the module. The latest losses are saved with the weights."""

    options: NCROptions
    Options: ClassVar[type[NCROptions]] = NCROptions
    needs_whole = True
    remembered: Tensor

    def __init__(self, options: NCROptions | None = None) -> None:
        super().__init__(options)
        self.register_buffer("remembered", torch.full((self.options.memory,), torch.nan))

    def counts(self, block: PairBlock) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        pairs = Pairs(self.distance.matrix(block.image, block.text), block.match_i2t)
        if not len(pairs.own):
            raise ValueError("ncr: no pair of the batch matches; it needs at least one")
        losses = pairs.losses(self.options.margin)
        self.remembered.copy_(torch.cat([losses.detach(), self.remembered])[: self.options.memory])
        if epoch is not None and epoch < self.options.warmup_epochs:
            return sum_of_terms({"warmup": losses.mean()})
        clean, own = self.divided(losses), pairs.predicted()
        label = torch.where(clean > 0.5, clean + (1 - clean) * own, own)
        margin = soft_margin(label, self.options.margin, self.options.base)
        counted = (clean > 0.5) | (epoch is None or epoch >= self.options.noisy_from)
        hinges = [(margin + pairs.own - nearest).clamp_min(0)[counted].sum() for nearest in pairs.nearest()]
        stats = {"clean": (clean > 0.5).to(margin.dtype).mean(), "label": label.mean()}
        return sum_of_terms({"soft": torch.stack(hinges).sum() / counted.sum().clamp_min(1)}, stats)

    def divided(self, losses: Tensor) -> Tensor:
        """(p,) probability that each pair is clean, by a mixture of the latest losses."""
        mixture = fit_mixture(self.remembered[self.remembered.isfinite()].to(losses.dtype))
        return posterior(losses.detach(), mixture)[:, 0]


sfumato.register_loss("ncr", NCRLoss)
