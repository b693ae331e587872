"""Pictures by id: where they are, whether they may be looked at, and how they are stored and shown."""

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sfumato.data.pairs import ImageSource
from sfumato.data.transforms import FORMATS, decode_image
from sfumato.files import sync_folder, write_atomically
from sfumato.serve.problems import Refusal

_SHOWN = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""Formats that browsers show; others are re-encoded."""


class Pictures(Protocol):
    """Where the pictures of a gallery are. Ask only for ids that are in it."""

    def read(self, id: str) -> bytes | None:
        """The file's bytes; None if there is none."""
        ...


@dataclass(frozen=True)
class FolderPictures:
    """Pictures whose ids are their paths in a folder; nothing outside of it is ever read, not through a link either."""

    folder: Path

    def read(self, id: str) -> bytes | None:
        """See :class:`Pictures`."""
        if "\0" in id or "\\" in id or not id or os.path.isabs(id) or ".." in id.split("/"):
            return None
        try:
            home = self.folder.resolve(strict=True)
            path = (home / id).resolve(strict=True)
            return path.read_bytes() if path.is_relative_to(home) and path.is_file() else None
        except (OSError, RuntimeError):  # Gone, too long a name, or a ring of links.
            return None


@dataclass(frozen=True)
class SplitPictures:
    """Pictures of a split of some data."""

    sources: Mapping[str, ImageSource]

    def read(self, id: str) -> bytes | None:
        """See :class:`Pictures`."""
        source = self.sources.get(id)
        try:
            return None if source is None else source.read_bytes()
        except (OSError, ValueError):
            return None


@dataclass(frozen=True)
class UploadedPictures:
    """Pictures that the service was given, in a folder of its own, named by the digests of their ids; else those of before.

    Attributes:
        folder: it.
        others: where to look for pictures that were not uploaded.
    """

    folder: Path
    others: Pictures | None = None

    def read(self, id: str) -> bytes | None:
        """See :class:`Pictures`."""
        try:
            return self._path(id).read_bytes()
        except FileNotFoundError:
            return None if self.others is None else self.others.read(id)

    def write(self, id: str, data: bytes) -> None:
        """Keep a picture; when this returns it survives the death of everything."""
        path = self._path(id)
        for folder in (self.folder, path.parent):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                sync_folder(folder.parent)
        write_atomically(path, data)

    def remove(self, id: str) -> None:
        """Forget a picture, if there is one."""
        self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        digest = hashlib.blake2b(id.encode(), digest_size=16).hexdigest()
        return self.folder / digest[:2] / digest


def check_picture(data: bytes, *, max_bytes: int, max_pixels: int, where: str) -> tuple[str, int]:
    """Look at the header of a picture before anything is decoded.

    Returns:
        (Pillow's name of its format, number of its pixels).

    Raises:
        Refusal: 413 if it is too large, 422 if it is no picture.
    """
    if len(data) > max_bytes:
        raise Refusal(413, f"{where}: {len(data)} bytes are more than the limit of {max_bytes}")
    large = f"{where}: more pixels than the limit of {max_pixels}; send a smaller copy"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height, kind = picture.width, picture.height, str(picture.format)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refusal(413, large) from error
    except UnidentifiedImageError:
        raise _no_picture(where, f"not a picture in one of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's parsers raise all sorts of things on files that are made to harm.
        raise _no_picture(where, f"cannot be decoded: {error}") from error
    if width * height > max_pixels:
        raise Refusal(
            413, f"{where}: {width} x {height} are more pixels than the limit of {max_pixels}; send a smaller copy"
        )
    return kind, width * height


def _no_picture(where: str, message: str) -> Refusal:
    return Refusal(422, f"{where}: {message}", errors=[(where, message)])


def to_store(data: bytes, format: str) -> bytes:
    """Pixels alone, upright and in RGB, without whatever else the file holds (where it was taken, say): JPEG stays JPEG.

    Raises:
        ValueError: it cannot be decoded.
    """
    pixels = np.ascontiguousarray(decode_image(data, None).transpose(1, 2, 0))
    return _encoded(Image.fromarray(pixels), "JPEG" if format == "JPEG" else "PNG")


def to_show(data: bytes, size: int | None) -> tuple[bytes, str]:
    """A stored picture for a browser.

    Args:
        data: the file.
        size: longest side in pixels of a smaller copy; None for the file as it is, if browsers know its format.

    Returns:
        (bytes, media type).

    Raises:
        ValueError: it can no longer be decoded.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            kind = str(picture.format)
            if size is None and kind in _SHOWN:
                return data, _SHOWN[kind]
            if size is not None:
                picture.draft(None, (2 * size, 2 * size))
            upright = ImageOps.exif_transpose(picture)
            if size is not None:
                upright.thumbnail((size, size), Image.Resampling.BICUBIC)
            if kind == "JPEG":
                return _encoded(upright.convert("RGB"), "JPEG"), _SHOWN["JPEG"]
            return _encoded(upright.convert("RGBA"), "PNG"), _SHOWN["PNG"]
    except (OSError, SyntaxError, TypeError, LookupError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot be decoded: {error}") from error


def _encoded(picture: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, quality=90)
    return file.getvalue()
