"""A model given away is the model that was trained, to the bit."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.raising import raises
from support.tiny_models import tiny_architecture

from sfumato.errors import UserError
from sfumato.models.build import Assets, build_loss, build_model, fresh_tokenizer, save_state
from sfumato.models.recipe import check_recipe, save_recipe
from sfumato.models.run import load_model, load_run, save_assets
from sfumato.workflows.export import export_run

TEXTS = ["a red circle", "some bar in blue", "never seen before"]


@pytest.fixture(scope="module")
def run(toy):
    return toy / "run"


def assert_embeds_alike(ours, theirs, toy):
    picture = next((toy / "data").glob("*.png")).read_bytes()
    for name, items in (("embed_texts", TEXTS), ("embed_images", [picture])):
        a, b = (getattr(model, name)(items) for model in (ours, theirs))
        assert torch.equal(a.mean, b.mean) and torch.equal(a.log_var, b.log_var)


def test_round_trip(toy, run, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation-*.json"))
    out = export_run(run, tmp_path / "given" / "away")
    names = {"README.md", "calibration.json", "config.json", "model.safetensors", "tokenizer.json"}
    assert {p.name for p in out.iterdir()} == names and not list(out.parent.glob(".*"))
    card = (out / "README.md").read_text()
    assert "Not evaluated." in card and "fitted on held-out pairs" in card and "# toy" in card
    assert str(toy) not in card + (out / "config.json").read_text()
    trained, loaded = load_run(run), load_model(out)
    assert not loaded.model.training and loaded.calibrated is trained.calibrated is True
    assert (loaded.logit_scale, loaded.logit_bias) == (trained.logit_scale, trained.logit_bias)
    assert loaded.calibration == trained.calibration == load_model(run).calibration is not None
    assert loaded.distance == "csd" and "toy" in loaded.kind
    assert_embeds_alike(trained.model, loaded.model, toy)
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == trained.model.state_dict().keys(), "neither the loss nor the optimiser"
    assert (out / "model.safetensors").stat().st_size < (run / "last.safetensors").stat().st_size / 2
    monkeypatch.chdir(out := export_run(run, tmp_path / "out"))
    Image.new("RGB", (30, 20), "red").save("photo.jpg")
    exec(re.search(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)[1], {})
    values = [float(x) for x in re.findall(r"\d\.\d+(?:e-?\d+)?", capsys.readouterr().out)]
    assert len(values) == 2 and all(0 <= value <= 1 for value in values)


def made_by_hand(folder: Path, model: dict) -> Path:
    """A run folder without training."""
    recipe = check_recipe({"name": "by-hand", "model": model}, "test")
    folder.mkdir()
    torch.manual_seed(0)
    tokenizer = fresh_tokenizer(recipe.model, ["a red circle", "some bar in blue"] * 3)
    made = build_model(recipe.model, Assets(tokenizer))
    save_recipe(recipe, folder / "recipe.toml")
    save_state(folder / "model.safetensors", {"model": made, "loss": build_loss(recipe)}, None, {})
    save_assets(folder, tokenizer, made)
    return folder


@pytest.mark.parametrize("variance_token", [False, True])
def test_round_trip_of_transformers(variance_token, toy, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="the extra backbones is not installed")
    tiny_architecture(monkeypatch)
    shape = {"kind": "clip", "architecture": "ViT-Ti/16", "variance_token": variance_token}
    model = {"dim": 8, "image": {**shape, "size": 32}, "text": {**shape, "vocabulary": 60, "max_tokens": 12}}
    folder = made_by_hand(tmp_path / "run", model)
    out = export_run(folder, tmp_path / "out")
    assert_embeds_alike(load_run(folder).model, load_model(out).model, toy)
    assert "as the loss learnt them, not calibrated" in (out / "README.md").read_text()


def test_pretrained_weights_are_inside_and_frozen_backbones_keep_their_name(toy, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra backbones is not installed")
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    transformers.CLIPVisionModel(config).save_pretrained(tmp_path / "my-clip")
    image = {"kind": "clip", "weights": str(tmp_path / "my-clip")}
    folder = made_by_hand(tmp_path / "run", {"dim": 8, "image": image})
    out, trained = export_run(folder, tmp_path / "out"), load_run(folder)
    shutil.rmtree(tmp_path / "my-clip")
    assert_embeds_alike(trained.model, load_model(out).model, toy)
    assert str(tmp_path) not in (out / "config.json").read_text() + (out / "README.md").read_text()
    assert "my-clip" in (out / "README.md").read_text()
    image = {"kind": "frozen", "backbone": "efficientnet-lite0", "size": 32}
    folder = made_by_hand(tmp_path / "frozen", {"dim": 8, "image": image})
    out = export_run(folder, tmp_path / "given")
    assert not any("encoder" in key for key in load_file(out / "model.safetensors") if key.startswith("image."))
    assert "Frozen backbone, loaded by its name: `efficientnet-lite0`" in (out / "README.md").read_text()
    assert_embeds_alike(load_run(folder).model, load_model(out).model, toy)


def test_a_full_folder_is_left_alone_and_a_killed_export_leaves_nothing(run, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("dear")
    raises(UserError, "exists already", export_run, run, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    assert load_model(export_run(run, tmp_path / "empty")).calibrated
    raises(UserError, "is not a run folder", export_run, tmp_path / "full", tmp_path / "new")
    assert not (tmp_path / "new").exists()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("sfumato.workflows.export.write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        export_run(run, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty"}


def test_folders_that_are_not_whole(run, tmp_path):
    out = export_run(run, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    newer = {**config, "sfumato": "9.9", "model": {**config["model"], "telepathy": True}}
    for change, message in (
        (newer, r"config.json of sfumato 9.9 does not fit this version.*telepathy"),
        ({k: v for k, v in config.items() if k != "distance"}, "distance: missing"),
        (
            config | {"model": config["model"] | {"dim": 8}},
            r"does not fit its config.json: tensor 'image.head.*differs",
        ),
    ):
        (out / "config.json").write_text(json.dumps(change))
        raises(UserError, message, load_model, out)
    (out / "config.json").write_text(json.dumps(config))
    for name in ("calibration.json", "tokenizer.json"):
        (out / name).unlink()
        raises(UserError, f"{name} is missing; the folder is incomplete", load_model, out)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, tmp_path / "foreign" / "model.safetensors")
    raises(UserError, r"not that of a PCME\+\+ or ProLIP model", load_model, tmp_path / "foreign")
