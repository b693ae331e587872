"""Scorer turns distances into probabilities, sets and abstentions, for galleries of any size and in any store."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.conditional import REFERENCE_FEATURES, ReferenceQueries
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Direction
from sfumato.matching import match_logit


@dataclass(frozen=True)
class MatchEstimate:
    """The expected number of matches of a query in a gallery."""

    expected: float  # the sum of the match probabilities over the gallery, or an unbiased estimate of it
    low: float  # lower end of the interval that holds the sum in about 95 of 100 samples; equal to `expected` if exact
    high: float  # its upper end

    @classmethod
    def exact(cls, total: float) -> "MatchEstimate":
        """An exact sum."""
        return cls(total, total, total)

    @classmethod
    def of(cls, near: Tensor, sample: Tensor, outside: Tensor, n: int) -> "list[MatchEstimate]":
        """Estimate sums from their largest terms and a sample of the others.

        near (b, h), sample (b, s), outside (b, s).
        """
        first, s, others = near.double().sum(1), outside.sum(1), n - (near > 0).sum(1)
        rest = torch.where(outside, sample, 0).double()
        mean = rest.sum(1) / s.clamp_min(1)
        variance = torch.where(outside, rest - mean.unsqueeze(1), 0).square().sum(1) / (s - 1).clamp_min(1)
        error = 1.96 * others * (variance * (1 - s / others.clamp_min(1)).clamp_min(0) / s.clamp_min(1)).sqrt()
        expected = first + others * mean
        low = torch.maximum(first, expected - error)
        return [
            cls(*values) for values in zip(expected.tolist(), low.tolist(), (expected + error).tolist(), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class QueryContext:
    """What the probabilities of a query's hits depend on beside their own distances."""

    nearest: Tensor  # (..., k) distances of its nearest items, ascending, infinite where there are fewer
    reference: Tensor | None = None

    def __getitem__(self, index: int | Tensor) -> "QueryContext":
        return QueryContext(self.nearest[index], None if self.reference is None else self.reference[index])


@dataclass(frozen=True)
class Scorer:
    """Computes match probabilities, conformal sets and abstention from distances, for galleries of any size."""

    logit_scale: float  # a of the match logit b - a * distance, without a correction for the size of the gallery
    logit_bias: float  # b of the match logit
    calibration: Calibration | None = None
    direction: Direction = "t2i"  # "t2i" if the queries are texts and the items images

    @property
    def of_hits(self) -> DirectionCalibration | None:
        """The calibration for queries of its direction."""
        return None if self.calibration is None else self.calibration.directions.get(self.direction)

    def prior_shift(self, n_gallery: int) -> float:
        """Correction of the logits for the size of the gallery."""
        return 0.0 if self.of_hits is None else self.of_hits.prior_shift(max(1, n_gallery))

    @property
    def n_nearest(self) -> int:
        """Number of nearest items of a query that its probabilities depend on; 1 if they depend on distances alone."""
        return 1 if self.of_hits is None else self.of_hits.n_nearest

    @property
    def reference(self) -> ReferenceQueries | None:
        """The reference queries that its probabilities depend on."""
        return None if self.of_hits is None else self.of_hits.reference

    def context(
        self, distance: Tensor, queries: GaussianEmbedding, first: Callable[[Tensor], GaussianEmbedding]
    ) -> QueryContext:
        """What the other methods need to know of queries. distance (n, c), queries (n, d)."""
        nearest, place = distance.topk(min(self.n_nearest, distance.shape[-1]), largest=False)
        nearest = functional.pad(nearest, (0, self.n_nearest - nearest.shape[-1]), value=torch.inf)
        if self.reference is None:
            return QueryContext(nearest)
        found = nearest[:, 0].isfinite()
        features = torch.zeros(len(nearest), len(REFERENCE_FEATURES), dtype=torch.float64)
        if found.any():
            items = first(place[:, 0] if place.shape[1] else place.new_zeros(len(place)))
            features[found] = self.reference.features(queries[found], items[found])
        return QueryContext(nearest, features)

    def match_probability(self, distance: Tensor, n_gallery: int, context: QueryContext | None = None) -> Tensor:
        """Probability that items at these distances from a query match it. distance (..., c) -> (..., c).

        Given what else is known of the query it is that of a hit; else that of a random pair at such a distance.
        """
        if context is not None and self.n_nearest > 1 and self.of_hits is not None:
            n, reference = max(1, n_gallery), context.reference
            return self.of_hits.hit_probability(distance, context.nearest, n_gallery=n, reference=reference)
        return torch.sigmoid(self.pair_logit(distance, n_gallery)).to(distance.dtype)

    def pair_logit(self, distance: Tensor, n_gallery: int) -> Tensor:
        """Logit that a random pair at these distances is listed. distance (..., c) -> (..., c)."""
        shift = self.prior_shift(n_gallery)
        if self.calibration is None or self.calibration.knots is None:
            return match_logit(distance, self.logit_scale, self.logit_bias + shift)
        return self.calibration.logit(distance) + shift

    def radius(self, coverage: float) -> float:
        """Radius of the set that contains a match with a given probability."""
        if not 0 < coverage < 1:
            raise ValueError(f"search: coverage must be between 0 and 1, got {coverage}")
        return self._calibration_for("coverage").conformal_radius(1 - coverage)

    def check_risk(self, max_risk: float) -> None:
        """Raise the error that a search with this risk would raise."""
        nearest = torch.zeros(1, self.n_nearest)
        reference = None if self.reference is None else torch.zeros(1, len(REFERENCE_FEATURES))
        self.abstains(QueryContext(nearest, reference), max_risk, 1)

    def abstains(self, context: QueryContext, max_risk: float, n_gallery: int) -> list[bool]:
        """The queries that should not be answered at a given risk."""
        calibration = self._calibration_for("abstention (max_risk)")
        found = context.nearest[:, 0].isfinite()
        answered = torch.zeros_like(found)
        answered[found] = ~calibration.abstains(
            context.nearest[found],
            max_risk,
            n_gallery=max(1, n_gallery),
            reference=None if context.reference is None else context.reference[found],
        )
        return (~answered).tolist()

    def _calibration_for(self, wanted: str) -> DirectionCalibration:
        if self.calibration is None:
            raise ValueError(
                f"search: {wanted} needs a calibration, and this index has none; calibrate the model on held-out pairs"
                " (sfumato calibrate RUN) and build the index again"
            )
        return self.calibration.of(self.direction)
