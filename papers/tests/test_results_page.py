"""The tables of methods and of uncertainty are those of the result files."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from support.scripts import benchmark

ROOT = Path(__file__).resolve().parents[2]
script = benchmark("results_page")


def test_the_pages_are_those_of_the_files():
    text = script.PAGE.read_text(encoding="utf-8")
    assert text == script.page(script.all_results(), text)
    around = script.page(script.all_results(), f"before {script.BEGIN} old {script.END} after")
    assert re.fullmatch(r"before <!--.*--> after", around, re.DOTALL) and f"{script.BEGIN} old" not in around


def intervals(value):
    """Every {value, low, high} of a report, as the page rounds them."""
    if isinstance(value, dict) and {"value", "low", "high"} <= set(value):
        if None not in value.values():
            yield tuple(f"{value[key]:.2f}".replace("-0.00", "0.00") for key in ("value", "low", "high"))
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from intervals(part)


def test_the_intervals_of_the_page_of_uncertainty_are_those_of_the_file():
    report = json.loads((ROOT / "benchmarks" / "results" / "uncertainty.json").read_text(encoding="utf-8"))
    text = (ROOT / "papers" / "docs" / "uncertainty.md").read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-")
    shown = re.findall(r"(-?\d?\.\d\d) \[(-?\d?\.\d\d), (-?\d?\.\d\d)\]", text)
    written = {tuple(f"{float(part):.2f}".replace("-0.00", "0.00") for part in one) for one in shown}
    assert len(shown) > 120 and written <= set(intervals(report))


def test_the_referee_prints_the_files_that_hold_its_figures(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for name, seen in (("referee", "## flickr8k-triplet"), ("referee-damaged", "corrupted queries")):
        monkeypatch.setattr(sys, "argv", ["referee.py", f"benchmarks/results/{name}.json"])
        runpy.run_module("papers.benchmarks.referee", run_name="__main__")
        printed = capsys.readouterr().out
        assert "| sfumato |" in printed and seen in printed


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
