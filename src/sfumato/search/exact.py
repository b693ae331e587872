r"""Exact ranking by any distance, block by block; the n * m distances are never in memory together.

Ties are decided by gallery position, the earlier item first.

Some distances lift: they are Euclidean distances between longer vectors, so that any vector engine can search them.
For a fixed query, csd ranks by ||mean_q - mean_g||^2 + u_g with u_g the total variance of the item:

    gallery [mean_g - c, sqrt(u_g)]    query [mean_q - c, 0]    squared L2 = csd - u_q

exactly, in d + 1 dimensions. wasserstein2 is squared L2 between [mean - c, std] (2 d dimensions), squared_l2 between
the means alone (d). The centre c is the same on both sides and changes no distance. Engines expand ||q - g||^2 into a
product, which loses precision when the means lie far from the origin; relative to the gallery's centre the product is
precise. Only means are centred: the centre of sqrt(u) would depend mostly on the few largest variances, and items with
low variance would lose precision.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sfumato.arrays import Array
from sfumato.distances import DISTANCES, get_distance
from sfumato.distances.distance import Distance, Lift, seeded_samples
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import OTHER_SIDE, Side
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import relevant_ranks

_PAIRS = 128
"""Pairs of query and item whose distances are computed at a time in float64."""

T = TypeVar("T")


def distance_blocks(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    distance: str | Distance = "csd",
    *,
    memory_mb: float = 256.0,
    first: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Distances of blocks of queries to the whole gallery. queries (n, d), gallery (m, d)."""
    chosen = get_distance(distance)
    rows = max(1, int(memory_mb * 2**20 / 4 / max(gallery.n, 1)))
    seed, n_samples = chosen.seed, chosen.n_samples
    side: Side = "image" if chosen.direction == "i2t" else "text"
    items = None if chosen.of_samples is None else seeded_samples(gallery, n_samples, seed=seed, side=OTHER_SIDE[side])
    for start in range(0, queries.n, rows):
        part = queries[start : start + rows]
        if chosen.of_samples is None or items is None:
            yield start, chosen.matrix(part, gallery)
        else:
            noisy = seeded_samples(part, n_samples, seed=seed, side=side, first=first + start)
            yield start, chosen.of_samples(noisy, items)


@torch.no_grad()
def top_k(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    k: int,
    distance: str | Distance = "csd",
) -> tuple[Tensor, Tensor]:
    """The k closest gallery items of each query.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings.
        k: number of results; all m if it is larger.
        distance: name in DISTANCES, or one of these made for the direction (:meth:`Distance.for_direction`).

    Returns:
        ((n, k) distances ascending, (n, k) gallery positions); equal distances in gallery order.

    Raises:
        ValueError: k < 1, or the distance is unknown.
    """
    return closest_in_blocks(distance_blocks(queries, gallery, distance), k, queries.n, gallery.n)


