"""The kind "frozen": token features of a pre-trained backbone, computed once and cached on disk, before the encoder.

The encoder after a backbone has no parameters: only the heads are trained.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from sfumato.data.image_decoding import check_image
from sfumato.encoders.backbones import (
    IMAGE_BACKBONES,
    TEXT_BACKBONES,
    efficientnet_fingerprint,
    image_backbone,
    text_backbone,
)
from sfumato.encoders.convolutional import CHANNELS
from sfumato.encoders.encoder_protocol import (
    BuildContext,
    EncoderConfig,
    ImageEncoderConfig,
    Item,
    OnError,
    Processor,
    Progress,
    TextEncoderConfig,
)
from sfumato.encoders.feature_rows import FeatureInput, Whiten
from sfumato.encoders.features import FrozenBackbone, RaggedStore, Store, cached_features
from sfumato.encoders.joint import is_open_clip, joint_image, joint_text
from sfumato.encoders.package_weights import (
    MiniLM,
    Precision,
)

ComputesIn = Annotated[
    Precision,
    Field(
        description="number format in which the backbone computes: float32, bfloat16 (faster on processors that have"
        " instructions for it, slower on others), or auto: bfloat16 where the processor has them"
    ),
]


class _FrozenConfig(EncoderConfig):
    """The properties of both sides."""

    path_fields: ClassVar[tuple[str, ...]] = ("backbone",)
    base_field: ClassVar[str] = "backbone"
    packaged: ClassVar[tuple[str, ...]]

    @property
    def frozen_backbone(self) -> str:
        return self.base_model

    @property
    def extras(self) -> frozenset[str]:
        if is_open_clip(self.base_model):
            return frozenset({"open-clip"})
        packaged = all(part in self.packaged for part in self.base_model.split("+"))
        return frozenset({"offline" if packaged else "backbones"})


class FrozenImageConfig(_FrozenConfig, ImageEncoderConfig):
    """Token features of a pre-trained image backbone, computed once."""

    from_pixels: ClassVar[bool] = False
    packaged: ClassVar[tuple[str, ...]] = IMAGE_BACKBONES

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
    whiten: Whiten = None


class FrozenTextConfig(_FrozenConfig, TextEncoderConfig):
    """Token features of a pre-trained text backbone, computed once."""

    packaged: ClassVar[tuple[str, ...]] = TEXT_BACKBONES

    kind: Literal["frozen"] = "frozen"
    backbone: str = Field("minilm-l6-v2", description="minilm-l6-v2, a hub name, or a local folder of transformers")
    max_tokens: PositiveInt = Field(64, description="largest number of tokens of a text; longer texts are cut")
    pooled: bool = Field(False, description="average the tokens of a text to one")
    layers: tuple[NonNegativeInt, ...] = ()
    """layers whose channels stand side by side, 0 for the token embeddings, e.g. [0, 2, 4, 6]; the last layer if left
    out"""
    projected: bool = Field(False, description="as model.image.projected; other keys than backbone have no effect")
    precision: ComputesIn = "float32"
    whiten: Whiten = None


class FrozenProcessor(Processor):
    """Computes token features with a frozen backbone, and caches them on disk."""

    def __init__(self, backbone: FrozenBackbone, cache: str | Path) -> None:
        self.backbone, self.cache = backbone, cache

    def prepare(self, data: bytes | str) -> np.ndarray | bytes | str:
        """The pixels of an image where the backbone takes them; else the item itself, an image checked."""
        if isinstance(data, bytes):
            if decode := getattr(self.backbone, "decode", None):
                pixels: np.ndarray = decode(data)
                return pixels
            check_image(data)
        return data

    def stack(self, values: Sequence[Any]) -> RaggedStore:
        """The features, without the cache."""
        return RaggedStore.from_features(self.backbone(values), self.backbone.channels)

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        return cached_features(self.backbone, items, self.cache, progress=progress, on_error=on_error)


class Deferred:
    """A backbone that is loaded when it is first needed: a search by text never needs that of images."""

    def __init__(
        self, load: Callable[[], FrozenBackbone], channels: int, known: Callable[[], str] | None = None
    ) -> None:
        self.channels, self._load, self._lock, self._known = channels, load, threading.Lock(), known

    @cached_property
    def _loaded(self) -> FrozenBackbone:
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Such as a copy asks for, before there is a lock.
            raise AttributeError(name)
        if name == "fingerprint" and self._known is not None:
            return self._known()
        with self._lock:
            return getattr(self._loaded, name)

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        with self._lock:
            loaded = self._loaded
        return loaded(items)


def build_frozen_image(config: FrozenImageConfig, context: BuildContext) -> tuple[FrozenProcessor, FeatureInput]:
    """Build the image side of kind "frozen". Returns (processor, encoder)."""
    if config.projected:
        return _built(partial(joint_image, config.backbone, precision=config.precision), 0, config.whiten, context)
    options: Any = config.model_dump(include={"size", "grid", "precision"})
    names = config.backbone.split("+")
    channels = CHANNELS * len(names) if set(names) <= set(IMAGE_BACKBONES) else 0
    known = partial(efficientnet_fingerprint, names[0], **options) if channels == CHANNELS else None
    return _built(partial(image_backbone, config.backbone, **options), channels, config.whiten, context, known)


def build_frozen_text(config: FrozenTextConfig, context: BuildContext) -> tuple[FrozenProcessor, FeatureInput]:
    """Build the text side of kind "frozen". Returns (processor, encoder)."""
    if config.projected:
        return _built(partial(joint_text, config.backbone, precision=config.precision), 0, config.whiten, context)
    options: Any = config.model_dump(include={"max_tokens", "pooled", "layers", "precision"})
    channels = MiniLM.width * max(1, len(config.layers)) if config.backbone in TEXT_BACKBONES else 0
    return _built(partial(text_backbone, config.backbone, **options), channels, config.whiten, context)


def _built(
    load: Callable[[], FrozenBackbone],
    channels: int,
    whiten: int | None,
    context: BuildContext,
    known: Callable[[], str] | None = None,
) -> tuple[FrozenProcessor, FeatureInput]:
    backbone = Deferred(load, channels, known) if context.trained and channels else load()
    return FrozenProcessor(backbone, context.cache), FeatureInput(
        backbone.channels, context.feature_dropout, whiten=whiten
    )
