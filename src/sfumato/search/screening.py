r"""Exact search by bounds: a cheap product bounds every distance, and float64 decides among the few that are left.

For a distance that lifts, with c a centre near the item, x = query - c and r = item - c,

    distance - constant(query) = ||x||^2 + w - 2 <x, r>,    w = ||r||^2 + the part of the item alone

(for csd that part is the total variance of the item, so the products have d columns). The products are taken of codes
x' and r' (search/blocks.py). The error is bounded by Cauchy and Schwarz, with the lengths of what was rounded away,
which are known:

    |<x, r> - <x', r'>| <= ||x|| ||r - r'|| + ||x - x'|| ||r'||

plus the rounding of the product itself, which is exact for integers. The items whose lower bound does not exceed the
k-th smallest upper bound contain the k closest. Their distances are computed anew in float64 by differences. So the
result is that of float64 over all items, whatever the data: bad data leave more items, never wrong ones.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sfumato.arrays import joined_rows, n_threads, some_rows
from sfumato.distances.distance import Distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.search import blocks as coding
from sfumato.search.blocks import Block
from sfumato.search.exact import in_parallel, pair_distances, quiet

_GROUP = 16
"""Rows whose smallest bound is compared at first."""

_FIRST = 2**14
"""Products that are compared at first; then four times as many, and so on, as the reach falls."""

_BLOCK = 2**20
"""Largest number of products at a time, for each thread: 4 MiB in float32, which stay in the cache."""

_QUERIES = 256
"""Queries in one pass over the gallery."""

_MANY_PAIRS = 2**22
"""With more candidates than this a pass is repeated for half of the queries at a time."""

_HUGE = 1e37
"""Products above this may overflow float32; bounds then exclude nothing."""

Found = list[tuple[np.ndarray, np.ndarray]]
"""For each query the (c,) float64 distances and the positions of items, closest first, equal ones by position."""


@dataclass(frozen=True, eq=False)
class _Relative:
    """Some queries relative to a centre."""

    query: np.ndarray  # (b,) their positions among the queries of the pass
    coded: np.ndarray  # (b, e) int8 codes, or float32
    scale: np.ndarray  # (b,) float32 factors of the codes
    length: np.ndarray  # (b,) float64 lengths
    rounding: np.ndarray  # (b,) float64 lengths of what coding rounded away

    @classmethod
    def of(cls, vectors: np.ndarray, block: Block) -> "_Relative":
        away, dtype = vectors - block.centre.astype(np.float64), block.coded.dtype
        coded, scale = coding.codes_of(away, dtype, 0 if dtype.kind == "f" else coding.largest_code())
        lost, length = (np.linalg.norm(part, axis=1) for part in (away - coded.astype(np.float64) * scale, away))
        return cls(np.arange(len(vectors)), coded, scale[:, 0], length, lost)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of a query and an item, with bounds of distance - constant(query); all (p,)."""

    query: np.ndarray
    item: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    def __len__(self) -> int:
        return len(self.query)


