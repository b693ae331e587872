"""How published models are laid out: which of their tensors is which part of ours, and what their inputs look like.

One function for each layout: configuration and tensors in, a model and its state dict out. All names and shapes are checked before
anything is built. Nothing is read from files or the network here; :mod:`sfumato.models.pretrained` does that.

Source: https://github.com/naver-ai/pcmepp (hf_models for the models on the hub, pcmepp for the training code) and
https://github.com/naver-ai/prolip.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sfumato.encoders.clip import clip_image_encoder, clip_text_encoder
from sfumato.encoders.clip_transformers import CLIP_MEAN, CLIP_STD, ClipImageEncoder, ClipTextEncoder
from sfumato.encoders.dual import DualEncoder, Tower
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.encoders.image_processors import BilinearProcessor, ImageFileProcessor
from sfumato.encoders.openai_names import openai_image_state, openai_text_state
from sfumato.encoders.text_processors import CLEANINGS, SpecialTokenProcessor
from sfumato.encoders.unc_token import UncTokenImageEncoder, UncTokenTextEncoder
from sfumato.errors import UserError

CLIP_TOKENIZER = "openai/clip-vit-base-patch16"
"""Hub name of the tokenizer of CLIP and of all PCME++ models."""

PROLIP_TOKENIZER = "timm/ViT-B-16-SigLIP"
"""Hub name of the tokenizer of the ProLIP models that name no other."""

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation by which PCME++'s training code standardises pixels in [0, 1]."""

TokenizerFinder = Callable[[str], Callable[[], Tokenizer]]
"""Hub name of a tokenizer -> a function that gets it: the model's own if it has one, else that of the name."""

_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """A model and its published weights, still beside it.

    Attributes:
        model: with random weights.
        state: the published ones by the names of the model's state dict; those that had to be computed in float64.
        logit_scale, logit_bias: of the match probabilities, in terms of ``distance``; nan where the tensors are on the meta device.
        distance: name in DISTANCES.
    """

    model: DualEncoder
    state: dict[str, Tensor]
    logit_scale: float
    logit_bias: float
    distance: str = "csd"


def pcmepp_hub(config: Mapping[str, Any], tensors: Mapping[str, Any], find: TokenizerFinder, where: str) -> Layout:
    """PCME++ as on the hub: the class token and the end token, final norms on the means only, projections without bias.

    Args:
        config: content of config.json, with or without cast_dtype, output_dict and quick_gelu.
        tensors: content of model.safetensors; 354 tensors in the released ViT-B/16 models.
        find: gets the tokenizer when it is needed.
        where: name of the model for errors.

    Raises:
        UserError: the configuration is of another kind of model, or the tensors do not fit it.
    """
    section = _Section(config, "vision_cfg", where, {"global_average_pool": False, "attentional_pool": False})
    text_section = _Section(config, "text_cfg", where, {"embed_cls": False})
    vision, text, dim = _vision(section, config), _text(text_section, config), _embed_dim(config, where)
    own, text_own = section.number("unc_layers", 2), text_section.number("unc_layers", 2)
    expected = {
        **vision.shapes("visual.", 1),
        **_norm_shapes("visual.ln_post", vision.width),
        **vision.block_shapes("visual.uncertainty_transformer.resblocks", own),
        **text.shapes("", 0),
        **text.block_shapes("uncertainty_transformer.resblocks", text_own),
        **{name: (vision.width, dim) for name in ("visual.proj", "visual.uncertainty_proj")},
        **{name: (text.width, dim) for name in ("text_projection", "uncertainty_text_projection")},
        **{"logit_scale": (), "shift": (1,), "negative_scale": (1,)},
    }
    _check_tensors(tensors, expected, where)
    image_encoder = vision.encoder(CLIP_MEAN, CLIP_STD, own, final_norm=True)
    text_encoder = text.encoder(text_own)
    model = DualEncoder(
        Tower(
            ImageFileProcessor(vision.size, fit="crop"),
            image_encoder,
            GaussianHead(vision.width, dim, HeadOptions(pooling="first")),
        ),
        Tower(_clip_reader(find, text), text_encoder, GaussianHead(text.width, dim, HeadOptions(pooling="last"))),
    )
    visual = _without(_below("visual.", tensors), ("proj", "uncertainty_proj"))
    others = ("visual.", "text_projection", "uncertainty_text_projection", "logit_scale", "shift", "negative_scale")
    state = {
        **_prefixed("image.encoder.", openai_image_state(visual, image_encoder)),
        **_prefixed("text.encoder.", openai_text_state(_without(tensors, others), text_encoder)),
        **_projection("image.head.mean.linear", tensors["visual.proj"]),
        **_projection("image.head.log_var.linear", tensors["visual.uncertainty_proj"]),
        **_projection("text.head.mean.linear", tensors["text_projection"]),
        **_projection("text.head.log_var.linear", tensors["uncertainty_text_projection"]),
    }
    return Layout(model, state, _number(tensors["negative_scale"]), _number(tensors["shift"]))


