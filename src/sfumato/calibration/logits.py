r"""Logits of matches: of a random pair by its distance (Platt), and of a hit by the nearest items of its query.

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

import numpy as np

from sfumato.arrays import Array, as_numpy, like, log_sum_exp, sigmoid
from sfumato.calibration.logistic import Floats, deviations, log_losses, newton
from sfumato.distances import get_distance
from sfumato.distances.distance import Distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Direction
from sfumato.matching import match_logit


def fit_logistic(
    features: np.ndarray,
    target: np.ndarray,
    *,
    weight: np.ndarray | None = None,
    penalty: float = 0.0,
    offset: np.ndarray | None = None,
) -> tuple[Floats, float]:
    r"""The weights w and the bias b that minimise the mean log loss of sigmoid(x w + b) plus penalty/2 ||w||^2.

    Use standardised features: the penalty treats all alike. With an offset the logits are offset + x w + b, and the
    bias is penalised, too: the offset is where a strong penalty leaves them.

    features (k, f), target (k,), weight (k,), offset (k,).
    """
    x, y = features.astype(np.float64), target.astype(np.float64)
    w = np.ones_like(y) if weight is None else weight.astype(np.float64)
    start = np.zeros_like(y) if offset is None else offset.astype(np.float64)
    if x.ndim != 2 or y.shape != x.shape[:1] or w.shape != y.shape or start.shape != y.shape:
        given = f"features {x.shape}, target {y.shape}, weight {w.shape} and offset {start.shape}"
        raise ValueError(f"fit_logistic: got {given}; expected (k, f), (k,), (k,) and (k,)")
    if not w.sum() > 0:
        raise ValueError("fit_logistic: the weights of the rows add up to 0")
    columns, weights = np.column_stack([x, np.ones_like(y)]), w / w.sum()
    ridge, first = np.full(columns.shape[1], penalty), np.zeros(columns.shape[1])
    if offset is None:
        ridge[-1], first[-1] = 0, log_odds((weights @ y + 1e-6) / (1 + 2e-6))
    found = newton(columns, y, weights, ridge, first, centre=np.zeros_like(first), offset=start)
    return found[:-1], float(found[-1])


def fit_logits(distance: Array, match: Array) -> tuple[float, float]:
    """The (logit_scale, logit_bias) that maximise the likelihood of known matches (Platt scaling).

    A convex problem in two numbers, solved in float64. Fit on held-out pairs, never on the training pairs.
    The probabilities are valid for pairs from the same distribution; with another fraction of matches they need a
    shift.

    Args:
        distance: (k,) or any shape, a tensor or an array; flattened.
        match: labels in [0, 1] of the same shape.

    Returns:
        (logit_scale > 0, logit_bias).

    Raises:
        ValueError: shapes differ, values are not finite, there are only matches or only non-matches, or matches are on
            average not closer than non-matches, so that no positive scale fits.

    Paper: Platt, "Probabilistic outputs for support vector machines", 1999.
    """
    who = "fit_logits"
    distance = as_numpy(distance, "distance", who).astype(np.float64).ravel()
    match = as_numpy(match, "match", who).astype(np.float64).ravel()
    if distance.shape != match.shape:
        raise ValueError(f"fit_logits: got {distance.size} distances and {match.size} labels; give one for each")
    if not np.isfinite(distance).all() or not ((match >= 0) & (match <= 1)).all():
        raise ValueError("fit_logits: distances must be finite and match must lie in [0, 1]")
    if match.sum() == 0 or (1 - match).sum() == 0:
        raise ValueError("fit_logits: needs matching and non-matching pairs, got only one kind")
    means = np.average(distance, weights=match), np.average(distance, weights=1 - match)
    if not means[0] < means[1]:
        found = f"matches (mean distance {means[0]:.4g}) are not closer than non-matches ({means[1]:.4g})"
        raise ValueError(f"fit_logits: {found}; train the model further")
    # Standardised distances make the problem well scaled; a weak prior keeps separable data finite.
    centre, deviation = distance.mean(), float(deviations(distance[:, None])[0])
    z = (distance - centre) / deviation
    slope, intercept = fit_logistic(-z[:, None], match, penalty=2e-9)
    scale = float(slope[0] / deviation)
    bias = intercept + scale * float(centre)
    if not scale > 0:
        reason = "the distances do not separate matches from non-matches"
        raise ValueError(f"fit_logits: the best scale is not positive; {reason}")
    return scale, bias


def log_odds(p: float) -> float:
    """Logarithm of the odds of a probability."""
    return math.log(p) - math.log1p(-p)


@dataclass(frozen=True)
class PairLogits:
    """The probability of a random pair by its distance: the part of a :class:`Calibration` without directions."""

    logit_scale: float
    logit_bias: float
    match_fraction: float  # fraction of matches among the pairs of the fit

    @classmethod
    def of_pairs(cls, distance: Array, match: Array) -> "PairLogits":
        """Fit on pairs, any shape; match is 0 and 1."""
        distance, match = as_numpy(distance, "distance", "Calibration"), as_numpy(match, "match", "Calibration")
        return PairLogits(*fit_logits(distance, match), float(match.mean(dtype=np.float64)))

    def shift(self, match_fraction: float) -> float:
        """The shift of every logit where matches are rarer or more frequent than in the fit."""
        if not 0 < match_fraction < 1:
            raise ValueError(f"Calibration: match_fraction must be between 0 and 1, got {match_fraction}")
        return log_odds(match_fraction) - log_odds(self.match_fraction)

    def logit(self, distance: Array, *, match_fraction: float | None = None) -> Array:
        """Logarithm of the odds of :meth:`probability`, strictly falling with the distance. Returns (...)."""
        shift = 0.0 if match_fraction is None else self.shift(match_fraction)
        d = as_numpy(distance, "distance", "Calibration").astype(np.float64)
        return like(match_logit(d, self.logit_scale, self.logit_bias + shift), distance)

    def probability(self, distance: Array, *, match_fraction: float | None = None) -> Array:
        """Probability that a random pair at this distance matches. Returns (...)."""
        d = as_numpy(distance, "distance", "Calibration")
        return like(sigmoid(self.logit(d, match_fraction=match_fraction)).astype(d.dtype), distance)


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

    embeddings: GaussianEmbedding  # (b, d) float16
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
        chosen = np.sort(np.random.default_rng(seed).permutation(queries.n)[:N_REFERENCE])
        return cls(queries[chosen].numpy().to(np.float16), distance, direction)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Array], distance: str, direction: Direction) -> "ReferenceQueries":
        """From :meth:`~sfumato.calibration.calibrator.Calibration.tensors`."""
        mean, log_var = as_numpy(tensors[f"{direction}/mean"]), tensors.get(f"{direction}/log_var")
        queries = GaussianEmbedding.point(mean) if log_var is None else GaussianEmbedding(mean, as_numpy(log_var))
        return cls(queries, distance, direction)

    @cached_property
    def _wide(self) -> GaussianEmbedding:
        """In float32, as distances need them, when the first is asked for: most searches ask for none."""
        return self.embeddings.to(np.float32)

    @cached_property
    def _oriented(self) -> Distance:
        return get_distance(self.distance).for_direction(self.direction)

    def features(self, queries: GaussianEmbedding, first: GaussianEmbedding) -> Array:
        """What the reference queries say about queries and their first hits. queries (n, d), first (n, d) -> (n, 2)."""
        return like(np.stack([self.hub(first), self.isolation(queries)], axis=1), queries.mean)

    def hub(self, items: GaussianEmbedding) -> Floats:
        """The mean distance of items from the reference queries closest to them: small for an item that many ask for.

        items (m, d) -> (m,).
        """
        return self._closest(items, lambda some: self._oriented.matrix(self._wide, some).T)

    def isolation(self, queries: GaussianEmbedding) -> Floats:
        """The mean distance of queries from the reference queries closest to them. queries (n, d) -> (n,)."""
        return self._closest(queries, lambda some: self._oriented.matrix(some, self._wide))

    def _closest(self, some: GaussianEmbedding, distance: Callable[[GaussianEmbedding], np.ndarray]) -> Floats:
        """(n,) mean of the N_CLOSE smallest of the (n, b) distances, block by block."""
        found = np.empty(some.n)
        for part in (slice(start, start + _BLOCK) for start in range(0, some.n, _BLOCK)):
            close = np.partition(distance(some[part].numpy()), N_CLOSE - 1, axis=1)[:, :N_CLOSE]
            found[part] = close.mean(1, dtype=np.float64)
        return found


def no_reference_error(who: str) -> ValueError:
    """The error of a calibration with reference queries that is used without them."""
    way = "give reference=calibration.of(direction).reference.features(queries, first hits)"
    return ValueError(f"{who}: this calibration reads reference queries; {way}")


@dataclass(frozen=True)
class NearestItems:
    """The nearest items of held-out queries in one gallery."""

    logit: np.ndarray  # (q, k) match logits of the k nearest items of each query, descending
    match: np.ndarray  # (q, k) 0 and 1
    n_gallery: int  # size of the gallery
    reference: np.ndarray | None = None


Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(k, 1 + f) another logit and features, (k,) labels and (k,) weights of hits."""


