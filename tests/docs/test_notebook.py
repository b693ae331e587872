"""The notebooks of the documentation: their cells run, and their outputs are small and show no path of a machine."""

import ast
import json
import os
import re
from pathlib import Path

import pytest
from example_notebook import NOTEBOOK, SCRIPT, notebook
from support.tiny_models import tiny_clip, two_colours

from sfumato import Answer, LoadedModel, Reliability, ScoreCalibrator, Searcher

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PATH = re.compile(r"(?:/(?:tmp|root|home|Users|work|var|usr|opt)/|[A-Z]:\\\\)[\w.-]*")
paths_in = lambda text: PATH.findall(re.sub(r"data:image/\w+;base64,[\w+/=]+|\"image/png\": \"[^\"]*\"", "", text))
cells_of = lambda name: json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
code_of = lambda name: ["".join(cell["source"]) for cell in cells_of(name) if cell["cell_type"] == "code"]


def run_cell(source, names):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.parametrize("name", ["train-search-plot.ipynb", "photo-folder.ipynb"])
def test_every_cell_was_run_in_order_without_an_error_and_shows_no_path_of_a_machine(name):
    cells = cells_of(name)
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert {"text/html", "image/png", "text/plain"} <= {kind for output in outputs for kind in output.get("data", {})}
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(text) < 300_000 and not paths_in(text)
    assert paths_in('"in /tmp/x1"') and paths_in(r'"C:\\a"') and not paths_in('"data:image/png;base64,/tmp/ab="')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for package in ("transformers", "matplotlib"):
        module = pytest.importorskip(package, reason="an extra of the notebook is not installed")
    module.use("Agg")  # of matplotlib
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_cells_run(capsys):
    small = "n_concepts, epochs = 80, 2"  # Fewer have no concept in the test split.
    sources = [re.sub(r"n_concepts, epochs = \d+, \d+", small, source) for source in code_of("train-search-plot.ipynb")]
    assert small in sources[0]
    names, values = {}, []
    for source in sources:
        shown = Path(names["lines"][0]["image"]).name if names else ""  # The apple is not among so few.
        values.append(run_cell(source.replace("1F34E-noto.png", shown), names))
    assert {Answer, LoadedModel, Searcher, Reliability} <= {type(value) for value in values}
    shown = [value._repr_html_() if hasattr(value, "_repr_html_") else repr(value) for value in values]
    assert not paths_in("\n".join([capsys.readouterr().out, *shown])) and os.getcwd() not in "".join(shown)
    sources = [source.replace("= None, 300", "= None, 60") for source in code_of("photo-folder.ipynb")]
    assert "= None, 60" in sources[0]
    names = {}
    values = [run_cell(source, names) for source in sources]
    answers = [value for value in values if isinstance(value, Answer)]
    assert len(answers) == 2 and {answer.target for answer in answers} == {"fits"}
    assert names["answers"]["a spreadsheet"].verdict.kind == "nothing"


def test_the_notebook_of_named_models_is_its_script():
    assert NOTEBOOK.read_text(encoding="utf-8") == notebook(SCRIPT.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_named_models_are_measured_and_searched_with_stand_ins(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    tiny_clip(tmp_path / "random")
    rows = [json.loads(line) for line in two_colours(tmp_path, n=120).read_text().splitlines()]
    rows = [row | {"split": ("val", "val", "test")[i % 3]} for i, row in enumerate(rows)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    *cells, last = code_of("named-models.ipynb")
    names, stand_ins = {}, 'MODELS = ["nobody/nothing", "random", "small"]\n'
    cells[0], n = re.subn(r"MODELS = \[.*?^\]\n", stand_ins, cells[0], flags=re.DOTALL | re.MULTILINE)
    for cell in cells:
        run_cell(cell, names)
    answer, printed = run_cell(last, names), capsys.readouterr().out
    assert n == 1 and isinstance(answer, Answer) and answer.verdict.text in printed and not paths_in(printed)
    assert [line.split(": left out, ")[0] for line in printed.splitlines() if "left out" in line] == ["nobody/nothing"]
    for name in ("random", "small"):
        file = tmp_path / "named-models" / f"{name}.json"
        about = json.loads(file.read_text())
        assert about["name"] == name and about["test"]["n_texts"] == 40 and len(about["digest"]) == 64
        assert about["listed"]["served"]["t2i"]["n"] == 40 and ScoreCalibrator(prior=file).predict_proba([1.0]).size
        assert {key for key, value in about.items() if value is None} == set(about["unmeasured"])
    assert not (tmp_path / "named-models" / "nobody-nothing.json").exists()
