"""The comparison of crops of single boxes with crops of two boxes: is an image of two objects less certain?

For an area threshold, take the ten largest boxes of an image below it. A is the largest. B is the one of the other nine
that overlaps least with A. C is the smallest box around both. The captions of A and B are the phrases of the boxes;
that of C joins them with "and". The study answers two questions: whether C is less certain than A, among crops and
among captions, and how often an item of A or C is closer to its own partner than to the other one.

Paper: Pishdad et al., "Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations", section 4.6.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from sfumato.data.image_decoding import decode_image, encode_png
from sfumato.data.images import Problems
from sfumato.distances import get_distance
from sfumato.errors import UserError, progress_bar
from sfumato.files import is_plain_name, read_json
from sfumato.gaussian import GaussianEmbedding, ScalarUncertainty
from sfumato.metrics.bootstrap import bootstrap, mean_statistic
from sfumato.models.embed import embedding_steps
from sfumato.models.model import Model

CANDIDATES = 10
"""Number of boxes among which A and B are chosen; an image with fewer boxes below the threshold is left out."""

MEANS = "squared_l2"
"""The distance that uses only the means."""

ROLES = ("A", "B", "C")

FOLDERS, ENDINGS = ("", "VG_100K", "VG_100K_2"), (".jpg", ".png", ".jpeg")
"""Where below the folder of images an image may be, and how its name may end."""

_FAR = 1e9  # Larger than any image; NaN and infinity are not below it.
_TOGETHER = 64


class BoxedImage(NamedTuple):
    """An image, its (x, y, width, height) boxes in pixels, their phrases, and their places in the JSON file."""

    id: str
    path: Path
    boxes: list[tuple[float, ...]]
    phrases: list[str]
    locations: list[str]


def read_boxed_images(path: Path, images: Path, problems: Problems, *, sample: int, seed: int = 0) -> list[BoxedImage]:
    """Read a sample of images with their boxes from a JSON file in the format of Visual Genome.

    The file is a list of {"id", "regions": [{"x", "y", "width", "height", "phrase"}]}. An image is ID.jpg, ID.png or
    ID.jpeg in one of FOLDERS. The sample depends on the ids and the seed alone.
    """
    if not images.is_dir():
        raise UserError(f"there is no folder {images}")
    entries = read_json(path)
    if not isinstance(entries, list):
        raise UserError(f"{path}: expected a list of images with their regions, as in Visual Genome")
    found: dict[str, tuple[Path, str, list[Any]]] = {}
    for number, entry in enumerate(entries):
        where = f"{path}[{number}]"
        regions = entry.get("regions") if isinstance(entry, dict) else None
        identity = str(entry.get("id", entry.get("image_id", ""))) if isinstance(regions, list) else ""
        names = (images / folder / f"{identity}{ending}" for folder in FOLDERS for ending in ENDINGS)
        if not is_plain_name(identity) or not isinstance(regions, list):
            problems.add(where, 'expected an object with an "id" and a list of "regions"')
        elif identity in found:
            problems.add(where, f"id {identity} occurred before")
        elif (file := next((name for name in names if name.is_file()), None)) is None:
            problems.add(where, f"image {identity} is missing from {images}")
        else:
            found[identity] = file, where, regions
    by_hash = sorted(found, key=lambda identity: hashlib.sha256(f"{seed} {identity}".encode()).digest()[:8])
    chosen = set(by_hash[:sample])
    read = [_with_boxes(identity, *one, problems) for identity, one in found.items() if identity in chosen]
    if not any(image.boxes for image in read):
        raise UserError(f"{path} with {images} gives no usable box:\n{problems.summary()}")
    return read


def _with_boxes(identity: str, file: Path, where: str, regions: Sequence[Any], problems: Problems) -> BoxedImage:
    image = BoxedImage(identity, file, [], [], [])
    for number, region in enumerate(regions):
        location, values = f"{where}.regions[{number}]", region if isinstance(region, dict) else {}
        box = [values.get(key) for key in ("x", "y", "width", "height")]
        numbers = tuple(float(v) for v in box if isinstance(v, int | float) and not isinstance(v, bool))
        if len(numbers) < 4 or not all(abs(v) < _FAR for v in numbers):
            problems.add(location, "expected numbers x, y, width and height")
        elif not isinstance(values.get("phrase"), str) or not values["phrase"].strip():
            problems.add(location, "empty phrase")
        elif min(numbers[2:]) <= 0:
            problems.add(location, f"a box of {numbers[2]:g} x {numbers[3]:g} pixels has no area")
        else:
            image.boxes.append(numbers)
            image.phrases.append(" ".join(values["phrase"].split()))
            image.locations.append(location)
    return image


class Triplet(NamedTuple):
    """The boxes chosen in an image: their numbers, and (3, 4) left, top, right, bottom of A, B and C."""

    a: int
    b: int
    boxes: np.ndarray


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
    return np.asarray(common / union)


def measure_crops(
    crops: Mapping[str, GaussianEmbedding],
    captions: Mapping[str, GaussianEmbedding],
    *,
    distance: str,
    uncertainty: str = "total_variance",
    n_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure n triplets, given the (n, d) embeddings of each role: intervals as plain values.

    Of crops and of captions: the mean uncertainty of each role, how often C is above A, and the mean of C - A; None for
    points. By distance, how often each query of the binary selection chooses its own partner.
    """
    sides, values = {"crops": crops, "captions": captions}, dict[str, np.ndarray]()
    for side, found in sides.items():
        if any(bool((e.total_variance == 0).all()) for e in found.values()):
            continue
        own = {role: getattr(found[role], uncertainty).double().cpu().numpy() for role in ROLES}
        values |= {f"{side} {role}": own[role] for role in ROLES}
        values |= {f"{side} above": _above(own["C"], own["A"]), f"{side} difference": own["C"] - own["A"]}
    distances = tuple(dict.fromkeys((distance, MEANS)))
    for name in distances:
        row = get_distance(name).row
        d = {a + b: row(crops[a], captions[b]).double().cpu().numpy() for a in ("A", "C") for b in ("A", "C")}
        partners = {"image A": ("AA", "AC"), "image C": ("CC", "CA"), "text A": ("AA", "CA"), "text C": ("CC", "AC")}
        values |= {f"{name} {cell}": _above(d[other], d[own]) for cell, (own, other) in partners.items()}
    n = crops["A"].n
    statistics = {name: mean_statistic(value) for name, value in values.items()}
    n_resamples = n_resamples if n > 1 else 0  # Resamples of a single triplet would all be equal.
    intervals = bootstrap(statistics, n, n_resamples=n_resamples, seed=seed)

    def of(prefix: str) -> dict[str, Any] | None:
        start = f"{prefix} "
        return {key.removeprefix(start): asdict(i) for key, i in intervals.items() if key.startswith(start)} or None

    return {side: of(side) for side in sides} | {"selection": {name: of(name) for name in distances}}


