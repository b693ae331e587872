"""Weights in the names of OpenAI's CLIP, renamed for our encoders."""

import re
from collections.abc import Mapping

from torch import Tensor, nn

from sfumato.encoders.clip_transformers import ClipImageEncoder, ClipTextEncoder


def openai_image_state(state: Mapping[str, Tensor], encoder: ClipImageEncoder) -> dict[str, Tensor]:
    """Rename the tensors of a vision transformer.

    Args:
        state: ``conv1.weight``, ``class_embedding``, ``positional_embedding``, ``ln_pre.*``, ``ln_post.*`` (left out
            where the encoder has no last norm), ``transformer.resblocks.i.*``,
            ``uncertainty_transformer.resblocks.j.*``.
        encoder: the encoder that will load them.

    Returns:
        The same tensors by the names of the encoder's state dict.
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
    """Rename the tensors of a text transformer.

    Args:
        state: ``token_embedding.weight``, ``positional_embedding``, ``ln_final.*``, ``transformer.resblocks.i.*``, and
            the variance blocks as ``uncertainty_transformer.resblocks.j.*`` or ``transformer.prob_resblocks.j.*``.
        encoder: the encoder that will load them.

    Returns:
        The same tensors by the names of the encoder's state dict.
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
