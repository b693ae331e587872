"""A run folder: everything that evaluation, indexing and search need, and nothing else.

recipe.toml           the resolved recipe            model.safetensors   the best weights, with the loss's logits
tokenizer.json        of its words or word pieces    last.safetensors    the state to resume from
encoders.json         the shape of its transformers  noise.npy           which image each noisy training pair got
log.jsonl             one line per epoch             calibration.json    what was fitted on the validation pairs
problems.jsonl        items left out, and why        evaluation-*.json   written by `sfumato evaluate`
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from tokenizers import Tokenizer
from torch import Tensor, nn

from sfumato.calibration.calibrator import Calibration
from sfumato.encoders.dual import DualEncoder
from sfumato.errors import UserError
from sfumato.files import write_atomically, write_json
from sfumato.losses import MatchLoss
from sfumato.models.build import Assets, build_loss, build_model
from sfumato.models.recipe import Recipe, load_recipe

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


def save_state(
    path: str | Path, modules: dict[str, nn.Module], optimiser: torch.optim.Optimizer | None, about: dict[str, Any]
) -> None:
    """Write modules, optimiser and a JSON-able note into one safetensors file, atomically.

    Args:
        path: the file.
        modules: name -> module; saved as "name/key".
        optimiser: its moments and step counts, if given; settings come from the recipe.
        about: epoch, best score and the like.
    """
    tensors = {f"{name}/{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    numbers: dict[str, float] = {}
    if optimiser is not None:
        for i, state in optimiser.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser/{i}/{key}"] = value
                else:
                    numbers[f"{i}/{key}"] = value
    detached = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    # A single entry: the library writes several in an order that changes from process to process, and equal runs would differ.
    metadata = {"state": json.dumps({"about": about, "optimiser": numbers})}
    write_atomically(path, safetensors_bytes(detached, metadata))


def load_state(
    path: str | Path, modules: dict[str, nn.Module], optimiser: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Read a file of :func:`save_state` back into the same modules and optimiser; returns the note.

    Raises:
        UserError: the file is missing or damaged, or belongs to another model (the first differing name is given).
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}; is this the folder of a finished or running `sfumato train`?")
    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads((file.metadata() or {})["state"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        about: dict[str, Any] = note["about"]
        numbers: dict[str, float] = note["optimiser"]
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: damaged, or not a checkpoint of sfumato ({error})") from error
    for name, module in modules.items():
        own = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
        expected = module.state_dict()
        wrong = [
            k
            for k in sorted(own.keys() | expected.keys())
            if k not in own or k not in expected or own[k].shape != expected[k].shape
        ]
        if wrong:
            raise UserError(
                f"{path}: does not fit this recipe's {name}: {wrong[0]!r} and {len(wrong) - 1} more differ; use the recipe saved beside it"
            )
        module.load_state_dict(own)
    if optimiser is not None:
        state: dict[int, dict[str, Any]] = {}
        for key, value in (tensors | numbers).items():
            if key.startswith("optimiser/") or key in numbers:
                i, what = key.removeprefix("optimiser/").split("/")
                state.setdefault(int(i), {})[what] = value
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return about


def weights_digest(model: DualEncoder) -> str:
    """What tells a model from one that was trained anew in the same folder."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
