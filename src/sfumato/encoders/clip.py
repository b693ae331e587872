"""The CLIP family, fine-tuned from pixels and subword tokens: sections of the recipe, and building of encoders.

The encoders, those of ProLIP too, are in :mod:`sfumato.encoders.clip_transformers`.
The layouts of published weights are in :mod:`sfumato.models.pretrained`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt
from tokenizers import Tokenizer

from sfumato.encoders.clip_transformers import (
    CLIP_MEAN,
    CLIP_STD,
    ClipImageEncoder,
    ClipTextEncoder,
    UncTokenImageEncoder,
    UncTokenTextEncoder,
    VarianceStart,
    resize_positions,
)
from sfumato.encoders.encoder_protocol import (
    AugmentMode,
    BuildContext,
    EncoderConfig,
    Fit,
    ImageEncoderConfig,
    InMemory,
    TextEncoderConfig,
)
from sfumato.encoders.package_weights import from_pretrained, import_transformers, pretrained_tokenizer
from sfumato.encoders.processors import (
    ImageFileProcessor,
    PixelProcessor,
    TokenProcessor,
    add_begin_and_end,
    train_tokenizer,
)
from sfumato.errors import UserError

Activation = Literal["quick_gelu", "gelu"]
Architecture = Literal["ViT-Ti/16", "ViT-S/16", "ViT-B/32", "ViT-B/16", "ViT-L/14"]

_SIGLIP_MEAN = _SIGLIP_STD = (0.5, 0.5, 0.5)

ARCHITECTURES: dict[str, dict[str, tuple[int, int, int]]] = {
    "ViT-Ti/16": {"image": (192, 12, 3), "text": (192, 12, 3)},
    "ViT-S/16": {"image": (384, 12, 6), "text": (384, 12, 6)},
    "ViT-B/32": {"image": (768, 12, 12), "text": (512, 12, 8)},
    "ViT-B/16": {"image": (768, 12, 12), "text": (512, 12, 8)},
    "ViT-L/14": {"image": (1024, 24, 16), "text": (768, 12, 12)},
}
"""(width, blocks, heads) of encoders without weights; the number after the slash is the patch size.
B and L are CLIP's (Radford et al. 2021, table 20); Ti and S have the ViT's shape on both sides."""

_MAX_TOKENS = 77
"""CLIP's number of positions."""


class _ClipConfig(EncoderConfig):
    """The keys of both sides."""

    has_blocks: ClassVar[bool] = True
    needs_description: ClassVar[bool] = True
    base_field: ClassVar[str] = "weights"
    needs: ClassVar[frozenset[str]] = frozenset({"backbones"})

    weights: str = Field("", description="hub name or local folder of a CLIP or SigLIP model; random weights if empty")
    architecture: Architecture = Field("ViT-B/32", description="architecture, without weights")
    blocks: PositiveInt | None = Field(
        None, description="number of blocks, only without weights; the architecture's number if left out"
    )
    activation: Activation = Field(
        "quick_gelu", description="activation, only without weights: quick_gelu (OpenAI) or gelu (open_clip)"
    )
    variance_blocks: int = Field(1, ge=0, description="number of last blocks that are separate for the log variance")
    variance_start: VarianceStart = Field(
        "random",
        description="start of the variance blocks: random weights (as published), or a copy of the mean's blocks",
    )
    variance_token: bool = Field(
        False, description="read the log variance from an extra token [UNC], as ProLIP, instead of extra blocks"
    )
    checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory, more time")

    def own_blocks(self, variance: bool) -> int:
        """Number of variance blocks to build."""
        return self.variance_blocks if variance and not self.variance_token else 0

    def check(self, section: str) -> None:
        if self.weights and (useless := self.changed(*self._without_weights)):
            raise ValueError(
                f"{section}.{min(useless)} is only for random weights; leave it out with {section}.weights"
            )
        if self.variance_token and self.variance_blocks > 1:
            raise ValueError(
                f"{section}.variance_token replaces the variance blocks; leave {section}.variance_blocks out"
            )

    _without_weights: ClassVar[tuple[str, ...]] = ("architecture", "blocks", "activation")


