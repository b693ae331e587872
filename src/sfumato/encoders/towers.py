"""The two towers of a model, and the registry of the kinds of encoders that they can have."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic_core import PydanticKnownError
from tokenizers import Tokenizer
from torch import Tensor, nn

from sfumato.data.transforms import drop_tokens
from sfumato.encoders import feature_rows, scratch
from sfumato.encoders.clip import ClipImageConfig, ClipTextConfig, build_clip_image, build_clip_text, clip_tokenizer
from sfumato.encoders.convolutional import EfficientNetImageConfig, ResNetImageConfig, build_efficientnet, build_resnet
from sfumato.encoders.encoder_protocol import (
    BaseTower,
    BuildContext,
    EncoderConfig,
    EncoderEntry,
    ImageEncoderConfig,
    Inputs,
    Processor,
    TextEncoderConfig,
    TwoTowers,
)
from sfumato.encoders.frozen import FrozenImageConfig, FrozenProcessor, FrozenTextConfig, frozen_processor
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.scratch import Encoder
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side


def build_frozen(
    config: FrozenImageConfig | FrozenTextConfig, context: BuildContext
) -> tuple[FrozenProcessor, feature_rows.FeatureInput]:
    """Build a side of kind "frozen". Returns (processor, encoder)."""
    processor = frozen_processor(config, context.cache)
    channels = processor.backbone.channels
    return processor, feature_rows.FeatureInput(channels, context.feature_dropout, whiten=config.whiten)


ENCODERS: dict[Side, dict[str, EncoderEntry]] = {
    "image": {
        "small": EncoderEntry(scratch.SmallImageConfig, scratch.build_small_image),
        "frozen": EncoderEntry(FrozenImageConfig, build_frozen),
        "efficientnet": EncoderEntry(EfficientNetImageConfig, build_efficientnet),
        "resnet": EncoderEntry(ResNetImageConfig, build_resnet),
        "clip": EncoderEntry(ClipImageConfig, build_clip_image),
        "regions": EncoderEntry(feature_rows.RegionImageConfig, feature_rows.build_regions),
        "embeddings": EncoderEntry(feature_rows.EmbeddingImageConfig, feature_rows.build_embeddings),
    },
    "text": {
        "small": EncoderEntry(scratch.SmallTextConfig, scratch.build_small_text, scratch.small_tokenizer),
        "gru": EncoderEntry(scratch.WordTextConfig, scratch.build_word_text, scratch.words_of_texts),
        "frozen": EncoderEntry(FrozenTextConfig, build_frozen),
        "clip": EncoderEntry(ClipTextConfig, build_clip_text, clip_tokenizer),
        "embeddings": EncoderEntry(feature_rows.EmbeddingTextConfig, feature_rows.build_embeddings),
    },
}
"""Every kind of encoder by its side and by the name that ``model.image.kind`` and ``model.text.kind`` give it."""


def register_encoder(
    side: Side,
    kind: str,
    config: type[EncoderConfig],
    build: Callable[[Any, BuildContext], tuple[Processor, Encoder]],
    *,
    tokenizer: Callable[[Any, Iterable[str]], Tokenizer] | None = None,
) -> None:
    """Add a kind of encoder for recipes; loading a model of this kind also needs the registration.

    Args:
        side: "image" or "text".
        kind: value of ``model.image.kind`` or ``model.text.kind`` in recipes; not yet taken.
        config: class of its section in the recipe, with ``kind`` as the default of its field ``kind``.
        build: the section and a :class:`~sfumato.encoders.encoder_protocol.BuildContext` -> (processor, encoder).
        tokenizer: for texts: the section and the training texts -> the tokenizer of a new model, which ``build`` then
            finds in ``context.tokenizer``. None for encoders without a tokenizer.

    Raises:
        ValueError: the side is unknown, the kind is taken, or the section does not fit the side or the kind.

    Example:
        >>> from sfumato.encoders.scratch import SmallImageConfig, build_small_image
        >>> register_encoder("image", "small", SmallImageConfig, build_small_image)
        Traceback (most recent call last):
            ...
        ValueError: register_encoder: the image side has an encoder of kind 'small' already; choose another name
    """
    if side not in ENCODERS:
        raise ValueError(f"register_encoder: unknown side {side!r}; expected 'image' or 'text'")
    if kind in ENCODERS[side]:
        taken = f"the {side} side has an encoder of kind {kind!r} already"
        raise ValueError(f"register_encoder: {taken}; choose another name")
    base: type[EncoderConfig] = ImageEncoderConfig if side == "image" else TextEncoderConfig
    if not issubclass(config, base):
        raise ValueError(f"register_encoder: {config.__name__} must be a subclass of {base.__name__}")
    if (default := config.model_fields["kind"].default) != kind:
        field = f"the field kind of {config.__name__}"
        raise ValueError(f"register_encoder: {field} has the default {default!r}, expected {kind!r}")
    ENCODERS[side][kind] = EncoderEntry(config, build, tokenizer)


def encoder_entry(side: Side, kind: str) -> EncoderEntry:
    """The registered entry of a kind."""
    if kind not in ENCODERS[side]:
        raise ValueError(f"unknown kind of {side} encoder {kind!r}; known: {', '.join(sorted(ENCODERS[side]))}")
    return ENCODERS[side][kind]


def encoder_section(side: Side, value: Any) -> EncoderConfig:
    """Check a section ``model.image`` or ``model.text`` with the class that is registered for its ``kind``.

    Recipes use it as a pydantic validator, so its errors are those of a union that is discriminated by ``kind``.
    """
    if isinstance(value, EncoderConfig):
        if not isinstance(value, encoder_entry(side, value.kind).config):
            expected = f"the config class of the {side} side of {value.kind!r}"
            raise ValueError(f"model.{side}: got a {type(value).__name__}, which is not {expected}")
        return value
    return ENCODERS[side][tag_of(value, "kind", ENCODERS[side])].config.model_validate(value)


def tag_of(value: Any, key: str, known: Iterable[str]) -> str:
    """The value of the key that decides which other keys a section has; errors are those of a discriminated union."""
    if not isinstance(value, Mapping):
        raise PydanticKnownError("dict_type")
    about = {"discriminator": repr(key)}
    if key not in value:
        raise PydanticKnownError("union_tag_not_found", about)
    tag = value[key]
    if not isinstance(tag, str) or tag not in known:
        expected = ", ".join(map(repr, known))
        raise PydanticKnownError("union_tag_invalid", about | {"tag": str(tag), "expected_tags": expected})
    return tag


class Tower(nn.Module, BaseTower):
    """One side of a model of torch: a processor of raw items, an encoder and a Gaussian head."""

    def __init__(
        self, processor: Processor, encoder: Encoder, head: GaussianHead, *, token_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.processor, self.encoder, self.head = processor, encoder, head
        self.token_dropout, self.dim = token_dropout, head.dim
        self.variances, self.has_offset = head.log_var is not None, head.offset is not None

    @property
    def normalize(self) -> bool:  # type: ignore[override]
        """Whether means have unit length."""
        return self.head.normalize

    @property
    def device(self) -> torch.device:
        """The device of its weights; the CPU if it has none."""
        return self.new_zeros(0).device

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros on the device of the weights, in their dtype; without weights in float32 on the CPU."""
        return next(itertools.chain(self.parameters(), self.buffers()), torch.empty(0)).new_zeros(shape)

    def forward(self, inputs: Inputs) -> GaussianEmbedding:
        """Embed a batch. Returns (n, d)."""
        tokens = self.encoder(inputs)
        if self.training and self.token_dropout:
            present = tokens.mask
            if present is None:
                present = torch.ones(tokens.mean.shape[:2], dtype=torch.bool, device=tokens.mean.device)
            tokens = replace(tokens, mask=drop_tokens(present, rate=self.token_dropout))
        return self.head(tokens.float())

    @torch.no_grad()
    def batch(self, inputs: Inputs) -> GaussianEmbedding:
        """Embed a batch in evaluation mode, on the CPU; the previous mode is restored afterwards."""
        training = self.training
        self.eval()
        found: GaussianEmbedding = self(inputs.to(self.device)).to("cpu")
        self.train(training)
        return found


class DualEncoder(nn.Module, TwoTowers):
    """The two towers of a model of torch."""

    image: Tower
    text: Tower
    digest = ""

    def __init__(self, image: Tower, text: Tower) -> None:
        super().__init__()
        self.image, self.text = image, text

    def forward(self, images: Inputs, texts: Inputs) -> tuple[GaussianEmbedding, GaussianEmbedding]:
        """Embed both sides of a batch.

        Args:
            images: n images.
            texts: m texts.

        Returns:
            (n, d) embeddings of the images and (m, d) embeddings of the texts.
        """
        return self.image(images), self.text(texts)
