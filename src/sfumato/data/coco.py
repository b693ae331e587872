"""Source "coco": the captions files of COCO itself, captions_train2014.json, captions_val2017.json and their like.

COCO names an image in several ways: its number (42), a file of 2014 (COCO_val2014_000000000042.jpg) and one of 2017
(000000000042.jpg). They are one image here, on disk and among ids. What the package reads is told by content:
Karpathy's split files and COCO's own look alike from outside.
"""

import os
import re
import tarfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sfumato.data.images import FileImage, ImageSource, LazyImage, Problems
from sfumato.data.manifest import splits_of_items
from sfumato.data.pairs import PairData, SourceItem, make_splits
from sfumato.errors import UserError
from sfumato.files import read_json
from sfumato.ids import is_text

JsonKind = Literal["karpathy", "coco", "instances", ""]
"""What a JSON file of COCO is: Karpathy's splits, COCO's captions, COCO's instances, or something else."""

_NAME = re.compile(r"(?:.*/)?(?:COCO_(?:train|val|test)20\d\d_)?(?=\d{12}(?:\.|$))0*(\d+)(?:\.[A-Za-z0-9]{1,5})?")
_FILE = re.compile(r"captions_(train|val)(.*)\.json")


class TarArchive:
    """An uncompressed tar file: one scan finds the members, and any thread can then read them by position."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with tarfile.open(self.path, "r:") as tar:
                self._members = {os.path.normpath(m.name): (m.offset_data, m.size) for m in tar if m.isfile()}
        except tarfile.TarError as error:
            raise ValueError(f"{path}: not an uncompressed tar file ({error}); unpack it, or decompress it") from error
        self._file: IO[bytes] = self.path.open("rb")
        self._lock = threading.Lock()

    def __contains__(self, member: str) -> bool:
        return member in self._members

    def read(self, member: str) -> bytes:
        """The bytes of a member."""
        offset, size = self._members[member]
        with self._lock:
            self._file.seek(offset)
            data = self._file.read(size)
        if len(data) < size:
            raise OSError(f"{self.path} ends within {member}")
        return data


def coco_image_id(name: str) -> str:
    """COCO's image number of a file name or of a number of twelve digits; any other name as it is."""
    match = _NAME.fullmatch(name)
    return match[1] if match else name


def json_kind(loaded: Any) -> JsonKind:
    """What the content of a JSON file is."""
    if not isinstance(loaded, dict) or not isinstance(loaded.get("images"), list):
        return ""
    annotations = loaded.get("annotations")
    if not isinstance(annotations, list):
        return "karpathy" if any(isinstance(one, dict) and "sentences" in one for one in loaded["images"]) else ""
    captioned = any(isinstance(one, dict) and "caption" in one for one in annotations[:100])
    return "coco" if captioned or not annotations else "instances"


def refuse_cocos_own(path: Path, loaded: Any) -> None:
    """Raise an error that names the way out where a Karpathy split file is expected and COCO's own file was given."""
    kind = json_kind(loaded)
    if kind == "coco":
        way = f"Read it with data.source=coco data.path={path}; Karpathy's dataset_coco.json has the papers' test split"
        raise UserError(f"{path}: this is COCO's own captions file, not a Karpathy split file. {way}")
    if kind == "instances":
        found = f"{path}: COCO's annotations without captions"
        raise UserError(f"{found}; expected Karpathy's dataset_coco.json, or captions_*.json with data.source=coco")


def archive_of(images: Path) -> TarArchive | None:
    """The tar file of the images; None if they are in a folder."""
    if not images.exists():
        raise UserError(f"data.images: there is no folder or tar file {images}")
    try:
        return TarArchive(images) if images.is_file() else None
    except ValueError as error:
        raise UserError(f"data.images: {error}") from error


def find_image(images: Path, archive: TarArchive | None, folder: str, name: str) -> ImageSource | None:
    """An image in a folder or an archive; COCO's names of 2014 and 2017 stand for each other."""
    for candidate in _candidates(folder, name):
        if archive is not None:
            if (member := os.path.normpath(candidate)) in archive:
                return LazyImage(f"{archive.path}!{member}", partial(archive.read, member))
        elif os.path.isfile(path := images / candidate):
            return FileImage(path)
    return None


def _candidates(folder: str, name: str) -> Iterator[str]:
    yield os.path.join(folder, name)
    yield name
    if (number := coco_image_id(name)) == name:
        return
    ending = os.path.splitext(name)[1] or ".jpg"
    for part in ("train2014", "val2014", "train2017", "val2017"):
        prefix = f"COCO_{part}_" if part.endswith("2014") else ""
        for place in ("", part):
            yield os.path.join(place, f"{prefix}{number:0>12}{ending}")


