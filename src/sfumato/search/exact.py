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
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from sfumato.arrays import Array, as_numpy, like, n_threads, set_threads, smallest
from sfumato.distances import DISTANCES, get_distance
from sfumato.distances.distance import Distance, Lift, seeded_samples, squared_l2_of_centred
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import OTHER_SIDE, Side
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import relevant_ranks

_PAIRS = 128
"""Pairs of query and item whose distances are computed at a time in float64."""

T = TypeVar("T")

quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
"""For functions on numbers of users: what overflows is infinite, without a warning."""


def distance_blocks(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    distance: str | Distance = "csd",
    *,
    memory_mb: float = 256.0,
    first: int = 0,
) -> Iterator[tuple[int, Array]]:
    """Distances of blocks of queries to the whole gallery, of their library. queries (n, d), gallery (m, d)."""
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


def top_k(
    queries: GaussianEmbedding, gallery: GaussianEmbedding, k: int, distance: str | Distance = "csd"
) -> tuple[Array, Array]:
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
    blocks = distance_blocks(queries.detach(), gallery.detach(), distance)
    found, position = closest_in_blocks(blocks, k, queries.n, gallery.n)
    return like(found, queries.mean), like(position, queries.mean)


def closest_in_blocks(blocks: Iterable[tuple[int, Array]], k: int, n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """The k closest gallery items of each query, from blocks of distances."""
    if k < 1:
        raise ValueError(f"top_k: k must be at least 1, got {k}")
    k = min(k, m)
    parts = [smallest(block, k) for _, block in blocks] if k else []
    if not parts:
        return np.empty((n, k), np.float32), np.empty((n, k), np.int64)
    return np.concatenate([found for found, _ in parts]), np.concatenate([place for _, place in parts])


@quiet
def closest_candidates(
    queries: GaussianEmbedding, gallery: GaussianEmbedding, candidates: Array, distance: str | Distance = "csd"
) -> tuple[Array, Array]:
    """Order each query's candidates by their float64 distances, computed row by row.

    queries (n, d), gallery (m, d), candidates (n, c), -1 where one is missing.
    """
    oriented = get_distance(distance)
    if oriented.sampled:
        raise ValueError(f"closest_candidates: {oriented.name} is sampled, not computed row by row; use top_k")
    given, candidates = candidates, as_numpy(candidates)
    candidates = np.sort(np.where(candidates < 0, gallery.n, candidates), axis=1)
    there = candidates < gallery.n
    found = np.full(candidates.shape, np.inf)
    found[there] = pair_distances(queries.numpy(), gallery.numpy(), oriented, there.nonzero()[0], candidates[there])
    order = found.argsort(axis=1, kind="stable")
    candidates = np.take_along_axis(np.where(there, candidates, -1), order, 1)
    return like(np.take_along_axis(found, order, 1), given), like(candidates, given)


@functools.lru_cache(maxsize=1)
def _workers(n: int, process: int, with_torch: bool) -> ThreadPoolExecutor:
    """n threads of this process whose operations take one core each.

    An operation over several cores ends when the slowest of them ends, and a search has many short ones. On a machine
    that does other work it would wait most of the time.
    """
    pool, met = ThreadPoolExecutor(n, "sfumato-search", set_threads, (1,)), threading.Barrier(n)
    for started in [pool.submit(met.wait) for _ in range(n)]:
        started.result()
    set_threads(n)  # Threads to come start with the last number that torch was given.
    return pool


def in_parallel(work: Callable[[int], T], n: int) -> list[T]:
    """work(0), ..., work(n - 1), each on one core."""
    if n_threads() == 1 or n == 1:
        return [work(i) for i in range(n)]
    return list(_workers(n_threads(), os.getpid(), "torch" in sys.modules).map(work, range(n)))


def pair_distances(
    queries: GaussianEmbedding, gallery: GaussianEmbedding, distance: Distance, query: np.ndarray, item: np.ndarray
) -> np.ndarray:
    """Distances of some pairs, by the row form in float64.

    queries (n, d), gallery (m, d), query (p,), item (p,) -> (p,).
    """
    queries, found = queries.to(np.float64), np.empty(len(query))

    @quiet
    def work(number: int) -> None:
        part = slice(number * _PAIRS, (number + 1) * _PAIRS)
        found[part] = distance.row(queries[query[part]], gallery[item[part]].to(np.float64))

    in_parallel(work, -(-len(query) // _PAIRS))
    return found


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
        found = f"{queries.n} queries and {gallery.n} gallery items"
        raise ValueError(f"rank_relevant: {found}, but a relevance of {relevance.n_queries} by {relevance.n_gallery}")
    blocks = distance_blocks(queries.detach(), gallery.detach(), distance, first=first)
    parts = [relevant_ranks(block, relevance, start) for start, block in blocks]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


LIFTED_DISTANCES = tuple(name for name, distance in DISTANCES.items() if distance.lift)
"""The distances that lift; the others are searched in memory alone."""


def gallery_centre(gallery: GaussianEmbedding) -> np.ndarray:
    """Mean of the gallery's means. gallery (m, d) -> (d,)."""
    if gallery.n == 0:
        return np.zeros(gallery.d, np.float32)
    return np.asarray(as_numpy(gallery.mean).mean(0, dtype=np.float64), np.float32)


def lifted_dim(d: int, distance: str = "csd") -> int:
    """Dimensions of lifted vectors."""
    return d + int(_lift(distance).gallery(GaussianEmbedding.point(np.zeros((1, d), np.float32))).shape[1])


def lift_gallery(gallery: GaussianEmbedding, distance: str = "csd", *, centre: Array = None) -> Array:
    """Vectors to store in an engine. gallery (m, d), centre (d,) -> (m, e)."""
    return _beside_means(gallery, _lift(distance).gallery, centre)


def lift_queries(queries: GaussianEmbedding, distance: str = "csd", *, centre: Array = None) -> Array:
    """Vectors to search with; their squared L2 to :func:`lift_gallery` plus :func:`query_constant` is the distance.

    queries (n, d), centre (d,) -> (n, e).
    """
    return _beside_means(queries, _lift(distance).query, centre)


def query_constant(queries: GaussianEmbedding, distance: str = "csd") -> Array:
    """The difference between the distance and the squared L2 of lifted vectors. queries (n, d) -> (n,)."""
    return like(as_numpy(_lift(distance).constant(queries.numpy())).astype(np.float32), queries.mean)


@dataclass(frozen=True, eq=False)
class LiftedGallery:
    """A lifted gallery for exact search by many queries: a block of distances is one matrix product and a sum."""

    vectors: Array  # (m, e) of :func:`lift_gallery`, about the centre
    squares: Array  # (m,) their squared lengths
    distance: str  # one of LIFTED_DISTANCES
    centre: Array  # (d,)

    @classmethod
    def of(cls, vectors: Array, distance: str, centre: Array) -> "LiftedGallery":
        """From the vectors of :func:`lift_gallery`. vectors (m, e), centre (d,)."""
        return cls(vectors, (vectors**2).sum(1), distance, centre)

    def distance_blocks(self, queries: GaussianEmbedding, *, memory_mb: float = 256.0) -> Iterator[tuple[int, Array]]:
        """Distances of blocks of queries to the whole gallery. queries (n, d)."""
        rows = max(1, int(memory_mb * 2**20 / 4 / max(len(self.vectors), 1)))
        vectors = lift_queries(queries, self.distance, centre=self.centre)
        constant = query_constant(queries, self.distance)
        for start in range(0, queries.n, rows):
            part = vectors[start : start + rows]
            squared = squared_l2_of_centred(part, self.vectors, (part**2).sum(1), self.squares)
            squared += constant[start : start + rows, None]
            yield start, squared


def lowered(vectors: np.ndarray, total_variance: np.ndarray, distance: str, centre: np.ndarray) -> GaussianEmbedding:
    """Embeddings that have the same distances as the original embeddings before lifting.

    vectors (n, e), total_variance (n,), centre (d,) -> (n, d).
    """
    _lift(distance)
    d = len(centre)
    mean = vectors[:, :d] + centre
    with np.errstate(divide="ignore"):  # Of points.
        if distance == "wasserstein2":
            return GaussianEmbedding(mean, 2 * np.log(vectors[:, d:]))
        return GaussianEmbedding(mean, np.repeat(np.log(total_variance / d)[:, None], d, axis=1))


def _lift(distance: str) -> Lift:
    if (lift := get_distance(distance).lift) is None:
        those = f"a Euclidean distance of lifted vectors (those are {', '.join(LIFTED_DISTANCES)})"
        raise ValueError(f"distance {distance!r} is not {those}; a GaussianIndex searches by it in memory")
    return lift


def _beside_means(embeddings: GaussianEmbedding, columns: Callable[[GaussianEmbedding], Array], centre: Array) -> Array:
    """(n, e) means about a centre, and columns beside them, in float32."""
    own = embeddings.numpy()
    if centre is not None and centre.shape != (own.d,):
        raise ValueError(f"lifting: centre must have shape ({own.d},), got {tuple(centre.shape)}")
    wide = own.mean if own.dtype == np.float64 else own.mean.astype(np.float32, copy=False)
    means = wide if centre is None else wide - as_numpy(centre)
    vectors = np.concatenate([means.astype(np.float32), as_numpy(columns(own)).astype(np.float32)], axis=1)
    return like(vectors, embeddings.mean)
