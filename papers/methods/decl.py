"""DECL: similarities as evidence for a Dirichlet distribution over the batch, and a hinge that hardens in training.

    sfumato train flickr8k-triplet loss.name=decl data.noise_rate=0.5 --import papers/methods/decl.py

Paper: Qin et al., "Deep Evidential Learning with Noisy Correspondence for Cross-modal Retrieval", ACM MM 2022; the
evidential loss is that of Sensoy et al., "Evidential deep learning to quantify classification uncertainty", 2018.

With the cosine s = 1 - d / 2 of unit means, for every image over the K texts of the batch, and for every text:

    evidence     e = exp(tanh(s / temperature)),   alpha = e + 1,   S = sum of alpha
    belief       e / S;   uncertainty K / S: they sum to 1
    evidential   sum over j of (y_j - alpha_j / S)^2 + alpha_j (S - alpha_j) / (S^2 (S + 1))
                 + annealing / K * KL(Dir(alpha with 1 at the true items) || Dir(1, ..., 1))
    hinge        mean of the k largest [margin - s + s_j]_+ over negatives j; k falls from all of them to one

y is the label, divided among several true items of one row. The two terms are averaged over rows and over directions.

Read between the lines: the annealing is that of Sensoy et al., linear over the first epochs, and the divergence is that
of one class, because summed over a batch of 512 it is a hundred times the squared errors and alone decides the
training. The paper's hinge turns from all negatives to the hardest, and here linearly: k = K - 1 in the first epoch, 1
from hard_epochs on.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import sfumato
from sfumato.losses.base import LossOptions, LossOutput, MatchLoss, PairBlock, option, sum_of_terms


@dataclass(frozen=True)
class DECLOptions(LossOptions):
    """The keys of section [loss]."""

    distance: str = option("squared_l2", "name of the distance; the evidence is a function of 1 - distance / 2")
    temperature: float = option(0.1, "temperature of the evidence", gt=0)
    margin: float = option(0.2, "margin of the hinge on the cosine", gt=0)
    hinge_weight: float = option(1.0, "weight of the hinge beside the evidential loss", ge=0)
    annealing_epochs: int = option(10, "epoch from which the divergence from a flat Dirichlet counts in full", ge=1)
    hard_epochs: int = option(10, "epoch from which the hinge has the hardest negative alone", ge=1)


def evidence(similarity: Tensor, temperature: float) -> Tensor:
    """Evidence in [1/e, e] of similarities."""
    return (similarity / temperature).tanh().exp()


def uncertainty(found: Tensor) -> Tensor:
    """(n,) what belief leaves: the number of classes by the strength of the Dirichlet. found (n, k) evidence."""
    return found.shape[1] / (found + 1).sum(1)


def flat_divergence(alpha: Tensor) -> Tensor:
    """(n,) KL divergence of Dirichlet distributions (n, k) from the flat one."""
    total, k = alpha.sum(1), torch.tensor(float(alpha.shape[1]), dtype=alpha.dtype, device=alpha.device)
    weighted = (alpha - 1) * (alpha.digamma() - total.digamma().unsqueeze(1))
    return total.lgamma() - k.lgamma() - alpha.lgamma().sum(1) + weighted.sum(1)


def evidential(found: Tensor, label: Tensor, annealing: float) -> Tensor:
    """(n,) expected squared error and divergence. found (n, k) evidence, label (n, k)."""
    alpha = found + 1
    total = alpha.sum(1, keepdim=True)
    target = label / label.sum(1, keepdim=True)
    error = (target - alpha / total).square() + alpha * (total - alpha) / (total.square() * (total + 1))
    return error.sum(1) + annealing / label.shape[1] * flat_divergence(torch.where(label > 0, 1, alpha))


def dynamic_hinge(similarity: Tensor, label: Tensor, margin: float, hardness: float) -> Tensor:
    """(p,) for every true pair the mean of the largest hinges with negatives of its row; hardness 0: all, 1: one."""
    row, column = (label >= 0.5).nonzero(as_tuple=True)
    hinge = (margin - similarity[row, column].unsqueeze(1) + similarity[row]).clamp_min(0)
    hinge = hinge.masked_fill(label[row] > 0, 0)
    negatives = hinge.shape[1] - 1
    return hinge.topk(max(1, round((1 - hardness) * negatives)), dim=1).values.mean(1)


class DECLLoss(MatchLoss):
    """See the module."""

    options: DECLOptions
    Options: ClassVar[type[DECLOptions]] = DECLOptions
    needs_whole = True

    def counts(self, block: PairBlock) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        o = self.options
        annealing, hardness = (
            1.0 if epoch is None else min(1.0, epoch / until) for until in (o.annealing_epochs, o.hard_epochs)
        )
        similarity = 1 - self.distance.matrix(block.image, block.text) / 2
        terms, doubt = {}, similarity.new_zeros(())
        for name, s, label in (("i2t", similarity, block.match_i2t), ("t2i", similarity.T, block.match_i2t.T)):
            matched = (label >= 0.5).any(1)
            if not matched.any():
                raise ValueError("decl: no pair of the batch matches; it needs at least one")
            s, label = s[matched], label[matched].to(s.dtype)
            found = evidence(s, o.temperature)
            terms[f"evidential_{name}"] = evidential(found, label, annealing).mean() / 2
            terms[f"hinge_{name}"] = o.hinge_weight * dynamic_hinge(s, label, o.margin, hardness).mean() / 2
            doubt = doubt + uncertainty(found.detach()).mean() / 2
        return sum_of_terms(terms, {"uncertainty": doubt})


sfumato.register_loss("decl", DECLLoss)