@torch.no_grad()
def closest_in_blocks(blocks: Iterable[tuple[int, Tensor]], k: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """The k closest gallery items of each query, from blocks of distances."""
    if k < 1:
        raise ValueError(f"top_k: k must be at least 1, got {k}")
    k = min(k, m)
    parts = [_smallest(block, k) for _, block in blocks] if k else []
    if not parts:
        return torch.empty(n, k), torch.empty(n, k, dtype=torch.long)
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


@torch.no_grad()
def closest_candidates(
    queries: GaussianEmbedding, gallery: GaussianEmbedding, candidates: Tensor, distance: str | Distance = "csd"
) -> tuple[Tensor, Tensor]:
    """Order each query's candidates by their float64 distances, computed row by row.

    queries (n, d), gallery (m, d), candidates (n, c), -1 where one is missing.
    """
    oriented = get_distance(distance)
    if oriented.sampled:
        raise ValueError(f"closest_candidates: {oriented.name} is sampled, not computed row by row; use top_k")
    candidates = torch.where(candidates < 0, gallery.n, candidates).sort(dim=1).values
    there = candidates < gallery.n
    found = torch.full(candidates.shape, torch.inf, dtype=torch.float64, device=candidates.device)
    found[there] = pair_distances(queries, gallery, oriented, there.nonzero()[:, 0], candidates[there])
    found, order = found.sort(dim=1, stable=True)
    candidates = candidates.gather(1, order)
    return found, candidates.masked_fill(candidates == gallery.n, -1)


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


@torch.no_grad()
def rank_relevant(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    relevance: Relevance,
    distance: str | Distance = "csd",
    *,
    first: int = 0,
) -> np.ndarray:
    """Ranks (from 0) of all relevant items. queries (n, d), gallery (m, d) -> (p,)."""
    if (queries.n, gallery.n) != (relevance.n_queries, relevance.n_gallery):
        raise ValueError(
            f"rank_relevant: {queries.n} queries and {gallery.n} gallery items, but a relevance of"
            f" {relevance.n_queries} by {relevance.n_gallery}"
        )
    blocks = distance_blocks(queries, gallery, distance, first=first)
    parts = [relevant_ranks(block, relevance, start) for start, block in blocks]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _smallest(block: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of each row, ties by position; topk orders ties freely, so rows with ties at k are sorted."""
    values, index = block.topk(k, dim=1, largest=False)
    edge = values.amax(1, keepdim=True)
    index = index.sort(dim=1).values
    tied = (torch.count_nonzero(block <= edge, dim=1) > k).nonzero().squeeze(1)
    if len(tied):
        index[tied] = block[tied].argsort(dim=1, stable=True)[:, :k].sort(dim=1).values
    values, order = block.gather(1, index).sort(dim=1, stable=True)
    return values, index.gather(1, order)


LIFTED_DISTANCES = tuple(name for name, distance in DISTANCES.items() if distance.lift)
"""The distances that lift; the others are searched in memory alone."""


def gallery_centre(gallery: GaussianEmbedding) -> Tensor:
    """Mean of the gallery's means. gallery (m, d) -> (d,)."""
    if gallery.n == 0:
        return torch.zeros(gallery.d, device=gallery.device)
    found: Tensor = gallery.mean.double().mean(0).float()
    return found


def lifted_dim(d: int, distance: str = "csd") -> int:
    """Dimensions of lifted vectors."""
    one = GaussianEmbedding.point(torch.zeros(1, d))
    return d + int(_lift(distance).gallery(one).shape[1])


def lift_gallery(gallery: GaussianEmbedding, distance: str = "csd", *, centre: Tensor | None = None) -> Tensor:
    """Vectors to store in an engine. gallery (m, d), centre (d,) -> (m, e)."""
    return torch.cat([_centred(gallery, centre), _lift(distance).gallery(gallery).float()], dim=1)


def lift_queries(queries: GaussianEmbedding, distance: str = "csd", *, centre: Tensor | None = None) -> Tensor:
    """Vectors to search with; their squared L2 to :func:`lift_gallery` plus :func:`query_constant` is the distance.

    queries (n, d), centre (d,) -> (n, e).
    """
    return torch.cat([_centred(queries, centre), _lift(distance).query(queries).float()], dim=1)


def query_constant(queries: GaussianEmbedding, distance: str = "csd") -> Tensor:
    """The difference between the distance and the squared L2 of lifted vectors. queries (n, d) -> (n,)."""
    found: Tensor = _lift(distance).constant(queries).float()
    return found


@dataclass(frozen=True, eq=False)
class LiftedGallery:
    """A lifted gallery for exact search by many queries: a block of distances is one matrix product and a sum."""

    vectors: Tensor  # (m, e) of :func:`lift_gallery`, about the centre
    squares: Tensor  # (m,) their squared lengths
    distance: str  # one of LIFTED_DISTANCES
    centre: Tensor  # (d,)

    @classmethod
    def of(cls, vectors: Tensor, distance: str, centre: Tensor) -> "LiftedGallery":
        """From the vectors of :func:`lift_gallery`. vectors (m, e), centre (d,)."""
        return cls(vectors, vectors.square().sum(1), distance, centre)

    def distance_blocks(self, queries: GaussianEmbedding, *, memory_mb: float = 256.0) -> Iterator[tuple[int, Tensor]]:
        """Distances of blocks of queries to the whole gallery. queries (n, d)."""
        rows = max(1, int(memory_mb * 2**20 / 4 / max(len(self.vectors), 1)))
        vectors = lift_queries(queries, self.distance, centre=self.centre)
        constant = query_constant(queries, self.distance)
        for start in range(0, queries.n, rows):
            part = vectors[start : start + rows]
            squared = torch.addmm(self.squares, part, self.vectors.T, alpha=-2)
            squared += part.square().sum(1, keepdim=True)
            yield start, squared.clamp_min_(0).add_(constant[start : start + rows].unsqueeze(1))


def lowered(vectors: Tensor, total_variance: Tensor, distance: str, centre: Tensor) -> GaussianEmbedding:
    """Embeddings that have the same distances as the original embeddings before lifting.

    vectors (n, e), total_variance (n,), centre (d,) -> (n, d).
    """
    _lift(distance)
    d = len(centre)
    mean = vectors[:, :d] + centre
    if distance == "wasserstein2":
        return GaussianEmbedding(mean, 2 * vectors[:, d:].log())
    return GaussianEmbedding(mean, (total_variance / d).log().unsqueeze(1).expand(-1, d).contiguous())


def _lift(distance: str) -> Lift:
    lift = get_distance(distance).lift
    if lift is None:
        raise ValueError(
            f"distance {distance!r} is not a Euclidean distance of lifted vectors (those are"
            f" {', '.join(LIFTED_DISTANCES)}); a GaussianIndex searches by it in memory"
        )
    return lift


def _centred(embeddings: GaussianEmbedding, centre: Array | None) -> Array:
    if centre is None:
        return embeddings.mean.float()
    if centre.shape != (embeddings.d,):
        raise ValueError(f"lifting: centre must have shape ({embeddings.d},), got {tuple(centre.shape)}")
    if embeddings.dtype == torch.float64:
        return (embeddings.mean - centre.to(embeddings.mean)).float()
    return embeddings.mean.float() - centre
