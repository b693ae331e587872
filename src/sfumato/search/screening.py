r"""Exact search by bounds: a cheap product bounds every distance, and float64 decides among the few that are left.

For a distance that lifts, with c a centre near the item, x = query - c and r = item - c,

    distance - constant(query) = ||x||^2 + w - 2 <x, r>,    w = ||r||^2 + the part of the item alone

(for csd that part is the total variance of the item, so the products have d columns). The products are taken of x' and
r': x and r as int8 with a scale for each vector, in bfloat16, or in float32, as this CPU multiplies fastest. The error
is bounded by Cauchy and Schwarz, with the lengths of what was rounded away, which are known:

    |<x, r> - <x', r'>| <= ||x|| ||r - r'|| + ||x - x'|| ||r'||

plus the rounding of the product itself, which is exact for int8. The items whose lower bound does not exceed the k-th
smallest upper bound contain the k closest. Their distances are computed anew in float64 by differences. So the result
is that of float64 over all items, whatever the data: bad data make the bounds leave more items, never wrong ones.
"""

import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sfumato.distances import Distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.products import (
    LARGEST,
    NARROW,
    centres_of,
    codes_of,
    in_parallel,
    largest_code,
    lifted_vectors,
    multiplied,
    nearest_centre,
    pair_distances,
    product_dtype,
)

_GROUP = 16
"""Rows whose smallest bound is compared at first."""

_BLOCK = 2**20
"""Products in a block, for each thread: 4 MiB in float32, which stay in the cache."""

_QUERIES = 256
"""Queries in one pass over the gallery."""


_MANY_PAIRS = 2**22
"""With more candidates than this a pass is repeated for half of the queries at a time."""

_ROWS = 8192
"""Items that are prepared at a time."""


_HUGE = 1e37
"""Products above this may overflow float32; bounds then exclude nothing."""


