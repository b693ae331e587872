"""Export of trained models to a folder in the layout of the Hugging Face hub, and loading of such a folder.

model.safetensors   the weights that embedding needs     config.json   section model of the recipe, distance and logits
tokenizer.json      its words or subword tokens          README.md     a model card
calibration.json    what was fitted on held-out pairs    encoder/      its frozen model, where no name finds it
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save as safetensors_bytes

from sfumato import __version__
from sfumato.encoders.encoder_protocol import EncoderConfig
from sfumato.errors import UserError
from sfumato.files import is_unused, new_folder, read_json, write_atomically, write_json
from sfumato.models.pretrained import CALIBRATION, CONFIG, ENCODER, TOKENIZER, WEIGHTS
from sfumato.models.recipe import ModelConfig
from sfumato.models.run import Run, load_assets, load_run

CARD = "README.md"


def export_run(run_folder: str | Path, out_folder: str | Path) -> Path:
    """Write a run's model as a folder that can be published or uploaded to a hub.

    A frozen backbone is in it if it comes from a folder; others are loaded by their name. It is written completely or
    not at all.
    """
    out = Path(out_folder)
    if not is_unused(out):
        raise UserError(f"{out} exists already; give a new or empty folder, or remove it")
    run = load_run(run_folder)
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
    with new_folder(out) as temporary:
        write_atomically(temporary / WEIGHTS, safetensors_bytes(weights, {"format": "pt"}))
        if assets.tokenizer is not None:
            write_atomically(temporary / TOKENIZER, (run.folder / TOKENIZER).read_bytes())
        if run.calibration is not None:
            run.calibration.save(temporary / CALIBRATION)
        if own is not None:
            shutil.copytree(own, temporary / ENCODER)
        write_atomically(temporary / CARD, model_card(run))
        write_json(temporary / CONFIG, config)
        temporary.chmod(run.folder.stat().st_mode & 0o777)
    return out


def model_card(run: Run) -> str:
    """The model card of a run: a description of its model, its use, and its scores."""
    recipe, model = run.recipe, run.recipe.model
    kind = "a Gaussian with a diagonal covariance" if model.variance else "a point"
    logits = "fitted on held-out pairs" if run.calibrated else "as the loss learnt them, not calibrated"
    data = recipe.data.source + (f" ({Path(recipe.data.path).name})" if recipe.data.path else "")
    sides = (model.image, model.text)
    bases = _shown_once(side.base_model for side in sides)
    example = _example(model)
    backbones = _shown_once(side.frozen_backbone for side in sides)
    found = "in this folder" if _local_encoder(model) else "loaded by its name"
    needs = [f"- Frozen backbone, {found}: `{name}`" for name in backbones]
    return "\n".join(
        [
            "---",
            "library_name: sfumato",
            "tags: [image-text-retrieval, probabilistic-embeddings]",
            *(["base_model:", *(f"- {base}" for base in bases if "/" in base)] if any("/" in b for b in bases) else []),
            "---",
            "",
            f"# {recipe.name}",
            "",
            f"Image-text matching: every image and every text becomes {kind} in {model.dim} dimensions.",
            "",
            f"- Images: {_encoder(model.image)}; texts: {_encoder(model.text)}",
            *needs,
            f"- Loss: {recipe.loss.name}, distance `{run.loss.distance.name}`",
            f"- Training data: {data}",
            f"- Match probability: sigmoid({run.logit_bias:.4g} - {run.logit_scale:.4g} * distance), {logits}",
            "",
            "## How to use it",
            "",
            f"`pip install {_package(model)}`, then, in this folder:",
            "",
            "```python",
            "from sfumato import load",
            "",
            'model = load(".")  # this folder, or its name on the hub',
            f"print(model.probability([{example[1]}], [{example[0]}]))",
            "```",
            "",
            "## Scores",
            "",
            *_scores(run.folder),
            "",
            f"Written by sfumato {__version__}.",
            "",
        ]
    )


def _example(model: ModelConfig) -> tuple[str, str]:
    """An image and a text for the example of a model card."""
    if model.text.reads_embeddings:
        return 'open("embedding-of-a-photo.npy", "rb").read()', 'open("embedding-of-a-text.npy", "rb").read()'
    photo = "regions-of-a-photo.npy" if model.image.reads_regions else "photo.jpg"
    return f'open("{photo}", "rb").read()', '"a giraffe", "two people on a bench"'


def _scores(folder: Path) -> list[str]:
    found = sorted(folder.glob("evaluation-*.json"))
    if not found:
        return ["Not evaluated."]
    lines = [
        "In per cent; written by `sfumato evaluate`.",
        "",
        "| split | distance | images | texts | image to text R@1 | R@5 | R@10 | text to image R@1 | R@5 | R@10 | rsum"
        " |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for path in found:
        result = read_json(path)
        split = path.stem.removeprefix("evaluation-").removesuffix(f"-{result['distance']}")
        recalls = [result[way][f"recall@{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10)]
        shown = [f"{100 * value:.1f}" for value in (*recalls, result["rsum"])]
        lines.append(
            f"| {split} | {result['distance']} | {result['n_images']} | {result['n_texts']} | {' | '.join(shown)} |"
        )
    return lines


def _encoder(config: EncoderConfig) -> str:
    """A short description of the encoder of one side."""
    return f"{config.kind} ({_shown(config.origin)})" if config.origin else config.kind


def _shown_once(names: Iterable[str]) -> list[str]:
    """The distinct non-empty names, without local folders."""
    return list(dict.fromkeys(_shown(name) for name in names if name))


def _package(config: ModelConfig) -> str:
    """The package to install for a model."""
    extras = sorted(config.image.extras | config.text.extras, reverse=True)
    return f"'sfumato[{','.join(extras)}]'" if extras else "sfumato"


_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def _shown(name: str) -> str:
    """A hub name unchanged; for a local folder only its last component, because its path is private."""
    return name if _HUB_NAME.fullmatch(name) and not Path(name).exists() else Path(name).name


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
            if values[side].get(key):
                values[side][key] = ENCODER if own and Path(values[side][key]) == own else _shown(values[side][key])
    return values
