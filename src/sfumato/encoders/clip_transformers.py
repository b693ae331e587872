"""The transformers of the CLIP family, built by the library transformers, and OpenAI's names for their weights."""

import re
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfumato.encoders.encoder_protocol import EncoderModule
from sfumato.encoders.features import Inputs, TokenFeatures

VarianceStart = Literal["random", "copy"]
"""How variance blocks start: with random weights, or as a copy of the mean's blocks."""

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the pixels that CLIP was trained on, in [0, 1]."""


class ClipEncoder(EncoderModule):
    """The common base of both sides: the blocks; the last ones exist twice, for the mean and for the log variance."""

    pretrained = True

    def __init__(
        self,
        backbone: Any,
        *,
        norm_in: nn.Module,
        norm_out: nn.Module,
        variance_blocks: int,
        variance_start: VarianceStart,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        blocks = list(backbone.encoder.layers)
        if not 0 <= variance_blocks <= len(blocks):
            raise ValueError(
                f"variance_blocks must lie in [0, {len(blocks)}], the number of blocks, got {variance_blocks}"
            )
        # Always "sdpa": "eager" ignores is_causal, and adds a boolean mask instead of applying it.
        backbone.set_attn_implementation("sdpa")
        first = len(blocks) - variance_blocks
        fresh = [type(block)(backbone.config) for block in blocks[first:]]
        for block, own in zip(blocks[first:], fresh, strict=True):
            if variance_start == "copy":
                own.load_state_dict(block.state_dict())
            else:
                own.apply(backbone._init_weights)
        self.embeddings = backbone.embeddings
        self.norm_in, self.norm_out = norm_in, norm_out
        self.shared_blocks = nn.ModuleList(blocks[:first])
        self.mean_blocks = nn.ModuleList(blocks[first:])
        self.variance_blocks = nn.ModuleList(fresh)
        self.channels = int(backbone.config.hidden_size)
        self.backbone_config: dict[str, Any] = backbone.config.to_diff_dict()
        self.checkpointing = checkpointing

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

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        backbone: Any,
        *,
        pixel_mean: tuple[float, ...] = CLIP_MEAN,
        pixel_std: tuple[float, ...] = CLIP_STD,
        final_norm: bool = False,
        variance_blocks: int = 1,
        variance_start: VarianceStart = "random",
        checkpointing: bool = False,
    ) -> None:
        super().__init__(
            backbone,
            # SigLIP has no norm before its first block.
            norm_in=nn.Identity() if _is_siglip(backbone) else backbone.pre_layrnorm,
            norm_out=backbone.post_layernorm if final_norm else nn.Identity(),
            variance_blocks=variance_blocks,
            variance_start=variance_start,
            checkpointing=checkpointing,
        )
        self.size = int(self.embeddings.image_size)
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(3, 1, 1), persistent=False)

    @property
    def description(self) -> dict[str, Any]:
        """JSON values with which :func:`~sfumato.encoders.clip.clip_image_encoder` builds it without weights."""
        return {
            "backbone": self.backbone_config | {"image_size": self.size},
            "pixel_mean": self.pixel_mean.flatten().tolist(),
            "pixel_std": self.pixel_std.flatten().tolist(),
        }

    def embed(self, inputs: Inputs) -> Tensor:
        """Embedded tokens of images, before the first block. inputs (n, 3, s, s) -> (n, t, c)."""
        pixels = inputs.values
        pixels = pixels.to(self.pixel_mean.dtype) / 255 if pixels.dtype == torch.uint8 else pixels
        embedded: Tensor = self.embeddings((pixels - self.pixel_mean) / self.pixel_std)
        return embedded

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of images. inputs (n, 3, s, s) -> (n, t, c)."""
        return self.tokens(self.embed(inputs), None)


class ClipTextEncoder(ClipEncoder):
    """A text transformer: (n, t) token ids -> (n, t, c) token features."""

    def __init__(
        self,
        backbone: Any,
        *,
        final_norm: bool = True,
        variance_blocks: int = 1,
        variance_start: VarianceStart = "random",
        checkpointing: bool = False,
    ) -> None:
        super().__init__(
            backbone,
            norm_in=nn.Identity(),
            norm_out=backbone.final_layer_norm if final_norm else nn.Identity(),
            variance_blocks=variance_blocks,
            variance_start=variance_start,
            checkpointing=checkpointing,
        )
        self.causal = not _is_siglip(backbone)
        self.max_tokens = int(backbone.config.max_position_embeddings)

    @property
    def description(self) -> dict[str, Any]:
        """JSON values with which :func:`~sfumato.encoders.clip.clip_text_encoder` builds it without weights."""
        return {"backbone": self.backbone_config}

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of texts. inputs (n, t) -> (n, t, c)."""
        return self.tokens(self.embeddings(inputs.values), inputs.mask, causal=self.causal)


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


class _UncTokenEncoder(EncoderModule):
    """An encoder and the [UNC] token before its blocks."""

    pretrained = True

    encoder: ClipImageEncoder | ClipTextEncoder

    def __init__(self, encoder: ClipImageEncoder | ClipTextEncoder, released: bool) -> None:
        super().__init__()
        if len(encoder.variance_blocks):
            raise ValueError(
                f"{type(self).__name__}: the encoder has {len(encoder.variance_blocks)} variance blocks, expected none:"
                " the [UNC] token replaces them; build it with variance_blocks=0"
            )
        self.encoder, self.released = encoder, released
        self.channels, self.depth = encoder.channels, encoder.depth
        self.variance_token = nn.Parameter(torch.randn(encoder.channels) * encoder.channels**-0.5)

    def blocks_from_top(self, parameter: str) -> int:
        return self.encoder.blocks_from_top(parameter.removeprefix("encoder."))

    @property
    def description(self) -> dict[str, Any]:
        """JSON values that rebuild the encoder below without weights, see :mod:`sfumato.encoders.clip`."""
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

    def forward(self, inputs: Inputs, *, patches: Tensor | None = None) -> TokenFeatures:
        """Token features without a mask. patches (k,)."""
        embedded = self.encoder.embed(inputs)
        if patches is not None:
            before = self.encoder.embeddings.num_positions - self.encoder.embeddings.num_patches
            embedded = torch.cat([embedded[:, :before], embedded[:, before:][:, patches]], 1)
        unc = self.variance_token.expand(len(embedded), 1, -1)
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

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features of texts. inputs (n, t)."""
        mask = inputs.mask
        if self.released:
            if inputs.values.shape[1] != self.max_tokens or not (mask is None or bool(mask.all())):
                raise ValueError(
                    "UncTokenTextEncoder: the released weights attend to their padding: expected texts padded to"
                    f" {self.max_tokens} tokens, all of them in the mask, got {tuple(inputs.values.shape)}"
                )
            mask = None
        extra = [token for token in (self.variance_token, self.class_token) if token is not None]
        embedded = self.encoder.embeddings(inputs.values)
        embedded = torch.cat([embedded, *(token.expand(len(embedded), 1, -1) for token in extra)], 1)
        tokens = self.encoder.tokens(
            embedded, None, causal=self.causal and mask is None, attention=_attention(mask, len(extra), self.causal)
        ).mean
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
