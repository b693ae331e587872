"""Training: resumes to the bit, stops on NaN, reports bad items, keeps the best weights, prefers what can be had."""

import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path

import filelock
import huggingface_hub
import numpy as np
import pytest
import torch
from support.processes import Started, command
from support.raising import failing, raises
from support.toy import assert_same_runs, fit_until, log_of, make_toy

from sfumato import fit, load_recipe
from sfumato.calibration.fits import KNOWN_TEXTS, FitsCalibration, known_texts
from sfumato.data.images import Problems
from sfumato.encoders import package_weights
from sfumato.encoders.joint import joint_backbone
from sfumato.encoders.package_weights import sentence_vectors, where_weights_are
from sfumato.errors import UserError
from sfumato.models.embed import embed_split, embed_split_images, load_split
from sfumato.models.recipe import find_recipe, save_recipe
from sfumato.models.run import load_run
from sfumato.search.index import copy_gallery
from sfumato.training import loop as module
from sfumato.training import saving, validation
from sfumato.training import step as learner
from sfumato.training.loop import preferred_recipe, what_to_expect
from sfumato.training.step import DivergedError
from sfumato.workflows.export import export_run
from sfumato.workflows.index import create_collection, embed_source

pytestmark = pytest.mark.usefixtures("windows")  # What is open is in use.


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def run(toy):
    folder = toy.parent / "whole"
    return folder, fit(load_recipe(toy), folder)


def test_a_run_leaves_what_is_needed_and_learns(run):
    folder, result = run
    lines = log_of(folder)
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert "pseudo_positives_i2t" not in lines[0] and lines[1]["pseudo_positives_i2t"] > 0
    assert {"logit_scale", "logit_bias", "total_variance/text", "gradient_norm", "val/rsum"} <= lines[-1].keys()
    assert result["best_score"] == max(line["val/score"] for line in lines)
    assert (folder / "problems.jsonl").read_text() == ""
    loaded = load_run(folder)
    assert loaded.calibrated and loaded.logit_scale > 0
    calibration = loaded.calibration
    assert (calibration.logit_scale, calibration.logit_bias) == (loaded.logit_scale, loaded.logit_bias)
    assert calibration.metadata["split"] == "val" and calibration.metadata["distance"] == "csd"
    i2t, t2i = calibration.i2t.scores, calibration.t2i.scores
    assert len(i2t.nearest) == t2i.n_gallery and i2t.growth == 0
    assert len(t2i.nearest) == i2t.n_gallery and t2i.matches_per_query >= 1
    assert 0 < calibration.t2i.conformal_radius(0.5) <= calibration.t2i.conformal_radius(0.2)
    assert loaded.model.embed_texts(["a red circle"]).d == 16


def test_a_model_knows_what_it_was_trained_on(toy, run, tmp_path, monkeypatch):
    """Texts like those of the training are near, for its collections, too; an export holds none of them."""
    assert not (run[0] / KNOWN_TEXTS).exists() and not len(known_texts(run[0])), "few texts, other image features"
    with monkeypatch.context() as patched:
        patched.setattr(validation, "_MEASURED", "")
        patched.setattr(validation, "N_KNOWN", 20)
        fit(load_recipe(toy, ["train.epochs=1"]), tmp_path / "run")
    assert not (export_run(tmp_path / "run", tmp_path / "exported") / KNOWN_TEXTS).exists()
    parts, _ = embed_source(model := load_run(tmp_path / "run"), images=toy.parent / "data")
    with create_collection(model, next(parts), tmp_path / "index", texts=True) as made:
        copy_gallery(made, tmp_path / "copy").close()
    asked = sentence_vectors(["a red circle", "some bar in blue", "a lawyer reads a contract", "jazz at midnight"])
    for folder in ("run", "index", "copy"):
        known = known_texts(tmp_path / folder)
        near = FitsCalibration.nearness(asked, known)
        assert len(known) == 20 and np.linalg.norm(known, axis=1) == pytest.approx(1)
        assert near[:2].min() > 0.6 > 0.35 > near[2:].max()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [
    ["train.ema_decay=0.9", "model.text.dropout=0.3"], ["train.swa_epochs=2"],
    ["train.precision=float16", "optim.name=adamp", "train.micro_batch=4"],
], ids=["moving-average", "mean", "float16"])  # fmt: skip
def test_resumed_within_epochs_equals_uninterrupted(toy, tmp_path, capsys, overrides):
    fit(load_recipe(toy, overrides), tmp_path / "whole")
    recipe = load_recipe(toy, [*overrides, "train.save_minutes=1e-9"])
    for epoch, step in ((-1, 1), (0, 2)):
        stop = lambda about, place=(epoch, step): (about["epoch"], about.get("part", {}).get("step")) == place
        fit_until(recipe, tmp_path / "parts", stop)
    fit(recipe, tmp_path / "parts")
    said = capsys.readouterr().err
    assert all(f"resuming in epoch {n} of 3, after step {n} of 3" in said for n in (1, 2))
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")
    whole, parts = ([line | {"seconds": 0} for line in log_of(tmp_path / run)] for run in ("whole", "parts"))
    assert whole == parts and ("loss_scale" in whole[0]) == ("train.precision=float16" in overrides)


