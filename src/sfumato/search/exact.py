"""Exact ranking by any distance, block by block; the n * m distances are never in memory together.

Ties are decided by gallery position, the earlier item first.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sfumato.distances import Distance, get_distance, seeded_samples
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Direction
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import relevant_ranks
from sfumato.search.screening import pair_distances


def distance_blocks(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    distance: str | Distance = "csd",
    *,
    memory_mb: float = 256.0,
    seed: int | None = None,
    first: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Distances of blocks of queries to the whole gallery. queries (n, d), gallery (m, d)."""
    chosen = get_distance(distance)
    rows = max(1, int(memory_mb * 2**20 / 4 / max(gallery.n, 1)))
    samples = None if chosen.of_samples is None else _Samples(chosen, gallery, chosen.seed if seed is None else seed)
    for start in range(0, queries.n, rows):
        part = queries[start : start + rows]
        yield start, chosen.matrix(part, gallery) if samples is None else samples.distances(part, first + start)


class _Samples:
    """A gallery that is sampled once for all blocks of queries."""

    def __init__(self, distance: Distance, gallery: GaussianEmbedding, seed: int) -> None:
        self.distance, self.seed = distance, seed
        self.items = self._of(gallery, "t2i" if distance.direction == "i2t" else "i2t", 0)

    def _of(self, x: GaussianEmbedding, direction: Direction, first: int) -> Tensor:
        side: Literal["image", "text"] = "image" if direction == "i2t" else "text"
        return seeded_samples(x, self.distance.n_samples, seed=self.seed, side=side, first=first)

    def distances(self, queries: GaussianEmbedding, first: int) -> Tensor:
        """(b, m) distances of the queries that start at this position."""
        assert self.distance.of_samples is not None
        return self.distance.of_samples(self._of(queries, self.distance.direction, first), self.items)


@torch.no_grad()
def top_k(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    k: int,
    distance: str | Distance = "csd",
    *,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k closest gallery items of each query.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings.
        k: number of results; all m if it is larger.
        distance: name in DISTANCES, or one of these made for the direction (:meth:`Distance.for_direction`).
        seed: of a sampled distance; that of the distance if None.

    Returns:
        ((n, k) distances ascending, (n, k) gallery positions); equal distances in gallery order.

    Raises:
        ValueError: k < 1, or the distance is unknown.
    """
    return closest_in_blocks(distance_blocks(queries, gallery, distance, seed=seed), k, queries.n, gallery.n)


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


@torch.no_grad()
def rank_relevant(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    relevance: Relevance,
    distance: str | Distance = "csd",
    *,
    seed: int | None = None,
    first: int = 0,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Ranks (from 0) of all relevant items. queries (n, d), gallery (m, d) -> (p,)."""
    if (queries.n, gallery.n) != (relevance.n_queries, relevance.n_gallery):
        raise ValueError(
            f"rank_relevant: {queries.n} queries and {gallery.n} gallery items, but a relevance of"
            f" {relevance.n_queries} by {relevance.n_gallery}"
        )
    parts = []
    for start, block in distance_blocks(queries, gallery, distance, seed=seed, first=first):
        parts.append(relevant_ranks(block, relevance, start))
        if progress:
            progress(len(block))
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
