"""Export of trained models to a folder in the layout of the Hugging Face hub, and loading of such a folder.

model.safetensors   the weights that embedding needs     config.json   section model of the recipe, distance and logits
tokenizer.json      its words or subword tokens          README.md     a model card
calibration.json    what was fitted on held-out pairs
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save as safetensors_bytes
from tokenizers import Tokenizer

from sfumato import __version__
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import EncoderConfig
from sfumato.encoders.encoder_registry import encoder_entry
from sfumato.errors import UserError
from sfumato.files import is_unused, new_folder, read_json, write_atomically, write_json
from sfumato.matching import SampledLogits
from sfumato.models.embed import sampled_logits
from sfumato.models.pretrained import (
    CALIBRATION,
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    PretrainedModel,
    download,
    load_pretrained,
    read_config,
)
from sfumato.models.pretrained_tensors import read_checkpoint
from sfumato.models.recipe import ModelConfig
from sfumato.models.run import (
    RECIPE,
    Assets,
    Run,
    build_model,
    load_assets,
    load_calibration,
    load_run,
    misfits,
    read_tokenizer,
    some_of,
)

CARD = "README.md"


def export_run(run_folder: str | Path, out_folder: str | Path) -> Path:
    """Write a run's model as a folder that can be published or uploaded to a hub.

    Frozen backbones are not in it: they are loaded by their name in the recipe.

    Args:
        run_folder: folder of a training run.
        out_folder: a new or empty folder. It is written completely or not at all.

    Returns:
        out_folder.

    Raises:
        UserError: run_folder is not a run folder, or out_folder is not empty.
    """
    out = Path(out_folder)
    if not is_unused(out):
        raise UserError(f"{out} exists already; give a new or empty folder, or remove it")
    run = load_run(run_folder)
    assets = load_assets(run.folder, run.recipe)
    config = {
        "sfumato": __version__,
        "name": run.recipe.name,
        "model": _without_local_paths(run.recipe.model),
        "encoders": dict(assets.encoders),
        "distance": run.loss.distance.name,
        "logit_scale": run.logit_scale,
        "logit_bias": run.logit_bias,
        "calibrated": run.calibrated,
        **({"sampled_logits": list(logits)} if (logits := sampled_logits(run)) is not None else {}),
    }
    weights = {key: value.detach().cpu().contiguous() for key, value in run.model.state_dict().items()}
    with new_folder(out) as temporary:
        write_atomically(temporary / WEIGHTS, safetensors_bytes(weights, {"format": "pt"}))
        if assets.tokenizer is not None:
            write_atomically(temporary / TOKENIZER, (run.folder / TOKENIZER).read_bytes())
        if run.calibration is not None:
            run.calibration.save(temporary / CALIBRATION)
        write_atomically(temporary / CARD, model_card(run))
        write_json(temporary / CONFIG, config)
        temporary.chmod(run.folder.stat().st_mode & 0o777)
    return out


def load_exported(folder: str | Path, *, device: torch.device | str = "cpu") -> PretrainedModel:
    """Load a folder that :func:`export_run` wrote.

    Args:
        folder: the folder.
        device: device of the model.

    Returns:
        The model, whose embeddings are bit-equal to those of the run, with its distance, logits and calibration.

    Raises:
        UserError: the folder holds something else or is incomplete, or a newer sfumato wrote it.
    """
    folder = Path(folder)
    config = read_config(folder, str(folder))
    if "sfumato" not in config:
        raise UserError(f"{folder}: not a model that sfumato exported; load it with load_model")
    try:
        model_config = ModelConfig.model_validate(config["model"])
        known = {key: config[key] for key in ("encoders", "distance", "logit_scale", "logit_bias", "calibrated")}
        numbers = (known["logit_scale"], known["logit_bias"])
        logits = config.get("sampled_logits", [])
        numbers += tuple(logits) if isinstance(logits, list) and len(logits) in (0, 3) else ("",)
        if not isinstance(known["encoders"], dict) or not all(isinstance(one, int | float) for one in numbers):
            raise UserError(f"{folder}: {CONFIG} is damaged: encoders must be an object, and the logits numbers")
        get_distance(str(known["distance"]))
    except (ValidationError, KeyError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": error.args, "msg": "missing"}
        raise UserError(
            f"{folder}: {CONFIG} of sfumato {config['sfumato']} does not fit this version, {__version__}:"
            f" {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    tokenizer = folder / TOKENIZER
    if encoder_entry("text", model_config.text.kind).tokenizer and not tokenizer.is_file():
        raise UserError(f"{tokenizer} is missing; the folder is incomplete, copy it whole")
    own = read_tokenizer(tokenizer) if tokenizer.is_file() else None
    assets = Assets(own, known["encoders"], trained=True)
    if wrong := misfits(folder / WEIGHTS, model_config, assets):
        raise UserError(f"{folder / WEIGHTS}: does not fit its {CONFIG}: {some_of(wrong, 'tensor')}")
    model = build_model(model_config, assets)
    _load(model, read_checkpoint(folder / WEIGHTS), folder / WEIGHTS)
    return PretrainedModel(
        model.to(device).eval(),
        known["logit_scale"],
        known["logit_bias"],
        known["distance"],
        f"{folder} (sfumato {config['sfumato']}, {config.get('name', 'without a name')})",
        calibrated=known["calibrated"],
        calibration=load_calibration(folder),
        sampled_logits=SampledLogits(*logits) if logits else None,
    )


def load_model(
    name_or_folder: str | Path, *, tokenizer: Tokenizer | None = None, device: torch.device | str = "cpu"
) -> PretrainedModel:
    """Load any model: a run folder, a model that sfumato exported, or a published model of PCME++ or ProLIP.

    Args:
        name_or_folder: a local folder or file, or a name on the Hugging Face hub.
        tokenizer: replaces the tokenizer of a published model. Other models have their tokenizer in their folder.
        device: device of the model.

    Returns:
        The model in evaluation mode, with its distance, logits and calibration.

    Raises:
        UserError: see :func:`load_exported` and :func:`~sfumato.models.pretrained.load_pretrained`.
    """
    folder = Path(name_or_folder)
    if (folder / RECIPE).is_file():
        run = load_run(folder, device=device)
        return PretrainedModel(
            run.model,
            run.logit_scale,
            run.logit_bias,
            run.loss.distance.name,
            f"{folder} (a run of sfumato, {run.recipe.name})",
            calibrated=run.calibrated,
            calibration=run.calibration,
            unfamiliar=run.unfamiliar,
            sampled_logits=sampled_logits(run),
        )
    if not folder.exists():
        folder = download(str(name_or_folder))
    if folder.is_dir() and "sfumato" in read_config(folder, str(name_or_folder)):
        return load_exported(folder, device=device)
    return load_pretrained(name_or_folder, tokenizer=tokenizer, device=device)


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
    needs = [f"- Frozen backbone, loaded by its name: `{name}`" for name in backbones]
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
            "from sfumato import get_distance, match_probability",
            "from sfumato.workflows.export import load_model",
            "",
            'published = load_model(".")  # this folder, or its name on the hub',
            f"images = published.model.embed_images([{example[0]}])",
            f"texts = published.model.embed_texts([{example[1]}])",
            "distances = get_distance(published.distance).matrix(images, texts)",
            "print(match_probability(distances, published.logit_scale, published.logit_bias))",
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


def _without_local_paths(config: ModelConfig) -> dict[str, Any]:
    """Section ``model`` as JSON, without local folders of pre-trained weights: the weights are in the model."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    for side, section in (("image", config.image), ("text", config.text)):
        for key in section.path_fields:
            if values[side].get(key):
                values[side][key] = _shown(values[side][key])
    return values


def _load(model: torch.nn.Module, tensors: dict[str, Any], path: Path) -> None:
    expected = {key: value.shape for key, value in model.state_dict().items()}
    came = {key: value.shape for key, value in tensors.items()}
    if wrong := sorted({key for key, _ in expected.items() ^ came.items()}):
        raise UserError(f"{path}: does not fit its {CONFIG}: {some_of(wrong, 'tensor')}")
    model.load_state_dict(tensors)
