"""Retrieval metrics, all computed from the ranks of the relevant items.

Ranks come from counting, not from sorting whole galleries. Ties are decided by gallery position: of two items at the
same distance the earlier one ranks first, as in a stable sort. Ranks may also be read from ranked lists, in the order
in which they are given; a list that is too short for a metric is refused. Definitions and sources are in
docs/concepts/evaluation.md.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from sfumato.arrays import Array, as_numpy, on_accelerator
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import binomial_tail

Better = Literal["larger", "smaller"]
"""Which scores are better; it is always an argument, never guessed."""

UNLISTED = np.iinfo(np.int64).max
"""The rank of an item that a ranked list does not reach."""

RECALLS = ("recall@1", "recall@5", "recall@10")
"""The metrics of every caption benchmark."""

RANK_METRICS = ("median_rank", "mean_rank")
"""Metrics that need the rank of the best relevant item, however far it is."""

ALL_METRICS = (*RECALLS, "r_precision", "map@r", *RANK_METRICS)
"""The metrics of a benchmark that does not name its own."""

_COUNT_AT_MOST = 64  # Relevant items of a query: one sort of the gallery takes as long as counting for about as many.
_CPU_CHUNK = 2**20
_BUFFER = 2**20


class ShortListError(ValueError):
    """A ranked list is too short to determine a metric."""

    def __init__(self, query: int, reason: str) -> None:
        super().__init__(f"the list of query {query} {reason}")
        self.query, self.reason = query, reason


class ScoreMatrix(Protocol):
    """A two-dimensional array that can be sliced: a NumPy array or memmap, a tensor, or an array in an open file."""

    @property
    def shape(self) -> Any:
        """(n, m)."""

    def __getitem__(self, index: Any, /) -> Any:
        """A block that NumPy can convert to an array."""


def score_blocks(
    scores: ScoreMatrix, *, better: Better, queries: Literal["rows", "columns"] = "rows", memory_mb: float = 64.0
) -> Iterator[tuple[int, Array]]:
    """A score matrix as blocks of distances, smaller is closer; only one block is in memory at a time.

    scores (n, m).
    """
    n, m = (int(size) for size in (scores.shape if queries == "rows" else scores.shape[::-1]))
    rows = max(1, int(memory_mb * 2**20 / 4 / max(m, 1)))
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        part = scores[start:stop] if queries == "rows" else scores[:, start:stop]
        block = (part if queries == "rows" else part.T) if on_accelerator(part) else _block(part, queries)
        if better == "larger":  # ~x = -x - 1 reverses the order of all 64-bit integers; -x would not.
            block = ~block if block.dtype == np.int64 else -block
        yield start, block
        del block  # Else it stays in memory until the next one is made.


def _block(part: Array, queries: str) -> np.ndarray:
    block = as_numpy(part)
    if block.dtype.kind not in "fiub" or block.dtype == np.uint64 or block.dtype == np.longdouble:
        raise ValueError(f"score_blocks: scores are of type {block.dtype}; expected real numbers of at most 64 bits")
    plain = block.dtype.newbyteorder("=") if block.dtype.kind == "f" else np.dtype(np.int64)
    # A whole block is transposed several times faster than its parts.
    return np.ascontiguousarray(block if queries == "rows" else block.T, plain)


def ranks_from_lists(
    lists: Sequence[Sequence[int] | np.ndarray], relevance: Relevance
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of the relevant items from ranked lists of gallery positions."""
    n, m = relevance.n_queries, relevance.n_gallery
    ranks, depth = np.full(len(relevance.indices), UNLISTED), np.zeros(n, np.int64)
    position = np.full(m, -1)
    for i, given in enumerate(lists):
        row = np.asarray(given, np.int64)
        if len(row) and not (row.min() >= 0 and row.max() < m):
            found = f"the list of query {i} holds {row.min()}..{row.max()}"
            raise ValueError(f"ranks_from_lists: {found}, but the gallery has positions 0..{m - 1}")
        own = np.arange(len(row))
        position[row] = own
        if (twice := position[row] != own).any():
            raise ValueError(f"ranks_from_lists: the list of query {i} holds position {row[twice][0]} more than once")
        part = slice(*relevance.indptr[i : i + 2])
        places = position[relevance.indices[part]]
        ranks[part] = np.where(places >= 0, places, UNLISTED)
        depth[i] = len(row)
        position[row] = -1
    return ranks, depth


