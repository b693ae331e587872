"""Distances compared: which run trains what, what is read again, what is refused; the command and its table."""

import json
import os
import statistics
import sys
from pathlib import Path

import pytest
from support.toy import make_toy
from support.words import folded

from sfumato import cli
from sfumato.errors import UserError
from sfumato.models.embed import evaluate_run
from sfumato.models.recipe import load_recipe
from sfumato.models.run import load_run
from sfumato.training import ablation
from sfumato.training.ablation import ABLATED, ablate
from sfumato.training.loop import fit
from sfumato.training.step import DivergedError

NAMES = ["csd", "wasserstein2"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return load_recipe(make_toy(tmp_path_factory.mktemp("ablation")), ["train.epochs=1", "optim.warmup_epochs=0.5"])


@pytest.fixture(scope="module")
def done(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, ablate(recipe, folder, trained=NAMES, retrieved=[*NAMES, "kl"], n_seeds=2)


def times(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}


def test_runs_differ_in_distance_and_seed_alone(recipe, done):
    folder, result = done
    assert result.seeds == (3, 4)
    for name in NAMES:
        for seed in result.seeds:
            own = load_recipe(folder / f"{name}-{seed}" / "recipe.toml")
            assert own.loss.distance == name and own.train.seed == seed
            loss = own.loss.model_copy(update={"distance": "csd"})
            train = own.train.model_copy(update={"seed": 3})
            assert own.model_copy(update={"loss": loss, "train": train}) == recipe


def test_a_cell_is_the_evaluation_of_its_runs_by_its_distance(done):
    folder, result = done
    for name, row in result.cells.items():
        assert list(row) == [*NAMES, "kl"]
        for by, found in row.items():
            runs = [load_run(folder / f"{name}-{seed}") for seed in result.seeds]
            values = [100 * evaluate_run(run, "test", by)[0].rsum for run in runs]
            assert found["rsum"].values == pytest.approx(values)
            assert found["rsum"].mean == pytest.approx(sum(values) / 2)
            assert found["rsum"].deviation == pytest.approx(statistics.stdev(values))
    assert len({found["rsum"].values for row in result.cells.values() for found in row.values()}) > 1


def test_what_is_there_is_taken_and_what_is_missing_is_made(recipe, done, monkeypatch):
    folder, result = done
    before = times(folder)
    monkeypatch.setattr(ablation, "fit", None)
    again = ablate(recipe, folder, trained=NAMES, retrieved=[*NAMES, "kl"], n_seeds=2)
    assert again == result
    changed = {path.name for path, time in times(folder).items() if before.get(path) != time}
    assert changed == {"ablation-test.json"}
    assert json.loads((folder / "ablation-test.json").read_text()) == json.loads(json.dumps(result.to_json()))
    one = ablate(recipe, folder, trained=["csd"], retrieved=["js"])
    assert (
        list(one.cells) == ["csd"]
        and list(one.cells["csd"]) == ["js"]
        and one.cells["csd"]["js"]["rsum"].deviation is None
    )


def test_figures_older_than_the_weights_are_computed_again(recipe, tmp_path):
    ablate(recipe, tmp_path, trained=["csd"], retrieved=["csd"])
    stale = tmp_path / "csd-3" / "evaluation-test-csd.json"
    right = stale.read_text()
    stale.write_text(right.replace('"rsum"', '"rsum of long ago"'))
    later = stale.stat().st_mtime + 1
    os.utime(tmp_path / "csd-3" / "model.safetensors", (later, later))
    ablate(recipe, tmp_path, trained=["csd"], retrieved=["csd"])
    assert stale.read_text() == right


def test_a_run_of_another_recipe_is_not_taken(recipe, tmp_path):
    other = recipe.model_copy(update={"train": recipe.train.model_copy(update={"batch_size": 4})})
    fit(other, tmp_path / "csd-3")
    with pytest.raises(UserError, match="holds a run of another recipe"):
        ablate(recipe, tmp_path, trained=["csd"], retrieved=["csd"])


def test_a_diverged_run_is_told_and_the_others_go_on(recipe, tmp_path, monkeypatch):
    def fails(one, folder):
        if one.loss.distance == "kl":
            raise DivergedError("epoch 1, step 2: the gradient is nan")
        return fit(one, folder)

    monkeypatch.setattr(ablation, "fit", fails)
    result = ablate(recipe, tmp_path, trained=["kl", "csd"], retrieved=["csd"])
    assert result.failed == {"kl-3": "epoch 1, step 2: the gradient is nan"}
    assert result.cells["kl"] == {} and result.cells["csd"]["csd"]["rsum"].mean > 0


@pytest.mark.parametrize("name", ABLATED)
def test_every_closed_form_trains(recipe, tmp_path, name):
    result = ablate(recipe, tmp_path, trained=[name], retrieved=[name])
    assert not result.failed and result.cells[name][name]["rsum"].mean > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trained": ["wasserstein"]}, "unknown distance 'wasserstein'; did you mean 'wasserstein2'"),
        ({"retrieved": ["csd", "csd"]}, "--retrieve names csd twice"),
        ({"trained": ["average_l2"]}, "average_l2 is sampled"),
        ({"trained": []}, "no distance to train with; known: csd, squared_l2"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(recipe, tmp_path, options, message):
    with pytest.raises((ValueError, UserError), match=message):
        ablate(recipe, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.variance=false", "loss.beta=0"], "has model.variance=false: for points"),
        (["loss.name=pcme"], "compares samples and ignores loss.distance"),
    ],
)
def test_recipes_without_distributions_to_compare_are_refused(tmp_path, overrides, message):
    recipe = load_recipe(make_toy(tmp_path), overrides)
    with pytest.raises(UserError, match=message):
        ablate(recipe, tmp_path / "new", trained=["csd"], retrieved=["csd"])


def test_the_command_prints_a_table_or_json(tmp_path, monkeypatch, capsys):
    recipe = make_toy(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sfumato", "ablate", str(recipe), *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    arguments = (
        "train.epochs=1",
        "--train",
        "csd, squared_l2",
        "--retrieve",
        "csd",
        "--seeds",
        2,
        "--out",
        tmp_path / "a",
    )
    status, out, _ = run(*arguments)
    words = folded(out)
    assert status == 0 and "toy, test, 2 seeds" in words and "by csd" in words
    assert "squared_l2" in words and " ± " in words
    status, out, _ = run(*arguments, "--json")
    assert status == 0 and json.loads(out) == json.loads((tmp_path / "a" / "ablation-test.json").read_text())
    status, out, err = run("--train", "csdd")
    assert status == 2 and not out and "did you mean 'csd'?" in err
