"""A run folder: everything that evaluation, indexing and search need, and nothing else.

recipe.toml       the resolved recipe                    model.safetensors  the best weights, with the loss's logits
tokenizer.json    its words or subword tokens            last.safetensors   the state to resume from
encoders.json     descriptions of its encoders           noise.npy          which image each noisy training pair got
log.jsonl         one line per epoch                     calibration.json   what was fitted on the validation pairs
problems.jsonl    items left out, with their errors      evaluation-*.json  written by `sfumato evaluate`
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
from sfumato.encoders.encoder_registry import encoder_entry
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
    """A trained model, loaded from its run folder.

    Attributes:
        folder: the run folder.
        recipe: the resolved recipe.
        model: the dual encoder, in evaluation mode.
        loss: the loss with its learnt logits.
        logit_scale, logit_bias: match probability = sigmoid(logit_bias - logit_scale * distance).
        calibrated: whether these two were fitted on held-out pairs; otherwise they are the loss's own.
        calibration: everything that was fitted on held-out pairs; None if nothing was.
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
        folder: the run folder.
        device: device of the model.

    Returns:
        The run, with its model in evaluation mode.

    Raises:
        UserError: the folder is not a run folder, or a file in it is missing or damaged.
        ValueError: calibration.json is damaged.
    """
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise UserError(
            f"{folder} is not a run folder (no {RECIPE} in it); make one with `sfumato train RECIPE --out {folder}`"
        )
    recipe = load_recipe(folder / RECIPE)
    if not (folder / MODEL).is_file():
        raise UserError(
            f"{folder} has no weights. Its training has not finished an epoch, or the folder was copied incompletely"
        )
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
    """Write the assets that :func:`load_assets` reads.

    Args:
        folder: the run folder.
        tokenizer: of the text encoder, if it has one.
        model: whose encoders are described.
    """
    if tokenizer is not None:
        write_atomically(folder / TOKENIZER, tokenizer.to_str(pretty=False))
    described = {
        side: encoder.description
        for side, encoder in (("image", model.image.encoder), ("text", model.text.encoder))
        if encoder.description is not None
    }
    if described:
        write_json(folder / ENCODERS, described)


def load_assets(folder: Path, recipe: Recipe) -> Assets:
    """The tokenizer of a run and the descriptions of its encoders, if it has them.

    Args:
        folder: the run folder.
        recipe: its recipe.

    Returns:
        The assets that :func:`~sfumato.models.build.build_model` needs for a trained model.

    Raises:
        UserError: a file is missing.
    """
    image, text = recipe.model.image, recipe.model.text
    needed = {
        TOKENIZER: encoder_entry("text", text.kind).tokenizer is not None,
        ENCODERS: image.needs_description or text.needs_description,
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
    """The match logits that a loss has learnt.

    Args:
        loss: any loss.

    Returns:
        (logit_scale, logit_bias); (1, 0) for losses without match logits.
    """
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
    # A single entry, because the order of several differs between processes, so files of equal runs would differ.
    metadata = {"state": json.dumps({"about": about, "optimiser": numbers})}
    write_atomically(path, safetensors_bytes(detached, metadata))


def load_state(
    path: str | Path, modules: dict[str, nn.Module], optimiser: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Read a file of :func:`save_state` back into the same modules and optimiser.

    Args:
        path: the file.
        modules: name -> module, as they were saved.
        optimiser: the same kind of optimiser over the same parameters, if its state is wanted.

    Returns:
        The note ``about`` of :func:`save_state`.

    Raises:
        UserError: the file is missing or damaged, or belongs to another model; the message names the first difference.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}; expected the folder of a finished or running `sfumato train`")
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
                f"{path}: does not fit the {name} of this recipe: {wrong[0]!r} and {len(wrong) - 1} more tensors"
                " differ; use the recipe that is saved beside it"
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
    """A hash of a model's weights, which changes when the model is trained again in the same folder.

    Args:
        model: the model.

    Returns:
        16 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
