"""Features that some model has computed, as rows of files: regions of images, and embeddings.

A table is opened without a look at its values, and a batch reads its own rows alone. The bytes of an item are a .npy
file of (r, c) numbers, like the bytes of an image are a JPEG file, so code that handles images as bytes handles
features too. What the rows mean, and which of them match, is not known here.
"""

import io
import math
import os
import re
import threading
import tokenize
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from sfumato.data.embedding_files import open_vectors, read_ids
from sfumato.errors import UserError, need

_BLOCK = 4096
"""Rows that are checked at a time."""


class EmbeddingTable:
    """n embeddings of c channels, in files."""

    def __init__(self, name: str, blocks: Sequence[Sequence[Tensor]]) -> None:
        if not blocks or not all(blocks):
            raise ValueError(f"{name}: holds no array of embeddings")
        for parts in blocks:
            widths = list(dict.fromkeys(part.shape[1] for part in parts))
            if len(widths) > 1:
                raise ValueError(f"{name}: its files have {' and '.join(map(str, widths))} channels; give equal ones")
        heights = list(dict.fromkeys(sum(map(len, parts)) for parts in blocks))
        if len(heights) > 1:
            raise ValueError(f"{name}: {' and '.join(map(str, heights))} rows side by side; give equal numbers")
        self.name, self._blocks = name, blocks
        self.n, self.channels = heights[0], sum(parts[0].shape[1] for parts in blocks)
        self._starts = [np.cumsum([0, *map(len, parts)])[:-1] for parts in blocks]

    def rows(self, index: np.ndarray) -> Tensor:
        """Some rows. index (k,) -> (k, c)."""
        values, column = torch.empty(len(index), self.channels), 0
        for parts, starts in zip(self._blocks, self._starts, strict=True):
            of_block = values[:, column : column + parts[0].shape[1]]
            column += of_block.shape[1]
            part_of = np.searchsorted(starts, index, side="right") - 1
            for part in np.unique(part_of):
                own = np.flatnonzero(part_of == part)
                of_block[torch.from_numpy(own)] = parts[part][torch.from_numpy(index[own] - starts[part])].float()
        return values

    def errors(self, index: np.ndarray) -> dict[int, str]:
        """The rows among some that no model can use. index (k,)."""
        found: dict[int, str] = {}
        for start in range(0, len(index), _BLOCK):
            some = index[start : start + _BLOCK]
            values = self.rows(some)
            finite = values.isfinite().all(1)
            found |= dict.fromkeys(some[(~finite).numpy()].tolist(), "holds NaN or infinity")
            found |= dict.fromkeys(some[(finite & ~values.any(1)).numpy()].tolist(), "holds zeros alone")
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class EmbeddingRow:
    """A row of a table: an item of a data set, of images or of texts."""

    table: EmbeddingTable  # the table
    row: int  # its position

    @property
    def location(self) -> str:
        """table[row]."""
        return f"{self.table.name}[{self.row}]"

    def read_bytes(self) -> bytes:
        """See :class:`~sfumato.data.images.ImageSource`; a .npy file of (1, c)."""
        file = io.BytesIO()
        np.save(file, self.table.rows(np.array([self.row])).numpy(), allow_pickle=False)
        return file.getvalue()

    def __call__(self) -> bytes:
        """The same, so that a row is an :data:`~sfumato.encoders.encoder_protocol.Item`."""
        return self.read_bytes()


@dataclass(frozen=True, eq=False)
class NamedTable:
    """A table with the names of its rows."""

    table: EmbeddingTable  # the table
    ids: Sequence[str] | None = None  # n distinct ids; None if no file has any
    captions: Sequence[str] | None = None  # n wordings; None if no file has any