class ClipImageConfig(_ClipConfig, ImageEncoderConfig):
    """A vision transformer of the CLIP family, trained from pixels."""

    path_fields: ClassVar[tuple[str, ...]] = ("weights",)

    kind: Literal["clip"] = "clip"
    size: int | None = Field(
        None, ge=16, description="side of the square images in pixels; the side of the weights (or 224) if left out"
    )
    final_norm: bool = Field(False, description="pass the mean's features through the last norm of the transformer")
    fit: Fit = "squash"
    augment: AugmentMode = "crop"
    in_memory: InMemory = False

    @property
    def starts_pretrained(self) -> bool:
        """Random blocks can be frozen too."""
        return True


class ClipTextConfig(_ClipConfig, TextEncoderConfig):
    """The text transformer of the CLIP family."""

    path_fields: ClassVar[tuple[str, ...]] = ("weights", "tokenizer")
    _without_weights: ClassVar[tuple[str, ...]] = ("architecture", "blocks", "activation", "vocabulary", "tokenizer")

    kind: Literal["clip"] = "clip"
    vocabulary: PositiveInt = Field(
        4000, description="largest number of subword tokens learnt from the training texts; only without weights"
    )
    tokenizer: str = Field(
        "",
        description="hub name or local folder of subword tokens to use instead of learning them; only without weights",
    )
    max_tokens: int | None = Field(
        None,
        ge=3,
        description="largest number of tokens of a text, longer texts are cut; the positions of the weights (or 77) if"
        " left out",
    )


def clip_image_encoder(
    weights: str = "",
    *,
    architecture: str = "ViT-B/32",
    size: int | None = None,
    blocks: int | None = None,
    activation: Activation = "quick_gelu",
    description: Mapping[str, Any] | None = None,
    final_norm: bool = False,
    variance_blocks: int = 1,
    variance_start: VarianceStart = "random",
    checkpointing: bool = False,
) -> ClipImageEncoder:
    """The image side of a CLIP or SigLIP model."""
    patch, side = int(architecture.rpartition("/")[2] or 0), size or 224
    if description is None and not weights and architecture in ARCHITECTURES:
        _check_size(side, patch)
    own = {"patch_size": patch, "image_size": side}
    backbone = _backbone("image", weights, description, architecture, blocks, activation, own)
    mean, std = CLIP_MEAN, CLIP_STD
    if description is not None:
        mean, std = tuple(description["pixel_mean"]), tuple(description["pixel_std"])
    elif "siglip" in backbone.config.model_type:
        mean, std = _SIGLIP_MEAN, _SIGLIP_STD
    if size is not None and size != backbone.embeddings.image_size:
        _check_size(size, backbone.embeddings.patch_size)
        resize_positions(backbone.embeddings, size)
    return ClipImageEncoder(
        backbone,
        pixel_mean=mean,
        pixel_std=std,
        final_norm=final_norm,
        variance_blocks=variance_blocks,
        variance_start=variance_start,
        checkpointing=checkpointing,
    )


def clip_text_encoder(
    weights: str = "",
    *,
    architecture: str = "ViT-B/32",
    vocabulary: int = 49408,
    max_tokens: int = 77,
    blocks: int | None = None,
    activation: Activation = "quick_gelu",
    description: Mapping[str, Any] | None = None,
    variance_blocks: int = 1,
    variance_start: VarianceStart = "random",
    checkpointing: bool = False,
) -> ClipTextEncoder:
    """The text side of a CLIP or SigLIP model."""
    special = dict.fromkeys(("bos_token_id", "eos_token_id")) | {"pad_token_id": 0}
    own = {"vocab_size": vocabulary, "max_position_embeddings": max_tokens, **special}
    backbone = _backbone("text", weights, description, architecture, blocks, activation, own)
    return ClipTextEncoder(
        backbone, variance_blocks=variance_blocks, variance_start=variance_start, checkpointing=checkpointing
    )


def text_positions(weights: str) -> int:
    """Number of positions of the text side of a CLIP or SigLIP model."""
    config = from_pretrained(import_transformers().AutoConfig, weights)
    return int(_part(config, "text").max_position_embeddings)


