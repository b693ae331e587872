"""Data sets in the layouts that their users own: Karpathy's JSON of COCO, Flickr30k and Flickr8k."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sfumato.data.images import FileImage, ImageSource, TarArchive, TarImage
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.data.problems import Problems
from sfumato.errors import UserError


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
        images: folder or uncompressed tar of the pictures; in COCO's subfolders (``filepath``) or flat.
        problems: receives missing pictures, empty captions, repeated ids and malformed entries.

    Returns:
        "train" (with "restval"), "val", "test": image ids are file names, text ids are sentence ids. Entries without a split, or
        with "none", are left out, as everywhere.

    Raises:
        UserError: a file is missing, the JSON is not of this layout, or nothing in it is usable.
    """
    path, images = Path(path), Path(images)
    entries = _read_entries(path)
    if not images.exists():
        raise UserError(f"data.images: there is no folder or tar file {images}")
    try:
        archive = TarArchive(images) if images.is_file() else None
    except ValueError as error:
        raise UserError(f"data.images: {error}") from error
    splits: dict[str, _Split] = {}
    seen_images: set[str] = set()
    seen_texts: set[str] = set()
    for number, entry in enumerate(entries):
        place = f"{path}:images[{number}]"
        if mistake := _mistake(entry):
            problems.add(place, f"malformed entry: {mistake}")
            continue
        name, split = entry["filename"], entry.get("split") or "none"
        if split == "none":
            continue
        if name in seen_images:
            problems.add(place, f"image {name} occurs before")
            continue
        source = _find(images, archive, entry.get("filepath") or "", name)
        if source is None:
            problems.add(place, f"image {name} is missing from {images}")
            continue
        captions = _usable_sentences(place, entry["sentences"], seen_texts, problems)
        if captions:
            seen_images.add(name)
            chosen = splits.setdefault("train" if split == "restval" else split, _Split())
            chosen.ids.append(name)
            chosen.images.append(source)
            chosen.captions.append(list(captions.values()))
            chosen.caption_ids.append(list(captions))
    if not splits:
        raise UserError(f"{path} with {images} gives no usable pair:\n{problems.summary()}")
    return {name: make_pair_data(s.ids, s.images, s.captions, s.caption_ids) for name, s in splits.items()}


def _read_entries(path: Path) -> list[Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["images"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a Karpathy split file ({error}); expected an object with a list under 'images'"
        ) from error
    if not isinstance(entries, list):
        raise UserError(f"{path}: 'images' is of type {type(entries).__name__}; expected a list")
    return entries


def _mistake(entry: Any) -> str | None:
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
    return None


def _usable_sentences(place: str, sentences: list[Any], seen: set[str], problems: Problems) -> dict[str, str]:
    """Id -> caption of an entry; ids are added to those seen."""
    usable = {}
    for sentence in sentences:
        identity, text = str(sentence["sentid"]), " ".join(sentence["raw"].split())
        if not text:
            problems.add(f"{place} sentence {identity}", "empty caption")
        elif identity in seen:
            problems.add(f"{place} sentence {identity}", "this sentid occurs before")
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