def open_table(paths: str) -> NamedTable:
    """Open a table of embeddings.

    The ids of table.npy stand in the file table_ids.txt, .json or .npy beside it (see
    :func:`~sfumato.data.embedding_files.read_ids`), its wordings in table.txt, one a line. A folder of shards has them
    under its own name, or in the files ../metadata/\\*.parquet that clip-retrieval writes (``image_path``,
    ``caption``).
    """
    parts = paths.split("+") if "+" in paths and not Path(paths).exists() else [paths]
    ids: Sequence[str] | None = None
    captions: Sequence[str] | None = None
    blocks = []
    try:
        for part in parts:
            opened = [open_vectors(file) for file in _files(part)]
            blocks.append([mean for mean, _, _ in opened])
            own = [i for _, _, of_file in opened for i in of_file or ()]
            ids = ids or own or _ids_beside(Path(part))
            captions = captions or _captions_beside(Path(part))
        table = EmbeddingTable(paths, blocks)
        if Path(parts[0]).is_dir() and (ids is None or captions is None):
            image_paths, wordings = _metadata(Path(parts[0]).parent / "metadata")
            ids, captions = ids or image_paths, captions or wordings
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    for what, names in (("ids", ids), ("captions", captions)):
        if names is not None and len(names) != table.n:
            raise UserError(f"{paths}: {len(names)} {what} for {table.n} rows; give one for each")
    return NamedTable(table, ids, captions)


def resolved_table(paths: str) -> str:
    """The same table with absolute paths, so that it is found from any folder."""
    parts = paths.split("+") if "+" in paths and not Path(paths).exists() else [paths]
    resolved = []
    for part in parts:
        file, colon, name = part.rpartition(":")
        named = bool(colon) and not Path(part).exists() and Path(file).exists()
        path = Path(file if named else part)
        resolved.append((str(path.resolve()) if path.exists() else str(path)) + (f":{name}" if named else ""))
    return "+".join(resolved)


def _files(part: str) -> list[str]:
    """The file, or the files of a folder in the order of their numbers."""
    folder = Path(part)
    if not folder.is_dir():
        return [part]
    found = [p for p in folder.iterdir() if p.suffix in (".npy", ".safetensors", ".parquet")]
    if len({p.suffix for p in found}) != 1:
        raise UserError(f"{folder}: expected a folder of .npy files, or of .safetensors or .parquet files alone")
    return [str(p) for p in sorted(found, key=_numbers)]


def _numbers(path: Path) -> list[tuple[int, str]]:
    """A key by which part_10 comes after part_9."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", path.name)]


def _ids_beside(path: Path) -> list[str] | None:
    stem = path.with_suffix("")
    beside = [Path(f"{stem}_ids{ending}") for ending in (".txt", ".json", ".npy")]
    return next((read_ids(file) for file in beside if file.is_file()), None)


def _captions_beside(path: Path) -> list[str] | None:
    beside = path.with_suffix(".txt")
    if not beside.is_file():
        return None
    try:
        return beside.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{beside}: not UTF-8: {error.reason} at byte {error.start}") from error


def _metadata(folder: Path) -> tuple[list[str] | None, list[str] | None]:
    """(distinct image_path values, caption values) of the Parquet files of a folder; None where there are none."""
    files = sorted(folder.glob("*.parquet"), key=_numbers)
    if not files:
        return None, None
    with need(
        "parquet", f"{folder}: Parquet metadata need pyarrow", ", or move the folder away: ids are then row numbers"
    ):
        import pyarrow
        import pyarrow.parquet
    columns: dict[str, list[str]] = {"image_path": [], "caption": []}
    try:
        for file in files:
            with pyarrow.parquet.ParquetFile(file) as opened:
                present = [name for name in columns if name in opened.schema_arrow.names]
                read = opened.read(columns=present)
                for name in present:
                    columns[name] += ["" if value is None else str(value) for value in read.column(name).to_pylist()]
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{folder}: damaged metadata ({error})") from error
    paths = columns["image_path"]
    return paths if paths and len(set(paths)) == len(paths) else None, columns["caption"] or None


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
