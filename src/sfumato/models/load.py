"""Loading any model: a run folder, a model that sfumato exported, or a published one."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from tokenizers import Tokenizer

from sfumato import __version__
from sfumato.distances import get_distance
from sfumato.encoders.encoder_registry import encoder_entry
from sfumato.errors import UserError
from sfumato.matching import SampledLogits
from sfumato.models.model import Model
from sfumato.models.pretrained import CONFIG, TOKENIZER, WEIGHTS, download, load_pretrained, read_config
from sfumato.models.pretrained_tensors import read_checkpoint
from sfumato.models.recipe import ModelConfig
from sfumato.models.run import (
    RECIPE,
    Assets,
    build_model,
    check_weights,
    load_calibration,
    load_run,
    load_tensors,
    read_tokenizer,
)


def load_model(source: str | Path, *, tokenizer: Tokenizer | None = None, device: torch.device | str = "cpu") -> Model:
    """Load any model: a run folder, a model that sfumato exported, or a published model of PCME++, ProLIP or PCME."""
    folder = Path(source)
    if (folder / RECIPE).is_file():
        return load_run(folder, device=device)
    if not folder.exists():
        folder = download(str(source))
    if folder.is_dir() and "sfumato" in (config := read_config(folder, str(source))):
        return _exported(folder, config, str(source), device)
    return load_pretrained(source, tokenizer=tokenizer, device=device)


def _exported(folder: Path, config: dict[str, Any], source: str, device: torch.device | str) -> Model:
    """The model in a folder that :func:`sfumato.workflows.export.export_run` wrote."""
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
    what = f"{folder / WEIGHTS}: does not fit its {CONFIG}"
    check_weights(folder / WEIGHTS, model_config, assets, what)
    model = build_model(model_config, assets)
    load_tensors(model, read_checkpoint(folder / WEIGHTS), what)
    return Model(
        model=model.to(device).eval(),
        distance=known["distance"],
        logit_scale=known["logit_scale"],
        logit_bias=known["logit_bias"],
        source=source,
        kind=f"exported by sfumato {config['sfumato']}, {config.get('name', 'without a name')}",
        calibrated=known["calibrated"],
        calibration=load_calibration(folder),
        sampled_logits=SampledLogits(*logits) if logits else None,
    )
