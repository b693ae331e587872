"""Transformer towers of the CLIP family, fine-tuned from pixels and words, with blocks of their own for the log variance.

PCME++ shares all blocks but the last one: the mean goes on through the pre-trained last block, the log variance through a new
one beside it. The layers are those of transformers (CLIP, SigLIP, SigLIP 2 of fixed size); what is done with them is here. Which
weights a published model holds, is known in :mod:`sfumato.models.pretrained`.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfumato.encoders.features import Inputs, TokenFeatures
from sfumato.encoders.package_weights import from_pretrained, import_transformers
from sfumato.errors import UserError

VarianceStart = Literal["random", "copy"]
Activation = Literal["quick_gelu", "gelu"]

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the pixels that CLIP was trained on, in [0, 1]."""

_SIGLIP_MEAN = _SIGLIP_STD = (0.5, 0.5, 0.5)

ARCHITECTURES: dict[str, dict[str, tuple[int, int, int]]] = {
    "ViT-Ti/16": {"image": (192, 12, 3), "text": (192, 12, 3)},
    "ViT-S/16": {"image": (384, 12, 6), "text": (384, 12, 6)},
    "ViT-B/32": {"image": (768, 12, 12), "text": (512, 12, 8)},
    "ViT-B/16": {"image": (768, 12, 12), "text": (512, 12, 8)},
    "ViT-L/14": {"image": (1024, 24, 16), "text": (768, 12, 12)},
}
"""(width, blocks, heads) of the towers that can be built without weights; the number after the slash is the patch size.
B and L are CLIP's (Radford et al. 2021, table 20); Ti and S take the ViT's shape for both sides."""


