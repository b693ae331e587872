"""Data sets in the layouts that their users own: Karpathy's JSON of COCO, Flickr30k and Flickr8k."""

import json
import os
from pathlib import Path
from typing import Any

from sfumato.data.pairs import FileImage, ImageSource, PairData, TarArchive, TarImage, make_pair_data
from sfumato.data.problems import Problems
from sfumato.errors import UserError


def read_karpathy(path: str | Path, images: str | Path, problems: Problems) -> dict[str, PairData]:
    """Read a dataset_coco.json, dataset_flickr30k.json or dataset_flickr8k.json.

    Args:
        path: the JSON file.
        images: folder or uncompressed tar of the pictures; in COCO's subfolders (``filepath``) or flat.
        problems: receives missing pictures, empty captions and malformed entries.

    Returns:
        "train" (with "restval"), "val", "test": image ids are file names, text ids are sentence ids. Entries without a split are
        left out, as everywhere.

    Raises:
        UserError: a file is missing, or the JSON is not of this layout.
    """
    path, images = Path(path), Path(images)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["images"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not a Karpathy split file ({error}); expected an object with a list under 'images'"
        ) from error
    if not images.exists():
        raise UserError(f"data.images: there is no folder or tar file {images}")
    archive = TarArchive(images) if images.is_file() else None
    splits: dict[str, tuple[list[str], list[ImageSource], list[list[str]], list[list[str]]]] = {}
    for number, entry in enumerate(entries):
        place = f"{path}:images[{number}]"
        try:
            name, split = entry["filename"], {"restval": "train"}.get(entry.get("split", ""), entry.get("split", ""))
            sentences = [(str(s["sentid"]), _sentence(s)) for s in entry["sentences"]]
        except (KeyError, TypeError, AttributeError) as error:
            problems.add(place, f"malformed entry: {type(error).__name__} {error}")
            continue
        if split in ("", "none"):
            continue
        source = _find(images, archive, entry.get("filepath", ""), name)
        if source is None:
            problems.add(place, f"image {name} is missing from {images}")
            continue
        usable = [(i, text) for i, text in sentences if text]
        for i, text in sentences:
            if not text:
                problems.add(f"{place} sentence {i}", "empty caption")
        if usable:
            ids, sources, captions, caption_ids = splits.setdefault(split, ([], [], [], []))
            ids.append(name)
            sources.append(source)
            captions.append([text for _, text in usable])
            caption_ids.append([i for i, _ in usable])
    if not splits:
        raise UserError(f"{path} with {images} gives no usable pair:\n{problems.summary()}")
    return {split: make_pair_data(*columns) for split, columns in splits.items()}


def _sentence(sentence: dict[str, Any]) -> str:
    return " ".join(str(sentence["raw"]).split())


def _find(images: Path, archive: TarArchive | None, folder: str, name: str) -> ImageSource | None:
    if archive is not None:
        members = [m for m in (os.path.normpath(f"{folder}/{name}") if folder else name, name) if m in archive]
        return TarImage(archive, members[0]) if members else None
    paths = [p for p in (images / folder / name, images / name) if p.is_file()]
    return FileImage(paths[0]) if paths else None
