"""The tables of the methods are what benchmarks/results_page.py makes of the result files."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("results_page", ROOT / "benchmarks" / "results_page.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["results_page"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_files(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert text == script.page(script.all_results(), text)


def test_a_changed_figure_changes_the_page_between_the_comments_alone(script):
    results, text = script.all_results(), f"before {script.BEGIN} old {script.END} after"
    changed = json.loads(json.dumps(results))
    figures = next(iter(changed["emoji"]["table"].values()))["figures"]
    figures["t2i recall@1"]["mean"] += 1
    assert script.page(changed, text) != script.page(results, text)
    assert script.page(results, script.page(changed, text)) == script.page(results, text)
    assert re.fullmatch(r"before <!--.*--> after", script.page(results, text), re.DOTALL)


def test_every_method_of_a_file_has_a_name_and_every_figure_a_baseline(script):
    for family, result in script.all_results().items():
        assert result["seeds"] == [0, 1, 2] and result["commit"]
        for recipe, row in result["table"].items():
            assert script.method(recipe)
            assert set(row["validation scores"]) == {f"{rate:g}" for rate in result["rates"]}
            main = next(iter(script.COLUMNS[family].values()))
            assert row["chance"][main] > 0 and row["figures"][main]["mean"] > 0


@pytest.mark.parametrize(
    ("name", "seen"), [("referee", "## flickr8k-triplet"), ("referee-damaged", "corrupted queries")]
)
def test_the_referee_prints_the_files_that_hold_its_figures(name, seen):
    command = ["benchmarks/referee.py", f"benchmarks/results/{name}.json"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "| sfumato |" in done.stdout and seen in done.stdout
