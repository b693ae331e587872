"""Image files of a gallery by id: their location, check, storage and display."""

import hashlib
import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sfumato.data.images import ImageSource
from sfumato.data.transforms import FORMATS, decode_image
from sfumato.files import sync_folder, write_atomically
from sfumato.serve.schemas import Refusal

_SHOWN = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""Formats that browsers show; others are re-encoded."""

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
    """Images whose ids are their paths in a folder. Nothing outside the folder is read, not even through a link.

    Attributes:
        folder: the folder.
    """

    folder: Path

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
    """Images of a split of some data.

    Attributes:
        sources: image sources by id.
    """

    sources: Mapping[str, ImageSource]

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

    Attributes:
        folder: the folder.
        others: images of items without an uploaded one; None if there are none.
    """

    folder: Path
    others: Images | None = None

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        """See :meth:`Images.read`."""
        if POINTER not in payload:
            return None if self.others is None else self.others.read(id, payload)
        try:
            return self._path(payload[POINTER]).read_bytes()
        except (FileNotFoundError, ValueError):
            return None

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        """See :meth:`Images.has`."""
        return POINTER in payload or (self.others is not None and self.others.has(id, payload))

    def write(self, id: str, data: bytes) -> str:
        """Store an image durably.

        Args:
            id: id of the item.
            data: bytes of the image file.

        Returns:
            Its name, for the payload of the item.
        """
        name = hashlib.blake2b(id.encode() + b"\0" + data, digest_size=16).hexdigest()
        path = self._path(name)
        for folder in (self.folder, path.parent):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                sync_folder(folder.parent)
        write_atomically(path, data)
        return name

    def remove(self, name: str) -> None:
        """Remove an image that no payload names any more, if it exists.

        Args:
            name: name of the image.
        """
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"not the name of an uploaded image: {name!r}")
        return self.folder / name[:2] / name


def handed_out(payload: Mapping[str, str]) -> dict[str, str]:
    """A payload without the field that the service reserves.

    Args:
        payload: the stored payload.

    Returns:
        The payload to return to clients.
    """
    return {name: value for name, value in payload.items() if name != POINTER}


def check_image(data: bytes, *, max_bytes: int, max_pixels: int, where: str) -> tuple[str, int]:
    """Check the header of an image file before anything is decoded.

    Args:
        data: bytes of the file.
        max_bytes: largest size of a file in bytes.
        max_pixels: largest number of pixels.
        where: location in the request, for messages.

    Returns:
        (Pillow's name of the format, number of pixels).

    Raises:
        Refusal: 413 if the file is too large, 422 if it is not an image.
    """
    if len(data) > max_bytes:
        raise Refusal(413, f"{where}: {len(data)} bytes are more than the limit of {max_bytes}")
    large = f"{where}: more pixels than the limit of {max_pixels}; send a smaller copy"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height, kind = image.width, image.height, str(image.format)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refusal(413, large) from error
    except UnidentifiedImageError:
        raise _no_image(where, f"not an image in one of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's parsers raise many kinds of errors for malicious files.
        raise _no_image(where, f"cannot be decoded: {error}") from error
    if width * height > max_pixels:
        raise Refusal(
            413, f"{where}: {width} x {height} are more pixels than the limit of {max_pixels}; send a smaller copy"
        )
    return kind, width * height


def _no_image(where: str, message: str) -> Refusal:
    return Refusal(422, f"{where}: {message}", errors=[(where, message)])


def to_store(data: bytes, format: str) -> bytes:
    """Re-encode an image file, upright and in RGB, without its metadata such as the location of the camera.

    Args:
        data: bytes of the file.
        format: Pillow's name of its format.

    Returns:
        A JPEG file if it was one, else a PNG file.

    Raises:
        ValueError: it cannot be decoded.
    """
    pixels = np.ascontiguousarray(decode_image(data, None).transpose(1, 2, 0))
    return _encoded(Image.fromarray(pixels), "JPEG" if format == "JPEG" else "PNG")


def to_show(data: bytes, size: int | None) -> tuple[bytes, str]:
    """Convert a stored image for a browser.

    Args:
        data: the file.
        size: longest side in pixels of a smaller copy; None returns the file unchanged, if browsers can display its
            format.

    Returns:
        (bytes, media type).

    Raises:
        ValueError: it can no longer be decoded.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            kind = str(image.format)
            if size is None and kind in _SHOWN:
                return data, _SHOWN[kind]
            if size is not None:
                image.draft(None, (2 * size, 2 * size))
            upright = ImageOps.exif_transpose(image)
            if size is not None:
                upright.thumbnail((size, size), Image.Resampling.BICUBIC)
            if kind == "JPEG":
                return _encoded(upright.convert("RGB"), "JPEG"), _SHOWN["JPEG"]
            return _encoded(upright.convert("RGBA"), "PNG"), _SHOWN["PNG"]
    except (OSError, SyntaxError, TypeError, LookupError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot be decoded: {error}") from error


def _encoded(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format, quality=90)
    return file.getvalue()
