"""The CLIP family, fine-tuned from pixels and subword tokens: sections of the recipe and encoders.

The networks are built by the library transformers. The layouts of published weights are in
:mod:`sfumato.models.pretrained`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfumato.encoders.encoder_protocol import (
    AugmentMode,
    Encoder,
    EncoderConfig,
    Fit,
    ImageEncoderConfig,
    InMemory,
    StandardisedPixels,
    TextEncoderConfig,
)
from sfumato.encoders.features import Inputs, TokenFeatures
from sfumato.encoders.package_weights import from_pretrained, import_transformers, pretrained_tokenizer
from sfumato.encoders.processors import (
    add_begin_and_end,
    train_tokenizer,
)
from sfumato.errors import UserError
from sfumato.ids import Side

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the pixels that CLIP was trained on, in [0, 1]."""

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

    weights: str = Field("", description="hub name or local folder of a CLIP or SigLIP model; random or empty: none")
    architecture: Architecture = Field("ViT-B/32", description="architecture, without weights")
    blocks: PositiveInt | None = None
    """number of blocks, only without weights; the architecture's number if left out"""
    activation: Activation = "quick_gelu"
    """activation, only without weights: quick_gelu (OpenAI) or gelu (open_clip)"""
    variance_blocks: int = Field(1, ge=0, description="number of last blocks that are separate for the log variance")
    variance_token: bool = False
    """read the log variance from an extra token [UNC], as ProLIP, instead of extra blocks"""
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
    size: int | None = Field(None, ge=16)
    """side of the square images in pixels; the side of the weights (or 224) if left out"""
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
    vocabulary: PositiveInt = 4000
    """largest number of subword tokens learnt from the training texts; only without weights"""
    tokenizer: str = ""
    """hub name or local folder of subword tokens to use instead of learning them; only without weights"""
    max_tokens: int | None = Field(None, ge=3)
    """largest number of tokens of a text, longer texts are cut; the positions of the weights (or 77) if left out"""


