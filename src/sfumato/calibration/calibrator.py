r"""From distances to promises: match probabilities, thresholds, abstention and conformal sets, fitted on held-out pairs.

Two parts. The probability of a match is a function of the distance (Platt or isotonic) and of how rare matches are, so it moves with
the size of the gallery. The promises stand on the scores of single held-out queries (:class:`QueryScores`) and on nothing that was
fitted: a wanted precision, a risk among answered queries, a set that contains a match. docs/concepts/calibration.md derives them and says of which
queries they hold. This module knows distances and labels, and not where they come from.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sfumato.calibration.platt import fit_logits
from sfumato.direction import Direction
from sfumato.errors import UserError
from sfumato.files import write_atomically
from sfumato.matching import match_logit
from sfumato.metrics.reliability import binomial_tail, mean_loss_p_value

METHODS = ("platt", "isotonic")
"""Ways to fit the probability."""

N_STEPS = 20
"""Limits that are tried for a precision or a risk, at equal steps of the share of answered queries."""

_VERSION = 1


@dataclass(frozen=True)
class QueryScores:
    """What held-out queries of one direction found in a gallery; the numbers that promises are made of.

    Attributes:
        n_gallery: number of items m of the gallery.
        n_left_out: queries without a match in it, which no search can answer; not among the following.
        matches_per_query: mean number of true matches R.
        growth: exponent g of how R grows with the gallery, R ~ m^g: 0 if a larger gallery brings no further matches of a query.
        closest_match, farthest_match: (q,) distance of each query to its closest and its farthest true match.
        closest_other: (q,) distance to the closest item that is no match; infinite if all are.
        precision: (N_STEPS,) for each of :attr:`limits` the mean, over the queries with an item below it, of the share of true
            matches among the items below it.
    """

    n_gallery: int
    n_left_out: int
    matches_per_query: float
    growth: float
    closest_match: tuple[float, ...]
    farthest_match: tuple[float, ...]
    closest_other: tuple[float, ...]
    precision: tuple[float, ...]

    @classmethod
    def fit(cls, distance: Tensor, match: Tensor, *, growth: float | None = None) -> "QueryScores":
        """From all distances between some queries and a gallery.

        Args:
            distance: (q, m) smaller is closer; kept in float32.
            match: (q, m) bool, or 0 and 1.
            growth: see :class:`QueryScores`; None measures it by halving the gallery in expectation.

        Raises:
            ValueError: shapes differ, a distance is not finite, labels are not 0 and 1, or no query has a match.
        """
        return cls.from_blocks(lambda: [(distance, match)], growth=growth)

    @classmethod
    def from_blocks(
        cls, blocks: Callable[[], Iterable[tuple[Tensor, Tensor]]], *, growth: float | None = None
    ) -> "QueryScores":
        """:meth:`fit` for distances that do not fit into memory.

        Args:
            blocks: called twice; gives (distance, match) of a few queries at a time, always to the whole gallery.
            growth: see :meth:`fit`.
        """
        parts = [_scores_of(*_checked(distance, match)) for distance, match in blocks()]
        if not parts:
            raise ValueError("QueryScores: got no queries")
        sizes = {m for m, _ in parts}
        if len(sizes) > 1:
            raise ValueError(
                f"QueryScores: blocks have galleries of {sorted(sizes)} items; they must be of one gallery"
            )
        every = np.concatenate([scores for _, scores in parts], axis=1)
        count, kept = every[0], every[:, every[0] > 0]
        if not kept.shape[1]:
            raise ValueError("QueryScores: no query has a match in the gallery")
        m = sizes.pop()
        limits = _limits(np.minimum(kept[1], kept[3]))
        answered, total = np.zeros(len(limits)), np.zeros(len(limits))
        for distance, match in blocks():
            distance, match = _checked(distance, match)
            has = match.any(1)
            a, t = _precision_sums(distance[has], match[has], limits)
            answered, total = answered + a, total + t
        return cls(
            n_gallery=m,
            n_left_out=int((count == 0).sum()),
            matches_per_query=float(kept[0].mean()),
            growth=growth_by_halving(kept[0], m) if growth is None else float(growth),
            closest_match=tuple(kept[1].tolist()),
            farthest_match=tuple(kept[2].tolist()),
            closest_other=tuple(kept[3].tolist()),
            precision=tuple((total / np.maximum(answered, 1)).tolist()),
        )

    @cached_property
    def nearest(self) -> np.ndarray:
        """(q,) distance of each query to its closest item."""
        return np.minimum(self.closest_match, self.closest_other)

    @cached_property
    def limits(self) -> np.ndarray:
        """(N_STEPS,) ascending distances that are tried as limits: quantiles of :attr:`nearest`, the last one its largest."""
        return _limits(self.nearest)

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinite distances become null."""
        values = {name: getattr(self, name) for name in _PLAIN}
        return values | {name: [_shortest(x) for x in getattr(self, name)] for name in _PER_QUERY}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "QueryScores":
        """What :meth:`to_json` gave, to the bit."""
        read: dict[str, Any] = {name: values[name] for name in _PLAIN}
        read["precision"] = tuple(values["precision"])
        for name in _PER_QUERY:
            read[name] = tuple(math.inf if x is None else float(np.float32(x)) for x in values[name])
        return cls(**read)


