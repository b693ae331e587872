"""The study of crops on a model and a folder of pictures with boxes: cutting out, embedding, measuring, and what is left behind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from sfumato.analysis.crops import (
    CANDIDATES,
    ROLES,
    CropFigures,
    CropStudy,
    Triplet,
    Uncertainty,
    choose_triplet,
    join_captions,
    measure_crops,
    rows_of,
)
from sfumato.data.boxes import BoxedPicture, read_boxed_pictures
from sfumato.data.corruptions import encode_png
from sfumato.data.manifest import PICTURE_ENDINGS
from sfumato.data.problems import Problems
from sfumato.data.transforms import decode_image
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.progress import progress_bar
from sfumato.training.inference import Matcher
from sfumato.training.ingest import embedding_steps, file_endings

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Those of the paper."""

EXAMPLES = 4

_TOGETHER = 64
_LEVEL = 0.95


@dataclass(frozen=True)
class Example:
    """A triplet to look at.

    Attributes:
        picture: its id.
        threshold: at which it was chosen.
        crops: three PNG files.
        captions: three texts.
    """

    picture: str
    threshold: float
    crops: tuple[bytes, ...]
    captions: tuple[str, ...]


@dataclass(frozen=True)
class _Chosen:
    """A triplet of a picture, and where its crops stand among all that are embedded."""

    triplet: Triplet
    area: float
    crops: tuple[int, int, int]
    captions: tuple[str, str, str]


