"""A run folder that version 0.1 wrote still opens, and gives the numbers that 0.1 computed.

Version 0.1 trained the run on the toy data set for 40 epochs (dim 8, average pooling), embedded two texts and two
images with it, and evaluated it on the test split. Only the state to resume from was removed.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.toy import make_toy

from sfumato.models.embed import evaluate_run
from sfumato.models.recipe import load_recipe
from sfumato.models.run import load_run
from sfumato.workflows.export import load_model

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(scope="module")
def expected():
    return json.loads((FIXTURES / "run-0.1-expected.json").read_text())


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A copy of the run beside the data that its recipe names, data.path="data"."""
    make_toy(tmp_path)
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(FIXTURES / "run-0.1", tmp_path / "run"))


def assert_close(embeddings, expected):
    for name in ("mean", "log_var"):
        torch.testing.assert_close(getattr(embeddings, name), torch.tensor(expected[name]), rtol=1e-6, atol=1e-6)


def test_the_run_embeds_what_it_embedded(run, expected):
    loaded = load_run(run)
    assert loaded.calibrated and loaded.distance == "csd"
    assert (loaded.logit_scale, loaded.logit_bias) == (expected["logit_scale"], expected["logit_bias"])
    assert_close(loaded.model.embed_texts(expected["texts"]), expected["text_embeddings"])
    images = [Path("data", name).read_bytes() for name in expected["images"]]
    assert_close(loaded.model.embed_images(images), expected["image_embeddings"])
    assert_close(load_model(run).model.embed_texts(expected["texts"]), expected["text_embeddings"])


def test_the_run_evaluates_to_the_same_scores(run, expected):
    result, path = evaluate_run(load_run(run), "test")
    before, after = expected["evaluation"], json.loads(path.read_text())
    assert (after["n_images"], after["n_texts"]) == (before["n_images"], before["n_texts"]) == (13, 26)
    for direction in ("i2t", "t2i"):
        for name, value in before[direction].items():
            assert after[direction][name] == pytest.approx(value, abs=1e-9), (direction, name)
    assert result.rsum == pytest.approx(before["rsum"], abs=1e-9) == 3.5


def test_its_recipe_is_read_unchanged(run):
    recipe = load_recipe(run / "recipe.toml", saved=True)
    assert recipe.data.equal_texts == "separate" == load_run(run).recipe.data.equal_texts
    assert load_recipe(run / "recipe.toml").data.equal_texts == "merged", "a recipe that nobody has run yet"
    assert (recipe.model.image.kind, recipe.model.image.width, recipe.model.text.vocabulary) == ("small", 2, 48)
    assert (recipe.data.source, recipe.data.path, recipe.variance_stage.epochs) == ("folder", "data", 0)
    assert (recipe.train.epochs, recipe.optim.lr, recipe.model.pooling) == (40, 1e-2, "average")
