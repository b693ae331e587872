"""The 2-D study of the PCME++ paper: do learnt variances distinguish certain samples from ambiguous ones?

The samples themselves are the parameters, so no network is trained.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.errors import UserError, progress_bar
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOutput
from sfumato.losses.pcmepp import PCMEPPOptions, pcmepp_loss
from sfumato.losses.triplet import Mining, TripletOptions, triplet_loss

METHODS = ("csd", "wasserstein2", "triplet_sum", "triplet_hardest")
"""The match loss with two distances, and triplet losses of points with all negatives and with the hardest one."""

PUBLISHED_RATIO = {"csd": 1.82, "wasserstein2": 1.04}
"""Mean variance of uncertain over that of certain samples, Chun 2024, A.2; points have none."""

CLASSES, PER_CLASS, UNCERTAIN_PER_CLASS = 3, 500, 150
_BATCH, _RATE = 128, 0.02


@dataclass(frozen=True)
class ToyData:
    """The samples before training; n = 1500."""

    embedding: GaussianEmbedding  # (n, 2) means around the centroids, and log variances
    label: Tensor  # (n,) class 0, 1 or 2; for an uncertain sample the first of its two classes
    uncertain: Tensor


def toy_data(generator: torch.Generator) -> ToyData:
    """Make 1050 certain and 450 uncertain samples in two dimensions.

    The centroids are standard normal. The samples are normal around them with a standard deviation of 0.1, and log
    sigma of each dimension is uniform in [-1.5, 1.5].
    """
    label = torch.arange(CLASSES).repeat_interleave(PER_CLASS)  # (n,)
    uncertain = torch.arange(PER_CLASS).repeat(CLASSES) >= PER_CLASS - UNCERTAIN_PER_CLASS  # (n,)
    centroid = torch.randn(CLASSES, 2, generator=generator)
    mean = centroid[label] + 0.1 * torch.randn(len(label), 2, generator=generator)
    log_sigma = torch.rand(len(label), 2, generator=generator) * 3 - 1.5
    return ToyData(GaussianEmbedding(mean, 2 * log_sigma), label, uncertain)


def train_toy(
    data: ToyData,
    method: str,
    *,
    generator: torch.Generator,
    updates: int = 500,
    watch: Callable[[int, GaussianEmbedding], None] = lambda update, samples: None,
) -> GaussianEmbedding:
    """Optimise means and log variances with Adam under one method.

    Every update compares two mini-batches without a common sample, like a batch of images with a batch of captions. A
    pair matches if both samples have the same class in this update. watch is called before every update.
    """
    loss = _loss(method)
    mean = data.embedding.mean.clone().requires_grad_()
    log_sigma = (data.embedding.log_var / 2).requires_grad_()
    scale, bias = (torch.tensor(5.0, requires_grad=True) for _ in range(2))
    optimiser = torch.optim.Adam([mean, log_sigma, scale, bias], lr=_RATE)
    with progress_bar(method, updates) as advance:
        for update in range(updates):
            watch(update, GaussianEmbedding(mean.detach(), 2 * log_sigma.detach()))
            both = torch.randperm(len(mean), generator=generator)[: 2 * _BATCH].view(2, -1)  # (2, b)
            other = (torch.rand(both.shape, generator=generator) < 0.5) & data.uncertain[both]
            chosen = (data.label[both] + other.long()) % CLASSES
            match = (chosen[0].unsqueeze(1) == chosen[1]).to(mean.dtype)  # (b, b)
            left, right = (GaussianEmbedding(mean[batch], 2 * log_sigma[batch]) for batch in both)
            optimiser.zero_grad(set_to_none=True)
            loss(left, right, match, scale, bias).total.backward()
            optimiser.step()
            advance(1)
    return GaussianEmbedding(mean.detach(), 2 * log_sigma.detach())


def _loss(method: str) -> Callable[[GaussianEmbedding, GaussianEmbedding, Tensor, Tensor, Tensor], LossOutput]:
    """(left, right, match, scale, bias of the logits) -> loss; triplets have no logits."""
    if method in PUBLISHED_RATIO:
        return lambda left, right, match, scale, bias: pcmepp_loss(
            left, right, match, PCMEPPOptions(distance=method, alpha=0.0, beta=0.0), logit_scale=scale, logit_bias=bias
        )
    mining: Mining = "sum" if method == "triplet_sum" else "hardest"
    return lambda left, right, match, scale, bias: triplet_loss(left, right, match, TripletOptions(mining=mining))


def run_toy(*, seed: int = 0, updates: int = 500) -> dict[str, Any]:
    """Train with each method from the same start: by method the mean variances, their ratio, and every sample."""
    if updates < 1:
        raise UserError(f"toy.updates must be at least 1, got {updates}")
    data, found = toy_data(torch.Generator().manual_seed(seed)), dict[str, dict[str, Any]]()
    for method in METHODS:
        e = train_toy(data, method, generator=torch.Generator().manual_seed(seed), updates=updates)
        found[method] = {"samples": [[round(v, 3) for v in row] for row in torch.cat([e.mean, e.var], 1).tolist()]}
        if method in PUBLISHED_RATIO:
            certain, uncertain = (float(e.var[rows].mean()) for rows in (~data.uncertain, data.uncertain))
            found[method] |= {"certain": certain, "uncertain": uncertain, "ratio": uncertain / certain}
            found[method]["published_ratio"] = PUBLISHED_RATIO[method]
    return {"label": data.label.tolist(), "uncertain": data.uncertain.tolist(), "methods": found}
