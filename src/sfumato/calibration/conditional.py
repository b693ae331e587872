r"""Match probabilities that hold at the hit: what the nearest items of a query say about each other.

The probability of a match at one distance differs between queries. A text with one close image and nothing beside it
has found its match; a text with a hundred images at that distance has found a hundred matches or none. So the logit of
a hit is linear in the match logit z of its distance, with a positive slope, and has a bias of the query:

    logit = slope * z + bias,    bias = intercept + weights . features(z of the nearest items, size of the gallery)

The order of the hits stays that of their distances, and each query costs a constant time beside its search.
Some items lie close to many queries, and are often the first hit without a match (hubs). Some queries lie far from all
that a model has seen. :class:`ReferenceQueries`, a few thousand of the training, show both, at the cost of two small
products of matrices for each search; :class:`FirstHit` reads them.

docs/concepts/calibration.md derives the features; docs/results/probabilities.md has what they are worth.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.calibration.platt import fit_logistic
from sfumato.distances import get_distance
from sfumato.distances.distance import Distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Direction

N_NEAREST = 50
"""Number of a query's nearest items that its bias is computed from."""

Population = Literal["planted", "independent"]
"""Which queries a gallery is asked: "planted" have a match in it, "independent" were written without looking at it."""

_MIN_QUERIES = 50
_PENALTY = 1e-6


N_REFERENCE = 2_000
"""Largest number of reference queries of a direction."""

_BLOCK = 1024

N_CLOSE = 10
"""Number of closest reference queries whose mean distance counts."""

REFERENCE_FEATURES = ("hub", "isolation")
"""What :meth:`ReferenceQueries.features` computes, in this order."""


