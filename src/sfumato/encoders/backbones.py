"""Frozen pre-trained backbones: bytes of image files or texts -> token features.

EfficientNet-Lite0 and MiniLM, which come with the package; EfficientNet-Lite2 (extra ``offline``); any model of
transformers.
"""

import itertools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from sfumato.data.image_decoding import decode_image
from sfumato.data.transforms import encode_png
from sfumato.encoders.convolutional import CHANNELS, SIZES, WEIGHTS, efficientnet_lite, fold_batch_norms
from sfumato.encoders.encoder_protocol import FrozenBackbone
from sfumato.encoders.package_weights import (
    MiniLM,
    Precision,
    from_pretrained,
    import_transformers,
    model_hash,
    number_format,
    packaged_network,
    pretrained_tokenizer,
    shared_minilm,
)
from sfumato.errors import UserError

IMAGE_BACKBONES = {"efficientnet-lite0": "", "efficientnet-lite2": "offline"}
"""Image backbones without transformers, with the extra that they need; the others are hub names or local folders."""

TEXT_BACKBONES = {"minilm-l6-v2": ""}
"""The same of texts."""

_MICRO_BATCH = 4
"""Images at a time in a convolutional network: the activations of more are memory that is taken anew each time, which
doubles the time of the processor."""


class Backbone:
    """A frozen network in one number format; those of the package compute in float32.

    ``prepare`` makes the network's inputs of bytes of image files or of texts, and ``embed`` (n, t, c) or n of (t, c)
    features of these.
    """

    def __init__(
        self,
        network: torch.nn.Module | None,
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
        if network is not None:
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
    """EfficientNet-Lite, trained on ImageNet: (size / 32)^2 or grid^2 tokens of 1280 channels."""
    side = size or SIZES[name]
    if side < 32:
        raise UserError(f"the size of images for {name} must be at least 32 pixels, got {side}")
    _check_grid(grid, math.ceil(side / 32))
    if not IMAGE_BACKBONES[name]:
        network, maps = None, partial(_packaged_maps, packaged_network(name, threads=1))
    else:
        network = fold_batch_norms(efficientnet_lite(name).eval())
        maps = partial(_maps, network)

    def prepare(items: Sequence[np.ndarray]) -> Mapping[str, Tensor]:
        return {"pixels": (torch.from_numpy(np.stack(items)).float() - 127) / 128}

    def embed(pixels: Tensor) -> Tensor:
        return _map_tokens(maps(pixels), grid)

    known = efficientnet_fingerprint(name, size, grid, precision)
    decode = partial(decode_image, size=side, reduced=True)
    return Backbone(network, precision, known, prepare, embed, channels=CHANNELS, decode=decode)


def _packaged_maps(network: Any, pixels: Tensor) -> Tensor:
    return torch.from_numpy(network.run(None, {"pixels": pixels.float().numpy()})[0])


def _maps(network: Any, pixels: Tensor) -> Tensor:
    found: Tensor = network.extract_features(pixels.contiguous(memory_format=torch.channels_last))
    return found.float()


def efficientnet_fingerprint(name: str, size: int | None, grid: int | None, precision: Precision) -> str:
    """The fingerprint of its features; the network is not built."""
    number = _named(precision if IMAGE_BACKBONES[name] else "float32")
    return f"{name} {WEIGHTS[name]} size={size or SIZES[name]} squash (x-127)/128 tokens={grid or 'last-map'}{number}"


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
        inputs: Mapping[str, Tensor] = processor(images=pillow_images(items), return_tensors="pt", **sizes)
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
    return Backbone(network, precision, known, prepare, embed, probe=white_image())


class TransformersNetwork:
    """Any text model of transformers, such as BERT or the text side of CLIP, with its tokenizer."""

    def __init__(self, name: str) -> None:
        self._tokenizer = pretrained_tokenizer(name)
        model = from_pretrained(import_transformers().AutoModel, name)
        self.known, self.model = model_hash(model, name), getattr(model, "text_model", model)
        self.depth = int(self.model.config.num_hidden_layers)

    def prepare(self, texts: list[str], max_tokens: int) -> Mapping[str, Tensor]:
        """The (n, t) input_ids and attention_mask of texts; longer ones are cut."""
        found: Mapping[str, Tensor] = self._tokenizer(
            texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt"
        )
        return found

    def states(self, tokens: Mapping[str, Tensor], layers: Sequence[int]) -> list[Tensor]:
        """The (n, t, c) outputs of layers; layer 0 is the embeddings."""
        found = self.model(**tokens, output_hidden_states=list(layers) != [self.depth])
        # The last layer is followed by a norm in some models, which hidden_states lacks.
        return [found.last_hidden_state if k == self.depth else found.hidden_states[k] for k in layers]

    def pieces(self, words: Sequence[str]) -> list[int]:
        return count_pieces(self._tokenizer, words)


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
    network: TransformersNetwork | MiniLM
    if name in TEXT_BACKBONES:
        network, precision = shared_minilm(), "float32"
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
        getattr(network, "model", None),
        precision,
        f"transformers text {network.known} max_tokens={max_tokens}{options}{_named(precision)}",
        lambda texts: network.prepare(list(texts), max_tokens),
        embed,
        pieces=network.pieces,
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


def pillow_images(items: Sequence[bytes]) -> list[Image.Image]:
    """Decode image files in parallel."""
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


def count_pieces(tokenizer: Any, words: Sequence[str]) -> list[int]:
    """The number of subword tokens of each word."""
    return [len(ids) for ids in tokenizer(list(words), add_special_tokens=False)["input_ids"]] if words else []


def white_image() -> bytes:
    """An image, to learn the number of channels from."""
    return encode_png(np.full((3, 64, 64), 255, np.uint8))
