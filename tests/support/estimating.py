"""A small scene for estimators of uncertainty."""

import torch

from sfumato.evaluation.estimators import Matching
from sfumato.gaussian import GaussianEmbedding

N, M, D, MATCHING = 13, 37, 5, Matching("csd", 1.3, 2.0)


def scene(seed=0, n=N, m=M, d=D):
    generator = torch.Generator().manual_seed(seed)
    noise = [[torch.randn(k, d, generator=generator) for _ in range(2)] for k in (n, m)]
    return [GaussianEmbedding(2 * mean + 1, 0.7 * log_var - 1) for mean, log_var in noise]
