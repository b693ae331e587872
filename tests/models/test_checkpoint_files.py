"""Files that training resumes from and foreign checkpoints: what was saved comes back, what is damaged is named."""

import json
import os
import re
import shutil
import time

import numpy as np
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
from sfumato.models.pretrained_tensors import read_checkpoint
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


def refuse_to_run(self, state):
    raise AssertionError("code of the file's class ran")


def test_tensors_settings_and_formats(tmp_path):
    state = {"weight": torch.arange(4.0)}
    save_file(state, tmp_path / "new.safetensors")
    torch.save(state, tmp_path / "zip.pt")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("new.safetensors", "zip.pt", "old.pth"):
        assert torch.equal(read_checkpoint(tmp_path / name)["weight"], state["weight"])
    values = {
        "float64": np.float64(0.1), "float32": np.float32(0.5), "int64": np.int64(-7), "bool": np.bool_(True),
        "swapped": np.array(3, dtype=">i4")[()],
    }  # fmt: skip
    torch.save({"metadata": values}, tmp_path / "pcme.pth")
    metadata = read_checkpoint(tmp_path / "pcme.pth")["metadata"]
    assert metadata == {key: value.item() for key, value in values.items()}
    assert {type(value) for value in metadata.values()} == {float, int, bool}


class Trap:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (self.target,))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_refused_and_does_not_run(zipped, tmp_path):
    target = tmp_path / "made-by-the-pickle"
    trap = {"state_dict": {"a": torch.ones(1)}, "trap": Trap(str(target))}
    torch.save(trap, tmp_path / "trap.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"trap.pt: holds a (posix|nt).mkdir, and reading that would run code"):
        read_checkpoint(tmp_path / "trap.pt")
    assert not target.exists()


class Own:
    pass


def test_damaged_files_files_of_something_else_and_foreign_classes(tmp_path):
    raises(UserError, "there is no checkpoint", read_checkpoint, tmp_path / "missing.pt")
    torch.save({"a": torch.ones(1000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for name, content in (
        ("cut.pt", whole[:-700]), ("empty.pt", b""), ("text.pt", b"hello world, this is no checkpoint"),
        ("cut.safetensors", b"\x10\0\0\0\0\0\0\0{"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        raises(UserError, f"{name}: damaged, or not a checkpoint", read_checkpoint, tmp_path / name)
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    old = (tmp_path / "old.pt").read_bytes()
    key = re.findall(rb"\d{6,}", old)[-1]  # Of the storage: once in the description of the tensor, once in a list.
    at = old.rindex(key)
    (tmp_path / "old.pt").write_bytes(old[:at] + key[::-1] + old[at + len(key) :])
    raises(UserError, r"old\.pt: damaged, or not a checkpoint", read_checkpoint, tmp_path / "old.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    raises(UserError, "holds a list, expected a dictionary", read_checkpoint, tmp_path / "list.pt")
    torch.save({"model": Own()}, tmp_path / "module.pt")
    with pytest.raises(UserError, match=r"holds a .*test_checkpoint_files.Own.*save only its state dict"):
        read_checkpoint(tmp_path / "module.pt")
