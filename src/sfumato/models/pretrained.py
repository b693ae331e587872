"""PretrainedModel weights of probabilistic image-text models, as a :class:`~sfumato.encoders.dual.DualEncoder` ready to embed.

Known are the PCME++ and ProLIP models of the Hugging Face hub, and the checkpoints of the released PCME++ training code (the COCO
models). Which of them a folder or a file holds shows in its config.json and in the names of its tensors. What sfumato exported
itself is loaded by :func:`sfumato.models.export.load_model`, which comes here for everything else.
"""

import json
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from sfumato.calibration.calibrator import Calibration
from sfumato.encoders.dual import DualEncoder
from sfumato.errors import UserError, first_line
from sfumato.models.pretrained_layouts import Layout, TokenizerFinder, pcmepp_hub, pcmepp_training, prolip_hub

CONFIG, WEIGHTS, TOKENIZER, CALIBRATION = "config.json", "model.safetensors", "tokenizer.json", "calibration.json"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class PretrainedModel:
    """A model as somebody published it.

    Attributes:
        model: the dual encoder, in evaluation mode.
        logit_scale, logit_bias: of its match probabilities, sigmoid(logit_bias - logit_scale * distance).
        distance: name in DISTANCES of the distance that these belong to.
        source: where it comes from and what it is.
        calibrated: whether the logits were fitted on held-out pairs; those of a loss were not.
        calibration: all that was fitted there; None for models of others.
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

    Its tokenizer is looked for when the first text is embedded: pictures can be embedded without it.

    Args:
        name_or_folder: a name on the Hugging Face hub (``SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps``), a local folder with
            its config.json and model.safetensors, or a file of the PCME++ training code (.ckpt, .pt, .pth or .safetensors; a
            Lightning checkpoint or a bare state dict).
        tokenizer: in place of the model's own, which is the tokenizer.json beside its weights or else comes from the hub.
        device: where the model goes.
        average: of a training checkpoint that holds averaged weights (SWA), take these. The released evaluation takes them
            for the texts only: by an oversight its images go through the last weights.

    Returns:
        The model with its logits. ProLIP's logit ``scale * (mean.mean - total variances / 2) + bias`` is given in terms of csd,
        which for unit means is ``2 - 2 mean.mean + total variances``: logit_scale = scale / 2, logit_bias = bias + scale. A
        deterministic baseline has no logits of a distance; they are 1 and 0.

    Raises:
        UserError: there is no such file or model, the hub is out of reach, the file would run code, the model is of another kind,
            or tensors are missing, left over or of the wrong shape (the first ones are named).

    Source: https://github.com/naver-ai/pcmepp and https://github.com/naver-ai/prolip; see :mod:`sfumato.models.pretrained_layouts`.
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
        UserError: the name is none, there is no such model, or neither a network nor a copy in the cache.
    """
    if not _HUB_NAME.fullmatch(name):
        raise UserError(f"there is no file or folder {name!r}, and a name on the hub looks like owner/model")
    return _from_hub(
        lambda hub: hub.snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS, TOKENIZER, CALIBRATION]),
        f"there is no folder {name!r}, and it cannot be got from the Hugging Face hub",
        "Give a local folder, or a network (HF_HUB_OFFLINE=1 answers at once from the local cache)",
    )


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """The config.json of a model that lies there whole.

    Args:
        folder: with config.json and model.safetensors.
        where: name of the model for errors.

    Raises:
        UserError: one of the two is missing, or config.json is no JSON object.
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
        f"{where}: {CONFIG} is not that of a PCME++ or ProLIP model; a plain CLIP or SigLIP model, which has no variances, is a"
        " start to train one from (model.image.weights in a recipe)"
    )


_PART = re.compile(r"(?:module\.|_orig_mod\.)*(swa_)?(img_enc|txt_enc|criterion)\.(?:module\.|_orig_mod\.)*(.+)")


def _training_file(path: Path, average: bool) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(settings of the run, tensors of one model by the names of the training code, what it is)."""
    content = read_checkpoint(path)
    if "word2idx" in content or any(str(key).startswith("img_enc.cnn.") for key in content):
        raise UserError(
            f"{path}: a model of the original PCME (2021), whose towers sfumato does not have yet; read_checkpoint() reads"
            " its tensors and settings"
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
        raise UserError(f"{path}: no img_enc.* in it, so not of the PCME++ training code; it holds {first} ...")
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
                    f"no {TOKENIZER} beside the weights, and that of {name!r} cannot be got from the Hugging Face hub",
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


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint without running code from it.

    A pickle may hold tensors and containers of plain values. Settings kept as munch.Munch, argparse.Namespace or Lightning's
    AttributeDict come as dictionaries, numpy scalars as numbers; whatever else a pickle names is refused.

    Args:
        path: a file of torch.save, or .safetensors.

    Returns:
        What the file holds at its top, tensors on the CPU: a state dict, or a dictionary with state dicts and settings in it.

    Raises:
        UserError: there is no such file, it is damaged or no checkpoint, or reading it would run code.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        if foreign is None:
            raise UserError(f"{path}: damaged, or not a checkpoint of torch.save") from error
        raise UserError(
            f"{path}: holds a {foreign[1]}, and reading that would run code; only tensors and plain settings are read."
            " If you trust the file, load it where it was made and save its state dict alone: torch.save(model.state_dict(), path)"
        ) from error
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, safetensors.SafetensorError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: damaged, or not a checkpoint ({first})") from error
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
    """Stands in for subclasses of dict: an OrderedDict, which torch's reader fills like a dict and lets have a state."""

    def __new__(cls) -> Any:
        return OrderedDict()


class _Namespace(dict[str, Any]):
    """Stands in for classes whose attributes are all they hold."""

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
    (_Dict, "munch.Munch"),
    (_Namespace, "argparse.Namespace"),
    (_Dict, "lightning.fabric.utilities.data.AttributeDict"),
    (_Dict, "lightning_fabric.utilities.data.AttributeDict"),
    (_Dict, "pytorch_lightning.utilities.parsing.AttributeDict"),
    (_NumpyDtype, "numpy.dtype"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
]
