"""The tables of methods and of uncertainty are what their benchmarks make of the result files."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from support.scripts import benchmark

from papers.benchmarks import uncertainty_tables
from papers.benchmarks.uncertainty_multiplicity import partial_statistic
from papers.benchmarks.uncertainty_scenes import NEIGHBOURS, similarity

ROOT = Path(__file__).resolve().parents[2]
script = benchmark("results_page")


def test_the_pages_are_those_of_the_files():
    text = script.PAGE.read_text(encoding="utf-8")
    assert text == script.page(script.all_results(), text)
    around = script.page(script.all_results(), f"before {script.BEGIN} old {script.END} after")
    assert re.fullmatch(r"before <!--.*--> after", around, re.DOTALL) and f"{script.BEGIN} old" not in around
    report = json.loads((ROOT / "benchmarks" / "results" / "uncertainty.json").read_text(encoding="utf-8"))
    text = uncertainty_tables.PAGE.read_text(encoding="utf-8")
    assert text == uncertainty_tables.page(report, text)
    report["scenes"]["emoji texts"]["scores"]["baseline: few words"]["all"]["value"] = 0.987
    assert text != uncertainty_tables.page(report, text), "the figures are those of the report"


def test_every_method_of_a_file_has_a_name_and_every_figure_a_baseline():
    for family, result in script.all_results().items():
        assert result["seeds"] == [0, 1, 2] and result["commit"]
        for recipe, row in result["table"].items():
            assert script.method(recipe)
            assert set(row["validation scores"]) == {f"{rate:g}" for rate in result["rates"]}
            main = next(iter(script.COLUMNS[family].values()))
            assert row["chance"][main] > 0 and row["figures"][main]["mean"] > 0


def test_the_referee_prints_the_files_that_hold_its_figures(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for name, seen in (("referee", "## flickr8k-triplet"), ("referee-damaged", "corrupted queries")):
        monkeypatch.setattr(sys, "argv", ["referee.py", f"benchmarks/results/{name}.json"])
        runpy.run_module("papers.benchmarks.referee", run_name="__main__")
        printed = capsys.readouterr().out
        assert "| sfumato |" in printed and seen in printed


def test_a_partial_rank_correlation_is_that_of_the_residuals():
    random = np.random.default_rng(0)
    x, y, z = random.normal(size=(3, 50)) + random.normal(size=50)
    rank = [np.argsort(np.argsort(values)).astype(float) for values in (x, y, z)]
    line = np.stack([rank[2], np.ones(50)], axis=1)
    a, b = (r - line @ np.linalg.lstsq(line, r, rcond=None)[0] for r in rank[:2])
    found = partial_statistic(x, y, z)(np.ones((1, 50)))
    assert found == pytest.approx([np.corrcoef(a, b)[0, 1]], abs=1e-9)


def test_neighbours_of_an_item_are_those_of_other_owners():
    random = np.random.default_rng(0)
    x, owners = random.normal(size=(24, 3)), np.arange(24) // 2
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    found = similarity(x, x[:12], owners)
    for k in range(24):
        near = sorted(unit[k] @ unit[j] for j in range(24) if owners[j] != owners[k])[-10:]
        assert found[NEIGHBOURS][k] == pytest.approx(np.mean(near))
        assert found["similar to training"][k] == pytest.approx(np.mean([unit[k] @ unit[j] for j in range(12)]))


def test_the_tables_of_judgements_are_those_of_the_file():
    """Errors with no verdicts, and their changes, as the page rounds them."""
    found = json.loads((ROOT / "benchmarks" / "results" / "judgements.json").read_text(encoding="utf-8"))
    columns = [f"{prior}, {texts}" for prior in ("packaged", "shifted") for texts in ("with texts", "without texts")]
    text = (ROOT / "docs" / "results" / "judgements.md").read_text(encoding="utf-8")
    tables = re.findall(r"^((?:\| +\d.*\n)+)", text, re.MULTILINE)
    assert len(tables) == 2
    for table, figure in zip(tables, ("error at hits 1 to 10", "error at hit 1"), strict=True):
        for line in table.splitlines():
            n, *cells = [cell.strip().replace("\N{MINUS SIGN}", "-") for cell in line.strip("|").split("|")]
            for column, cell in zip(columns, cells, strict=True):
                known = found[column][n][figure]
                values = [known["mean"]] if n == "0" else [known["change"], known["two standard errors"]]
                shown = [float(part) for part in cell.split("±")]
                step = 10.0 ** -len(cell.split("±")[0].partition(".")[2].strip())
                assert shown == pytest.approx(values[: len(shown)], abs=0.51 * min(step, 0.001)), (line, column)
