"""Products of vectors as this machine takes them fastest, in threads of one core each, and exact distances of pairs."""

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

from sfumato.distances import Distance
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
