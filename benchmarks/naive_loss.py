"""One step of PCME++'s loss, forwards and backwards, beside the loss that one would write by hand: paired ratios.

python benchmarks/naive_loss.py [--pairs 512] [--dim 1024] [--rounds 60]
"""

import argparse
import statistics
import time

import torch
from torch import Tensor
from torch.nn import functional

from sfumato import GaussianEmbedding, PCMEPPLoss
from sfumato.losses.pcmepp import PCMEPPOptions

Leaves = list[Tensor]
"""Means and log variances of images, then of texts."""


def ours(loss: PCMEPPLoss, leaves: Leaves, match: Tensor) -> None:
    loss(GaussianEmbedding(*leaves[:2]), GaussianEmbedding(*leaves[2:]), match).total.backward()


def naive(loss: PCMEPPLoss, leaves: Leaves, match: Tensor) -> None:
    """The same terms in a few lines, for one match a row."""
    (x, a), (y, b), options = leaves[:2], leaves[2:], loss.options
    squared = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
    distance = squared + a.exp().sum(1)[:, None] + b.exp().sum(1)
    logit = loss.logits.logit_bias - loss.logits.logit_scale * distance
    entropy = functional.binary_cross_entropy_with_logits
    total = 2 * entropy(logit, match)
    if options.alpha:
        near = distance.detach()
        for limit in (near.diagonal()[:, None], near.diagonal()):
            total = total + options.alpha * entropy(logit, torch.where(near <= limit, 1.0, match))
    for mean, log_var in ((x, a), (y, b)):
        total = total - options.beta * (1 + log_var - mean.square() - log_var.exp()).mean() / 2
    total.backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("pairs", 512), ("dim", 1024), ("rounds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given, generator = parser.parse_args(), torch.Generator().manual_seed(0)
    raw = [torch.randn(given.pairs, given.dim, generator=generator) for _ in range(4)]
    values = [functional.normalize(raw[0]), raw[1] / 10 - 8, functional.normalize(raw[2]), raw[3] / 10 - 8]
    match = torch.eye(given.pairs)
    for alpha in (0.0, 0.1):
        loss, ratios = PCMEPPLoss(PCMEPPOptions(alpha=alpha)), list[float]()
        for k in range(given.rounds):
            seconds = dict[str, float]()
            for step in (ours, naive) if k % 2 else (naive, ours):
                leaves = [value.clone().requires_grad_() for value in values]
                started = time.perf_counter()
                step(loss, leaves, match)
                seconds[step.__name__] = time.perf_counter() - started
            ratios += [seconds["ours"] / seconds["naive"]] if k >= 5 else []
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"alpha {alpha}: {middle:.2f} of the naive loss (quartiles {low:.2f} to {high:.2f}), {len(ratios)} rounds"
        )


if __name__ == "__main__":
    main()