@dataclass(frozen=True)
class LinearLogit:
    """A logit that is linear in another one and in features, which are limited to their range in the fit."""

    slope: float  # factor of the other logit, positive
    intercept: float
    weights: tuple[float, ...]  # one for each feature
    low: tuple[float, ...]
    high: tuple[float, ...]

    def bias(self, features: np.ndarray, n_limited: int) -> Floats:
        """What the features add; only the first are limited. features (..., f) -> (..., 1)."""
        limited = features[..., :n_limited].clip(self.low[:n_limited], self.high[:n_limited])
        found: Floats = self.intercept + np.concatenate([limited, features[..., n_limited:]], axis=-1) @ self.weights
        return found[..., None]

    def of(self, logit: np.ndarray, features: np.ndarray) -> Floats:
        """The logit from another one and features, all limited. logit (...), features (..., f) -> (...)."""
        return self.slope * logit + self.bias(features, features.shape[-1])[..., 0]

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
            features = query_features(items.logit, items.n_gallery)
            x = np.column_stack([items.logit.ravel(), features.repeat(k, axis=0)])
            rank = 1 / np.arange(1, k + 1)
            weights = np.tile(rank / rank.sum() / q / sizes.count(items.n_gallery), q)
            rows.append((x, items.match.ravel(), weights))
        if (fitted := fit_linear_logit(rows)) is None:
            raise ValueError("ConditionalLogits: needs matches and other items among the nearest, got only one kind")
        if not fitted[0] > 0:
            raise ValueError(f"ConditionalLogits: the slope of the match logit must be positive, got {fitted[0]:.4g}")
        plain = cls(*fitted, population, n_queries, tuple(sorted(set(sizes))))
        return replace(plain, first=FirstHit.fit(plain, found))

    def logit(
        self, match_logit: np.ndarray, nearest: np.ndarray, n_gallery: int, reference: np.ndarray | None = None
    ) -> Floats:
        """The logit of hits. match_logit (..., c), nearest (..., k), reference (..., 2) -> (..., c)."""
        features = query_features(nearest[..., :N_NEAREST], n_gallery)
        bias = self.bias(features, len(FEATURES) - 1)
        logit: Floats = self.slope * match_logit + bias
        if self.first is None:
            return logit
        if reference is None:
            raise no_reference_error("ConditionalLogits.logit")
        closest = nearest[..., :1]
        first = self.first.logit(self.slope * closest + bias, reference)
        # The others stay as they are, but below the first.
        return np.where(match_logit >= closest, first, np.minimum(logit, first))

    def first_hit_loss(self, galleries: Iterable[NearestItems]) -> float:
        """Mean log loss of the first hits of other queries, all galleries with the same weight."""
        losses = []
        for items in galleries:
            if len(items.logit):
                logit = self.logit(items.logit[:, :1], items.logit, items.n_gallery, items.reference)[:, 0]
                losses.append(float(log_losses(logit, items.match[:, 0]).mean()))
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
            weights = np.full(len(logit), 1 / len(logit) / sizes.count(items.n_gallery))
            rows.append((np.column_stack([logit, items.reference]), items.match[:, 0], weights))
        fitted = fit_linear_logit(rows)
        return cls(*fitted) if fitted is not None and fitted[0] > 0 else None

    def logit(self, by_nearest: np.ndarray, reference: np.ndarray) -> Floats:
        """The logit of the first hit. by_nearest (..., 1), reference (..., 2) -> (..., 1)."""
        return self.slope * by_nearest + self.bias(reference, len(REFERENCE_FEATURES))


