"""The file that training resumes from: what was saved comes back, and a damaged one is named; damaged run folders."""

import json
import shutil
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.raising import raises
from torch import nn

from sfumato.encoders.processors import train_tokenizer
from sfumato.errors import UserError
from sfumato.models import run
from sfumato.models.build import Assets, build_loss, build_model, load_state, save_state
from sfumato.models.recipe import Recipe, save_recipe
from sfumato.models.run import load_model, save_assets
from sfumato.workflows.export import export_run


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


def test_what_was_saved_comes_back_and_what_does_not_fit_is_named(checkpoint):
    path, model, optimiser = checkpoint
    change(path)  # The change itself is harmless.
    whole, (again, other) = path.read_bytes(), fresh()
    assert load_state(path, {"m": again}, other) == {"epoch": 4}
    assert torch.equal(again.weight, model.weight)
    torch.testing.assert_close(other.state_dict()["state"], optimiser.state_dict()["state"])
    for changes, message in (
        ({"drop": ("m/bias",)}, "does not fit the m of this recipe: tensor 'bias' differs"),
        ({"about": 3}, "damaged, or not a checkpoint of sfumato"),
        ({"optimiser": [1]}, "damaged, or not a checkpoint of sfumato"),
        ({"drop": ("optimiser/0/step",)}, "the state of the optimiser is damaged"),
        ({"optimiser": {"a/step": 1.0}}, "the state of the optimiser is damaged"),
        ({"optimiser": {"step": 1.0}}, "the state of the optimiser is damaged"),
    ):
        path.write_bytes(whole)
        change(path, **changes)
        again, other = fresh()
        raises(UserError, message, load_state, path, {"m": again}, other)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    encoders = {"image": {"kind": "small", "size": 16, "width": 4}, "text": {"kind": "small", "width": 16}}
    recipe = Recipe.model_validate({"name": "untrained", "model": {"dim": 8, **encoders}})
    tokenizer = train_tokenizer(["a red bird", "a blue fish"], 60)
    model = build_model(recipe.model, Assets(tokenizer, {}))
    (folder / "run").mkdir()
    save_recipe(recipe, folder / "run" / run.RECIPE)
    save_assets(folder / "run", tokenizer, model)
    save_state(folder / "run" / run.MODEL, {"model": model, "loss": build_loss(recipe)}, None, {"epoch": 1})
    export_run(folder / "run", folder / "exported")
    return folder


@pytest.mark.parametrize("kind", ["run", "exported"])
def test_weights_of_another_width_and_ids_beyond_the_tokenizer_are_refused(kind, untrained, tmp_path):
    folder = tmp_path / kind
    shutil.copytree(untrained / kind, folder)
    load_model(folder)
    path, width = (folder / "recipe.toml", "width = 16") if kind == "run" else (folder / "config.json", '"width": 16')
    text = path.read_text()
    assert text.count(width) == 1
    path.write_text(text.replace(width, width.replace("16", "25666")))  # 8 GB of random numbers.
    began = time.process_time()
    raises(UserError, r"does not fit .*text.*differs, and \d+ more", load_model, folder)
    assert time.process_time() - began < 2, "before the model is made"
    path.write_text(text)
    tokenizer = json.loads((folder / run.TOKENIZER).read_text())
    tokenizer["model"]["vocab"]["fish"] = 4441
    (folder / run.TOKENIZER).write_text(json.dumps(tokenizer))
    raises(UserError, r"the tokenizer is damaged: of its \d+ tokens, 'fish' has the id 4441", load_model, folder)
