"""Frozen pre-trained backbones: any model of transformers, and two from installed packages (extra ``offline``).

A backbone converts items to token features once, and :mod:`sfumato.encoders.features` caches them on disk. The encoder
after it has no parameters: only the heads are trained.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from sfumato.encoders.backbones import (
    IMAGE_BACKBONES,
    TEXT_BACKBONES,
    image_backbone,
    is_open_clip,
    joint_image,
    joint_text,
    text_backbone,
)
from sfumato.encoders.encoder_protocol import (
    BuildContext,
    EncoderConfig,
    EncoderModule,
    ImageEncoderConfig,
    Item,
    OnError,
    Progress,
    TextEncoderConfig,
)
from sfumato.encoders.features import FrozenBackbone, Inputs, RaggedStore, Store, TokenFeatures, cached_features
from sfumato.encoders.package_weights import Precision

_FITTED, _BLOCK = 50_000, 1024
"""Largest number of items that fit a whitening, and of those read at a time."""

_LARGEST_COPY = 2 * 2**30
"""Bytes."""

_SMALLEST = 1e-8
"""Variance below which a channel or component counts as constant."""


Whiten = Annotated[
    int | None,
    Field(
        ge=0,
        description="whitening of the features, fitted on the training split: number of principal components, each with"
        " unit variance; 0 keeps all channels, each with mean 0 and unit variance; none if left out",
    ),
]


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
    backbone: str = Field(
        "efficientnet-lite0", description="efficientnet-lite0, a hub name, or a local folder of transformers"
    )
    size: int | None = Field(
        None, ge=16, description="side of the resized images in pixels; the backbone's own size if left out"
    )
    grid: int | None = Field(
        None,
        ge=1,
        description="average the map of a convolutional backbone to grid x grid tokens; all cells if left out",
    )
    projected: bool = Field(
        False,
        description="the joint embedding of a CLIP or SigLIP model, after its projection, as its one token; with"
        " model.identity the frozen model as it is",
    )
    precision: ComputesIn = "float32"
    whiten: Whiten = None


class FrozenTextConfig(_FrozenConfig, TextEncoderConfig):
    """Token features of a pre-trained text backbone, computed once."""

    packaged: ClassVar[tuple[str, ...]] = TEXT_BACKBONES

    kind: Literal["frozen"] = "frozen"
    backbone: str = Field("minilm-l6-v2", description="minilm-l6-v2, a hub name, or a local folder of transformers")
    max_tokens: PositiveInt = Field(64, description="largest number of tokens of a text; longer texts are cut")
    pooled: bool = Field(False, description="average the tokens of a text to one")
    layers: tuple[NonNegativeInt, ...] = Field(
        (),
        description="layers whose channels stand side by side, 0 for the token embeddings, e.g. [0, 2, 4, 6]; the last"
        " layer if left out",
    )
    projected: bool = Field(False, description="as model.image.projected; other keys than backbone have no effect")
    precision: ComputesIn = "float32"
    whiten: Whiten = None


class FrozenProcessor:
    """Computes token features with a frozen backbone, and caches them on disk."""

    def __init__(self, backbone: FrozenBackbone, cache: str | Path) -> None:
        self.backbone, self.cache = backbone, cache

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        return cached_features(self.backbone, items, self.cache, progress=progress, on_error=on_error)


class FeatureInput(EncoderModule):
    """The encoder after a frozen backbone: whitening and dropout of its features, without trained parameters."""

    centre: torch.Tensor
    projection: torch.Tensor

    def __init__(self, channels: int, dropout: float, *, whiten: int | None = None) -> None:
        super().__init__()
        if whiten is not None and whiten > channels:
            raise ValueError(f"whiten={whiten}: the features have {channels} channels; give at most as many, or 0")
        self.channels, self._received, self._whiten = whiten or channels, channels, whiten
        if whiten is not None:
            self.register_buffer("centre", torch.zeros(channels))
            self.register_buffer("projection", torch.ones(channels) if whiten == 0 else torch.eye(channels)[:, :whiten])
        self.dropout = nn.Dropout(dropout)

    @torch.no_grad()
    def fit(self, store: Store) -> None:
        """Fit the whitening, on at most 50,000 items."""
        if self._whiten is None:
            return
        chosen = np.unique(np.linspace(0, len(store) - 1, min(len(store), _FITTED)).astype(np.int64))
        count, total = 0, torch.zeros(self._received, dtype=torch.float64)
        products = torch.zeros((self._received,) * (2 if self._whiten else 1), dtype=torch.float64)
        for start in range(0, len(chosen), _BLOCK):
            inputs = store.batch(chosen[start : start + _BLOCK])
            tokens = inputs.values.flatten(0, 1) if inputs.mask is None else inputs.values[inputs.mask]
            tokens = tokens.double()
            count, total = count + len(tokens), total + tokens.sum(0)
            products += tokens.T @ tokens if self._whiten else tokens.square().sum(0)
        mean = total / count
        if self._whiten:
            values, vectors = torch.linalg.eigh(products / count - mean.outer(mean))
            floor = (values[-1] * 1e-6).clamp_min(_SMALLEST)
            projection = vectors[:, -self._whiten :] / values[-self._whiten :].maximum(floor).sqrt()
        else:
            variance = products / count - mean.square()
            projection = variance.maximum((variance.max() * 1e-6).clamp_min(_SMALLEST)).rsqrt()
        self.centre.copy_(mean)
        self.projection.copy_(projection)

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """The features of the backbone. inputs (n, t, c) -> (n, t, channels)."""
        values = inputs.values
        if self._whiten is not None and values.shape[-1] == self._received:
            values = self._whitened(values)
        return TokenFeatures(self.dropout(values), inputs.mask)

    def _whitened(self, values: Tensor) -> Tensor:
        centred = values - self.centre
        return centred @ self.projection if self._whiten else centred * self.projection

    @torch.no_grad()
    def prepared(self, store: Store) -> Store:
        """Whitened once instead of at every step."""
        if not self._whiten or self.channels == self._received or not isinstance(store, RaggedStore):
            return store
        lengths = store.lengths
        if int(lengths.sum()) * self.channels * 2 > _LARGEST_COPY:
            return store
        rows = np.empty((int(lengths.sum()), self.channels), np.float16)
        offsets = np.cumsum(lengths) - lengths
        device = self.centre.device
        for start in range(0, len(store), _BLOCK):
            index = np.arange(start, min(start + _BLOCK, len(store)))
            inputs = store.batch(index).to(device)
            whitened = self._whitened(inputs.values)
            part = whitened.flatten(0, 1) if inputs.mask is None else whitened[inputs.mask]
            rows[offsets[start] : offsets[start] + len(part)] = part.half().cpu().numpy()
        return RaggedStore(rows, offsets, lengths)


def build_frozen_image(config: FrozenImageConfig, context: BuildContext) -> tuple[FrozenProcessor, FeatureInput]:
    """Build the image side of kind "frozen". Returns (processor, encoder)."""
    if config.projected:
        return _built(joint_image(config.backbone, precision=config.precision), config.whiten, context)
    options: Any = config.model_dump(include={"size", "grid", "precision"})
    return _built(image_backbone(config.backbone, **options), config.whiten, context)


def build_frozen_text(config: FrozenTextConfig, context: BuildContext) -> tuple[FrozenProcessor, FeatureInput]:
    """Build the text side of kind "frozen". Returns (processor, encoder)."""
    if config.projected:
        return _built(joint_text(config.backbone, precision=config.precision), config.whiten, context)
    options: Any = config.model_dump(include={"max_tokens", "pooled", "layers", "precision"})
    return _built(text_backbone(config.backbone, **options), config.whiten, context)


def _built(backbone: FrozenBackbone, whiten: int | None, context: BuildContext) -> tuple[FrozenProcessor, FeatureInput]:
    encoder = FeatureInput(backbone.channels, context.feature_dropout, whiten=whiten)
    return FrozenProcessor(backbone, context.cache), encoder
