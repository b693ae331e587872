"""What GroVE would cost here: the time of the least that one of its steps has to do, times its number of steps.

    python -m papers.benchmarks.grove_cost [--pairs 30000] [--epochs 250] [--dims 512] [--measured-dims 16]

GroVE has a sparse Gaussian process for each dimension of either modality, each with its own kernel and its own 250
inducing points in a latent space of 10 dimensions, trained for 250 epochs in batches of 128 (its released settings). A
step must at least build the Gram matrices, factor them and solve for the batch, forwards and backwards. The
variational covariances, the likelihoods, the divergences between the modalities and the optimiser come on top and are
not counted. All work is for one dimension at a time in parallel, so a few dimensions are measured and multiplied.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor

INDUCING, LATENT, BATCH, MODALITIES, ITEM_STEPS = 250, 10, 128, 2, 20


def gram(x: Tensor, y: Tensor, length: Tensor) -> Tensor:
    """(dims, n, m) squared exponential kernels."""
    return torch.exp(-0.5 * torch.cdist(x / length, y / length).square())


def factored(points: Tensor, length: Tensor) -> Tensor:
    """(dims, inducing, inducing) Cholesky factors of the Gram matrices."""
    found: Tensor = torch.linalg.cholesky(gram(points, points, length) + 1e-3 * torch.eye(points.shape[1]))
    return found


def step(points: Tensor, length: Tensor, latent: Tensor, factor: Tensor | None = None) -> None:
    """The variances at a batch of latents, and their gradients; a fitted model keeps its factors."""
    factor = factored(points, length) if factor is None else factor
    cross = gram(points, latent.expand(len(points), -1, -1), length)
    solved = torch.linalg.solve_triangular(factor, cross, upper=False)
    (1 - solved.square().sum(1)).sum().backward()


def seconds(dims: int, batch: int, repeats: int, *, fitted: bool) -> float:
    """Median time of the processor for a step of some dimensions."""
    generator = torch.Generator().manual_seed(0)
    points, latent = (torch.randn(*shape, generator=generator) for shape in ((dims, INDUCING, LATENT), (batch, LATENT)))
    length = torch.ones(dims, 1, 1)
    factor = factored(points, length) if fitted else None
    for leaf in (latent,) if fitted else (points, latent, length):
        leaf.requires_grad_()
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        step(points, length, latent, factor)
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30_000)
    parser.add_argument("--epochs", type=int, default=250)
    parser.add_argument("--dims", type=int, default=512)
    parser.add_argument("--measured-dims", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured, scale = options.measured_dims, options.dims / options.measured_dims
    steps = options.epochs * -(-options.pairs // BATCH)
    found = seconds(measured, BATCH, options.repeats, fitted=False)
    whole = found * scale * MODALITIES
    print(f"fit: {found:.3f} s of the processor for {measured} dimensions, x {scale:g} x {MODALITIES} modalities")
    print(
        f"     = {whole:.1f} s a step, x {steps:,} steps ({options.epochs} epochs) = {whole * steps / 3600:.0f} hours"
    )
    found = seconds(measured, 1, options.repeats, fitted=True)
    print(f"query: {found:.5f} s x {scale:g} x {ITEM_STEPS} steps = {1000 * found * scale * ITEM_STEPS:.0f} ms an item")


if __name__ == "__main__":
    main()