def _above(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(n,) 1 where one is larger, one half where they are equal, else 0."""
    return np.asarray((one > other) + (one == other) / 2)


@dataclass(frozen=True)
class Chosen:
    """A triplet of an image: its boxes and captions, and the area of the image."""

    image: str
    triplet: Triplet
    area: float
    captions: tuple[str, str, str]

    def keys(self) -> list[tuple[Any, ...]]:
        """What names each of the three crops."""
        return [(self.image, *box.tolist()) for box in self.triplet.boxes]


def study_crops(
    retrieval_model: Model,
    regions: str | Path,
    images: str | Path,
    *,
    thresholds: Sequence[float],
    sample: int = 2000,
    uncertainty: str = "total_variance",
    n_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Choose the triplets of a sample of images, embed their crops and captions, and measure them.

    Images are read one by one. Crops are embedded in batches, equal crops once.
    """
    if uncertainty not in get_args(ScalarUncertainty):
        raise UserError(f"crops.uncertainty={uncertainty}: unknown; known: {', '.join(get_args(ScalarUncertainty))}")
    if not thresholds or not all(0 < t <= 1 for t in thresholds) or len(set(thresholds)) < len(thresholds):
        raise UserError(f"thresholds must be different fractions in (0, 1], got {', '.join(map(str, thresholds))}")
    if sample < 1 or n_resamples < 0:
        raise UserError(f"crops.sample must be at least 1 and crops.bootstrap at least 0, got {sample}, {n_resamples}")
    if features := retrieval_model.model.image.processor.reads:
        raise UserError(f"the model reads {features}, but the crop study cuts crops out of image files")
    problems = Problems()
    pictures = read_boxed_images(Path(regions), Path(images), problems, sample=sample, seed=seed)
    chosen: dict[float, list[Chosen]] = {threshold: [] for threshold in thresholds}
    place, crops = embed_crops(retrieval_model, cut_crops(pictures, chosen, problems))
    if not place:
        raise UserError(
            f"none of {len(pictures)} images has {CANDIDATES} boxes below a threshold of"
            f" {', '.join(f'{t:g}' for t in thresholds)}:\n{problems.summary()}"
        )
    texts = list(dict.fromkeys(text for found in chosen.values() for one in found for text in one.captions))
    captions, position = retrieval_model.model.embed_texts(texts), {text: k for k, text in enumerate(texts)}
    figures = [
        {"threshold": threshold, "n": len(found), "left_out": len(pictures) - len(found)}
        | measure_crops(
            {role: crops[np.array([place[one.keys()[k]] for one in found])] for k, role in enumerate(ROLES)},
            {role: captions[np.array([position[one.captions[k]] for one in found])] for k, role in enumerate(ROLES)},
            distance=retrieval_model.distance, uncertainty=uncertainty, n_resamples=n_resamples, seed=seed,
        )
        for threshold, found in chosen.items()
        if found
    ]  # fmt: skip
    found = {"uncertainty": uncertainty, "n_pictures": len(pictures), "thresholds": figures}
    return found | {"problems": _reasons(problems)}


def cut_crops(
    pictures: Sequence[BoxedImage], chosen: Mapping[float, list[Chosen]], problems: Problems
) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    """Fill in the triplets of all thresholds, image by image, and give the key and the PNG file of each new crop."""
    with progress_bar("embedding crops", len(pictures)) as advance:
        for picture in pictures:
            advance(1)
            try:
                # Boxes are in pixels of the file without its EXIF orientation.
                pixels = decode_image(picture.path.read_bytes(), None, upright=False)
            except (OSError, ValueError) as error:
                problems.add(picture.path, str(error))
                continue
            _, height, width = pixels.shape
            boxes, phrases = _within(picture, width, height, problems)
            done: set[tuple[Any, ...]] = set()
            for threshold, found in chosen.items():
                triplet = choose_triplet(boxes, width * height, threshold)
                if triplet is None:
                    continue
                a, b = phrases[triplet.a], phrases[triplet.b]
                found.append(Chosen(picture.id, triplet, width * height, (a, b, f"{a} and {b}")))
                for key in set(found[-1].keys()) - done:
                    left, top, right, bottom = map(int, key[1:])
                    yield key, encode_png(pixels[:, top:bottom, left:right])
                done.update(found[-1].keys())


def _within(picture: BoxedImage, width: int, height: int, problems: Problems) -> tuple[np.ndarray, list[str]]:
    """(n, 4) left, top, right, bottom in whole pixels of the boxes, cut to the image, and their phrases."""
    boxes, phrases = [], []
    for (x, y, w, h), phrase, location in zip(picture.boxes, picture.phrases, picture.locations, strict=True):
        wanted = round(x), round(y), round(x + w), round(y + h)
        left, top, right, bottom = max(wanted[0], 0), max(wanted[1], 0), min(wanted[2], width), min(wanted[3], height)
        if right <= left or bottom <= top:
            problems.add(location, f"the box has no pixel of the image of {width} x {height}")
            continue
        if (left, top, right, bottom) != wanted:
            problems.add(location, "the box extends beyond the image; it is cut to the image")
        boxes.append((left, top, right, bottom))
        phrases.append(phrase)
    return np.array(boxes, dtype=np.float64).reshape(-1, 4), phrases


def embed_crops(
    retrieval_model: Model, files: Iterator[tuple[tuple[Any, ...], bytes]]
) -> tuple[dict[tuple[Any, ...], int], GaussianEmbedding]:
    """Embed in batches, without the cache on disk of a frozen backbone, which is for whole images."""
    prepare, encode = embedding_steps(retrieval_model.model.image, "images")
    place, done = dict[tuple[Any, ...], int](), list[GaussianEmbedding]()
    while some := list(islice(files, _TOGETHER)):
        place |= {key: len(place) + k for k, (key, _) in enumerate(some)}
        done.append(encode([prepare(file) for _, file in some]))
    return place, GaussianEmbedding.cat(done) if done else GaussianEmbedding.point(torch.zeros(0, 1))


def _reasons(problems: Problems) -> dict[str, int]:
    """Number of problems by reason; words with digits or slashes are dropped from a reason."""
    kinds = Counter(
        " ".join(w for w in p.reason.split() if not any(c.isdigit() or c == "/" for c in w)) for p in problems.items
    )
    return dict(kinds.most_common())
