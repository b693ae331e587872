"""A recipe that prefers another one where its weights can be had; the preferred one keeps the model's ranking."""

import json

import huggingface_hub
import numpy as np
import pytest
import torch

from sfumato.data.images import Problems
from sfumato.encoders import package_weights
from sfumato.encoders.joint import joint_backbone
from sfumato.encoders.package_weights import where_weights_are
from sfumato.models.embed import embed_split, load_split
from sfumato.models.recipe import find_recipe, load_recipe, save_recipe
from sfumato.models.run import load_run
from sfumato.training import loop as module
from sfumato.training.loop import preferred_recipe, what_to_expect

OWN, CLIP = "own-pictures", "own-pictures-clip"


def chosen(monkeypatch, tmp_path, place, *overrides):
    monkeypatch.setattr(module, "where_weights_are", lambda name: place)
    asked = load_recipe(find_recipe(OWN), overrides)
    recipe, reason = preferred_recipe(asked, overrides, tmp_path)
    return recipe.name, recipe, reason


def test_the_choice_follows_what_can_be_had_and_says_so_with_what_to_expect(monkeypatch, tmp_path):
    name, recipe, reason = chosen(monkeypatch, tmp_path, "cache", "data.path=mine", "train.seed=3")
    assert name == CLIP and recipe.data.path == "mine" and recipe.train.seed == 3
    assert "in the hub's cache" in reason and "model.image.backbone=efficientnet-lite0" in reason
    name, _, reason = chosen(monkeypatch, tmp_path, "hub")
    assert name == CLIP and "downloaded once" in reason
    name, _, reason = chosen(monkeypatch, tmp_path, "")
    assert name == OWN and "efficientnet-lite0 and minilm-l6-v2" in reason and "find less" in reason
    for override in ("model.image.backbone=efficientnet-lite0", "loss.alpha=0.1"):
        assert chosen(monkeypatch, tmp_path, "cache", override)[::2] == (OWN, "")
    recipe = load_recipe(find_recipe(OWN), ["data.path=my pictures"])
    few, many = what_to_expect(recipe, 400), what_to_expect(recipe, 3000)
    assert few.startswith("training on 400 images: below 3,000 it finds fewer of them than their captions")
    assert many.startswith("training on 3,000 images: with train.anchor=0.5")
    assert all(said.endswith("sfumato index --data 'my pictures' --out my-index") for said in (few, many))
    assert what_to_expect(load_recipe(find_recipe(OWN), ["train.start=", "train.anchor=0"]), 400) == ""


@pytest.mark.parametrize(("saved", "place"), [(OWN, "hub"), (CLIP, "")])
def test_a_run_that_exists_keeps_its_recipe(monkeypatch, tmp_path, saved, place):
    save_recipe(load_recipe(find_recipe(saved)), tmp_path / "recipe.toml")
    assert chosen(monkeypatch, tmp_path, place)[0] == saved


def test_where_weights_are(monkeypatch, tmp_path):
    monkeypatch.setattr(package_weights, "hub_reachable", lambda: False)
    assert where_weights_are("nobody/nothing") == ""
    monkeypatch.setattr(package_weights, "hub_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: "config.json")
    assert where_weights_are("nobody/nothing") == "hub"

    def fails(*args, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("a proxy answers, the hub does not")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    assert where_weights_are("nobody/nothing") == ""
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert where_weights_are("nobody/nothing") == "cache"


@pytest.mark.slow
def test_training_keeps_the_embeddings_of_the_model(taught, tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    manifest, folder = taught
    backbones = [f"model.{side}.backbone={folder}" for side in ("image", "text")]
    for out, more in (("points", []), ("gaussians", ["model.variance=true", "loss.name=pcmepp", "loss.alpha=0"])):
        changes = [f"data.path={manifest}", "model.dim=8", *backbones, "train.epochs=2", *more]
        fit(load_recipe(find_recipe(CLIP), changes), tmp_path / out)
        run = load_run(tmp_path / out)
        prepared = load_split(run.model, run.recipe.data, "test", Problems())
        images, _ = embed_split(run.model, prepared)
        raw = joint_backbone(str(folder), "image")([source.read_bytes() for source in prepared.data.images])
        expected = torch.nn.functional.normalize(torch.from_numpy(np.concatenate(raw)), dim=1)
        torch.testing.assert_close(images.mean, expected)
        assert bool(images.log_var.isneginf().all()) == (out == "points")


@pytest.mark.slow
def test_without_validation_images_the_captions_kept_back_calibrate(taught, tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    manifest, folder = taught
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    for k, line in enumerate(lines):
        words, number = line.pop("caption").rsplit(" ", 1)
        line["captions"] = [f"{words} {number}", *(f"{words} {100 + 4 * k + more}" for more in range(4))]
    manifest = manifest.with_name("five-captions.jsonl")  # Beside its photographs.
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    backbones = [f"model.{side}.backbone={folder}" for side in ("image", "text")]
    everything = ["data.val_fraction=0", "data.test_fraction=0", "train.epochs=1", "model.dim=8"]
    fit(load_recipe(find_recipe(CLIP), [f"data.path={manifest}", *backbones, *everything]), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.calibration.metadata["split"] == "wordings" and run.calibration.t2i.scores.n_gallery == 300
