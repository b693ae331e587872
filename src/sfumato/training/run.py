"""A run folder: everything that evaluation, indexing and search need, and nothing else.

recipe.toml           the resolved recipe            model.safetensors   the best weights, with the loss's logits
tokenizer.json        of its words or word pieces    last.safetensors    the state to resume from
encoders.json         the shape of its transformers  noise.npy           which image each noisy training pair got
log.jsonl             one line per epoch             calibration.json    what was fitted on the validation pairs
problems.jsonl        items left out, and why        evaluation-*.json   written by `sfumato evaluate`
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from sfumato.calibration import Calibration
from sfumato.encoders.dual import DualEncoder
from sfumato.errors import UserError
from sfumato.files import write_atomically, write_json
from sfumato.losses import MatchLoss
from sfumato.training.build import Assets, build_loss, build_model
from sfumato.training.checkpoint import load_state
from sfumato.training.config import Recipe, load_recipe

RECIPE, MODEL, LAST, LOG = "recipe.toml", "model.safetensors", "last.safetensors", "log.jsonl"
TOKENIZER, CALIBRATION, PROBLEMS = "tokenizer.json", "calibration.json", "problems.jsonl"
ENCODERS, NOISE = "encoders.json", "noise.npy"


@dataclass(frozen=True)
class Run:
    """A trained model as it lies in its folder.

    Attributes:
        folder: where it lies.
        recipe: how it was made.
        model: the dual encoder, in evaluation mode.
        loss: with its learnt logits.
        logit_scale, logit_bias: from distances to calibrated match probabilities.
        calibrated: whether these were fitted on held-out pairs; if not they are the loss's own.
        calibration: all that was fitted there; None if nothing was.
    """

    folder: Path
    recipe: Recipe
    model: DualEncoder
    loss: MatchLoss
    logit_scale: float
    logit_bias: float
    calibrated: bool
    calibration: Calibration | None = None

    @property
    def distance(self) -> str:
        """Name of the distance that the logits belong to."""
        return self.loss.distance.name


def load_run(folder: str | Path, *, device: torch.device | str = "cpu") -> Run:
    """Load the best weights of a run.

    Args:
        folder: of the run.
        device: where the model goes.

    Raises:
        UserError: the folder is not that of a run, or a file in it is missing or damaged.
        ValueError: calibration.json is damaged.
    """
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise UserError(
            f"{folder} is not a run folder (no {RECIPE} in it); make one with `sfumato train RECIPE --out {folder}`"
        )
    recipe = load_recipe(folder / RECIPE)
    if not (folder / MODEL).is_file():
        raise UserError(f"{folder} holds no weights yet: its training has not finished an epoch, or not all was copied")
    model = build_model(recipe.model, load_assets(folder, recipe))
    loss = build_loss(recipe)
    load_state(folder / MODEL, {"model": model, "loss": loss})
    (scale, bias), calibration = learnt_logits(loss), None
    if (folder / CALIBRATION).is_file():
        calibration = Calibration.load(folder / CALIBRATION)
        scale, bias = calibration.logit_scale, calibration.logit_bias
    calibrated = calibration is not None
    return Run(folder, recipe, model.to(device).eval(), loss.to(device).eval(), scale, bias, calibrated, calibration)


def save_assets(folder: Path, tokenizer: Tokenizer | None, model: DualEncoder) -> None:
    """Write what :func:`load_assets` reads."""
    if tokenizer is not None:
        write_atomically(folder / TOKENIZER, tokenizer.to_str(pretty=False))
    described = {
        side: encoder.description
        for side, encoder in (("image", model.image.encoder), ("text", model.text.encoder))
        if hasattr(encoder, "description")
    }
    if described:
        write_json(folder / ENCODERS, described)


def load_assets(folder: Path, recipe: Recipe) -> Assets:
    """The tokenizer of a run whose text encoder reads word pieces, and the descriptions of its transformers.

    Raises:
        UserError: a file is missing.
    """
    needed = {
        TOKENIZER: recipe.model.text.kind != "frozen",
        ENCODERS: recipe.model.image.kind in ("clip", "resnet") or recipe.model.text.kind == "clip",
    }
    for name, wanted in needed.items():
        if wanted and not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; the run folder is incomplete, copy it whole")
    return Assets(
        Tokenizer.from_file(str(folder / TOKENIZER)) if needed[TOKENIZER] else None,
        json.loads((folder / ENCODERS).read_text(encoding="utf-8")) if needed[ENCODERS] else {},
        trained=True,
    )


def learnt_logits(loss: MatchLoss) -> tuple[float, float]:
    """The (logit_scale, logit_bias) that a loss has learnt; 1 and 0 for losses without them."""
    logits = getattr(loss, "logits", None)
    if logits is None:
        return 1.0, 0.0
    return float(torch.as_tensor(logits.logit_scale).detach()), float(torch.as_tensor(logits.logit_bias).detach())
