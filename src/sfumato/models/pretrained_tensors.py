"""Checkpoints of other authors: reading without running code, sizes, and names and shapes of their tensors."""

import math
import pickle
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from sfumato.encoders import clip
from sfumato.errors import UserError, first_line
from sfumato.matching import SampledLogits
from sfumato.models.build import DualEncoder


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint without running code from it.

    A pickle may hold tensors and containers of plain values. Settings of the classes munch.Munch, argparse.Namespace
    and Lightning's AttributeDict become dictionaries, numpy scalars become numbers. Any other class is refused.

    Args:
        path: a file of torch.save, or a .safetensors file.

    Returns:
        The content of the file, tensors on the CPU: a state dict, or a dictionary with state dicts and settings.

    Raises:
        UserError: there is no such file, it is damaged or not a checkpoint, or reading it would run code.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with torch.serialization.safe_globals(_STAND_INS), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Of rare protocols, which torch then reads or refuses.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if (foreign := re.search(r"GLOBAL ([\w.]+)", str(error))) is None:
            raise UserError(f"{path}: damaged, or not a checkpoint of torch.save") from error
        found = f"holds a {foreign[1]}, and reading that would run code; only tensors and plain settings are read"
        way = "load it where it was made and save only its state dict: torch.save(model.state_dict(), path)"
        raise UserError(f"{path}: {found}. If you trust the file, {way}") from error
    except Exception as error:  # The readers raise whatever damage leads to, also AssertionError and struct.error.
        raise UserError(f"{path}: damaged, or not a checkpoint ({first_line(error)})") from error
    plain = _plain(content)
    if not isinstance(plain, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected a dictionary of tensors")
    return plain


def _plain(value: Any) -> Any:
    """Containers as dictionaries, lists and tuples; parameters as tensors."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return [_plain(item) for item in value] if isinstance(value, list | set) else value


class _Dict:
    """Stands in for subclasses of dict: an OrderedDict, which torch's reader fills and which may have a state."""

    def __new__(cls) -> Any:
        return OrderedDict()


class _Namespace(dict[str, Any]):
    """Stands in for classes that only hold attributes."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.update(state)


class _NumpyDtype:
    """Stands in for numpy.dtype."""

    _CODES: ClassVar = {"b1": "?", "f2": "e", "f4": "f", "f8": "d", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}

    def __init__(self, name: str, *_: Any) -> None:
        self.code, self.order = self._CODES[name], "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _numpy_scalar(dtype: _NumpyDtype, data: bytes) -> Any:
    """Stands in for numpy's function that makes a scalar of bytes."""
    return struct.unpack(dtype.order + dtype.code, data)[0]


_STAND_INS: list[Any] = [
    *((_Dict, "munch.Munch"), (_Namespace, "argparse.Namespace"), (_NumpyDtype, "numpy.dtype")),
    *((_Dict, f"{place}.utilities.data.AttributeDict") for place in ("lightning.fabric", "lightning_fabric")),
    (_Dict, "pytorch_lightning.utilities.parsing.AttributeDict"),
    *((_numpy_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by their names."""

_VARIANCE_BLOCKS = "uncertainty_transformer.resblocks"


def count_blocks(tensors: Mapping[str, Any], prefix: str) -> int:
    """Count the blocks that have tensors."""
    numbers = [key.removeprefix(f"{prefix}.").split(".")[0] for key in tensors if key.startswith(f"{prefix}.")]
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)


def check_tensors(tensors: Mapping[str, Any], expected: Shapes, where: str) -> None:
    """Check that the tensors are the expected ones."""
    wrong = [f"{key!r} is missing" for key in expected if key not in tensors]
    wrong += [f"{key!r} is left over" for key in tensors if key not in expected]
    for key, shape in expected.items():
        value = tensors.get(key, torch.empty(shape, device="meta"))
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if came != shape:
            wrong.append(f"{key!r} is {came}, expected {shape}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        found = f"{len(wrong)} tensors do not fit the {len(expected)} expected ones: {'; '.join(wrong[:3])}{more}"
        raise UserError(f"{where}: {found}. Check that the file is complete and that the configuration belongs to it")


def renamed(
    build: Callable[[], DualEncoder],
    prefixes: Mapping[str, str],
    tensors: Mapping[str, Any],
    where: str,
    others: Shapes,
    *,
    text_variance: str = _VARIANCE_BLOCKS,
) -> tuple[DualEncoder, dict[str, Tensor]]:
    """A model with random weights, and its tensors out of the released ones that have only another name.

    prefixes: name here -> released name, of encoders in OpenAI's layout and of layers; others: shapes of the released
    tensors that are not among them or differ from ours; text_variance: released name of the variance blocks of texts.
    All names and shapes are compared before the model takes memory.
    """
    with torch.device("meta"):
        model = build()
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    layers = dict(model.named_modules(remove_duplicate=False))
    released: dict[str, list[str]] = {}
    for ours, theirs in prefixes.items():
        layer = layers.get(ours.rstrip("."))  # None where a model has no such layer.
        blocks = text_variance if isinstance(layer, clip.ClipTextEncoder) else _VARIANCE_BLOCKS
        for name in (name.removeprefix(ours) for name in own if name.startswith(ours)):
            there = _openai_name(name, layer, blocks) if isinstance(layer, clip.ClipEncoder) else name
            released.setdefault(theirs + there, []).append(ours + name)
    expected: Shapes = {}
    for there, names in released.items():
        names.sort(key=lambda name: "qkv".find(name.rpartition("_proj.")[0][-1:]))
        expected[there] = own[names[0]] if len(names) == 1 else (len(names) * own[names[0]][0], *own[names[0]][1:])
    check_tensors(tensors, expected | others, where)
    state: dict[str, Tensor] = {}
    for there, names in released.items():
        parts = [tensors[there]] if len(names) == 1 else tensors[there].chunk(len(names))
        state |= dict(zip(names, parts, strict=True))
    return build(), state


_RELEASED = {
    "embeddings.patch_embedding": "conv1", "embeddings.class_embedding": "class_embedding",
    "embeddings.position_embedding.weight": "positional_embedding", "embeddings.token_embedding": "token_embedding",
    "norm_in": "ln_pre", "layer_norm": "ln_", "self_attn.out_proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}  # fmt: skip
"""Name in a transformer here -> name in OpenAI's CLIP, replaced in this order."""


def _openai_name(name: str, encoder: clip.ClipEncoder, variance_blocks: str) -> str:
    """The name of a tensor of a transformer in OpenAI's CLIP, which joins query, key and value."""
    if block := re.fullmatch(r"(shared|mean|variance)_blocks\.(\d+)\.(.+)", name):
        number = int(block[2]) + (len(encoder.shared_blocks) if block[1] == "mean" else 0)
        blocks = variance_blocks if block[1] == "variance" else "transformer.resblocks"
        name = f"{blocks}.{number}." + re.sub(r"self_attn\.[qkv]_proj\.", "attn.in_proj_", block[3])
    for ours, theirs in _RELEASED.items():
        name = name.replace(ours, theirs)
    return name.replace("norm_out", "ln_post" if isinstance(encoder, clip.ClipImageEncoder) else "ln_final")


def below(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors with a prefix, by their names without it."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def projection(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """The projection x @ matrix as the tensors of a linear layer. matrix (c, d)."""
    return {f"{name}.weight": matrix.T, f"{name}.bias": torch.zeros_like(matrix[0])}


def number_of(tensor: Tensor) -> float:
    """The value of a scalar."""
    return math.nan if tensor.is_meta else float(tensor)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a transformer: of images, with patch and size, or of texts, with vocabulary and context."""

    width: int  # channels
    blocks: int  # number of residual attention blocks
    heads: int  # number of attention heads
    inner: int  # channels inside of the two-layer networks
    quick_gelu: bool = True  # activation of OpenAI's models instead of GELU
    epsilon: float = 1e-5  # of the layer norms
    patch: int = 0  # side of a patch in pixels
    size: int = 0  # side of an image in pixels
    vocabulary: int = 0  # number of tokens
    context: int = 0  # number of positions

    def _backbone(self, kind: str, **own: Any) -> dict[str, Any]:
        """The sizes by the names of the library transformers."""
        return own | {
            "model_type": kind,
            "hidden_size": self.width,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "intermediate_size": self.inner,
            "hidden_act": "quick_gelu" if self.quick_gelu else "gelu",
            "layer_norm_eps": self.epsilon,
        }

    def image_encoder(
        self, mean: tuple[float, ...], std: tuple[float, ...], variance_blocks: int, *, final_norm: bool
    ) -> clip.ClipImageEncoder:
        """An encoder of images of these sizes with random weights."""
        backbone = self._backbone("clip_vision_model", patch_size=self.patch, image_size=self.size)
        config = clip.ClipImageConfig(variance_blocks=variance_blocks, final_norm=final_norm)
        return clip.clip_image_encoder(config, description={"backbone": backbone, "pixel_mean": mean, "pixel_std": std})

    def text_encoder(self, variance_blocks: int) -> clip.ClipTextEncoder:
        """An encoder of texts of these sizes with random weights."""
        own: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        own |= {"vocab_size": self.vocabulary, "max_position_embeddings": self.context}
        config = clip.ClipTextConfig(variance_blocks=variance_blocks)
        return clip.clip_text_encoder(config, description={"backbone": self._backbone("clip_text_model", **own)})


class ConfigSection:
    """A section of a config.json: numbers with their defaults, and switches that have one supported value.

    fixed: the supported values of switches; needed: those that must be there.
    """

    def __init__(
        self, config: Mapping[str, Any], name: str, where: str, fixed: Mapping[str, Any], needed: Collection[str] = ()
    ) -> None:
        self.given: dict[str, Any] = config[name]
        self.quick_gelu = bool(config.get("quick_gelu"))
        self.name = f"{where}: config.json: {name}"
        for key, expected in fixed.items():
            came = self.given.get(key, None if key in needed else expected)
            if came != expected:
                raise UserError(f"{self.name}.{key} is {came!r}; only models with {expected!r} can be loaded")

    def number(self, key: str, default: int) -> int:
        """A positive whole number of the section."""
        return _whole(self.given.get(key, default), f"{self.name}.{key}")

    def image_sizes(self) -> Sizes:
        """The sizes of the image side."""
        width = self.number("width", 768)
        own = {"patch": self.number("patch_size", 16), "size": self.number("image_size", 224)}
        return self._sizes(width, width // self.number("head_width", 64), own)

    def text_sizes(self) -> Sizes:
        """The sizes of the text side."""
        own = {"vocabulary": self.number("vocab_size", 49408), "context": self.number("context_length", 77)}
        return self._sizes(self.number("width", 512), self.number("heads", 8), own)

    def _sizes(self, width: int, heads: int, own: Mapping[str, int]) -> Sizes:
        if not heads or width % heads:
            raise UserError(f"{self.name}: width {width} cannot be divided among {heads} heads")
        return Sizes(
            width=width, blocks=self.number("layers", 12), heads=heads,
            inner=int(width * float(self.given.get("mlp_ratio") or 4.0)), quick_gelu=self.quick_gelu,
            epsilon=float((self.given.get("norm_kwargs") or {}).get("eps", 1e-5)), **own,
        )  # fmt: skip


def embedding_size(config: Mapping[str, Any], where: str) -> int:
    """Number of dimensions of the embeddings."""
    return _whole(config.get("embed_dim"), f"{where}: config.json: embed_dim")


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} must be a positive whole number, got {value!r}")
    return value


@dataclass(frozen=True)
class Layout:
    """A model and its published weights, which are not loaded yet."""

    model: DualEncoder  # the model with random weights
    state: dict[str, Tensor]
    logit_scale: float
    logit_bias: float
    distance: str = "csd"  # name in DISTANCES
    sampled_logits: SampledLogits | None = None  # those of PCME's match probability; None for all other models
