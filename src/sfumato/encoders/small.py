"""Small encoders that learn from pixels and subword tokens on a CPU, in minutes."""

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field, PositiveInt
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from sfumato.encoders.encoder_protocol import (
    AugmentMode,
    BuildContext,
    EncoderModule,
    ImageEncoderConfig,
    TextEncoderConfig,
)
from sfumato.encoders.features import Inputs, TokenFeatures, padded
from sfumato.encoders.processors import PixelProcessor, TokenProcessor, train_tokenizer, vocabulary_size


class SmallImageConfig(ImageEncoderConfig):
    """A small convolutional network that learns from pixels."""

    kind: Literal["small"] = "small"
    size: int = Field(64, ge=16, description="side of the square images in pixels")
    width: PositiveInt = Field(48, description="channels of the first stage; each later stage has twice as many")
    augment: bool = Field(
        True, description="change training images at random: rotations, crops, mirror images, colours"
    )

    @property
    def augment_mode(self) -> AugmentMode:
        """The type of random augmentation of training images."""
        return "style" if self.augment else "none"


class SmallTextConfig(TextEncoderConfig):
    """A small network over subword tokens, whose vocabulary is learnt from the training texts."""

    kind: Literal["small"] = "small"
    vocabulary: PositiveInt = Field(
        4000, description="largest number of subword tokens; they include all single characters"
    )
    width: PositiveInt = Field(256, description="channels of the token features")
    max_tokens: PositiveInt = Field(64, description="largest number of tokens of a text; longer texts are cut")
    dropout: float = Field(0.1, ge=0, lt=1, description="fraction of the token features dropped while training")


class SmallImageEncoder(EncoderModule):
    """A residual network of four stages: (n, 3, s, s) uint8 pixels -> (n, (s/16)^2, 8 w) token features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [_convolution(3, width, kernel=5, stride=2)]
        for channels in (width, 2 * width, 4 * width):
            stages += [_convolution(channels, 2 * channels, stride=2), _Residual(2 * channels)]
        self.stages = nn.Sequential(*stages)
        self.channels = 8 * width

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of images. inputs (n, 3, s, s)."""
        pixels = inputs.values
        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        maps = self.stages((pixels - 0.5).mul(2).contiguous(memory_format=torch.channels_last))
        return TokenFeatures(maps.flatten(2).transpose(1, 2).float())


class SmallTextEncoder(EncoderModule):
    """Embedded subword tokens and their neighbours: (n, t) ids -> (n, t, w) token features."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.neighbours = nn.Conv1d(width, width, kernel_size=3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.channels = width

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of texts. inputs (n, t) -> (n, t, w)."""
        mask = torch.ones_like(inputs.values, dtype=torch.bool) if inputs.mask is None else inputs.mask
        embedded = self.embedding(inputs.values[mask])
        # The convolution as one product for present tokens only: most texts are much shorter than the longest.
        around = functional.pad(padded(embedded, mask), (0, 0, 1, 1)).unfold(1, 3, 1)[mask]  # (k, w, 3)
        context = functional.linear(around.flatten(1), self.neighbours.weight.flatten(1), self.neighbours.bias)
        features = self.dropout(self.norm(embedded + functional.gelu(context)))
        return TokenFeatures(padded(features, mask), inputs.mask)


def build_small_image(config: SmallImageConfig, context: BuildContext) -> tuple[PixelProcessor, SmallImageEncoder]:
    """Build the image side of kind "small". Returns (processor, encoder)."""
    return PixelProcessor(config.size), SmallImageEncoder(config.width)


def build_small_text(config: SmallTextConfig, context: BuildContext) -> tuple[TokenProcessor, SmallTextEncoder]:
    """Build the text side of kind "small". Returns (processor, encoder)."""
    tokenizer = context.need_tokenizer(config.kind)
    encoder = SmallTextEncoder(vocabulary_size(tokenizer), config.width, config.dropout)
    return TokenProcessor(tokenizer, config.max_tokens), encoder


def small_tokenizer(config: SmallTextConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a new text encoder of kind "small"."""
    return train_tokenizer(texts, config.vocabulary)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            _convolution(channels, channels),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def _convolution(channels_in: int, channels_out: int, *, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )
