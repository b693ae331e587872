"""Region features of images from a frozen backbone, written in the layout that training from region features reads.

Detectors such as bottom-up attention are not part of it; the grid of a convolutional network replaces their
regions.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from sfumato.data.image_inputs import regions_to_bytes
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.encoders.encoder_protocol import FrozenBackbone, Item, Store
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.errors import UserError, progress_bar
from sfumato.files import cache_folder, is_plain_name, is_unused, new_folder, write_atomically
from sfumato.models.embed import load_splits

Layout = Literal["scan", "manifest"]

MANIFEST = "manifest.jsonl"

_TOGETHER = 256
_SCAN_NAMES = {"val": "dev"}


def write_regions(
    data: DataConfig,
    out: str | Path,
    backbone: FrozenBackbone,
    *,
    layout: str = "scan",
    splits: Sequence[str] | None = None,
) -> tuple[dict[str, tuple[int, int, int]], Problems]:
    """Write the images of some data as region features in float16, with their captions.

    The features are cached on disk, so that an interrupted call continues where it stopped. The folder is written
    completely or not at all.
    """
    if layout not in get_args(Layout):
        raise UserError(f"--layout {layout}: unknown; known: {', '.join(get_args(Layout))}")
    out = Path(out)
    if not is_unused(out):
        raise UserError(f"cannot write region features to {out}: it exists and is not an empty folder; give a new one")
    problems = Problems()
    # The layouts list the captions of every image; equal ones are merged when they are read again.
    found = load_splits(data.model_copy(update={"equal_texts": "separate"}), problems)
    if unknown := [name for name in splits or () if name not in found] or ([] if found else ["train"]):
        raise UserError(f"the data ({data.source}) has no split {unknown[0]!r}; it has {', '.join(found) or 'none'}")
    chosen = list(dict.fromkeys(found if splits is None else splits))
    for name in chosen:
        _check(name, found[name])
    shapes = {}
    with new_folder(out) as unfinished:
        for name in chosen:
            usable, store = _features(backbone, name, found[name], problems)
            write = _write_scan if layout == "scan" else _write_manifest
            shapes[name] = write(unfinished, name, usable, store)
    return shapes, problems


def _check(name: str, split: PairData) -> None:
    """Refuse split names outside of the folder, and data that the layout cannot represent."""
    if not is_plain_name(name) or name == MANIFEST:
        raise UserError(
            f"split {name!r}: the files are named after the splits, and this name cannot be a file name; rename"
            " the split in the data"
        )
    lost = {
        "texts of several images": (np.bincount(split.pairs[:, 1]) > 1).any(),
        "kinds of texts": set(split.text_kinds) - {"caption"},
        "groups of images": len(np.unique(split.groups)) < len(split.groups),
    }
    if any(lost.values()):
        raise UserError(
            f"split {name!r} has {' and '.join(what for what, there in lost.items() if there)}, which no layout of"
            " region features can hold; train on these data with model.image.kind=frozen, which keeps the"
            " features of a frozen backbone too"
        )


def _features(backbone: FrozenBackbone, name: str, split: PairData, problems: Problems) -> tuple[PairData, Store]:
    items: list[Item] = [source.read_bytes for source in split.images]
    with progress_bar(f"features of {name}", len(items)) as advance:
        store, kept = FrozenProcessor(backbone, cache_folder()).read(
            items, progress=advance, on_error=lambda i, error: problems.add(split.images[i].location, str(error))
        )
    if not len(kept):
        raise UserError(f"split {name!r} has no usable image:\n{problems.summary()}")
    return (split if len(kept) == len(items) else split.keep_images(kept)), store


def _write_scan(folder: Path, name: str, split: PairData, store: Store) -> tuple[int, int, int]:
    counts = np.bincount(split.pairs[:, 0], minlength=len(split.image_ids))
    if len(set(counts.tolist())) != 1 or len(split.pairs) != len(split.texts):
        raise UserError(
            f"split {name!r}: the images have different numbers of captions, which this layout cannot hold;"
            " write a manifest instead: --layout manifest"
        )
    name = _SCAN_NAMES.get(name, name)
    first = store.batch(np.arange(1)).values[0]
    shape = (len(store), *first.shape)
    path = folder / f"{name}_ims.npy"
    array = np.lib.format.open_memmap(path, mode="w+", dtype="<f2", shape=shape)
    for start in range(0, len(store), _TOGETHER):
        index = np.arange(start, min(start + _TOGETHER, len(store)))
        batch = store.batch(index)
        if batch.values.shape[1:] != first.shape or (batch.mask is not None and not batch.mask.all()):
            raise UserError(
                "the backbone gives images different numbers of regions; write a manifest: --layout manifest"
            )
        array[start : start + len(index)] = batch.values
    array.flush()
    lines = [" ".join(split.texts[t].split()) for t in split.pairs[:, 1]]
    write_atomically(folder / f"{name}_caps.txt", "".join(f"{line}\n" for line in lines))
    write_atomically(folder / f"{name}_ids.txt", "".join(f"{identity}\n" for identity in split.image_ids))
    return shape


def _write_manifest(folder: Path, name: str, split: PairData, store: Store) -> tuple[int, int, int]:
    (folder / name).mkdir()
    texts: dict[int, list[str]] = {}
    for image, text in split.pairs.tolist():
        texts.setdefault(image, []).append(split.texts[text])
    lines, most, channels = [], 0, 0
    for number, identity in enumerate(split.image_ids):
        batch = store.batch(np.array([number]))
        features = batch.values[0].astype("<f2")
        path = f"{name}/{number:07d}.npy"
        (folder / path).write_bytes(regions_to_bytes(features))
        most, channels = max(most, len(features)), features.shape[1]
        row = {"id": identity, "image": path, "captions": texts.get(number, []), "split": name}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    with (folder / MANIFEST).open("a", encoding="utf-8") as file:
        file.writelines(lines)
    return len(store), most, channels