def clip_tokenizer(config: ClipTextConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a new text encoder of kind "clip"."""
    positions = text_positions(config.weights) if config.weights else config.max_tokens or _MAX_TOKENS
    max_tokens = config.max_tokens or positions
    if max_tokens > positions:
        raise UserError(
            f"model.text.max_tokens={max_tokens} is more than the {positions} positions of {config.weights!r};"
            " leave it out"
        )
    if not config.weights and not config.tokenizer:
        return add_begin_and_end(train_tokenizer(texts, config.vocabulary), max_tokens)
    pretrained = pretrained_tokenizer(config.weights or config.tokenizer)
    tokenizer: Tokenizer = pretrained.backend_tokenizer
    tokenizer.enable_truncation(max_tokens)
    if len(tokenizer.encode("").ids) < 2:  # SigLIP attends to padding: every text has the full length.
        tokenizer.enable_padding(length=max_tokens, pad_id=pretrained.pad_token_id, pad_token=pretrained.pad_token)
    else:
        tokenizer.no_padding()
    return tokenizer


def build_clip_image(
    config: ClipImageConfig, context: BuildContext
) -> tuple[PixelProcessor | ImageFileProcessor, ClipImageEncoder | UncTokenImageEncoder]:
    """Build the image side of kind "clip". Returns (processor, encoder)."""
    encoder = clip_image_encoder(
        config.weights, size=config.size, final_norm=config.final_norm, **_common(config, context)
    )
    processor = (PixelProcessor if config.in_memory else ImageFileProcessor)(encoder.size, fit=config.fit)
    return processor, UncTokenImageEncoder(encoder) if config.variance_token and context.variance else encoder


def build_clip_text(
    config: ClipTextConfig, context: BuildContext
) -> tuple[TokenProcessor, ClipTextEncoder | UncTokenTextEncoder]:
    """Build the text side of kind "clip". Returns (processor, encoder)."""
    tokenizer = context.need_tokenizer(config.kind)
    encoder = clip_text_encoder(
        config.weights,
        vocabulary=tokenizer.get_vocab_size(),
        max_tokens=config.max_tokens or _MAX_TOKENS,
        **_common(config, context),
    )
    processor = TokenProcessor(tokenizer, min(config.max_tokens or encoder.max_tokens, encoder.max_tokens))
    return processor, UncTokenTextEncoder(encoder) if config.variance_token and context.variance else encoder


def _common(config: _ClipConfig, context: BuildContext) -> dict[str, Any]:
    """The options of both sides."""
    keys = {"architecture", "blocks", "activation", "variance_start", "checkpointing"}
    own = {"description": context.description, "variance_blocks": config.own_blocks(context.variance)}
    return config.model_dump(include=keys) | own


def _backbone(
    side: Literal["image", "text"],
    weights: str,
    description: Mapping[str, Any] | None,
    architecture: str,
    blocks: int | None,
    activation: Activation,
    own: Mapping[str, Any],
) -> Any:
    """The network of transformers: of a description, else of weights, else of an architecture, with ``own`` options."""
    transformers, part = import_transformers(), "vision" if side == "image" else "text"
    names = {f"{family.lower()}_{part}_model": f"{family}{part.title()}Model" for family in ("CLIP", "Siglip")}
    kinds = {model_type: getattr(transformers, name) for model_type, name in names.items()}
    if description is not None:
        kind = kinds[description["backbone"]["model_type"]]
        return kind(kind.config_class(**description["backbone"]))
    if weights:
        config = from_pretrained(transformers.AutoConfig, weights)
        model_type = _part(config, part).model_type
        if model_type not in kinds:
            raise UserError(
                f"{weights!r} is a model of type {config.model_type!r}; expected one whose {part} side is one of"
                f" {', '.join(kinds)}"
            )
        return from_pretrained(kinds[model_type], weights).float()  # Some weights are stored in half precision.
    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    width, depth, heads = ARCHITECTURES[architecture][side]
    kind = kinds[f"clip_{part}_model"]
    config = kind.config_class(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=blocks or depth,
        num_attention_heads=heads,
        hidden_act=activation,
        **own,
    )
    return kind(config)


def _part(config: Any, side: str) -> Any:
    """The configuration of one side, from the configuration of a whole model or of this side."""
    return getattr(config, f"{side}_config", config)


def _check_size(size: int, patch: int) -> None:
    if size % patch:
        raise ValueError(f"size must be a multiple of the patch, {patch} pixels, got {size}")
