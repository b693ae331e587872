r"""The calibration of a model on held-out pairs: match probabilities, thresholds, abstention and conformal sets.

It has three parts. The probability of a random pair is a function of the distance (Platt or isotonic) and of how rare
matches are, so it changes with the size of the gallery. The probability of a hit also depends on the nearest items of
its query (:class:`~sfumato.calibration.conditional.ConditionalLogits`); searches show it. The guarantees (a wanted
precision, a risk among answered queries, a set that contains a match) count held-out queries by their scores
(:class:`QueryScores`): distances for sets, logits of hits for precision and risk, each half of the queries scored by
the fit on the other. docs/concepts/calibration.md derives them and states for which queries they hold. The inputs are
distances and labels of any source.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as read_safetensors
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from sfumato.arrays import Array, as_tensor
from sfumato.calibration.abstention import answer_limit, answered_fraction, conformal_radius, precision_limit
from sfumato.calibration.conditional import N_NEAREST, ConditionalLogits
from sfumato.calibration.platt import Knots, fit_knots, fit_logits, knots_logit, log_odds
from sfumato.calibration.query_scores import QueryScores
from sfumato.calibration.reference import ReferenceQueries
from sfumato.direction import Direction
from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import match_logit

METHODS = ("platt", "isotonic")
"""Ways to fit the probability."""

_VERSION = 2
_FIT_AGAIN = "; fit again on held-out pairs, a run's with: sfumato calibrate RUN"


@dataclass(frozen=True)
class Calibration:
    """The calibration of a model's distances; make one with :meth:`fit` or :meth:`load`.

    Attributes:
        logit_scale, logit_bias: of the Platt probability sigmoid(logit_bias - logit_scale * distance).
        match_fraction: fraction of matches among the pairs of the fit; None in files of older versions.
        knots: of an isotonic fit, (distance, logit) by ascending distance; the logit is linear between them, and falls
            with slope -logit_scale outside of them. None is Platt.
        i2t, t2i: scores of held-out queries in either direction; None if there were none.
        conditional: by direction, the logits of hits given the nearest items of their query; without those of older
            versions, and of directions with too few held-out queries.
        hits: by direction, the scores of held-out queries by negated logits of hits in place of distances, for the
            directions of `conditional`. Precision and risk are certified with them; sets use distances, because these
            stay as they are when the gallery grows.
        reference: by direction, the reference queries that `conditional` reads; searches compute their features.
        metadata: JSON values that were given to the fit.
    """

    logit_scale: float
    logit_bias: float
    match_fraction: float | None = None
    knots: Knots | None = None
    i2t: QueryScores | None = None
    t2i: QueryScores | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    conditional: Mapping[Direction, ConditionalLogits] = field(default_factory=dict)
    hits: Mapping[Direction, QueryScores] = field(default_factory=dict)
    reference: Mapping[Direction, ReferenceQueries] = field(default_factory=dict)

    def __repr__(self) -> str:
        held_out = {name: getattr(self, name) for name in get_args(Direction)}
        queries = [f"{name}: {len(found.closest_match)} queries" for name, found in held_out.items() if found]
        method = "platt" if self.knots is None else "isotonic"
        logit = f"logit {self.logit_bias:.4g} - {self.logit_scale:.4g} * distance"
        return f"Calibration({', '.join([method, logit, *queries])})"

    @classmethod
    def fit(
        cls,
        distance: Array,
        match: Array,
        *,
        method: str = "platt",
        i2t: QueryScores | None = None,
        t2i: QueryScores | None = None,
        conditional: Mapping[Direction, ConditionalLogits] | None = None,
        hits: Mapping[Direction, QueryScores] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> "Calibration":
        """Fit on held-out pairs, never on those of training.

        Args:
            distance: of pairs, any shape; a tensor or an array.
            match: 0 and 1, the same shape.
            method: "platt" fits two numbers. "isotonic" fits any decreasing curve; it needs thousands of matches and
                the extra `calibration`.
            i2t, t2i: scores of held-out queries; without them there are only the fitted probabilities, and no
                guarantees.
            conditional, hits: see :class:`Calibration`, for the same directions; without them the probability of a hit
                is that of a random pair.
            metadata: JSON values to keep with it.

        Returns:
            The calibration.

        Raises:
            ValueError: see :func:`~sfumato.calibration.platt.fit_logits`; or an unknown method.
            UserError: isotonic without scikit-learn.

        Example:
            >>> distance = torch.tensor([[0.2, 1.0, 0.9], [1.1, 0.4, 0.3]])
            >>> match = torch.tensor([[1, 0, 0], [0, 1, 0]])
            >>> calibration = Calibration.fit(distance, match, t2i=QueryScores.fit(distance, match))
            >>> round(calibration.conformal_radius(0.4), 6)
            0.4
        """
        if method not in METHODS:
            raise ValueError(f"Calibration: unknown method {method!r}; known: {', '.join(METHODS)}")
        distance, match = as_tensor(distance, "distance", "Calibration"), as_tensor(match, "match", "Calibration")
        scale, bias = fit_logits(distance, match)
        fraction = float(match.double().mean())
        knots = fit_knots(distance, match) if method == "isotonic" else None
        notes = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
        return cls(scale, bias, fraction, knots, i2t, t2i, notes, dict(conditional or {}), dict(hits or {}))

    def logit(
        self,
        distance: Array,
        *,
        n_gallery: int | None = None,
        match_fraction: float | None = None,
        direction: Direction = "t2i",
    ) -> Tensor:
        """Logarithm of the odds of a match; strictly falling with the distance.

        Args:
            distance, n_gallery, match_fraction, direction: see :meth:`probability`.

        Returns:
            (...) logits of the shape of distance, in float64.

        Raises:
            ValueError: see :meth:`prior_shift`.
        """
        shift = self.prior_shift(n_gallery=n_gallery, match_fraction=match_fraction, direction=direction)
        d = as_tensor(distance, "distance", "Calibration").detach().double()
        if self.knots is None:
            return match_logit(d, self.logit_scale, self.logit_bias + shift)
        return knots_logit(d, self.knots, self.logit_scale) + shift

    def probability(
        self,
        distance: Array,
        *,
        n_gallery: int | None = None,
        match_fraction: float | None = None,
        direction: Direction = "t2i",
    ) -> Tensor:
        """Probability that a pair at this distance matches.

        Args:
            distance: any shape, a tensor or an array.
            n_gallery: size of the gallery of the item: in a larger gallery a match at the same distance is less
                probable. None uses the size of the fit.
            match_fraction: fraction of matches among the pairs, if it is known, in place of n_gallery.
            direction: of the query; with n_gallery.

        Returns:
            (...) probabilities of the shape and dtype of distance.

        Raises:
            ValueError: see :meth:`prior_shift`.
        """
        distance = as_tensor(distance, "distance", "Calibration")
        logit = self.logit(distance, n_gallery=n_gallery, match_fraction=match_fraction, direction=direction)
        return torch.sigmoid(logit).to(distance.dtype)

    def hit_probability(
        self,
        distance: Array,
        nearest: Array,
        *,
        n_gallery: int,
        direction: Direction = "t2i",
        reference: Array | None = None,
    ) -> Tensor:
        """Probability that a hit of a search matches its query, given the nearest items of the query.

        Args:
            distance: (..., c) distances of c hits of each query, a tensor or an array, as those below.
            nearest: (..., k) distances of its nearest items, ascending, infinite where there is none. Of the first
                :data:`~sfumato.calibration.conditional.N_NEAREST` items all that there are.
            n_gallery: number of items in the gallery.
            direction: of the query.
            reference: (..., 2) features of each query by the :attr:`reference` queries of this direction, if it has
                any.

        Returns:
            (..., c) probabilities of the dtype of distance, falling with the distance. Without logits given the nearest
            items for this direction, those of :meth:`probability`.

        Raises:
            ValueError: the features of the reference queries are missing; or see :meth:`prior_shift`.
        """
        distance = as_tensor(distance, "distance", "Calibration")
        logit = self.hit_logit(distance, nearest, n_gallery=n_gallery, direction=direction, reference=reference)
        return torch.sigmoid(logit).to(distance.dtype)

    def hit_logit(
        self,
        distance: Array,
        nearest: Array,
        *,
        n_gallery: int,
        direction: Direction = "t2i",
        reference: Array | None = None,
    ) -> Tensor:
        """Logarithm of the odds of :meth:`hit_probability`.

        Args:
            distance, nearest, n_gallery, direction, reference: see :meth:`hit_probability`.

        Returns:
            (..., c) logits in float64.

        Raises:
            ValueError: see :meth:`prior_shift`.
        """
        if (conditional := self.conditional.get(direction)) is None:
            return self.logit(distance, n_gallery=n_gallery, direction=direction)
        seen = None if reference is None else as_tensor(reference, "reference", "Calibration")
        return conditional.logit(self.logit(distance), self.logit(nearest), n_gallery, seen)

    def prior_shift(
        self, *, n_gallery: int | None = None, match_fraction: float | None = None, direction: Direction = "t2i"
    ) -> float:
        """The shift of every logit when matches are rarer or more frequent than in the fit.

            logit(match_fraction) - logit(match_fraction of the fit)

        With n_gallery = m the fraction is that of the fit times (m / m_fit)^(growth - 1), never above one half.

        Args:
            n_gallery, match_fraction, direction: see :meth:`probability`.

        Returns:
            The shift; 0 if neither n_gallery nor match_fraction is given.

        Raises:
            ValueError: both are given, match_fraction is outside of (0, 1), n_gallery < 1, or the calibration does not
                know the fraction of its fit.
        """
        if n_gallery is None and match_fraction is None:
            return 0.0
        if n_gallery is not None and match_fraction is not None:
            raise ValueError("Calibration: give either n_gallery or match_fraction, not both")
        if self.match_fraction is None:
            raise ValueError(f"Calibration: the fraction of matches of its fit is missing{_FIT_AGAIN}")
        if match_fraction is None:
            scores = self.scores(direction)
            if n_gallery is None or n_gallery < 1:
                raise ValueError(f"Calibration: n_gallery must be at least 1, got {n_gallery}")
            rarer = (n_gallery / scores.n_gallery) ** (scores.growth - 1)
            match_fraction = min(self.match_fraction * rarer, max(0.5, self.match_fraction))
        if not 0 < match_fraction < 1:
            raise ValueError(f"Calibration: match_fraction must be between 0 and 1, got {match_fraction}")
        return log_odds(match_fraction) - log_odds(self.match_fraction)

    def scores(self, direction: Direction) -> QueryScores:
        """The held-out scores of a direction.

        Args:
            direction: of the queries.

        Returns:
            The scores.

        Raises:
            ValueError: there are none, or there is no such direction.
        """
        if direction not in get_args(Direction):
            raise ValueError(f"Calibration: unknown direction {direction!r}; known: {', '.join(get_args(Direction))}")
        scores: QueryScores | None = getattr(self, direction)
        if scores is None:
            raise ValueError(f"Calibration: has no scores of held-out queries for {direction}{_FIT_AGAIN}")
        return scores

    def threshold(self, precision: float, *, direction: Direction = "t2i", confidence: float = 0.9) -> float:
        """The match probability above which reported items have the wanted precision.

        Args:
            precision: wanted mean precision of the queries with an item above the threshold, in (0, 1); see
                :func:`~sfumato.calibration.abstention.precision_limit`.
            direction: of the queries.
            confidence: lower limit of the probability over held-out sets that the precision holds on new queries of the
                same kind.

        Returns:
            A probability in (0, 1); report items above it. It is a :meth:`hit_probability` if the calibration has
            logits given the nearest items, else a :meth:`probability` for the gallery of the fit.

        Raises:
            ValueError: no limit can be certified, or an argument is outside of (0, 1).
        """
        limit = precision_limit(self._guaranteed(direction), precision, confidence=confidence)
        return self._probability_at(limit, direction)

    def abstain_below(
        self,
        risk: float,
        *,
        direction: Direction = "t2i",
        confidence: float = 0.9,
        absent: float = 0.0,
        seed: int = 0,
    ) -> float:
        """The match probability of the closest item at or below which a query should not be answered.

        Args:
            risk: largest fraction of answered queries whose closest item is no match, in (0, 1).
            direction: of the queries.
            confidence: lower limit of the probability over held-out sets that the risk holds on new queries of the same
                kind.
            absent: expected fraction of queries without any match in the gallery. With logits of hits the matches of
                these queries still count among their nearest items, so the guarantee is approximate.
            seed: seed of the random choice of held-out queries that represent these, see
                :func:`~sfumato.calibration.abstention.answer_limit`.

        Returns:
            A probability in (0, 1), in the scale of :meth:`threshold`.

        Raises:
            ValueError: no limit can be certified, or an argument is out of range.
        """
        limit = answer_limit(self._guaranteed(direction), risk, confidence=confidence, absent=absent, seed=seed)
        return self._probability_at(limit, direction)

    def abstains(
        self,
        nearest: Array,
        risk: float,
        *,
        n_gallery: int | None = None,
        direction: Direction = "t2i",
        confidence: float = 0.9,
        absent: float = 0.0,
        seed: int = 0,
        reference: Array | None = None,
    ) -> Tensor:
        """Which queries should not be answered: closest item at or below the probability of :meth:`abstain_below`.

        Args:
            nearest: (n, k) distances of the nearest items of each query, a tensor or an array, see
                :meth:`hit_probability`; (n,) those of the closest item are enough without logits given the nearest
                items.
            n_gallery: size of the gallery; that of the fit if None. In a larger gallery the same distance has a lower
                probability.
            risk, direction, confidence, absent, seed: see :meth:`abstain_below`.
            reference: (n, 2), see :meth:`hit_probability`.

        Returns:
            (n,) bool.

        Raises:
            ValueError: see :meth:`abstain_below`.
        """
        scores = self._guaranteed(direction)
        nearest = as_tensor(nearest, "nearest", "Calibration")
        limit = answer_limit(scores, risk, confidence=confidence, absent=absent, seed=seed)
        if direction in self.hits:
            if nearest.ndim != 2:
                raise ValueError(
                    f"Calibration: this calibration needs (n, k) distances of the {N_NEAREST} nearest items of each"
                    f" query, got {tuple(nearest.shape)}"
                )
            n = scores.n_gallery if n_gallery is None else n_gallery
            logit = self.hit_logit(nearest[:, :1], nearest, n_gallery=n, direction=direction, reference=reference)
            return -logit[:, 0] >= limit
        closest = nearest if nearest.ndim == 1 else nearest[:, 0]
        worst = self.logit(torch.tensor(limit, dtype=torch.float64))
        return self.logit(closest, n_gallery=n_gallery, direction=direction) <= worst.to(closest.device)

    def answered_fraction(
        self,
        risk: float,
        *,
        direction: Direction = "t2i",
        confidence: float = 0.9,
        absent: float = 0.0,
        seed: int = 0,
    ) -> float:
        """Fraction of the held-out queries that are answered at this risk.

        Args:
            risk, direction, confidence, absent, seed: see :meth:`abstain_below`.

        Returns:
            A number in [0, 1].

        Raises:
            ValueError: see :meth:`abstain_below`.
        """
        scores = self._guaranteed(direction)
        limit = answer_limit(scores, risk, confidence=confidence, absent=absent, seed=seed)
        return answered_fraction(scores, limit, absent=absent, seed=seed)

    def conformal_radius(
        self, alpha: float, *, direction: Direction = "t2i", contains: Literal["any", "all"] = "any"
    ) -> float:
        """Distance within which a query's match lies with a probability of at least 1 - alpha.

        Args:
            alpha: fraction of queries whose set may miss, in (0, 1).
            direction: of the queries.
            contains: "any" for a set that contains at least one of the query's matches; "all" for all of them.

        Returns:
            The radius; the set contains every item within it, see
            :func:`~sfumato.calibration.abstention.conformal_radius`.

        Raises:
            ValueError: alpha is outside of (0, 1), or contains is neither.
        """
        return conformal_radius(self.scores(direction), alpha, contains=contains)

    def to_json(self) -> dict[str, Any]:
        """The calibration as plain values.

        Returns:
            JSON values, without NaN or infinities.
        """
        return {
            "version": _VERSION,
            "logit_scale": self.logit_scale,
            "logit_bias": self.logit_bias,
            "share_of_matches": self.match_fraction,
            "knots": None if self.knots is None else [list(knot) for knot in self.knots],
            "about": self.metadata,
            "conditional": {key: value.to_json() for key, value in self.conditional.items()},
            "hits": {key: value.to_json() for key, value in self.hits.items()},
            "reference": {key: value.distance for key, value in self.reference.items()},
            "i2t": None if self.i2t is None else self.i2t.to_json(),
            "t2i": None if self.t2i is None else self.t2i.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> "Calibration":
        """Make a calibration from plain values; those of older versions have only a scale and a bias.

        Args:
            values: output of :meth:`to_json`.
            tensors: output of :meth:`tensors`, if there are reference queries.

        Returns:
            The calibration.

        Raises:
            ValueError: a value is missing or has the wrong type, or a newer version wrote it.
        """
        try:
            version, knots = values.get("version", 0), values.get("knots")
            found, hits = values.get("conditional", {}), values.get("hits", {})
            if version > _VERSION:
                raise ValueError(
                    f"version {version} was written by a newer sfumato; upgrade sfumato: this one reads"
                    f" versions up to {_VERSION}"
                )
            scale, bias = float(values["logit_scale"]), float(values["logit_bias"])
            if not (scale > 0 and math.isfinite(scale) and math.isfinite(bias)):
                raise ValueError(
                    f"logit_scale must be positive and finite and logit_bias finite, got {scale} and {bias}"
                )
            i2t, t2i = (QueryScores.from_json(v) if (v := values.get(d)) else None for d in get_args(Direction))
            return cls(
                scale,
                bias,
                values.get("share_of_matches"),
                None if knots is None else tuple((float(x), float(y)) for x, y in knots),
                i2t,
                t2i,
                dict(values.get("about", {})),
                {d: ConditionalLogits.from_json(found[d]) for d in get_args(Direction) if d in found},
                {d: QueryScores.from_json(hits[d]) for d in get_args(Direction) if d in hits},
                _reference_queries(values.get("reference", {}), tensors or {}),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a calibration, or a damaged one ({error!r}); calibrate again") from error

    def tensors(self) -> dict[str, Tensor]:
        """The embeddings of the reference queries.

        Returns:
            "DIRECTION/mean" and, unless they are points, "DIRECTION/log_var" -> (b, d) float16.
        """
        return {
            f"{direction}/{name}": getattr(queries.embeddings, name).to(torch.float16).contiguous()
            for direction, queries in self.reference.items()
            for name in ("mean", "log_var")
            if name == "mean" or not queries.embeddings.log_var.isneginf().all()
        }

    def to_text(self) -> str:
        """:meth:`to_json` as text.

        Returns:
            JSON with one field a line.
        """
        lines = [f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in self.to_json().items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_text`, atomically; reference queries into a file of the same name beside it, .safetensors.

        Args:
            path: the file; its folder must exist.
        """
        beside = Path(path).with_suffix(".safetensors")
        if self.reference:
            write_atomically(beside, safetensors_bytes(self.tensors()))
        else:
            beside.unlink(missing_ok=True)
        write_atomically(path, self.to_text())

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read a file of :meth:`save`, or the calibration.json of an older version.

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

    def _guaranteed(self, direction: Direction) -> QueryScores:
        """The scores that precision and risk are certified with."""
        return self.hits[direction] if direction in self.hits else self.scores(direction)

    def _probability_at(self, limit: float, direction: Direction) -> float:
        value = torch.tensor(limit, dtype=torch.float64)
        return float(torch.sigmoid(-value) if direction in self.hits else self.probability(value))


def _reference_queries(
    distances: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[Direction, ReferenceQueries]:
    found: dict[Direction, ReferenceQueries] = {}
    for direction in get_args(Direction):
        if direction in distances:
            mean, log_var = tensors[f"{direction}/mean"].float(), tensors.get(f"{direction}/log_var")
            queries = GaussianEmbedding.point(mean) if log_var is None else GaussianEmbedding(mean, log_var.float())
            found[direction] = ReferenceQueries(queries, distances[direction], direction)
    return found
