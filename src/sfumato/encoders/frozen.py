"""The kind "frozen": token features of a pre-trained backbone, computed once and cached on disk, before the encoder.

The encoder after a backbone has no parameters: only the heads are trained. The cache is content-addressed (the key of
an item is the hash of its bytes, in a folder with the fingerprint of the backbone), memory mapped (a batch reads only
its rows) and append-only: a killed process leaves at most an incomplete tail, which the next process removes.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import filelock
import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from sfumato.data.feature_tables import EmbeddingRow
from sfumato.data.image_decoding import check_image
from sfumato.data.pairs import PairData
from sfumato.encoders import backbones
from sfumato.encoders import encoder_protocol as protocol
from sfumato.encoders.encoder_protocol import Item, OnError, Progress, Read
from sfumato.encoders.package_weights import Precision, is_open_clip, means_of_tokens
from sfumato.errors import UserError, need
from sfumato.files import is_gone, read_json, write_atomically, write_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side

ComputesIn = Annotated[
    Precision,
    Field(
        description="number format in which the backbone computes: float32, bfloat16 (faster on processors that have"
        " instructions for it, slower on others), or auto: bfloat16 where the processor has them; those of the package"
        " always compute in float32"
    ),
]


class _FrozenConfig(protocol.EncoderConfig):
    """The properties of both sides."""

    path_fields: ClassVar[tuple[str, ...]] = ("backbone",)
    base_field: ClassVar[str] = "backbone"
    packaged: ClassVar[Mapping[str, str]]  # extra that a backbone needs, by its name

    @property
    def frozen_backbone(self) -> str:
        return self.base_model

    @property
    def extras(self) -> frozenset[str]:
        if is_open_clip(self.base_model):
            return frozenset({"open-clip"})
        return frozenset({self.packaged.get(part, "backbones") for part in self.base_model.split("+")} - {""})


class FrozenImageConfig(_FrozenConfig, protocol.ImageEncoderConfig):
    """Token features of a pre-trained image backbone, computed once."""

    from_pixels: ClassVar[bool] = False
    packaged: ClassVar[Mapping[str, str]] = backbones.IMAGE_BACKBONES

    kind: Literal["frozen"] = "frozen"
    backbone: str = "efficientnet-lite0"
    """efficientnet-lite0, a hub name, or a local folder of transformers"""
    size: int | None = Field(None, ge=16)
    """side of the resized images in pixels; the backbone's own size if left out"""
    grid: int | None = Field(None, ge=1)
    """average the map of a convolutional backbone to grid x grid tokens; all cells if left out"""
    projected: bool = False
    """the joint embedding of a CLIP or SigLIP model, after its projection, as its one token; with model.identity the
    frozen model as it is"""
    precision: ComputesIn = "float32"
    whiten: protocol.Whiten = None


class FrozenTextConfig(_FrozenConfig, protocol.TextEncoderConfig):
    """Token features of a pre-trained text backbone, computed once."""

    packaged: ClassVar[Mapping[str, str]] = backbones.TEXT_BACKBONES

    kind: Literal["frozen"] = "frozen"
    backbone: str = Field("minilm-l6-v2", description="minilm-l6-v2, a hub name, or a local folder of transformers")
    max_tokens: PositiveInt = Field(64, description="largest number of tokens of a text; longer texts are cut")
    pooled: bool = Field(False, description="average the tokens of a text to one")
    layers: tuple[NonNegativeInt, ...] = ()
    """layers whose channels stand side by side, 0 for the token embeddings, e.g. [0, 2, 4, 6]; the last layer if left
    out"""
    projected: bool = Field(False, description="as model.image.projected; other keys than backbone have no effect")
    precision: ComputesIn = "float32"
    whiten: protocol.Whiten = None


class _EmbeddingConfig(protocol.EncoderConfig):
    """The properties of both sides."""

    needs_description: ClassVar[bool] = True
    reads_embeddings: ClassVar[bool] = True

    kind: Literal["embeddings"] = "embeddings"
    whiten: protocol.Whiten = None


class EmbeddingImageConfig(_EmbeddingConfig, protocol.ImageEncoderConfig):
    """Embeddings of images that another model has made (data.source=embeddings)."""

    from_pixels: ClassVar[bool] = False


class EmbeddingTextConfig(_EmbeddingConfig, protocol.TextEncoderConfig):
    """Embeddings of texts that another model has made (data.source=embeddings)."""


def described_by(data: PairData) -> dict[str, dict[str, int]]:
    """What data say about the encoders that read them."""
    rows = {"image": data.images[:1], "text": data.text_rows[:1]}
    found = [(side, row) for side, first in rows.items() for row in first if isinstance(row, EmbeddingRow)]
    return {side: {"channels": row.table.channels} for side, row in found}


