"""Export of trained models to a folder in the layout of the Hugging Face hub, and loading of such a folder.

model.safetensors   the weights that embedding needs     config.json   section model of the recipe, distance and logits
tokenizer.json      its words or subword tokens          README.md     a model card
calibration.json    what was fitted on held-out pairs    encoder/      its frozen model, where no name finds it

`hf upload OWNER/NAME FOLDER` puts it on the hub.
"""

import fnmatch
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save as safetensors_bytes

from sfumato import __version__
from sfumato.errors import UserError
from sfumato.files import is_unused, new_folder, write_atomically, write_json
from sfumato.models.pretrained import CALIBRATION, CONFIG, ENCODER, ENCODER_FILES, TOKENIZER, WEIGHTS
from sfumato.models.run import Run, load_assets, load_run
from sfumato.models.sections import ModelConfig
from sfumato.workflows.model_card import model_card, without_folders

CARD = "README.md"


def export_run(run_folder: str | Path, out_folder: str | Path, *, license: str = "") -> Path:
    """Write a run's model as a folder that can be published or uploaded to a hub.

    A frozen backbone is in it if it comes from a folder; others are loaded by their name. It is written completely or
    not at all.
    """
    out = Path(out_folder)
    if not is_unused(out):
        raise UserError(f"{out} exists already; give a new or empty folder, or remove it")
    run = load_run(run_folder)
    with new_folder(out) as temporary:
        _write(run, temporary, license=license)
    return out


def _write(run: Run, folder: Path, *, license: str) -> None:
    """Write the files of a run's model into an empty folder."""
    assets, own = load_assets(run.folder, run.recipe), _local_encoder(run.recipe.model)
    config = {
        "sfumato": __version__,
        "name": run.recipe.name,
        "model": _without_local_paths(run.recipe.model, own),
        "encoders": dict(assets.encoders),
        "distance": run.loss.distance.name,
        "logit_scale": run.logit_scale,
        "logit_bias": run.logit_bias,
        "calibrated": run.calibrated,
        **({} if run.sampled_logits is None else {"sampled_logits": list(run.sampled_logits)}),
    }
    weights = {key: value.detach().cpu().contiguous() for key, value in run.model.state_dict().items()}
    write_atomically(folder / WEIGHTS, safetensors_bytes(weights, {"format": "pt"}))
    if assets.tokenizer is not None:
        write_atomically(folder / TOKENIZER, (run.folder / TOKENIZER).read_bytes())
    if run.calibration is not None:
        run.calibration.save(folder / CALIBRATION)
    if own is not None:
        _copy_encoder(own, folder / ENCODER)
    write_atomically(folder / CARD, model_card(run, license=license, own_encoder=own is not None))
    write_json(folder / CONFIG, config)
    folder.chmod(run.folder.stat().st_mode & 0o777)


def _copy_encoder(source: Path, target: Path) -> None:
    """Copy what the frozen model is loaded from, and nothing else that lies in its folder."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in ENCODER_FILES):
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.relative_to(source))


def _local_encoder(config: ModelConfig) -> Path | None:
    """The folder of the frozen model of both sides, if it comes from one."""
    names = {config.image.frozen_backbone, config.text.frozen_backbone}
    folder = Path(names.pop())
    return folder if not names and folder.is_absolute() and folder.is_dir() else None


def _without_local_paths(config: ModelConfig, own: Path | None) -> dict[str, Any]:
    """Section ``model`` as JSON, without local folders of pre-trained weights: the weights are in the model."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    for side, section in (("image", config.image), ("text", config.text)):
        for key in section.path_fields:
            if found := values[side].get(key):
                values[side][key] = ENCODER if own and Path(found) == own else without_folders(found)
    return values
