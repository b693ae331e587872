r"""The calibration of a model on held-out pairs: match probabilities, thresholds, abstention and conformal sets.

It has three parts. The probability of a random pair is a function of the distance (Platt) and of how rare matches are,
so it changes with the size of the gallery. The probability of a hit also depends on the nearest items of its query
(:class:`~sfumato.calibration.logits.ConditionalLogits`); searches show it. The guarantees (a wanted precision, a risk
among answered queries, a set that contains a match) count held-out queries by their scores (:class:`QueryScores`):
distances for sets, logits of hits for precision and risk, each half of the queries scored by the fit on the other.
docs/concepts/calibration.md derives them and states for which queries they hold. :class:`Scorer` is for galleries.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file as read_safetensors
from safetensors.numpy import save as safetensors_bytes

from sfumato.arrays import Array, as_numpy, like, sigmoid, smallest
from sfumato.calibration import query_scores
from sfumato.calibration.logits import N_NEAREST, REFERENCE_FEATURES, ConditionalLogits, PairLogits, ReferenceQueries
from sfumato.calibration.query_scores import QueryScores, answer_limit
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Direction
from sfumato.matching import match_logit

_VERSION = 2


@dataclass(frozen=True)
class DirectionCalibration:
    """The calibration for the queries of one direction in galleries of any size.

    Searches show :meth:`hit_probability`. :meth:`threshold`, :meth:`abstain_below` and :meth:`conformal_radius` are
    guarantees: they hold with a confidence of 0.9 over held-out sets, for new queries like the held-out ones.
    """

    pairs: PairLogits  # the probability of random pairs
    scores: QueryScores  # of held-out queries, by distances
    conditional: ConditionalLogits | None = None  # the logits of hits; None after a fit on too few queries
    hits: QueryScores | None = None  # the same by negated logits of hits; thresholds and abstention use these
    reference: ReferenceQueries | None = None  # what `conditional` reads; searches compute its features

    def prior_shift(self, n_gallery: int) -> float:
        """The shift of every logit in a gallery of another size, where matches are rarer or more frequent.

        The fraction of matches is that of the fit times (n_gallery / n of the fit)^(growth - 1), never above one half.
        """
        if n_gallery < 1:
            raise ValueError(f"Calibration: n_gallery must be at least 1, got {n_gallery}")
        rarer = (n_gallery / self.scores.n_gallery) ** (self.scores.growth - 1)
        fitted = self.pairs.match_fraction
        return self.pairs.shift(min(fitted * rarer, max(0.5, fitted)))

    def probability(self, distance: Array, *, n_gallery: int) -> Array:
        """Probability that a random pair at this distance matches, in a gallery of any size. (...) -> (...)."""
        d = as_numpy(distance, "distance", "Calibration")
        return like(sigmoid(self.pairs.logit(d) + self.prior_shift(n_gallery)).astype(d.dtype), distance)

    def hit_logit(self, distance: Array, nearest: Array, *, n_gallery: int, reference: Array | None = None) -> Array:
        """Logarithm of the odds of :meth:`hit_probability`, in float64."""
        logit = self.pairs.logit(as_numpy(distance, "distance", "Calibration"))
        if self.conditional is None:
            return like(logit + self.prior_shift(n_gallery), distance)
        of_nearest = self.pairs.logit(as_numpy(nearest, "nearest", "Calibration"))
        seen = None if reference is None else as_numpy(reference, "reference", "Calibration")
        return like(self.conditional.logit(logit, of_nearest, n_gallery, seen), distance)

    def hit_probability(
        self, distance: Array, nearest: Array, *, n_gallery: int, reference: Array | None = None
    ) -> Array:
        """Probability that a hit of a search matches its query, given the nearest items of the query.

        distance (..., c) of c hits of each query; nearest (..., k) distances of its nearest items, ascending, infinite
        where there is none, of the first N_NEAREST all that there are; reference (..., 2) features of each query by the
        reference queries, if there are any. Returns (..., c) probabilities of the dtype of distance, falling with it.
        """
        d = as_numpy(distance, "distance", "Calibration")
        logit = self.hit_logit(d, nearest, n_gallery=n_gallery, reference=reference)
        return like(sigmoid(logit).astype(d.dtype), distance)

    def threshold(self, precision: float, *, confidence: float = 0.9) -> float:
        """The match probability above which reported items have the wanted precision.

        It is a :meth:`hit_probability` if there are logits of hits, else that of a random pair in the gallery of the
        fit. The precision is a mean over queries, see :func:`~sfumato.calibration.query_scores.precision_limit`.
        """
        return self._probability_at(query_scores.precision_limit(self._certified, precision, confidence=confidence))

    def abstain_below(self, risk: float, *, confidence: float = 0.9, absent: float = 0.0) -> float:
        """The match probability of the closest item at or below which a query should not be answered.

        Of the answered queries at most the fraction `risk` has a closest item that is no match. `absent` is the
        expected fraction of queries without any match; with logits of hits the matches of these queries still count
        among their nearest items, so the guarantee is approximate.
        """
        return self._probability_at(answer_limit(self._certified, risk, confidence=confidence, absent=absent))

    def answered_fraction(self, risk: float, *, confidence: float = 0.9, absent: float = 0.0) -> float:
        """Fraction of the held-out queries that are answered at this risk; see :meth:`abstain_below`."""
        limit = answer_limit(self._certified, risk, confidence=confidence, absent=absent)
        return query_scores.answered_fraction(self._certified, limit, absent=absent)

    def abstains(
        self, nearest: Array, risk: float, *, n_gallery: int | None = None, reference: Array | None = None
    ) -> Array:
        """Which queries should not be answered: closest item at or below the probability of :meth:`abstain_below`.

        nearest (n, k) and reference (n, 2) as for :meth:`hit_probability`; (n,) distances of the closest item are
        enough without logits of hits. Returns (n,) bool, for a gallery of the size of the fit if n_gallery is None.
        """
        d, limit = as_numpy(nearest, "nearest", "Calibration"), answer_limit(self._certified, risk)
        if self.hits is not None:
            if d.ndim != 2:
                needed = f"(n, k) distances of the {N_NEAREST} nearest items of each query"
                raise ValueError(f"Calibration: this calibration needs {needed}, got {d.shape}")
            n = self.hits.n_gallery if n_gallery is None else n_gallery
            return like(-self.hit_logit(d[:, :1], d, n_gallery=n, reference=reference)[:, 0] >= limit, nearest)
        logit = self.pairs.logit(d if d.ndim == 1 else d[:, 0])
        shift = 0.0 if n_gallery is None else self.prior_shift(n_gallery)
        return like(logit + shift <= self.pairs.logit(np.array(limit)), nearest)

    def conformal_radius(self, alpha: float, *, contains: Literal["any", "all"] = "any") -> float:
        """Distance within which any match of a query, or all, lie with a probability of at least 1 - alpha.

        See :func:`~sfumato.calibration.query_scores.conformal_radius`.
        """
        return query_scores.conformal_radius(self.scores, alpha, contains=contains)

    @property
    def _certified(self) -> QueryScores:
        """The scores that precision and risk are certified with."""
        return self.scores if self.hits is None else self.hits

    def _probability_at(self, limit: float) -> float:
        value = np.array(limit)
        return float(self.pairs.probability(value) if self.hits is None else sigmoid(-value))


@dataclass(frozen=True)
class Calibration(PairLogits):
    """The calibration of a model's distances; make one with :meth:`fit` or :meth:`load`.

    Attributes:
        logit_scale, logit_bias: of the Platt probability sigmoid(logit_bias - logit_scale * distance).
        match_fraction: fraction of matches among the pairs of the fit.
        i2t, t2i: probabilities of hits and guarantees for the queries of either direction; None if there were no
            held-out queries.
        metadata: JSON values that were given to the fit.
    """

    i2t: DirectionCalibration | None = None
    t2i: DirectionCalibration | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        queries = [f"{name}: {len(found.scores.closest_match)} queries" for name, found in self.directions.items()]
        logit = f"logit {self.logit_bias:.4g} - {self.logit_scale:.4g} * distance"
        return f"Calibration({', '.join([logit, *queries])})"

    @classmethod
    def fit(
        cls,
        distance: Array,
        match: Array,
        *,
        i2t: QueryScores | None = None,
        t2i: QueryScores | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> "Calibration":
        """Fit on held-out pairs, never on those of training.

        Args:
            distance: of pairs, any shape; a tensor or an array.
            match: 0 and 1, the same shape.
            i2t, t2i: scores of held-out queries; without them there are only the fitted probabilities, and no
                guarantees.
            metadata: JSON values to keep with it.

        Returns:
            The calibration. The probability of a hit is that of a random pair.

        Raises:
            ValueError: see :func:`~sfumato.calibration.logits.fit_logits`.

        Example:
            >>> distance = np.array([[0.2, 1.0, 0.9], [1.1, 0.4, 0.3]])
            >>> match = np.array([[1, 0, 0], [0, 1, 0]])
            >>> calibration = Calibration.fit(distance, match, t2i=QueryScores.fit(distance, match))
            >>> round(calibration.of("t2i").conformal_radius(0.4), 6)
            0.4
        """
        pairs = PairLogits.of_pairs(distance, match)
        i2t_fit, t2i_fit = (None if scores is None else DirectionCalibration(pairs, scores) for scores in (i2t, t2i))
        about = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
        return cls(**vars(pairs), i2t=i2t_fit, t2i=t2i_fit, metadata=about)

    @property
    def directions(self) -> dict[Direction, DirectionCalibration]:
        """The directions that have held-out queries."""
        return {name: found for name in get_args(Direction) if (found := getattr(self, name)) is not None}

    def of(self, direction: Direction) -> DirectionCalibration:
        """The calibration for the queries of a direction.

        Args:
            direction: "t2i" if texts search among images.

        Returns:
            The one of :attr:`i2t` or :attr:`t2i`.

        Raises:
            ValueError: it has no held-out queries, or there is no such direction.
        """
        if direction not in get_args(Direction):
            raise ValueError(f"Calibration: unknown direction {direction!r}; known: {', '.join(get_args(Direction))}")
        if direction not in self.directions:
            way = "fit again on held-out pairs, a run's with: sfumato calibrate RUN"
            raise ValueError(f"Calibration: has no scores of held-out queries for {direction}; {way}")
        return self.directions[direction]

    def to_json(self) -> dict[str, Any]:
        """The calibration as plain values.

        Returns:
            JSON values, without NaN or infinities.
        """
        either = self.directions
        return {
            "version": _VERSION,
            "logit_scale": self.logit_scale,
            "logit_bias": self.logit_bias,
            "share_of_matches": self.match_fraction,
            "about": self.metadata,
            "conditional": {d: fit.conditional.to_json() for d, fit in either.items() if fit.conditional is not None},
            "hits": {d: fit.hits.to_json() for d, fit in either.items() if fit.hits is not None},
            "reference": {d: fit.reference.distance for d, fit in either.items() if fit.reference is not None},
            **{d: either[d].scores.to_json() if d in either else None for d in get_args(Direction)},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], tensors: Mapping[str, Array] | None = None) -> "Calibration":
        """Make a calibration from plain values.

        Args:
            values: output of :meth:`to_json`.
            tensors: output of :meth:`tensors`, if there are reference queries.

        Returns:
            The calibration.

        Raises:
            ValueError: a value is missing or has the wrong type, or another version wrote it.
        """
        try:
            if (version := values["version"]) != _VERSION:
                later = isinstance(version, int) and version > _VERSION
                what = "update sfumato" if later else "calibrate the run again, and build its indices again"
                wrote = "a later" if later else "an earlier"
                raise ValueError(f"version {version} is of {wrote} sfumato, this one reads {_VERSION}; {what}")
            scale, bias = float(values["logit_scale"]), float(values["logit_bias"])
            if not (scale > 0 and math.isfinite(scale) and math.isfinite(bias)):
                found = f"got {scale} and {bias}"
                raise ValueError(f"logit_scale must be positive and finite and logit_bias finite, {found}")
            if values.get("knots"):
                way = "calibrate the run again: sfumato calibrate RUN"
                raise ValueError(f"an isotonic fit of an earlier sfumato; {way}")
            reference = values["reference"]
            pairs = PairLogits(scale, bias, float(values["share_of_matches"]))
            directions: dict[str, Any] = {
                d: DirectionCalibration(
                    pairs,
                    QueryScores.from_json(values[d]),
                    ConditionalLogits.from_json(values["conditional"][d]) if d in values["conditional"] else None,
                    QueryScores.from_json(values["hits"][d]) if d in values["hits"] else None,
                    ReferenceQueries.of_tensors(tensors or {}, reference[d], d) if d in reference else None,
                )
                for d in get_args(Direction)
                if values[d] is not None
            }
            return cls(**vars(pairs), **directions, metadata=dict(values["about"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a calibration, or a damaged one ({error!r}); calibrate again") from error

    def tensors(self) -> dict[str, np.ndarray]:
        """The embeddings of the reference queries.

        Returns:
            "DIRECTION/mean" and, unless they are points, "DIRECTION/log_var" -> (b, d) float16.
        """
        return {
            f"{direction}/{name}": np.ascontiguousarray(getattr(fit.reference.embeddings, name), np.float16)
            for direction, fit in self.directions.items()
            if fit.reference is not None
            for name in ("mean", "log_var")
            if name == "mean" or not np.isneginf(fit.reference.embeddings.log_var).all()
        }

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically; reference queries into a file of the same name beside it, .safetensors.

        Args:
            path: the file; its folder must exist.
        """
        beside = Path(path).with_suffix(".safetensors")
        if tensors := self.tensors():
            write_atomically(beside, safetensors_bytes(tensors))
        else:
            beside.unlink(missing_ok=True)
        lines = [f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in self.to_json().items()]
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read a file of :meth:`save`.

        Args:
            path: the file.

        Returns:
            The calibration.

        Raises:
            ValueError: it is not a calibration, or its reference queries are missing; the message names the file.
        """
        beside = Path(path).with_suffix(".safetensors")
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            tensors = read_safetensors(beside) if isinstance(values, dict) and values.get("reference") else {}
            return cls.from_json(values, tensors)
        except (ValueError, SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True, eq=False)
class QueryContext:
    """What the probabilities of a query's hits depend on beside their own distances."""

    nearest: np.ndarray  # (..., k) distances of its nearest items, ascending, infinite where there are fewer
    reference: np.ndarray | None = None

    def __getitem__(self, index: int | np.ndarray) -> "QueryContext":
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
        return 1 if self.of_hits is None or self.of_hits.conditional is None else N_NEAREST

    @property
    def reference(self) -> ReferenceQueries | None:
        """The reference queries that its probabilities depend on."""
        return None if self.of_hits is None else self.of_hits.reference

    def context(
        self, distance: Array, queries: GaussianEmbedding, first: Callable[[Any], GaussianEmbedding]
    ) -> QueryContext:
        """What the other methods need to know of queries. distance (n, c), queries (n, d)."""
        closest, place = smallest(distance, self.n_nearest)
        nearest = np.full((len(closest), self.n_nearest), np.inf, closest.dtype)
        nearest[:, : closest.shape[1]] = closest
        if self.reference is None:
            return QueryContext(nearest)
        found = np.isfinite(nearest[:, 0])
        features = np.zeros((len(nearest), len(REFERENCE_FEATURES)))
        if found.any():
            items = first(place[:, 0] if place.shape[1] else np.zeros(len(place), np.int64))
            features[found] = as_numpy(self.reference.features(queries[found], items[found]))
        return QueryContext(nearest, features)

    def match_probability(self, distance: Array, n_gallery: int, context: QueryContext | None = None) -> Array:
        """Probability that items at these distances from a query match it. distance (..., c) -> (..., c).

        Given what else is known of the query it is that of a hit; else that of a random pair at such a distance.
        """
        if context is not None and self.n_nearest > 1 and self.of_hits is not None:
            n, reference = max(1, n_gallery), context.reference
            return self.of_hits.hit_probability(distance, context.nearest, n_gallery=n, reference=reference)
        d = as_numpy(distance)
        return like(sigmoid(self.pair_logit(d, n_gallery)).astype(d.dtype), distance)

    def pair_logit(self, distance: Array, n_gallery: int) -> Array:
        """Logit that a random pair at these distances is listed. distance (..., c) -> (..., c)."""
        return match_logit(distance, self.logit_scale, self.logit_bias + self.prior_shift(n_gallery))

    def radius(self, coverage: float) -> float:
        """Radius of the set that contains a match with a given probability."""
        if not 0 < coverage < 1:
            raise ValueError(f"search: coverage must be between 0 and 1, got {coverage}")
        return self._calibration_for("coverage").conformal_radius(1 - coverage)

    def check_risk(self, max_risk: float) -> None:
        """Raise the error that a search with this risk would raise."""
        self._calibration_for("abstention (max_risk)").abstain_below(max_risk)

    def abstains(self, context: QueryContext, max_risk: float, n_gallery: int) -> list[bool]:
        """The queries that should not be answered at a given risk."""
        calibration = self._calibration_for("abstention (max_risk)")
        n, found = max(1, n_gallery), np.isfinite(context.nearest[:, 0])
        some, abstained = context[found], np.ones(len(found), bool)
        abstained[found] = calibration.abstains(some.nearest, max_risk, n_gallery=n, reference=some.reference)
        return abstained.tolist()

    def _calibration_for(self, wanted: str) -> DirectionCalibration:
        if self.calibration is None:
            way = "calibrate the model on held-out pairs (sfumato calibrate RUN) and build the index again"
            raise ValueError(f"search: {wanted} needs a calibration, and this index has none; {way}")
        return self.calibration.of(self.direction)
