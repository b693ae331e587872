"""The CLIP family, fine-tuned from pixels and subword tokens: sections of the recipe and encoders.

The networks are built by the library transformers. The layouts of published weights are in
:mod:`sfumato.models.pretrained`. With ProLIP's [UNC] token before the blocks the log variance is the output of that
token.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfumato.encoders import encoder_protocol as protocol
from sfumato.encoders.heads import TokenFeatures
from sfumato.encoders.package_weights import from_pretrained, import_transformers, pretrained_tokenizer
from sfumato.encoders.processors import ImageFileProcessor, TokenProcessor, add_begin_and_end, train_tokenizer
from sfumato.encoders.scratch import Built, Encoder, StandardisedPixels
from sfumato.errors import UserError
from sfumato.ids import Side

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the pixels that CLIP was trained on, in [0, 1]."""

Architecture = Literal["ViT-Ti/16", "ViT-S/16", "ViT-B/32", "ViT-B/16", "ViT-L/14"]

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


class _ClipConfig(protocol.EncoderConfig):
    """The keys of both sides."""

    has_blocks: ClassVar[bool] = True
    needs_description: ClassVar[bool] = True
    base_field: ClassVar[str] = "weights"
    needs: ClassVar[frozenset[str]] = frozenset({"backbones"})

    weights: str = Field("", description="hub name or local folder of a CLIP or SigLIP model; random or empty: none")
    architecture: Architecture = Field("ViT-B/32", description="architecture, without weights")
    activation: Literal["quick_gelu", "gelu"] = "quick_gelu"
    """activation, only without weights: quick_gelu (OpenAI) or gelu (open_clip)"""
    variance_blocks: int = Field(1, ge=0, description="number of last blocks that are separate for the log variance")
    variance_token: bool = False
    """read the log variance from an extra token [UNC], as ProLIP, instead of extra blocks"""
    checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory, more time")

    def check(self, section: str) -> None:
        if self.weights and (useless := self.changed(*self._without_weights)):
            way = f"leave it out with {section}.weights"
            raise ValueError(f"{section}.{min(useless)} is only for random weights; {way}")
        if self.variance_token and self.variance_blocks > 1:
            way = f"leave {section}.variance_blocks out"
            raise ValueError(f"{section}.variance_token replaces the variance blocks; {way}")

    _without_weights: ClassVar[tuple[str, ...]] = ("architecture", "activation")


class ClipImageConfig(_ClipConfig, protocol.ImageEncoderConfig):
    """A vision transformer of the CLIP family, trained from pixels."""

    path_fields: ClassVar[tuple[str, ...]] = ("weights",)
    starts_pretrained: ClassVar[bool] = True  # Random blocks can be frozen too.

    kind: Literal["clip"] = "clip"
    size: int | None = Field(None, ge=16)
    """side of the square images in pixels; the side of the weights (or 224) if left out"""
    final_norm: bool = Field(False, description="pass the mean's features through the last norm of the transformer")
    fit: protocol.Fit = "squash"
    augment: protocol.AugmentMode = "crop"


class ClipTextConfig(_ClipConfig, protocol.TextEncoderConfig):
    """The text transformer of the CLIP family."""

    path_fields: ClassVar[tuple[str, ...]] = ("weights", "tokenizer")
    _without_weights: ClassVar[tuple[str, ...]] = ("architecture", "activation", "vocabulary", "tokenizer")

    kind: Literal["clip"] = "clip"
    vocabulary: PositiveInt = 4000
    """largest number of subword tokens learnt from the training texts; only without weights"""
    tokenizer: str = ""
    """hub name or local folder of subword tokens to use instead of learning them; only without weights"""
    max_tokens: int | None = Field(None, ge=3)
    """largest number of tokens of a text, longer texts are cut; the positions of the weights (or 77) if left out"""