def test_an_epoch_in_work_is_saved_by_time(toy, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr("sfumato.training.saving.save_state", lambda path, *rest: saved.append(json.dumps(rest[-1])))
    for minutes, parts in ((0, 0), (10, 0), (1e-9, 2)):
        saved.clear()
        fit(load_recipe(toy, ["train.epochs=1", f"train.save_minutes={minutes}"]), tmp_path / str(minutes))
        steps = [about["part"]["step"] for about in map(json.loads, saved) if "part" in about]
        assert steps == list(range(1, 1 + parts))


@pytest.mark.slow
def test_a_scaled_gradient_that_overflows_float16_skips_its_step_and_halves_the_scale(toy, tmp_path, monkeypatch):
    """On this model the first step overflows by itself with the first scale, 2**16; two more are made to."""
    overflows, seen = {1, 4}, []
    backward = learner.forward_backward

    def overflowing(model, loss, *args, scaler, **options):
        measured = backward(model, loss, *args, scaler=scaler, **options)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        if len(seen) in overflows:
            model.text.head.mean.linear.bias.grad[0] = float("inf")
        finite = all(p.grad is None or p.grad.isfinite().all() for p in [*model.parameters(), *loss.parameters()])
        seen.append((scaler.get_scale(), weights, not finite))
        return measured

    monkeypatch.setattr(learner, "forward_backward", overflowing)
    fit(load_recipe(toy, ["train.precision=float16", "train.epochs=2"]), tmp_path / "run")
    assert seen[0][0] == 2**16 and seen[1][2] and not seen[3][2] and len(seen) == 6
    for (scale, weights, skipped), (scale_after, weights_after, _) in itertools.pairwise(seen):
        assert scale_after == scale / (2 if skipped else 1)
        assert torch.equal(weights_after, weights) == skipped
    lines = log_of(tmp_path / "run")
    assert [line["skipped"] for line in lines] == [sum(skipped for *_, skipped in seen[i : i + 3]) / 3 for i in (0, 3)]
    assert 0 < lines[1]["gradient_norm"] < 1e3  # Of the steps that were made.
    seen.clear()
    overflows.update(range(40))
    with pytest.raises(DivergedError, match=r"epoch 11, step 1: the gradient is inf.*; or train.precision=bfloat16"):
        fit(load_recipe(toy, ["train.precision=float16", "train.epochs=12"]), tmp_path / "never")


def train_until_sigterm(recipe, out):
    save = saving.save_state

    def save_and_end(path, *rest):
        saving.save_state = save  # A second signal would end it at once.
        save(path, *rest)
        os.kill(os.getpid(), signal.SIGTERM)

    saving.save_state = save_and_end
    command("train", recipe, "--out", out, "train.save_minutes=1e-9")


def test_sigterm_saves_after_the_step_in_work(toy, run, tmp_path):
    status, said = Started(train_until_sigterm, toy, tmp_path / "run").finish(60)
    assert status == 128 + signal.SIGTERM and "Traceback" not in said, said
    assert "ended by SIGTERM, saved after step 2 of epoch 1; the same command continues" in " ".join(said.split())
    fit(load_recipe(toy, ["train.save_minutes=1"]), tmp_path / "run")  # How often it is saved may change.
    assert_same_runs(run[0], tmp_path / "run")


def test_kill_9_at_any_moment_resumes_to_the_same_bits(toy, run):
    folder, kills = toy.parent / "killed", 0
    size = lambda path=folder / "log.jsonl": path.stat().st_size if path.exists() else 0
    for delay in (0.0, 0.02, None):
        process = Started(command, "train", toy, "--out", folder)
        if delay is None:
            assert process.finish(60)[0] == 0
            break
        deadline = time.monotonic() + 60
        # From the moment the run folder is claimed.
        while not (folder / "recipe.toml").exists() and process.running and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = size()
        while delay and size() == seen and process.running and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delay)
        kills += process.running
        process.kill()
    assert kills
    for name in ("last.safetensors", "model.safetensors"):
        assert (run[0] / name).read_bytes() == (folder / name).read_bytes()
    assert [line["epoch"] for line in log_of(folder)] == [0, 1, 2]


