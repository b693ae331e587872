"""Models of the Hugging Face hub: which files of a repository are downloaded. Without torch."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sfumato.encoders.backbones import HALVES, has_graphs
from sfumato.encoders.package_weights import hub_problem, hub_reachable
from sfumato.errors import UserError, need
from sfumato.files import CALIBRATION, CONFIG, ENCODER, TOKENIZER, WEIGHTS

REFERENCE = "calibration.safetensors"
"""Reference queries of the calibration, beside it."""

ENCODER_FILES = (
    *("*config*.json", "*token*.json", "vocab*", "merges.txt", "*.model", "modules.json"),
    *("*.safetensors", "*.safetensors.index.json"),
)
"""Patterns of the files from which a frozen model is loaded: data alone, no code and no pickle."""

HUB_FILES = (
    *(CONFIG, WEIGHTS, TOKENIZER, CALIBRATION, REFERENCE),
    *(f"{ENCODER}/{pattern}" for pattern in ENCODER_FILES),
)
"""Patterns of the files of a model on the hub; ``*`` goes below subfolders, too."""

_GRAPH_FILES = (
    *("image.onnx", "text.onnx", *(f"{half}*" for half in HALVES), "onnx/vision_model.onnx*", "onnx/text_model.onnx*"),
    *("visual/model.onnx*", "textual/model.onnx*", "*.json", REFERENCE),
)
"""The same of a model of ONNX graphs, whose large numbers may stand in files beside them."""

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def download(name: str) -> Path:
    """The local copy of a model of the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION: the files to load it."""
    if (given := _HUB_NAME.fullmatch(name)) is None:
        adopted = f". This command takes adopted models: sfumato adopt {name} --data my.csv --out runs/adopted"
        hint = adopted if name.startswith("open_clip:") else ""
        raise UserError(f"there is no file or folder {name!r}, and a name on the hub has the form owner/model{hint}")
    return _snapshot(given, HUB_FILES)


def with_graphs(name: str) -> Path | None:
    """A folder, or the local copy of a model of the hub that has ONNX graphs instead of weights; None for others."""
    if Path(name).exists() or (given := _HUB_NAME.fullmatch(name)) is None:
        return Path(name) if Path(name).is_dir() else None

    def usable(files: set[str]) -> bool:
        return WEIGHTS not in files and has_graphs(files)

    try:
        folder = _snapshot(given, _GRAPH_FILES, usable)
    except UserError:
        if hub_reachable():
            raise
        return None
    return folder if usable({file.relative_to(folder).as_posix() for file in folder.rglob("*")}) else None


def _snapshot(given: re.Match[str], patterns: Sequence[str], usable: Callable[[set[str]], bool] | None = None) -> Path:
    """The local copy of some files of a model; where they are not usable, a folder that is not there."""

    def get(hub: Any, local: bool) -> str:
        if usable is not None and not local:
            files = {file.rfilename for file in hub.HfApi().model_info(given[1], revision=given[2]).siblings}
            if not usable(files):
                return given[0]
        return hub.snapshot_download(given[1], revision=given[2], allow_patterns=list(patterns), local_files_only=local)

    return from_hub(
        get,
        f"there is no folder {given[0]!r}, and it cannot be downloaded from the Hugging Face hub",
        "Give a local folder, a network, or for a private model a token (`hf auth login`, HF_TOKEN)",
    )


def from_hub(get: Callable[[Any, bool], str], failed: str, way_out: str) -> Path:
    """What ``get(huggingface_hub, whether only its cache can be had)`` finds."""
    with need("backbones", "the Hugging Face hub needs huggingface_hub"):
        import huggingface_hub.errors
    hub: Any = huggingface_hub
    unreachable = not hub_reachable()
    try:
        return Path(get(hub, unreachable))
    except (OSError, ValueError, RuntimeError, hub.errors.HTTPError) as error:
        reason = "no connection to the hub, and no copy in its cache" if unreachable else hub_problem(error)
        raise UserError(f"{failed}: {reason}. {way_out}") from error
