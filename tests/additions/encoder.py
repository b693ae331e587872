"""The mean colour of an image as its one token."""

from typing import Literal

import torch
from pydantic import Field

from sfumato.encoders.encoder_protocol import BuildContext, ImageEncoderConfig, Inputs
from sfumato.encoders.heads import TokenFeatures
from sfumato.encoders.processors import PixelProcessor
from sfumato.encoders.scratch import Encoder


class MineImageConfig(ImageEncoderConfig):
    """Every field is a key of the recipe's section [model.image]."""

    kind: Literal["mine"] = "mine"
    size: int = Field(64, ge=16, description="side of the square images in pixels")


class MineEncoder(Encoder):
    """(n, 3, s, s) pixels -> (n, 1, 3); the Gaussian head comes after it."""

    channels = 3

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Average over the pixels; uint8, or floating point in [0, 1] after augmentation."""
        pixels = inputs.values.float() / 255 if inputs.values.dtype == torch.uint8 else inputs.values
        return TokenFeatures(pixels.mean((2, 3)).unsqueeze(1))


def build_mine(config: MineImageConfig, context: BuildContext) -> tuple[PixelProcessor, MineEncoder]:
    """The processor and the encoder of a section."""
    return PixelProcessor(config.size), MineEncoder()
