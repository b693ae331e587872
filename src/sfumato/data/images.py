"""Images: where they are (files, memory), and those of a gallery; and the items that cannot be used.

An unusable item is counted and listed in a file with location and reason. Too many of them raise an error.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from PIL import Image

from sfumato.data.image_decoding import IMAGE_ENDINGS, decode_image, needs_extra, still_bytes
from sfumato.data.photographs import names_in, sidecars
from sfumato.errors import UserError, counted, printable
from sfumato.files import patiently, sync_folder, write_atomically
from sfumato.ids import fits_pattern


class ImageSource(Protocol):
    """An encoded image that is read on demand."""

    @property
    def location(self) -> str:
        """The location of the image, for messages."""

    def read_bytes(self) -> bytes:
        """The bytes of the image file, not decoded; an OSError if they cannot be read."""


@dataclass(frozen=True)
class FileImage:
    """An image in a file of its own."""

    path: Path  # the file

    @property
    def location(self) -> str:
        """The path."""
        return str(self.path)

    def read_bytes(self) -> bytes:
        """The file; of a RAW file its preview, of a video its first frame."""
        return still_bytes(self.path)


@dataclass(frozen=True)
class LazyImage:
    """An image whose file is read, or made, when it is asked for."""

    location: str  # where it comes from, e.g. archive!member
    read_bytes: Callable[[], bytes] = field(repr=False, compare=False)


@dataclass(frozen=True)
class MemoryImage:
    """An image whose file is in memory."""

    location: str  # where it came from
    data: bytes = field(repr=False)  # the encoded image

    def read_bytes(self) -> bytes:
        return self.data


THUMBNAIL = 144
"""Longer side of an image on the page, in pixels; twice what a phone shows."""

_BYTES = 12_000
"""Largest thumbnail; busier images are compressed harder."""


def thumbnail(source: ImageSource, side: int = THUMBNAIL, most: int = _BYTES) -> bytes | None:
    """Convert an image to a small WebP file, upright and with transparency on white."""
    try:
        pixels = decode_image(source.read_bytes(), None)
    except (OSError, ValueError):
        return None
    image = Image.fromarray(pixels.transpose(1, 2, 0))
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    for quality in (78, 50, 25, 5):
        file = io.BytesIO()
        image.save(file, "WEBP", quality=quality, method=4)
        if file.tell() <= most:
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


def _problem(location: str | Path, reason: str) -> Problem:
    return Problem(*(printable(str(part)).replace("\n", "\\n") for part in (location, reason)))


class Problems:
    """The unusable items of a run, in the order in which they were found."""

    def __init__(self) -> None:
        self.items: list[Problem] = []
        self.notes: list[Problem] = []  # what was left out and is no fault of the data
        self.remarks: list[Problem] = []  # what lacks something and was not left out
        self.bare: dict[str, tuple[str, ImageSource]] = {}  # images without a caption by id, each with its place
        self.captioned = 0  # number of images beside these
        self.others = Counter[str]()  # number of files that nothing looks at, by their ending
        self.excluded = Counter[str]()  # number of images that are not wanted, by the pattern or .nomedia

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
        self.items.append(_problem(location, reason))

    def note(self, location: str | Path, reason: str) -> None:
        """Record what is left out without being unusable, such as a file that needs an extra; it never stops a run.

        Args:
            location: as in :meth:`add`.
            reason: why it is left out; equal reasons become one line of the summary.
        """
        self.notes.append(_problem(location, reason))

    def remark(self, location: str | Path, reason: str) -> None:
        """Record what an item lacks that was not left out, such as a caption file that cannot be read.

        Args:
            location: as in :meth:`add`.
            reason: what is wrong; equal reasons become one line of the summary.
        """
        self.remarks.append(_problem(location, reason))

    @property
    def left_out(self) -> int:
        """Number of all that was left out, with the notes; ``len`` counts the unusable items alone."""
        return len(self.items) + len(self.notes) + len(self.bare)

    @property
    def _noted(self) -> list[Problem]:
        reason = f"no caption; {self.captioned:,} of {self.captioned + len(self.bare):,} images have one and are used"
        return [*self.notes, *(_problem(location, reason) for location, _ in self.bare.values())]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (self.left_out or self.remarks or self.others or self.excluded)

    def write(self, path: str | Path) -> None:
        """Write the list as JSONL, one {"place", "reason"} a line; an empty file if there are no problems.

        Args:
            path: the file.
        """
        found = [*self.items, *self._noted, *self.remarks]
        write_atomically(path, "".join(json.dumps(one.to_json(), ensure_ascii=False) + "\n" for one in found))

    def summary(self, most: int = 10) -> str:
        """The first items, a line each, and how many more there are; then a line for each reason of the notes.

        Args:
            most: number of items to list.

        Returns:
            Lines for a message, indented.
        """
        lines = [f"  {p.location}: {p.reason}" for p in self.items[:most]]
        more = len(self.items) - most
        lines += [f"  ... and {more} more"] if more > 0 else []
        noted: dict[str, list[str]] = {}
        for end, found in (("", self._noted), (" (kept)", self.remarks)):
            for one in found:
                noted.setdefault(f"{end}: {one.reason}", []).append(one.location)
        for reason, (first, *others) in itertools.islice(noted.items(), most):
            lines.append(f"  {first}{f' and {len(others):,} more' if others else ''}{reason}")
        if n := self.others.total():
            endings = ", ".join(f"{ending} {k:,}" for ending, k in self.others.most_common())
            lines.append(f"  {counted(n, 'file')} not looked at: {endings}")
        if self.excluded:
            reasons = ", ".join(f"{printable(why)} {k:,}" for why, k in self.excluded.items())
            lines.append(f"  {counted(self.excluded.total(), 'image')} excluded: {reasons}")
        return "\n".join(lines) or "  (no item was unusable)"

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
            found = f"{len(self)} of {total + len(self)} items are unusable, more than {setting}{max_fraction:g} allows"
            raise UserError(f"{found}; correct them, or raise that fraction:\n{self.summary()}")


NO_MEDIA = ".nomedia"
"""A file whose folder, with those below it, is not to be shown; as on Android."""

_HIDDEN = frozenset({"@eadir", "#recycle", "$recycle.bin", "__macosx"})
_LIVE, _MOVING = {".heic", ".heif", ".jpg", ".jpeg"}, {".mov", ".mp4"}


def image_files(
    folder: Path, problems: Problems | None = None, endings: Set[str] = IMAGE_ENDINGS, exclude: Sequence[str] = ()
) -> list[str]:
    """Paths of the images below a folder, relative to it with "/", sorted part by part.

    Hidden files and folders are skipped, as is what fits a pattern of ``exclude`` or lies beside or below a file
    .nomedia; links to folders are not followed. With ``problems`` the files that need an extra are left out and noted,
    as are links to folders elsewhere, and other files are counted; without, every computer lists the same files.
    """
    return sorted(_below(folder, "", problems, endings, exclude), key=lambda name: name.split("/"))


def _below(
    folder: Path, below: str, problems: Problems | None, endings: Set[str], exclude: Sequence[str], why: str = ""
) -> Iterator[str]:
    """The images below a part of a folder; where it is not wanted for a reason, they are counted alone."""
    names: list[str] = []
    others: list[str] = []
    own = Problems() if problems is None else problems
    if not why and os.path.lexists(folder / below / NO_MEDIA):
        why = NO_MEDIA
    try:
        with os.scandir(folder / below) as found:
            for item in found:
                unwanted = why or next((one for one in exclude if fits_pattern(below + item.name, one)), "")
                if item.name.startswith(".") or item.name.lower() in _HIDDEN:
                    if not unwanted:
                        own.others["hidden"] += 1
                elif item.is_dir(follow_symlinks=False):
                    yield from _below(folder, f"{below}{item.name}/", problems, endings, exclude, unwanted)
                elif unwanted:
                    if os.path.splitext(item.name)[1].lower() in endings:
                        own.excluded[unwanted] += 1
                elif os.path.isdir(item.path):  # A link; what lies in the folder is listed without it.
                    if not Path(os.path.realpath(item.path)).is_relative_to(os.path.realpath(folder)):
                        own.note(item.path, "a link to a folder elsewhere is not followed; add that folder, too")
                elif os.path.splitext(item.name)[1].lower() not in endings:
                    others.append(item.name)
                elif os.path.isfile(item.path):
                    names.append(item.name)
                else:
                    own.add(item.path, "not a regular file, or a link that leads nowhere")
    except OSError as error:
        if problems is None or not below:
            raise
        if not why:
            problems.add(folder / below, f"cannot be read: {error.strerror}")
    split = {name: os.path.splitext(name.lower()) for name in names}
    stills = {split[name][0] for name in names if split[name][1] in _LIVE and os.path.getsize(folder / below / name)}
    there = names_in(folder / below) if problems is not None else {}
    used = {sidecar for name in names for sidecar in sidecars(name, there)}
    own.others.update(os.path.splitext(name)[1].lower() or "no ending" for name in others if name not in used)
    for name, (stem, ending) in split.items():
        moving = ending in _MOVING and stem in stills
        reason = "the moving part of a Live Photo, whose image is read" if moving else ""
        if problems is not None and (reason := reason or needs_extra(name)):
            problems.note(folder / below / name, reason)
        elif not moving:
            yield f"{below}{name}"


POINTER = "_picture"
"""Payload field that names an uploaded image; searches do not return it."""

DIGEST = "_digest"
"""Payload field: the digest of the file of an image."""

ROOT, FILE = "_root", "_file"
"""Payload fields: the number of the folder that an image lies in, and its path there where its id is another."""

_NAME = re.compile("[0-9a-f]{32}")


class Images(Protocol):
    """The images of a gallery. Call it only for items of the gallery, with their payloads."""

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        """The image file of an item; None if there is no file."""

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        """Whether an item may have an image, judged without access to the disk; False if it is known to have none."""

    def path(self, id: str, payload: Mapping[str, str]) -> Path | None:
        """Where the file of an item lies, be it an image or a video; None if it is no file of its own."""


@dataclass(frozen=True)
class FolderImages:
    """Images whose ids are their paths in a folder. Nothing outside the folder is read, not even through a link."""

    folder: Path  # the folder

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        path = self.path(id, payload)
        with contextlib.suppress(OSError, ValueError):  # A missing file, a RAW file without its extra.
            return None if path is None else still_bytes(path)
        return None

    def path(self, id: str, payload: Mapping[str, str]) -> Path | None:
        if "\0" in id or "\\" in id or not id or os.path.isabs(id) or ".." in id.split("/"):
            return None
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # A missing file, a cycle of links.
            root = self.folder.resolve(strict=True)
            path = (root / id).resolve(strict=True)
            return path if path.is_relative_to(root) and path.is_file() else None
        return None

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        """Always True, because only the disk knows."""
        return True


@dataclass(frozen=True)
class SourceImages:
    """Images in several folders; the payload of an item names the folder and, where the id is another, the path."""

    roots: Sequence[Path]  # the folders, by number
    others: Images | None = None  # images of items without a folder

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        if not self._known(payload):
            return None if self.others is None else self.others.read(id, payload)
        return FolderImages(self.roots[int(payload[ROOT])]).read(payload.get(FILE, id), payload)

    def path(self, id: str, payload: Mapping[str, str]) -> Path | None:
        if not self._known(payload):
            return None if self.others is None else self.others.path(id, payload)
        return FolderImages(self.roots[int(payload[ROOT])]).path(payload.get(FILE, id), payload)

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        return self._known(payload) or (self.others is not None and self.others.has(id, payload))

    def _known(self, payload: Mapping[str, str]) -> bool:
        return payload.get(ROOT, "").isdecimal() and int(payload[ROOT]) < len(self.roots)


@dataclass(frozen=True)
class SplitImages:
    """Images of a split of some data."""

    sources: Mapping[str, ImageSource]  # image sources by id

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        source = self.sources.get(id)
        try:
            return None if source is None else source.read_bytes()
        except (OSError, ValueError):
            return None

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        return id in self.sources

    def path(self, id: str, payload: Mapping[str, str]) -> Path | None:
        return None


@dataclass(frozen=True)
class UploadedImages:
    """Images that were uploaded to the service, in a separate folder.

    The payload of an item holds the name of its image under POINTER. The name is a digest of the id and of the bytes,
    so it belongs to this item and this image only.
    """

    folder: Path  # the folder
    others: Images | None = None  # images of items without an uploaded one; None if there are none

    def read(self, id: str, payload: Mapping[str, str]) -> bytes | None:
        if POINTER not in payload:
            return None if self.others is None else self.others.read(id, payload)
        try:
            return self.path_of(payload[POINTER]).read_bytes()
        except (FileNotFoundError, ValueError):
            return None

    def has(self, id: str, payload: Mapping[str, str]) -> bool:
        return POINTER in payload or (self.others is not None and self.others.has(id, payload))

    def path(self, id: str, payload: Mapping[str, str]) -> Path | None:
        # The name of an upload is a digest, which says nothing of its kind.
        return None if POINTER in payload or self.others is None else self.others.path(id, payload)

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
        with contextlib.suppress(FileNotFoundError):
            patiently(os.unlink, self.path_of(name))

    def path_of(self, name: str) -> Path:
        """Location of an image."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"not the name of an uploaded image: {name!r}")
        return self.folder / name[:2] / name


def handed_out(payload: Mapping[str, str]) -> dict[str, str]:
    """A payload without its hidden fields, whose names begin with "_"."""
    return {name: value for name, value in payload.items() if not name.startswith("_")}
