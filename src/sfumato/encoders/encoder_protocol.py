"""The base classes of processors and towers, and the batches and stores of their inputs. Without torch.

A kind of encoder is one file with three things: its section of the recipe (a subclass of :class:`ImageEncoderConfig` or
:class:`TextEncoderConfig`), the encoder itself (an :class:`~sfumato.encoders.scratch.Encoder`), and a build function
that makes a :class:`Processor` and the encoder from that section. :mod:`sfumato.models.build` lists the kinds.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from tokenizers import Tokenizer

from sfumato.arrays import Array, as_tensor
from sfumato.data import image_decoding
from sfumato.gaussian import GaussianEmbedding

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Inputs:
    """A batch of inputs of a tower: arrays of NumPy, or tensors on a device."""

    values: Array  # (n, 3, h, w) uint8 pixels, (n, t) int64 token ids or (n, t, c) float32 token features
    mask: Array | None = None  # (n, t) bool, True where there is a token; None for pixels

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> "Inputs":
        return Inputs(self.values[part], None if self.mask is None else self.mask[part])

    def to(self, device: "torch.device | str" = "cpu") -> "Inputs":
        """The same batch as tensors on a device."""
        parts = [self.values] if self.mask is None else [self.values, self.mask]
        return Inputs(*(as_tensor(part, "inputs", "Inputs").to(device) for part in parts))


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


@dataclass(frozen=True)
class PixelStore:
    """Images of one size, or texts of one number of tokens, in memory."""

    pixels: np.ndarray  # (n, 3, h, w) uint8, or (n, t) int64 token ids
    mask: np.ndarray | None = None  # (n, t) bool

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, index: np.ndarray) -> Inputs:
        return Inputs(self.pixels[index], None if self.mask is None else self.mask[index])


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
        return Inputs(values.astype(np.int64 if values.dtype.kind == "i" else np.float32, copy=False), mask)


class FrozenBackbone(Protocol):
    """A pre-trained network that converts raw items to token features and is never trained."""

    fingerprint: str
    """Changes whenever the features of the same item would."""

    @property
    def channels(self) -> int:
        """c of its token features."""

    def __call__(self, items: Sequence[bytes] | Sequence[str]) -> list[np.ndarray]:
        """Bytes of image files, or texts -> (t, c) features of each, in float16 or its ``feature_dtype``."""


Item = Callable[[], bytes | str]
"""A function that returns the bytes of an image file (or of a file of region features), or a text."""


Progress = Callable[[int], None]
"""Called with the number of items just done."""

OnError = Callable[[int, Exception], None]
"""Called with the position and the error of an item that cannot be used."""


def usable(
    items: Sequence[Item],
    use: Callable[[int, Item], object],
    *,
    progress: Progress | None = None,
    on_error: OnError | None = None,
    workers: int | None = 1,
) -> np.ndarray:
    """The one reading loop: (k,) positions of the items on which use(position, item) raises no ValueError or OSError.

    Several workers are threads; None for the usual number.
    """

    def attempt(position: int) -> Exception | None:
        try:
            use(position, items[position])
        except (ValueError, OSError) as error:
            return error
        return None

    kept: list[int] = []
    with contextlib.nullcontext() if workers == 1 else ThreadPoolExecutor(workers) as pool:
        # In blocks: the pool would hold a task for each of millions of files.
        for start in range(0, len(items), _BLOCK):
            block = range(start, min(start + _BLOCK, len(items)))
            for position, error in zip(block, (pool.map if pool else map)(attempt, block), strict=True):
                if error is None:
                    kept.append(position)
                elif on_error is None:
                    raise error
                else:
                    on_error(position, error)
                if progress:
                    progress(1)
    return np.array(kept, dtype=np.int64)


_BLOCK = 512


Read = tuple[Store, np.ndarray]
"""The inputs of the items that could be read, and the positions of these among all items."""


class Processor(ABC):
    """Turns raw items into a store of inputs for an encoder, one item after another."""

    reads: ClassVar[str] = ""  # what its items are instead of image files or texts, for messages

    @abstractmethod
    def prepare(self, data: bytes | str) -> Any:
        """The input of one item, from what it returns; a ValueError if it is unusable."""

    @abstractmethod
    def stack(self, values: Sequence[Any]) -> Store:
        """The prepared inputs of several items, in memory."""

    def blank(self) -> bytes | None:
        """A file of features with a single row of ones, to test a model; None if its items are images or texts."""
        return None

    def read(self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None) -> Read:
        """Read items into a store.

        Args:
            items: n functions, each of which returns an item.
            progress: called with the number of items just done.
            on_error: called with the position and the error of each unusable item, which is then left out. Without it
                the error is raised.

        Returns:
            The inputs of the k usable items in their order, and the (k,) positions of these items.
        """
        found: list[Any] = []
        kept = usable(items, lambda _, item: found.append(self.prepare(item())), progress=progress, on_error=on_error)
        return self.stack(found), kept


class BaseTower:
    """One side of a model: a processor of raw items, and Gaussians of what it has read."""

    processor: Processor
    dim: int  # d of the embeddings
    variances: bool  # whether the embeddings are not points
    has_offset: bool = False  # whether embeddings have two dimensions more, of offsets
    normalize: bool  # whether means have unit length

    def batch(self, inputs: Inputs) -> GaussianEmbedding:
        """Embed a batch. Returns (n, d)."""
        raise NotImplementedError

    def embed(
        self,
        store: Store,
        positions: np.ndarray | None = None,
        *,
        batch_size: int = 256,
        progress: Progress | None = None,
    ) -> GaussianEmbedding:
        """Embed the items of a store. positions (k,) -> (k, d)."""
        positions = np.arange(len(store)) if positions is None else positions
        if len(positions) == 0:
            raise ValueError("Tower.embed: got no items, nothing to embed")
        parts = []
        for start in range(0, len(positions), batch_size):
            index = positions[start : start + batch_size]
            parts.append(self.batch(store.batch(index)))
            if progress:
                progress(len(index))
        return GaussianEmbedding.cat(parts)


_QUERIES = 256
"""Number of texts that are embedded without the cache of frozen features: it would keep what people search for."""


class TwoTowers:
    """Images and texts as Gaussians in one space.

    Args:
        image: the image tower.
        text: the text tower.
        digest: changes whenever the embeddings of the same items would; "" if it follows from the weights.
    """

    def __init__(self, image: BaseTower, text: BaseTower, digest: str = "") -> None:
        self.image, self.text, self.digest = image, text, digest

    def embed_images(self, images: Sequence[bytes], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed images.

        Args:
            images: the bytes of n image files (PNG, JPEG ...).
            batch_size: number of images at a time.

        Returns:
            (n, d) embeddings on the CPU. A damaged file raises a ValueError.
        """
        store, _ = self.image.processor.read([_constant(image) for image in images])
        return self.image.embed(store, batch_size=batch_size)

    def embed_texts(self, texts: Sequence[str] | Sequence[bytes], *, batch_size: int = 256) -> GaussianEmbedding:
        """Embed texts.

        Args:
            texts: n texts; of a model that reads embeddings the bytes of n .npy files.
            batch_size: number of texts at a time.

        Returns:
            (n, d) embeddings on the CPU.

        Raises:
            TypeError: texts is a single string.
        """
        if isinstance(texts, str):
            raise TypeError(f"embed_texts: got one string {texts!r}, expected a list of them: [{texts!r}]")
        processor = self.text.processor
        if 0 < len(texts) <= _QUERIES:
            store = processor.stack([processor.prepare(text) for text in texts])
        else:
            store, _ = processor.read([_constant(text) for text in texts])
        return self.text.embed(store, batch_size=batch_size)


