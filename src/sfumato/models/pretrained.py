"""Published probabilistic image-text models, loaded as a :class:`~sfumato.encoders.dual.DualEncoder`.

Supported are the PCME++ and ProLIP models of the Hugging Face hub, and the checkpoints of the released PCME++ training
code (the COCO models). The config.json and the names of the tensors show which of them a folder or a file holds.
:func:`sfumato.models.export.load_model` also loads the models that sfumato exported.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from sfumato.calibration.calibrator import Calibration
from sfumato.encoders.dual import DualEncoder
from sfumato.errors import UserError, first_line
from sfumato.models.pretrained_layouts import Layout, TokenizerFinder, pcmepp_hub, pcmepp_training, prolip_hub
from sfumato.models.pretrained_tensors import read_checkpoint

CONFIG, WEIGHTS, TOKENIZER, CALIBRATION = "config.json", "model.safetensors", "tokenizer.json", "calibration.json"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class PretrainedModel:
    """A published model.

    Attributes:
        model: the dual encoder, in evaluation mode.
        logit_scale, logit_bias: match probability = sigmoid(logit_bias - logit_scale * distance).
        distance: name in DISTANCES of the distance of the logits.
        source: origin and description of the model.
        calibrated: whether the logits were fitted on held-out pairs; logits learnt by a loss were not.
        calibration: everything that was fitted on held-out pairs; None for models of other authors.
    """

    model: DualEncoder
    logit_scale: float
    logit_bias: float
    distance: str
    source: str
    calibrated: bool = False
    calibration: Calibration | None = None


def load_pretrained(
    name_or_folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    device: torch.device | str = "cpu",
    average: bool = True,
) -> PretrainedModel:
    """Load a published PCME++ or ProLIP model.

    Its tokenizer is loaded when the first text is embedded: images can be embedded without it.

    Args:
        name_or_folder: a name on the Hugging Face hub (``SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps``), a local
            folder with its config.json and model.safetensors, or a file of the PCME++ training code (.ckpt, .pt, .pth
            or .safetensors; a Lightning checkpoint or a bare state dict).
        tokenizer: replaces the model's own, which is the tokenizer.json beside its weights, else that of the hub.
        device: device of the model.
        average: load the averaged weights (SWA) of a training checkpoint that has them. The released evaluation uses
            them only for texts: by an oversight its images go through the last weights.

    Returns:
        The model with its logits. ProLIP's logit ``scale * (mean.mean - total variances / 2) + bias`` is expressed by
        csd, which for unit means is ``2 - 2 mean.mean + total variances``: logit_scale = scale / 2, logit_bias = bias +
        scale. A deterministic baseline has no logits of a distance; they are 1 and 0.

    Raises:
        UserError: there is no such file or model, the hub cannot be reached, the file would run code, the model is of
            another kind, or tensors are missing, left over or of the wrong shape (the message names the first ones).

    Source: https://github.com/naver-ai/pcmepp and https://github.com/naver-ai/prolip; see
    :mod:`sfumato.models.pretrained_layouts`.
    """
    path, name = Path(name_or_folder), str(name_or_folder)
    if path.is_file():
        options, tensors, what = _training_file(path, average)
        layout = pcmepp_training(options, tensors, _finder(tokenizer, path.parent), name)
    else:
        folder = path if path.is_dir() else download(name)
        config = read_config(folder, name)
        build, what = _recognise(config, name)
        layout = build(config, read_checkpoint(folder / WEIGHTS), _finder(tokenizer, folder), name)
    layout.model.load_state_dict(layout.state)
    return PretrainedModel(
        layout.model.to(device).eval(),
        layout.logit_scale,
        layout.logit_bias,
        layout.distance,
        f"{name} ({what})",
    )


def download(name: str) -> Path:
    """The local copy of a model of the Hugging Face hub: its configuration, weights, tokenizer and calibration.

    Args:
        name: owner/model.

    Returns:
        A folder in the hub's cache.

    Raises:
        UserError: the name has another form, there is no such model, or there is neither a network nor a copy in the
            cache.
    """
    if not _HUB_NAME.fullmatch(name):
        raise UserError(f"there is no file or folder {name!r}, and a name on the hub has the form owner/model")
    return _from_hub(
        lambda hub: hub.snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS, TOKENIZER, CALIBRATION]),
        f"there is no folder {name!r}, and it cannot be downloaded from the Hugging Face hub",
        "Give a local folder, or a network (HF_HUB_OFFLINE=1 answers at once from the local cache)",
    )


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """Read the config.json of a complete model.

    Args:
        folder: folder with config.json and model.safetensors.
        where: name of the model for errors.

    Returns:
        The configuration.

    Raises:
        UserError: one of the two files is missing, or config.json is not a JSON object.
    """
    for needed in (CONFIG, WEIGHTS):
        if not (folder / needed).is_file():
            raise UserError(f"{where}: no {needed} in it; expected a published model with its {CONFIG} and {WEIGHTS}")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: {CONFIG} is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{where}: {CONFIG} holds a {type(config).__name__}, expected an object")
    return config


def _recognise(
    config: Mapping[str, Any], where: str
) -> tuple[Callable[[Mapping[str, Any], Mapping[str, Any], TokenizerFinder, str], Layout], str]:
    if "sfumato" in config:
        raise UserError(f"{where}: a model that sfumato exported; load it with sfumato.models.export.load_model")
    vision = config.get("vision_cfg")
    if isinstance(vision, dict) and isinstance(config.get("text_cfg"), dict):
        if vision.get("embed_unc"):
            return prolip_hub, "ProLIP"
        if vision.get("unc_layers"):
            return pcmepp_hub, "PCME++"
    raise UserError(
        f"{where}: {CONFIG} is not that of a PCME++ or ProLIP model. A plain CLIP or SigLIP model has no variances;"
        " train one from it (model.image.weights in a recipe)"
    )


_PART = re.compile(r"(?:module\.|_orig_mod\.)*(swa_)?(img_enc|txt_enc|criterion)\.(?:module\.|_orig_mod\.)*(.+)")


def _training_file(path: Path, average: bool) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(settings of the run, tensors by the names of the training code, a description)."""
    content = read_checkpoint(path)
    if "word2idx" in content or any(str(key).startswith("img_enc.cnn.") for key in content):
        raise UserError(
            f"{path}: a model of the original PCME (2021), whose encoders sfumato does not have; read_checkpoint()"
            " reads its tensors and settings"
        )
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
        raise UserError(
            f"{path}: no tensor is named img_enc.*, so the PCME++ training code did not write it; its first"
            f" names are {first} ..."
        )
    counts = [averaged.pop(key) for key in list(averaged) if key.endswith(".n_averaged")]
    averaging = average and bool(averaged) and all(int(count) > 0 for count in counts)
    settings = content.get("hyper_parameters")
    options = settings.get("opt", settings) if isinstance(settings, dict) else {}
    return (
        options if isinstance(options, dict) else {},
        last | averaged if averaging else last,
        f"PCME++ training, {'averaged' if averaging else 'last'} weights",
    )


def _finder(own: Tokenizer | None, folder: Path) -> TokenizerFinder:
    def named(name: str) -> Callable[[], Tokenizer]:
        def find() -> Tokenizer:
            if own is not None:
                return own
            path = folder / TOKENIZER
            if not path.is_file():
                path = _from_hub(
                    lambda hub: hub.hf_hub_download(name, TOKENIZER),
                    f"no {TOKENIZER} beside the weights, and that of {name!r} cannot be downloaded from the Hugging"
                    " Face hub",
                    f"Put the {TOKENIZER} of {name!r} beside the weights, or give it as tokenizer=",
                )
            return Tokenizer.from_file(str(path))

        return find

    return named


def _from_hub(get: Callable[[Any], str], failed: str, way_out: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError("the Hugging Face hub needs huggingface_hub: pip install 'sfumato[backbones]'") from error
    try:
        return Path(get(huggingface_hub))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise UserError(f"{failed}: {first_line(error).rstrip('.')}. {way_out}") from error
