"""Removing what killed writes have left beside a collection: uploaded images that no item names, and temporary files.

An image that no item names is first moved to `pictures/.orphans`. It is deleted from there a week later, and moved back
if an item names it after all, as when an older copy of the store was served for a while. Files younger than an hour
stay, because a write may be about to name them.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from sfumato.data.images import POINTER, UploadedImages
from sfumato.files import remove_leftovers
from sfumato.search.collection import GaussianCollection
from sfumato.search.stores.protocol import Filter

_LOG = logging.getLogger("sfumato.serve")

SAFE_AGE, KEPT = 3600.0, 7 * 86_400.0
"""Seconds for which a file that no item names is left alone, and then kept among the orphans."""

_AT_A_TIME = 50


def find_orphans(
    collection: GaussianCollection, uploads: UploadedImages, stopping: Callable[[], bool]
) -> tuple[set[str], set[str]]:
    """The old images that no item names, by a scan of the store.

    Returns (names of images to move away, names among the orphans that an item names).
    """
    old = {path.name for path in _files(uploads.folder) if _age(path) > SAFE_AGE}
    away = {path.name for path in uploads.orphans.glob("*")} if uploads.orphans.is_dir() else set[str]()
    back = set[str]()
    if old or away:
        for records in collection.store.scan():
            if stopping():
                return set(), set()
            named = {payload[POINTER] for payload in records.payloads if POINTER in payload}
            old -= named
            back |= away & named
    return old, back


def sweep(
    collection: GaussianCollection, uploads: UploadedImages, orphans: Collection[str], back: Collection[str]
) -> None:
    """Move orphans away and others back, and remove temporary files and what has been away for long."""
    for name in back:
        with contextlib.suppress(FileNotFoundError):
            os.replace(uploads.orphans / name, uploads.path_of(name))
    moved = sum(_move_away(uploads, name) for name in _unnamed(collection, sorted(orphans)))
    removed = 0
    for path in uploads.orphans.glob("*") if uploads.orphans.is_dir() else ():
        if _age(path) > KEPT:
            path.unlink(missing_ok=True)
            removed += 1
    folders = {collection.folder, *(path.parent for path in uploads.folder.glob("*/*"))}
    leftovers = sum(remove_leftovers(folder, SAFE_AGE) for folder in folders)
    if moved or removed or leftovers or back:
        _LOG.info(
            "%s: moved %d images that no item names to %s and %d back, deleted %d that were there for a week, and %d"
            " temporary files", collection.folder, moved, uploads.orphans, len(back), removed, leftovers,
        )  # fmt: skip


def _unnamed(collection: GaussianCollection, names: list[str]) -> Iterator[str]:
    """Those of some names that no item has by now; asked anew, since a scan may have missed what moved meanwhile."""
    for start in range(0, len(names), _AT_A_TIME):
        part = names[start : start + _AT_A_TIME]
        there = collection.store.count(Filter({POINTER: tuple(part)}))
        yield from (name for name in part if not there or not collection.store.count(Filter({POINTER: (name,)})))


def _move_away(uploads: UploadedImages, name: str) -> bool:
    """Move an image to the orphans, unless it has just been written anew."""
    source, target = uploads.path_of(name), uploads.orphans / name
    uploads.orphans.mkdir(exist_ok=True)
    try:
        os.replace(source, target)
    except FileNotFoundError:  # Another process has removed it.
        return False
    if _age(target) <= SAFE_AGE:
        os.replace(target, source)
        return False
    os.utime(target)
    return True


def _files(folder: Path) -> Iterator[Path]:
    """The uploaded images in their folders."""
    return (path for path in folder.glob("[0-9a-f][0-9a-f]/*") if UploadedImages.is_name(path.name))


def _age(path: Path) -> float:
    """Seconds since a file was written; 0 for one that is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
