"""The comparison of crops of single boxes with crops of two boxes: is an image of two objects less certain?

For an area threshold, take the ten largest boxes of an image below it. A is the largest. B is the one of the other nine
that overlaps least with A. C is the smallest box around both. The captions of A and B are the phrases of the boxes;
that of C joins them with "and". The study answers two questions: whether C is less certain than A, among crops and
among captions, and how often an item of A or C is closer to its own partner than to the other one. This module handles
boxes and embeddings, not files.

Paper: Pishdad et al., "Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations", section 4.6.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from sfumato.data.image_decoding import decode_image
from sfumato.data.images import Problems
from sfumato.data.transforms import encode_png
from sfumato.distances import get_distance
from sfumato.encoders.feature_rows import features_read
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding, ScalarUncertainty
from sfumato.metrics.bootstrap import Interval, bootstrap, mean_statistic
from sfumato.models.embed import embedding_steps
from sfumato.models.model import Model
from sfumato.progress import progress_bar
from sfumato.studies.phrase_boxes import BoxedImage, read_boxed_images

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
    """The boxes chosen in an image."""

    a: int
    b: int
    boxes: np.ndarray  # (3, 4) left, top, right, bottom of A, B and C


def choose_triplet(boxes: np.ndarray, area: float, threshold: float) -> Triplet | None:
    """Choose A, B and C of an image.

    The paper does not define ties, but many boxes do not overlap at all. Here, of two equal areas the earlier counts as
    the larger, and of two equal overlaps with A the overlap of the larger box counts as the smaller.

    boxes (n, 4).
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
    """Intersection over union of a box with others. box (4,), others (n, 4) -> (n,)."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = sides.clip(min=0).prod(1)
    union = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - common
    fractions: np.ndarray = common / union
    return fractions


def join_captions(a: str, b: str) -> str:
    """Make the caption of C."""
    return f"{a} and {b}"


@dataclass(frozen=True)
class Side:
    """The uncertainties of crops, or of captions."""

    mean: dict[str, Interval] | None  # by "A", "B", "C" the mean uncertainty; None for points
    standard_error: dict[str, float | None] | None  # of these means; None for a single triplet
    c_above_a: Interval | None
    difference: Interval | None  # mean of C - A; None for points


@dataclass(frozen=True)
class CropFigures:
    """The figures at one threshold."""

    threshold: float  # boxes are smaller than this fraction of the image's area
    n: int  # number of triplets, one per image
    left_out: int  # number of images with too few boxes below the threshold
    area: dict[str, float]  # by "A", "B", "C" the mean fraction of the image's area
    overlap: float  # mean intersection over union of A and B
    crops: Side  # uncertainties of the crops
    captions: Side  # uncertainties of the captions
    selection: dict[str, dict[str, Interval]]


@dataclass(frozen=True)
class CropStudy:
    """The result of the study."""

    model: str  # name of the model
    distance: str  # name of the model's distance
    uncertainty: str  # name of the uncertainty
    n_pictures: int  # number of images in the sample
    thresholds: list[CropFigures]  # figures of each threshold
    n_resamples: int  # number of bootstrap resamples of the images
    level: float  # coverage of the intervals
    seed: int  # of the sample and the resamples
    problems: Mapping[str, int]  # number of problems by reason

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
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
    """Measure the triplets of a threshold. areas (n,)."""
    if uncertainty not in get_args(ScalarUncertainty):
        raise ValueError(f"unknown uncertainty {uncertainty!r}; known: {', '.join(get_args(ScalarUncertainty))}")
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
    """Choose embeddings. embeddings (n, d) -> (k, d)."""
    return embeddings[torch.tensor(index, dtype=torch.int64)]


THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""The area thresholds of the paper, as fractions of an image."""

EXAMPLES = 4
"""Number of triplets to look at."""

_TOGETHER = 64

_LEVEL = 0.95


@dataclass(frozen=True)
class Example:
    """An example triplet for the page."""

    picture: str  # id of the image
    threshold: float  # the area threshold at which it was chosen
    crops: tuple[bytes, ...]  # three PNG files
    captions: tuple[str, ...]  # three texts


@dataclass(frozen=True)
class _Chosen:
    """A triplet of an image, and the positions of its crops among all embedded crops."""

    triplet: Triplet
    area: float
    crops: tuple[int, int, int]
    captions: tuple[str, str, str]


