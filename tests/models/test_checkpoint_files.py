"""The file that training resumes from: what was saved comes back, and a damaged one is named."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from sfumato.errors import UserError
from sfumato.models.run import load_state, save_state


def fresh():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def checkpoint(tmp_path):
    model, optimiser = fresh()
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    save_state(tmp_path / "last.safetensors", {"m": model}, optimiser, {"epoch": 4})
    return tmp_path / "last.safetensors", model, optimiser


def change(path, drop=(), **note):
    with safe_open(path, framework="pt") as file:
        state = json.loads(file.metadata()["state"])
        tensors = {name: file.get_tensor(name) for name in file.keys() if name not in drop}  # noqa: SIM118
    save_file(tensors, path, {"state": json.dumps({**state, **note})})


def test_what_was_saved_comes_back(checkpoint):
    path, model, optimiser = checkpoint
    change(path)  # The change itself is harmless.
    again, other = fresh()
    assert load_state(path, {"m": again}, other) == {"epoch": 4}
    assert torch.equal(again.weight, model.weight)
    torch.testing.assert_close(other.state_dict()["state"], optimiser.state_dict()["state"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ("m/bias",)}, "does not fit the m of this recipe: tensor 'bias' differs"),
        ({"about": 3}, "damaged, or not a checkpoint of sfumato"),
        ({"optimiser": [1]}, "damaged, or not a checkpoint of sfumato"),
        ({"drop": ("optimiser/0/step",)}, "the state of the optimiser is damaged"),
        ({"optimiser": {"a/step": 1.0}}, "the state of the optimiser is damaged"),
        ({"optimiser": {"step": 1.0}}, "the state of the optimiser is damaged"),
    ],
)
def test_what_does_not_fit_is_named(changes, message, checkpoint):
    path, _, _ = checkpoint
    change(path, **changes)
    model, optimiser = fresh()
    with pytest.raises(UserError, match=message):
        load_state(path, {"m": model}, optimiser)
