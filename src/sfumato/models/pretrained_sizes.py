"""The sizes of published models: read from their configurations, and turned into names and shapes of their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sfumato.encoders.clip import clip_image_encoder, clip_text_encoder
from sfumato.encoders.clip_transformers import ClipImageEncoder, ClipTextEncoder
from sfumato.errors import UserError
from sfumato.models.pretrained_tensors import Shapes, linear_shapes, norm_shapes


@dataclass(frozen=True)
class TransformerSizes:
    """The sizes of a transformer.

    Attributes:
        width: channels.
        blocks: number of residual attention blocks.
        heads: number of attention heads.
        inner: channels inside of the two-layer networks.
        quick_gelu: activation of OpenAI's models instead of GELU.
        epsilon: of the layer norms.
    """

    width: int
    blocks: int
    heads: int
    inner: int
    quick_gelu: bool
    epsilon: float = 1e-5

    def config(self, kind: str) -> dict[str, Any]:
        """The sizes by the names of the library transformers.

        Args:
            kind: its model type.

        Returns:
            Keyword arguments of a configuration.
        """
        return {
            "model_type": kind,
            "hidden_size": self.width,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "intermediate_size": self.inner,
            "hidden_act": "quick_gelu" if self.quick_gelu else "gelu",
            "layer_norm_eps": self.epsilon,
        }

    def block_shapes(self, name: str, blocks: int) -> Shapes:
        """Shapes of residual attention blocks by the names of OpenAI's CLIP.

        Args:
            name: prefix of the blocks.
            blocks: number of blocks.

        Returns:
            Shapes by name.
        """
        width = self.width
        shapes: Shapes = {}
        for block in (f"{name}.{i}" for i in range(blocks)):
            shapes |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
            shapes |= linear_shapes(f"{block}.attn.out_proj", width, width)
            shapes |= linear_shapes(f"{block}.mlp.c_fc", self.inner, width)
            shapes |= linear_shapes(f"{block}.mlp.c_proj", width, self.inner)
            shapes |= norm_shapes(f"{block}.ln_1", width) | norm_shapes(f"{block}.ln_2", width)
        return shapes


@dataclass(frozen=True, kw_only=True)
class VisionSizes(TransformerSizes):
    """The sizes of a vision transformer.

    Attributes:
        patch: side of a patch in pixels.
        size: side of an image in pixels.
    """

    patch: int
    size: int

    def encoder(
        self, mean: tuple[float, ...], std: tuple[float, ...], variance_blocks: int, *, final_norm: bool
    ) -> ClipImageEncoder:
        """An encoder of these sizes with random weights.

        Args:
            mean, std: by which pixels in [0, 1] are standardised.
            variance_blocks: number of blocks for the log variance.
            final_norm: whether the mean passes the last norm.

        Returns:
            The encoder.
        """
        backbone = self.config("clip_vision_model") | {"patch_size": self.patch, "image_size": self.size}
        description = {"backbone": backbone, "pixel_mean": mean, "pixel_std": std}
        return clip_image_encoder(description=description, variance_blocks=variance_blocks, final_norm=final_norm)

    def shapes(self, prefix: str, extra: int) -> Shapes:
        """Shapes of the transformer without the norm behind it.

        Args:
            prefix: of all names.
            extra: number of position codes beside those of the patches.

        Returns:
            Shapes by name.
        """
        return {
            f"{prefix}class_embedding": (self.width,),
            f"{prefix}positional_embedding": ((self.size // self.patch) ** 2 + extra, self.width),
            f"{prefix}conv1.weight": (self.width, 3, self.patch, self.patch),
            **norm_shapes(f"{prefix}ln_pre", self.width),
            **self.block_shapes(f"{prefix}transformer.resblocks", self.blocks),
        }


@dataclass(frozen=True, kw_only=True)
class TextSizes(TransformerSizes):
    """The sizes of a text transformer.

    Attributes:
        vocabulary: number of tokens.
        context: number of positions.
    """

    vocabulary: int
    context: int

    def encoder(self, variance_blocks: int) -> ClipTextEncoder:
        """An encoder of these sizes with random weights.

        Args:
            variance_blocks: number of blocks for the log variance.

        Returns:
            The encoder.
        """
        backbone = self.config("clip_text_model") | {
            **{"vocab_size": self.vocabulary, "max_position_embeddings": self.context},
            **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
        }
        return clip_text_encoder(description={"backbone": backbone}, variance_blocks=variance_blocks)

    def shapes(self, prefix: str, extra: int) -> Shapes:
        """Shapes of the transformer with the norm behind it.

        Args:
            prefix: of all names.
            extra: number of position codes beside those of the text.

        Returns:
            Shapes by name.
        """
        return {
            f"{prefix}token_embedding.weight": (self.vocabulary, self.width),
            f"{prefix}positional_embedding": (self.context + extra, self.width),
            **norm_shapes(f"{prefix}ln_final", self.width),
            **self.block_shapes(f"{prefix}transformer.resblocks", self.blocks),
        }


class ConfigSection:
    """A section of a config.json: numbers with their defaults, and switches that have one supported value.

    Args:
        config: content of config.json.
        name: of the section.
        where: name of the model for errors.
        fixed: supported values of switches that may be left out.
        needed: supported values of switches that must be there.

    Raises:
        UserError: a switch has another value.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        name: str,
        where: str,
        fixed: Mapping[str, Any] | None = None,
        *,
        needed: Mapping[str, Any] | None = None,
    ) -> None:
        self.given: dict[str, Any] = config[name]
        self.name = f"{where}: config.json: {name}"
        switches = {key: (value, self.given.get(key, value)) for key, value in (fixed or {}).items()}
        switches |= {key: (value, self.given.get(key)) for key, value in (needed or {}).items()}
        for key, (expected, came) in switches.items():
            if came != expected:
                raise UserError(f"{self.name}.{key} is {came!r}; only models with {expected!r} can be loaded")

    def number(self, key: str, default: int) -> int:
        """A positive whole number of the section.

        Args:
            key: its name.
            default: where the key is left out.

        Returns:
            The number; a UserError if it is none.
        """
        return _whole(self.given.get(key, default), f"{self.name}.{key}")

    def inner(self, width: int) -> int:
        """Channels inside of the two-layer networks of the blocks.

        Args:
            width: of the transformer.

        Returns:
            mlp_ratio times the width.
        """
        return int(width * float(self.given.get("mlp_ratio") or 4.0))

    def epsilon(self) -> float:
        """Epsilon of the layer norms.

        Returns:
            1e-5 if the section has none.
        """
        return float((self.given.get("norm_kwargs") or {}).get("eps", 1e-5))


