r"""Match probabilities that hold at the hit: what the nearest items of a query say about each other.

The probability of a match at one distance differs between queries. A text with one close image and nothing beside it
has found its match; a text with a hundred images at that distance has found a hundred matches or none. So the logit of
a hit is linear in the match logit z of its distance, with a positive slope, and has a bias of the query:

    logit = slope * z + bias,    bias = intercept + weights . features(z of the nearest items, size of the gallery)

The order of the hits stays that of their distances, and each query costs a constant time beside its search.
docs/concepts/calibration.md derives the features; docs/experiments has what they are worth.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sfumato.calibration.logistic import fit_logistic

N_NEAREST = 50
"""Number of a query's nearest items that its bias is computed from."""

Population = Literal["planted", "independent"]
"""Which queries a gallery is asked: "planted" have a match in it, "independent" were written without looking at it."""

_MIN_QUERIES = 50
_PENALTY = 1e-6


@dataclass(frozen=True)
class NearestItems:
    """The nearest items of held-out queries in one gallery.

    Attributes:
        logit: (q, k) match logits of the k nearest items of each query, descending.
        match: (q, k) 0 and 1.
        n_gallery: size of the gallery.
    """

    logit: Tensor
    match: Tensor
    n_gallery: int


@dataclass(frozen=True)
class ConditionalLogits:
    """The logit of a hit given the nearest items of its query; make one with :meth:`fit`.

    Attributes:
        slope: factor of the match logit of the distance, positive.
        intercept: of the bias.
        weights: one for each feature of :func:`query_features`.
        low, high: range of each feature in the fit; values outside of it are set to its ends, but for the size of the
            gallery.
        population: the queries that it holds for.
        n_queries: number of held-out queries of the fit.
        n_galleries: sizes of the galleries of the fit, ascending.
    """

    slope: float
    intercept: float
    weights: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    population: Population
    n_queries: int
    n_galleries: tuple[int, ...]

    @classmethod
    def fit(
        cls, galleries: Iterable[NearestItems], *, n_queries: int, population: Population = "planted"
    ) -> "ConditionalLogits":
        """Fit on the nearest items of held-out queries in galleries of several sizes.

        All sizes have the same weight, all galleries of one size too, and all queries of a gallery. Within a query the
        item of rank r has the weight 1 / r, because the first hits are what is read.

        Args:
            galleries: at least one.
            n_queries: number of distinct queries among them.
            population: the queries that they are; kept.

        Returns:
            The logits.

        Raises:
            ValueError: fewer than 50 queries, only matches or only other items, or a slope that is not positive.
        """
        found = [items for items in galleries if len(items.logit)]
        if n_queries < _MIN_QUERIES or not found:
            raise ValueError(f"ConditionalLogits: needs {_MIN_QUERIES} held-out queries, got {n_queries}")
        sizes = [items.n_gallery for items in found]
        rows, targets, weights = [], [], []
        for items in found:
            q, k = items.logit.shape
            features = query_features(items.logit.double(), items.n_gallery)
            rows.append(torch.cat([items.logit.double().unsqueeze(2), features.unsqueeze(1).expand(-1, k, -1)], dim=2))
            targets.append(items.match.double())
            rank = torch.arange(1, k + 1, dtype=torch.float64).reciprocal()
            weights.append((rank / rank.sum() / q / sizes.count(items.n_gallery)).expand(q, -1))
        x, y, w = (torch.cat([part.flatten(0, 1) for part in parts]) for parts in (rows, targets, weights))
        if y.min() == y.max():
            raise ValueError("ConditionalLogits: needs matches and other items among the nearest, got only one kind")
        finite = x.isfinite().all(1)
        x, y, w = x[finite], y[finite], w[finite]
        low, high = x.amin(0), x.amax(0)
        centre, deviation = x.mean(0), x.std(0, correction=0).clamp_min(1e-9)
        standard, bias = fit_logistic((x - centre) / deviation, y, weight=w, penalty=_PENALTY)
        scaled = standard / deviation
        slope, intercept = float(scaled[0]), bias - float(scaled @ centre)
        if not slope > 0:
            raise ValueError(f"ConditionalLogits: the slope of the match logit must be positive, got {slope:.4g}")
        return cls(
            slope,
            intercept,
            tuple(scaled[1:].tolist()),
            tuple(low[1:].tolist()),
            tuple(high[1:].tolist()),
            population,
            n_queries,
            tuple(sorted(set(sizes))),
        )

    def logit(self, match_logit: Tensor, nearest: Tensor, n_gallery: int) -> Tensor:
        """The logit of hits.

        Args:
            match_logit: (..., c) match logits of c hits of each query.
            nearest: (..., k) match logits of its nearest items in the gallery, descending; of the first 50 of these
                all that there are, -inf in place of missing ones.
            n_gallery: size of the gallery.

        Returns:
            (..., c) logits in float64, in the order of the match logits.
        """
        features = query_features(nearest.double()[..., :N_NEAREST], n_gallery)
        low, high, weights = (features.new_tensor(values) for values in (self.low, self.high, self.weights))
        inside = torch.cat([features.clamp(low, high)[..., :-1], features[..., -1:]], dim=-1)
        bias = self.intercept + inside @ weights
        return self.slope * match_logit.double() + bias.unsqueeze(-1)

    def to_json(self) -> dict[str, Any]:
        """The logits as plain values.

        Returns:
            JSON values.
        """
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ConditionalLogits":
        """Make the logits from plain values.

        Args:
            values: output of :meth:`to_json`.

        Returns:
            The logits.

        Raises:
            ValueError: a value is missing or does not fit.
        """
        read: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        found = cls(**read)
        numbers = (found.slope, found.intercept, *found.weights, *found.low, *found.high)
        if {len(found.weights), len(found.low), len(found.high)} != {len(FEATURES)} or not (
            all(map(math.isfinite, numbers)) and found.slope > 0 and found.population in get_args(Population)
        ):
            raise ValueError("the logits given the nearest items are damaged; calibrate again")
        return found


FEATURES = ("log sum", "first", "gap", "log expected", "log expected squared", "log sum squared", "log size")
"""What :func:`query_features` computes, in this order."""


def query_features(nearest: Tensor, n_gallery: int) -> Tensor:
    """What the nearest items say about a query.

    Args:
        nearest: (..., k) match logits of the nearest items, descending; -inf where there is none.
        n_gallery: size of the gallery.

    Returns:
        (..., 7) the logarithm of the sum of exp(z), the first z, its lead over the second, the logarithm of the sum of
        sigmoid(z), the squares of the two sums, and the logarithm of the size. A missing second item leaves the lead
        infinite.
    """
    log_sum, first = nearest.logsumexp(-1), nearest[..., 0]
    second = nearest[..., 1] if nearest.shape[-1] > 1 else torch.full_like(first, -math.inf)
    log_expected = torch.sigmoid(nearest).sum(-1).clamp_min(1e-300).log()
    size = torch.full_like(first, math.log(max(1, n_gallery)))
    return torch.stack(
        [log_sum, first, first - second, log_expected, log_expected.square(), log_sum.square(), size], dim=-1
    )
