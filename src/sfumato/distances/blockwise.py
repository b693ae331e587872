r"""Distances in blocks under a stated memory budget: elk and bhattacharyya, which do not separate, and sampled ones.

Each formula is here once, in row form (n,) and between all pairs, ``_matrix`` (n, m). No (n, m, d) array ever exists,
not in the backward pass either: blocks are recomputed there.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sfumato.distances.distance import checked, checked_rows, safe_sqrt, squared_l2_product
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype

DEFAULT_MEMORY_MB = 64.0
"""Working memory of the sampled distances, beside inputs and result."""

_NOISE_ROWS = 64
"""Number of consecutive items that share a generator of noise."""

STREAM_MEMORY_MB = 16.0
"""Working memory of elk and bhattacharyya: few blocks, yet each fits in a cache."""


def elk(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Negative log expected likelihood kernel row by row: see :func:`elk_matrix`. x, y (n, d) -> (n,)."""
    x, y = checked_rows(x, y, "elk", points="on one side")
    return _elk_terms(x.mean, x.var, y.mean, y.var).sum(-1) / 2 + x.d / 2 * math.log(2 * math.pi)


def elk_matrix(x: GaussianEmbedding, y: GaussianEmbedding, *, memory_mb: float = STREAM_MEMORY_MB) -> Tensor:
    r"""Negative logarithm of the expected likelihood kernel, the integral of p_i(z) p_j(z), between all pairs.

        elk(i, j) = 1/2 sum [ (mean_i - mean_j)^2 / (var_i + var_j) + ln(var_i + var_j) ] + d/2 ln(2 pi)

    Paper: Chun et al., CVPR 2021, appendix B (there without the constant).

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "elk_matrix", points="on one side")

    def block(mean_x: Tensor, var_x: Tensor, mean_y: Tensor, var_y: Tensor) -> Tensor:
        return _elk_terms(mean_x.unsqueeze(1), var_x.unsqueeze(1), mean_y, var_y).sum(-1)

    total = blockwise(block, (x.mean, x.var), (y.mean, y.var), floats_per_pair=8 * x.d, memory_mb=memory_mb)
    return total / 2 + x.d / 2 * math.log(2 * math.pi)


def bhattacharyya(x: GaussianEmbedding, y: GaussianEmbedding) -> Tensor:
    """Bhattacharyya distance row by row: see :func:`bhattacharyya_matrix`. x, y (n, d) -> (n,)."""
    x, y = checked_rows(x, y, "bhattacharyya", points="refused")
    return _bhattacharyya_terms(x.mean, x.var, y.mean, y.var).sum(-1) / 4


def bhattacharyya_matrix(x: GaussianEmbedding, y: GaussianEmbedding, *, memory_mb: float = STREAM_MEMORY_MB) -> Tensor:
    r"""Bhattacharyya distance, -ln of the integral of sqrt(p_i(z) p_j(z)), between all pairs.

        v = var_i + var_j:   bhattacharyya(i, j) = sum [ 1/4 (mean_i - mean_j)^2 / v + 1/2 ln(v / (2 std_i std_j)) ]

    Paper: Chun et al., CVPR 2021, appendix B (there up to a constant).

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "bhattacharyya_matrix", points="refused")

    def block(mean_x: Tensor, var_x: Tensor, mean_y: Tensor, var_y: Tensor) -> Tensor:
        return _bhattacharyya_terms(mean_x.unsqueeze(1), var_x.unsqueeze(1), mean_y, var_y).sum(-1)

    return blockwise(block, (x.mean, x.var), (y.mean, y.var), floats_per_pair=10 * x.d, memory_mb=memory_mb) / 4


def average_l2(
    x: GaussianEmbedding, y: GaussianEmbedding, *, n_samples: int = 8, generator: torch.Generator | None = None
) -> Tensor:
    """Mean Euclidean distance of samples, row by row: see :func:`average_l2_matrix`, which takes the same samples.

    x, y (n, d) -> (n,).
    """
    x, y = checked_rows(x, y, "average_l2")
    a, b = x.sample(n_samples, generator=generator), y.sample(n_samples, generator=generator)
    squared = torch.stack([(a - b[:, [j]]).square().sum(-1) for j in range(n_samples)])
    return safe_sqrt(squared).mean((0, 2))


def average_l2_matrix(
    x: GaussianEmbedding,
    y: GaussianEmbedding,
    *,
    n_samples: int = 8,
    generator: torch.Generator | None = None,
    memory_mb: float = DEFAULT_MEMORY_MB,
) -> Tensor:
    r"""Mean Euclidean distance of samples between all pairs: 1/s^2 sum_jk ||x_i^j - y_l^k||, not squared.

    Paper: Chun et al., CVPR 2021, table 1.

    x (n, d), y (m, d) -> (n, m).
    """
    x, y = checked(x, y, "average_l2_matrix")
    samples = x.sample(n_samples, generator=generator), y.sample(n_samples, generator=generator)
    return average_l2_of_samples(*samples, memory_mb=memory_mb)


