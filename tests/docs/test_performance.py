"""The page of speed equals what its script makes of the result files, marks what loses and what was disturbed."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from support.scripts import benchmark

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
script, suite, gpu = (benchmark(name) for name in ("performance_page", "suite", "gpu"))


RESULTS = script.load_results(script.RESULTS)


def test_the_page_is_what_the_script_makes_of_the_result_files():
    assert script.PAGE.read_text(encoding="utf-8") == script.page(RESULTS)


def test_every_benchmark_has_a_section_and_results_are_those_of_its_command():
    runs = {run.name: run for run in suite.RUNS}
    assert list(runs) == list(script.SECTIONS) and len(runs) == len(suite.RUNS)
    assert RESULTS
    for name, record in RESULTS.items():
        assert record["command"] == runs[name].command and list(script.SECTIONS[name].rows(record["result"]))


def test_options_of_the_commands_exist():
    for run in suite.RUNS:
        name, *words = run.arguments.split()
        text = (FOLDER / name).read_text(encoding="utf-8")
        options = {word.removeprefix("--") for word in [*words, "--json"] if word.startswith("--")}
        if name != "distances.py":
            assert all(f'"--{option}"' in text for option in options), run


def test_a_changed_figure_or_a_busy_machine_would_be_noticed():
    changed = copy.deepcopy(RESULTS)
    changed["training_step"]["result"]["results"]["step"]["ratio"] += 1
    assert script.page(changed) != script.page(RESULTS)
    for others, marked in ((0.02, False), (0.5, True), (None, True)):
        page = script.page({"match_loss": RESULTS["match_loss"] | {"other_cores": others}})
        assert "Not measured yet: distances, evaluation," in page
        assert ("Not final" in page) == marked and ("d = 1,024 †" in page) == marked


def test_what_loses_is_marked_and_listed():
    results = {"exact_search": copy.deepcopy(RESULTS["exact_search"])}
    first, *others = results["exact_search"]["result"]["rows"]
    for row in (first, *others):
        row |= {"exact": 20.0, "faiss": 100.0, "q @ g.T": 10.0, "g @ q.T": 11.0}
    assert "In none of the rows below." in script.page(results)  # Twice the time of a bare product is no loss.
    first |= {"faiss": 16.0}
    page = script.page(results)
    listed = page.split("## Figures")[0]
    assert re.search(r"\| 1 query \| 20\.0 ms \| 16\.0 ms, FAISS flat \| 1\.25 \|", listed)
    assert page.count("**1.25, loses**") == 1 and page.count("loses**") == 1


def test_ratios_and_times_by_hand():
    row = script.against("x", 0.02, 8.0, "y")
    assert (row.ours, row.reference, row.ratio_text, row.loses) == ("20.0 ms", "8.00 s, y", "1/400", False)
    assert script.Row("x", "", ratio=1.004).ratio_text == "**1.00, loses**"
    assert script.Row("x", "", ratio=115.3, bound=True).ratio_text == "115"
    assert script.Row("x", "").ratio_text == ""
    rates = list(script.serve({"rows": [{"clients": 2, "on": {"per_second": 50}, "off": {"per_second": 100}}]}))
    assert [row.ratio for row in rates] == [2.0] and rates[0].loses


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_small_on_a_processor(monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.PARTS, "steps", (gpu.steps, [("ViT-Ti/16", torch.bfloat16)]))
    path = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", f"gpu --scale .005 --rounds 1 --device cpu --json {path}".split())
    gpu.main()
    found = json.loads(path.read_text())
    assert [len(found[part]) for part in gpu.PARTS] == [1, 4, 2, 1]
    assert all(one["gradients_apart"] < 1e-3 for one in found["loss"])
    assert found["steps"][0]["seconds"]["step"] > found["steps"][0]["seconds"]["loss"] > 0
