"""Reading of images with boxes and phrases from a JSON file in the format of Visual Genome."""

import hashlib
import heapq
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.data.images import Problems
from sfumato.errors import UserError
from sfumato.files import is_plain_name

FOLDERS = ("", "VG_100K", "VG_100K_2")
"""Folders below the folder of images in which an image may be."""

_ENDINGS = (".jpg", ".png", ".jpeg")
_FAR = 1e9  # Larger than any image; NaN and infinity are not below it.
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class PhraseBox:
    """A box in an image and the phrase that describes it."""

    x: float  # left edge in pixels; may be outside of the image
    y: float  # upper edge in pixels; may be outside of the image
    width: float  # in pixels
    height: float  # in pixels
    phrase: str  # not empty
    location: str  # in the file, for messages


@dataclass(frozen=True)
class BoxedImage:
    """An image and its boxes."""

    id: str  # of the image
    path: Path  # path of the existing image file
    boxes: tuple[PhraseBox, ...]  # in the order of the file


def read_boxed_images(
    path: str | Path,
    images: str | Path,
    problems: Problems,
    *,
    sample: int | None = None,
    seed: int = 0,
    chunk_size: int = 2**20,
) -> list[BoxedImage]:
    """Read a sample of images with their boxes.

    The file is a list of {"id", "regions": [{"region_id", "x", "y", "width", "height", "phrase", "image_id"}]}. An
    image is ID.jpg, ID.png or ID.jpeg, in the folder or in VG_100K or VG_100K_2 below it. The file is read once, entry
    by entry, because that of Visual Genome has 5.4 million boxes.
    """
    path, images = Path(path), Path(images)
    if sample is not None and sample < 1:
        raise ValueError(f"sample must be at least 1, got {sample}")
    if not images.is_dir():
        raise UserError(f"there is no folder {images}")
    chosen: list[tuple[int, int, str, Path, list[Any]]] = []  # A heap whose first item is the next to be removed.
    seen: set[str] = set()
    for number, entry in enumerate(_entries(path, chunk_size)):
        location = f"{path}[{number}]"
        identity = _id(entry)
        if identity is None:
            problems.add(location, 'expected an object with an "id" and a list of "regions"')
            continue
        if identity in seen:
            problems.add(location, f"id {identity} occurred before")
            continue
        seen.add(identity)
        file = _find(images, identity)
        if file is None:
            problems.add(location, f"image {identity} is missing from {images}")
            continue
        key = -int.from_bytes(hashlib.sha256(f"{seed} {identity}".encode()).digest()[:8], "big")
        keep = heapq.heappush if sample is None or len(chosen) < sample else heapq.heappushpop
        keep(chosen, (key, number, identity, file, entry["regions"]))
    found = [
        BoxedImage(identity, file, tuple(_boxes(regions, f"{path}[{number}]", problems)))
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


def _boxes(regions: list[Any], location: str, problems: Problems) -> Iterator[PhraseBox]:
    for number, region in enumerate(regions):
        where = f"{location}.regions[{number}]"
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


def _entries(path: Path, chunk_size: int) -> Iterator[Any]:
    """The items of a JSON list; about one of them is in memory at a time."""
    decoder = json.JSONDecoder()
    try:
        with path.open(encoding="utf-8-sig") as file:
            text, position, ended = file.read(chunk_size).lstrip(), 1, False
            if not text.startswith("["):
                raise UserError(f"{path}: expected a list of images with their regions, as in Visual Genome")
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
                # Doubles the text, so that a long item is not decoded from its start for every chunk.
                more = file.read(max(chunk_size, len(text) - position))
                text, position, ended = text[position:] + more, 0, not more
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
