"""Frozen pre-trained backbones: bytes of image files or texts -> token features; and towers of ONNX graphs.

EfficientNet-Lite0 and MiniLM, which come with the package and need no torch; EfficientNet-Lite2 (extra ``offline``);
any model of transformers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.arrays import n_threads
from sfumato.data.image_decoding import decode_image
from sfumato.encoders.encoder_protocol import BaseTower, FrozenBackbone, Inputs, Processor
from sfumato.encoders.package_weights import (
    CHANNELS,
    SIZES,
    WEIGHTS,
    Backbone,
    Precision,
    check_grid,
    map_tokens,
    means_of_tokens,
    named_format,
    onnx_session,
    packaged_network,
    shared_minilm,
)
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding

IMAGE_BACKBONES = {"efficientnet-lite0": "", "efficientnet-lite2": "offline"}
"""Image backbones without transformers, with the extra that they need; the others are hub names or local folders."""

TEXT_BACKBONES = {"minilm-l6-v2": ""}
"""The same of texts."""


def image_backbone(
    name: str, *, size: int | None = None, grid: int | None = None, precision: Precision = "float32"
) -> FrozenBackbone:
    """The frozen image backbone of a name."""
    if "+" in name and not Path(name).exists():
        return SideBySide([image_backbone(n, size=size, grid=grid, precision=precision) for n in name.split("+")])
    if name in IMAGE_BACKBONES:
        return _efficientnet(name, size, grid, precision)
    from sfumato.encoders.joint import transformers_image

    return transformers_image(name, size, grid, precision)


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


def _efficientnet(name: str, size: int | None, grid: int | None, precision: Precision) -> Backbone:
    """EfficientNet-Lite, trained on ImageNet: (size / 32)^2 or grid^2 tokens of 1280 channels."""
    side, packaged = size or SIZES[name], not IMAGE_BACKBONES[name]
    if side < 32:
        raise UserError(f"the size of images for {name} must be at least 32 pixels, got {side}")
    check_grid(grid, math.ceil(side / 32))
    maps: Callable[[np.ndarray], np.ndarray]
    if packaged:
        maps = partial(_packaged_maps, packaged_network(name, threads=1))
    else:
        from sfumato.encoders.convolutional import efficientnet_maps

        maps = efficientnet_maps(name, precision)

    def compute(items: Sequence[np.ndarray]) -> np.ndarray:
        return map_tokens(maps((np.stack(items).astype(np.float32) - 127) / 128), grid)

    known = efficientnet_fingerprint(name, size, grid, precision)
    decode = partial(decode_image, size=side, reduced=True)
    return Backbone(known, compute, channels=CHANNELS, decode=decode, one_thread=packaged)


def _packaged_maps(network: Any, pixels: np.ndarray) -> np.ndarray:
    found: np.ndarray = network.run(None, {"pixels": pixels})[0]
    return found


def efficientnet_fingerprint(name: str, size: int | None, grid: int | None, precision: Precision) -> str:
    """The fingerprint of its features; the network is not built."""
    number = named_format(precision if IMAGE_BACKBONES[name] else "float32")
    return f"{name} {WEIGHTS[name]} size={size or SIZES[name]} squash (x-127)/128 tokens={grid or 'last-map'}{number}"


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
    network: Any
    if name in TEXT_BACKBONES:
        network, precision = shared_minilm(), "float32"
    else:
        from sfumato.encoders.joint import TransformersNetwork

        network = TransformersNetwork(name, precision)
    if layers and max(layers) > network.depth:
        raise UserError(f"model.text.layers: {name!r} has the layers 0 to {network.depth}, got {max(layers)}")
    chosen = tuple(layers) or (network.depth,)

    def compute(texts: Sequence[str]) -> list[np.ndarray] | np.ndarray:
        tokens: Mapping[str, np.ndarray] = network.prepare(list(texts), max_tokens)
        mask, hidden = tokens["attention_mask"].astype(bool), np.concatenate(network.states(tokens, chosen), axis=-1)
        if pooled:
            return means_of_tokens(hidden, mask)[:, None]
        return [of_text[present] for of_text, present in zip(hidden, mask, strict=True)]

    options = (" pooled" if pooled else "") + (f" layers={','.join(map(str, layers))}" if layers else "")
    known = f"transformers text {network.known} max_tokens={max_tokens}{options}{named_format(precision)}"
    return Backbone(known, compute, pieces=network.pieces)


class OnnxTower(BaseTower):
    """A tower whose network is an ONNX graph: one input of values, perhaps a mask, and the outputs mean and log_var.

    A graph without log_var gives points. Means are of unit length, unless ``normalize`` says that they are not.
    """

    def __init__(self, processor: Processor, graph: Path, *, normalize: bool = True, threads: int = 0) -> None:
        self.processor, self.normalize = processor, normalize
        self._session = onnx_session(graph, threads or n_threads())
        self._inputs = {one.name: _NUMBERS[one.type] for one in self._session.get_inputs()}
        outputs = self._session.get_outputs()
        self.dim, self.variances = int(outputs[0].shape[-1]), len(outputs) > 1
        self.takes_vectors = not self.variances

    def batch(self, inputs: Inputs) -> GaussianEmbedding:
        mask = np.ones(inputs.values.shape[:2], bool) if inputs.mask is None else inputs.mask
        given: dict[str, np.ndarray] = {
            name: (mask if "mask" in name else inputs.values).astype(dtype, copy=False)
            for name, dtype in self._inputs.items()
        }
        mean, *log_var = self._session.run(None, given)
        return GaussianEmbedding(mean, *log_var) if log_var else GaussianEmbedding.point(mean)


_NUMBERS = {
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
}
"""The types of a graph's inputs."""