class ClipEncoder(nn.Module):
    """What both sides share: the blocks, of which the last ones exist twice.

    Args:
        backbone: CLIPVisionModel, CLIPTextModel, SiglipVisionModel or SiglipTextModel; its layers are taken over.
        norm_in: between the embeddings and the first block.
        norm_out: after the last block of the mean; the log variance never passes one.
        variance_blocks: how many of the last blocks the log variance has for itself; 0: none, for points.
        variance_start: of these, random (as published) or a copy of the mean's.
        checkpointing: recompute activations in the backward pass instead of keeping them.

    Raises:
        ValueError: variance_blocks is not in [0, number of blocks].
    """

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
        # Whatever the folder asks for: "eager" ignores is_causal and adds a mask of booleans instead of applying it.
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
        """1 for a parameter of the last block (either of the two), 2 for the one below ..., 0 for one outside of the blocks."""
        found = re.match(r"(shared|mean|variance)_blocks\.(\d+)\.", parameter)
        if found is None:
            return 0
        below = len(self.shared_blocks) if found[1] != "shared" else 0
        return self.depth - below - int(found[2])

    def tokens(
        self, embedded: Tensor, mask: Tensor | None, *, causal: bool = False, attention: Tensor | None = None
    ) -> TokenFeatures:
        """(n, t, c) embedded tokens through the blocks.

        Args:
            embedded: (n, t, c).
            mask: (n, t), handed on as it is.
            causal: each token sees those before it; without: all.
            attention: (n, 1, t or 1, t) bool, True where a token (rows) may look at one (columns); in place of causal.
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
    """A vision transformer: (n, 3, s, s) pixels -> class token (CLIP's only) and patches.

    Args:
        backbone: CLIPVisionModel or SiglipVisionModel of transformers.
        pixel_mean, pixel_std: by which pixels in [0, 1] are standardised.
        final_norm: pass the mean's tokens through the backbone's last norm. PCME++'s COCO models do not, its hub models do.
        variance_blocks, variance_start, checkpointing: see :class:`ClipEncoder`.
    """

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
            norm_in=getattr(backbone, "pre_layrnorm", nn.Identity()),
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
        """JSON-able: what :func:`clip_image_encoder` needs to build it again without its weights."""
        return {
            "backbone": self.backbone_config | {"image_size": self.size},
            "pixel_mean": self.pixel_mean.flatten().tolist(),
            "pixel_std": self.pixel_std.flatten().tolist(),
        }

    def embed(self, inputs: Inputs) -> Tensor:
        """(n, t, c) class token (CLIP's only) and patches with their position codes, before the first block."""
        pixels = inputs.values
        pixels = pixels.to(self.pixel_mean.dtype) / 255 if pixels.dtype == torch.uint8 else pixels
        embedded: Tensor = self.embeddings((pixels - self.pixel_mean) / self.pixel_std)
        return embedded

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features without a mask. float pixels (augmented ones) are taken as they are, in [0, 1]."""
        return self.tokens(self.embed(inputs), None)


class ClipTextEncoder(ClipEncoder):
    """A text transformer: (n, t) token ids -> (n, t, c) token features.

    Args:
        backbone: CLIPTextModel (each token sees those before it) or SiglipTextModel (each sees all, padding included, so
            that texts must come padded to one length).
        final_norm: pass the mean's tokens through the backbone's last norm, as all PCME++ models do.
        variance_blocks, variance_start, checkpointing: see :class:`ClipEncoder`.
    """

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
        self.causal = "siglip" not in backbone.config.model_type
        self.max_tokens = int(backbone.config.max_position_embeddings)

    @property
    def description(self) -> dict[str, Any]:
        """JSON-able: what :func:`clip_text_encoder` needs to build it again without its weights."""
        return {"backbone": self.backbone_config}

    def forward(self, inputs: Inputs) -> TokenFeatures:
        """Token features and the mask of the inputs."""
        return self.tokens(self.embeddings(inputs.values), inputs.mask, causal=self.causal)


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
    """The image side of a CLIP or SigLIP model.

    Args:
        weights: a hub name or a local folder of transformers; "" for random weights.
        architecture: without weights, a name in ARCHITECTURES.
        size: side of the pictures in pixels; position codes are interpolated to it. None: the model's own (224).
        blocks: without weights, number of blocks; the architecture's if None.
        activation: without weights; quick_gelu is OpenAI's, gelu open_clip's.
        description: of an encoder built before, in place of weights and architecture.
        final_norm, variance_blocks, variance_start, checkpointing: see :class:`ClipImageEncoder`.

    Raises:
        UserError: transformers or the weights are missing, or the model is of another kind.
        ValueError: the architecture is unknown, or the size no multiple of the patch.
    """
    transformers = import_transformers()
    kinds = {
        "clip_vision_model": transformers.CLIPVisionModel,
        "siglip_vision_model": transformers.SiglipVisionModel,
    }
    mean, std = CLIP_MEAN, CLIP_STD
    if description is not None:
        backbone = _from_description(kinds, description["backbone"])
        mean, std = tuple(description["pixel_mean"]), tuple(description["pixel_std"])
    elif weights:
        backbone = _load(transformers, kinds, weights, "vision")
        if "siglip" in backbone.config.model_type:
            mean, std = _SIGLIP_MEAN, _SIGLIP_STD
    else:
        width, own_blocks, heads = _shape(architecture, "image")
        patch = int(architecture.rpartition("/")[2])
        _check_size(size or 224, patch)
        config = transformers.CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=blocks or own_blocks,
            num_attention_heads=heads,
            hidden_act=activation,
            patch_size=patch,
            image_size=size or 224,
        )
        backbone = transformers.CLIPVisionModel(config)
    if size is not None and size != backbone.embeddings.image_size:
        _check_size(size, backbone.embeddings.patch_size)
        _resize_positions(backbone.embeddings, size)
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
    """The text side of a CLIP or SigLIP model.

    Args:
        weights: a hub name or a local folder of transformers; "" for random weights.
        architecture: without weights, a name in ARCHITECTURES.
        vocabulary, max_tokens: without weights, number of word pieces and longest text.
        blocks: without weights, number of blocks; the architecture's if None.
        activation: without weights; quick_gelu is OpenAI's, gelu open_clip's.
        description: of an encoder built before, in place of weights and architecture.
        variance_blocks, variance_start, checkpointing: see :class:`ClipTextEncoder`.

    Raises:
        UserError: transformers or the weights are missing, or the model is of another kind.
        ValueError: the architecture is unknown.
    """
    transformers = import_transformers()
    kinds = {"clip_text_model": transformers.CLIPTextModel, "siglip_text_model": transformers.SiglipTextModel}
    if description is not None:
        backbone = _from_description(kinds, description["backbone"])
    elif weights:
        backbone = _load(transformers, kinds, weights, "text")
    else:
        width, own_blocks, heads = _shape(architecture, "text")
        config = transformers.CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=blocks or own_blocks,
            num_attention_heads=heads,
            hidden_act=activation,
            max_position_embeddings=max_tokens,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        backbone = transformers.CLIPTextModel(config)
    return ClipTextEncoder(
        backbone,
        variance_blocks=variance_blocks,
        variance_start=variance_start,
        checkpointing=checkpointing,
    )


def text_positions(weights: str) -> int:
    """The longest text, in tokens, that the text side of a CLIP or SigLIP model takes.

    Raises:
        UserError: transformers or the model's configuration are missing.
    """
    config = from_pretrained(import_transformers().AutoConfig, weights)
    return int(getattr(config, "text_config", config).max_position_embeddings)


def openai_image_state(state: Mapping[str, Tensor], encoder: ClipImageEncoder) -> dict[str, Tensor]:
    """The tensors of a vision transformer in OpenAI's names, in those of an encoder.

    Args:
        state: ``conv1.weight``, ``class_embedding``, ``positional_embedding``, ``ln_pre.*``, ``ln_post.*`` (left out where the
            encoder has none), ``transformer.resblocks.i.*``, ``uncertainty_transformer.resblocks.j.*``.
        encoder: whose names and number of blocks count.
    """
    names = {
        "conv1.weight": "embeddings.patch_embedding.weight",
        "class_embedding": "embeddings.class_embedding",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_pre": "norm_in",
        "ln_post": None if isinstance(encoder.norm_out, nn.Identity) else "norm_out",
    }
    return _openai_state(state, names, len(encoder.shared_blocks))


def openai_text_state(state: Mapping[str, Tensor], encoder: ClipTextEncoder) -> dict[str, Tensor]:
    """The tensors of a text transformer in OpenAI's names, in those of an encoder.

    Args:
        state: ``token_embedding.weight``, ``positional_embedding``, ``ln_final.*``, ``transformer.resblocks.i.*``, and the
            blocks of the log variance as ``uncertainty_transformer.resblocks.j.*`` or ``transformer.prob_resblocks.j.*``.
        encoder: whose number of blocks counts.
    """
    names: dict[str, str | None] = {
        "token_embedding.weight": "embeddings.token_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_final": "norm_out",
    }
    return _openai_state(state, names, len(encoder.shared_blocks))


_BLOCK = re.compile(r"(uncertainty_transformer\.resblocks|transformer\.(?:prob_)?resblocks)\.(\d+)\.(.+)")
_BLOCK_NAMES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def _openai_state(state: Mapping[str, Tensor], names: dict[str, str | None], shared: int) -> dict[str, Tensor]:
    converted: dict[str, Tensor] = {}
    for key, value in state.items():
        if (block := _BLOCK.fullmatch(key)) is None:
            stem, _, last = key.rpartition(".")
            name = names[key] if key in names else names[stem]
            if name is not None:
                converted[name if key in names else f"{name}.{last}"] = value
            continue
        number, rest = int(block[2]), block[3]
        if block[1] != "transformer.resblocks":
            prefix = f"variance_blocks.{number}"
        else:
            prefix = f"shared_blocks.{number}" if number < shared else f"mean_blocks.{number - shared}"
        if rest.startswith("attn.in_proj_"):
            for which, part in zip("qkv", value.chunk(3), strict=True):
                converted[f"{prefix}.self_attn.{which}_proj.{rest.removeprefix('attn.in_proj_')}"] = part
        else:
            stem, _, last = rest.rpartition(".")
            converted[f"{prefix}.{_BLOCK_NAMES[stem]}.{last}"] = value
    return converted


def _shape(architecture: str, side: str) -> tuple[int, int, int]:
    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[architecture][side]


def _from_description(kinds: dict[str, Any], config: Mapping[str, Any]) -> Any:
    kind = kinds[config["model_type"]]
    return kind(kind.config_class(**config))


def _load(transformers: Any, kinds: dict[str, Any], weights: str, side: str) -> Any:
    config = from_pretrained(transformers.AutoConfig, weights)
    part = getattr(config, f"{side}_config", config)
    if part.model_type not in kinds:
        raise UserError(
            f"{weights!r} is a model of type {config.model_type!r}; its {side} side cannot be had as one of {', '.join(kinds)}"
        )
    return from_pretrained(kinds[part.model_type], weights).float()  # Some are stored in half precision.


def _check_size(size: int, patch: int) -> None:
    if size % patch:
        raise ValueError(f"size must be a multiple of the patch, {patch} pixels, got {size}")


def _resize_positions(embeddings: Any, size: int) -> None:
    """Interpolate the position codes of a vision transformer to pictures of another size, in place."""
    patches = (size // embeddings.patch_size) ** 2
    extra = embeddings.num_positions - embeddings.num_patches
    with torch.no_grad():
        blank = torch.zeros(1, patches + extra, embeddings.embed_dim)  # Only its length is looked at.
        codes = embeddings.interpolate_pos_encoding(blank, size, size)[0]
    embeddings.position_embedding = nn.Embedding.from_pretrained(codes.clone(), freeze=False)
    embeddings.position_ids = torch.arange(patches + extra).expand(1, -1)
    embeddings.num_patches, embeddings.num_positions, embeddings.image_size = patches, patches + extra, size
