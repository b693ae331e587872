"""Image files of a gallery by id: their location and their storage."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sfumato.data.images import ImageSource
from sfumato.files import sync_folder, write_atomically

POINTER = "_picture"
"""Payload field that names an uploaded image; searches do not return it."""

_NAME = re.compile("[0-9a-f]{32}")


class Images(Protocol):
    """The images of a gallery. Call it only for items of the gallery, with their payloads."""

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        """The image file of an item.

        Args:
            id: id of the item.
            payload: payload of the item.

        Returns:
            The bytes; None if there is no file.
        """
        ...

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        """Whether an item may have an image, judged without access to the disk.

        Args:
            id: id of the item.
            payload: payload of the item.

        Returns:
            False if it is known to have none.
        """
        ...


@dataclass(frozen=True)
class FolderImages:
    """Images whose ids are their paths in a folder. Nothing outside the folder is read, not even through a link."""

    folder: Path  # the folder

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        """See :meth:`Images.read`."""
        if "\0" in id or "\\" in id or not id or os.path.isabs(id) or ".." in id.split("/"):
            return None
        try:
            root = self.folder.resolve(strict=True)
            path = (root / id).resolve(strict=True)
            return path.read_bytes() if path.is_relative_to(root) and path.is_file() else None
        except (OSError, RuntimeError):  # A missing file, a name that is too long, or a cycle of links.
            return None

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        """See :meth:`Images.has`; always True, because only the disk knows."""
        return True


@dataclass(frozen=True)
class SplitImages:
    """Images of a split of some data."""

    sources: Mapping[str, ImageSource]  # image sources by id

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        """See :meth:`Images.read`."""
        source = self.sources.get(id)
        try:
            return None if source is None else source.read_bytes()
        except (OSError, ValueError):
            return None

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        """See :meth:`Images.has`."""
        return id in self.sources


@dataclass(frozen=True)
class UploadedImages:
    """Images that were uploaded to the service, in a separate folder.

    The payload of an item holds the name of its image under POINTER. The name is a digest of the id and of the bytes,
    so it belongs to this item and this image only.
    """

    folder: Path  # the folder
    others: Images | None = None  # images of items without an uploaded one; None if there are none

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        """See :meth:`Images.read`."""
        if POINTER not in payload:
            return None if self.others is None else self.others.read(id, payload)
        try:
            return self.path_of(payload[POINTER]).read_bytes()
        except (FileNotFoundError, ValueError):
            return None

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        """See :meth:`Images.has`."""
        return POINTER in payload or (self.others is not None and self.others.has(id, payload))

    def write(self, id: str, data: bytes) -> str:
        """Store an image durably."""
        name = hashlib.blake2b(id.encode() + b"\0" + data, digest_size=16).hexdigest()
        path = self.path_of(name)
        for folder in (self.folder, path.parent):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                sync_folder(folder.parent)
        write_atomically(path, data)
        return name

    def remove(self, name: str) -> None:
        """Remove an image that no payload names any more, if it exists."""
        self.path_of(name).unlink(missing_ok=True)

    @property
    def orphans(self) -> Path:
        """Folder of images that no item names, which are deleted later."""
        return self.folder / ".orphans"

    @staticmethod
    def is_name(name: str) -> bool:
        """Whether a text is a name that :meth:`write` gives."""
        return _NAME.fullmatch(name) is not None

    def path_of(self, name: str) -> Path:
        """Location of an image."""
        if not self.is_name(name):
            raise ValueError(f"not the name of an uploaded image: {name!r}")
        return self.folder / name[:2] / name


def handed_out(payload: Mapping[str, str]) -> dict[str, str]:
    """A payload without the field that the service reserves."""
    return {name: value for name, value in payload.items() if name != POINTER}