@dataclass(frozen=True, eq=False)
class ReferenceQueries:
    """Held-out queries to compare with; later queries are others. Make them with :meth:`of`."""

    embeddings: GaussianEmbedding  # (b, d) float32, rounded to float16
    distance: str  # name in DISTANCES
    direction: Direction  # of the queries, "t2i" if they are texts

    @classmethod
    def of(
        cls, queries: GaussianEmbedding, distance: str, direction: Direction, *, seed: int = 0
    ) -> "ReferenceQueries":
        """Keep at most N_REFERENCE of some queries. queries (n, d)."""
        if queries.n < N_CLOSE:
            raise ValueError(f"ReferenceQueries: needs at least {N_CLOSE} queries, got {queries.n}")
        if get_distance(distance).sampled:
            raise ValueError(f"ReferenceQueries: {distance} is sampled, so features would differ between searches")
        chosen = torch.randperm(queries.n, generator=torch.Generator().manual_seed(seed))[:N_REFERENCE].sort().values
        return cls(queries[chosen].detach().to("cpu").to(torch.float16).to(torch.float32), distance, direction)

    @cached_property
    def _oriented(self) -> Distance:
        return get_distance(self.distance).for_direction(self.direction)

    def features(self, queries: GaussianEmbedding, first: GaussianEmbedding) -> Tensor:
        """What the reference queries say about queries and their first hits. queries (n, d), first (n, d) -> (n, 2)."""
        return torch.stack([self.hub(first), self.isolation(queries)], dim=1)

    def hub(self, items: GaussianEmbedding) -> Tensor:
        """The mean distance of items from the reference queries closest to them: small for an item that many ask for.

        items (m, d) -> (m,).
        """
        return self._closest(items, lambda some: self._oriented.matrix(self.embeddings, some).T)

    def isolation(self, queries: GaussianEmbedding) -> Tensor:
        """The mean distance of queries from the reference queries closest to them. queries (n, d) -> (n,)."""
        return self._closest(queries, lambda some: self._oriented.matrix(some, self.embeddings))

    def _closest(self, some: GaussianEmbedding, distance: Callable[[GaussianEmbedding], Tensor]) -> Tensor:
        """(n,) mean of the N_CLOSE smallest of the (n, b) distances, block by block."""
        parts = [
            distance(some[start : start + _BLOCK]).topk(N_CLOSE, dim=1, largest=False).values.double().mean(1)
            for start in range(0, some.n, _BLOCK)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def no_reference_error(who: str) -> ValueError:
    """The error of a calibration with reference queries that is used without them."""
    return ValueError(
        f"{who}: this calibration reads reference queries; give"
        " reference=calibration.of(direction).reference.features(queries, first hits)"
    )


@dataclass(frozen=True)
class NearestItems:
    """The nearest items of held-out queries in one gallery."""

    logit: Tensor  # (q, k) match logits of the k nearest items of each query, descending
    match: Tensor  # (q, k) 0 and 1
    n_gallery: int  # size of the gallery
    reference: Tensor | None = None


Rows = tuple[Tensor, Tensor, Tensor]
"""(k, 1 + f) another logit and features, (k,) labels and (k,) weights of hits."""


@dataclass(frozen=True)
class LinearLogit:
    """A logit that is linear in another one and in features, which are limited to their range in the fit."""

    slope: float  # factor of the other logit, positive
    intercept: float
    weights: tuple[float, ...]  # one for each feature
    low: tuple[float, ...]
    high: tuple[float, ...]

    def bias(self, features: Tensor, n_limited: int) -> Tensor:
        """What the features add; only the first are limited. features (..., f) -> (..., 1)."""
        low, high, weights = (features.new_tensor(values) for values in (self.low, self.high, self.weights))
        inside = torch.cat([features.clamp(low, high)[..., :n_limited], features[..., n_limited:]], dim=-1)
        return (self.intercept + inside @ weights).unsqueeze(-1)

    def of(self, logit: Tensor, features: Tensor) -> Tensor:
        """The logit from another one and features, all limited. logit (...), features (..., f) -> (...)."""
        return self.slope * logit + self.bias(features, features.shape[-1]).squeeze(-1)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make it from plain values."""
        return cls(**_tuples(values))

    def is_sound(self, n: int) -> bool:
        """Whether it has n features and all numbers are such as a fit gives."""
        numbers = (self.slope, self.intercept, *self.weights, *self.low, *self.high)
        sizes = {len(self.weights), len(self.low), len(self.high)}
        return sizes == {n} and all(map(math.isfinite, numbers)) and self.slope > 0


@dataclass(frozen=True)
class ConditionalLogits(LinearLogit):
    """The logit of a hit given the nearest items of its query, by :func:`query_features`; make one with :meth:`fit`."""

    population: Population  # the queries that it holds for
    n_queries: int  # number of held-out queries of the fit
    n_galleries: tuple[int, ...]  # sizes of the galleries of the fit, ascending
    first: "FirstHit | None" = None  # what reference queries change about the first hit; None if the fit had none

    @classmethod
    def fit(
        cls, galleries: Iterable[NearestItems], *, n_queries: int, population: Population = "planted"
    ) -> "ConditionalLogits":
        """Fit on the nearest items of held-out queries in galleries of several sizes.

        All sizes have the same weight, all galleries of one size too, and all queries of a gallery. Within a query the
        item of rank r has the weight 1 / r, because the first hits are what is read.
        """
        found = [items for items in galleries if len(items.logit)]
        if n_queries < _MIN_QUERIES or not found:
            raise ValueError(f"ConditionalLogits: needs {_MIN_QUERIES} held-out queries, got {n_queries}")
        sizes = [items.n_gallery for items in found]
        rows: list[Rows] = []
        for items in found:
            q, k = items.logit.shape
            logit = items.logit.double()
            features = query_features(logit, items.n_gallery).unsqueeze(1).expand(-1, k, -1)
            rank = torch.arange(1, k + 1, dtype=torch.float64).reciprocal()
            weights = (rank / rank.sum() / q / sizes.count(items.n_gallery)).repeat(q)
            x = torch.cat([logit.unsqueeze(2), features], dim=2)
            rows.append((x.flatten(0, 1), items.match.double().flatten(), weights))
        if (fitted := fit_linear_logit(rows)) is None:
            raise ValueError("ConditionalLogits: needs matches and other items among the nearest, got only one kind")
        if not fitted[0] > 0:
            raise ValueError(f"ConditionalLogits: the slope of the match logit must be positive, got {fitted[0]:.4g}")
        plain = cls(*fitted, population, n_queries, tuple(sorted(set(sizes))))
        return replace(plain, first=FirstHit.fit(plain, found))

    def logit(self, match_logit: Tensor, nearest: Tensor, n_gallery: int, reference: Tensor | None = None) -> Tensor:
        """The logit of hits. match_logit (..., c), nearest (..., k), reference (..., 2) -> (..., c)."""
        features = query_features(nearest.double()[..., :N_NEAREST], n_gallery)
        bias = self.bias(features, len(FEATURES) - 1)
        logit = self.slope * match_logit.double() + bias
        if self.first is None:
            return logit
        if reference is None:
            raise no_reference_error("ConditionalLogits.logit")
        closest = nearest[..., :1].double()
        first = self.first.logit(self.slope * closest + bias, reference)
        # The others stay as they are, but below the first.
        return torch.where(match_logit.double() >= closest, first, torch.minimum(logit, first))

    def first_hit_loss(self, galleries: Iterable[NearestItems]) -> float:
        """Mean log loss of the first hits of other queries, all galleries with the same weight."""
        losses = []
        for items in galleries:
            if len(items.logit):
                logit = self.logit(items.logit[:, :1], items.logit, items.n_gallery, items.reference)[:, 0]
                target = items.match[:, 0].double()
                losses.append(float(functional.binary_cross_entropy_with_logits(logit, target)))
        return sum(losses) / len(losses)

    def to_json(self) -> dict[str, Any]:
        """The logits as plain values."""
        return vars(self) | {"first": None if self.first is None else vars(self.first)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ConditionalLogits":
        """Make the logits from plain values."""
        read = _tuples(values)
        first = None if read["first"] is None else FirstHit.from_json(read["first"])
        found = cls(**(read | {"first": first}))
        sound = found.is_sound(len(FEATURES)) and (first is None or first.is_sound(len(REFERENCE_FEATURES)))
        if not sound or found.population not in get_args(Population):
            raise ValueError("the logits given the nearest items are damaged; calibrate again")
        return found


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


@dataclass(frozen=True)
class FirstHit(LinearLogit):
    """The logit of the first hit given what reference queries say of it and of the query: REFERENCE_FEATURES."""

    @classmethod
    def fit(cls, by_nearest: ConditionalLogits, galleries: Sequence[NearestItems]) -> "FirstHit | None":
        """Fit on the first hits, all sizes of the gallery with the same weight."""
        sizes = [items.n_gallery for items in galleries]
        rows: list[Rows] = []
        for items in galleries:
            if items.reference is None:
                return None
            logit = by_nearest.logit(items.logit[:, :1], items.logit, items.n_gallery)
            weights = torch.full((len(logit),), 1 / len(logit) / sizes.count(items.n_gallery), dtype=torch.float64)
            rows.append((torch.cat([logit, items.reference.double()], dim=1), items.match[:, 0].double(), weights))
        fitted = fit_linear_logit(rows)
        return cls(*fitted) if fitted is not None and fitted[0] > 0 else None

    def logit(self, by_nearest: Tensor, reference: Tensor) -> Tensor:
        """The logit of the first hit. by_nearest (..., 1), reference (..., 2) -> (..., 1)."""
        return self.slope * by_nearest + self.bias(reference.to(by_nearest), len(REFERENCE_FEATURES))


_Numbers = tuple[float, ...]


def fit_linear_logit(rows: list[Rows]) -> tuple[float, float, _Numbers, _Numbers, _Numbers] | None:
    """The numbers of a :class:`LinearLogit`; None without two kinds of hits. Rows that are not finite do not count."""
    x, y, w = (torch.cat(parts) for parts in zip(*rows, strict=True))
    finite = x.isfinite().all(1)
    x, y, w = x[finite], y[finite], w[finite]
    if len(y) == 0 or y.min() == y.max():
        return None
    centre, deviation = x.mean(0), x.std(0, correction=0).clamp_min(1e-9)
    standard, bias = fit_logistic((x - centre) / deviation, y, weight=w, penalty=_PENALTY)
    scaled = standard / deviation
    weights, low, high = (tuple(values[1:].tolist()) for values in (scaled, x.amin(0), x.amax(0)))
    return float(scaled[0]), bias - float(scaled @ centre), weights, low, high


FEATURES = ("log sum", "first", "gap", "log expected", "log expected squared", "log sum squared", "log size")
"""What :func:`query_features` computes, in this order."""


def query_features(nearest: Tensor, n_gallery: int) -> Tensor:
    """What the nearest items say about a query. nearest (..., k) -> (..., 7)."""
    log_sum, first = nearest.logsumexp(-1), nearest[..., 0]
    second = nearest[..., 1] if nearest.shape[-1] > 1 else torch.full_like(first, -math.inf)
    log_expected = torch.sigmoid(nearest).sum(-1).clamp_min(1e-300).log()
    size = torch.full_like(first, math.log(max(1, n_gallery)))
    return torch.stack(
        [log_sum, first, first - second, log_expected, log_expected.square(), log_sum.square(), size], dim=-1
    )