def test_nan_stops_with_exit_status_1_and_names_the_term(toy, sfumato):
    status, _, said = sfumato("train", toy, "model.init_total_variance=1e39", "--out", toy.parent / "nan")
    assert status == 1
    assert "loss term 'match' is nan" in said and "epoch 1, step 1" in said
    assert "Traceback" not in said


def test_bad_items_are_listed_and_skipped_and_too_many_stop(tmp_path):
    recipe = make_toy(tmp_path)
    data = tmp_path / "data"
    for name in ("000.png", "200.png", "201.png"):
        (data / name).write_bytes(b"not a picture")
    (data / "001.png").write_bytes((data / "010.png").read_bytes()[:60])
    (data / "010.txt").write_text("\n\n")
    (data / "011.txt").unlink()
    result = fit(load_recipe(recipe, ["train.epochs=1"]), tmp_path / "run")
    problems = [json.loads(line) for line in (tmp_path / "run" / "problems.jsonl").read_text().splitlines()]
    assert result["problems"] == len(problems) - 2 == 4
    assert {Path(p["place"].split(":")[0]).name for p in problems} >= {"000.png", "001.png", "010.png", "011.png"}
    assert len(embed_split_images(load_run(tmp_path / "run"), load_recipe(recipe).data, "all")[1]) == 48 - 4
    run = load_run(tmp_path / "run")
    usable = sum(len(load_split(run.model, run.recipe.data, name).data.image_ids) for name in ("train", "val"))
    with pytest.raises(UserError, match=f"4 of {usable + 4} items are unusable"):
        fit(load_recipe(recipe, ["train.epochs=1", "data.max_problem_fraction=0.01"]), tmp_path / "strict")


@pytest.mark.parametrize(("kept", "meaning"), [("0.2", "a rough guide"), ("0", "data.val_fraction=0.2")])
def test_one_text_an_image_is_said_before_anything_is_trained(tmp_path, capsys, kept, meaning):
    recipe, data = make_toy(tmp_path), tmp_path / "data"
    for path in data.glob("*.txt"):
        path.write_text(f"picture {path.stem}\n")
    fractions = [f"data.val_fraction={kept}", "data.test_fraction=0", "data.held_out_wordings=0/5"]
    fit(load_recipe(recipe, ["train.epochs=1", *fractions]), tmp_path / "run")
    said = capsys.readouterr().err
    assert 0 <= said.index("one text an image") < said.index(meaning) < said.index("train:") < said.index("epoch 1/1")


