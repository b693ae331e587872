"""The background iterator: the same items, never too far ahead, no thread left behind; trackers of runs."""

import inspect
import itertools
import subprocess
import sys
import threading
import time

import pytest
from support.toy import log_of, make_toy

from sfumato import fit, load_recipe
from sfumato.training.batches import prefetch

numbers = lambda line: {key: float(value) for key, value in line.items() if isinstance(value, int | float)}


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """But those of an event loop that an earlier test of the process has left."""
    own = lambda: {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")}
    before = own()
    yield
    assert own() == before


def test_items_are_made_in_a_thread_while_the_consumer_works():
    made = []

    def source():
        for i in range(5):
            made.append((i, threading.current_thread()))
            yield i

    items = prefetch(source(), 2)
    assert made == []
    assert next(items) == 0
    end = time.monotonic() + 10
    while len(made) < 3:
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(0.05)
    # 0 is with the consumer; 1 and 2 wait; 3 is not begun.
    assert [i for i, _ in made] == [0, 1, 2] and threading.current_thread() not in {t for _, t in made}
    assert list(items) == [1, 2, 3, 4]


def test_an_exception_comes_after_the_items_before_it_and_a_consumer_that_stops_early_closes_the_source():
    def source():
        yield 1
        yield 2
        raise KeyError("the third")

    seen = []
    with pytest.raises(KeyError, match="the third") as caught:
        for item in prefetch(source(), 5):
            seen.append(item)
    assert seen == [1, 2]
    assert "source" in {entry.name for entry in caught.traceback}
    closed = []
    items = prefetch(endless(closed), 2)
    assert next(items) == 0
    thread = next(t for t in threading.enumerate() if t.name.startswith("prefetch"))
    start = time.monotonic()
    items.close()
    assert time.monotonic() - start < 1 and not thread.is_alive() and len(closed) == 1
    for item in prefetch(endless(closed)):
        if item == 3:
            break
    with pytest.raises(ZeroDivisionError):
        for item in prefetch(endless(closed)):
            1 / (3 - item)
    assert len(closed) == 3
    code = "import itertools\nfrom typing import *\nfrom collections import deque\nfrom collections.abc import *\n"
    code += "from concurrent.futures import ThreadPoolExecutor\n"
    code += f"T = TypeVar('T')\n{inspect.getsource(prefetch)}\nitems = prefetch(itertools.count())\nnext(items)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def endless(closed):
    try:
        yield from itertools.count()
    finally:
        closed.append(threading.current_thread())


def test_a_callback_gets_every_epoch_once(tmp_path):
    recipe, seen = make_toy(tmp_path), []
    fit(load_recipe(recipe, ["train.epochs=1"]), tmp_path / "run", on_epoch=seen.append)
    fit(load_recipe(recipe, ["train.epochs=2"]), tmp_path / "run", on_epoch=seen.append)
    assert seen == log_of(tmp_path / "run") and [line["epoch"] for line in seen] == [0, 1]
    assert {"loss", "seconds", "logit_scale"} <= seen[0].keys()


def trained(tmp_path, tracker):
    fit(load_recipe(make_toy(tmp_path), ["train.epochs=2", f"train.tracker={tracker}"]), tmp_path / "run")
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
