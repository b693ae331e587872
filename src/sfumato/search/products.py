"""What exact search is made of: products as this machine takes them fastest, exact distances of pairs, and centres."""

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from sfumato.distances import Distance, Lift
from sfumato.gaussian import GaussianEmbedding

_PAIRS = 128


"""Pairs of query and item whose distances are computed at a time in float64."""


LARGEST = 127


"""The largest code of int8."""


NARROW = 16


"""Numbers of a vector below which products are taken in float32: those of int8 gain nothing, and of one are wrong."""


T = TypeVar("T")


@functools.cache
def product_dtype() -> torch.dtype:
    """The dtype in which this machine takes products faster, by a short trial."""
    times = {torch.float32: math.inf, torch.bfloat16: math.inf, **({torch.int8: math.inf} if largest_code() else {})}
    for dtype in times:
        rows, queries = torch.ones(2048, 512, dtype=dtype), torch.ones(32, 512, dtype=dtype)
        for _ in range(5):
            start = time.perf_counter()
            multiplied(rows, queries)
            times[dtype] = min(times[dtype], time.perf_counter() - start)
    fastest = min(times, key=times.__getitem__)
    return fastest if times[fastest] < 0.8 * times[torch.float32] else torch.float32


@functools.cache
def largest_code() -> int:
    """The largest code of int8 for queries whose products with rows of any codes are right here; 0 if none is.

    AVX2 adds two products of 8 bits in 16 bits, and keeps the largest number of 16 bits where the sum is larger.
    """
    shapes = [(n, e, b) for n in (1, 17, 300) for e in (NARROW, 33, 512) for b in (1, 3, 32)]
    with contextlib.suppress(AttributeError, RuntimeError):  # This torch has no such product.
        return next((code for code in (LARGEST, 64) if all(_is_right(code, *shape) for shape in shapes)), 0)
    return 0


def _is_right(code: int, n: int, e: int, b: int) -> bool:
    """Whether products of large codes are those of float64, of equal signs and of random ones."""
    generator = torch.Generator().manual_seed(0)
    signs = [2 * torch.randint(2, (m, e), generator=generator, dtype=torch.int8) - 1 for m in (n, b)]
    signs[0][0], signs[1][0] = 1, 1
    rows, queries = signs[0] * LARGEST, signs[1] * code
    return torch.equal(multiplied(rows, queries).double(), rows.double() @ queries.double().T)


def multiplied(rows: Tensor, queries: Tensor, out: Tensor | None = None) -> Tensor:
    """(n, b) products, those of int8 in int32. rows (n, e), queries (b, e)."""
    multiply = torch._int_mm if rows.dtype == torch.int8 else torch.mm
    found: Tensor = multiply(rows, queries.T, out=out)
    return found


def codes_of(vectors: Tensor, dtype: torch.dtype, most: int) -> tuple[Tensor, Tensor]:
    """(n, e) codes of vectors, those of int8 up to `most`, and (n, 1) float32 scales by which they are multiplied."""
    if dtype.is_floating_point:
        return vectors.to(dtype), torch.ones(len(vectors), 1)
    scale = (vectors.abs().amax(1, keepdim=True) / most).float().clamp_min(torch.finfo(torch.float32).tiny)
    return (vectors / scale).round_().clamp_(-most, most).to(torch.int8), scale


@functools.lru_cache(maxsize=1)
def _workers(n: int, process: int) -> ThreadPoolExecutor:
    """n threads of this process whose operations take one core each.

    An operation over several cores ends when the slowest of them ends, and a search has many short ones. On a machine
    that does other work it would wait most of the time.
    """
    pool, met = ThreadPoolExecutor(n, "sfumato-search", torch.set_num_threads, (1,)), threading.Barrier(n)
    for started in [pool.submit(met.wait) for _ in range(n)]:
        started.result()
    torch.set_num_threads(n)  # the threads to come start with the last number that was set
    return pool


