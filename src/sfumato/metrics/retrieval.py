"""Retrieval metrics from the ranks of the relevant items, which is all that any of them needs.

Ranks come from counting, not from sorting whole galleries, and ties are decided by gallery position: of two items at the same
distance the earlier one ranks first, as in a stable sort. Definitions and sources: docs/math.md.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sfumato.metrics.relevance import Relevance

_COUNT_AT_MOST = 16
_CPU_CHUNK = 2**20


def relevant_ranks(distance: Tensor, relevance: Relevance, first_query: int = 0) -> np.ndarray:
    """Ranks of the relevant items of a block of queries.

    Args:
        distance: (b, m), smaller is closer; no NaN.
        relevance: of all queries.
        first_query: the query that row 0 belongs to.

    Returns:
        (p,) int64 ranks, 0 is the closest, in the order of relevance.indices for these b queries.

    Raises:
        ValueError: the gallery sizes differ, or a distance is NaN.
    """
    b, m = distance.shape
    if m != relevance.n_gallery:
        raise ValueError(f"relevant_ranks: distance has {m} columns for a gallery of {relevance.n_gallery} items")
    if first_query + b > relevance.n_queries:
        raise ValueError(
            f"relevant_ranks: rows for queries {first_query}..{first_query + b - 1} of {relevance.n_queries} queries"
        )
    # A few rows at a time: what is compared again and again stays in the processor's cache, which is some ten times faster.
    step = max(1, (_CPU_CHUNK if distance.device.type == "cpu" else 64 * _CPU_CHUNK) // max(m, 1))
    parts = [_ranks_of_few(distance[s : s + step], relevance, first_query + s) for s in range(0, b, step)]
    return torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.int64)


def _ranks_of_few(distance: Tensor, relevance: Relevance, first_query: int) -> Tensor:
    """:func:`relevant_ranks` of a few rows, on their device."""
    if torch.isnan(distance).any():
        raise ValueError("relevant_ranks: a distance is NaN; nothing can be ranked by it")
    distance, device = distance.contiguous(), distance.device
    b, m = distance.shape
    start, stop = relevance.indptr[first_query], relevance.indptr[first_query + b]
    items = torch.from_numpy(relevance.indices[start:stop]).to(device)
    counts = np.diff(relevance.indptr[first_query : first_query + b + 1])
    rows = torch.from_numpy(np.repeat(np.arange(b), counts)).to(device)
    ranks = torch.empty(len(items), dtype=torch.int64, device=device)
    many = torch.from_numpy(np.repeat(counts > _COUNT_AT_MOST, counts)).to(device)
    if many.any():
        # Many relevant items: sort these rows once; the inverse of the order holds every rank.
        chosen, where = torch.unique(rows[many], return_inverse=True)
        order = distance[chosen].argsort(dim=1, stable=True)
        place = torch.empty_like(order).scatter_(1, order, torch.arange(m, device=device).expand_as(order))
        ranks[many] = place[where, items[many]]
    few = torch.nonzero(~many).squeeze(1)
    # Few: count, for the k-th relevant item of all rows at once, what comes before it.
    nth_on_host = np.arange(stop - start) - np.repeat(relevance.indptr[first_query : first_query + b] - start, counts)
    nth = torch.from_numpy(nth_on_host).to(device)
    for k in range(int(nth[few].max()) + 1 if len(few) else 0):
        now = few[nth[few] == k]
        block = distance if len(now) == b else distance[rows[now]]
        own = block.gather(1, items[now].unsqueeze(1))
        closer = torch.count_nonzero(block < own, dim=1)
        if bool((torch.count_nonzero(block <= own, dim=1) > closer + 1).any()):
            closer += ((block == own) & (torch.arange(m, device=device) < items[now].unsqueeze(1))).sum(1)
        ranks[now] = closer
    return ranks


def per_query_metrics(ranks: np.ndarray, relevance: Relevance, ks: Sequence[int] = (1, 5, 10)) -> dict[str, np.ndarray]:
    """Metrics of every query.

    Args:
        ranks: (p,) of all relevant items, in the order of relevance.indices.
        relevance: the truth.
        ks: K of recall@K.

    Returns:
        "recall@K", "r_precision", "map@r", "best_rank" (0-based): (n,) each, NaN for queries without a relevant item.

    Raises:
        ValueError: there is not one rank for each relevant item.
    """
    if len(ranks) != len(relevance.indices):
        raise ValueError(
            f"per_query_metrics: got {len(ranks)} ranks for {len(relevance.indices)} relevant items; they must be as many"
        )
    n, counts, query = relevance.n_queries, relevance.counts, relevance.query_of_item
    has = counts > 0
    order = np.lexsort((ranks, query))
    ranks = ranks[order]
    nth = np.arange(len(ranks)) - np.repeat(relevance.indptr[:-1], counts)
    inside = ranks < counts[query]

    def per_query(values: np.ndarray) -> np.ndarray:
        result = np.full(n, np.nan)
        result[has] = np.bincount(query, weights=values, minlength=n)[has] / counts[has]
        return result

    best = np.full(n, np.nan)
    best[has] = ranks[relevance.indptr[:-1][has]]
    metrics = {f"recall@{k}": np.where(has, (best < k).astype(float), np.nan) for k in ks}
    metrics["r_precision"] = per_query(inside.astype(float))
    metrics["map@r"] = per_query(np.where(inside, (nth + 1) / (ranks + 1), 0.0))
    metrics["best_rank"] = best
    return metrics


def retrieval_metrics(ranks: np.ndarray, relevance: Relevance, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Metrics averaged over the queries that have a relevant item.

    Args:
        ranks, relevance, ks: see :func:`per_query_metrics`.

    Returns:
        "recall@K", "r_precision", "map@r" as fractions in [0, 1]; "median_rank" and "mean_rank" of the best relevant item, from
        1; "n_queries" and "n_without_positives", the queries left out.

    Raises:
        ValueError: no query has a relevant item.
    """
    single = per_query_metrics(ranks, relevance, ks)
    best = single.pop("best_rank")
    has = ~np.isnan(best)
    if not has.any():
        raise ValueError(
            "retrieval_metrics: no query has a relevant item; check that ids of images and texts fit together"
        )
    result = {name: float(values[has].mean()) for name, values in single.items()}
    return result | {
        "median_rank": float(np.median(best[has])) + 1,
        "mean_rank": float(best[has].mean()) + 1,
        "n_queries": int(has.sum()),
        "n_without_positives": int((~has).sum()),
    }