class CocoOptions(BaseModel):
    """Section ``data.options`` of the source "coco"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    year: str = Field("", coerce_numbers_to_str=True)
    """2014 or 2017, where a folder has the captions of several years"""


def coco_captions(path: Path, problems: Problems) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Read a captions file of COCO; malformed entries are recorded, captions of known images as remarks.

    Returns (file name of each image by its number, (annotation id, image number, caption) of each caption).
    """
    loaded = read_json(path)
    kind = json_kind(loaded)
    if kind != "coco":
        other = {
            "karpathy": "a Karpathy split file; read it with data.source=karpathy",
            "instances": "COCO's annotations without captions; expected captions_*.json",
            "": 'not a captions file of COCO; expected an object with the lists "images" and "annotations"',
        }
        raise UserError(f"{path}: {other[kind]}")
    files: dict[str, str] = {}
    for number, entry in enumerate(loaded["images"]):
        at = f"{path}:images[{number}]"
        named = isinstance(entry, dict) and entry.get("file_name") and is_text(entry["file_name"])
        if not (named and _is_number(entry.get("id"))):
            problems.add(at, "malformed entry: expected an object with the number id and the string file_name")
        elif str(entry["id"]) in files:
            problems.add(at, f"image {entry['id']} occurred before")
        else:
            files[str(entry["id"])] = entry["file_name"]
    captions, seen = [], set[str]()
    for number, entry in enumerate(loaded["annotations"]):
        at = f"{path}:annotations[{number}]"
        if not (isinstance(entry, dict) and _is_number(entry.get("id")) and _is_number(entry.get("image_id"))):
            problems.add(at, "malformed entry: expected an object with the numbers id and image_id, and a caption")
        elif str(entry["image_id"]) not in files:
            problems.add(at, f"image {entry['image_id']} is not among the images of the file")
        elif str(entry["id"]) in seen:
            problems.remark(at, f"annotation {entry['id']} occurred before; its caption is left out")
        elif not is_text(entry.get("caption")) or not (text := " ".join(entry["caption"].split())):
            problems.remark(at, "empty caption, or no text")
        else:
            seen.add(str(entry["id"]))
            captions.append((str(entry["id"]), str(entry["image_id"]), text))
    return files, captions


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_coco_captions(
    path: str | Path,
    problems: Problems,
    *,
    images: str | Path | None = None,
    year: str = "",
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> dict[str, PairData]:
    """Read COCO's own captions, captions_train2014.json, captions_val2017.json and their like.

    Args:
        path: one file; or a folder with captions_train*.json and captions_val*.json, or one of them.
        problems: receives missing images, images without captions, repeated ids and malformed entries.
        images: folder or uncompressed tar file of the images. They may lie in it or in its folders train2014, val2014,
            train2017 and val2017, under the names of either year. If None: the folder of the file, or the folder above
            it if that one is named annotations.
        year: which files of a folder with several years to read, e.g. "2017".
        val_fraction: one file: fraction of the images for "val", chosen by a hash of the id.
        test_fraction: the same for "test".

    Returns:
        A folder: "train" and "val", as the files say. One file: "train", "val" and "test". Image ids are COCO's
        numbers, text ids the ids of the annotations, as in the benchmarks.

    Raises:
        UserError: a file is missing, the JSON is not of this layout, or nothing in it is usable.
        ValueError: the fractions are negative or leave nothing to train on.
    """
    path = Path(path)
    files = _caption_files(path, year) if path.is_dir() else {"": path}
    root = coco_images(next(iter(files.values()))) if images is None else Path(images)
    archive = archive_of(root)
    items = [item for split, file in files.items() for item in _items(file, split, root, archive, problems)]
    if not items:
        raise UserError(f"{path} with {root} gives no usable pair:\n{problems.summary()}")
    return splits_of_items(items, path, problems, val_fraction, test_fraction)


def coco_images(path: Path) -> Path:
    """Where the images of a captions file are, unless a user says otherwise."""
    folder = path.resolve().parent
    return folder.parent if folder.name == "annotations" else folder


def _caption_files(folder: Path, year: str) -> dict[str, Path]:
    """{split: file} of a folder."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("captions_*.json")):
        if (match := _FILE.fullmatch(file.name)) and year in (match[2], ""):
            found.setdefault(match[1], []).append(file)
    if not found:
        of = f" of {year}" if year else ""
        raise UserError(f"{folder} has no captions_train*.json or captions_val*.json{of}; name one, or another folder")
    if several := next((files for files in found.values() if len(files) > 1), None):
        names = " and ".join(file.name for file in several)
        raise UserError(f"{folder} has {names}; choose with data.options.year=2017, or name one file")
    return {split: files[0] for split, files in found.items()}


def _items(file: Path, split: str, images: Path, tar: TarArchive | None, problems: Problems) -> Iterator[SourceItem]:
    files, captions = coco_captions(file, problems)
    texts: dict[str, list[tuple[str, str]]] = {}
    for identity, image, text in captions:
        texts.setdefault(image, []).append((identity, text))
    for image, name in files.items():
        if (source := find_image(images, tar, "", name)) is None:
            problems.add(f"{file} image {image}", f"image {name} is missing from {images}")
        else:
            yield SourceItem(image, source, tuple(texts.get(image, ())), split, f"{file} image {image}")


@dataclass(frozen=True)
class KarpathyEntry:
    """An image of a split file."""

    location: str  # where it stands, for messages
    filename: str = ""  # name of the image file
    split: str = "none"  # "train" (also for "restval"), "val" or "test"; "none" if it has none, "" if it cannot be read
    folder: str = ""  # COCO's subfolder; "" if there is none
    sentences: tuple[tuple[str, str], ...] = ()  # (sentid, caption as written) of each caption
    mistake: str = ""


def karpathy_entries(path: str | Path) -> list[KarpathyEntry]:
    """All entries of a dataset_coco.json, dataset_flickr30k.json or dataset_flickr8k.json, in their order."""
    path = Path(path)
    loaded = read_json(path)
    refuse_cocos_own(path, loaded)
    entries = loaded.get("images") if isinstance(loaded, dict) else None
    if not isinstance(entries, list):
        raise UserError(f"{path}: not a Karpathy split file; expected an object with a list under 'images'")
    return [_entry(f"{path}:images[{number}]", entry) for number, entry in enumerate(entries)]


def _entry(location: str, entry: Any) -> KarpathyEntry:
    split = (entry.get("split") or "none") if isinstance(entry, dict) else ""
    split = {"restval": "train"}.get(split, split) if isinstance(split, str) else ""
    if mistake := _mistake(entry):
        return KarpathyEntry(location, split=split, mistake=mistake)
    sentences = tuple((str(sentence["sentid"]), sentence["raw"]) for sentence in entry.get("sentences", ()))
    return KarpathyEntry(location, entry["filename"], split, entry.get("filepath") or "", sentences)


def read_karpathy(path: str | Path, images: str | Path, problems: Problems) -> dict[str, PairData]:
    """Read a dataset_coco.json, dataset_flickr30k.json or dataset_flickr8k.json.

    Args:
        path: the JSON file.
        images: folder or uncompressed tar file of the images; either in COCO's subfolders (``filepath``) or in one
            folder. COCO's names of 2014 and 2017 stand for each other.
        problems: receives missing images, images without captions, repeated ids and malformed entries.

    Returns:
        "train" (with "restval"), "val", "test": image ids are file names, text ids are sentence ids. Entries without a
        split, or with the split "none", are left out.

    Raises:
        UserError: a file is missing, the JSON is not of this layout (COCO's own captions are named as such), or nothing
            in it is usable.
    """
    images = Path(images)
    if not (items := list(_karpathy_items(karpathy_entries(path), images, archive_of(images), problems))):
        raise UserError(f"{path} with {images} gives no usable pair:\n{problems.summary()}")
    return make_splits(items)


def _karpathy_items(
    entries: Iterable[KarpathyEntry], images: Path, archive: TarArchive | None, problems: Problems
) -> Iterator[SourceItem]:
    seen_images: set[str] = set()
    seen_texts: set[str] = set()
    for entry in entries:
        if entry.mistake:
            problems.add(entry.location, f"malformed entry: {entry.mistake}")
        elif entry.split == "none":
            continue
        elif entry.filename in seen_images:
            problems.add(entry.location, f"image {entry.filename} occurred before")
        elif (source := find_image(images, archive, entry.folder, entry.filename)) is None:
            problems.add(entry.location, f"image {entry.filename} is missing from {images}")
        else:
            seen_images.add(entry.filename)
            if captions := _usable_sentences(entry, seen_texts, problems):
                problems.captioned += 1
                yield SourceItem(entry.filename, source, captions, entry.split)
            else:
                problems.bare[entry.filename] = entry.location, source


def _mistake(entry: Any) -> str:
    """What is wrong with the form of an entry."""
    if not isinstance(entry, dict):
        return f"found {type(entry).__name__}, expected an object"
    if not isinstance(entry.get("filename"), str) or not entry["filename"]:
        return f"filename is {entry.get('filename')!r}, expected a name"
    for key in ("split", "filepath"):
        if not isinstance(entry.get(key), str | None):
            return f"{key} is of type {type(entry[key]).__name__}, expected a string"
    sentences = entry.get("sentences", [])
    if not isinstance(sentences, list):
        return f"sentences is of type {type(sentences).__name__}, expected a list"
    for sentence in sentences:
        if not isinstance(sentence, dict) or not isinstance(sentence.get("raw"), str) or "sentid" not in sentence:
            return "a sentence lacks sentid, or the string raw"
    return ""


def _usable_sentences(entry: KarpathyEntry, seen: set[str], problems: Problems) -> tuple[tuple[str, str], ...]:
    """(id, caption) of each usable one; the ids are added to the seen ids."""
    usable = []
    for identity, raw in entry.sentences:
        if not (text := " ".join(raw.split())):
            problems.remark(f"{entry.location} sentence {identity}", "empty caption")
        elif identity in seen:
            problems.remark(f"{entry.location} sentence {identity}", "this sentid occurred before; it is left out")
        else:
            seen.add(identity)
            usable.append((identity, text))
    return tuple(usable)