class _Pending:
    """The pairs that a pass has found, from several threads; with k, those whose lower bound is in reach."""

    def __init__(self, reach: np.ndarray, k: int | None) -> None:
        self.reach, self.too_many, self._k = reach, False, k
        self._parts, self._size, self._pruned, self._lock = list[_Pairs](), 0, 0, threading.Lock()

    def add(self, found: _Pairs) -> None:
        """Add pairs; from time to time the reach falls, and pairs are dropped."""
        with self._lock:
            self._parts.append(found)
            self._size += len(found)
            if self._size > 2 * self._pruned + len(self.reach) * (self._k or 1) or self._size > _MANY_PAIRS:
                self._parts = [self.pairs()]
                self._size = self._pruned = len(self._parts[0])
                self.too_many = self._size > _MANY_PAIRS and len(self.reach) > 1

    def pairs(self) -> _Pairs:
        """Those in reach, which falls to the k-th smallest upper bound."""
        none, nothing = np.empty(0, np.int64), np.empty(0)
        pairs = joined_rows([_Pairs(none, none, nothing, nothing), *self._parts])
        if self._k is None:
            return pairs
        self.reach = _reduced(self.reach, pairs, self._k)
        return some_rows(pairs, np.flatnonzero(~(pairs.lower > self.reach[pairs.query])))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Queries that are compared with all items of some blocks."""

    vectors: np.ndarray  # (n, e) float64 lifted queries
    constant: np.ndarray  # (n,) float64 differences between a distance and the squared L2 of lifted vectors
    blocks: Callable[[], Iterable[Block]]
    exact: Callable[[np.ndarray, np.ndarray], np.ndarray]  # (p,) float64, of pairs of a query and an item

    def closest(self, k: int, reach: Callable[[np.ndarray], np.ndarray] | None = None) -> Found:
        """The k closest items of each query, or all if there are fewer.

        reach: from (b, e) queries, (b,) bounds of their k-th distances less the constant; infinite if None.
        """
        found, step = Found(), max(1, min(_QUERIES, _MANY_PAIRS // (8 * k)))
        for part in self._parts(step):
            far = np.full_like(part.constant, np.inf) if reach is None else reach(part.vectors)
            found += part._closest(far, k)
        return found

    def within(self, radius: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All items of each query whose distance, rounded to float32, is at most a radius."""
        for part in self._parts(_QUERIES):
            yield from part._within(radius)

    def ranked(self, query: np.ndarray, item: np.ndarray, k: int) -> Found:
        """The k closest of some pairs, which are given once each. query (p,), item (p,)."""
        return self._split(query, self.exact(query, item), item, k)

    def _parts(self, step: int) -> "Iterator[Comparison]":
        for start in range(0, len(self.vectors), step):
            part, exact = slice(start, start + step), functools.partial(self._exact_from, start)
            yield replace(self, vectors=self.vectors[part], constant=self.constant[part], exact=exact)

    def _exact_from(self, start: int, query: np.ndarray, item: np.ndarray) -> np.ndarray:
        return self.exact(query + start, item)

    @quiet
    def _within(self, radius: float) -> Found:
        limit = np.full_like(self.constant, radius) + 2**-22 * abs(radius) + 2**-149
        pairs = self.pairs(limit - self.constant + _wide_error(self._e) * (np.abs(limit) + self.constant), None)
        if pairs is None:
            return [one for half in self._parts(-(-len(self.vectors) // 2)) for one in half._within(radius)]
        found = self.exact(pairs.query, pairs.item)
        inside = found.astype(np.float32) <= radius
        return self._split(pairs.query[inside], found[inside], pairs.item[inside], None)

    @quiet
    def _closest(self, reach: np.ndarray, k: int) -> Found:
        pairs, n = self.pairs(reach, k), len(self.vectors)
        if pairs is None:
            halves = zip(self._parts(-(-n // 2)), (reach[: -(-n // 2)], reach[-(-n // 2) :]), strict=False)
            return [one for half, far in halves for one in half._closest(far, k)]
        if len(pairs) <= 4 * k * n:
            return self.ranked(pairs.query, pairs.item, k)
        # The k lowest bounds first: their distances exclude most of the others.
        pairs = some_rows(pairs, np.lexsort((pairs.lower, pairs.query)))
        first = _places(pairs.query, np.bincount(pairs.query, minlength=n)) < k
        found, far = np.full(len(pairs), np.inf), np.full(n, -np.inf)
        found[first] = self.exact(pairs.query[first], pairs.item[first])
        np.maximum.at(far, pairs.query[first], found[first])
        far = far - self.constant + _wide_error(self._e) * (far + self.constant)
        rest = ~first & ~(pairs.lower > far[pairs.query])
        found[rest] = self.exact(pairs.query[rest], pairs.item[rest])
        kept = first | rest
        return self._split(pairs.query[kept], found[kept], pairs.item[kept], k)

    def _split(self, query: np.ndarray, distance: np.ndarray, item: np.ndarray, k: int | None) -> Found:
        """The first k of each query, or all."""
        order = np.lexsort((item, distance, query))
        counts = np.bincount(query, minlength=len(self.vectors))
        if k is not None:
            order, counts = order[_places(query[order], counts) < k], np.minimum(counts, k)
        ends = counts.cumsum()[:-1]
        return list(zip(np.split(distance[order], ends), np.split(item[order], ends), strict=True))

    def pairs(self, reach: np.ndarray, k: int | None) -> _Pairs | None:
        """The pairs whose lower bound is within reach, or None if they are too many for several queries at once.

        With k the reach falls to the k-th smallest upper bound.
        """
        step = max(2048, _BLOCK // max(64, len(self.vectors)))
        slices, reading, pending = self._slices(step), threading.Lock(), _Pending(reach, k)

        @quiet
        def work(number: int) -> None:
            last, relative = None, None
            while not pending.too_many:
                with reading:
                    block, rows = next(slices, (None, slice(0)))
                if block is None:
                    break
                if relative is None or block is not last:
                    last, relative = block, _Relative.of(self.vectors, block)
                found = self._survivors(block, rows, relative, pending.reach)
                if found is not None:
                    pending.add(found)

        in_parallel(work, n_threads())
        return None if pending.too_many else pending.pairs()

    def _slices(self, step: int) -> Iterator[tuple[Block, slice]]:
        """All rows, at most `step` of a block at a time, and few at first."""
        n = min(1024, max(_GROUP, _FIRST // len(self.vectors) // _GROUP * _GROUP))
        for block in self.blocks():
            start, end = 0, len(block.item)
            while start < end:
                yield block, slice(start, min(start + n, end))
                start, n = start + n, min(4 * n, step)

    def _survivors(self, block: Block, rows: slice, relative: _Relative, reach: np.ndarray) -> _Pairs | None:
        """The pairs of some rows of a block whose lower bound is within reach; None if there are none."""
        longest, rounding = float(block.length[rows].max()), float(block.rounding[rows].max())
        weight, scale, square = block.weight[rows], block.scale[rows], relative.length**2
        apart = square + float(weight[0]) - 2 * relative.length * (longest + rounding)
        apart -= 1e-6 * (square + float(weight[-1])) + 2**-20 * relative.length * longest
        wanted = np.flatnonzero(~(apart > reach))
        if not len(wanted):
            return None
        if len(wanted) < len(reach):
            relative, square, reach = some_rows(relative, wanted), square[wanted], reach[wanted]
        error = self._error(relative, longest, rounding)
        limit = reach - square + error
        limit += 2**-20 * np.abs(limit)
        limit = np.where(longest * (relative.length + longest) < _HUGE, limit, np.inf).astype(np.float32)
        product = _products(block.coded[rows], relative.coded)
        # Weight - 2 * product <= limit needs a large product, and the largest of a group comes first.
        gap = weight[::_GROUP, None] - limit
        largest = np.maximum.reduceat(scale, np.arange(0, len(scale), _GROUP))[:, None]
        least = np.where(gap > 0, gap * np.float32(0.5 - 2**-20) / largest / relative.scale, -np.inf)
        group, query = np.nonzero(~(product.max(1) < least))
        if not len(group):
            return None
        place = group[:, None] * _GROUP + np.arange(_GROUP)
        row = np.minimum(place, len(weight) - 1)
        inner = product[group, :, query].astype(np.float64) * scale[row] * relative.scale[query, None]
        value = weight[row] - 2 * inner
        near = ~(value > limit[query, None]) & (place == row)
        if block.allowed is not None:
            near &= block.allowed[rows][row]
        query, row, value = np.broadcast_to(query[:, None], row.shape)[near], row[near], value[near]
        wide = weight[row].astype(np.float64)
        slack = error[query] + 2**-21 * (np.abs(value) + wide)
        upper = square[query] + value + 4 * coding.sum_error(self._e) * wide + slack
        return _Pairs(relative.query[query], block.item[rows][row], square[query] + value - slack, upper)

    @property
    def _e(self) -> int:
        return int(self.vectors.shape[1])

    def _error(self, relative: _Relative, length: float, rounding: float) -> np.ndarray:
        """(b,) bounds of the error of a bound of a distance."""
        n, lost = relative.length, relative.rounding
        inner = n * rounding + lost * length + coding.sum_error(self._e) * (n + lost) * length
        return np.asarray(2.001 * inner + _wide_error(self._e) * n**2 + 1e-34)


@dataclass(frozen=True, eq=False)
class Screen:
    """A gallery in memory, prepared for exact search. Make one with :meth:`of`.

    Beside the gallery it takes e + 24 bytes for each item with integers, 4 e + 24 with float32.
    """

    gallery: GaussianEmbedding  # (m, d) embeddings, float32
    distance: Distance  # one that lifts, with queries as its first argument
    blocks: Sequence[Block]

    @classmethod
    @quiet
    def of(cls, gallery: GaussianEmbedding, distance: Distance, *, dtype: Any = None) -> "Screen":
        """Prepare a gallery. gallery (m, d)."""
        if (lift := distance.lift) is None:
            raise ValueError(f"Screen: distance {distance.name!r} does not lift; rank it with top_k")
        centres = coding.centres_of(gallery, lift)
        dtype = np.float32 if centres.shape[1] < coding.NARROW else dtype or coding.product_dtype()
        label = coding.labels_of(gallery, lift, centres)
        ends = np.bincount(label, minlength=len(centres)).cumsum()[:-1]
        items = np.split(label.argsort(kind="stable"), ends)
        blocks = [
            Block.of(some, lambda rows: coding.lifted_vectors(gallery[rows], lift), centre, dtype)
            for some, centre in zip(items, centres, strict=True)
            if len(some)
        ]
        return cls(gallery, distance, blocks)

    @property
    def n(self) -> int:
        """Number of items that may be found."""
        return sum(block.n_allowed for block in self.blocks)

    def among(self, items: np.ndarray) -> "Screen":
        """The same where only some of its items may be found. items (s,), ascending."""
        some = [block.among(items) for block in self.blocks]
        return replace(self, blocks=[block for block in some if block.n_allowed])

    def closest(self, queries: GaussianEmbedding, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k closest items of each query: (n, k) float64 distances and positions. queries (n, d)."""
        k = min(k, self.n)
        found = self.comparison(queries).closest(k, functools.partial(self._reach, k)) if k else []
        if not found:
            return np.empty((queries.n, k)), np.empty((queries.n, k), np.int64)
        return np.stack([one[0] for one in found]), np.stack([one[1] for one in found])

    def within(self, queries: GaussianEmbedding, radius: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All items whose distance, rounded to float32, is at most a radius. queries (n, d)."""
        yield from self.comparison(queries).within(radius)

    def comparison(self, queries: GaussianEmbedding) -> Comparison:
        """Queries against the gallery, without the columns that are not multiplied. queries (n, d)."""
        assert self.distance.lift is not None
        e = self.blocks[0].coded.shape[1] if self.blocks else self.gallery.d
        wide = queries.to(np.float64)
        vectors = np.concatenate([wide.mean, self.distance.lift.query(wide)], axis=1)[:, :e]
        exact = functools.partial(pair_distances, queries, self.gallery, self.distance)
        constant = self.distance.lift.constant(wide).astype(np.float64)
        return Comparison(vectors, constant, lambda: self.blocks, exact)

    def _reach(self, k: int, vectors: np.ndarray) -> np.ndarray:
        """(b,) bounds of the k-th distances less the constant, by what a block with k items is away at most."""
        far = np.full(len(vectors), np.inf)
        blocks = [block for block in self.blocks if block.n_allowed >= k]
        if len(blocks) < 2:
            return far
        centres = np.stack([block.centre for block in blocks]).astype(np.float64)
        slack = 1e-12 * ((vectors**2).sum(1, keepdims=True) + (centres**2).sum(1))
        square = np.stack([((vectors - centre) ** 2).sum(1) for centre in centres], axis=1) + slack
        longest = np.array([(block.length + block.rounding).max() for block in blocks], np.float64)
        heaviest = np.array([block.weight[-1] for block in blocks], np.float64)
        weight = heaviest * (1 + 4 * coding.sum_error(centres.shape[1]))
        return np.asarray(((square + 2 * np.sqrt(square) * longest + weight) * (1 + 1e-6)).min(1))


def _products(rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """(groups, _GROUP, b) products of codes, the least that there are behind the last row."""
    product = coding.multiplied(rows, queries)
    if behind := -len(rows) % _GROUP:
        least = -np.inf if product.dtype.kind == "f" else np.iinfo(product.dtype).min
        product = np.concatenate([product, np.full((behind, len(queries)), least, product.dtype)])
    return product.reshape(-1, _GROUP, len(queries))


def _wide_error(n: int) -> float:
    """A bound of the relative error of a float64 sum of n numbers of one sign, twice."""
    return (n + 32) * 2**-51


def _places(query: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(p,) place of each pair among those of its query. query (p,), ascending; counts (n,) of the pairs of each."""
    return np.asarray(np.arange(len(query)) - (counts.cumsum() - counts)[query])


def _reduced(reach: np.ndarray, pairs: _Pairs, k: int) -> np.ndarray:
    """(b,) the reach, or the k-th smallest upper bound of the pairs where it is smaller."""
    order = np.lexsort((pairs.upper, pairs.query))
    counts = np.bincount(pairs.query, minlength=len(reach))
    full = np.flatnonzero(counts >= k)
    kth = pairs.upper[order][(counts.cumsum() - counts)[full] + k - 1]
    reach = reach.copy()
    reach[full] = np.fmin(reach[full], kth)
    return reach