class ClipEncoder(Encoder):
    """The base of both sides: the blocks; the last ones exist twice, for the mean and for the log variance."""

    pretrained = True

    def __init__(
        self, backbone: Any, config: _ClipConfig, *, norm_in: nn.Module, norm_out: nn.Module, variance: bool
    ) -> None:
        super().__init__()
        blocks = list(backbone.encoder.layers)
        variance_blocks = config.variance_blocks if variance and not config.variance_token else 0
        if not 0 <= variance_blocks <= len(blocks):
            bounds = f"[0, {len(blocks)}], the number of blocks"
            raise ValueError(f"variance_blocks must lie in {bounds}, got {variance_blocks}")
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
    def description(self) -> dict[str, Any]:
        """JSON values with which its side is built without weights."""
        return {"backbone": self.backbone_config}

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
        return {"backbone": self.backbone_config | {"image_size": self.size}, **self.pixels.description}

    def forward(self, inputs: protocol.Inputs) -> TokenFeatures:
        """Token features of images. inputs (n, 3, s, s) -> (n, t, c)."""
        return self.tokens(self.embeddings(self.pixels(inputs.values)), None)


class ClipTextEncoder(ClipEncoder):
    """A text transformer: (n, t) token ids -> (n, t, c) token features."""

    def __init__(self, backbone: Any, config: ClipTextConfig, *, variance: bool = True) -> None:
        super().__init__(backbone, config, norm_in=nn.Identity(), norm_out=backbone.final_layer_norm, variance=variance)
        self.causal = not _is_siglip(backbone)
        self.max_tokens = int(backbone.config.max_position_embeddings)

    def forward(self, inputs: protocol.Inputs) -> TokenFeatures:
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
        mean = std = (0.5, 0.5, 0.5)
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
    positions, kind = config.max_tokens or _MAX_TOKENS, ""
    if config.weights:
        known = from_pretrained(import_transformers().AutoConfig, config.weights)
        kind = known.model_type
        positions = int(getattr(known, "text_config", known).max_position_embeddings)
    max_tokens = config.max_tokens or positions
    if max_tokens > positions:
        most = f"more than the {positions} positions of {config.weights!r}"
        raise UserError(f"model.text.max_tokens={max_tokens} is {most}; leave it out")
    if not config.weights and not config.tokenizer:
        return add_begin_and_end(train_tokenizer(texts, config.vocabulary), max_tokens)
    pretrained = pretrained_tokenizer(config.weights or config.tokenizer, kind)
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
        model_type = getattr(found, f"{part}_config", found).model_type
        if model_type not in kinds:
            expected = f"expected one whose {part} side is one of {', '.join(kinds)}"
            raise UserError(f"{weights!r} is a model of type {found.model_type!r}; {expected}")
        return from_pretrained(kinds[model_type], weights).float()  # Some weights are stored in half precision.
    width, depth, heads = ARCHITECTURES[config.architecture][side]
    kind = kinds[f"clip_{part}_model"]
    size = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth}
    return kind(kind.config_class(**size, num_attention_heads=heads, hidden_act=config.activation, **own))


def _check_size(size: int, patch: int) -> None:
    if size % patch:
        raise ValueError(f"size must be a multiple of the patch, {patch} pixels, got {size}")


class _UncTokenEncoder(Encoder):
    """An encoder and the [UNC] token before its blocks."""

    pretrained = True

    encoder: ClipImageEncoder | ClipTextEncoder

    def __init__(self, encoder: ClipImageEncoder | ClipTextEncoder, released: bool) -> None:
        super().__init__()
        assert not len(encoder.variance_blocks), "the [UNC] token replaces the variance blocks"
        self.encoder, self.released = encoder, released
        self.channels, self.depth = encoder.channels, encoder.depth
        self.variance_token = nn.Parameter(torch.randn(encoder.channels) * encoder.channels**-0.5)

    def blocks_from_top(self, parameter: str) -> int:
        return self.encoder.blocks_from_top(parameter.removeprefix("encoder."))

    @property
    def description(self) -> dict[str, Any]:
        return self.encoder.description


