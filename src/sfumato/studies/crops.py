"""Is a picture of two things less certain than a picture of one? Crops A and B of single boxes, and C that holds both.

For an area threshold the ten largest boxes of a picture below it are taken; A is the largest, B of the other nine the one that overlaps
least with A, C the smallest box around both. The captions of A and B are the phrases of the boxes, that of C joins them with "and".
Two questions are asked of a model: whether C is less certain than A, among crops and among captions, and how often an item of A or C
chooses its own partner rather than the other one. This module knows boxes and embeddings, no files.

Paper: Pishdad et al., "Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations", section 4.6.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.bootstrap import Interval, bootstrap, mean_statistic

Uncertainty = Literal["total_variance", "log_det", "geometric_std"]

CANDIDATES = 10
"""Boxes below the threshold among which A and B are chosen; a picture with fewer is left out."""

MEANS = "squared_l2"
"""The distance that looks at the means alone."""

ROLES = ("A", "B", "C")

CELLS = ("image A", "image C", "text A", "text C")
"""Queries of the binary selection: crop A chooses between captions A and C, ..., caption C between crops A and C."""

PUBLISHED = {
    "VSE++": {"image A": 0.597, "image C": 0.660, "text A": 0.748, "text C": 0.540},
    "probabilistic VSE++": {"image A": 0.586, "image C": 0.695, "text A": 0.717, "text C": 0.589},
}
"""Table 4 of the paper: 2,000 pictures of Visual Genome, models trained on COCO."""


@dataclass(frozen=True)
class Triplet:
    """The boxes chosen in a picture.

    Attributes:
        a, b: positions among the boxes that were given.
        boxes: (3, 4) left, top, right, bottom of A, B and C.
    """

    a: int
    b: int
    boxes: np.ndarray


def choose_triplet(boxes: np.ndarray, area: float, threshold: float) -> Triplet | None:
    """A, B and C of a picture.

    Of boxes with equal areas, or equal overlaps with A, the one that stands first counts as the larger, or the smaller overlap is
    that of the larger box: the paper does not say, and many boxes do not overlap at all.

    Args:
        boxes: (n, 4) left, top, right, bottom, within the picture.
        area: of the picture.
        threshold: share of the picture's area that a box must be below.

    Returns:
        The triplet; None if fewer than CANDIDATES boxes are below the threshold.

    Example:
        >>> boxes = np.array([[0, 0, k, 1] for k in range(1, 12)])
        >>> choose_triplet(boxes, 100, 0.105).a
        9
    """
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    below = np.flatnonzero(areas < threshold * area)
    if len(below) < CANDIDATES:
        return None
    largest = below[np.argsort(-areas[below], kind="stable")][:CANDIDATES]
    a, others = int(largest[0]), largest[1:]
    b = int(others[np.argmin(overlap(boxes[a], boxes[others]))])
    around = np.concatenate([np.minimum(boxes[a], boxes[b])[:2], np.maximum(boxes[a], boxes[b])[2:]])
    return Triplet(a, b, np.stack([boxes[a], boxes[b], around]))


def overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(4,) and (n, 4) boxes (left, top, right, bottom) -> (n,) areas of intersection over areas of union."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = sides.clip(min=0).prod(1)
    union = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - common
    shares: np.ndarray = common / union
    return shares


def join_captions(a: str, b: str) -> str:
    """The caption of C: "A and B"."""
    return f"{a} and {b}"


@dataclass(frozen=True)
class Side:
    """What was measured of crops, or of captions.

    Attributes:
        mean: by "A", "B", "C" the mean uncertainty; None for points.
        standard_error: of these means; None of a single triplet.
        c_above_a: share of the triplets whose C is less certain than their A, ties one half; None for points.
        difference: mean of C - A; None for points.
    """

    mean: dict[str, Interval] | None
    standard_error: dict[str, float | None] | None
    c_above_a: Interval | None
    difference: Interval | None


@dataclass(frozen=True)
class CropFigures:
    """What was measured at a threshold.

    Attributes:
        threshold: largest share of the picture's area.
        n: triplets, each of another picture.
        left_out: pictures with too few boxes below it.
        area: by "A", "B", "C" the mean share of the picture's area.
        overlap: mean intersection over union of A and B.
        crops, captions: uncertainties.
        selection: by distance (the model's own first) and cell of CELLS, the share that chose its own partner, ties one half.
    """

    threshold: float
    n: int
    left_out: int
    area: dict[str, float]
    overlap: float
    crops: Side
    captions: Side
    selection: dict[str, dict[str, Interval]]


@dataclass(frozen=True)
class CropStudy:
    """All of it.

    Attributes:
        model: its name.
        distance: the model's own.
        uncertainty: which one.
        n_pictures: in the sample.
        thresholds: figures of each.
        n_resamples, level, seed: of the intervals, which resample pictures.
        problems: what was left out, by reason, and how often.
    """

    model: str
    distance: str
    uncertainty: str
    n_pictures: int
    thresholds: list[CropFigures]
    n_resamples: int
    level: float
    seed: int
    problems: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """As plain numbers, lists and dictionaries."""
        return asdict(self) | {"published": PUBLISHED}


def measure_crops(
    crops: Mapping[str, GaussianEmbedding],
    captions: Mapping[str, GaussianEmbedding],
    triplets: Sequence[Triplet],
    areas: np.ndarray,
    *,
    threshold: float,
    left_out: int,
    distance: str,
    uncertainty: str = "total_variance",
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> CropFigures:
    """Measure the triplets of a threshold.

    Args:
        crops, captions: by "A", "B", "C" (n, d) embeddings.
        triplets: n of them.
        areas: (n,) areas of the pictures.
        threshold, left_out: see :class:`CropFigures`.
        distance: the model's own.
        uncertainty: one of Uncertainty.
        n_resamples, level, seed: see :func:`~sfumato.metrics.bootstrap.bootstrap`; a single triplet has no intervals.

    Raises:
        ValueError: uncertainty is unknown, or there are no triplets.
    """
    if uncertainty not in get_args(Uncertainty):
        raise ValueError(f"unknown uncertainty {uncertainty!r}; known: {', '.join(get_args(Uncertainty))}")
    if not triplets:
        raise ValueError("measure_crops: got no triplets, nothing to measure")
    n, boxes = len(triplets), np.stack([triplet.boxes for triplet in triplets])
    share = (boxes[:, :, 2:] - boxes[:, :, :2]).prod(2) / areas[:, None]
    values: dict[str, np.ndarray] = {}
    sides = {"crops": crops, "captions": captions}
    points = {side for side, found in sides.items() if any(bool((e.total_variance == 0).all()) for e in found.values())}
    for side, found in sides.items():
        if side in points:
            continue
        own = {role: getattr(found[role], uncertainty).double().cpu().numpy() for role in ROLES}
        values |= {f"{side} {role}": own[role] for role in ROLES}
        values[f"{side} above"] = _above(own["C"], own["A"])
        values[f"{side} difference"] = own["C"] - own["A"]
    for name in dict.fromkeys((distance, MEANS)):
        values |= {f"{name} {cell}": right for cell, right in _selected(crops, captions, name).items()}
    intervals = bootstrap(
        {name: mean_statistic(value) for name, value in values.items()},
        n,
        n_resamples=n_resamples if n > 1 else 0,  # One triplet drawn again and again would pass for certain.
        level=level,
        seed=seed,
    )

    def side_of(name: str) -> Side:
        if name in points:
            return Side(None, None, None, None)
        return Side(
            {role: intervals[f"{name} {role}"] for role in ROLES},
            {role: _standard_error(values[f"{name} {role}"]) for role in ROLES},
            intervals[f"{name} above"],
            intervals[f"{name} difference"],
        )

    return CropFigures(
        threshold=threshold,
        n=n,
        left_out=left_out,
        area={role: float(share[:, k].mean()) for k, role in enumerate(ROLES)},
        overlap=float(np.mean([overlap(t.boxes[0], t.boxes[1:2])[0] for t in triplets])),
        crops=side_of("crops"),
        captions=side_of("captions"),
        selection={
            name: {cell: intervals[f"{name} {cell}"] for cell in CELLS} for name in dict.fromkeys((distance, MEANS))
        },
    )


def _selected(
    crops: Mapping[str, GaussianEmbedding], captions: Mapping[str, GaussianEmbedding], distance: str
) -> dict[str, np.ndarray]:
    """(n,) by cell: 1 where the query's own partner is closer than the other one, one half where they are as close."""
    row = get_distance(distance).row
    found = {
        image + text: row(crops[image], captions[text]).double().cpu() for image in ("A", "C") for text in ("A", "C")
    }

    def closer(own: str, other: str) -> np.ndarray:
        return _above(found[other].numpy(), found[own].numpy())

    return {
        "image A": closer("AA", "AC"),
        "image C": closer("CC", "CA"),
        "text A": closer("AA", "CA"),
        "text C": closer("CC", "AC"),
    }


def _above(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(n,) 1 where one is larger, one half where they are equal, else 0."""
    above: np.ndarray = (one > other) + (one == other) / 2
    return above


def _standard_error(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def rows_of(embeddings: GaussianEmbedding, index: Sequence[int]) -> GaussianEmbedding:
    """The embeddings at these positions."""
    return embeddings[torch.tensor(index, dtype=torch.int64)]
