"""Source "karpathy": Karpathy's JSON files of COCO, Flickr30k and Flickr8k, read as splits or as entries."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sfumato.data.images import FileImage, ImageSource, Problems, TarArchive, TarImage
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.errors import UserError


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
    try:
        loaded = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a Karpathy split file ({error}); expected a JSON object") from error
    entries = loaded.get("images") if isinstance(loaded, dict) else None
    if not isinstance(entries, list):
        raise UserError(f"{path}: not a Karpathy split file; expected an object with a list under 'images'")
    return [_entry(f"{path}:images[{number}]", entry) for number, entry in enumerate(entries)]


def _entry(location: str, entry: Any) -> KarpathyEntry:
    split = (entry.get("split") or "none") if isinstance(entry, dict) else ""
    split = {"restval": "train"}.get(split, split) if isinstance(split, str) else ""
    if mistake := _mistake(entry):
        return KarpathyEntry(location, split=split, mistake=mistake)
    sentences = tuple((str(sentence["sentid"]), sentence["raw"]) for sentence in entry["sentences"])
    return KarpathyEntry(location, entry["filename"], split, entry.get("filepath") or "", sentences)


@dataclass
class _Split:
    ids: list[str] = field(default_factory=list)
    images: list[ImageSource] = field(default_factory=list)
    captions: list[list[str]] = field(default_factory=list)
    caption_ids: list[list[str]] = field(default_factory=list)


def read_karpathy(path: str | Path, images: str | Path, problems: Problems) -> dict[str, PairData]:
    """Read a dataset_coco.json, dataset_flickr30k.json or dataset_flickr8k.json.

    Args:
        path: the JSON file.
        images: folder or uncompressed tar file of the images; either in COCO's subfolders (``filepath``) or in one
            folder.
        problems: receives missing images, empty captions, repeated ids and malformed entries.

    Returns:
        "train" (with "restval"), "val", "test": image ids are file names, text ids are sentence ids. Entries without a
        split, or with the split "none", are left out.

    Raises:
        UserError: a file is missing, the JSON is not of this layout, or nothing in it is usable.
    """
    images = Path(images)
    entries = karpathy_entries(path)
    if not images.exists():
        raise UserError(f"data.images: there is no folder or tar file {images}")
    try:
        archive = TarArchive(images) if images.is_file() else None
    except ValueError as error:
        raise UserError(f"data.images: {error}") from error
    splits: dict[str, _Split] = {}
    seen_images: set[str] = set()
    seen_texts: set[str] = set()
    for entry in entries:
        if entry.mistake:
            problems.add(entry.location, f"malformed entry: {entry.mistake}")
        elif entry.split == "none":
            continue
        elif entry.filename in seen_images:
            problems.add(entry.location, f"image {entry.filename} occurred before")
        elif (source := _find(images, archive, entry.folder, entry.filename)) is None:
            problems.add(entry.location, f"image {entry.filename} is missing from {images}")
        elif captions := _usable_sentences(entry, seen_texts, problems):
            seen_images.add(entry.filename)
            chosen = splits.setdefault(entry.split, _Split())
            chosen.ids.append(entry.filename)
            chosen.images.append(source)
            chosen.captions.append(list(captions.values()))
            chosen.caption_ids.append(list(captions))
    if not splits:
        raise UserError(f"{path} with {images} gives no usable pair:\n{problems.summary()}")
    return {name: make_pair_data(s.ids, s.images, s.captions, s.caption_ids) for name, s in splits.items()}


def _mistake(entry: Any) -> str:
    """What is wrong with the form of an entry."""
    if not isinstance(entry, dict):
        return f"found {type(entry).__name__}, expected an object"
    if not isinstance(entry.get("filename"), str) or not entry["filename"]:
        return f"filename is {entry.get('filename')!r}, expected a name"
    for key in ("split", "filepath"):
        if not isinstance(entry.get(key), str | None):
            return f"{key} is of type {type(entry[key]).__name__}, expected a string"
    sentences = entry.get("sentences")
    if not isinstance(sentences, list) or not sentences:
        return "sentences is missing, empty or not a list"
    for sentence in sentences:
        if not isinstance(sentence, dict) or not isinstance(sentence.get("raw"), str) or "sentid" not in sentence:
            return "a sentence lacks sentid, or the string raw"
    return ""


def _usable_sentences(entry: KarpathyEntry, seen: set[str], problems: Problems) -> dict[str, str]:
    """Id -> caption of an entry; the ids are added to the seen ids."""
    usable = {}
    for identity, raw in entry.sentences:
        text = " ".join(raw.split())
        if not text:
            problems.add(f"{entry.location} sentence {identity}", "empty caption")
        elif identity in seen:
            problems.add(f"{entry.location} sentence {identity}", "this sentid occurred before")
        else:
            seen.add(identity)
            usable[identity] = text
    return usable


def _find(images: Path, archive: TarArchive | None, folder: str, name: str) -> ImageSource | None:
    candidates = [os.path.join(folder, name), name]
    if archive is not None:
        members = [m for m in map(os.path.normpath, candidates) if m in archive]
        return TarImage(archive, members[0]) if members else None
    paths = [images / c for c in candidates if os.path.isfile(images / c)]
    return FileImage(paths[0]) if paths else None
