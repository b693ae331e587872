"""The comparison of crops of single boxes with crops of two boxes: is an image of two objects less certain?

For an area threshold, take the ten largest boxes of an image below it. A is the largest. B is the one of the other nine
that overlaps least with A. C is the smallest box around both. The captions of A and B are the phrases of the boxes;
that of C joins them with "and". The study answers two questions: whether C is less certain than A, among crops and
among captions, and how often an item of A or C is closer to its own partner than to the other one. This module handles
boxes and embeddings, not files.

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
"""Number of boxes among which A and B are chosen; an image with fewer boxes below the threshold is left out."""

MEANS = "squared_l2"
"""The distance that uses only the means."""

ROLES = ("A", "B", "C")

CELLS = ("image A", "image C", "text A", "text C")
"""Queries of the binary selection: crop A chooses between captions A and C, and so on."""

PUBLISHED = {
    "VSE++": {"image A": 0.597, "image C": 0.660, "text A": 0.748, "text C": 0.540},
    "probabilistic VSE++": {"image A": 0.586, "image C": 0.695, "text A": 0.717, "text C": 0.589},
}
"""Table 4 of the paper: 2,000 images of Visual Genome, models trained on COCO."""


@dataclass(frozen=True)
class Triplet:
    """The boxes chosen in an image.

    Attributes:
        a, b: positions among the boxes that were given.
        boxes: (3, 4) left, top, right, bottom of A, B and C.
    """

    a: int
    b: int
    boxes: np.ndarray


def choose_triplet(boxes: np.ndarray, area: float, threshold: float) -> Triplet | None:
    """Choose A, B and C of an image.

    The paper does not define ties, but many boxes do not overlap at all. Here, of two equal areas the earlier counts as
    the larger, and of two equal overlaps with A the overlap of the larger box counts as the smaller.

    Args:
        boxes: (n, 4) left, top, right, bottom in pixels, within the image.
        area: of the image in pixels.
        threshold: a box must be smaller than this fraction of the image's area.

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
    """Intersection over union of a box with others.

    Args:
        box: (4,) left, top, right, bottom.
        others: (n, 4) likewise.

    Returns:
        (n,) in [0, 1].

    Example:
        >>> overlap(np.array([0, 0, 2, 2]), np.array([[0, 0, 2, 1], [5, 5, 6, 6]]))
        array([0.5, 0. ])
    """
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = sides.clip(min=0).prod(1)
    union = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - common
    fractions: np.ndarray = common / union
    return fractions


def join_captions(a: str, b: str) -> str:
    """Make the caption of C.

    Args:
        a: caption of A.
        b: caption of B.

    Returns:
        "A and B".
    """
    return f"{a} and {b}"


@dataclass(frozen=True)
class Side:
    """The uncertainties of crops, or of captions.

    Attributes:
        mean: by "A", "B", "C" the mean uncertainty; None for points.
        standard_error: of these means; None for a single triplet.
        c_above_a: fraction of triplets whose C is less certain than their A, a tie counts one half; None for points.
        difference: mean of C - A; None for points.
    """

    mean: dict[str, Interval] | None
    standard_error: dict[str, float | None] | None
    c_above_a: Interval | None
    difference: Interval | None


@dataclass(frozen=True)
class CropFigures:
    """The figures at one threshold.

    Attributes:
        threshold: boxes are smaller than this fraction of the image's area.
        n: number of triplets, one per image.
        left_out: number of images with too few boxes below the threshold.
        area: by "A", "B", "C" the mean fraction of the image's area.
        overlap: mean intersection over union of A and B.
        crops: uncertainties of the crops.
        captions: uncertainties of the captions.
        selection: by distance, that of the model first, and by cell of CELLS, the fraction of queries that choose their
            own partner; a tie counts one half.
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
    """The result of the study.

    Attributes:
        model: name of the model.
        distance: name of the model's distance.
        uncertainty: name of the uncertainty.
        n_pictures: number of images in the sample.
        thresholds: figures of each threshold.
        n_resamples: number of bootstrap resamples of the images.
        level: coverage of the intervals.
        seed: of the sample and the resamples.
        problems: number of problems by reason.
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
        """Convert to JSON values.

        Returns:
            Plain numbers, lists and dictionaries, with the published figures.
        """
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
        crops: by "A", "B", "C" (n, d) embeddings.
        captions: by "A", "B", "C" (n, d) embeddings.
        triplets: of n images.
        areas: (n,) areas of the images in pixels.
        threshold: see :class:`CropFigures`.
        left_out: see :class:`CropFigures`.
        distance: name of the model's distance.
        uncertainty: one of Uncertainty.
        n_resamples: number of bootstrap resamples; a single triplet has no intervals.
        level: coverage of the intervals.
        seed: of the resamples.

    Returns:
        All figures.

    Raises:
        ValueError: uncertainty is unknown, or there are no triplets.
    """
    if uncertainty not in get_args(Uncertainty):
        raise ValueError(f"unknown uncertainty {uncertainty!r}; known: {', '.join(get_args(Uncertainty))}")
    if not triplets:
        raise ValueError("measure_crops: got no triplets, nothing to measure")
    n, boxes = len(triplets), np.stack([triplet.boxes for triplet in triplets])
    fraction = (boxes[:, :, 2:] - boxes[:, :, :2]).prod(2) / areas[:, None]
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
        n_resamples=n_resamples if n > 1 else 0,  # Resamples of a single triplet would all be equal.
        level=level,
        seed=seed,
    )
    return CropFigures(
        threshold=threshold,
        n=n,
        left_out=left_out,
        area={role: float(fraction[:, k].mean()) for k, role in enumerate(ROLES)},
        overlap=float(np.mean([overlap(t.boxes[0], t.boxes[1:2])[0] for t in triplets])),
        crops=_side_of("crops", values, intervals),
        captions=_side_of("captions", values, intervals),
        selection={
            name: {cell: intervals[f"{name} {cell}"] for cell in CELLS} for name in dict.fromkeys((distance, MEANS))
        },
    )


def _side_of(name: str, values: Mapping[str, np.ndarray], intervals: Mapping[str, Interval]) -> Side:
    """The figures of crops or captions; points have no values."""
    if f"{name} above" not in values:
        return Side(None, None, None, None)
    return Side(
        {role: intervals[f"{name} {role}"] for role in ROLES},
        {role: _standard_error(values[f"{name} {role}"]) for role in ROLES},
        intervals[f"{name} above"],
        intervals[f"{name} difference"],
    )


def _selected(
    crops: Mapping[str, GaussianEmbedding], captions: Mapping[str, GaussianEmbedding], distance: str
) -> dict[str, np.ndarray]:
    """(n,) by cell: 1 where the query's own partner is closer than the other one, one half for a tie, else 0."""
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
    """Choose embeddings.

    Args:
        embeddings: (n, d) embeddings.
        index: k positions.

    Returns:
        (k, d) embeddings.
    """
    return embeddings[torch.tensor(index, dtype=torch.int64)]