def in_parallel(work: Callable[[int], T], n: int) -> list[T]:
    """work(0), ..., work(n - 1), each on one core."""
    if torch.get_num_threads() == 1 or n == 1:
        return [work(i) for i in range(n)]
    return list(_workers(torch.get_num_threads(), os.getpid()).map(work, range(n)))


def pair_distances(
    queries: GaussianEmbedding, gallery: GaussianEmbedding, distance: Distance, query: Tensor, item: Tensor
) -> Tensor:
    """Distances of some pairs, by the row form in float64.

    queries (n, d), gallery (m, d), query (p,), item (p,) -> (p,).
    """
    queries, found = queries.to(torch.float64), torch.empty(len(query), dtype=torch.float64, device=query.device)

    @torch.no_grad()
    def work(number: int) -> None:
        part = slice(number * _PAIRS, (number + 1) * _PAIRS)
        found[part] = distance.row(queries[query[part]], gallery[item[part]].to(torch.float64))

    in_parallel(work, -(-len(query) // _PAIRS))
    return found


def lifted_vectors(gallery: GaussianEmbedding, lift: Lift) -> tuple[Tensor, Tensor | float]:
    """(m, e) lifted vectors without the columns that queries meet with zeros, and (m,) the squares of these."""
    columns = lift.query(gallery[:1])
    if columns.shape[1] and bool((columns != 0).any()):
        wide = gallery.to(torch.float64)
        return torch.cat([wide.mean, lift.gallery(wide)], dim=1), 0.0
    return gallery.mean, lift.gallery(gallery).square().sum(1)


def centres_of(gallery: GaussianEmbedding, lift: Lift) -> Tensor:
    """(c, e) centres: one, or up to 256 where these are much closer to the items."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(gallery.n, generator=generator)[: 2**14]
    points = lifted_vectors(gallery[chosen], lift)[0].float()
    centre = points[: 2**12].median(dim=0).values.unsqueeze(0)
    c = min(256, gallery.n // 128)
    if c < 2 or not points.abs().amax() < 1e15:
        return centre
    points = points - centre
    means = _k_means(points[: 64 * c], _seeds(points[: 2**11], c, generator))
    many = torch.linalg.vector_norm(points - means[nearest_centre(points, means)], dim=1).median()
    return centre + means if many < torch.linalg.vector_norm(points, dim=1).median() / 2 else centre


def _seeds(points: Tensor, c: int, generator: torch.Generator) -> Tensor:
    """Some of the points, each drawn by its squared distance to those before: as few of c as are nearly as close."""
    squares = points.square().sum(1)
    seeds, apart, medians = [0], torch.full((len(points),), torch.inf), list[float]()
    while True:
        seed = seeds[-1]
        apart = torch.minimum(apart, (squares + squares[seed] - 2 * (points @ points[seed])).clamp_min(0))
        apart[seed] = 0
        medians.append(float(apart.median()))
        if len(seeds) == c or not bool(apart.sum() > 0):
            break
        seeds.append(int(torch.multinomial(apart, 1, generator=generator)))
    enough = next(i for i, median in enumerate(medians, 1) if median <= 4 * medians[-1])
    return points[torch.tensor(seeds[: 2 * enough])]


def _k_means(points: Tensor, means: Tensor) -> Tensor:
    """(c, e) means after four rounds from the given ones."""
    for _ in range(4):
        label = nearest_centre(points, means)
        sums = torch.zeros_like(means).index_add_(0, label, points)
        counts = torch.bincount(label, minlength=len(means)).unsqueeze(1)
        means = torch.where(counts > 0, sums / counts.clamp_min(1), means)
    return means


def nearest_centre(points: Tensor, centres: Tensor) -> Tensor:
    """(n,) positions of the nearest centres."""
    if len(centres) == 1:
        return torch.zeros(len(points), dtype=torch.long)
    middle = centres.mean(0)
    points, centres = points - middle, centres - middle
    return torch.addmm(centres.square().sum(1), points, centres.T, alpha=-2).argmin(1)
