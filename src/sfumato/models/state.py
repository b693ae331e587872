"""The state of modules and optimisers in safetensors files, and what does not fit."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from sfumato.errors import UserError, first_line
from sfumato.files import write_atomically


def save_state(
    path: str | Path, modules: dict[str, nn.Module], optimiser: torch.optim.Optimizer | None, about: dict[str, Any]
) -> None:
    """Write modules, optimiser and a JSON-able note into one safetensors file, atomically."""
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
    """Read a file of :func:`save_state` back into the same modules and optimiser."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}; expected the folder of a finished or running `sfumato train`")
    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads((file.metadata() or {})["state"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        about: dict[str, Any] = dict(note["about"])
        numbers: dict[str, float] = dict(note["optimiser"])
    except (SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: damaged, or not a checkpoint of sfumato ({first_line(error)}); copy the folder again, or train"
            " into a new one"
        ) from error
    for name, module in modules.items():
        own = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
        load_tensors(module, own, f"{path}: does not fit the {name} of this recipe", USE_ITS_OWN)
    if optimiser is not None:
        try:
            state: dict[int, dict[str, Any]] = {}
            for key, value in (tensors | numbers).items():
                if key.startswith("optimiser/") or key in numbers:
                    i, what = key.removeprefix("optimiser/").split("/")
                    state.setdefault(int(i), {})[what] = value
            optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise UserError(
                f"{path}: the state of the optimiser is damaged, or belongs to another one ({first_line(error)}); copy"
                " the folder again, or train into a new one"
            ) from error
    return about


USE_ITS_OWN = "; use the recipe that is saved beside it"


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], what: str, way_out: str = "") -> None:
    """Load tensors into a module; unless their names and shapes are its own, an error begins with ``what``."""
    came, expected = ({(key, value.shape) for key, value in some.items()} for some in (tensors, module.state_dict()))
    if wrong := sorted({key for key, _ in came ^ expected}):
        raise misfit(what, wrong, way_out)
    module.load_state_dict(tensors)


def misfit(what: str, wrong: Sequence[str], way_out: str = "") -> UserError:
    """The error of tensors whose names or shapes differ; ``wrong`` are their names."""
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return UserError(f"{what}: tensor {wrong[0]!r} differs{more}{way_out}")
