"""Callbacks and trackers; run with tensorboard 2.21.0, wandb 0.31.0 and mlflow-skinny 3.17.2 in an environment:

env/bin/pip install -c constraints.txt -e '.[tensorboard,wandb,mlflow]' pytest hypothesis
"""

import pytest
from support.toy import log_of, make_toy

from sfumato import fit, load_recipe

CHANGES = ["train.epochs=2"]
numbers = lambda line: {key: float(value) for key, value in line.items() if isinstance(value, int | float)}


def test_a_callback_gets_every_epoch_once(tmp_path):
    recipe = make_toy(tmp_path)
    seen = []
    fit(load_recipe(recipe, ["train.epochs=1"]), tmp_path / "run", on_epoch=seen.append)
    fit(load_recipe(recipe, CHANGES), tmp_path / "run", on_epoch=seen.append)
    assert seen == log_of(tmp_path / "run") and [line["epoch"] for line in seen] == [0, 1]
    assert {"loss", "seconds", "logit_scale"} <= seen[0].keys()


def trained(tmp_path, tracker):
    fit(load_recipe(make_toy(tmp_path), [*CHANGES, f"train.tracker={tracker}"]), tmp_path / "run")
    return tmp_path / "run"


def test_tensorboard_has_the_figures(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = trained(tmp_path, "tensorboard")
    events = reading.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for key in numbers(log_of(run)[-1]):
        found = {event.step: event.value for event in events.Scalars(key)}
        expected = {line["epoch"]: float(line[key]) for line in log_of(run) if key in line}
        assert found == pytest.approx(expected, rel=1e-5), key


def test_wandb_has_the_figures_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged, real = [], wandb.init

    def init(**options):
        assert options["config"]["train.tracker"] == "wandb" and options["config"]["loss.name"] == "pcmepp"
        run = real(**options)
        monkeypatch.setattr(type(run), "log", lambda self, data, step: logged.append((step, data)))
        return run

    monkeypatch.setattr(wandb, "init", init)
    run = trained(tmp_path, "wandb")
    assert logged == [(line["epoch"], numbers(line)) for line in log_of(run)]
    assert list(run.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow_has_the_figures(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    last = numbers(log_of(trained(tmp_path, "mlflow"))[-1])
    [run] = mlflow.search_runs(output_format="list")
    assert {key: run.data.metrics[key.replace("@", "_at_").replace("/", ".")] for key in last} == pytest.approx(last)
    assert run.data.params["loss.name"] == "pcmepp" and run.info.run_name == "run"
