"""The state of a run in one file, written whole or not at all, without pickle."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from sfumato.errors import UserError
from sfumato.files import write_atomically


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