def average_l2_of_samples(x_samples: Tensor, y_samples: Tensor, *, memory_mb: float = DEFAULT_MEMORY_MB) -> Tensor:
    """Mean Euclidean distance between given samples: see :func:`average_l2_matrix`. x_samples (n, s, d) -> (n, m)."""
    return reduce_sample_distances(x_samples, y_samples, lambda distance: distance.mean((2, 3)), memory_mb=memory_mb)


def seeded_samples(
    x: GaussianEmbedding, n_samples: int, *, seed: int, side: Literal["image", "text"], first: int = 0
) -> Tensor:
    """Samples of embeddings whose noise depends on the seed, the side and the position of the item, on nothing else.

    So every division of the items into blocks or among processes, on every device, gives an item the same samples.

    x (n, d) -> (n, s, d).
    """
    chunks = range(first // _NOISE_ROWS, -(-(first + x.n) // _NOISE_ROWS)) if x.n else range(0)
    parts = []
    for chunk in chunks:
        state = np.random.SeedSequence([seed, 0 if side == "image" else 1, chunk]).generate_state(1)
        generator = torch.Generator().manual_seed(int(state[0]))
        noise = torch.randn(_NOISE_ROWS, n_samples, x.d, generator=generator)
        start = chunk * _NOISE_ROWS
        parts.append(noise[max(first - start, 0) : first + x.n - start])
    x = x.to(accumulation_dtype(x.dtype))
    noise = torch.cat([torch.empty(0, n_samples, x.d), *parts]).to(x.device, x.dtype)
    return torch.addcmul(x.mean.unsqueeze(1), (x.log_var / 2).exp().unsqueeze(1), noise)


def reduce_sample_distances(
    x_samples: Tensor, y_samples: Tensor, reduce: Callable[[Tensor], Tensor], *, memory_mb: float = DEFAULT_MEMORY_MB
) -> Tensor:
    """Euclidean distances of all sample pairs, reduced block by block so that (n, m, s, s) never exists at once.

    x_samples (n, s, d) -> (n, m).
    """
    dtype = accumulation_dtype(x_samples.dtype)
    s, t = x_samples.shape[1], y_samples.shape[1]

    def block(a: Tensor, b: Tensor) -> Tensor:
        squared = squared_l2_product(a.flatten(0, 1), b.flatten(0, 1))
        return reduce(safe_sqrt(squared).unflatten(0, (len(a), s)).unflatten(2, (len(b), t)).transpose(1, 2))

    # Counted in the backward pass: six values for each pair of samples, five copies of the samples of each block.
    return blockwise(
        block,
        (x_samples.to(dtype),),
        (y_samples.to(dtype),),
        floats_per_pair=6 * s * t,
        floats_per_row=5 * max(s, t) * x_samples.shape[2],
        memory_mb=memory_mb,
    )


# In place if no gradient needs the terms: at this size new memory for each takes longer than the arithmetic.


def _elk_terms(mean_x: Tensor, var_x: Tensor, mean_y: Tensor, var_y: Tensor) -> Tensor:
    var, gap = var_x + var_y, mean_x - mean_y
    if var.requires_grad or gap.requires_grad:
        return gap.square() / var + var.log()
    return gap.square_().div_(var).add_(var.log_())


def _bhattacharyya_terms(mean_x: Tensor, var_x: Tensor, mean_y: Tensor, var_y: Tensor) -> Tensor:
    """4 x the summand; (var_x + var_y)^2 / (4 var_x var_y) as 1 + r is exact for equal variances."""
    var, gap, excess = var_x + var_y, mean_x - mean_y, var_x - var_y
    if var.requires_grad or gap.requires_grad:
        return gap.square() / var + (excess.square() / (4 * var_x * var_y)).log1p()
    gap.square_().div_(var)
    return gap.add_(excess.square_().div_(torch.mul(4 * var_x, var_y, out=var)).log1p_())


def blockwise(
    function: Callable[..., Tensor],
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    *,
    floats_per_pair: int,
    floats_per_row: int = 0,
    memory_mb: float,
) -> Tensor:
    """A function of all pairs in square blocks of x and y, recomputed in the backward pass.

    function (rows, ...) -> (n, m).
    """
    n, m = len(x[0]), len(y[0])
    if n == 0 or m == 0:
        return x[0].new_zeros(n, m)
    if memory_mb <= 0:
        raise ValueError(f"memory_mb must be positive, got {memory_mb}")
    budget = memory_mb * 2**20 / x[0].element_size()
    # side^2 * floats_per_pair + 2 * side * floats_per_row = budget; a side cut short leaves more for the other.
    side = (math.sqrt(floats_per_row**2 + floats_per_pair * budget) - floats_per_row) / floats_per_pair

    def other(cut: float) -> float:
        return (budget - cut * floats_per_row) / (cut * floats_per_pair + floats_per_row)

    rows = max(1, min(n, int(other(m) if m < side else side)))
    columns = max(1, min(m, int(other(rows))))
    x_blocks, y_blocks = (list(zip(*(t.split(k) for t in part), strict=True)) for part, k in ((x, rows), (y, columns)))
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*x, *y)):
        recompute = functools.partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([torch.cat([recompute(*a, *b) for b in y_blocks], dim=1) for a in x_blocks])
    result = x[0].new_empty(n, m)
    for i, a in enumerate(x_blocks):
        for j, b in enumerate(y_blocks):
            result[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = function(*a, *b)
    return result