def study_crops(
    matcher: Matcher,
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
    """Choose the triplets of a sample of pictures, embed their crops and captions, and measure.

    Pictures are read one after the other; crops are embedded as they are cut, equal ones once.

    Args:
        matcher: the model.
        regions, images: see :func:`~sfumato.data.boxes.read_boxed_pictures`.
        name: of the model.
        thresholds: shares of a picture's area, each in (0, 1].
        sample: number of pictures; all if None.
        uncertainty: "total_variance", "log_det" or "geometric_std".
        n_resamples: of the confidence intervals.
        seed: of the sample and the intervals.

    Returns:
        (the figures, a few triplets to look at, what was left out).

    Raises:
        UserError: the model reads no pictures, the files cannot be used, or no picture has enough boxes.
        ValueError: a number is out of its range.
    """
    if uncertainty not in get_args(Uncertainty):
        raise ValueError(f"--uncertainty {uncertainty}: unknown; known: {', '.join(get_args(Uncertainty))}")
    if not thresholds or not all(0 < t <= 1 for t in thresholds) or len(set(thresholds)) < len(thresholds):
        raise ValueError(f"thresholds must be different shares in (0, 1], got {', '.join(map(str, thresholds))}")
    if file_endings(matcher.model) != PICTURE_ENDINGS:
        raise UserError("the model reads region features, and crops are cut out of pictures")
    problems = Problems()
    pictures = read_boxed_pictures(regions, images, problems, sample=sample, seed=seed)
    embedder = _Crops(matcher)
    chosen: dict[float, list[_Chosen]] = {threshold: [] for threshold in thresholds}
    examples: list[Example] = []
    with progress_bar("embedding crops", len(pictures)) as advance:
        for picture in pictures:
            _add(picture, chosen, embedder, examples, problems)
            advance(1)
    crops = embedder.embeddings()
    if crops is None:
        raise UserError(
            f"none of {len(pictures)} pictures has {CANDIDATES} boxes below a threshold of"
            f" {', '.join(f'{t:g}' for t in thresholds)}:\n{problems.summary()}"
        )
    texts = list(dict.fromkeys(text for found in chosen.values() for one in found for text in one.captions))
    places = {text: place for place, text in enumerate(texts)}
    captions = matcher.model.embed_texts(texts)
    figures: list[CropFigures] = []
    for threshold, found in chosen.items():
        if not found:
            continue
        figures.append(
            measure_crops(
                {role: rows_of(crops, [one.crops[k] for one in found]) for k, role in enumerate(ROLES)},
                {role: rows_of(captions, [places[one.captions[k]] for one in found]) for k, role in enumerate(ROLES)},
                [one.triplet for one in found],
                np.array([one.area for one in found]),
                threshold=threshold,
                left_out=len(pictures) - len(found),
                distance=matcher.distance,
                uncertainty=uncertainty,
                n_resamples=n_resamples,
                level=_LEVEL,
                seed=seed,
            )
        )
    study = CropStudy(
        name, matcher.distance, uncertainty, len(pictures), figures, n_resamples, _LEVEL, seed, _reasons(problems)
    )
    return study, examples, problems


def _add(
    picture: BoxedPicture,
    chosen: dict[float, list[_Chosen]],
    embedder: "_Crops",
    examples: list[Example],
    problems: Problems,
) -> None:
    """Choose in one picture for all thresholds."""
    try:
        # Boxes are in the pixels of the file: whoever drew them saw no EXIF orientation.
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
        places = [embedder.add(picture.id, pixels, box) for box in triplet.boxes]
        found.append(_Chosen(triplet, width * height, (places[0], places[1], places[2]), captions))
        if len(examples) < EXAMPLES and picture.id not in {example.picture for example in examples}:
            files = tuple(_cut(pixels, box) for box in triplet.boxes)
            examples.append(Example(picture.id, threshold, files, captions))


def _within(picture: BoxedPicture, width: int, height: int, problems: Problems) -> tuple[np.ndarray, list[str]]:
    """(n, 4) left, top, right, bottom in whole pixels of the boxes, cut to the picture, and their phrases."""
    boxes, phrases = [], []
    for box in picture.boxes:
        wanted = round(box.x), round(box.y), round(box.x + box.width), round(box.y + box.height)
        left, top, right, bottom = max(wanted[0], 0), max(wanted[1], 0), min(wanted[2], width), min(wanted[3], height)
        if right <= left or bottom <= top:
            problems.add(box.place, f"the box has no pixel of the picture of {width} x {height}")
            continue
        if (left, top, right, bottom) != wanted:
            problems.add(box.place, "the box sticks out of the picture; it is used as far as it lies within")
        boxes.append((left, top, right, bottom))
        phrases.append(box.phrase)
    return np.array(boxes, dtype=np.float64).reshape(-1, 4), phrases


def _cut(pixels: np.ndarray, box: np.ndarray) -> bytes:
    left, top, right, bottom = box.astype(int).tolist()
    return encode_png(pixels[:, top:bottom, left:right])


class _Crops:
    """Embeds crops a batch at a time, without a frozen backbone's cache on disk, which other pictures live in."""

    def __init__(self, matcher: Matcher) -> None:
        self._prepare, self._encode = embedding_steps(matcher.model.image, "images")
        self._place: dict[tuple[object, ...], int] = {}
        self._waiting: list[bytes] = []
        self._done: list[GaussianEmbedding] = []

    def add(self, picture: str, pixels: np.ndarray, box: np.ndarray) -> int:
        """Where the embedding of this crop will stand."""
        key = (picture, *box.tolist())
        if key not in self._place:
            self._place[key] = len(self._place)
            self._waiting.append(_cut(pixels, box))
            if len(self._waiting) == _TOGETHER:
                self._embed()
        return self._place[key]

    def embeddings(self) -> GaussianEmbedding | None:
        """All of them; None if there are none."""
        if self._waiting:
            self._embed()
        return GaussianEmbedding.cat(self._done) if self._done else None

    def _embed(self) -> None:
        self._done.append(self._encode([self._prepare(file) for file in self._waiting]))
        self._waiting = []


def _reasons(problems: Problems) -> dict[str, int]:
    """How often each kind of problem was met: its words, without what is particular."""
    kinds = Counter(
        " ".join(w for w in p.reason.split() if not any(c.isdigit() or c == "/" for c in w)) for p in problems.items
    )
    return dict(kinds.most_common())