class FrozenProcessor(protocol.Processor):
    """Computes token features with a frozen backbone, and caches them on disk."""

    def __init__(self, backbone: protocol.FrozenBackbone, cache: str | Path) -> None:
        self.backbone, self.cache = backbone, cache

    def prepare(self, data: bytes | str) -> np.ndarray | bytes | str:
        """The pixels of an image where the backbone takes them; else the item itself, an image checked."""
        if isinstance(data, bytes):
            if decode := getattr(self.backbone, "decode", None):
                return decode(data)
            check_image(data)
        return data

    def stack(self, values: Sequence[Any]) -> protocol.RaggedStore:
        """The features, without the cache."""
        return protocol.RaggedStore.from_features(self.backbone(values), self.backbone.channels)

    def read(self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None) -> Read:
        return cached_features(self.backbone, items, self.cache, progress=progress, on_error=on_error)


def frozen_processor(config: FrozenImageConfig | FrozenTextConfig, cache: Path, device: str = "cpu") -> FrozenProcessor:
    """The processor of a side of kind "frozen"; networks of the package are loaded when they are first needed."""
    if is_gone(config.backbone):
        raise UserError(f"the frozen model is not at {config.backbone}; move it back, or adopt or train with it again")
    options: Any = config.model_dump(include={"size", "grid", "max_tokens", "pooled", "layers", "precision"})
    of_images = isinstance(config, FrozenImageConfig)
    if config.projected:
        side: Side = "image" if of_images else "text"
        if (backbone := backbones.graph_backbone(config.backbone, side, device)) is None:
            with need("train", f"{config.backbone}: models of images and texts other than ONNX graphs need torch"):
                from sfumato.encoders.joint import joint_backbone
            backbone = joint_backbone(config.backbone, side, precision=config.precision)
    else:
        make = backbones.image_backbone if of_images else backbones.text_backbone
        backbone = make(config.backbone, **options, device=device)
    return FrozenProcessor(backbone, cache)


class PointTower(protocol.BaseTower):
    """A tower without weights: the mean of an item's features, at unit length, as the heads of torch compute it."""

    variances, normalize = False, True

    def __init__(self, processor: protocol.Processor, dim: int) -> None:
        self.processor, self.dim, self.head = processor, dim, _PointHead(dim)

    def batch(self, inputs: protocol.Inputs) -> GaussianEmbedding:
        values, mask = inputs.values, inputs.mask
        mean = values.mean(1) if mask is None else means_of_tokens(values, mask)
        return GaussianEmbedding.point(mean / np.linalg.norm(mean, axis=1, keepdims=True).clip(1e-12))


@dataclass(frozen=True)
class _PointHead:
    """What a digest knows of a head of torch without weights."""

    named: ClassVar[str] = "GaussianHead"
    dim: int
    covariance: str = "ellipsoidal"
    normalize: bool = True


_RECORD = np.dtype([("digest", "V32"), ("offset", "<i8"), ("length", "<i8")])

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
            held = f"a cache of other features ({about.read_text(encoding='utf-8').strip()})"
            raise ValueError(f"{self.folder}: holds {held}; delete the folder to rebuild it")

    def known(self) -> dict[bytes, tuple[int, int]]:
        """The items whose features are completely on disk."""
        if not self._index.exists():
            return {}
        records = np.fromfile(self._index, dtype=_RECORD, count=self._index.stat().st_size // _RECORD.itemsize)
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
            rows = np.concatenate(features).astype(self._dtype)
            for path, data in ((self._rows, rows.tobytes()), (self._index, records.tobytes())):
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

    def store(self, digests: Sequence[bytes]) -> protocol.RaggedStore:
        """The features of items, memory mapped."""
        known = self.known()
        positions = np.array([known[digest] for digest in digests], dtype=np.int64).reshape(-1, 2)
        rows: np.ndarray = np.empty((0, self.channels), self._dtype)
        if len(positions):
            rows = np.memmap(self._rows, dtype=self._dtype, mode="r").reshape(-1, self.channels)
        return protocol.RaggedStore(rows, positions[:, 0], positions[:, 1])


def cached_features(
    backbone: protocol.FrozenBackbone,
    read: Sequence[Callable[[], bytes | str]],
    folder: str | Path,
    *,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    on_error: Callable[[int, Exception], None] | None = None,
) -> tuple[protocol.RaggedStore, np.ndarray]:
    """Token features of items, read from the cache, or computed and added to it."""
    cache = FeatureCache(folder, backbone.fingerprint, backbone.channels, getattr(backbone, "feature_dtype", "float16"))
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
        if path.stat().st_size % record:  # Windows truncates no file that is mapped, not even to its size.
            file.truncate(path.stat().st_size // record * record)