def relevant_ranks(distance: Array, relevance: Relevance, first_query: int = 0) -> np.ndarray:
    """Ranks of the relevant items of a block of queries, computed where a tensor is. distance (b, m) -> (p,)."""
    b, m = distance.shape
    if m != relevance.n_gallery:
        raise ValueError(f"relevant_ranks: distance has {m} columns for a gallery of {relevance.n_gallery} items")
    # A few rows at a time: values that are compared repeatedly stay in the processor's cache, which is about ten times
    # faster.
    if on_accelerator(distance):
        step, ranks_of_few = max(1, 16 * _CPU_CHUNK // max(m, 1)), _ranks_on_device
    else:
        step, ranks_of_few = max(1, _CPU_CHUNK // max(m, 1)), _ranks_on_host
        distance = as_numpy(distance)
    parts = [ranks_of_few(distance[s : s + step], relevance, first_query + s) for s in range(0, b, step)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _ranks_on_host(distance: Array, relevance: Relevance, first_query: int) -> np.ndarray:
    """:func:`relevant_ranks` of a few rows."""
    block = np.ascontiguousarray(distance, np.float32 if distance.dtype == np.float16 else distance.dtype)
    # The minimum of values with NaN is NaN.
    if block.size and block.dtype.kind == "f" and np.isnan(block.min()):
        raise ValueError("relevant_ranks: a distance is NaN; nothing can be ranked by it")
    starts = relevance.indptr[first_query : first_query + len(block) + 1]
    items = relevance.indices[starts[0] : starts[-1]]
    counts, starts, m = np.diff(starts), starts[:-1] - starts[0], block.shape[1]
    ranks = np.empty(len(items), np.int64)
    # Rows with as many relevant items each are compared in one call, as far as the buffer of comparisons reaches.
    for count in np.unique(counts[counts > 0]).tolist():
        rows, few = np.flatnonzero(counts == count), count <= _COUNT_AT_MOST
        step, width = (max(1, _BUFFER // (k * m)) for k in (count, 1))
        for some in np.split(rows, range(step, len(rows), step) if few else range(1, len(rows))):
            own = starts[some, None] + np.arange(count)
            if few:
                for part in np.split(own, range(width, count, width), axis=1):
                    ranks[part] = _count_before(block[some], items[part])
            else:
                ranks[own[0]] = _ranks_from_sorted(block[some[0]], items[own[0]])
    return ranks


def _count_before(values: np.ndarray, items: np.ndarray) -> np.ndarray:
    """(b, c) ranks of c relevant items in each of b rows: the closer items, and the equal ones at earlier positions."""
    own = np.take_along_axis(values, items, 1)[:, :, None]
    m = values.shape[1]
    before = np.empty((*items.shape, -(-m // 8) * 8), bool)
    before[:, :, m:] = False
    np.less(values[:, None], own, out=before[:, :, :m])
    ranks = _count_true(before)
    np.less_equal(values[:, None], own, out=before[:, :, :m])
    for row, i in np.argwhere(_count_true(before) > ranks + 1).tolist():
        ranks[row, i] += np.count_nonzero(values[row, : items[row, i]] == own[row, i])
    return ranks


def _count_true(flags: np.ndarray) -> np.ndarray:
    """The number of true values along the last axis, a multiple of 8 long; ten times as fast as a sum."""
    # The eight bytes of a word add up side by side; a byte holds up to 255.
    words = flags.view(np.uint64)
    lanes = np.add.reduceat(words, np.arange(0, words.shape[-1], 255), axis=-1)
    return np.asarray(lanes.view(np.uint8).sum(-1, dtype=np.int64))


def _ranks_from_sorted(row: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Ranks of many relevant items by one sort of the plain values, about twenty times faster than an argsort."""
    values, own = np.sort(row), row[items]
    ranks: np.ndarray = np.searchsorted(values, own)
    tied = np.flatnonzero(np.searchsorted(values, own, side="right") > ranks + 1)
    if len(tied) > _COUNT_AT_MOST:
        rank = np.empty(len(row), np.int64)
        rank[np.argsort(row, kind="stable")] = np.arange(len(row))
        return np.asarray(rank[items])
    for t in tied:
        ranks[t] += np.count_nonzero(row[: items[t]] == own[t])
    return ranks


def _ranks_on_device(distance: Array, relevance: Relevance, first_query: int) -> np.ndarray:
    """:func:`relevant_ranks` of a few rows on their device, an accelerator: the inverse of the order has every rank."""
    import torch

    if torch.isnan(distance).any():
        raise ValueError("relevant_ranks: a distance is NaN; nothing can be ranked by it")
    own = relevance.select_queries(np.arange(first_query, first_query + len(distance)))
    order = distance.argsort(dim=1, stable=True)
    place = torch.arange(distance.shape[1], device=distance.device).expand_as(order)
    at = (torch.from_numpy(index).to(distance.device) for index in (own.query_of_item, own.indices))
    return np.asarray(torch.empty_like(order).scatter_(1, order, place)[tuple(at)].cpu().numpy())


def per_query_metrics(
    ranks: np.ndarray,
    relevance: Relevance,
    *,
    depth: np.ndarray | None = None,
    names: Sequence[str] = (*RECALLS, "r_precision", "map@r", "best_rank"),
) -> dict[str, np.ndarray]:
    """Metrics of every query. ranks (p,), depth (n,) -> (n,)."""
    at = {name: _k_of(name) for name in names}
    n, counts, totals, query = relevance.n_queries, relevance.counts, relevance.totals, relevance.query_of_item
    has, found = totals > 0, counts > 0
    ranks = ranks[np.lexsort((ranks, query))]
    best = np.where(has, np.inf, np.nan)
    best[found] = ranks[relevance.indptr[:-1][found]]
    if depth is not None:
        _check_depth(np.asarray(depth), relevance, at, best)
    nth = np.arange(len(ranks)) - np.repeat(relevance.indptr[:-1], counts)
    inside = ranks < totals[query]

    def per_query(values: np.ndarray) -> np.ndarray:
        result = np.full(n, np.nan)
        result[has] = np.bincount(query, weights=values, minlength=n)[has] / totals[has]
        return result

    def metric(name: str, k: int | None) -> np.ndarray:
        if k is not None:
            return np.where(has, (best < k).astype(float), np.nan)
        if name == "r_precision":
            return per_query(inside.astype(float))
        return best if name == "best_rank" else per_query(np.where(inside, (nth + 1) / (ranks + 1.0), 0.0))

    return {name: metric(name, k) for name, k in at.items()}


def chance_metrics(relevance: Relevance, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """The expected metrics of a random order, the baseline of every retrieval.

    A query with p relevant items among m has one of them among the first k with the probability
    1 - C(m - p, k) / C(m, k).
    """
    has, m = relevance.totals > 0, relevance.n_gallery
    if not has.any():
        raise ValueError("chance_metrics: no query has a relevant item")
    found = relevance.counts[has]
    before = np.arange(min(max(ks), m))
    missed = np.cumprod(np.clip(m - found[:, None] - before, 0, None) / (m - before), axis=1)
    recalls = {f"recall@{k}": float((1 - missed[:, min(k, m) - 1]).mean()) for k in ks}
    return recalls | {"r_precision": float((found / m).mean())}


_BY_CHANCE = 0.001
"""Largest probability of a recall this high in a random order."""


def beats_chance(metrics: Mapping[str, float], by_chance: Mapping[str, float], n_independent: int) -> bool:
    """Whether recall@1, 5 or 10 is so high that a random order hardly ever reaches it."""
    for name in RECALLS:
        if name in metrics and name in by_chance:
            hits = math.floor(metrics[name] * n_independent + 1e-9)
            # At least as many hits by chance = at most as many misses.
            if binomial_tail(n_independent - hits, n_independent, 1 - by_chance[name]) < _BY_CHANCE:
                return True
    return False


def retrieval_metrics(
    ranks: np.ndarray, relevance: Relevance, *, depth: np.ndarray | None = None, names: Sequence[str] = ALL_METRICS
) -> dict[str, float]:
    """Metrics averaged over the queries that have a relevant item.

    Paper: Musgrave, Belongie and Lim, "A metric learning reality check", ECCV 2020 (mAP@R, R-Precision).
    """
    asked = dict.fromkeys("best_rank" if name in RANK_METRICS else name for name in names)
    has = relevance.totals > 0
    if not has.any():
        raise ValueError("retrieval_metrics: no query has a relevant item; do ids of images and texts fit together?")
    single = per_query_metrics(ranks, relevance, depth=depth, names=list(asked))
    result = {}
    for name in names:
        if name in RANK_METRICS:
            best = single["best_rank"][has]
            result[name] = float(np.median(best) if name == "median_rank" else best.mean()) + 1
        else:
            result[name] = float(single[name][has].mean())
    return result | {"n_queries": int(has.sum()), "n_without_positives": int((~has).sum())}


def check_metric(name: str) -> None:
    """Check the name of a metric of :func:`retrieval_metrics`."""
    if name not in RANK_METRICS:
        _k_of(name, also=RANK_METRICS)


def _k_of(name: str, *, also: tuple[str, ...] = ("best_rank",)) -> int | None:
    """K of recall@K, None of the other known metrics."""
    if match := re.fullmatch(r"recall@([1-9]\d*)", name):
        return int(match[1])
    if name not in ("r_precision", "map@r", *also):
        raise ValueError(f"unknown metric {name!r}; known: recall@K, r_precision, map@r, {', '.join(also)}")
    return None


def _check_depth(depth: np.ndarray, relevance: Relevance, at: dict[str, int | None], best: np.ndarray) -> None:
    """Refuse lists that do not determine a metric."""
    has, m = relevance.totals > 0, relevance.n_gallery
    for name, k in at.items():
        if name == "best_rank":
            short = has & (best == UNLISTED) & (depth < m)
            needed = np.full(len(depth), m)
        else:
            needed = np.minimum(relevance.totals if k is None else k, m) * has
            short = depth < needed
        if short.any():
            i = int(np.flatnonzero(short)[0])
            metric = "the rank of its best item" if name == "best_rank" else name
            lists = f"({short.sum()} of {has.sum()} lists are too short): give longer lists, or ask for other metrics"
            raise ShortListError(i, f"holds {depth[i]} of {m} items, but {metric} needs {needed[i]} {lists}")
