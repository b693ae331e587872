"""The crop study on a model and a folder of images with boxes: reading boxes, cropping, embedding and measuring."""

import hashlib
import heapq
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from sfumato.data.corruptions import encode_png
from sfumato.data.problems import Problems
from sfumato.data.transforms import IMAGE_ENDINGS, decode_image
from sfumato.errors import UserError
from sfumato.files import is_plain_name
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embed import RetrievalModel
from sfumato.models.embedding_steps import embedding_steps, file_endings
from sfumato.progress import progress_bar
from sfumato.studies.crops import (
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

FOLDERS = ("", "VG_100K", "VG_100K_2")
"""Where below the folder of the pictures one may lie."""

_ENDINGS = (".jpg", ".png", ".jpeg")
_CHUNK = 2**20
_FAR = 1e9  # Beyond any picture; NaN and infinity are not below it.
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class PhraseBox:
    """A part of a picture and what is said of it.

    Attributes:
        x, y: left upper corner in pixels; may lie outside of the picture.
        width, height: in pixels.
        phrase: not empty.
        place: where it stands, for messages.
    """

    x: float
    y: float
    width: float
    height: float
    phrase: str
    place: str


@dataclass(frozen=True)
class BoxedPicture:
    """A picture and its boxes.

    Attributes:
        id: of the picture.
        path: of its file, which exists.
        boxes: in the order of the file.
    """

    id: str
    path: Path
    boxes: tuple[PhraseBox, ...]


def read_boxed_pictures(
    path: str | Path, images: str | Path, problems: Problems, *, sample: int | None = None, seed: int = 0
) -> list[BoxedPicture]:
    """Read a sample of the pictures of a file of boxes.

    The file is a list of {"id", "regions": [{"region_id", "x", "y", "width", "height", "phrase", "image_id"}]}; a picture is
    ID.jpg, .png or .jpeg, in the folder or in VG_100K or VG_100K_2 below it. The file is read once and piece by piece: Visual Genome's has 5.4 million
    boxes.

    Args:
        path: the JSON file.
        images: folder of the pictures.
        problems: receives malformed entries and missing pictures of the whole file, and malformed boxes and empty phrases of the sample.
        sample: number of pictures, at random among those that are there; all if None.
        seed: of the sample, which depends on the ids alone and not on their order.

    Returns:
        The sample, in the order of the file.

    Raises:
        UserError: the file or the folder is missing, it is not such a list, or nothing in it can be used.
        ValueError: sample is less than 1.
    """
    path, images = Path(path), Path(images)
    if sample is not None and sample < 1:
        raise ValueError(f"sample must be at least 1, got {sample}")
    if not images.is_dir():
        raise UserError(f"there is no folder {images}")
    chosen: list[tuple[int, int, str, Path, list[Any]]] = []  # A heap, whose first is the next to go.
    seen: set[str] = set()
    for number, entry in enumerate(_entries(path)):
        place = f"{path}[{number}]"
        identity = _id(entry)
        if identity is None:
            problems.add(place, 'expected an object with an "id" and a list of "regions"')
            continue
        if identity in seen:
            problems.add(place, f"id {identity} occurs before")
            continue
        seen.add(identity)
        file = _find(images, identity)
        if file is None:
            problems.add(place, f"picture {identity} is missing from {images}")
            continue
        key = -int.from_bytes(hashlib.sha256(f"{seed} {identity}".encode()).digest()[:8], "big")
        keep = heapq.heappush if sample is None or len(chosen) < sample else heapq.heappushpop
        keep(chosen, (key, number, identity, file, entry["regions"]))
    found = [
        BoxedPicture(identity, file, tuple(_boxes(regions, f"{path}[{number}]", problems)))
        for _, number, identity, file, regions in sorted(chosen, key=lambda item: item[1])
    ]
    if not any(picture.boxes for picture in found):
        raise UserError(f"{path} with {images} gives no usable box:\n{problems.summary()}")
    return found


def _id(entry: Any) -> str | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("regions"), list):
        return None
    identity = entry.get("id", entry.get("image_id"))
    text = str(identity) if isinstance(identity, int | str) and not isinstance(identity, bool) else ""
    return text if is_plain_name(text) else None