def vision_sizes(section: ConfigSection, config: Mapping[str, Any]) -> VisionSizes:
    """The sizes of the image side.

    Args:
        section: vision_cfg.
        config: content of config.json.

    Returns:
        The sizes, checked.
    """
    width, quick = section.number("width", 768), bool(config.get("quick_gelu"))
    heads = width // section.number("head_width", 64)
    _check_heads(width, heads, section.name)
    return VisionSizes(
        width,
        section.number("layers", 12),
        heads,
        section.inner(width),
        quick,
        section.epsilon(),
        patch=section.number("patch_size", 16),
        size=section.number("image_size", 224),
    )


def text_sizes(section: ConfigSection, config: Mapping[str, Any]) -> TextSizes:
    """The sizes of the text side.

    Args:
        section: text_cfg.
        config: content of config.json.

    Returns:
        The sizes, checked.
    """
    width, heads, quick = section.number("width", 512), section.number("heads", 8), bool(config.get("quick_gelu"))
    _check_heads(width, heads, section.name)
    return TextSizes(
        width,
        section.number("layers", 12),
        heads,
        section.inner(width),
        quick,
        section.epsilon(),
        vocabulary=section.number("vocab_size", 49408),
        context=section.number("context_length", 77),
    )


def embedding_size(config: Mapping[str, Any], where: str) -> int:
    """Number of dimensions of the embeddings.

    Args:
        config: content of config.json.
        where: name of the model for errors.

    Returns:
        embed_dim, checked.
    """
    return _whole(config.get("embed_dim"), f"{where}: config.json: embed_dim")


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} must be a positive whole number, got {value!r}")
    return value


def _check_heads(width: int, heads: int, name: str) -> None:
    if not heads or width % heads:
        raise UserError(f"{name}: width {width} cannot be divided among {heads} heads")
