"""Published probabilistic image-text models, loaded as a :class:`~sfumato.models.build.DualEncoder`.

Supported are the PCME++ and ProLIP models of the Hugging Face hub, and the checkpoints of PCME++'s released training
code (the COCO models). The config.json and the names of the tensors show what a path holds.
:func:`sfumato.models.run.load_model` also loads runs and the models that sfumato exported.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sfumato.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from sfumato.encoders.backbones import from_hub
from sfumato.encoders.clip import CLIP_MEAN, CLIP_STD, UncTokenImageEncoder, UncTokenTextEncoder
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.encoders.processors import CLEANINGS, BilinearProcessor, ImageFileProcessor, SpecialTokenProcessor
from sfumato.errors import UserError
from sfumato.files import CONFIG, TOKENIZER, WEIGHTS
from sfumato.models import pretrained_tensors as layouts
from sfumato.models.build import DualEncoder, Tower
from sfumato.models.model import Model, download
from sfumato.models.pretrained_tensors import ConfigSection, Layout, Sizes, count_blocks, embedding_size, number_of

CLIP_TOKENIZER = "openai/clip-vit-base-patch16"
"""Hub name of the tokenizer of CLIP and of all PCME++ models."""

PROLIP_TOKENIZER = "timm/ViT-B-16-SigLIP"
"""Hub name of the tokenizer of the ProLIP models that name no other."""

TokenizerFinder = Callable[[str], Callable[[], Tokenizer]]
"""Hub name of a tokenizer -> a function that loads it: the model's own if it has one, else that of the name."""


def pcmepp_hub(config: Mapping[str, Any], tensors: Mapping[str, Any], find: TokenizerFinder, where: str) -> Layout:
    """The hub layout of PCME++: class token and end token, final norms on the means only, projections without bias."""
    section = ConfigSection(config, "vision_cfg", where, {"global_average_pool": False, "attentional_pool": False})
    text_section = ConfigSection(config, "text_cfg", where, {"embed_cls": False})
    vision, text, dim = section.image_sizes(), text_section.text_sizes(), embedding_size(config, where)
    own, text_own = section.number("unc_layers", 2), text_section.number("unc_layers", 2)

    def build() -> DualEncoder:
        image_head = GaussianHead(vision.width, dim, HeadOptions(pooling="first"))
        text_head = GaussianHead(text.width, dim, HeadOptions(pooling="last"))
        image_encoder = vision.image_encoder(CLIP_MEAN, CLIP_STD, own, final_norm=True)
        image = Tower(ImageFileProcessor(vision.size, fit="crop"), image_encoder, image_head)
        return DualEncoder(image, Tower(_clip_processor(find, text), text.text_encoder(text_own), text_head))

    prefixes = {"image.encoder.": "visual.", "text.encoder.": ""}
    projections = {
        "image.head.mean.linear": "visual.proj",
        "image.head.log_var.linear": "visual.uncertainty_proj",
        "text.head.mean.linear": "text_projection",
        "text.head.log_var.linear": "uncertainty_text_projection",
    }
    others: layouts.Shapes = {key: ((vision if "visual" in key else text).width, dim) for key in projections.values()}
    shapes = others | {"logit_scale": (), "shift": (1,), "negative_scale": (1,)}
    model, state = layouts.renamed(build, prefixes, tensors, where, shapes)
    for ours, released in projections.items():
        state |= layouts.projection(ours, tensors[released])
    return Layout(model, state, number_of(tensors["negative_scale"]), number_of(tensors["shift"]))