def _find(images: Path, identity: str) -> Path | None:
    paths = (images / folder / f"{identity}{ending}" for folder in FOLDERS for ending in _ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def _boxes(regions: list[Any], place: str, problems: Problems) -> Iterator[PhraseBox]:
    for number, region in enumerate(regions):
        where = f"{place}.regions[{number}]"
        x, y, width, height = (_number(region, key) for key in ("x", "y", "width", "height"))
        if x is None or y is None or width is None or height is None:
            problems.add(where, "expected numbers x, y, width and height")
        elif not isinstance(region.get("phrase"), str) or not region["phrase"].strip():
            problems.add(where, "empty phrase")
        elif min(width, height) <= 0:
            problems.add(where, f"a box of {width:g} x {height:g} pixels has no area")
        else:
            yield PhraseBox(x, y, width, height, " ".join(region["phrase"].split()), where)


def _number(region: Any, key: str) -> float | None:
    value = region.get(key) if isinstance(region, dict) else None
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _FAR
    return float(value) if numeric and value is not None else None


def _entries(path: Path) -> Iterator[Any]:
    """The items of a JSON list, one after the other; about one of them is in memory at a time."""
    decoder = json.JSONDecoder()
    try:
        with path.open(encoding="utf-8-sig") as file:
            text, position, ended = file.read(_CHUNK).lstrip(), 1, False
            if not text.startswith("["):
                raise UserError(f"{path}: expected a list of pictures with their regions, as Visual Genome has it")
            separated, wrong = True, "the end of the list is missing"
            while True:
                position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
                found = text[position : position + 1]
                if found == "]":
                    return
                if found == "," and not separated:
                    position, separated = position + 1, True
                    continue
                if found and not separated:
                    raise UserError(f"{path}: not JSON: expected a comma, found {text[position : position + 20]!r}")
                if found:
                    try:
                        item, position = decoder.raw_decode(text, position)
                    except ValueError as reason:
                        wrong = str(reason)
                    else:
                        yield item
                        separated = False
                        continue
                if ended:
                    raise UserError(f"{path}: not JSON, or cut short: {wrong}")
                # As much again as there is, so that a long item is not decoded from its start for every piece.
                more = file.read(max(_CHUNK, len(text) - position))
                text, position, ended = text[position:] + more, 0, not more
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


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
    """Choose the triplets of a sample of pictures, embed their crops and captions, and measure.

    Pictures are read one after the other; crops are embedded as they are cut, equal ones once.

    Args:
        matcher: the model.
        regions, images: see :func:`~sfumato.studies.crop_study.read_boxed_pictures`.
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
    if file_endings(retrieval_model.model) != IMAGE_ENDINGS:
        raise UserError("the model reads region features, and crops are cut out of pictures")
    problems = Problems()
    pictures = read_boxed_pictures(regions, images, problems, sample=sample, seed=seed)
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
            f"none of {len(pictures)} pictures has {CANDIDATES} boxes below a threshold of"
            f" {', '.join(f'{t:g}' for t in thresholds)}:\n{problems.summary()}"
        )
    texts = list(dict.fromkeys(text for found in chosen.values() for one in found for text in one.captions))
    places = {text: place for place, text in enumerate(texts)}
    captions = retrieval_model.model.embed_texts(texts)
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
                distance=retrieval_model.distance,
                uncertainty=uncertainty,
                n_resamples=n_resamples,
                level=_LEVEL,
                seed=seed,
            )
        )
    study = CropStudy(
        name,
        retrieval_model.distance,
        uncertainty,
        len(pictures),
        figures,
        n_resamples,
        _LEVEL,
        seed,
        _reasons(problems),
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

    def __init__(self, retrieval_model: RetrievalModel) -> None:
        self._prepare, self._encode = embedding_steps(retrieval_model.model.image, "images")
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
