"""The quality of the probabilities beside the hits of a search: proper scores at the first hit and at the first ten.

All pairs of a gallery say nothing: nearly all of them are non-matches, which a constant predicts well. What a person
reads is the probability beside a hit. So these figures take the hits of searches, in galleries of several sizes, and
stand beside those of the distance alone and of a constant.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sfumato.arrays import Array, as_numpy, smallest
from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.logits import N_NEAREST, no_reference_error
from sfumato.gaussian import Sides
from sfumato.ids import DIRECTIONS, Direction
from sfumato.metrics.bootstrap import auroc
from sfumato.metrics.reliability import brier_score, expected_calibration_error, log_loss, simulated_calibration_errors

Verdict = Literal["holds", "rough", "misleads", "too few"]
"""What may be done with the probabilities of first hits, see :attr:`HitFigures.verdict`."""

CLOSE, FAR = 0.03, 0.1
"""Calibration errors above that of perfect probabilities, up to which probabilities can be shown, and above which they
mislead."""

_UNSURE = 0.05
"""Probability of a wrong verdict on probabilities that are perfect, or off by FAR."""


@dataclass(frozen=True)
class HitFigures:
    """The probabilities of hits against what they are."""

    direction: Direction  # "t2i" if texts search among images
    n_gallery: int  # number of images of the gallery, or whose texts are the gallery; the mean over several galleries
    hits: int  # number of hits of each query that count: 1, or the first 10
    n: int  # number of hits
    rate: float  # fraction of hits that match
    mean_probability: float  # mean probability of the hits
    ece: float  # expected calibration error in bins with equally many hits, as everywhere
    ece_by_chance: float  # the calibration error that perfect probabilities of these hits would show, on average
    ece_perfect_most: float  # the error that perfect probabilities exceed in 5 % of the samples of as many hits
    ece_off_least: float
    log_loss: float  # mean, in nats
    brier_skill: float  # 1 - Brier score / that of the constant `rate`; 0 is the constant, 1 is perfect
    auroc: float | None  # of matches against other hits by the probability; None if there is only one kind

    @property
    def verdict(self) -> Verdict:
        """What the calibration error allows to conclude.

        "too few": it fits perfect probabilities as well as probabilities that are off by FAR. "holds": it is smaller
        than that of the latter, and at most CLOSE above that of perfect ones. "rough": at most FAR above it, and
        "misleads": more.
        """
        if self.ece_off_least <= self.ece <= self.ece_perfect_most:
            return "too few"
        excess = self.ece - self.ece_by_chance
        if excess <= CLOSE and self.ece < self.ece_off_least:
            return "holds"
        return "rough" if excess <= FAR else "misleads"


@dataclass(frozen=True, eq=False)
class Fold:
    """Queries with a calibration of their own."""

    calibration: Calibration  # not fitted on these queries
    images: np.ndarray
    texts: np.ndarray


def measure_hits(
    calibration: Calibration | Sequence[Fold],
    distance: Array,
    match: Array,
    *,
    embedded: Sides | None = None,
    sizes: Sequence[int] = (100, 356),
    n_galleries: int = 5,
    population: str = "planted",
    seed: int = 0,
) -> list[HitFigures]:
    """Measure the probabilities of hits, in both directions, at the first hit and the first ten.

    A gallery is a random set of images, or the texts that match one of them. Its queries are the texts of the split, or
    these images. Parts of the queries may have calibrations of their own.

    distance (n images, m texts), match (n, m), embedded (images, texts).
    """
    distance, match, figures = as_numpy(distance), as_numpy(match), []
    n, m = distance.shape
    folds = [Fold(calibration, np.arange(n), np.arange(m))] if isinstance(calibration, Calibration) else calibration
    for direction in DIRECTIONS[::-1]:
        seen = [_seen_by(fold.calibration, embedded, direction) for fold in folds]
        for size in [*sorted({size for size in sizes if size < n}), n]:
            n_drawn = n_galleries if size < n else 1
            parts = [
                _hits(fold.calibration, asked.of(fold, direction), direction, population, of_fold)
                for fold, of_fold in zip(folds, seen, strict=True)
                for asked in _galleries(distance, match, direction, size, n_drawn, np.random.default_rng(seed))
            ]
            for hits in (1, 10):
                p, y = (np.concatenate([part[k][:, :hits].ravel() for part in parts]) for k in (0, 1))
                figures.append(hit_figures(p, y, direction, size, hits))
    return figures


@dataclass(frozen=True, eq=False)
class FirstHits:
    """The first hits of the queries of a split among all its items."""

    probability: np.ndarray  # (q,) of each
    match: np.ndarray  # (q,) whether it matches, 0 and 1
    queries: np.ndarray  # (q,) positions of the queries
    direction: Direction  # of the queries

    def log_loss(self) -> np.ndarray:
        """The log loss of each probability. Returns (q,)."""
        p = np.where(self.match, self.probability, 1 - self.probability)
        return -np.log(np.maximum(p, np.finfo(np.float64).tiny))

    def image(self, match: Array) -> np.ndarray:
        """The image that each query belongs to. match (n images, m texts) -> (q,)."""
        return self.queries if self.direction == "i2t" else as_numpy(match)[:, self.queries].argmax(0)


def first_hits(
    calibration: Calibration,
    distance: Array,
    match: Array,
    direction: Direction,
    *,
    embedded: Sides | None = None,
    population: str = "planted",
) -> FirstHits:
    """The probabilities of first hits in the whole of a split."""
    (asked,) = _galleries(as_numpy(distance), as_numpy(match), direction, len(distance), 1, np.random.default_rng(0))
    p, y = _hits(calibration, asked, direction, population, _seen_by(calibration, embedded, direction))
    queries = asked.queries[asked.match.any(1)] if population == "planted" else asked.queries
    return FirstHits(p[:, 0], y[:, 0], queries, direction)


def without_nearest(calibration: Calibration) -> Calibration:
    """The calibration by the distance and the size of the gallery alone: the baseline."""
    return _changed(calibration, lambda fit: replace(fit, conditional=None, hits=None, reference=None))


def without_reference(calibration: Calibration) -> Calibration:
    """The calibration given the nearest items alone, without reference queries: a baseline."""

    def alone(fit: DirectionCalibration) -> DirectionCalibration:
        plain = None if fit.conditional is None else replace(fit.conditional, first=None)
        return replace(fit, conditional=plain, hits=None, reference=None)

    return _changed(calibration, alone)


def _changed(calibration: Calibration, change: Callable[[DirectionCalibration], DirectionCalibration]) -> Calibration:
    i2t, t2i = (None if fit is None else change(fit) for fit in (calibration.i2t, calibration.t2i))
    return replace(calibration, i2t=i2t, t2i=t2i)


@dataclass(frozen=True, eq=False)
class _Asked:
    """Queries and a gallery: (q, m) distances and matches, and their positions in the split."""

    distance: np.ndarray
    match: np.ndarray
    queries: np.ndarray
    items: np.ndarray

    def of(self, fold: Fold, direction: Direction) -> "_Asked":
        """The queries of a fold alone."""
        kept = np.isin(self.queries, fold.texts if direction == "t2i" else fold.images)
        return replace(self, distance=self.distance[kept], match=self.match[kept], queries=self.queries[kept])


_Seen = tuple[np.ndarray, np.ndarray] | None
"""(n,) hub of each item and (m,) isolation of each query, as reference queries see them; None without these."""


def _seen_by(calibration: Calibration, embedded: Sides | None, direction: Direction) -> _Seen:
    """All queries and items of a direction."""
    if (reference := calibration.of(direction).reference) is None:
        return None
    if embedded is None:
        raise no_reference_error("measure_hits(..., embedded=...)")
    items, queries = embedded if direction == "t2i" else embedded[::-1]
    return reference.hub(items), reference.isolation(queries)


def _galleries(
    distance: np.ndarray, match: np.ndarray, direction: Direction, size: int, n: int, rng: np.random.Generator
) -> Iterator[_Asked]:
    for _ in range(n):
        images = np.sort(rng.permutation(len(distance))[:size])
        d, y = distance[images], match[images]
        if direction == "t2i":
            yield _Asked(d.T, y.T, np.arange(distance.shape[1]), images)
        else:
            beside = np.flatnonzero(y.any(0))
            yield _Asked(d[:, beside], y[:, beside], images, beside)


def _hits(
    calibration: Calibration, asked: _Asked, direction: Direction, population: str, seen: _Seen
) -> tuple[np.ndarray, np.ndarray]:
    """((q, 10) probabilities, (q, 10) matches) of the first hits."""
    distance, match, queries = asked.distance, asked.match, asked.queries
    if population == "planted":
        has = match.any(1)
        distance, match, queries = distance[has], match[has], queries[has]
    nearest, place = smallest(distance, N_NEAREST)
    reference = None
    if seen is not None:
        hub, isolation = seen
        reference = np.stack([hub[asked.items[place[:, 0]]], isolation[queries]], axis=1)
    fit = calibration.of(direction)
    p = fit.hit_probability(nearest[:, :10], nearest, n_gallery=distance.shape[1], reference=reference)
    return p.astype(np.float64), np.take_along_axis(match, place[:, :10], 1).astype(np.float64)


def hit_figures(p: np.ndarray, y: np.ndarray, direction: Direction, n_gallery: int, hits: int) -> HitFigures:
    """The figures of probabilities of hits. p (n,), y (n,) whether they match, 0 and 1, both float64."""
    rate = float(y.mean())
    constant = rate * (1 - rate)
    perfect = simulated_calibration_errors(p, p)
    return HitFigures(
        direction=direction, n_gallery=n_gallery, hits=hits, n=len(p), rate=rate, mean_probability=float(p.mean()),
        ece=expected_calibration_error(p, y), ece_by_chance=float(perfect.mean()),
        ece_perfect_most=float(np.quantile(perfect, 1 - _UNSURE)),
        ece_off_least=min(float(np.quantile(simulated_calibration_errors(p, off), _UNSURE)) for off in _off(p)),
        log_loss=log_loss(p, y), brier_skill=1 - brier_score(p, y) / constant if constant else 0.0,
        auroc=auroc(p, y.astype(bool)) if constant else None,
    )  # fmt: skip


def _off(p: np.ndarray) -> tuple[np.ndarray, ...]:
    """(k,) true probabilities that differ by FAR from p: all lower, all higher, nearer to and farther from one half."""
    away = np.where(p > 0.5, FAR, -FAR)
    return tuple((p + by).clip(0, 1) for by in (-FAR, FAR, -away, away))
