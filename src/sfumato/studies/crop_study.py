"""The crop study on a model and a folder of images with boxes: cutting, embedding and measuring of the crops."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from sfumato.data.corruptions import encode_png
from sfumato.data.problems import Problems
from sfumato.data.transforms import IMAGE_ENDINGS, decode_image
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import RetrievalModel
from sfumato.models.embedding_steps import embedding_steps, file_endings
from sfumato.progress import progress_bar
from sfumato.studies.crops import (
    CANDIDATES,
    ROLES,
    CropStudy,
    Triplet,
    Uncertainty,
    choose_triplet,
    join_captions,
    measure_crops,
    rows_of,
)
from sfumato.studies.phrase_boxes import BoxedImage, read_boxed_images

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""The area thresholds of the paper, as fractions of an image."""

EXAMPLES = 4
"""Number of triplets to look at."""

_TOGETHER = 64
_LEVEL = 0.95


@dataclass(frozen=True)
class Example:
    """An example triplet for the page.

    Attributes:
        picture: id of the image.
        threshold: the area threshold at which it was chosen.
        crops: three PNG files.
        captions: three texts.
    """

    picture: str
    threshold: float
    crops: tuple[bytes, ...]
    captions: tuple[str, ...]


@dataclass(frozen=True)
class _Chosen:
    """A triplet of an image, and the positions of its crops among all embedded crops."""

    triplet: Triplet
    area: float
    crops: tuple[int, int, int]
    captions: tuple[str, str, str]


def study_crops(
    retrieval_model: RetrievalModel,
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

    Args:
        retrieval_model: the model.
        regions: JSON file of boxes, see :func:`~sfumato.studies.phrase_boxes.read_boxed_images`.
        images: folder of the images.
        name: of the model.
        thresholds: fractions of an image's area, each in (0, 1].
        sample: number of images; all if None.
        uncertainty: "total_variance", "log_det" or "geometric_std".
        n_resamples: number of bootstrap resamples of the intervals.
        seed: of the sample and the resamples.

    Returns:
        (the figures, some example triplets, the items left out).

    Raises:
        UserError: the model reads region features, the files cannot be used, or no image has enough boxes.
        ValueError: a number is out of range, or the uncertainty is unknown.
    """
    if uncertainty not in get_args(Uncertainty):
        raise ValueError(f"--uncertainty {uncertainty}: unknown; known: {', '.join(get_args(Uncertainty))}")
    if not thresholds or not all(0 < t <= 1 for t in thresholds) or len(set(thresholds)) < len(thresholds):
        raise ValueError(f"thresholds must be different fractions in (0, 1], got {', '.join(map(str, thresholds))}")
    if file_endings(retrieval_model.model) != IMAGE_ENDINGS:
        raise UserError("the model reads region features, but the crop study cuts crops out of image files")
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

    def __init__(self, retrieval_model: RetrievalModel) -> None:
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