class ClipEncoder(Encoder):
    """The common base of both sides: the blocks; the last ones exist twice, for the mean and for the log variance."""

    pretrained = True

    def __init__(
        self, backbone: Any, config: _ClipConfig, *, norm_in: nn.Module, norm_out: nn.Module, variance: bool
    ) -> None:
        super().__init__()
        blocks, variance_blocks = list(backbone.encoder.layers), config.own_blocks(variance)
        if not 0 <= variance_blocks <= len(blocks):
            raise ValueError(
                f"variance_blocks must lie in [0, {len(blocks)}], the number of blocks, got {variance_blocks}"
            )
        # Always "sdpa": "eager" ignores is_causal, and adds a boolean mask instead of applying it.
        backbone.set_attn_implementation("sdpa")
        first = len(blocks) - variance_blocks
        fresh = [type(block)(backbone.config) for block in blocks[first:]]
        for own in fresh:
            own.apply(backbone._init_weights)
        self.embeddings = backbone.embeddings
        self.norm_in, self.norm_out = norm_in, norm_out
        self.shared_blocks = nn.ModuleList(blocks[:first])
        self.mean_blocks = nn.ModuleList(blocks[first:])
        self.variance_blocks = nn.ModuleList(fresh)
        self.channels = int(backbone.config.hidden_size)
        self.backbone_config: dict[str, Any] = backbone.config.to_diff_dict()
        self.checkpointing = config.checkpointing

    @property
    def depth(self) -> int:
        """Number of blocks that an input passes."""
        return len(self.shared_blocks) + len(self.mean_blocks)

    def blocks_from_top(self, parameter: str) -> int:
        """Both kinds of last blocks have equal numbers."""
        found = re.match(r"(shared|mean|variance)_blocks\.(\d+)\.", parameter)
        if found is None:
            return 0
        below = len(self.shared_blocks) if found[1] != "shared" else 0
        return self.depth - below - int(found[2])

    def tokens(
        self, embedded: Tensor, mask: Tensor | None, *, causal: bool = False, attention: Tensor | None = None
    ) -> TokenFeatures:
        """Apply the blocks to embedded tokens.

        embedded (n, t, c), mask (n, t), attention (n, 1, t or 1, t) -> (n, t, c).
        """
        options: dict[str, Any] = {"is_causal": True} if causal else {}
        hidden = self._through(self.shared_blocks, self.norm_in(embedded), attention, options)
        log_var = self._through(self.variance_blocks, hidden, attention, options) if len(self.variance_blocks) else None
        return TokenFeatures(self.norm_out(self._through(self.mean_blocks, hidden, attention, options)), mask, log_var)

    def _through(
        self, blocks: nn.ModuleList, hidden: Tensor, attention: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        for block in blocks:
            if self.checkpointing and self.training:
                hidden = checkpoint(block, hidden, attention, use_reentrant=False, **options)
            else:
                hidden = block(hidden, attention, **options)
        return hidden


class ClipImageEncoder(ClipEncoder):
    """A vision transformer: (n, 3, s, s) pixels -> (n, t, c) class token (CLIP only) and patches."""

    def __init__(
        self,
        backbone: Any,
        config: ClipImageConfig,
        *,
        pixel_mean: tuple[float, ...] = CLIP_MEAN,
        pixel_std: tuple[float, ...] = CLIP_STD,
        variance: bool = True,
    ) -> None:
        # SigLIP has no norm before its first block.
        norm_in = nn.Identity() if _is_siglip(backbone) else backbone.pre_layrnorm
        norm_out = backbone.post_layernorm if config.final_norm else nn.Identity()
        super().__init__(backbone, config, norm_in=norm_in, norm_out=norm_out, variance=variance)
        self.size = int(self.embeddings.image_size)
        self.pixels = StandardisedPixels(pixel_mean, pixel_std)

    @property
    def description(self) -> dict[str, Any]:
        """JSON values with which :func:`clip_image_encoder` builds it without weights."""
        return {"backbone": self.backbone_config | {"image_size": self.size}, **self.pixels.description}

    def embed(self, inputs: Inputs) -> Tensor:
        """Embedded tokens of images, before the first block. inputs (n, 3, s, s) -> (n, t, c)."""
        embedded: Tensor = self.embeddings(self.pixels(inputs.values))
        return embedded

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of images. inputs (n, 3, s, s) -> (n, t, c)."""
        return self.tokens(self.embed(inputs), None)


class ClipTextEncoder(ClipEncoder):
    """A text transformer: (n, t) token ids -> (n, t, c) token features."""

    def __init__(self, backbone: Any, config: ClipTextConfig, *, variance: bool = True) -> None:
        norm_out = backbone.final_layer_norm
        super().__init__(backbone, config, norm_in=nn.Identity(), norm_out=norm_out, variance=variance)
        self.causal = not _is_siglip(backbone)
        self.max_tokens = int(backbone.config.max_position_embeddings)

    @property
    def description(self) -> dict[str, Any]:
        """JSON values with which :func:`clip_text_encoder` builds it without weights."""
        return {"backbone": self.backbone_config}

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of texts. inputs (n, t) -> (n, t, c)."""
        return self.tokens(self.embeddings(inputs.values), inputs.mask, causal=self.causal)


def clip_image_encoder(
    config: ClipImageConfig, *, description: Mapping[str, Any] | None = None, variance: bool = True
) -> ClipImageEncoder:
    """The image side of a CLIP or SigLIP model: of a description, else of weights, else of an architecture."""
    patch, side = int(config.architecture.rpartition("/")[2]), config.size or 224
    if description is None and not config.weights:
        _check_size(side, patch)
    backbone = _backbone("image", config, description, {"patch_size": patch, "image_size": side})
    mean, std = CLIP_MEAN, CLIP_STD
    if description is not None:
        mean, std = tuple(description["pixel_mean"]), tuple(description["pixel_std"])
    elif _is_siglip(backbone):
        mean, std = _SIGLIP_MEAN, _SIGLIP_STD
    if config.size is not None and config.size != backbone.embeddings.image_size:
        _check_size(config.size, backbone.embeddings.patch_size)
        resize_positions(backbone.embeddings, config.size)
    return ClipImageEncoder(backbone, config, pixel_mean=mean, pixel_std=std, variance=variance)


def clip_text_encoder(
    config: ClipTextConfig,
    *,
    vocabulary: int = 49408,
    description: Mapping[str, Any] | None = None,
    variance: bool = True,
) -> ClipTextEncoder:
    """The text side of a CLIP or SigLIP model: of a description, else of weights, else of an architecture."""
    special = dict.fromkeys(("bos_token_id", "eos_token_id")) | {"pad_token_id": 0}
    own = {"vocab_size": vocabulary, "max_position_embeddings": config.max_tokens or _MAX_TOKENS, **special}
    return ClipTextEncoder(_backbone("text", config, description, own), config, variance=variance)


def resize_positions(embeddings: Any, size: int) -> None:
    """Interpolate the position codes of a vision transformer to images of another size, in place."""
    patches = (size // embeddings.patch_size) ** 2
    extra = embeddings.num_positions - embeddings.num_patches
    with torch.no_grad():
        blank = torch.zeros(1, patches + extra, embeddings.embed_dim)  # Only its length is used.
        codes = embeddings.interpolate_pos_encoding(blank, size, size)[0]
    embeddings.position_embedding = nn.Embedding.from_pretrained(codes.clone(), freeze=False)
    embeddings.position_ids = torch.arange(patches + extra).expand(1, -1)
    embeddings.num_patches, embeddings.num_positions, embeddings.image_size = patches, patches + extra, size


def _is_siglip(backbone: Any) -> bool:
    return "siglip" in backbone.config.model_type


def clip_tokenizer(config: ClipTextConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a new text encoder of kind "clip"."""
    positions = config.max_tokens or _MAX_TOKENS
    if config.weights:
        known = from_pretrained(import_transformers().AutoConfig, config.weights)
        positions = int(_part(known, "text").max_position_embeddings)
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


def _backbone(side: Side, config: _ClipConfig, description: Mapping[str, Any] | None, own: Mapping[str, Any]) -> Any:
    """The network of transformers; ``own`` are the options of an architecture."""
    transformers, part = import_transformers(), "vision" if side == "image" else "text"
    names = {f"{family.lower()}_{part}_model": f"{family}{part.title()}Model" for family in ("CLIP", "Siglip")}
    kinds = {model_type: getattr(transformers, name) for model_type, name in names.items()}
    if description is not None:
        kind = kinds[description["backbone"]["model_type"]]
        return kind(kind.config_class(**description["backbone"]))
    if weights := config.weights:
        found = from_pretrained(transformers.AutoConfig, weights)
        model_type = _part(found, part).model_type
        if model_type not in kinds:
            raise UserError(
                f"{weights!r} is a model of type {found.model_type!r}; expected one whose {part} side is one of"
                f" {', '.join(kinds)}"
            )
        return from_pretrained(kinds[model_type], weights).float()  # Some weights are stored in half precision.
    width, depth, heads = ARCHITECTURES[config.architecture][side]
    kind = kinds[f"clip_{part}_model"]
    sizes = kind.config_class(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=config.blocks or depth,
        num_attention_heads=heads,
        hidden_act=config.activation,
        **own,
    )
    return kind(sizes)


def _part(config: Any, side: str) -> Any:
    """The configuration of one side, from the configuration of a whole model or of this side."""
    return getattr(config, f"{side}_config", config)


def _check_size(size: int, patch: int) -> None:
    if size % patch:
        raise ValueError(f"size must be a multiple of the patch, {patch} pixels, got {size}")
