"""Exact ranking by any distance, block by block; the n * m distances are never in memory together.

Ties are decided by gallery position, the earlier item first.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from sfumato.distances import Distance, get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import relevant_ranks


def distance_blocks(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    distance: str | Distance = "csd",
    *,
    memory_mb: float = 256.0,
    seed: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Distances of blocks of queries to the whole gallery.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings.
        distance: name in DISTANCES, or one of these made for the direction (:meth:`Distance.for_direction`).
        memory_mb: size of a block of distances in MiB.
        seed: of a sampled distance. Every block and every call uses the same samples, so that rankings agree.

    Yields:
        (first query, (b, m) distances).
    """
    chosen = get_distance(distance)
    rows = max(1, int(memory_mb * 2**20 / 4 / max(gallery.n, 1)))
    for start in range(0, queries.n, rows):
        part = queries[start : start + rows]
        seeded = {"generator": torch.Generator(queries.device).manual_seed(seed)} if chosen.sampled else {}
        yield start, chosen.matrix(part, gallery, **seeded)


@torch.no_grad()
def top_k(
    queries: GaussianEmbedding, gallery: GaussianEmbedding, k: int, distance: str | Distance = "csd", *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The k closest gallery items of each query.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings.
        k: number of results; all m if it is larger.
        distance: name in DISTANCES, or one of these made for the direction (:meth:`Distance.for_direction`).
        seed: of a sampled distance.

    Returns:
        ((n, k) distances ascending, (n, k) gallery positions); equal distances in gallery order.

    Raises:
        ValueError: k < 1, or the distance is unknown.
    """
    return closest_in_blocks(distance_blocks(queries, gallery, distance, seed=seed), k, queries.n, gallery.n)


@torch.no_grad()
def closest_in_blocks(blocks: Iterable[tuple[int, Tensor]], k: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """The k closest gallery items of each query, from blocks of distances.

    Args:
        blocks: (first query, (b, m) distances), in order, as :func:`distance_blocks` yields them.
        k: number of results; all m if it is larger.
        n: number of queries.
        m: number of gallery items.

    Returns:
        ((n, k) distances ascending, (n, k) gallery positions); equal distances in gallery order.

    Raises:
        ValueError: k < 1.
    """
    if k < 1:
        raise ValueError(f"top_k: k must be at least 1, got {k}")
    k = min(k, m)
    parts = [_smallest(block, k) for _, block in blocks] if k else []
    if not parts:
        return torch.empty(n, k), torch.empty(n, k, dtype=torch.long)
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


@torch.no_grad()
def closest_candidates(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    candidates: Tensor,
    distance: str | Distance = "csd",
    *,
    memory_mb: float = 16.0,
) -> tuple[Tensor, Tensor]:
    """Order each query's candidates by their distances, computed row by row and never for a whole matrix.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings.
        candidates: (n, c) gallery positions, in any order; a negative position means no candidate.
        distance: name in DISTANCES, or one of these made for the direction (:meth:`Distance.for_direction`).
        memory_mb: size of a block of float32 means in MiB.

    Returns:
        ((n, c) distances ascending, (n, c) positions); equal distances by gallery position. Missing candidates are
        last, with distance infinity and position -1.
    """
    n, c = candidates.shape
    row = get_distance(distance).row
    candidates = torch.where(candidates < 0, gallery.n, candidates).sort(dim=1).values
    step = max(1, int(memory_mb * 2**20 / 4) // max(1, c * queries.d))
    parts = []
    for start in range(0, n if gallery.n else 0, step):
        chosen = candidates[start : start + step]
        own = torch.arange(start, start + len(chosen), device=chosen.device).repeat_interleave(c)
        query, item = queries[own], gallery[chosen.flatten().clamp_max(gallery.n - 1)]
        parts.append(row(query, item).view(len(chosen), c))
    found = torch.cat(parts) if parts else torch.empty(n, c, device=candidates.device)
    found, order = found.masked_fill(candidates == gallery.n, torch.inf).sort(dim=1, stable=True)
    candidates = candidates.gather(1, order)
    return found, candidates.masked_fill(candidates == gallery.n, -1)


@torch.no_grad()
def rank_relevant(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    relevance: Relevance,
    distance: str | Distance = "csd",
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Ranks (from 0) of all relevant items.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings.
        relevance: n queries, m gallery items.
        distance: name in DISTANCES, or one of these made for the direction (:meth:`Distance.for_direction`).
        seed: of a sampled distance.
        progress: called with the number of queries just done.

    Returns:
        (p,) int64 ranks in the order of relevance.indices.

    Raises:
        ValueError: sizes do not fit.
    """
    if (queries.n, gallery.n) != (relevance.n_queries, relevance.n_gallery):
        raise ValueError(
            f"rank_relevant: {queries.n} queries and {gallery.n} gallery items, but a relevance of"
            f" {relevance.n_queries} by {relevance.n_gallery}"
        )
    parts = []
    for start, block in distance_blocks(queries, gallery, distance, seed=seed):
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