class UncTokenImageEncoder(_UncTokenEncoder):
    """A vision transformer with an [UNC] token: (n, 3, s, s) pixels -> features for mean and log variance.

    The mean's features are the class token (CLIP's only) and the patches: a head with pooling "first" takes the class
    token, as published. The features of the log variance are the single [UNC] token, which no pooling changes.
    """

    encoder: ClipImageEncoder

    def __init__(self, encoder: ClipImageEncoder, *, released: bool = False) -> None:
        super().__init__(encoder, released)
        self.size = encoder.size

    def forward(self, inputs: protocol.Inputs) -> TokenFeatures:
        """Token features without a mask."""
        embedded = self.encoder.embeddings(self.encoder.pixels(inputs.values))
        unc = self.variance_token.expand(embedded.shape[0], 1, -1)
        tokens = self.encoder.tokens(torch.cat([unc, embedded], 1), None).mean
        unc, mean = tokens[:, :1], tokens[:, 1:]
        return TokenFeatures(self.encoder.norm_out(mean) if self.released else mean, None, unc)


class UncTokenTextEncoder(_UncTokenEncoder):
    """A text transformer with an [UNC] token after the text's own tokens: (n, t) token ids -> token features."""

    encoder: ClipTextEncoder

    def __init__(self, encoder: ClipTextEncoder, *, released: bool = False) -> None:
        super().__init__(encoder, released)
        self.causal, self.max_tokens = encoder.causal and not released, encoder.max_tokens
        self.class_token = nn.Parameter(torch.randn(self.channels) * self.channels**-0.5) if released else None

    def forward(self, inputs: protocol.Inputs) -> TokenFeatures:
        """Token features of texts. inputs (n, t)."""
        mask = inputs.mask
        if self.released:
            if inputs.values.shape[1] != self.max_tokens or not (mask is None or bool(mask.all())):
                why = "UncTokenTextEncoder: the released weights attend to their padding"
                expected = f"expected texts padded to {self.max_tokens} tokens, all of them in the mask"
                raise ValueError(f"{why}: {expected}, got {tuple(inputs.values.shape)}")
            mask = None
        extra = [token for token in (self.variance_token, self.class_token) if token is not None]
        embedded = self.encoder.embeddings(inputs.values)
        embedded = torch.cat([embedded, *(token.expand(embedded.shape[0], 1, -1) for token in extra)], 1)
        visible = _attention(mask, len(extra), self.causal)
        tokens = self.encoder.tokens(embedded, None, causal=self.causal and mask is None, attention=visible).mean
        text, unc, last = tokens[:, : -len(extra)], tokens[:, -len(extra), None], tokens[:, -1:]
        if self.released:
            return TokenFeatures(last)
        if self.class_token is not None:  # As the paper says it: the log variance from [UNC].
            return TokenFeatures(last, None, unc)
        return TokenFeatures(text, mask, unc)


def _attention(mask: Tensor | None, extra: int, causal: bool) -> Tensor | None:
    """(n, t) mask of the text -> (n, 1, t' or 1, t') bool with the extra tokens at the end, which all may see."""
    if mask is None:
        return None
    seen = torch.nn.functional.pad(mask, (0, extra), value=True)[:, None, None]
    if not causal:
        return seen
    length = seen.shape[-1]
    return seen & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()


def build_clip_image(config: ClipImageConfig, context: protocol.BuildContext) -> Built:
    """Build the image side of kind "clip". Returns (processor, encoder)."""
    encoder = clip_image_encoder(config, description=context.description, variance=context.variance)
    processor = ImageFileProcessor(encoder.size, fit=config.fit)
    return processor, UncTokenImageEncoder(encoder) if config.variance_token and context.variance else encoder


def build_clip_text(config: ClipTextConfig, context: protocol.BuildContext) -> Built:
    """Build the text side of kind "clip". Returns (processor, encoder)."""
    tokenizer = context.need_tokenizer(config.kind)
    encoder = clip_text_encoder(
        config, vocabulary=tokenizer.get_vocab_size(), description=context.description, variance=context.variance
    )
    processor = TokenProcessor(tokenizer, min(config.max_tokens or encoder.max_tokens, encoder.max_tokens))
    return processor, UncTokenTextEncoder(encoder) if config.variance_token and context.variance else encoder