def _constant(value: bytes | str) -> Item:
    return lambda: value


Pieces = Callable[[Sequence[str]], list[int]]
"""Words -> the number of subword pieces of each."""


def piece_counter(model: TwoTowers) -> Pieces | None:
    """The function that counts the subword pieces of words as the text side of a model does."""
    processor = model.text.processor
    return getattr(getattr(processor, "backbone", processor), "pieces", None)


AugmentMode = Annotated[
    Literal["none", "crop", "resized-crop", "style"],
    Field(
        description="random changes of training images. crop: random crops and mirror images; resized-crop: the same"
        " with the crops of ImageNet, 8 to 100 % of the area, for images decoded batch by batch; style: also rotations"
        " and colours, as for drawings; none: no changes"
    ),
]
Fit = Annotated[
    image_decoding.Fit,
    Field(
        description="how an image becomes a square. squash: resize both sides; crop: cut out the centre as"
        " transformers does; crop-nearest: as open_clip does, up to a pixel away; crop-margin: with a margin, 224"
        " pixels out of 256"
    ),
]


Whiten = Annotated[
    int | None,
    Field(
        ge=0,
        description="whitening of the features, fitted on the training split: number of principal components, each with"
        " unit variance; 0 keeps all channels, each with mean 0 and unit variance; none if left out",
    ),
]


