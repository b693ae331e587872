"""A small scene for estimators of uncertainty."""

import torch

from sfumato.evaluation.estimators import Matching
from sfumato.gaussian import GaussianEmbedding

N, M, D = 13, 37, 5
MATCHING = Matching("csd", 1.3, 2.0)


def scene(seed=0, n=N, m=M, d=D):
    """Queries and a gallery."""
    generator = torch.Generator().manual_seed(seed)
    return [
        GaussianEmbedding(
            2 * torch.randn(k, d, generator=generator) + 1, 0.7 * torch.randn(k, d, generator=generator) - 1
        )
        for k in (n, m)
    ]