def test_folders_that_a_run_cannot_go_on_in_say_why(toy, run, tmp_path):
    averaged, stripped, locked = (tmp_path / name for name in ("averaged", "stripped", "locked"))
    fit(load_recipe(toy, ["train.epochs=1", "train.swa_epochs=1"]), averaged)
    shutil.copytree(run[0], stripped)
    (stripped / "last.safetensors").unlink()
    locked.mkdir()
    lr, shorter = "optim.lr is 0.002 there and 0.1 here", "train.epochs is 3 there and 2 here"
    with filelock.FileLock(locked / ".lock"):
        for overrides, folder, message in (
            (["optim.lr=0.1"], run[0], f"another recipe: {lr}. Give another folder.*delete that one: rm -r {run[0]}$"),
            (["optim.lr=0.1", "train.epochs=9"], run[0], f"{lr}; train.epochs is 3 there and 9 here"),
            (["train.epochs=2"], run[0], f"{shorter}, and a run can only be extended"), ([], toy.parent, "not empty"),
            ([], locked, "another process is training"),
            (["train.epochs=2", "train.swa_epochs=1"], averaged, "averaged over the last epochs"),
            (["train.epochs=4"], stripped, "last.safetensors is missing"),
        ):  # fmt: skip
            raises(UserError, message, fit, load_recipe(toy, overrides), folder)


def test_an_extended_run_is_the_longer_run_where_the_learning_rate_has_no_schedule(toy, run, tmp_path, capsys):
    recipe = [load_recipe(toy, ["optim.schedule=constant", f"train.epochs={n}"]) for n in (1, 2)]
    for one in recipe:
        fit(one, tmp_path / "extended")
    fit(recipe[1], tmp_path / "whole")
    assert_same_runs(tmp_path / "extended", tmp_path / "whole")
    assert "extended from 1 to 2 epochs" in capsys.readouterr().err
    fit(recipe[1], tmp_path / "extended")
    said = capsys.readouterr().err
    assert "extended" not in said and "all epochs are done" in said
    shutil.copytree(run[0], tmp_path / "cosine")
    fit(load_recipe(toy, ["train.epochs=4"]), tmp_path / "cosine")
    assert "it is 25% of its peak, where the former schedule ended at 0%" in capsys.readouterr().err


def test_a_run_is_found_from_any_folder(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(toy.parent)
    recipe = load_recipe(toy, ["data.path=data", "train.epochs=1"])
    fit(recipe, tmp_path / "run")
    saved = load_recipe(tmp_path / "run" / "recipe.toml")
    assert saved.data.path == str(toy.parent / "data")
    fit(recipe, tmp_path / "run")  # The same run, by its relative path.
    monkeypatch.chdir(tmp_path)
    assert load_split(load_run(tmp_path / "run").model, saved.data, "test").data.image_ids


def test_a_first_attempt_with_wrong_data_does_not_lock_the_folder(tmp_path):
    recipe, only = make_toy(tmp_path), tmp_path / "only"
    shutil.copytree(tmp_path / "data", only / "test")
    for path, message in (("nowhere", "there is no nowhere"), (only, "no split 'train'; it has test")):
        raises(UserError, message, fit, load_recipe(recipe, [f"data.path={path}"]), tmp_path / "run")
    (tmp_path / "run" / ".last.safetensors.x.tmp").write_bytes(b"left by a killed writer")
    assert fit(load_recipe(recipe, ["train.epochs=1"]), tmp_path / "run")["epochs"] == 1
    assert not list((tmp_path / "run").glob(".*.tmp"))


OWN, CLIP = "own-pictures", "own-pictures-clip"


def chosen(monkeypatch, tmp_path, place, *overrides):
    monkeypatch.setattr(module, "where_weights_are", lambda name: place)
    recipe, reason = preferred_recipe(load_recipe(find_recipe(OWN), overrides), overrides, tmp_path)
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
    error = huggingface_hub.errors.LocalEntryNotFoundError("a proxy answers, the hub does not")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", failing(error))
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
        torch.testing.assert_close(images.tensors().mean, expected)
        assert bool(images.tensors().log_var.isneginf().all()) == (out == "points")


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