def prolip_hub(config: Mapping[str, Any], tensors: Mapping[str, Any], find: TokenizerFinder, where: str) -> Layout:
    """ProLIP as on the hub: an [UNC] token on each side, used as its weights were trained (:mod:`sfumato.encoders.unc_token`).

    Args:
        config: content of config.json.
        tensors: content of model.safetensors; 311 tensors in the released ViT-B/16 model.
        find: gets the tokenizer when it is needed.
        where: name of the model for errors.

    Raises:
        UserError: the configuration is of another kind of model, or the tensors do not fit it.
    """
    pooled = {"global_average_pool": False, "attentional_pool": False, "pool_type": "tok", "final_ln_after_pool": False}
    appended = {"embed_cls": True, "embed_unc": True, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
    section = _Section(config, "vision_cfg", where, pooled, needed={"embed_unc": True})
    text_section = _Section(config, "text_cfg", where, needed=appended)
    vision, text, dim = _vision(section, config), _text(text_section, config), _embed_dim(config, where)
    if text.width != dim:
        raise UserError(
            f"{where}: text_cfg.width {text.width} is not embed_dim {dim}; no released code runs such a model"
        )
    cleaning = (text_section.given.get("tokenizer_kwargs") or {"clean": "canonicalize"}).get("clean", "whitespace")
    if cleaning not in CLEANINGS:
        raise UserError(f"{where}: unknown cleaning of texts {cleaning!r}; known: {', '.join(CLEANINGS)}")
    expected = {
        **vision.shapes("visual.", 2),
        **_norm_shapes("visual.ln_post", vision.width),
        **{"visual.unc_embedding": (vision.width,), "visual.proj": (vision.width, dim)},
        **_linear_shapes("visual.uncertainty_proj", dim, vision.width),
        **text.shapes("text.", 2),
        **{"text.cls_emb": (text.width,), "text.unc_emb": (text.width,)},
        **_linear_shapes("text.text_projection", dim, text.width),
        **_linear_shapes("text.text_uncertainty_projection", dim, text.width),
        **{name: () for name in ("logit_scale", "logit_bias") if name == "logit_scale" or name in tensors},
    }
    _check_tensors(tensors, expected, where)
    image_encoder = UncTokenImageEncoder(vision.encoder(CLIP_MEAN, CLIP_STD, 0, final_norm=True), released=True)
    text_encoder = UncTokenTextEncoder(text.encoder(0), released=True)
    processor = SpecialTokenProcessor(
        find(text_section.given.get("hf_tokenizer_name") or PROLIP_TOKENIZER),
        vocabulary=text.vocabulary,
        max_tokens=text.context,
        begin="",
        end="</s>",
        pad_to_max=True,
        clean=CLEANINGS[cleaning],
    )
    model = DualEncoder(
        Tower(
            ImageFileProcessor(vision.size, fit="crop"),
            image_encoder,
            GaussianHead(vision.width, dim, HeadOptions(pooling="first")),
        ),
        Tower(processor, text_encoder, GaussianHead(text.width, dim, HeadOptions(pooling="first"))),
    )
    visual, words = _below("visual.", tensors), _below("text.", tensors)
    codes, word_codes = visual["positional_embedding"].double(), words["positional_embedding"].double()
    of_image = _without(visual, ("unc_embedding", "proj", "uncertainty_proj."))
    of_image["positional_embedding"] = torch.cat([codes[:1], codes[2:]])
    of_text = _without(words, ("unc_emb", "cls_emb", "text_projection.", "text_uncertainty_projection."))
    of_text["positional_embedding"] = word_codes[: text.context]
    # log_var = V (W x + b) + c, a linear map of the projected mean, is (V W) x + (V b + c): one of the same features.
    weight, bias = (words[f"text_projection.{x}"].double() for x in ("weight", "bias"))
    above, offset = (words[f"text_uncertainty_projection.{x}"].double() for x in ("weight", "bias"))
    state = {
        **_prefixed("image.encoder.encoder.", openai_image_state(of_image, image_encoder.encoder)),
        "image.encoder.variance_token": visual["unc_embedding"] + codes[1],
        **_projection("image.head.mean.linear", visual["proj"]),
        **_prefixed("image.head.log_var.linear.", _below("uncertainty_proj.", visual)),
        **_prefixed("text.encoder.encoder.", openai_text_state(of_text, text_encoder.encoder)),
        "text.encoder.variance_token": words["unc_emb"] + word_codes[text.context],
        "text.encoder.class_token": words["cls_emb"] + word_codes[text.context + 1],
        **{"text.head.mean.linear.weight": weight, "text.head.mean.linear.bias": bias},
        **{"text.head.log_var.linear.weight": above @ weight, "text.head.log_var.linear.bias": above @ bias + offset},
    }
    scale = math.exp(_number(tensors["logit_scale"]))
    shift = _number(tensors["logit_bias"]) if "logit_bias" in tensors else 0.0
    # For unit means scale * (mean.mean - variances / 2) + shift = scale * (1 - csd / 2) + shift.
    return Layout(model, state, scale / 2, shift + scale)


def pcmepp_training(
    options: Mapping[str, Any],
    tensors: Mapping[str, Any],
    find: TokenizerFinder,
    where: str,
    *,
    heads: tuple[int, int] | None = None,
) -> Layout:
    """The training code's COCO models: all tokens mapped linearly, then pooled; a final norm on the text's mean only.

    Pictures are squashed to a square without smoothing and standardised by ImageNet's figures, not CLIP's: that is what the
    code does. Its ``x / (|x| + 1e-8)`` is taken for x / |x|. Models without GPO and with a layer norm on the log variance are
    told by their tensors, and so are its deterministic baselines, whose logits are 1 and 0 here.

    Args:
        options: the settings of the run, as far as they are known: model.no_imgnorm, model.no_txtnorm, criterion.name,
            criterion.prob_distance.
        tensors: ``img_enc.*``, ``txt_enc.*`` and ``criterion.*``; 367 tensors for ViT-B/32.
        find: gets the tokenizer when it is needed.
        where: name of the model for errors.
        heads: attention heads of image and text transformer; None: one for each 64 channels, as in the code.

    Raises:
        UserError: tensors are missing, left over or of the wrong shape, or the loss was PCME's.
    """
    model_options, criterion = (dict(options.get(section) or {}) for section in ("model", "criterion"))
    if criterion.get("name") == "pcme":
        raise UserError(
            f"{where}: trained with PCME's loss, whose logits belong to sampled distances; only models trained with criterion"
            " pcmepp, info_nce or triplet can be loaded"
        )
    for key in _ANCHORS:
        if not isinstance(tensors.get(key), Tensor):
            raise UserError(f"{where}: {key!r} is missing; not a whole model of the PCME++ training code")
    width, _, patch, _ = tensors[_ANCHORS[0]].shape
    length, dim = len(tensors[_ANCHORS[1]]), len(tensors[_ANCHORS[2]])
    (vocabulary, words), context = tensors[_ANCHORS[3]].shape, len(tensors[_ANCHORS[4]])
    image_heads, text_heads = heads or (max(1, width // 64), max(1, words // 64))
    image_trunk, text_trunk = "img_enc.backbone.", "txt_enc.backbone."
    image_own, text_own = f"{image_trunk}uncertainty_transformer.resblocks", f"{text_trunk}transformer.prob_resblocks"
    blocks = {name: _count_blocks(tensors, f"{name}transformer.resblocks") for name in (image_trunk, text_trunk)}
    vision = _Vision(
        width, blocks[image_trunk], image_heads, 4 * width, True, patch=patch, size=patch * math.isqrt(length - 1)
    )
    text = _Text(words, blocks[text_trunk], text_heads, 4 * words, True, vocabulary=vocabulary, context=context)
    variance = "img_enc.image_std_encoder.fc.weight" in tensors
    gpo, norm = "txt_enc.gpool.linear.weight" in tensors, "txt_enc.text_std_ln.weight" in tensors
    branches = _BRANCHES if variance else _BRANCHES[::2]
    expected = {
        **vision.shapes(image_trunk, 1),
        **vision.block_shapes(image_own, _count_blocks(tensors, image_own)),
        **text.shapes(text_trunk, 0),
        **text.block_shapes(text_own, _count_blocks(tensors, text_own)),
    }
    for name, linear, pool in branches:
        expected |= _linear_shapes(linear, dim, width if name.startswith("image") else words)
        expected |= _gpo_shapes(pool) if gpo else {}
    if variance:
        expected |= {"criterion.shift": (1,), "criterion.negative_scale": (1,)}
        expected |= {k: v for name in _NORMS.values() if norm for k, v in _norm_shapes(name, dim).items()}
    else:  # What baselines learn besides is no logit of a distance.
        tensors = _without(tensors, ("criterion.",))
    _check_tensors(tensors, expected, where)

    def head(channels: int, without_gpo: str, normalize: bool) -> GaussianHead:
        pooling = "gpo" if gpo else without_gpo
        return GaussianHead(
            channels, dim, HeadOptions(pooling=pooling, normalize=normalize, variance=variance, variance_norm=norm)
        )

    image_encoder = vision.encoder(IMAGENET_MEAN, IMAGENET_STD, _count_blocks(tensors, image_own), final_norm=False)
    text_encoder = text.encoder(_count_blocks(tensors, text_own))
    image_head = head(width, "average", not model_options.get("no_imgnorm"))
    text_head = head(words, "last", not model_options.get("no_txtnorm"))
    model = DualEncoder(
        Tower(BilinearProcessor(vision.size), image_encoder, image_head),
        Tower(_clip_reader(find, text), text_encoder, text_head),
    )
    state = {
        **_prefixed("image.encoder.", openai_image_state(_below(image_trunk, tensors), image_encoder)),
        **_prefixed("text.encoder.", openai_text_state(_below(text_trunk, tensors), text_encoder)),
    }
    for name, linear, pool in branches:
        # Without GPO images have an "AvgPool" that is a sum over their tokens, of which there are always as many.
        times = length if not gpo and name.startswith("image") else 1
        state |= {f"{name}.linear.{x}": tensors[f"{linear}.{x}"] * times for x in ("weight", "bias")}
        state |= _prefixed(f"{name}.pool.", _below(f"{pool}.", tensors))
    for name, official in _NORMS.items():
        state |= _prefixed(f"{name}.", _below(f"{official}.", tensors))
    if not variance:
        return Layout(model, state, 1.0, 0.0)
    scale, bias = _number(tensors["criterion.negative_scale"]), _number(tensors["criterion.shift"])
    return Layout(model, state, scale, bias, "wasserstein2" if criterion.get("prob_distance") == "wdist" else "csd")


_ANCHORS = (
    "img_enc.backbone.conv1.weight",
    "img_enc.backbone.positional_embedding",
    "img_enc.image_encoder.fc.weight",
    "txt_enc.backbone.token_embedding.weight",
    "txt_enc.backbone.positional_embedding",
)
_BRANCHES = (
    ("image.head.mean", "img_enc.image_encoder.fc", "img_enc.image_encoder.gpool"),
    ("image.head.log_var", "img_enc.image_std_encoder.fc", "img_enc.image_std_encoder.gpool"),
    ("text.head.mean", "txt_enc.linear", "txt_enc.gpool"),
    ("text.head.log_var", "txt_enc.std_linear", "txt_enc.std_gpool"),
)
_NORMS = {"image.head.log_var_norm": "img_enc.image_std_ln", "text.head.log_var_norm": "txt_enc.text_std_ln"}


@dataclass(frozen=True)
class _Transformer:
    """The sizes of a transformer."""

    width: int
    blocks: int
    heads: int
    inner: int
    quick_gelu: bool
    epsilon: float = 1e-5

    def config(self, kind: str) -> dict[str, Any]:
        """What transformers calls these sizes."""
        return {
            "model_type": kind,
            "hidden_size": self.width,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "intermediate_size": self.inner,
            "hidden_act": "quick_gelu" if self.quick_gelu else "gelu",
            "layer_norm_eps": self.epsilon,
        }

    def block_shapes(self, name: str, blocks: int) -> _Shapes:
        """Of residual attention blocks by the names of OpenAI's CLIP."""
        width = self.width
        shapes: _Shapes = {}
        for block in (f"{name}.{i}" for i in range(blocks)):
            shapes |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
            shapes |= _linear_shapes(f"{block}.attn.out_proj", width, width)
            shapes |= _linear_shapes(f"{block}.mlp.c_fc", self.inner, width)
            shapes |= _linear_shapes(f"{block}.mlp.c_proj", width, self.inner)
            shapes |= _norm_shapes(f"{block}.ln_1", width) | _norm_shapes(f"{block}.ln_2", width)
        return shapes


@dataclass(frozen=True, kw_only=True)
class _Vision(_Transformer):
    patch: int
    size: int

    def encoder(
        self, mean: tuple[float, ...], std: tuple[float, ...], variance_blocks: int, *, final_norm: bool
    ) -> ClipImageEncoder:
        """With random weights."""
        backbone = self.config("clip_vision_model") | {"patch_size": self.patch, "image_size": self.size}
        description = {"backbone": backbone, "pixel_mean": mean, "pixel_std": std}
        return clip_image_encoder(description=description, variance_blocks=variance_blocks, final_norm=final_norm)

    def shapes(self, prefix: str, extra: int) -> _Shapes:
        """Of everything up to the last shared block, with so many tokens beside the patches."""
        return {
            f"{prefix}class_embedding": (self.width,),
            f"{prefix}positional_embedding": ((self.size // self.patch) ** 2 + extra, self.width),
            f"{prefix}conv1.weight": (self.width, 3, self.patch, self.patch),
            **_norm_shapes(f"{prefix}ln_pre", self.width),
            **self.block_shapes(f"{prefix}transformer.resblocks", self.blocks),
        }


@dataclass(frozen=True, kw_only=True)
class _Text(_Transformer):
    vocabulary: int
    context: int

    def encoder(self, variance_blocks: int) -> ClipTextEncoder:
        """With random weights."""
        backbone = self.config("clip_text_model") | {
            **{"vocab_size": self.vocabulary, "max_position_embeddings": self.context},
            **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
        }
        return clip_text_encoder(description={"backbone": backbone}, variance_blocks=variance_blocks)

    def shapes(self, prefix: str, extra: int) -> _Shapes:
        """Of everything but the projections, with so many tokens beside the words."""
        return {
            f"{prefix}token_embedding.weight": (self.vocabulary, self.width),
            f"{prefix}positional_embedding": (self.context + extra, self.width),
            **_norm_shapes(f"{prefix}ln_final", self.width),
            **self.block_shapes(f"{prefix}transformer.resblocks", self.blocks),
        }


class _Section:
    """A section of a config.json: numbers with their defaults, and switches that must stand as the models here have them."""

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
        """A positive whole number."""
        return _whole(self.given.get(key, default), f"{self.name}.{key}")

    def inner(self, width: int) -> int:
        """Of the two-layer networks in the blocks."""
        return int(width * float(self.given.get("mlp_ratio") or 4.0))

    def epsilon(self) -> float:
        """Of the layer norms."""
        return float((self.given.get("norm_kwargs") or {}).get("eps", 1e-5))


def _vision(section: _Section, config: Mapping[str, Any]) -> _Vision:
    width, quick = section.number("width", 768), bool(config.get("quick_gelu"))
    heads = width // section.number("head_width", 64)
    _check_heads(width, heads, section.name)
    return _Vision(
        width,
        section.number("layers", 12),
        heads,
        section.inner(width),
        quick,
        section.epsilon(),
        patch=section.number("patch_size", 16),
        size=section.number("image_size", 224),
    )


def _text(section: _Section, config: Mapping[str, Any]) -> _Text:
    width, heads, quick = section.number("width", 512), section.number("heads", 8), bool(config.get("quick_gelu"))
    _check_heads(width, heads, section.name)
    return _Text(
        width,
        section.number("layers", 12),
        heads,
        section.inner(width),
        quick,
        section.epsilon(),
        vocabulary=section.number("vocab_size", 49408),
        context=section.number("context_length", 77),
    )


def _embed_dim(config: Mapping[str, Any], where: str) -> int:
    return _whole(config.get("embed_dim"), f"{where}: config.json: embed_dim")


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} must be a positive whole number, got {value!r}")
    return value


def _check_heads(width: int, heads: int, name: str) -> None:
    if not heads or width % heads:
        raise UserError(f"{name}: width {width} cannot be shared among {heads} heads")


def _clip_reader(find: TokenizerFinder, text: _Text) -> SpecialTokenProcessor:
    return SpecialTokenProcessor(
        find(CLIP_TOKENIZER),
        vocabulary=text.vocabulary,
        max_tokens=text.context,
        begin="<|startoftext|>",
        end="<|endoftext|>",
        pad_to_max=False,
        clean=CLEANINGS["lower"],
    )


def _linear_shapes(name: str, out: int, into: int) -> _Shapes:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _norm_shapes(name: str, width: int) -> _Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _gpo_shapes(name: str) -> _Shapes:
    """Of GPO(32, 32), the only one that the released code builds."""
    shapes: _Shapes = {f"{name}.linear.weight": (1, 32)}
    for end in ("l0", "l0_reverse"):
        shapes |= {f"{name}.gru.weight_{x}_{end}": (96, 32) for x in ("ih", "hh")}
        shapes |= {f"{name}.gru.bias_{x}_{end}": (96,) for x in ("ih", "hh")}
    return shapes


def _count_blocks(tensors: Mapping[str, Any], prefix: str) -> int:
    """One more than the largest number of a block."""
    numbers = [key.removeprefix(f"{prefix}.").split(".")[0] for key in tensors if key.startswith(f"{prefix}.")]
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)


def _check_tensors(tensors: Mapping[str, Any], expected: _Shapes, where: str) -> None:
    """All expected tensors, in their shapes, and no others; a UserError names the first ones that are not so."""
    wrong = [f"{key!r} is missing" for key in expected if key not in tensors]
    wrong += [f"{key!r} is left over" for key in tensors if key not in expected]
    for key, shape in expected.items():
        value = tensors.get(key, torch.empty(shape, device="meta"))
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if came != shape:
            wrong.append(f"{key!r} is {came}, expected {shape}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"{where}: {len(wrong)} tensors do not fit its {len(expected)}: {'; '.join(wrong[:3])}{more}. Is the file whole, and"
            " does its configuration belong to it?"
        )


def _below(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those whose name begins so, without this beginning."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _without(tensors: Mapping[str, Any], beginnings: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if not key.startswith(beginnings)}


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in tensors.items()}


def _projection(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """x @ matrix as a linear layer."""
    return {f"{name}.weight": matrix.T, f"{name}.bias": torch.zeros_like(matrix[0])}


def _number(tensor: Tensor) -> float:
    return math.nan if tensor.is_meta else float(tensor)