def prolip_hub(config: Mapping[str, Any], tensors: Mapping[str, Any], find: TokenizerFinder, where: str) -> Layout:
    """The hub layout of ProLIP: an [UNC] token on each side, as in its training.

    Images are prepared as open_clip does, with which the models were trained and scored. The example of the model card
    uses the CLIP processor of transformers, whose crop may lie one pixel away.
    """
    pooled = {"global_average_pool": False, "attentional_pool": False, "pool_type": "tok", "final_ln_after_pool": False}
    appended = {"embed_cls": True, "embed_unc": True, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
    section = ConfigSection(config, "vision_cfg", where, pooled | {"embed_unc": True}, needed=["embed_unc"])
    text_section = ConfigSection(config, "text_cfg", where, appended, needed=appended)
    vision, text, dim = section.image_sizes(), text_section.text_sizes(), embedding_size(config, where)
    if text.width != dim:
        raise UserError(f"{where}: text_cfg.width {text.width} is not embed_dim {dim}; no released code runs it")
    cleaning = (text_section.given.get("tokenizer_kwargs") or {"clean": "canonicalize"}).get("clean", "whitespace")
    if cleaning not in CLEANINGS:
        raise UserError(f"{where}: unknown cleaning of texts {cleaning!r}; known: {', '.join(CLEANINGS)}")
    form: dict[str, Any] = {"begin": "", "end": "</s>", "pad_to_max": True, "clean": CLEANINGS[cleaning]}
    form |= {"vocabulary": text.vocabulary, "max_tokens": text.context}
    texts = SpecialTokenProcessor(find=find(text_section.given.get("hf_tokenizer_name") or PROLIP_TOKENIZER), **form)

    def build() -> DualEncoder:
        image = UncTokenImageEncoder(vision.image_encoder(CLIP_MEAN, CLIP_STD, 0, final_norm=True), released=True)
        heads = [GaussianHead(width, dim, HeadOptions(pooling="first")) for width in (vision.width, text.width)]
        encoder = UncTokenTextEncoder(text.text_encoder(0), released=True)
        pictures = Tower(ImageFileProcessor(vision.size, fit="crop-nearest"), image, heads[0])
        return DualEncoder(pictures, Tower(texts, encoder, heads[1]))

    prefixes = {
        "image.encoder.encoder.": "visual.",
        "text.encoder.encoder.": "text.",
        "image.head.log_var.linear.": "visual.uncertainty_proj.",
        "text.head.mean.linear.": "text.text_projection.",
    }
    codes: layouts.Shapes = {
        "visual.positional_embedding": ((vision.size // vision.patch) ** 2 + 2, vision.width),
        "text.positional_embedding": (text.context + 2, text.width),
    }
    others: layouts.Shapes = {
        **{"visual.unc_embedding": (vision.width,), "visual.proj": (vision.width, dim)},
        **{"text.cls_emb": (text.width,), "text.unc_emb": (text.width,)},
        **{f"text.text_uncertainty_projection.{x}": (dim, text.width)[: 2 - (x == "bias")] for x in ("weight", "bias")},
        **{name: () for name in ("logit_scale", "logit_bias") if name == "logit_scale" or name in tensors},
    }
    model, state = layouts.renamed(build, prefixes, tensors, where, codes | others)
    scale = math.exp(number_of(tensors["logit_scale"]))
    shift = number_of(tensors["logit_bias"]) if "logit_bias" in tensors else 0.0
    # For unit means scale * (mean.mean - variances / 2) + shift = scale * (1 - csd / 2) + shift.
    return Layout(model, state | _prolip_state(tensors, text.context), scale / 2, shift + scale)


def _prolip_state(tensors: Mapping[str, Any], context: int) -> dict[str, Tensor]:
    """ProLIP's tensors that are not ours by another name. An extra token and its position code are summed."""
    visual, words = layouts.below("visual.", tensors), layouts.below("text.", tensors)
    codes, word_codes = visual["positional_embedding"].double(), words["positional_embedding"].double()
    # log_var = V (W x + b) + c, a linear map of the projected mean, is (V W) x + (V b + c): one of the same features.
    weight, bias = (words[f"text_projection.{x}"].double() for x in ("weight", "bias"))
    above, offset = (words[f"text_uncertainty_projection.{x}"].double() for x in ("weight", "bias"))
    return {
        "image.encoder.encoder.embeddings.position_embedding.weight": torch.cat([codes[:1], codes[2:]]),
        "image.encoder.variance_token": visual["unc_embedding"] + codes[1],
        **layouts.projection("image.head.mean.linear", visual["proj"]),
        "text.encoder.encoder.embeddings.position_embedding.weight": word_codes[:context],
        "text.encoder.variance_token": words["unc_emb"] + word_codes[context],
        "text.encoder.class_token": words["cls_emb"] + word_codes[context + 1],
        **{"text.head.log_var.linear.weight": above @ weight, "text.head.log_var.linear.bias": above @ bias + offset},
    }


def pcmepp_training(
    options: Mapping[str, Any],
    tensors: Mapping[str, Any],
    find: TokenizerFinder,
    where: str,
    *,
    heads: tuple[int, int] | None = None,
) -> Layout:
    """The training code's COCO models: all tokens mapped linearly, then pooled; a final norm on the text's mean only.

    As in that code, images are squashed to a square without smoothing, and standardised by ImageNet's mean and
    deviation instead of CLIP's. Its ``x / (|x| + 1e-8)`` is x / |x| here. The tensors show whether a model has GPO, a
    layer norm on the log variance, and variances at all; deterministic baselines have logits 1 and 0 here.
    """
    model_options, criterion = (dict(options.get(section) or {}) for section in ("model", "criterion"))
    if criterion.get("name") == "pcme":
        found = f"{where}: trained with PCME's loss, whose logits belong to sampled distances"
        raise UserError(f"{found}; only models of the criterion pcmepp, info_nce or triplet can be loaded")
    for key in _ANCHORS:
        if not isinstance(tensors.get(key), Tensor):
            raise UserError(f"{where}: {key!r} is missing; not a complete model of the PCME++ training code")
    vision, text, tokens = _training_sizes(tensors, heads)
    variance, gpo = "img_enc.image_std_encoder.fc.weight" in tensors, "txt_enc.gpool.linear.weight" in tensors
    dim, norm = len(tensors[_ANCHORS[2]]), variance and "txt_enc.text_std_ln.weight" in tensors
    names = "img_enc.backbone.uncertainty_transformer.", "txt_enc.backbone.transformer.prob_"
    own_blocks = [count_blocks(tensors, f"{name}resblocks") for name in names]

    def head(channels: int, without_gpo: str, normalize: bool) -> GaussianHead:
        pooling = "gpo" if gpo else without_gpo
        options = HeadOptions(pooling=pooling, normalize=normalize, variance=variance, variance_norm=norm)
        return GaussianHead(channels, dim, options)

    def build() -> DualEncoder:
        image_encoder = vision.image_encoder(IMAGENET_MEAN, IMAGENET_STD, own_blocks[0], final_norm=False)
        image_head = head(vision.width, "average", not model_options.get("no_imgnorm"))
        text_head = head(text.width, "last", not model_options.get("no_txtnorm"))
        texts = Tower(_clip_processor(find, text), text.text_encoder(own_blocks[1]), text_head)
        return DualEncoder(Tower(BilinearProcessor(vision.size), image_encoder, image_head), texts)

    if not variance:  # The other learnt parameters of the baselines are not logits of a distance.
        tensors = {key: value for key, value in tensors.items() if not key.startswith("criterion.")}
    logits: layouts.Shapes = {"criterion.shift": (1,), "criterion.negative_scale": (1,)} if variance else {}
    model, state = layouts.renamed(build, _TRAINING, tensors, where, logits, text_variance="transformer.prob_resblocks")
    if not gpo:  # The released "AvgPool" of images is a sum over their tokens, whose number is always the same.
        summed = [name for name in state if re.fullmatch(r"image\.head\.\w+\.linear\.\w+", name)]
        state |= {name: state[name] * tokens for name in summed}
    if not variance:
        return Layout(model, state, 1.0, 0.0)
    scale, bias = number_of(tensors["criterion.negative_scale"]), number_of(tensors["criterion.shift"])
    return Layout(model, state, scale, bias, "wasserstein2" if criterion.get("prob_distance") == "wdist" else "csd")


_ANCHORS = (
    "img_enc.backbone.conv1.weight", "img_enc.backbone.positional_embedding", "img_enc.image_encoder.fc.weight",
    "txt_enc.backbone.token_embedding.weight", "txt_enc.backbone.positional_embedding",
)  # fmt: skip

_TRAINING = {
    "image.encoder.": "img_enc.backbone.", "image.head.mean.linear.": "img_enc.image_encoder.fc.",
    "image.head.mean.pool.": "img_enc.image_encoder.gpool.",
    "image.head.log_var.linear.": "img_enc.image_std_encoder.fc.",
    "image.head.log_var.pool.": "img_enc.image_std_encoder.gpool.",
    "image.head.log_var_norm.": "img_enc.image_std_ln.",
    "text.encoder.": "txt_enc.backbone.", "text.head.mean.linear.": "txt_enc.linear.",
    "text.head.mean.pool.": "txt_enc.gpool.", "text.head.log_var.linear.": "txt_enc.std_linear.",
    "text.head.log_var.pool.": "txt_enc.std_gpool.", "text.head.log_var_norm.": "txt_enc.text_std_ln.",
}  # fmt: skip
"""Name here -> name in the training code."""


def _training_sizes(tensors: Mapping[str, Any], heads: tuple[int, int] | None) -> tuple[Sizes, Sizes, int]:
    """The sizes of a model of the training code, and its number of image tokens."""
    width, _, patch, _ = tensors[_ANCHORS[0]].shape
    (vocabulary, words), context = tensors[_ANCHORS[3]].shape, len(tensors[_ANCHORS[4]])
    tokens, (image_heads, text_heads) = len(tensors[_ANCHORS[1]]), heads or (max(1, width // 64), max(1, words // 64))
    blocks = [count_blocks(tensors, f"{side}_enc.backbone.transformer.resblocks") for side in ("img", "txt")]
    size = patch * math.isqrt(tokens - 1)
    return (
        Sizes(width=width, blocks=blocks[0], heads=image_heads, inner=4 * width, patch=patch, size=size),
        Sizes(width=words, blocks=blocks[1], heads=text_heads, inner=4 * words, vocabulary=vocabulary, context=context),
        tokens,
    )


def _clip_processor(find: TokenizerFinder, text: Sizes) -> SpecialTokenProcessor:
    form: dict[str, Any] = {"begin": "<|startoftext|>", "end": "<|endoftext|>", "pad_to_max": False}
    form |= {"vocabulary": text.vocabulary, "max_tokens": text.context, "clean": CLEANINGS["lower"]}
    return SpecialTokenProcessor(find=find(CLIP_TOKENIZER), **form)


FOREIGN: list[Callable[[Mapping[str, Any], Tokenizer | None, str], tuple[Layout, str] | None]] = []
"""Readers of checkpoints of other codes, which an imported file adds: (content, tokenizer, name) -> the layout and what
it is; None for a checkpoint that is not theirs."""


def load_pretrained(
    name_or_folder: str | Path, *, tokenizer: Tokenizer | None = None, device: torch.device | str = "cpu"
) -> Model:
    """Load a published PCME++ or ProLIP model, or a checkpoint of a code in FOREIGN.

    Its tokenizer is loaded when the first text is embedded: images can be embedded without it.

    Source: https://github.com/naver-ai/pcmepp, https://github.com/naver-ai/prolip.
    """
    path, name = Path(name_or_folder), str(name_or_folder)
    if path.is_file():
        content = layouts.read_checkpoint(path)
        foreign = (found for read in FOREIGN if (found := read(content, tokenizer, name)) is not None)
        if (first := next(foreign, None)) is not None:
            layout, what = first
        else:
            options, tensors, what = _training_file(path, content)
            layout = pcmepp_training(options, tensors, _finder(tokenizer, path.parent), name)
    else:
        folder = path if path.is_dir() else download(name)
        config = read_config(folder, name)
        build, what = _recognise(config, name)
        layout = build(config, layouts.read_checkpoint(folder / WEIGHTS), _finder(tokenizer, folder), name)
    layout.model.load_state_dict(layout.state)
    return Model(
        model=layout.model.to(device).eval(), distance=layout.distance, logit_scale=layout.logit_scale,
        logit_bias=layout.logit_bias, source=name, kind=what, sampled_logits=layout.sampled_logits,
    )  # fmt: skip


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """Read the config.json of a complete model."""
    for needed in (CONFIG, WEIGHTS):
        if not (folder / needed).is_file():
            if (folder / "manifest.json").is_file():
                raise UserError(f"{where} holds an index or embeddings, not a model; give the folder of the model")
            raise UserError(f"{where}: no {needed} in it; expected a run, or a published model, {CONFIG} and {WEIGHTS}")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {CONFIG} is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{where}: {CONFIG} holds a {type(config).__name__}, expected an object")
    return config


def _recognise(config: Mapping[str, Any], where: str) -> tuple[Callable[..., Layout], str]:
    if "sfumato" in config:
        raise UserError(f"{where}: a model that sfumato exported; load it with sfumato.load")
    vision = config.get("vision_cfg")
    if isinstance(vision, dict) and isinstance(config.get("text_cfg"), dict):
        if vision.get("embed_unc"):
            return prolip_hub, "ProLIP"
        if vision.get("unc_layers"):
            return pcmepp_hub, "PCME++"
    found = f"{where}: {CONFIG} is not that of a PCME++ or ProLIP model"
    way = "train one from it (model.image.weights in a recipe)"
    raise UserError(f"{found}. A plain CLIP or SigLIP model has no variances; {way}")


_PART = re.compile(r"(?:module\.|_orig_mod\.)*(swa_)?(img_enc|txt_enc|criterion)\.(?:module\.|_orig_mod\.)*(.+)")


def _training_file(path: Path, content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(settings of the run, tensors by the names of the training code, a description)."""
    state = content.get("state_dict", content)
    last: dict[str, Any] = {}
    averaged: dict[str, Any] = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        if (part := _PART.fullmatch(str(key))) is None:
            last[str(key)] = value
        else:
            (averaged if part[1] else last)[f"{part[2]}.{part[3]}"] = value
    if not any(key.startswith("img_enc.") for key in last | averaged):
        first = ", ".join(repr(key) for key in list(content)[:3])
        found = "no tensor is named img_enc.*, so the PCME++ training code did not write it"
        raise UserError(f"{path}: {found}; its first names are {first} ...")
    counts = [averaged.pop(key) for key in list(averaged) if key.endswith(".n_averaged")]
    averaging = bool(averaged) and all(int(count) > 0 for count in counts)
    settings = content.get("hyper_parameters")
    options = settings.get("opt", settings) if isinstance(settings, dict) else {}
    kind = "averaged" if averaging else "last"
    known = options if isinstance(options, dict) else {}
    return known, last | averaged if averaging else last, f"PCME++ training, {kind} weights"


def _finder(own: Tokenizer | None, folder: Path) -> TokenizerFinder:
    return lambda name: partial(_tokenizer, own, folder, name)


def _tokenizer(own: Tokenizer | None, folder: Path, name: str) -> Tokenizer:
    if own is not None:
        return own
    path = folder / TOKENIZER
    if not path.is_file():
        path = from_hub(
            lambda hub, local: hub.hf_hub_download(name, TOKENIZER, local_files_only=local),
            f"no {TOKENIZER} beside the weights, and that of {name!r} cannot be downloaded from the Hugging Face hub",
            f"Put the {TOKENIZER} of {name!r} beside the weights, or give it as tokenizer=",
        )
    return Tokenizer.from_file(str(path))
