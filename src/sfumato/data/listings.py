"""Listings of the items to embed, from a folder, a manifest, shards or a text file: a fixed order, cut into sections.

A listing has the location of every item and a function that reads it. It holds names, never pixels. The names of a
folder or a manifest are kept in memory. The names of a shard are kept while that shard is read. For a text file, only
the positions of the sections are kept.
"""

import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from sfumato.data.captioned import is_unicode
from sfumato.data.image_decoding import IMAGE_ENDINGS, spelt
from sfumato.data.images import FileImage, image_files
from sfumato.data.manifest import read_rows
from sfumato.data.shards import ShardError, ShardImage, expand_shards, list_shard
from sfumato.errors import UserError

T = TypeVar("T")
Modality = Literal["images", "texts"]

PART_SIZE = 4096
"""Default number of items of a part: a job that was killed repeats at most so many."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An item to embed."""

    id: str  # distinct id of a usable item of a listing
    location: str  # where it is, for messages
    payload: dict[str, str]  # data that is stored with the embedding
    read: Callable[[], bytes | str] = field(repr=False)


@dataclass(frozen=True)
class Listing:
    """Items in a fixed order, in sections that can be embedded independently of each other."""

    modality: Modality  # modality of the items
    kind: str  # "folder", "manifest", "shards" or "texts"
    path: str  # as the user gave it
    n: int  # number of listed images, rows, shards or lines
    digest: str
    part_size: int  # maximum number of items in a part. A section has no more items either, except for shards
    sections: int  # number of sections
    entries: Callable[[int], Sequence[Entry]] = field(repr=False)