_Numbers = tuple[float, ...]


def fit_linear_logit(rows: list[Rows]) -> tuple[float, float, _Numbers, _Numbers, _Numbers] | None:
    """The numbers of a :class:`LinearLogit`; None without two kinds of hits. Rows that are not finite do not count."""
    x, y, w = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    finite = np.isfinite(x).all(1)
    x, y, w = x[finite], y[finite], w[finite]
    if len(y) == 0 or y.min() == y.max():
        return None
    centre, deviation = x.mean(0), deviations(x)
    standard, bias = fit_logistic((x - centre) / deviation, y, weight=w, penalty=_PENALTY)
    scaled = standard / deviation
    weights, low, high = (tuple(values[1:].tolist()) for values in (scaled, x.min(0), x.max(0)))
    return float(scaled[0]), bias - float(scaled @ centre), weights, low, high


FEATURES = ("log sum", "first", "gap", "log expected", "log expected squared", "log sum squared", "log size")
"""What :func:`query_features` computes, in this order."""


def query_features(nearest: np.ndarray, n_gallery: int) -> Floats:
    """What the nearest items say about a query. nearest (..., k) -> (..., 7)."""
    log_sum, first = log_sum_exp(nearest), nearest[..., 0]
    second = nearest[..., 1] if nearest.shape[-1] > 1 else np.full_like(first, -np.inf)
    log_expected = np.log(np.maximum(sigmoid(nearest).sum(-1), 1e-300))
    with np.errstate(invalid="ignore"):  # Both may be infinite, of a query without an item.
        gap = first - second
    size = np.full_like(first, math.log(max(1, n_gallery)))
    return np.stack([log_sum, first, gap, log_expected, log_expected**2, log_sum**2, size], axis=-1)
