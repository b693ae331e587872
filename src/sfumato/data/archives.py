"""Images in zip and tar archives."""

import os
import tarfile
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO


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
        try:
            return self.archive.read(self.member)
        except zipfile.BadZipFile as error:
            raise OSError(f"{self.location}: {error}") from error


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
        return self.archive.read(self.member)