def list_folder(folder: str | Path, *, part_size: int, endings: frozenset[str] = IMAGE_ENDINGS) -> Listing:
    """Every image below a folder, sorted by path; ids are relative paths. Links to folders are not followed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    names = image_files(folder, endings=endings)
    if not names:
        raise UserError(f"no images in {folder} (looked for {spelt(endings)})")
    home = os.path.abspath(folder)

    def entry(name: str) -> Entry:
        path = f"{home}/{name}"
        if not is_unicode(name):
            return _unusable(path, "the name is not valid UTF-8")
        return Entry(name, path, {"path": path}, FileImage(Path(path)).read_bytes)

    return _in_sections("folder", folder, names, part_size, entry, map(os.fsencode, names))


def list_manifest(path: str | Path, *, part_size: int, image_root: str | Path | None = None) -> Listing:
    """The images of a manifest (JSONL, CSV, Parquet) in its order; rows need no captions, and no image is opened.

    An image that occurs several times with the same id (one row for each caption) is listed once.
    """
    root = Path(path).parent if image_root is None else Path(image_root)
    rows = list(_images_of_manifest(Path(path), root))
    if not rows:
        raise UserError(f"{path} lists no image")

    def entry(row: tuple[str, str, str, str]) -> Entry:
        location, identity, image, error = row
        if error:
            return _unusable(location, error)
        return Entry(identity, image, {"path": os.path.abspath(image)}, FileImage(Path(image)).read_bytes)

    listed = (json.dumps([i, image and os.path.relpath(image, root), error]).encode() for _, i, image, error in rows)
    return _in_sections("manifest", path, rows, part_size, entry, listed)


def _images_of_manifest(path: Path, root: Path) -> Iterator[tuple[str, str, str, str]]:
    """(location, id, path, "") of every image, or (location, "", "", what is wrong with the row)."""
    seen: dict[str, str] = {}
    for location, values in read_rows(path, ("image",)):
        image = "" if isinstance(values, str) else values.get("image")
        if isinstance(values, str):
            yield location, "", "", values
        elif not isinstance(image, str) or not image.strip():
            yield location, "", "", f"no image: found {reprlib.repr(image)}, expected a path"
        else:
            identity = image if values.get("id") in (None, "") else str(values["id"])
            if not is_unicode(identity + image):
                yield location, "", "", "not valid Unicode; save the manifest as UTF-8"
            elif identity not in seen:
                seen[identity] = image
                yield location, identity, str(root / image), ""
            elif seen[identity] != image:
                yield location, "", "", f"id {identity!r} occurred before, with another image"


def list_shards(spec: str, *, part_size: int) -> Listing:
    """The images of webdataset shards, with or without captions; a section is a shard.

    Ids are SHARD.tar!KEY, relative to the shards' folder.
    """
    paths = [os.path.abspath(shard) for shard in expand_shards(spec)]
    home = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, home) for path in paths]

    def entry(shard: int, image: ShardImage) -> Entry:
        location = f"{paths[shard]}!{image.key}" if image.key else paths[shard]
        if image.error:
            return _unusable(location, image.error)
        payload = {"path": f"{paths[shard]}!{image.member}"}
        if not is_unicode(names[shard] + image.member):
            return _unusable(location, "the name is not valid UTF-8")
        return Entry(f"{names[shard]}!{image.key}", location, payload, partial(_member, paths[shard], image))

    def entries(shard: int) -> list[Entry]:
        return [entry(shard, image) for image in list_shard(paths[shard])]

    _check_part_size(part_size)
    digest = _digest(map(os.fsencode, names))
    return Listing("images", "shards", spec, len(paths), digest, part_size, len(paths), entries)


def list_texts(path: str | Path, *, part_size: int) -> Listing:
    """The lines of a text file; ids are line numbers from 1, and empty lines are unusable."""
    path = Path(path)
    _check_part_size(part_size)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    starts, n, digest = [], 0, hashlib.sha256()
    with path.open("rb") as file:
        position = 0
        for n, line in enumerate(file, 1):
            if (n - 1) % part_size == 0:
                starts.append(position)
            digest.update(line)
            position += len(line)
    if not n:
        raise UserError(f"{path} holds no text")

    def entry(number: int, line: bytes) -> Entry:
        location = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            return _unusable(location, f"not UTF-8: {error.reason} at byte {error.start} of the line")
        return Entry(str(number), location, {"text": text}, lambda: text) if text else _unusable(location, "empty line")

    def entries(section: int) -> list[Entry]:
        first = section * part_size
        with path.open("rb") as file:
            file.seek(starts[section])
            return [entry(first + k + 1, file.readline()) for k in range(min(part_size, n - first))]

    return Listing("texts", "texts", str(path), n, digest.hexdigest(), part_size, len(starts), entries)


def list_source(
    *,
    images: Path | None = None,
    manifest: Path | None = None,
    shards: str | None = None,
    texts: Path | None = None,
    part_size: int = PART_SIZE,
    endings: frozenset[str] = IMAGE_ENDINGS,
) -> Listing:
    """The listing of the given source; exactly one source must be given."""
    if sum(source is not None for source in (images, manifest, shards, texts)) != 1:
        raise UserError("give one of --images FOLDER, --manifest FILE, --shards PATTERN and --texts FILE")
    if images is not None:
        return list_folder(images, part_size=part_size, endings=endings)
    if manifest is not None:
        return list_manifest(manifest, part_size=part_size)
    if shards is not None:
        return list_shards(shards, part_size=part_size)
    return list_texts(texts or Path(), part_size=part_size)


def _in_sections(
    kind: str,
    path: str | Path,
    items: Sequence[T],
    part_size: int,
    entry: Callable[[T], Entry],
    listed: Iterable[bytes],
) -> Listing:
    _check_part_size(part_size)

    def entries(section: int) -> list[Entry]:
        return [entry(item) for item in items[section * part_size : (section + 1) * part_size]]

    sections = -(-len(items) // part_size)
    return Listing("images", kind, str(path), len(items), _digest(listed), part_size, sections, entries)


def _member(shard: str, image: ShardImage) -> bytes:
    try:
        with open(shard, "rb") as file:
            file.seek(image.offset)
            data = file.read(image.size)
    except OSError as error:
        raise ShardError(shard, f"cannot be read: {error.strerror or error}") from error
    if len(data) < image.size:
        raise ShardError(shard, f"cut short since it was listed: ends within {image.member}")
    return data


def _unusable(location: str, reason: str) -> Entry:
    def read() -> bytes:
        raise ValueError(reason)

    return Entry("", location, {}, read)


def _digest(listed: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for item in listed:
        digest.update(item + b"\0")
    return digest.hexdigest()


def _check_part_size(part_size: int) -> None:
    if part_size < 1:
        raise ValueError(f"part_size must be at least 1, got {part_size}")
