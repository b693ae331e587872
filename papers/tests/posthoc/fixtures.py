"""The numbers of released code for post-hoc uncertainty, whose shapes and hyper-parameters the fixtures have; pairs."""

import torch
from support import parity

from papers.posthoc.method import FrozenPairs


def normal(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def items(n, d, seed):
    """Embeddings that are not of unit length, and not around 0."""
    return normal(n, d, seed=seed) * 3 + 0.5


def small_pairs(*, biased=False, n=60, d=4, widths=(6, 5), dtype=torch.float64):
    """A small two-tower model whose pairs share a latent; hidden features of different widths."""
    latent = normal(n, 3, seed=10, dtype=dtype)
    hidden = [latent @ normal(3, p, seed=p, dtype=dtype) + 0.3 * normal(n, p, seed=20 + p, dtype=dtype) for p in widths]
    matrices = [normal(d, p, seed=30 + p, dtype=dtype) for p in widths]
    biases = [normal(d, seed=40 + k, dtype=dtype) if biased else None for k in range(2)]
    images, texts = (h @ w.T + (0 if b is None else b) for h, w, b in zip(hidden, matrices, biases, strict=True))
    layers = dict(zip(("image", "text"), zip(matrices, biases, strict=True), strict=True))
    index = torch.arange(n).repeat(2, 1).T
    return FrozenPairs(images, texts, index, 5.0, *hidden, layers, -2.0 if biased else None)


def fixture(name):
    """(description, tensors); the test is skipped without them."""
    return parity.fixture(f"posthoc/{name}")


def close(found, wanted, rtol=1e-10, atol=0.0):
    """Also in units of the largest value: a sum has the rounding of its terms, which may cancel."""
    single = torch.float32 in (found.dtype, wanted.dtype)
    atol = max(atol, (1e-6 if single else 1e-14) * float(wanted.detach().abs().max()))
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, check_dtype=False)
