"""Sources of images: files, archive members and memory; small previews of them; and the unusable ones.

An unusable item is counted and listed in a file with location and reason. Too many of them raise an error.
"""

import io
import json
import os
import tarfile
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from PIL import Image

from sfumato.data.image_decoding import decode_image
from sfumato.errors import UserError, printable
from sfumato.files import write_atomically


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
    """An image in a file of its own."""

    path: Path  # the file

    @property
    def location(self) -> str:
        """The path."""
        return str(self.path)

    def read_bytes(self) -> bytes:
        """See :class:`ImageSource`."""
        return self.path.read_bytes()


@dataclass(frozen=True)
class ZipImage:
    """An image in an open zip archive."""

    archive: zipfile.ZipFile  # reads of one archive may come from several threads
    member: str  # its name there

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
    """An image whose file is in memory."""

    location: str  # where it came from
    data: bytes = field(repr=False)  # the encoded image

    def read_bytes(self) -> bytes:
        """See :class:`ImageSource`."""
        return self.data


class TarArchive:
    """An uncompressed tar file: one scan finds the members, and any thread can then read them by position."""

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
        """The bytes of a member."""
        offset, size = self._members[member]
        with self._lock:
            self._file.seek(offset)
            data = self._file.read(size)
        if len(data) < size:
            raise OSError(f"{self.path} ends within {member}")
        return data


@dataclass(frozen=True)
class TarImage:
    """An image in a tar archive."""

    archive: TarArchive  # the scanned archive
    member: str  # its name there

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
    """Convert an image to a small WebP file, upright and with transparency on white."""
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


_FEW = 3


@dataclass(frozen=True)
class Problem:
    """One unusable item."""

    location: str  # a file, file:line or archive!member
    reason: str  # what is wrong with it

    def to_json(self) -> dict[str, str]:
        """The problem as it stands in files."""
        return {"place": self.location, "reason": self.reason}

    @classmethod
    def from_json(cls, values: Mapping[str, str]) -> "Problem":
        """The inverse of :meth:`to_json`."""
        return cls(values["place"], values["reason"])


class Problems:
    """The unusable items of a run, in the order in which they were found."""

    def __init__(self) -> None:
        self.items: list[Problem] = []

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Problems({len(self)} items)"

    def add(self, location: str | Path, reason: str) -> None:
        """Record an item that is left out, in one line: what a terminal cannot show is recorded with backslashes.

        Args:
            location: a file, file:line or archive!member.
            reason: what is wrong with it.
        """
        self.items.append(Problem(*(printable(str(part)).replace("\n", "\\n") for part in (location, reason))))

    def write(self, path: str | Path) -> None:
        """Write the list as JSONL, one {"place", "reason"} a line; an empty file if there are no problems.

        Args:
            path: the file.
        """
        lines = (json.dumps(problem.to_json(), ensure_ascii=False) + "\n" for problem in self.items)
        write_atomically(path, "".join(lines))

    def summary(self, most: int = 10) -> str:
        """The first items, a line each, and how many more there are.

        Args:
            most: number of items to list.

        Returns:
            Lines for a message, indented.
        """
        lines = [f"  {p.location}: {p.reason}" for p in self.items[:most]]
        more = len(self.items) - most
        return "\n".join(lines + ([f"  ... and {more} more"] if more > 0 else [])) or "  (no item was unusable)"

    def check(self, total: int, max_fraction: float, *, setting: str = "data.max_problem_fraction=") -> None:
        """Stop if too many items are unusable; up to three are never too many.

        Args:
            total: number of usable items.
            max_fraction: largest tolerated fraction of unusable ones, in [0, 1].
            setting: name of the setting, for the message.

        Raises:
            UserError: there are more; the message lists the first ten.
        """
        if len(self) > max(_FEW, max_fraction * (total + len(self))):
            raise UserError(
                f"{len(self)} of {total + len(self)} items are unusable, more than {setting}{max_fraction:g}"
                f" allows; correct them, or raise that fraction:\n{self.summary()}"
            )