@dataclass(frozen=True, eq=False)
class _Relative:
    """Some queries relative to a centre."""

    query: Tensor  # (b,) their positions among the queries of the pass
    coded: Tensor  # (b, e) in the dtype of the products
    scale: Tensor  # (b,) float32 factors of the codes
    length: Tensor  # (b,) float64 lengths
    rounding: Tensor  # (b,) float64 lengths of what coding rounded away

    @classmethod
    def of(cls, vectors: Tensor, centre: Tensor, dtype: torch.dtype) -> "_Relative":
        away = vectors - centre.double()
        coded, scale = codes_of(away, dtype, largest_code())
        lost = torch.linalg.vector_norm(away - coded.double() * scale, dim=1)
        length = torch.linalg.vector_norm(away, dim=1)
        return cls(torch.arange(len(vectors)), coded, scale.squeeze(1), length, lost)

    def take(self, rows: Tensor) -> "_Relative":
        return _Relative(*(getattr(self, one.name)[rows] for one in fields(self)))


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of a query and a row, with bounds of distance - constant(query); all (p,)."""

    query: Tensor
    row: Tensor
    lower: Tensor
    upper: Tensor

    @staticmethod
    def cat(parts: "list[_Pairs]") -> "_Pairs":
        return _Pairs(*(torch.cat([getattr(p, n) for p in parts]) for n in ("query", "row", "lower", "upper")))

    def take(self, chosen: Tensor) -> "_Pairs":
        return _Pairs(self.query[chosen], self.row[chosen], self.lower[chosen], self.upper[chosen])

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
            if self._size > 2 * self._pruned + 8 * len(self.reach) * (self._k or 1) or self._size > _MANY_PAIRS:
                pairs = _Pairs.cat(self._parts)
                if self._k is not None:
                    self.reach = _reduced(self.reach, pairs, self._k)
                    pairs = pairs.take((~(pairs.lower > self.reach[pairs.query])).nonzero().squeeze(1))
                self._parts, self._size, self._pruned = [pairs], len(pairs), len(pairs)
                self.too_many = self._size > _MANY_PAIRS and len(self.reach) > 1

    def pairs(self) -> _Pairs:
        """All of them."""
        none, nothing = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.float64)
        return _Pairs.cat([_Pairs(none, none, nothing, nothing), *self._parts])


@dataclass(frozen=True, eq=False)
class Screen:
    """A gallery prepared for exact search. Make one with :meth:`of`.

    Rows are the items ordered by centre, then by weight. Beside the gallery it takes e + 24 bytes for each item with
    int8, 2 e + 24 with bfloat16, 4 e + 24 with float32.
    """

    gallery: GaussianEmbedding  # (m, d) embeddings, float32
    distance: Distance  # one that lifts, with queries as its first argument
    item: Tensor  # (r,) gallery position of each row
    coded: Tensor  # (r, e) items less their centre, in the dtype of the products
    scale: Tensor  # (r,) float32 factors of the codes
    weight: Tensor  # (r,) lower bounds of w
    length: Tensor  # (r,) upper bounds of the lengths of the coded vectors
    rounding: Tensor  # (r,) upper bounds of the lengths of what coding rounded away
    centres: Tensor  # (c, e) float32
    starts: tuple[int, ...]  # c + 1 numbers, the first row of each centre and r

    @classmethod
    @torch.no_grad()
    def of(cls, gallery: GaussianEmbedding, distance: Distance, *, dtype: torch.dtype | None = None) -> "Screen":
        """Prepare a gallery. gallery (m, d)."""
        if distance.lift is None:
            raise ValueError(f"Screen: distance {distance.name!r} does not lift; rank it with top_k")
        lift, m = distance.lift, gallery.n
        centres = centres_of(gallery, lift)
        dtype = torch.float32 if centres.shape[1] < NARROW else dtype or product_dtype()
        weight, label, e = torch.empty(m), torch.empty(m, dtype=torch.long), centres.shape[1]
        for start in range(0, m, _ROWS):
            part = slice(start, start + _ROWS)
            vectors, alone = lifted_vectors(gallery[part], lift)
            label[part] = nearest_centre(vectors.float(), centres)
            weight[part] = (vectors - centres[label[part]]).float().square().sum(1) + alone
        item, length, rounding = _sorted_by(label, weight), torch.empty(m), torch.empty(m)
        coded, scale, more = torch.empty(m, e, dtype=dtype), torch.empty(m), 1 + _sum_error(e)
        for start in range(0, m, _ROWS):
            part = slice(start, start + _ROWS)
            vectors, alone = lifted_vectors(gallery[item[part]], lift)
            residual = (vectors - centres[label[item[part]]]).float()
            coded[part], factor = codes_of(residual, dtype, LARGEST)
            back = coded[part].float() * factor
            scale[part] = factor.squeeze(1)
            length[part] = torch.linalg.vector_norm(back, dim=1) * more
            rounding[part] = torch.linalg.vector_norm(residual - back, dim=1) * more + 2**-23 * length[part]
            weight[part] = (residual.square().sum(1) + alone) * (1 - _sum_error(max(e, gallery.d)))
        starts = tuple(torch.bincount(label, minlength=len(centres)).cumsum(0).tolist())
        return cls(gallery, distance, item, coded, scale, weight, length, rounding, centres, (0, *starts))

    @property
    def n(self) -> int:
        """Number of rows r."""
        return len(self.item)

    def among(self, items: Tensor) -> "Screen":
        """The same with some of its items only; their rows are copied. items (s,)."""
        wanted = torch.zeros(self.gallery.n, dtype=torch.bool)
        wanted[items] = True
        rows = wanted[self.item].nonzero().squeeze(1)
        starts = torch.searchsorted(rows, torch.tensor(self.starts))
        return replace(
            self,
            item=self.item[rows],
            coded=self.coded[rows],
            scale=self.scale[rows],
            weight=self.weight[rows],
            length=self.length[rows],
            rounding=self.rounding[rows],
            starts=tuple(starts.tolist()),
        )

    @torch.no_grad()
    def closest(self, queries: GaussianEmbedding, k: int) -> tuple[Tensor, Tensor]:
        """The k closest items of each query. queries (n, d)."""
        k = min(k, self.n)
        expected = min(self.n, 4 * k * self._stride(k)) + 1
        step = max(1, min(_QUERIES, _MANY_PAIRS // expected))
        parts = [self._closest(queries[start : start + step], k) for start in range(0, queries.n if k else 0, step)]
        if not parts:
            return torch.empty(queries.n, k, dtype=torch.float64), torch.empty(queries.n, k, dtype=torch.long)
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    @torch.no_grad()
    def within(self, queries: GaussianEmbedding, radius: float) -> Iterator[tuple[Tensor, Tensor]]:
        """All items whose distance, rounded to float32, is at most a radius. queries (n, d)."""
        for start in range(0, queries.n, _QUERIES):
            yield from self._within(queries[start : start + _QUERIES], radius)

    def _within(self, queries: GaussianEmbedding, radius: float) -> Iterator[tuple[Tensor, Tensor]]:
        vectors, constant = self._lifted(queries)
        limit = torch.full_like(constant, radius) + 2**-22 * abs(radius) + 2**-149
        pairs = self._scan(vectors, limit - constant + _wide_error(self._columns) * (limit.abs() + constant), None)
        if pairs is None:
            half = queries.n // 2
            yield from self._within(queries[:half], radius)
            yield from self._within(queries[half:], radius)
            return
        item = self.item[pairs.row]
        found = pair_distances(queries, self.gallery, self.distance, pairs.query, item)
        query, found, item = _in_order(pairs.query, found, item, found.float() <= radius)
        sizes = torch.bincount(query, minlength=queries.n).tolist()
        yield from zip(found.split(sizes), item.split(sizes), strict=True)

    def _closest(self, queries: GaussianEmbedding, k: int) -> tuple[Tensor, Tensor]:
        vectors, constant = self._lifted(queries)
        pairs = self._scan(vectors, self._first_reach(queries, vectors, constant, k), k)
        if pairs is None:
            half = queries.n // 2
            parts = self._closest(queries[:half], k), self._closest(queries[half:], k)
            return torch.cat([parts[0][0], parts[1][0]]), torch.cat([parts[0][1], parts[1][1]])
        # The k lowest bounds first: their distances exclude most of the others.
        order = _sorted_by(pairs.query, pairs.lower)
        counts = torch.bincount(pairs.query, minlength=queries.n)
        place = torch.arange(len(pairs)) - (counts.cumsum(0) - counts)[pairs.query[order]]
        pairs, first = pairs.take(order), place < k
        found = torch.full((len(pairs),), torch.inf, dtype=torch.float64)
        found[first] = self._distances(queries, pairs, first)
        reach = found[first].view(queries.n, k).amax(1)
        reach = reach - constant + _wide_error(self._columns) * (reach + constant)
        rest = ~first & ~(pairs.lower > reach[pairs.query])
        found[rest] = self._distances(queries, pairs, rest)
        query, found, item = _in_order(pairs.query, found, self.item[pairs.row], first | rest)
        counts = torch.bincount(query, minlength=queries.n)
        wanted = (counts.cumsum(0) - counts).unsqueeze(1) + torch.arange(k)
        return found[wanted], item[wanted]

    def _distances(self, queries: GaussianEmbedding, pairs: _Pairs, chosen: Tensor) -> Tensor:
        return pair_distances(queries, self.gallery, self.distance, pairs.query[chosen], self.item[pairs.row[chosen]])

    def _lifted(self, queries: GaussianEmbedding) -> tuple[Tensor, Tensor]:
        """(n, e) lifted queries without the columns that are not multiplied, and (n,) constants, in float64."""
        assert self.distance.lift is not None
        wide = queries.to(torch.float64)
        vectors = torch.cat([wide.mean, self.distance.lift.query(wide)], dim=1)[:, : self.coded.shape[1]]
        return vectors, self.distance.lift.constant(wide).double()

    def _scan(self, vectors: Tensor, reach: Tensor, k: int | None) -> _Pairs | None:
        """The pairs whose lower bound is within reach, or None if they are too many for several queries at once.

        With k the reach falls to the k-th smallest upper bound.
        """
        b, threads = len(vectors), torch.get_num_threads()
        step = min(max(2048, _BLOCK // max(64, b)), max(1024, self.n // (4 * threads)), self.n)
        step = max(_GROUP, step // _GROUP * _GROUP)
        blocks, reading, pending = self._blocks(step), threading.Lock(), _Pending(reach, k)

        @torch.no_grad()
        def work(number: int) -> None:
            products = torch.empty(step * b, dtype=torch.int32 if self.coded.dtype == torch.int8 else self.coded.dtype)
            last, relative = -1, None
            while not pending.too_many:
                with reading:
                    centre, rows = next(blocks, (-1, slice(0)))
                if centre < 0:
                    break
                if relative is None or centre != last:
                    last, relative = centre, _Relative.of(vectors, self.centres[centre], self.coded.dtype)
                found = self._survivors(rows, relative, pending.reach, products)
                if found is not None:
                    pending.add(found)

        in_parallel(work, threads)
        return None if pending.too_many else pending.pairs()

    def _blocks(self, step: int) -> Iterator[tuple[int, slice]]:
        """(number of the centre, at most `step` rows) for all rows."""
        for centre, (start, stop) in enumerate(itertools.pairwise(self.starts)):
            for first in range(start, stop, step):
                yield centre, slice(first, min(first + step, stop))

    def _survivors(self, rows: slice, relative: _Relative, reach: Tensor, products: Tensor) -> _Pairs | None:
        """The pairs of a block of rows whose lower bound is within reach; None if there are none."""
        longest, rounding = float(self.length[rows].amax()), float(self.rounding[rows].amax())
        weight, scale, square = self.weight[rows], self.scale[rows], relative.length.square()
        apart = square + float(weight[0]) - 2 * relative.length * (longest + rounding)
        apart -= 1e-6 * (square + float(weight[-1])) + 2**-20 * relative.length * longest
        wanted = (~(apart > reach[relative.query])).nonzero().squeeze(1)
        if not len(wanted):
            return None
        if len(wanted) < len(relative.query):
            relative, square = relative.take(wanted), square[wanted]
        error = self._error(relative, longest, rounding)
        limit = reach[relative.query] - square + error
        limit += 2**-20 * limit.abs()
        limit = torch.where(longest * (relative.length + longest) < _HUGE, limit, torch.inf).float()
        product = self._products(rows, relative, products)
        # Weight - 2 * product <= limit needs a large product, and the largest of a group comes first.
        gap = weight[::_GROUP].unsqueeze(1) - limit
        largest = torch.nn.functional.max_pool1d(scale[None], _GROUP, ceil_mode=True).T
        least = gap * (0.5 - 2**-20) * (1 - self._output_error) / largest / relative.scale
        least = torch.where(gap > 0, least, -torch.inf)
        group, query = (~(product.amax(1).float() < least)).nonzero(as_tuple=True)
        if not len(group):
            return None
        row = (group.unsqueeze(1) * _GROUP + torch.arange(_GROUP)).clamp_max(len(weight) - 1)
        inner = product[group, :, query].double() * scale[row] * relative.scale[query].unsqueeze(1)
        value, rounded = weight[row] - 2 * inner, 2 * self._output_error * inner.abs()
        near, place = (~(value - rounded > limit[query].unsqueeze(1))).nonzero(as_tuple=True)
        real = group[near] * _GROUP + place < len(weight)
        near, place = near[real], place[real]
        row, query, value, rounded = row[near, place], query[near], value[near, place], rounded[near, place]
        wide = weight[row].double()
        slack = error[query] + rounded + 2**-21 * (value.abs() + wide)
        upper = square[query] + value + 4 * _sum_error(self._columns) * wide + slack
        return _Pairs(relative.query[query], row + rows.start, square[query] + value - slack, upper)

    def _products(self, rows: slice, relative: _Relative, products: Tensor) -> Tensor:
        """(groups, _GROUP, b) products of codes, the least that there are behind the last row."""
        n, b = rows.stop - rows.start, len(relative.query)
        groups = -(-n // _GROUP)
        product = products[: groups * _GROUP * b].view(groups * _GROUP, b)
        multiplied(self.coded[rows], relative.coded, out=product[:n])
        product[n:] = -torch.inf if product.is_floating_point() else torch.iinfo(torch.int32).min
        return product.view(groups, _GROUP, b)

    @property
    def _columns(self) -> int:
        return max(self.coded.shape[1], self.gallery.d)

    @property
    def _output_error(self) -> float:
        """The relative error of a product that is rounded to bfloat16."""
        return 2**-8 if self.coded.dtype == torch.bfloat16 else 0.0

    @property
    def _product_error(self) -> float:
        """The error of a product in float32, in whatever order it is summed, relative to the lengths."""
        reduced = self.coded.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        return _sum_error(self.coded.shape[1]) + (2**-6 if reduced else 0)

    def _error(self, relative: _Relative, length: float | Tensor, rounding: float | Tensor) -> Tensor:
        """(b,) bounds of the error of a bound of a distance, without that of rounding the product to its dtype."""
        n, lost = relative.length, relative.rounding
        inner = n * rounding + lost * length + self._product_error * (n + lost) * length
        return 2.001 * inner + _wide_error(self._columns) * n.square() + 1e-34

    def _stride(self, k: int) -> int:
        """Every how many rows a row is in the first sample: as much work as the candidates that it leaves."""
        return max(1, int(math.sqrt(self.n / (8 * max(1, k)))))

    def _first_reach(self, queries: GaussianEmbedding, vectors: Tensor, constant: Tensor, k: int) -> Tensor:
        """(b,) the distance, less the constant, of the k-th of some near items; infinite where there are too few."""
        stride, n = self._stride(k), torch.get_num_threads()
        if stride < 2:
            return torch.full((len(vectors),), torch.inf, dtype=torch.float64)
        parts = [part for part in vectors.tensor_split(n) if len(part)]
        rows = torch.cat(in_parallel(lambda i: self._sampled_rows(parts[i], k, stride), len(parts)))
        query, place = (rows >= 0).nonzero(as_tuple=True)
        found = torch.full(rows.shape, torch.inf, dtype=torch.float64)
        item = self.item[rows[query, place]]
        found[query, place] = pair_distances(queries, self.gallery, self.distance, query, item)
        reach = found.amax(1)
        return reach - constant + _wide_error(self._columns) * (reach + constant)

    @torch.no_grad()
    def _sampled_rows(self, vectors: Tensor, k: int, stride: int) -> Tensor:
        """(b, k) the nearest of every stride-th row by products, for some of the queries; -1 behind the last."""
        best = torch.full((len(vectors), k), torch.inf)
        found = torch.full((len(vectors), k), -1)
        for (start, stop), centre in zip(itertools.pairwise(self.starts), self.centres, strict=True):
            if start == stop:
                continue
            rows = torch.arange(start, stop, stride)
            relative = _Relative.of(vectors, centre, self.coded.dtype)
            inner = multiplied(self.coded[rows], relative.coded).T * self.scale[rows] * relative.scale.unsqueeze(1)
            score = torch.add(self.weight[rows], inner, alpha=-2) + relative.length.square().float().unsqueeze(1)
            near, place = score.nan_to_num_(nan=torch.inf).topk(min(k, len(rows)), largest=False, sorted=False)
            best, kept = torch.cat([best, near], dim=1).topk(k, largest=False, sorted=False)
            found = torch.cat([found, rows[place]], dim=1).gather(1, kept)
        return found


def _sum_error(n: int) -> float:
    """A bound of the relative error of a float32 sum of n numbers of one sign, in any order, and of its terms."""
    return (n + 32) * 2**-23


def _wide_error(n: int) -> float:
    """The same in float64, twice."""
    return (n + 32) * 2**-51


def _sorted_by(first: Tensor, second: Tensor) -> Tensor:
    """Positions in the order of `first`, then of `second`."""
    order = second.argsort(stable=True)
    return order[first[order].argsort(stable=True)]


def _in_order(query: Tensor, distance: Tensor, item: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kept pairs by query, distance and gallery position."""
    query, distance, item = query[kept], distance[kept], item[kept]
    order = _sorted_by(distance, item)
    order = order[query[order].argsort(stable=True)]
    return query[order], distance[order], item[order]


def _reduced(reach: Tensor, pairs: _Pairs, k: int) -> Tensor:
    """(b,) the reach, or the k-th smallest upper bound of the pairs where it is smaller."""
    order = _sorted_by(pairs.query, pairs.upper)
    counts = torch.bincount(pairs.query, minlength=len(reach))
    full = (counts >= k).nonzero().squeeze(1)
    kth = pairs.upper[order][(counts.cumsum(0) - counts)[full] + k - 1]
    reach = reach.clone()
    reach[full] = torch.fmin(reach[full], kth)
    return reach
