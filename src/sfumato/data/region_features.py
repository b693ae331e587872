"""Region features: images as arrays of r regions with c channels, in .npy files; source "scan" reads SCAN's layout.

The bytes of an item are a .npy file of (r, c) numbers, like the bytes of an image are a JPEG file. So code that handles
images as bytes handles regions too. Region features cannot be displayed as images.
"""

import io
import math
import os
import threading
import tokenize
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from sfumato.data.images import Problems
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.errors import UserError

REGION_ENDINGS = frozenset({".npy"})
"""File name endings that count as region features when a folder is searched through."""

_MAGIC = b"\x93NUMPY"
_SPLIT_NAMES = {"dev": "val"}
_BEGINNING = 512


class RegionFile:
    """A .npy file of the features of n images: (n, r, c), or (n, c) for one region each, of floating point numbers.

    The header gives the expected length of the file. Rows are read by position, from any thread, so memory never holds
    more than the requested rows, and a disk failure is an OSError. The file is closed when the object is
    garbage-collected.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"there is no file {self.path}")
        try:
            # Windows reads descriptors as texts unless told otherwise.
            self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        try:
            with open(self._descriptor, "rb", closefd=False) as file:
                shape, self._dtype, self._start = _checked_header(file, os.fstat(self._descriptor).st_size)
        except ValueError as error:
            raise UserError(f"{self.path}: {error}") from error
        if len(shape) not in (2, 3) or 0 in shape:
            raise UserError(
                f"{self.path}: an array of shape {shape}; expected (images, regions, channels) or (images, channels)"
            )
        self.n, self.channels = shape[0], shape[-1]
        self.regions = shape[1] if len(shape) == 3 else 1

    def row(self, row: int) -> np.ndarray:
        """The features of an image. Returns (r, c)."""
        return np.frombuffer(self._read(row), self._dtype).reshape(self.regions, self.channels)

    def same(self, row: int, other: int) -> bool:
        """Whether two rows are equal bit by bit; whole rows are read only if their beginnings agree."""
        return self._read(row, _BEGINNING) == self._read(other, _BEGINNING) and self._read(row) == self._read(other)

    def _read(self, row: int, most: int | None = None) -> bytes:
        """The bytes of a row, or the first of them."""
        size = self.regions * self.channels * self._dtype.itemsize
        wanted = size if most is None else min(most, size)
        data = _read_at(self._descriptor, wanted, self._start + row * size)
        if len(data) < wanted:
            raise OSError(f"{self.path} ends within row {row}; it was longer when it was opened")
        return data


_SEEKING = threading.Lock()


def _read_at(descriptor: int, size: int, start: int) -> bytes:
    """Up to `size` bytes of a file from `start` on, from any thread."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, start)
    with _SEEKING:  # Windows reads from the position of the descriptor alone.
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.read(descriptor, size)


@dataclass(frozen=True)
class RegionRow:
    """The features of an image in a :class:`RegionFile`."""

    file: RegionFile  # the file
    row: int  # position of the image in the file

    @property
    def location(self) -> str:
        """path[row]."""
        return f"{self.file.path}[{self.row}]"

    def read_bytes(self) -> bytes:
        """See :class:`~sfumato.data.images.ImageSource`; a .npy file of (r, c)."""
        return regions_to_bytes(self.file.row(self.row))


def regions_to_bytes(features: np.ndarray) -> bytes:
    """Features as the bytes of a .npy file, the inverse of :func:`regions_from_bytes`. features (r, c)."""
    file = io.BytesIO()
    np.lib.format.write_array(file, features, allow_pickle=False)
    return file.getvalue()


def regions_from_bytes(data: bytes, channels: int | None = None) -> np.ndarray:
    """Read the features of one image from the bytes of a .npy file; pickled data is refused. data (r, c) -> (r, c)."""
    if not data.startswith(_MAGIC):
        raise ValueError(
            "not a .npy file: region features are expected here, not an image; `sfumato regions` makes them from images"
        )
    shape, dtype, start = _checked_header(io.BytesIO(data), len(data))
    if len(shape) not in (1, 2) or 0 in shape:
        raise ValueError(f"holds {dtype} of shape {shape}; expected the (regions, channels) of one image")
    array = np.frombuffer(data, dtype, math.prod(shape), start)
    with np.errstate(over="ignore"):  # Numbers that are too large for float32 become infinity, and are refused below.
        features: np.ndarray = array.reshape(-1, shape[-1]).astype(np.float32)
    if channels is not None and features.shape[1] != channels:
        raise ValueError(f"has {features.shape[1]} channels; the model reads {channels} (model.image.channels)")
    if not np.isfinite(features).all():
        raise ValueError("holds NaN or infinity")
    return features


