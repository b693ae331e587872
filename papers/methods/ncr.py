"""NCR: pairs whose loss is large are divided off by a mixture, and get a soft margin by what the model itself thinks.

    sfumato train flickr8k-triplet loss.name=ncr data.noise_rate=0.5 --import papers/methods/ncr.py

Paper: Huang et al., "Learning with Noisy Correspondence for Cross-modal Matching", NeurIPS 2021.

For every pair (i, t) that the data list, with its distance d and the distances of its negatives:

    loss(i, t)   = mean over negatives of [margin + d - d(i, t')]_+  +  the same over images i'      warm-up
    clean(i, t)  = posterior of the component of the lower mean, of two Gaussians over the latest losses
    gap(i, t)    = (d(i, nearest t') + d(nearest i', t)) / 2 - d
    own(i, t)    = gap / (mean of the largest tenth of the gaps of the batch), within [0, 1]
    label        = clean + (1 - clean) own if clean > 1/2, otherwise own, averaged over the networks
    soft margin  = (base^label - 1) / (base - 1) margin
    loss'(i, t)  = [soft margin + d - d(i, nearest t')]_+  +  the same over images i'                after the warm-up

Pairs with clean <= 1/2 do not count before noisy_from. With loss.networks=2 the embeddings are those of two networks
side by side, and each is divided by the losses of the other, as in the paper; no encoder here makes such. With 1 a
network divides its own pairs: "NCR, one network".

Read between the lines, or different: both networks see the same batches, in another dropout. A loss does not know which
pair it was given, so the mixture is fitted at every step to the latest losses as they came, and not after an epoch to
those of all pairs. Captions of one image are no negatives of each other. That noisy pairs wait is in the released code.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import sfumato
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOptions, LossOutput, MatchLoss, PairBlock, option, sum_of_terms


@dataclass(frozen=True)
class NCROptions(LossOptions):
    """The keys of section [loss]."""

    distance: str = option("squared_l2", "name of the distance; any differentiable one")
    margin: float = option(0.4, "largest margin in units of the distance; 0.4 is 0.2 on the cosine", gt=0)
    base: float = option(10.0, "base m of the soft margin", gt=1)
    warmup_epochs: int = option(5, "number of first epochs in which all pairs count alike, with all negatives", ge=0)
    networks: int = option(1, "number of networks whose embeddings stand side by side; 2: each divides the other's")
    noisy_from: int = option(
        10, "epoch from 0 from which pairs that are called noisy count; half of the training", ge=0
    )
    memory: int = option(2**12, "number of latest losses that a mixture is fitted to", ge=2)


def soft_margin(label: Tensor, margin: float, base: float) -> Tensor:
    """Margins of pairs by their labels in [0, 1]: 0 of label 0, the whole margin of label 1."""
    margins: Tensor = ((label * math.log(base)).exp() - 1) / (base - 1) * margin
    return margins


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
    probability: Tensor = density.softmax(1)
    return probability


class Pairs:
    """The p listed pairs of a batch by one network: own distances (p,), and those to all texts and images (p, .)."""

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
        networks = self.options.networks
        if networks not in (1, 2):
            raise ValueError(f"NCROptions: networks must be 1 or 2, got {networks}")
        self.register_buffer("remembered", torch.full((networks, self.options.memory), torch.nan))

    def counts(self, block: PairBlock) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        sides = zip(*(self._networks(side) for side in (block.image, block.text)), strict=True)
        networks = [Pairs(self.distance.matrix(image, text), block.match_i2t) for image, text in sides]
        if not len(networks[0].own):
            raise ValueError("ncr: no pair of the batch matches; it needs at least one")
        losses = torch.stack([pairs.losses(self.options.margin) for pairs in networks])
        self.remembered.copy_(torch.cat([losses.detach(), self.remembered], dim=1)[:, : self.options.memory])
        if epoch is not None and epoch < self.options.warmup_epochs:
            return sum_of_terms({"warmup": losses.mean()})
        clean = self.divided(losses)
        own = torch.stack([pairs.predicted() for pairs in networks])
        label = torch.where(clean > 0.5, clean + (1 - clean) * own, own.mean(0))
        margin = soft_margin(label, self.options.margin, self.options.base)
        counted = (clean > 0.5) | (epoch is None or epoch >= self.options.noisy_from)
        hinges = [
            (margin[k] + pairs.own - nearest).clamp_min(0)[counted[k]].sum() / counted[k].sum().clamp_min(1)
            for k, pairs in enumerate(networks)
            for nearest in pairs.nearest()
        ]
        stats = {"clean": (clean > 0.5).to(margin.dtype).mean(), "label": label.mean()}
        return sum_of_terms({"soft": torch.stack(hinges).sum() / len(networks)}, stats)

    def _networks(self, side: GaussianEmbedding) -> list[GaussianEmbedding]:
        """The embeddings of each network; unit vectors side by side have length sqrt(2), or 1 once normalised."""
        k = self.options.networks
        if k == 1:
            return [side]
        return [GaussianEmbedding.point(part * k**0.5) for part in side.mean.chunk(k, dim=1)]

    def divided(self, losses: Tensor) -> Tensor:
        """(k, p) probability that each pair is clean, by the losses of the other network if there are two."""
        latest = [fit_mixture(row[row.isfinite()].to(losses.dtype)) for row in self.remembered]
        found = [posterior(own, mixture)[:, 0] for own, mixture in zip(losses.detach(), latest, strict=True)]
        return torch.stack(found[::-1])


sfumato.register_loss("ncr", NCRLoss)