def study_crops(
    retrieval_model: Model,
    regions: str | Path,
    images: str | Path,
    *,
    name: str,
    thresholds: Sequence[float] = THRESHOLDS,
    sample: int | None = 2000,
    uncertainty: str = "total_variance",
    n_resamples: int = 1000,
    seed: int = 0,
) -> tuple[CropStudy, list[Example], Problems]:
    """Choose the triplets of a sample of images, embed their crops and captions, and measure them.

    Images are read one by one. Crops are embedded in batches, equal crops once.

    Returns (the figures, some example triplets, the items left out).
    """
    if uncertainty not in get_args(ScalarUncertainty):
        raise ValueError(f"--uncertainty {uncertainty}: unknown; known: {', '.join(get_args(ScalarUncertainty))}")
    if not thresholds or not all(0 < t <= 1 for t in thresholds) or len(set(thresholds)) < len(thresholds):
        raise ValueError(f"thresholds must be different fractions in (0, 1], got {', '.join(map(str, thresholds))}")
    if features := features_read(retrieval_model.model.image):
        raise UserError(f"the model reads {features}, but the crop study cuts crops out of image files")
    problems = Problems()
    pictures = read_boxed_images(regions, images, problems, sample=sample, seed=seed)
    embedder = _Crops(retrieval_model)
    chosen: dict[float, list[_Chosen]] = {threshold: [] for threshold in thresholds}
    examples: list[Example] = []
    with progress_bar("embedding crops", len(pictures)) as advance:
        for picture in pictures:
            _add(picture, chosen, embedder, examples, problems)
            advance(1)
    crops = embedder.embeddings()
    if crops is None:
        raise UserError(
            f"none of {len(pictures)} images has {CANDIDATES} boxes below a threshold of"
            f" {', '.join(f'{t:g}' for t in thresholds)}:\n{problems.summary()}"
        )
    texts = list(dict.fromkeys(text for found in chosen.values() for one in found for text in one.captions))
    position = {text: k for k, text in enumerate(texts)}
    captions, distance = retrieval_model.model.embed_texts(texts), retrieval_model.distance
    figures = [
        measure_crops(
            {role: rows_of(crops, [one.crops[k] for one in found]) for k, role in enumerate(ROLES)},
            {role: rows_of(captions, [position[one.captions[k]] for one in found]) for k, role in enumerate(ROLES)},
            [one.triplet for one in found], np.array([one.area for one in found]),
            threshold=threshold, left_out=len(pictures) - len(found), distance=distance, uncertainty=uncertainty,
            n_resamples=n_resamples, level=_LEVEL, seed=seed,
        )
        for threshold, found in chosen.items()
        if found
    ]  # fmt: skip
    study = CropStudy(
        name, distance, uncertainty, len(pictures), figures, n_resamples, _LEVEL, seed, _reasons(problems)
    )  # fmt: skip
    return study, examples, problems


def _add(
    picture: BoxedImage,
    chosen: dict[float, list[_Chosen]],
    embedder: "_Crops",
    examples: list[Example],
    problems: Problems,
) -> None:
    """Choose the triplets of one image for all thresholds."""
    try:
        # Boxes are in pixels of the file without its EXIF orientation.
        pixels = decode_image(picture.path.read_bytes(), None, upright=False)
    except (OSError, ValueError) as error:
        problems.add(picture.path, str(error))
        return
    _, height, width = pixels.shape
    boxes, phrases = _within(picture, width, height, problems)
    for threshold, found in chosen.items():
        triplet = choose_triplet(boxes, width * height, threshold) if len(boxes) else None
        if triplet is None:
            continue
        a, b = phrases[triplet.a], phrases[triplet.b]
        captions = a, b, join_captions(a, b)
        first, second, third = (embedder.add(picture.id, pixels, box) for box in triplet.boxes)
        found.append(_Chosen(triplet, width * height, (first, second, third), captions))
        if len(examples) < EXAMPLES and picture.id not in {example.picture for example in examples}:
            files = tuple(_cut(pixels, box) for box in triplet.boxes)
            examples.append(Example(picture.id, threshold, files, captions))


def _within(picture: BoxedImage, width: int, height: int, problems: Problems) -> tuple[np.ndarray, list[str]]:
    """(n, 4) left, top, right, bottom in whole pixels of the boxes, cut to the image, and their phrases."""
    boxes, phrases = [], []
    for box in picture.boxes:
        wanted = round(box.x), round(box.y), round(box.x + box.width), round(box.y + box.height)
        left, top, right, bottom = max(wanted[0], 0), max(wanted[1], 0), min(wanted[2], width), min(wanted[3], height)
        if right <= left or bottom <= top:
            problems.add(box.location, f"the box has no pixel of the image of {width} x {height}")
            continue
        if (left, top, right, bottom) != wanted:
            problems.add(box.location, "the box extends beyond the image; it is cut to the image")
        boxes.append((left, top, right, bottom))
        phrases.append(box.phrase)
    return np.array(boxes, dtype=np.float64).reshape(-1, 4), phrases


def _cut(pixels: np.ndarray, box: np.ndarray) -> bytes:
    left, top, right, bottom = box.astype(int).tolist()
    return encode_png(pixels[:, top:bottom, left:right])


class _Crops:
    """Embeds crops in batches, without the cache on disk of a frozen backbone, which is for whole images."""

    def __init__(self, retrieval_model: Model) -> None:
        self._prepare, self._encode = embedding_steps(retrieval_model.model.image, "images")
        self._place: dict[tuple[object, ...], int] = {}
        self._waiting: list[bytes] = []
        self._done: list[GaussianEmbedding] = []

    def add(self, picture: str, pixels: np.ndarray, box: np.ndarray) -> int:
        """Position of the embedding of this crop."""
        key = (picture, *box.tolist())
        if key not in self._place:
            self._place[key] = len(self._place)
            self._waiting.append(_cut(pixels, box))
            if len(self._waiting) == _TOGETHER:
                self._embed()
        return self._place[key]

    def embeddings(self) -> GaussianEmbedding | None:
        """All embeddings; None if there are none."""
        if self._waiting:
            self._embed()
        return GaussianEmbedding.cat(self._done) if self._done else None

    def _embed(self) -> None:
        self._done.append(self._encode([self._prepare(file) for file in self._waiting]))
        self._waiting = []


def _reasons(problems: Problems) -> dict[str, int]:
    """Number of problems by reason; words with digits or slashes are dropped from a reason."""
    kinds = Counter(
        " ".join(w for w in p.reason.split() if not any(c.isdigit() or c == "/" for c in w)) for p in problems.items
    )
    return dict(kinds.most_common())
