"""The folder of a collection: its settings, the centre and the calibration, and what else a folder may hold."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from sfumato.calibration.calibrator import Calibration
from sfumato.errors import UserError
from sfumato.files import is_unused
from sfumato.search.atomic_folder import load_folder, save_folder
from sfumato.search.exact import lifted_dim

KIND = "sfumato-collection-1"

_CENTRE, _CALIBRATION = "centre.safetensors", "calibration.json"


def write_settings(folder: Path, settings: Mapping[str, Any], centre: Tensor, calibration: Calibration | None) -> None:
    """Write the settings beside what the store has put into the folder. centre (d,)."""

    def write(data: Path) -> None:
        save_file({"centre": centre.contiguous()}, data / _CENTRE)
        if calibration is not None:
            calibration.save(data / _CALIBRATION)

    ours = tuple(p.name for p in folder.iterdir()) if folder.exists() else ()
    save_folder(folder, KIND, {**settings, "calibration": calibration is not None}, write, beside=ours)


def read_settings(folder: Path) -> tuple[dict[str, Any], Tensor, Calibration | None]:
    """The settings, the centre (d,) and the calibration; a ValueError says what is damaged."""

    def read(data: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], Tensor, Calibration | None]:
        calibration = Calibration.load(data / _CALIBRATION) if settings["calibration"] else None
        centre = load_file(data / _CENTRE)["centre"]
        texts, known = (settings["store"], settings["fingerprint"]), settings["direction"] in ("t2i", "i2t")
        known &= 0 < settings["logit_scale"] < math.inf and math.isfinite(settings["logit_bias"])
        fits = known and isinstance(settings["about"], dict) and all(isinstance(one, str) for one in texts)
        lifted_dim(settings["d"], settings["distance"])
        if not fits or centre.shape != (settings["d"],):
            raise ValueError(f"{folder}: damaged, its settings do not fit together; build it again")
        return settings, centre, calibration

    return load_folder(folder, KIND, read)


def refuse_index(folder: str | Path) -> None:
    """Refuse a folder with an index, which earlier versions saved in a form of its own."""
    if kind_of(folder) == "sfumato-index":
        raise UserError(
            f"{folder} holds an index of an earlier version, which this version does not read: index again:"
            " sfumato index RUN --images FOLDER --out NEW"
        )


def kind_of(folder: str | Path) -> str:
    """What a folder holds, without its version; "" if that cannot be read."""
    try:
        kind = json.loads((Path(folder) / "manifest.json").read_bytes())["kind"]
        return str(kind.rpartition("-")[0])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""


def check_empty(folder: Path) -> None:
    """Raise an error if a folder is not empty."""
    if not is_unused(folder):
        raise UserError(
            f"{folder} exists already; give a new or empty folder (sfumato index --add adds to a collection)"
        )
