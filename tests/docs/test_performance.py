"""The page of speed equals what its script makes of the result files, marks what loses and what was disturbed."""

import json
from pathlib import Path

import pytest
import torch
from support.scripts import benchmark
from support.tiny_models import tiny_architecture

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
script, suite, gpu = (benchmark(name) for name in ("performance_page", "suite", "gpu"))
RESULTS = script.load_results(script.RESULTS)


def test_the_page_and_the_commands_are_those_of_the_script():
    assert script.PAGE.read_text(encoding="utf-8") == script.page(RESULTS)
    runs = {run.name: run for run in suite.RUNS}
    assert list(runs) == list(script.SECTIONS) and len(runs) == len(suite.RUNS) and RESULTS
    for name, record in RESULTS.items():
        assert record["command"] == runs[name].command and list(script.SECTIONS[name].rows(record["result"]))
    for run in suite.RUNS:
        name, *words = run.arguments.split()
        text = (FOLDER / name).read_text(encoding="utf-8")
        options = {word.removeprefix("--") for word in words if word.startswith("--")}
        assert "command_parser(__doc__)" in text, "it knows --json"
        if name != "distances.py":
            assert all(f'"--{option}"' in text for option in options), run
    for others, marked in ((0.02, False), (0.5, True), (None, True)):
        page = script.page({"match_loss": RESULTS["match_loss"] | {"other_cores": others}})
        assert "Not measured yet: distances, evaluation," in page
        assert ("Not final" in page) == marked and ("d = 1,024 †" in page) == marked


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_small_on_a_processor(monkeypatch, tmp_path):
    tiny_architecture(monkeypatch)
    monkeypatch.setitem(gpu.PARTS, "steps", (gpu.steps, [("ViT-Ti/16", torch.bfloat16)]))
    path = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", f"gpu --scale .001 --rounds 1 --device cpu --json {path}".split())
    gpu.main()
    found = json.loads(path.read_text())
    assert [len(found[part]) for part in gpu.PARTS] == [1, 4, 2, 1]
    assert all(one["gradients_apart"] < 1e-3 for one in found["loss"])
    assert found["steps"][0]["seconds"]["step"] > found["steps"][0]["seconds"]["loss"] > 0


SMALL = {
    "match_loss": "--b 128 --d 256 --repeats 1 --rounds 1", "distances": "--n 20 --m 30 --d 8",
    "exact_search": "--items 500 --d 16 --rounds 1",
    "stores": "--items 300 --d 8 --engines sqlite-faiss sfumato --steps fill search write",
    "serve": "--items 50 --d 16 --width 16 --clients 1 --seconds 0.2",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_small_and_leaves_what_the_page_reads(name, tmp_path):
    suite.measure(suite.Run(name, f"{name}.py {SMALL[name]}", limit=120), tmp_path, suite.machine())
    assert script.SECTIONS[name].title in script.page(script.load_results(tmp_path))
