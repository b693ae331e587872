"""Sources of images: files, archive members and memory, and small previews of them."""

import io
import os
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from PIL import Image

from sfumato.data.transforms import decode_image


class ImageSource(Protocol):
    """An encoded image that is read on demand."""

    @property
    def location(self) -> str:
        """The location of the image, for messages."""
        ...

    def read_bytes(self) -> bytes:
        """The bytes of the image file.

        Returns:
            Encoded bytes, not decoded.

        Raises:
            OSError: they cannot be read.
        """
        ...


@dataclass(frozen=True)
class FileImage:
    """An image in a file of its own.

    Attributes:
        path: the file.
    """

    path: Path

    @property
    def location(self) -> str:
        """The path."""
        return str(self.path)

    def read_bytes(self) -> bytes:
        """See :class:`ImageSource`."""
        return self.path.read_bytes()


@dataclass(frozen=True)
class ZipImage:
    """An image in an open zip archive.

    Attributes:
        archive: reads of one archive may come from several threads.
        member: its name there.
    """

    archive: zipfile.ZipFile
    member: str

    @property
    def location(self) -> str:
        """archive!member."""
        return f"{self.archive.filename or 'archive'}!{self.member}"

    def read_bytes(self) -> bytes:
        """See :class:`ImageSource`."""
        try:
            return self.archive.read(self.member)
        except zipfile.BadZipFile as error:
            raise OSError(f"{self.location}: {error}") from error


@dataclass(frozen=True)
class MemoryImage:
    """An image whose file is in memory.

    Attributes:
        location: where it came from.
        data: the encoded image.
    """

    location: str
    data: bytes = field(repr=False)

    def read_bytes(self) -> bytes:
        """See :class:`ImageSource`."""
        return self.data


class TarArchive:
    """An uncompressed tar file: one scan finds the members, and any thread can then read them by position.

    Args:
        path: the tar file.

    Raises:
        ValueError: it is not an uncompressed tar file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with tarfile.open(self.path, "r:") as tar:
                self._members = {os.path.normpath(m.name): (m.offset_data, m.size) for m in tar if m.isfile()}
        except tarfile.TarError as error:
            raise ValueError(
                f"{path}: not an uncompressed tar file ({error}); unpack it, or pack it without compression"
            ) from error
        self._file: IO[bytes] = self.path.open("rb")
        self._lock = threading.Lock()

    def __contains__(self, member: str) -> bool:
        return member in self._members

    def read(self, member: str) -> bytes:
        """The bytes of a member.

        Args:
            member: its name, normalised; see ``in``.

        Returns:
            Its bytes.

        Raises:
            KeyError: there is no such member.
            OSError: the archive is shorter than when it was opened.
        """
        offset, size = self._members[member]
        with self._lock:
            self._file.seek(offset)
            data = self._file.read(size)
        if len(data) < size:
            raise OSError(f"{self.path} ends within {member}")
        return data


@dataclass(frozen=True)
class TarImage:
    """An image in a tar archive.

    Attributes:
        archive: the scanned archive.
        member: its name there.
    """

    archive: TarArchive
    member: str

    @property
    def location(self) -> str:
        """archive!member."""
        return f"{self.archive.path}!{self.member}"

    def read_bytes(self) -> bytes:
        """See :class:`ImageSource`."""
        return self.archive.read(self.member)


THUMBNAIL = 144
"""Longer side of an image on the page, in pixels; twice what a phone shows."""

_BYTES = 12_000
"""Largest thumbnail; busier images are compressed harder."""


def thumbnail(source: ImageSource) -> bytes | None:
    """Convert an image to a small WebP file, upright and with transparency on white.

    Args:
        source: the image.

    Returns:
        The bytes of the WebP file, with a longer side of THUMBNAIL pixels; None if the image cannot be read.
    """
    try:
        pixels = decode_image(source.read_bytes(), None)
    except (OSError, ValueError):
        return None
    image = Image.fromarray(pixels.transpose(1, 2, 0))
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    for quality in (78, 50, 25, 5):
        file = io.BytesIO()
        image.save(file, "WEBP", quality=quality, method=4)
        if file.tell() <= _BYTES:
            break
    return file.getvalue()
