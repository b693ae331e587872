"""Region features of images in .npy files.

Rows are read by position. The bytes of one image's features are a .npy file of (r, c) numbers.
"""

import io
import math
import os
import threading
import tokenize
import weakref
from pathlib import Path
from typing import IO

import numpy as np

from sfumato.errors import UserError

REGION_ENDINGS = frozenset({".npy"})
"""File name endings that count as region features when a folder is searched through."""


_MAGIC = b"\x93NUMPY"


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

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def features(self, row: int) -> np.ndarray:
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


def regions_to_bytes(features: np.ndarray) -> bytes:
    """Features as the bytes of a .npy file, the inverse of :func:`regions_from_bytes`. features (r, c)."""
    file = io.BytesIO()
    np.lib.format.write_array(file, features, allow_pickle=False)
    return file.getvalue()


def regions_from_bytes(data: bytes, channels: int | None = None) -> np.ndarray:
    """Read the features of one image from the bytes of a .npy file; pickled data is refused. data (r, c) -> (r, c)."""
    if not data.startswith(_MAGIC):
        raise ValueError(
            "not a .npy file: region features are expected here, not an image; `python -m papers regions` makes them"
            " from images"
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
