"""Inputs of encoders: batches, stores, and token features of frozen backbones, cached on disk.

The cache is content-addressed (the key of an item is the hash of its bytes, in a folder with the fingerprint of the
backbone), memory mapped (a batch reads only its rows) and append-only: a killed process leaves at most an incomplete
tail, which the next process removes.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import filelock
import numpy as np
import torch
from torch import Tensor

from sfumato.files import read_json, write_atomically, write_json

_RECORD = np.dtype([("digest", "V32"), ("offset", "<i8"), ("length", "<i8")])


@dataclass(frozen=True)
class Inputs:
    """A batch of inputs of a tower."""

    values: Tensor  # (n, 3, h, w) uint8 pixels, (n, t) int64 token ids or (n, t, c) float32 token features
    mask: Tensor | None = None  # (n, t) bool, True where there is a token; None for pixels

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> "Inputs":
        return Inputs(self.values[part], None if self.mask is None else self.mask[part])

    def to(self, device: torch.device | str) -> "Inputs":
        """The same batch on another device."""
        return Inputs(self.values.to(device), None if self.mask is None else self.mask.to(device))


@dataclass(frozen=True)
class TokenFeatures:
    """The token features of a batch: the output of an encoder and the input of a Gaussian head."""

    mean: Tensor  # (n, t, c) token features for the mean
    mask: Tensor | None = None  # (n, t) bool, True where there is a token; None for all
    log_var: Tensor | None = None
    local: Tensor | None = None
    local_mask: Tensor | None = None  # (n, s) bool, True where there is a feature; None for all

    def float(self) -> "TokenFeatures":
        """The same features in float32, or in float64 if they are in float64."""
        features = {"mean": self.mean, "log_var": self.log_var, "local": self.local}
        float32 = {
            name: values.to(torch.promote_types(values.dtype, torch.float32))
            for name, values in features.items()
            if values is not None
        }
        return replace(self, **float32)

    def for_log_var(self) -> tuple[Tensor, Tensor | None]:
        """The features for the log variance. Returns (n, t, c)."""
        features = self.mean if self.log_var is None else self.log_var
        return features, self.mask if features.shape[1] == self.mean.shape[1] else None


def padded(rows: Tensor, mask: Tensor) -> Tensor:
    """Put the rows of present tokens at their places. rows (k, c), mask (n, t) -> (n, t, c)."""
    return rows.new_zeros(*mask.shape, rows.shape[-1]).index_put((mask,), rows)


class Store(Protocol):
    """Random access to the inputs of one side of a data set."""

    def __len__(self) -> int: ...

    def batch(self, index: np.ndarray) -> Inputs:
        """The inputs at some positions.

        Args:
            index: (n,) positions.

        Returns:
            A batch of n.
        """
        ...


@dataclass(frozen=True)
class PixelStore:
    """Images of one size, in memory."""

    pixels: Tensor  # (n, 3, h, w) uint8

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, index: np.ndarray) -> Inputs:
        return Inputs(self.pixels[torch.from_numpy(index)])


@dataclass(frozen=True)
class RaggedStore:
    """Token sequences of different lengths, concatenated in one array that may be memory mapped."""

    rows: np.ndarray  # (total,) token ids or (total, c) token features
    offsets: np.ndarray  # (n,) first row of each item
    lengths: np.ndarray  # (n,) number of rows of each item

    @classmethod
    def from_list(cls, items: Sequence[Sequence[int]]) -> "RaggedStore":
        """A store of token ids."""
        lengths = np.array([len(i) for i in items], dtype=np.int64)
        if len(lengths) and lengths.min() < 1:
            raise ValueError(f"RaggedStore: item {int(lengths.argmin())} has no tokens; every item needs one")
        rows = np.concatenate([np.asarray(i, dtype=np.int64) for i in items]) if len(items) else np.empty(0, np.int64)
        return cls(rows, np.cumsum(lengths) - lengths, lengths)

    @classmethod
    def from_features(cls, items: Sequence[np.ndarray], channels: int) -> "RaggedStore":
        """A store of the (t, c) features of several items."""
        lengths = np.array([len(item) for item in items], dtype=np.int64)
        rows = np.concatenate(items) if len(items) else np.empty((0, channels), np.float32)
        return cls(rows, np.cumsum(lengths) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.offsets)

    def batch(self, index: np.ndarray) -> Inputs:
        """Padded with 0 to the longest item of the batch."""
        offsets, lengths = self.offsets[index], self.lengths[index]
        position = np.arange(lengths.max(initial=1))
        mask = position < lengths[:, None]
        values = self.rows[np.where(mask, offsets[:, None] + position, offsets[:, None])]
        values[~mask] = 0
        dtype = torch.int64 if values.dtype.kind == "i" else torch.float32
        return Inputs(torch.from_numpy(values).to(dtype), torch.from_numpy(mask))


class FrozenBackbone(Protocol):
    """A pre-trained network that converts raw items to token features and is never trained."""

    channels: int
    """c of its token features."""

    fingerprint: str
    """Changes whenever the features of the same item would."""

    def __call__(self, items: Sequence[bytes] | Sequence[str]) -> list[np.ndarray]:
        """Bytes of image files, or texts -> (t, c) features of each, in float16 or its ``feature_dtype``."""
        ...


_DTYPES = {"float16": "<f2", "float32": "<f4"}


class FeatureCache:
    """Token features by content, for one backbone."""

    def __init__(self, folder: str | Path, fingerprint: str, channels: int, dtype: str = "float16") -> None:
        self.channels, self._dtype = channels, np.dtype(_DTYPES[dtype])
        self._width = self._dtype.itemsize * channels
        self.folder = Path(folder) / hashlib.sha256(fingerprint.encode()).hexdigest()[:20]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rows, self._index = self.folder / f"rows.f{8 * self._dtype.itemsize}", self.folder / "index.bin"
        self._lock = filelock.FileLock(self.folder / "lock")
        expected = {"fingerprint": fingerprint, "channels": channels, "dtype": dtype}
        about = self.folder / "about.json"
        if not about.exists():
            write_json(about, expected)
        elif read_json(about) != expected:
            raise ValueError(
                f"{self.folder}: holds a cache of other features ({about.read_text(encoding='utf-8').strip()});"
                " delete the folder to rebuild it"
            )

    def known(self) -> dict[bytes, tuple[int, int]]:
        """The items whose features are completely on disk."""
        if not self._index.exists():
            return {}
        whole = self._index.stat().st_size // _RECORD.itemsize
        records = np.fromfile(self._index, dtype=_RECORD, count=whole)
        rows = self._rows.stat().st_size // self._width if self._rows.exists() else 0
        fits = records["offset"] + records["length"] <= rows
        return {r["digest"].tobytes(): (int(r["offset"]), int(r["length"])) for r in records[fits]}

    def append(self, digests: Sequence[bytes], features: Sequence[np.ndarray]) -> None:
        """Add items. Rows are forced to disk before their records, so that no record points at missing rows."""
        with self._lock:
            _truncate(self._index, _RECORD.itemsize)
            _truncate(self._rows, self._width)
            self._forget_lost_rows()
            offset = self._rows.stat().st_size // self._width
            records = np.empty(len(digests), dtype=_RECORD)
            for record, digest, item in zip(records, digests, features, strict=True):
                record["digest"], record["offset"], record["length"] = np.void(digest), offset, len(item)
                offset += len(item)
            for path, data in (
                (self._rows, np.concatenate(features).astype(self._dtype).tobytes()),
                (self._index, records.tobytes()),
            ):
                with path.open("ab") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())

    def _forget_lost_rows(self) -> None:
        """Remove records whose rows are missing (after a partial copy), before new rows are written there."""
        records = np.fromfile(self._index, dtype=_RECORD)
        fits = records["offset"] + records["length"] <= self._rows.stat().st_size // self._width
        if not fits.all():
            write_atomically(self._index, records[fits].tobytes())

    def store(self, digests: Sequence[bytes]) -> RaggedStore:
        """The features of items, memory mapped."""
        known = self.known()
        positions = np.array([known[digest] for digest in digests], dtype=np.int64).reshape(-1, 2)
        rows: np.ndarray = np.empty((0, self.channels), self._dtype)
        if len(positions):
            rows = np.memmap(self._rows, dtype=self._dtype, mode="r").reshape(-1, self.channels)
        return RaggedStore(rows, positions[:, 0], positions[:, 1])


def cached_features(
    backbone: FrozenBackbone,
    read: Sequence[Callable[[], bytes | str]],
    folder: str | Path,
    *,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    on_error: Callable[[int, Exception], None] | None = None,
) -> tuple[RaggedStore, np.ndarray]:
    """Token features of items, read from the cache, or computed and added to it."""
    dtype = getattr(backbone, "feature_dtype", "float16")
    cache = FeatureCache(folder, backbone.fingerprint, backbone.channels, dtype)
    known = set(cache.known())
    digests: dict[int, bytes] = {}
    waiting: dict[bytes, tuple[int, Any]] = {}
    failed: dict[int, Exception] = {}

    def compute() -> None:
        good: dict[bytes, np.ndarray] = {}
        try:
            good = dict(zip(waiting, backbone([item for _, item in waiting.values()]), strict=True))
        except (ValueError, OSError):
            # One damaged image fails the whole batch: compute each alone to find it.
            for digest, (position, item) in waiting.items():
                try:
                    good[digest] = backbone([item])[0]
                except (ValueError, OSError) as error:
                    failed[position] = error
        if good:
            cache.append(list(good), list(good.values()))
            known.update(good)
        waiting.clear()

    for position, item in enumerate(_read_ahead(read, batch_size)):
        if isinstance(item, Exception):
            failed[position] = item
        else:
            digests[position] = hashlib.sha256(item if isinstance(item, bytes) else item.encode()).digest()
            if digests[position] not in known:
                waiting.setdefault(digests[position], (position, item))
            if len(waiting) == batch_size:
                compute()
        if progress:
            progress(1)
    if waiting:
        compute()
    done = {position: digest for position, digest in digests.items() if digest in known}
    for position in digests.keys() - done.keys():
        failed.setdefault(position, ValueError("the same content as another item that cannot be decoded"))
    for position, failure in sorted(failed.items()):
        if on_error is None:
            raise failure
        on_error(position, failure)
    return cache.store(list(done.values())), np.array(list(done), dtype=np.int64)


def _read_ahead(read: Sequence[Callable[[], bytes | str]], block: int) -> Iterator[bytes | str | Exception]:
    """Items or their errors; a block is read by two threads, which overlaps waiting for files."""

    def read_part(part: Sequence[Callable[[], bytes | str]]) -> list[bytes | str | Exception]:
        found: list[bytes | str | Exception] = []
        for get in part:
            try:
                found.append(get())
            except (ValueError, OSError) as error:
                found.append(error)
        return found

    with ThreadPoolExecutor(2) as pool:
        for start in range(0, len(read), block):
            middle, end = start + block // 2, start + block
            for part in pool.map(read_part, (read[start:middle], read[middle:end])):
                yield from part


def _truncate(path: Path, record: int) -> None:
    """Create the file, or remove a partially written last record."""
    with path.open("ab") as file:
        file.truncate(path.stat().st_size // record * record)