@dataclass(frozen=True)
class Calibration:
    """How far distances can be trusted. Make one with :meth:`fit` or :meth:`load`.

    Attributes:
        logit_scale, logit_bias: of the Platt probability sigmoid(logit_bias - logit_scale * distance).
        share: of matches among the pairs that these were fitted on; None in files of older versions.
        knots: of an isotonic fit, (distance, logit) by ascending distance; the logit is linear between them, and falls with slope
            -logit_scale outside of them. None is Platt.
        i2t, t2i: scores of held-out queries in either direction; None if there were none.
        about: JSON values of whoever fitted it.
    """

    logit_scale: float
    logit_bias: float
    share: float | None = None
    knots: tuple[tuple[float, float], ...] | None = None
    i2t: QueryScores | None = None
    t2i: QueryScores | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        distance: Tensor,
        match: Tensor,
        *,
        method: str = "platt",
        i2t: QueryScores | None = None,
        t2i: QueryScores | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> "Calibration":
        """Fit on held-out pairs, never on those of training.

        Args:
            distance: of pairs, any shape.
            match: 0 and 1, the same shape.
            method: "platt", two numbers. "isotonic", any falling curve, wants thousands of matches and the extra `calibration`.
            i2t, t2i: scores of held-out queries; without them there are probabilities as fitted, and no promises.
            about: JSON values to keep with it.

        Raises:
            ValueError: see :func:`~sfumato.calibration.platt.fit_logits`; or an unknown method.
            UserError: isotonic without scikit-learn.

        Example:
            >>> distance = torch.tensor([[0.2, 1.0, 0.9], [1.1, 0.4, 0.3]])
            >>> match = torch.tensor([[1, 0, 0], [0, 1, 0]])
            >>> Calibration.fit(distance, match, t2i=QueryScores.fit(distance, match)).conformal_radius(0.4)
            0.4000000059604645
        """
        if method not in METHODS:
            raise ValueError(f"Calibration: unknown method {method!r}; known: {', '.join(METHODS)}")
        scale, bias = fit_logits(distance, match)
        share = float(match.double().mean())
        knots = _isotonic_knots(distance, match) if method == "isotonic" else None
        notes = json.loads(json.dumps(dict(about or {}), allow_nan=False))
        return cls(scale, bias, share, knots, i2t, t2i, notes)

    def logit(
        self,
        distance: Tensor,
        *,
        n_gallery: int | None = None,
        share: float | None = None,
        direction: Direction = "t2i",
    ) -> Tensor:
        """Logarithm of the odds of a match, in float64, of the shape of distance; strictly falling.

        Args:
            distance, n_gallery, share, direction: see :meth:`probability`.
        """
        shift = self.prior_shift(n_gallery=n_gallery, share=share, direction=direction)
        d = distance.detach().double()
        if self.knots is None:
            return match_logit(d, self.logit_scale, self.logit_bias + shift)
        x, y = (np.array(values) for values in zip(*self.knots, strict=True))
        inside = d.clamp(x[0], x[-1])
        values = torch.as_tensor(np.interp(inside.cpu().numpy(), x, y)).to(d.device)
        return values - self.logit_scale * (d - inside) + shift

    def probability(
        self,
        distance: Tensor,
        *,
        n_gallery: int | None = None,
        share: float | None = None,
        direction: Direction = "t2i",
    ) -> Tensor:
        """Probability that a pair at this distance matches.

        Args:
            distance: any shape.
            n_gallery: size of the gallery that the item is taken from: the larger, the rarer a match at the same distance. None is
                that of the fit.
            share: of matches among the pairs, if it is known, in place of n_gallery.
            direction: of the query; with n_gallery.

        Returns:
            (...) probabilities of the shape and dtype of distance.

        Raises:
            ValueError: see :meth:`prior_shift`.
        """
        logit = self.logit(distance, n_gallery=n_gallery, share=share, direction=direction)
        return torch.sigmoid(logit).to(distance.dtype)

    def prior_shift(
        self, *, n_gallery: int | None = None, share: float | None = None, direction: Direction = "t2i"
    ) -> float:
        """What is added to every logit because matches are rarer or commoner than in the fit: logit(share) - logit(share of the fit).

        With n_gallery = m the share is that of the fit times (m / m_fit)^(growth - 1), never above one half.

        Args:
            n_gallery, share, direction: see :meth:`probability`; 0 if neither is given.

        Raises:
            ValueError: both are given, share is outside of (0, 1), n_gallery < 1, or the calibration does not know its own share.
        """
        if n_gallery is None and share is None:
            return 0.0
        if n_gallery is not None and share is not None:
            raise ValueError(
                "Calibration: give either n_gallery or share, the size of the gallery or the share of matches"
            )
        if self.share is None:
            raise ValueError(f"Calibration: does not know the share of matches that it was fitted at{_FIT_AGAIN}")
        if share is None:
            scores = self.scores(direction)
            if n_gallery is None or n_gallery < 1:
                raise ValueError(f"Calibration: n_gallery must be at least 1, got {n_gallery}")
            rarer = (n_gallery / scores.n_gallery) ** (scores.growth - 1)
            share = min(self.share * rarer, max(0.5, self.share))
        if not 0 < share < 1:
            raise ValueError(f"Calibration: share must be between 0 and 1, got {share}")
        return _logit(share) - _logit(self.share)

    def scores(self, direction: Direction) -> QueryScores:
        """The held-out scores of a direction.

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
        """The match probability above which items can be reported so that they are right often enough.

        Precision is that of a query: of the queries with an item above the threshold, the mean share of true matches among their
        items above it. Of N_STEPS limits the loosest is taken whose Hoeffding-Bentkus p-value is at most (1 - confidence) / N_STEPS.

        Args:
            precision: wanted, in (0, 1).
            direction: of the queries.
            confidence: probability over held-out sets, at least, that the precision is kept on new queries of the same kind.

        Returns:
            A probability in (0, 1) as :meth:`probability` gives it at the gallery of the fit; report what lies above.

        Raises:
            ValueError: no limit can be vouched for, or an argument is outside of (0, 1).
        """
        _check_open("precision", precision)
        _check_open("confidence", confidence)
        scores = self.scores(direction)
        answered = _answered(scores.nearest, scores.limits)
        level = (1 - confidence) / len(answered)
        passing = [
            limit
            for limit, n, value in zip(scores.limits.tolist(), answered.tolist(), scores.precision, strict=True)
            if mean_loss_p_value(1 - value, n, 1 - precision) <= level
        ]
        if not passing:
            raise ValueError(
                f"threshold: no limit has a precision of {precision:g} with confidence {confidence:g} on {len(scores.nearest)} held-out"
                " queries; ask for less, or calibrate on more"
            )
        return self._probability_at(max(passing))

    def abstain_below(
        self, risk: float, *, direction: Direction = "t2i", confidence: float = 0.9, absent: float = 0.0
    ) -> float:
        """The match probability of the closest item below or at which a query should rather not be answered.

        Risk is the share of answered queries whose closest item is no match. Of N_STEPS limits the loosest is taken whose exact
        binomial p-value is at most (1 - confidence) / N_STEPS, so that all hold at once. A query farther from everything than any
        held-out one is never answered: nothing vouches for it.

        Args:
            risk: largest share of wrong answers, in (0, 1).
            direction: of the queries.
            confidence: probability over held-out sets, at least, that the risk is kept on new queries of the same kind.
            absent: share of queries without any match in the gallery to be ready for: as many held-out queries, drawn with a fixed
                seed, have their matches taken out of the gallery.

        Returns:
            A probability in (0, 1) as :meth:`probability` gives it at the gallery of the fit.

        Raises:
            ValueError: no limit can be vouched for, or an argument is out of range.
        """
        return self._probability_at(self._answer_limit(risk, direction, confidence, absent))

    def abstains(
        self,
        distance: Tensor,
        risk: float,
        *,
        n_gallery: int | None = None,
        direction: Direction = "t2i",
        confidence: float = 0.9,
        absent: float = 0.0,
    ) -> Tensor:
        """Which queries are better not answered: those whose closest item has at most the probability of :meth:`abstain_below`.

        Args:
            distance: (n,) of each query to its closest item.
            n_gallery: see :meth:`probability`. In a larger gallery than that of the fit the same distance is worth less.
            risk, direction, confidence, absent: see :meth:`abstain_below`.

        Returns:
            (n,) bool.

        Raises:
            ValueError: see :meth:`abstain_below`.
        """
        limit = self._answer_limit(risk, direction, confidence, absent)
        worst = self.logit(torch.tensor(limit, dtype=torch.float64))
        return self.logit(distance, n_gallery=n_gallery, direction=direction) <= worst.to(distance.device)

    def conformal_radius(
        self, alpha: float, *, direction: Direction = "t2i", contains: Literal["any", "all"] = "any"
    ) -> float:
        """Distance within which a query's match lies with a probability of at least 1 - alpha.

        Split conformal prediction: the ceil((q + 1)(1 - alpha))-th smallest of q held-out scores. The probability is over the held-out
        and the new query, which must be exchangeable; equal scores only raise it.

        Args:
            alpha: share of queries whose set may miss, in (0, 1).
            direction: of the queries.
            contains: "any", a set that holds at least one of the query's matches; "all", every one of them.

        Returns:
            The radius: the set is every item at most as far. Infinite, the whole gallery, if q < 1/alpha - 1.

        Raises:
            ValueError: alpha is outside of (0, 1), or contains is neither.

        Paper: Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005; Papadopoulos et al., ECML 2002.
        """
        _check_open("alpha", alpha)
        if contains not in ("any", "all"):
            raise ValueError(f"conformal_radius: contains must be 'any' or 'all', got {contains!r}")
        scores = self.scores(direction)
        values = np.sort(scores.closest_match if contains == "any" else scores.farthest_match)
        place = math.ceil((len(values) + 1) * (1 - alpha) - 1e-9)
        return float(values[place - 1]) if place <= len(values) else math.inf

    def answered(
        self, risk: float, *, direction: Direction = "t2i", confidence: float = 0.9, absent: float = 0.0
    ) -> float:
        """Share of the held-out queries that are answered at this risk.

        Args:
            risk, direction, confidence, absent: see :meth:`abstain_below`.
        """
        limit = self._answer_limit(risk, direction, confidence, absent)
        nearest, _ = _with_absent(self.scores(direction), absent)
        return float(_answered(nearest, np.array([limit]))[0]) / len(nearest)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without NaN or infinities."""
        return {
            "version": _VERSION,
            "logit_scale": self.logit_scale,
            "logit_bias": self.logit_bias,
            "share_of_matches": self.share,
            "knots": None if self.knots is None else [list(knot) for knot in self.knots],
            "about": self.about,
            "i2t": None if self.i2t is None else self.i2t.to_json(),
            "t2i": None if self.t2i is None else self.t2i.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Calibration":
        """What :meth:`to_json` gave; of older versions, which had a scale and a bias alone, these.

        Raises:
            ValueError: something is missing or of another kind, or a newer version wrote it.
        """
        try:
            version, knots = values.get("version", 0), values.get("knots")
            if version > _VERSION:
                raise ValueError(f"version {version} of a newer sfumato; this one reads up to {_VERSION}")
            scale, bias = float(values["logit_scale"]), float(values["logit_bias"])
            if not (scale > 0 and math.isfinite(scale) and math.isfinite(bias)):
                raise ValueError(f"logit_scale must be positive and both finite, got {scale} and {bias}")
            i2t, t2i = (QueryScores.from_json(v) if (v := values.get(d)) else None for d in get_args(Direction))
            return cls(
                scale,
                bias,
                values.get("share_of_matches"),
                None if knots is None else tuple((float(x), float(y)) for x, y in knots),
                i2t,
                t2i,
                dict(values.get("about", {})),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"Calibration: not one, or a damaged one ({error!r}); calibrate again") from error

    def to_text(self) -> str:
        """:meth:`to_json` as a file, one field a line."""
        lines = [f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in self.to_json().items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_text`, atomically."""
        write_atomically(path, self.to_text())

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read what :meth:`save` wrote, or the calibration.json of an older version.

        Raises:
            ValueError: it is no calibration; the message names the file.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def _answer_limit(self, risk: float, direction: Direction, confidence: float, absent: float) -> float:
        """The loosest distance at which the risk is kept; a closest item must be nearer than it."""
        _check_open("risk", risk)
        _check_open("confidence", confidence)
        if not 0 <= absent < 1:
            raise ValueError(f"Calibration: absent must be at least 0 and below 1, got {absent}")
        nearest, right = _with_absent(self.scores(direction), absent)
        limits = _limits(nearest)
        answered, wrong = _answered(nearest, limits), _answered(nearest[~right], limits)
        level = (1 - confidence) / len(limits)
        passing: list[float] = [
            limit
            for limit, n, errors in zip(limits.tolist(), answered.tolist(), wrong.tolist(), strict=True)
            if binomial_tail(errors, n, risk) <= level
        ]
        if not passing:
            raise ValueError(
                f"abstention: no limit has a risk of at most {risk:g} with confidence {confidence:g} on {len(nearest)} held-out queries;"
                " allow more risk, or calibrate on more"
            )
        return max(passing)

    def _probability_at(self, limit: float) -> float:
        return float(self.probability(torch.tensor(limit, dtype=torch.float64)))


def growth_by_halving(n_matches: np.ndarray, n_gallery: int) -> float:
    """How the matches of a query grow with the gallery: the g of R ~ m^g, from what half of the gallery would hold.

    In a random half, queries without a match left are no queries any more; of the others the mean number of matches is
    sum(R h / m) / sum(1 - P(none left)), with h = m // 2 and a hypergeometric P.

    Args:
        n_matches: (q,) numbers of matches, at least 1.
        n_gallery: m.

    Returns:
        g in [0, 1]: 0 if every query has one match, near 1 if all have very many.
    """
    half = n_gallery // 2
    if half == 0:
        return 0.0
    r, m = torch.from_numpy(np.asarray(n_matches, float)), torch.tensor(float(n_gallery), dtype=torch.float64)
    possible = r <= m - half
    rest = torch.where(possible, m - r - half, 0.0)
    log_none = torch.lgamma(m - r + 1) - torch.lgamma(rest + 1) - torch.lgamma(m + 1) + torch.lgamma(m - half + 1)
    left = 1 - torch.where(possible, log_none.exp(), 0.0)
    fewer = float((r * half / m).sum() / left.sum())
    return min(1.0, max(0.0, math.log(float(r.mean()) / fewer) / math.log(n_gallery / half)))


_PER_QUERY = ("closest_match", "farthest_match", "closest_other")
_PLAIN = ("n_gallery", "n_left_out", "matches_per_query", "growth", "precision")
_FIT_AGAIN = "; fit again on held-out pairs, a run's with: sfumato calibrate RUN"


def _checked(distance: Tensor, match: Tensor) -> tuple[Tensor, Tensor]:
    """(q, m) float32 distances and bool labels on the CPU."""
    if distance.ndim != 2 or distance.shape != match.shape:
        raise ValueError(
            f"QueryScores: got {tuple(distance.shape)} distances and {tuple(match.shape)} labels; both must be (q, m)"
        )
    if not torch.isfinite(distance).all():
        raise ValueError("QueryScores: distances must be finite")
    if not ((match == 0) | (match == 1)).all():
        raise ValueError("QueryScores: match must be 0 or 1 (or bool) for every pair")
    return distance.detach().cpu().float(), match.cpu().bool()


def _scores_of(distance: Tensor, match: Tensor) -> tuple[int, np.ndarray]:
    """(m, (4, q) number of matches, closest match, farthest match, closest other)."""
    infinite = torch.tensor(math.inf)
    rows = [
        match.sum(1).double(),
        torch.where(match, distance, infinite).amin(1).double(),
        torch.where(match, distance, -infinite).amax(1).double(),
        torch.where(match, infinite, distance).amin(1).double(),
    ]
    return distance.shape[1], torch.stack(rows).numpy()


def _precision_sums(distance: Tensor, match: Tensor, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each limit the number of queries with an item below it, and the sum of their precisions."""
    answered, total = [], []
    for limit in limits.tolist():
        below = distance < limit
        n = below.sum(1)
        answered.append(float((n > 0).sum()))
        total.append(float(((below & match).sum(1) / n.clamp_min(1)).double().sum()))
    return np.array(answered), np.array(total)


def _limits(nearest: np.ndarray) -> np.ndarray:
    ranks = -(-np.arange(1, N_STEPS + 1) * len(nearest) // N_STEPS)
    limits: np.ndarray = np.sort(nearest)[ranks - 1]
    return limits


def _answered(nearest: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Number of values strictly below each limit."""
    counts: np.ndarray = np.searchsorted(np.sort(nearest), limits, side="left")
    return counts


def _with_absent(scores: QueryScores, absent: float) -> tuple[np.ndarray, np.ndarray]:
    """((q,) distance to the closest item, (q,) whether it is a match), some queries without their matches; a tie counts as wrong."""
    match, other = np.array(scores.closest_match), np.array(scores.closest_other)
    gone = np.random.default_rng(0).random(len(match)) < absent
    return np.where(gone, other, np.minimum(match, other)), (match < other) & ~gone


def _isotonic_knots(distance: Tensor, match: Tensor) -> tuple[tuple[float, float], ...]:
    """Centred isotonic regression: the mean distance and the log odds of each level of the monotone fit, all strictly falling."""
    try:
        from sklearn.isotonic import isotonic_regression
    except ImportError as error:
        raise UserError(
            "isotonic calibration needs scikit-learn: pip install 'sfumato[calibration]', or use platt"
        ) from error
    d, y = distance.detach().flatten().double().cpu().numpy(), match.detach().flatten().double().cpu().numpy()
    x, place, weight = np.unique(d, return_inverse=True, return_counts=True)
    fitted = isotonic_regression(np.bincount(place, y) / weight, sample_weight=weight.astype(float), increasing=False)
    start = np.flatnonzero(np.append(True, np.diff(fitted) < 0))
    n, at = (np.add.reduceat(values, start) for values in (weight.astype(float), weight * x))
    hits = np.add.reduceat(np.bincount(place, y), start)
    # Levels of 0 and 1 would be infinite odds: half a pair of the other kind is added, and levels that this puts out of order are
    # pooled with their neighbours.
    pooled: list[tuple[float, float, float]] = []
    for level in zip((at / n).tolist(), hits.tolist(), n.tolist(), strict=True):
        pooled.append(level)
        while len(pooled) > 1 and _smoothed(pooled[-1]) >= _smoothed(pooled[-2]):
            (a, i, s), (b, j, t) = pooled.pop(), pooled.pop()
            pooled.append(((a * s + b * t) / (s + t), i + j, s + t))
    if len(pooled) < 2:
        raise ValueError("isotonic calibration: the distances do not separate matches from non-matches; use platt")
    return tuple((level[0], _logit(_smoothed(level))) for level in pooled)


def _smoothed(level: tuple[float, float, float]) -> float:
    _, hits, n = level
    if hits == 0:
        return 0.5 / (n + 1)
    return (hits if hits < n else hits + 0.5) / (n if hits < n else n + 1)


def _logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)


def _shortest(x: float) -> float | None:
    """A float32 with as few digits as tell it from all others."""
    return None if math.isinf(x) else float(str(np.float32(x)))


def _check_open(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"Calibration: {name} must be between 0 and 1, got {value}")
