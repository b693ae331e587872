"""NCR: pairs whose loss is large are divided off by a mixture, and get a soft margin by what the model itself thinks.

    sfumato train flickr8k-triplet loss.name=ncr data.noise_rate=0.5 --import papers/methods/ncr.py

Paper: Huang et al., "Learning with Noisy Correspondence for Cross-modal Matching", NeurIPS 2021.

For every pair (i, t) that the data list, with its distance d and the distances of its negatives:

    loss(i, t)   = mean over negatives of [margin + d - d(i, t')]_+  +  the same over images i'      warm-up
    clean(i, t)  = posterior of the component of the lower mean, of two Gaussians over the losses of an epoch
    gap(i, t)    = (d(i, nearest t') + d(nearest i', t)) / 2 - d
    own(i, t)    = gap / (mean of the largest tenth of the gaps of the batch), within [0, 1]
    label        = clean + (1 - clean) own if clean > 1/2, otherwise own, averaged over the networks
    soft margin  = (base^label - 1) / (base - 1) margin
    loss'(i, t)  = [soft margin + d - d(i, nearest t')]_+  +  the same over images i'                after the warm-up

With loss.networks=2 the embeddings are those of two networks side by side (papers/methods/two_networks.py), and each is
divided by the losses of the other, as in the paper. With 1 a network divides its own pairs: "NCR, one network".

Read between the lines, or different: both networks see the same batches, in another dropout; the mixture is fitted once
an epoch to the losses as they came in the epoch before, and a pair is divided by its loss in the present batch, because
a loss has no memory of which pair it was given; captions of one image are no negatives of each other.
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
    memory: int = option(2**15, "largest number of losses of an epoch that a mixture is fitted to", ge=2)


def soft_margin(label: Tensor, margin: float, base: float) -> Tensor:
    """Margins of pairs by their labels in [0, 1]: 0 of label 0, the whole margin of label 1."""
    return ((label * math.log(base)).exp() - 1) / (base - 1) * margin


def fit_mixture(values: Tensor, *, n_steps: int = 50) -> Tensor:
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
    """See the module. What the mixtures are fitted to is saved with the weights."""

    options: NCROptions
    Options: ClassVar[type[NCROptions]] = NCROptions
    needs_whole = True
    remembered: Tensor
    n_remembered: Tensor
    mixtures: Tensor
    fitted_in: Tensor

    def __init__(self, options: NCROptions | None = None) -> None:
        super().__init__(options)
        networks = self.options.networks
        if networks not in (1, 2):
            raise ValueError(f"NCROptions: networks must be 1 or 2, got {networks}")
        self.register_buffer("remembered", torch.zeros(networks, self.options.memory))
        self.register_buffer("n_remembered", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mixtures", torch.ones(networks, 3, 2))
        self.register_buffer("fitted_in", torch.tensor(-1))

    def counts(self, block: PairBlock) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        sides = zip(*(self._networks(side) for side in (block.image, block.text)), strict=True)
        networks = [Pairs(self.distance.matrix(image, text), block.match_i2t) for image, text in sides]
        if not len(networks[0].own):
            raise ValueError("ncr: no pair of the batch matches; it needs at least one")
        losses = torch.stack([pairs.losses(self.options.margin) for pairs in networks])
        self._fit(losses, epoch)
        self._remember(losses)
        if epoch is not None and epoch < self.options.warmup_epochs:
            return sum_of_terms({"warmup": losses.mean()})
        clean = self.divided(losses)
        own = torch.stack([pairs.predicted() for pairs in networks])
        label = torch.where(clean > 0.5, clean + (1 - clean) * own, own.mean(0))
        margin = soft_margin(label, self.options.margin, self.options.base)
        hinges = [
            (own_margin + pairs.own - nearest).clamp_min(0).mean()
            for own_margin, pairs in zip(margin, networks, strict=True)
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
        found = [posterior(own, mixture)[:, 0] for own, mixture in zip(losses.detach(), self.mixtures, strict=True)]
        return torch.stack(found[::-1])

    @torch.no_grad()
    def _remember(self, losses: Tensor) -> None:
        start = int(self.n_remembered)
        room = min(losses.shape[1], self.options.memory - start)
        self.remembered[:, start : start + room] = losses[:, :room]
        self.n_remembered += room

    @torch.no_grad()
    def _fit(self, losses: Tensor, epoch: int | None) -> None:
        """Once an epoch: the mixtures of the losses of the epoch before, or of this batch if there are none."""
        if epoch is not None and epoch == int(self.fitted_in):
            return
        n = int(self.n_remembered)
        seen = self.remembered[:, :n].to(losses.dtype) if n else losses
        self.mixtures.copy_(torch.stack([fit_mixture(row) for row in seen]))
        self.n_remembered.zero_()
        self.fitted_in.fill_(-1 if epoch is None else epoch)


sfumato.register_loss("ncr", NCRLoss)