class EncoderConfig(BaseModel):
    """A section of the recipe for one side: an unknown key is an error, and a loaded section does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    has_blocks: ClassVar[bool] = False  # whether optim.layer_decay has an effect
    needs_description: ClassVar[bool] = False  # whether a run folder needs Encoder.description to build it again
    path_fields: ClassVar[tuple[str, ...]] = ()  # keys that may contain a local path of the training machine
    reads_embeddings: ClassVar[bool] = False  # whether items are embeddings of another model (data.source=embeddings)
    base_field: ClassVar[str] = ""  # key that names the pre-trained model; "" for none
    needs: ClassVar[frozenset[str]] = frozenset()  # extras of the package without which the encoder cannot be built

    kind: str = Field(description="kind of the encoder; it determines the other keys")

    @field_validator("weights", check_fields=False)
    @classmethod
    def _random_by_name(cls, name: str) -> str:
        return "" if name == "random" else name

    @property
    def base_model(self) -> str:
        """Hub name or local folder of the pre-trained model that training starts from; "" for none."""
        return str(dict(self).get(self.base_field, ""))

    @property
    def frozen_backbone(self) -> str:
        """Name of the frozen backbone that the model needs for every embedding; "" for none."""
        return ""

    @property
    def origin(self) -> str:
        """Name of the pre-trained model, else of the architecture; "" if there is neither."""
        return self.base_model or str(dict(self).get("architecture", ""))

    @property
    def extras(self) -> frozenset[str]:
        """Extras of the package sfumato without which the encoder cannot be built."""
        return self.needs

    def changed(self, *keys: str) -> set[str]:
        """The keys among the given ones that differ from their defaults."""
        return {key for key in keys if dict(self)[key] != type(self).model_fields[key].default}

    def check(self, section: str) -> None:
        """Refuse keys without an effect or with a harmful one; by default no key is refused."""


class ImageEncoderConfig(EncoderConfig):
    """Section ``model.image``."""

    from_pixels: ClassVar[bool] = True  # whether it reads the pixels of each batch, so that they can be mixed
    reads_regions: ClassVar[bool] = False  # whether items are files of region features instead of images
    in_memory: ClassVar[bool] = False  # whether all images are decoded once, instead of for each batch
    drops_tokens: ClassVar[bool] = False  # whether it applies augment.image_tokens itself, instead of the tower

    @model_validator(mode="after")
    def _crops_of_files(self) -> "ImageEncoderConfig":
        if self.augment_mode == "resized-crop" and self.in_memory:
            raise ValueError('augment="resized-crop" cuts image files, but this kind has the pixels in memory')
        return self

    @property
    def augment_mode(self) -> AugmentMode:
        """The type of random augmentation of training images."""
        return dict(self).get("augment", "none")

    @property
    def starts_pretrained(self) -> bool:
        """Whether the encoder has parameters that optim.freeze_image_epochs can freeze."""
        return bool(self.base_model)


class TextEncoderConfig(EncoderConfig):
    """Section ``model.text``."""


@dataclass(frozen=True)
class BuildContext:
    """The inputs of a build function beside its own section."""

    dim: int  # d of the embeddings, model.dim
    variance: bool  # whether the model has variances, model.variance
    feature_dropout: float  # fraction of the token features to drop while training, model.feature_dropout
    token_dropout: float
    cache: Path  # folder for features of frozen backbones
    tokenizer: Tokenizer | None = None  # of a text encoder that reads tokens; None for others
    description: Mapping[str, Any] | None = None
    trained: bool = False  # whether trained weights will be loaded; then no pre-trained weights are needed

    def need_tokenizer(self, kind: str) -> Tokenizer:
        """The tokenizer, for a text encoder that requires one."""
        if self.tokenizer is None:
            raise ValueError(f"the text encoder of kind {kind!r} needs its tokenizer; give it in Assets(tokenizer)")
        return self.tokenizer


@dataclass(frozen=True)
class EncoderEntry:
    """A registered kind of encoder."""

    config: type[EncoderConfig]  # class of its section in the recipe
    build: Callable[[Any, BuildContext], tuple[Processor, Any]]  # Returns (processor, encoder).
    tokenizer: Callable[[Any, Iterable[str]], Tokenizer] | None = None
