"""One small batch for all loss tests: n, m, d differ; unnormalised means, soft labels, several matches per item.
A small scene for estimators of uncertainty."""

import torch

from sfumato.evaluation.estimators import Matching
from sfumato.gaussian import GaussianEmbedding


def batch(n=4, m=6, d=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda k, scale: scale * torch.randn(k, d, generator=generator, dtype=dtype)
    return GaussianEmbedding(draw(n, 0.6), draw(n, 0.5) - 2), GaussianEmbedding(draw(m, 0.6), draw(m, 0.5) - 2)


MATCH = torch.tensor(
    [[1, 0, 0, 0, 0.9, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0.7], [0, 0, 0, 1, 0, 0.3]], dtype=torch.float64
)
N, M, D, MATCHING = 13, 37, 5, Matching("csd", 1.3, 2.0)
THINGS = ["dog", "cat", "bus", "man", "kite", "pizza", "wave", "bed", "train", "clock", "sheep", "bear", "phone"]
TEXTS = [f"a {thing}{' near a lake' * (k % 3)}" for k, thing in enumerate(THINGS)]  # Of the N queries.


def scene(seed=0, n=N, m=M, d=D):
    generator = torch.Generator().manual_seed(seed)
    noise = [[torch.randn(k, d, generator=generator) for _ in range(2)] for k in (n, m)]
    return [GaussianEmbedding(2 * mean + 1, 0.7 * log_var - 1) for mean, log_var in noise]
