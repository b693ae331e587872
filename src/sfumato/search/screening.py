r"""Exact search by bounds: a cheap product bounds every distance, and float64 decides among the few that are left.

For a distance that lifts, with c a centre near the item, x = query - c and r = item - c,

    distance - constant(query) = ||x||^2 + w - 2 <x, r>,    w = ||r||^2 + the part of the item alone

(for csd that part is the total variance of the item, so the products have d columns). The products are taken of codes
x' and r' (search/blocks.py). The error is bounded by Cauchy and Schwarz, with the lengths of what was rounded away,
which are known:

    |<x, r> - <x', r'>| <= ||x|| ||r - r'|| + ||x - x'|| ||r'||

plus the rounding of the product itself, which is exact for int8. The items whose lower bound does not exceed the k-th
smallest upper bound contain the k closest. Their distances are computed anew in float64 by differences. So the result
is that of float64 over all items, whatever the data: bad data make the bounds leave more items, never wrong ones.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sfumato.distances.distance import Distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.blocks import (
    NARROW,
    Block,
    centres_of,
    codes_of,
    labels_of,
    largest_code,
    lifted_vectors,
    multiplied,
    product_dtype,
    sum_error,
)
from sfumato.search.exact import in_parallel, pair_distances

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

Found = list[tuple[Tensor, Tensor]]
"""For each query the (c,) float64 distances and the positions of items, closest first, equal ones by position."""


@dataclass(frozen=True, eq=False)
class _Relative:
    """Some queries relative to a centre."""

    query: Tensor  # (b,) their positions among the queries of the pass
    coded: Tensor  # (b, e) in the dtype of the products
    scale: Tensor  # (b,) float32 factors of the codes
    length: Tensor  # (b,) float64 lengths
    rounding: Tensor  # (b,) float64 lengths of what coding rounded away

    @classmethod
    def of(cls, vectors: Tensor, block: Block) -> "_Relative":
        away = vectors - block.centre.double()
        coded, scale = codes_of(away, block.coded.dtype, largest_code())
        lost = torch.linalg.vector_norm(away - coded.double() * scale, dim=1)
        length = torch.linalg.vector_norm(away, dim=1)
        return cls(torch.arange(len(vectors)), coded, scale.squeeze(1), length, lost)

    def take(self, rows: Tensor) -> "_Relative":
        return _Relative(*(getattr(self, one.name)[rows] for one in fields(self)))


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of a query and an item, with bounds of distance - constant(query); all (p,)."""

    query: Tensor
    item: Tensor
    lower: Tensor
    upper: Tensor

    @staticmethod
    def cat(parts: "list[_Pairs]") -> "_Pairs":
        return _Pairs(*(torch.cat([getattr(p, n) for p in parts]) for n in ("query", "item", "lower", "upper")))

    def take(self, chosen: Tensor) -> "_Pairs":
        return _Pairs(self.query[chosen], self.item[chosen], self.lower[chosen], self.upper[chosen])

    def __len__(self) -> int:
        return len(self.query)