def read_scan(folder: str | Path, problems: Problems) -> dict[str, PairData]:
    """Read precomputed features in the layout of VSE++ and SCAN.

    ``NAME_caps.txt`` has one caption a line and ``NAME_ims.npy`` the features, see :class:`RegionFile`; NAME is train,
    dev, test, testall or any other. If there are k times as many captions as rows, row i has the captions of lines k *
    i to k * i + k - 1. If there are as many captions as rows, lines with the same id are captions of one image; without
    ids, consecutive lines with equal rows are captions of one image. The optional ``NAME_ids.txt`` has one image id for
    each row, or one for each caption; without it the id of an image is NAME-ROW.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; expected one with train_caps.txt, train_ims.npy and so on")
    splits = {}
    for path in sorted(folder.glob("*_caps.txt")):
        name = path.name.removesuffix("_caps.txt")
        splits[_SPLIT_NAMES.get(name, name)] = _read_split(folder, name, problems)
    if not splits:
        raise UserError(
            f"{folder} holds no NAME_caps.txt; expected train_caps.txt with train_ims.npy, and dev_ and test_"
        )
    if "testall" in splits:
        splits.setdefault("test", splits["testall"])
    return splits


def _checked_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype, int]:
    """(shape, type, position of the numbers) of a .npy file of that many bytes, checked before memory is allocated."""
    magic = file.read(len(_MAGIC))
    if magic.startswith(b"PK"):
        raise ValueError("an archive of several arrays; save the features alone with numpy.save")
    if magic != _MAGIC:
        raise ValueError("not a .npy file; a pickled one is never opened, save the array with numpy.save")
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(file)
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise ValueError(f"cut short or damaged, its header cannot be read ({error}); copy it again") from error
    if dtype.hasobject:
        raise ValueError(
            "holds Python objects, which would have to be unpickled; save one array of float32 with numpy.save"
        )
    if dtype.kind != "f" or dtype.itemsize not in (2, 4, 8):
        raise ValueError(f"numbers of type {dtype}; expected float32 or float16, as .astype('float32') gives")
    if by_columns and sum(length > 1 for length in shape) > 1:
        raise ValueError("saved column by column (Fortran order); save numpy.ascontiguousarray of it")
    start = file.tell()
    needed = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size - start < needed:
        raise ValueError(
            f"cut short or damaged: its header says an array of shape {shape}, {needed} bytes, and {size - start}"
            f" are there;"
            " copy it again"
        )
    return shape, dtype, start


def _read_split(folder: Path, name: str, problems: Problems) -> PairData:
    path = folder / f"{name}_caps.txt"
    lines = _lines(path)
    file = RegionFile(folder / f"{name}_ims.npy")
    if not lines or len(lines) % file.n:
        raise UserError(
            f"{path} has {len(lines)} captions and {file.path.name} {file.n} rows; expected as many captions for"
            f" every row"
        )
    each = len(lines) // file.n
    of_line = np.arange(len(lines)) // each
    ids = _ids(folder / f"{name}_ids.txt", file.n, of_line)
    if each == 1 and ids is None:
        of_line = _first_of_equal(file)
    elif each == 1 and ids is not None:
        first: dict[str, int] = {}
        of_line = np.array([first.setdefault(identity, row) for row, identity in enumerate(ids)])
    captions: dict[int, dict[str, str]] = {}
    taken: dict[str, int] = {}
    for number, (line, row) in enumerate(zip(lines, of_line.tolist(), strict=True)):
        location = f"{path}:{number + 1}"
        identity = f"{name}-{row}" if ids is None else ids[row]
        if taken.setdefault(identity, row) != row:
            problems.add(location, f"id {identity} belongs to another row already")
        elif text := _text(line, location, problems):
            own = captions.setdefault(row, {})
            own[f"{identity}#{len(own)}"] = text
    if not captions:
        raise UserError(f"{path} with {file.path.name} gives no usable pair:\n{problems.summary()}")
    return make_pair_data(
        [f"{name}-{row}" if ids is None else ids[row] for row in captions],
        [RegionRow(file, row) for row in captions],
        [list(own.values()) for own in captions.values()],
        [list(own) for own in captions.values()],
    )


def _lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return data.removesuffix(b"\n").split(b"\n") if data else []


def _text(line: bytes, location: str, problems: Problems) -> str:
    """The caption of a line; if it has none, "", and the problem is recorded."""
    try:
        text = " ".join(line.decode("utf-8").split())
    except UnicodeDecodeError as error:
        problems.add(location, f"not UTF-8: {error.reason} at byte {error.start}")
        return ""
    if not text:
        problems.add(location, "empty caption")
    return text


def _ids(path: Path, rows: int, of_line: np.ndarray) -> list[str] | None:
    """The id of every row; None if there are no ids."""
    if not path.is_file():
        return None
    try:
        ids = [line.decode("utf-8").strip() for line in _lines(path)]
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    if "" in ids:
        raise UserError(f"{path}:{ids.index('') + 1}: a line without an id; give every row one, or every caption")
    if len(ids) == rows:
        return ids
    if len(ids) != len(of_line):
        raise UserError(f"{path} has {len(ids)} ids; expected one for each of {rows} rows or {len(of_line)} captions")
    of_row: dict[int, str] = {}
    for number, (row, identity) in enumerate(zip(of_line.tolist(), ids, strict=True), 1):
        if of_row.setdefault(row, identity) != identity:
            raise UserError(f"{path}:{number}: {identity!r} stands where row {row} was {of_row[row]!r} before")
    return list(of_row.values())


def _first_of_equal(file: RegionFile) -> np.ndarray:
    """(n,) position of the first row in each row's run of consecutive equal rows."""
    first = np.arange(file.n)
    for row in range(1, file.n):
        if file.same(row, row - 1):
            first[row] = first[row - 1]
    return first


def equal_captions(data: PairData) -> Sequence[Sequence[int]] | None:
    """The texts of each image, if SCAN's layout can represent them: equal numbers, and no text of two images."""
    counts = np.bincount(data.pairs[:, 0], minlength=len(data.image_ids))
    if len(set(counts.tolist())) != 1 or len(data.pairs) != len(data.texts):
        return None
    texts: list[list[int]] = data.pairs[:, 1].reshape(len(data.image_ids), -1).tolist()
    return texts
