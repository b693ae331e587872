"""A tiny data set of coloured shapes, and a tiny recipe for it: a run takes a second or two."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from sfumato.models.build import save_state
from sfumato.models.recipe import Recipe

COLOURS, SHAPES = ("red", "green", "blue", "orange", "black", "purple"), ("circle", "square", "cross", "bar")
RECIPE = """
name = "toy"
[data]
source = "folder"
path = "{data}"
val_fraction = 0.25
test_fraction = 0.25
max_problem_fraction = 0.2
[model]
dim = 16
image = {{ kind = "small", size = 16, width = 4, augment = true }}
text = {{ kind = "small", vocabulary = 60, width = 16, dropout = 0.1 }}
[loss]
name = "pcmepp"
pseudo_positives_from = 1
[optim]
lr = 2e-3
warmup_epochs = 1
[train]
epochs = 3
batch_size = 8
seed = 3
threads = 1
"""


def make_toy(folder: Path, n_each: int = 2) -> Path:
    data = folder / "data"
    data.mkdir(parents=True)
    for k, (colour, shape) in enumerate(itertools.product(COLOURS, SHAPES)):
        for twin in range(n_each):
            picture = Image.new("RGB", (24, 24), "white")
            draw = ImageDraw.Draw(picture)
            x, y = 3 + twin % 3, 4 + twin // 3
            right, low = x + 16, y + 16
            if shape == "circle":
                draw.ellipse((x, y, right, low), fill=colour)
            elif shape == "cross":
                draw.line((x, y, right, low), fill=colour, width=4)
                draw.line((right, y, x, low), fill=colour, width=4)
            else:
                draw.rectangle((x, y, right, low) if shape == "square" else (x, 10, right, 14), fill=colour)
            picture.save(data / f"{k:02d}{twin}.png")
            (data / f"{k:02d}{twin}.txt").write_text(f"a {colour} {shape}\nsome {shape} in {colour}\n")
    recipe = folder / "toy.toml"
    recipe.write_text(RECIPE.format(data=data))
    return recipe


def assert_same_tensors(a: Path, b: Path) -> None:
    first, second = load_file(a), load_file(b)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def assert_same_runs(a: Path, b: Path) -> None:
    for name in ("last.safetensors", "model.safetensors"):
        assert_same_tensors(a / name, b / name)


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def fit_until(recipe: Recipe, folder: Path, stop: Callable[[dict[str, Any]], bool]) -> None:
    """A run that is interrupted right after it has saved a state of which this is true."""
    from sfumato.training.loop import fit

    def save(path, modules, optimiser, about):
        save_state(path, modules, optimiser, about)
        if path.name == "last.safetensors" and stop(about):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("sfumato.training.saving.save_state", save)
        fit(recipe, folder)


def make_two_methods(folder: Path) -> Path:
    from sfumato.models.recipe import load_recipe
    from sfumato.training.loop import fit

    recipe = make_toy(folder)
    for name in ("pcmepp", "infonce"):
        for seed in (0, 1):
            changes = [f"loss.name={name}", "train.epochs=1", f"train.seed={seed}"]
            fit(load_recipe(recipe, changes), folder / "runs" / f"{name}-{seed}")
    return recipe