class _Pending:
    """The pairs that a pass has found, from several threads; with k, those whose lower bound is in reach."""

    def __init__(self, reach: Tensor, k: int | None) -> None:
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
        none, nothing = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.float64)
        pairs = _Pairs.cat([_Pairs(none, none, nothing, nothing), *self._parts])
        if self._k is None:
            return pairs
        self.reach = _reduced(self.reach, pairs, self._k)
        return pairs.take((~(pairs.lower > self.reach[pairs.query])).nonzero().squeeze(1))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Queries that are compared with all items of some blocks."""

    vectors: Tensor  # (n, e) float64 lifted queries
    constant: Tensor  # (n,) float64 differences between a distance and the squared L2 of lifted vectors
    blocks: Callable[[], Iterable[Block]]
    exact: Callable[[Tensor, Tensor], Tensor]  # (p,) float64 distances of pairs, from their queries and items

    def closest(self, k: int, reach: Callable[[Tensor], Tensor] | None = None) -> Found:
        """The k closest items of each query, or all if there are fewer.

        reach: from (b, e) queries, (b,) bounds of their k-th distances less the constant; infinite if None.
        """
        found, step = Found(), max(1, min(_QUERIES, _MANY_PAIRS // (8 * k)))
        for part in self._parts(step):
            far = torch.full_like(part.constant, torch.inf) if reach is None else reach(part.vectors)
            found += part._closest(far, k)
        return found

    def within(self, radius: float) -> Iterator[tuple[Tensor, Tensor]]:
        """All items of each query whose distance, rounded to float32, is at most a radius."""
        for part in self._parts(_QUERIES):
            yield from part._within(radius)

    def ranked(self, query: Tensor, item: Tensor, k: int) -> Found:
        """The k closest of some pairs, which are given once each. query (p,), item (p,)."""
        return self._split(query, self.exact(query, item), item, k)

    def _parts(self, step: int) -> "Iterator[Comparison]":
        for start in range(0, len(self.vectors), step):
            part, exact = slice(start, start + step), functools.partial(self._exact_from, start)
            yield replace(self, vectors=self.vectors[part], constant=self.constant[part], exact=exact)

    def _exact_from(self, start: int, query: Tensor, item: Tensor) -> Tensor:
        return self.exact(query + start, item)

    def _within(self, radius: float) -> Found:
        limit = torch.full_like(self.constant, radius) + 2**-22 * abs(radius) + 2**-149
        pairs = self.pairs(limit - self.constant + _wide_error(self._e) * (limit.abs() + self.constant), None)
        if pairs is None:
            return [one for half in self._parts(-(-len(self.vectors) // 2)) for one in half._within(radius)]
        found = self.exact(pairs.query, pairs.item)
        inside = found.float() <= radius
        return self._split(pairs.query[inside], found[inside], pairs.item[inside], None)

    def _closest(self, reach: Tensor, k: int) -> Found:
        pairs, n = self.pairs(reach, k), len(self.vectors)
        if pairs is None:
            halves = zip(self._parts(-(-n // 2)), reach.split(-(-n // 2)), strict=True)
            return [one for half, far in halves for one in half._closest(far, k)]
        if len(pairs) <= 4 * k * n:
            return self.ranked(pairs.query, pairs.item, k)
        # The k lowest bounds first: their distances exclude most of the others.
        pairs = pairs.take(_sorted_by(pairs.query, pairs.lower))
        counts = torch.bincount(pairs.query, minlength=n)
        first = _places(pairs.query, counts) < k
        found = torch.full((len(pairs),), torch.inf, dtype=torch.float64)
        found[first] = self.exact(pairs.query[first], pairs.item[first])
        far = torch.full((n,), -torch.inf, dtype=torch.float64)
        far = far.scatter_reduce(0, pairs.query[first], found[first], "amax")
        far = far - self.constant + _wide_error(self._e) * (far + self.constant)
        rest = ~first & ~(pairs.lower > far[pairs.query])
        found[rest] = self.exact(pairs.query[rest], pairs.item[rest])
        kept = first | rest
        return self._split(pairs.query[kept], found[kept], pairs.item[kept], k)

    def _split(self, query: Tensor, distance: Tensor, item: Tensor, k: int | None) -> Found:
        """The first k of each query, or all."""
        order = _sorted_by(distance, item)
        order = order[query[order].argsort(stable=True)]
        counts = torch.bincount(query, minlength=len(self.vectors))
        if k is not None:
            order, counts = order[_places(query[order], counts) < k], counts.clamp_max(k)
        return list(zip(distance[order].split(counts.tolist()), item[order].split(counts.tolist()), strict=True))

    def pairs(self, reach: Tensor, k: int | None) -> _Pairs | None:
        """The pairs whose lower bound is within reach, or None if they are too many for several queries at once.

        With k the reach falls to the k-th smallest upper bound.
        """
        b, threads = len(self.vectors), torch.get_num_threads()
        step = max(2048, _BLOCK // max(64, b))
        slices, reading, pending = self._slices(step), threading.Lock(), _Pending(reach, k)

        @torch.no_grad()
        def work(number: int) -> None:
            last, relative, products = None, None, torch.empty(0)
            while not pending.too_many:
                with reading:
                    block, rows = next(slices, (None, slice(0)))
                if block is None:
                    break
                if relative is None or block is not last:
                    last, relative = block, _Relative.of(self.vectors, block)
                kind = torch.int32 if block.coded.dtype == torch.int8 else block.coded.dtype
                if products.dtype != kind or not len(products):
                    products = torch.empty(step * b, dtype=kind)
                found = self._survivors(block, rows, relative, pending.reach, products)
                if found is not None:
                    pending.add(found)

        in_parallel(work, threads)
        return None if pending.too_many else pending.pairs()

    def _slices(self, step: int) -> Iterator[tuple[Block, slice]]:
        """All rows, at most `step` of a block at a time, and few at first."""
        n = min(1024, max(_GROUP, _FIRST // len(self.vectors) // _GROUP * _GROUP))
        for block in self.blocks():
            start, end = 0, len(block.item)
            while start < end:
                yield block, slice(start, min(start + n, end))
                start, n = start + n, min(4 * n, step)

    def _survivors(
        self, block: Block, rows: slice, relative: _Relative, reach: Tensor, products: Tensor
    ) -> _Pairs | None:
        """The pairs of some rows of a block whose lower bound is within reach; None if there are none."""
        longest, rounding = float(block.length[rows].amax()), float(block.rounding[rows].amax())
        weight, scale, square = block.weight[rows], block.scale[rows], relative.length.square()
        apart = square + float(weight[0]) - 2 * relative.length * (longest + rounding)
        apart -= 1e-6 * (square + float(weight[-1])) + 2**-20 * relative.length * longest
        wanted = (~(apart > reach)).nonzero().squeeze(1)
        if not len(wanted):
            return None
        if len(wanted) < len(reach):
            relative, square, reach = relative.take(wanted), square[wanted], reach[wanted]
        error = self._error(relative, longest, rounding)
        limit = reach - square + error
        limit += 2**-20 * limit.abs()
        limit = torch.where(longest * (relative.length + longest) < _HUGE, limit, torch.inf).float()
        product, lost = _products(block.coded[rows], relative.coded, products), _output_error(block.coded.dtype)
        # Weight - 2 * product <= limit needs a large product, and the largest of a group comes first.
        gap = weight[::_GROUP].unsqueeze(1) - limit
        largest = torch.nn.functional.max_pool1d(scale[None], _GROUP, ceil_mode=True).T
        least = gap * (0.5 - 2**-20) * (1 - lost) / largest / relative.scale
        least = torch.where(gap > 0, least, -torch.inf)
        group, query = (~(product.amax(1).float() < least)).nonzero(as_tuple=True)
        if not len(group):
            return None
        place = group.unsqueeze(1) * _GROUP + torch.arange(_GROUP)
        row = place.clamp_max(len(weight) - 1)
        inner = product[group, :, query].double() * scale[row] * relative.scale[query].unsqueeze(1)
        value, rounded = weight[row] - 2 * inner, 2 * lost * inner.abs()
        near = ~(value - rounded > limit[query].unsqueeze(1)) & (place == row)
        if block.allowed is not None:
            near &= block.allowed[rows][row]
        query, row, value, rounded = query.unsqueeze(1).expand_as(row)[near], row[near], value[near], rounded[near]
        wide = weight[row].double()
        slack = error[query] + rounded + 2**-21 * (value.abs() + wide)
        upper = square[query] + value + 4 * sum_error(self._e) * wide + slack
        return _Pairs(relative.query[query], block.item[rows][row], square[query] + value - slack, upper)

    @property
    def _e(self) -> int:
        return self.vectors.shape[1]

    def _error(self, relative: _Relative, length: float, rounding: float) -> Tensor:
        """(b,) bounds of the error of a bound of a distance, without that of rounding the product to its dtype."""
        n, lost = relative.length, relative.rounding
        inner = n * rounding + lost * length + self._product_error(relative.coded) * (n + lost) * length
        return 2.001 * inner + _wide_error(self._e) * n.square() + 1e-34

    @staticmethod
    def _product_error(coded: Tensor) -> float:
        """The error of a product in float32, in whatever order it is summed, relative to the lengths."""
        reduced = coded.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        return sum_error(coded.shape[1]) + (2**-6 if reduced else 0)


@dataclass(frozen=True, eq=False)
class Screen:
    """A gallery in memory, prepared for exact search. Make one with :meth:`of`.

    Beside the gallery it takes e + 24 bytes for each item with int8, 2 e + 24 with bfloat16, 4 e + 24 with float32.
    """

    gallery: GaussianEmbedding  # (m, d) embeddings, float32
    distance: Distance  # one that lifts, with queries as its first argument
    blocks: Sequence[Block]

    @classmethod
    @torch.no_grad()
    def of(cls, gallery: GaussianEmbedding, distance: Distance, *, dtype: torch.dtype | None = None) -> "Screen":
        """Prepare a gallery. gallery (m, d)."""
        if (lift := distance.lift) is None:
            raise ValueError(f"Screen: distance {distance.name!r} does not lift; rank it with top_k")
        centres = centres_of(gallery, lift)
        dtype = torch.float32 if centres.shape[1] < NARROW else dtype or product_dtype()
        label = labels_of(gallery, lift, centres)
        items = label.argsort(stable=True).split(torch.bincount(label, minlength=len(centres)).tolist())
        blocks = [
            Block.of(some, lambda rows: lifted_vectors(gallery[rows], lift), centre, dtype)
            for some, centre in zip(items, centres, strict=True)
            if len(some)
        ]
        return cls(gallery, distance, blocks)

    @property
    def n(self) -> int:
        """Number of items that may be found."""
        return sum(block.n_allowed for block in self.blocks)

    def among(self, items: Tensor) -> "Screen":
        """The same where only some of its items may be found. items (s,), ascending."""
        some = [block.among(items) for block in self.blocks]
        return replace(self, blocks=[block for block in some if block.n_allowed])

    @torch.no_grad()
    def closest(self, queries: GaussianEmbedding, k: int) -> tuple[Tensor, Tensor]:
        """The k closest items of each query: (n, k) float64 distances and positions. queries (n, d)."""
        k = min(k, self.n)
        found = self.comparison(queries).closest(k, functools.partial(self._reach, k)) if k else []
        if not found:
            return torch.empty(queries.n, k, dtype=torch.float64), torch.empty(queries.n, k, dtype=torch.long)
        return torch.stack([one[0] for one in found]), torch.stack([one[1] for one in found])

    @torch.no_grad()
    def within(self, queries: GaussianEmbedding, radius: float) -> Iterator[tuple[Tensor, Tensor]]:
        """All items whose distance, rounded to float32, is at most a radius. queries (n, d)."""
        yield from self.comparison(queries).within(radius)

    def comparison(self, queries: GaussianEmbedding) -> Comparison:
        """Queries against the gallery, without the columns that are not multiplied. queries (n, d)."""
        assert self.distance.lift is not None
        e = self.blocks[0].coded.shape[1] if self.blocks else self.gallery.d
        wide = queries.to(torch.float64)
        vectors = torch.cat([wide.mean, self.distance.lift.query(wide)], dim=1)[:, :e]
        exact = functools.partial(pair_distances, queries, self.gallery, self.distance)
        constant = self.distance.lift.constant(wide).double()
        return Comparison(vectors, constant, lambda: self.blocks, exact)

    def _reach(self, k: int, vectors: Tensor) -> Tensor:
        """(b,) bounds of the k-th distances less the constant, by what a block with k items is away at most."""
        far = torch.full((len(vectors),), torch.inf, dtype=torch.float64)
        blocks = [block for block in self.blocks if block.n_allowed >= k]
        if len(blocks) < 2:
            return far
        centres = torch.stack([block.centre for block in blocks]).double()
        slack = 1e-12 * (vectors.square().sum(1, keepdim=True) + centres.square().sum(1))
        square = torch.cdist(vectors, centres).square() + slack
        longest = torch.stack([(block.length + block.rounding).amax() for block in blocks]).double()
        weight = torch.stack([block.weight[-1] for block in blocks]).double() * (1 + 4 * sum_error(centres.shape[1]))
        return ((square + 2 * square.sqrt() * longest + weight) * (1 + 1e-6)).amin(1)


def _products(rows: Tensor, queries: Tensor, products: Tensor) -> Tensor:
    """(groups, _GROUP, b) products of codes, the least that there are behind the last row."""
    n, b = len(rows), len(queries)
    groups = -(-n // _GROUP)
    product = products[: groups * _GROUP * b].view(groups * _GROUP, b)
    multiplied(rows, queries, out=product[:n])
    product[n:] = -torch.inf if product.is_floating_point() else torch.iinfo(torch.int32).min
    return product.view(groups, _GROUP, b)


def _output_error(dtype: torch.dtype) -> float:
    """The relative error of a product that is rounded to bfloat16."""
    return 2**-8 if dtype == torch.bfloat16 else 0.0


def _wide_error(n: int) -> float:
    """A bound of the relative error of a float64 sum of n numbers of one sign, twice."""
    return (n + 32) * 2**-51


def _sorted_by(first: Tensor, second: Tensor) -> Tensor:
    """Positions in the order of `first`, then of `second`."""
    order = second.argsort(stable=True)
    return order[first[order].argsort(stable=True)]


def _places(query: Tensor, counts: Tensor) -> Tensor:
    """(p,) place of each pair among those of its query. query (p,), ascending; counts (n,) of the pairs of each."""
    return torch.arange(len(query)) - (counts.cumsum(0) - counts)[query]


def _reduced(reach: Tensor, pairs: _Pairs, k: int) -> Tensor:
    """(b,) the reach, or the k-th smallest upper bound of the pairs where it is smaller."""
    order = _sorted_by(pairs.query, pairs.upper)
    counts = torch.bincount(pairs.query, minlength=len(reach))
    full = (counts >= k).nonzero().squeeze(1)
    kth = pairs.upper[order][(counts.cumsum(0) - counts)[full] + k - 1]
    reach = reach.clone()
    reach[full] = torch.fmin(reach[full], kth)
    return reach
