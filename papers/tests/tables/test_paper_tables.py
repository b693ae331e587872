"""The tables: what is listed stands in the papers; runs are reused; figures are those of `sfumato evaluate`."""

import json
import re
from statistics import mean, stdev

import pytest
from support.raising import failing, raises
from support.words import folded

from papers.runs import strategies
from papers.tables import paper_tables
from papers.tables.items import data_sets, find_item, paper_items
from papers.tables.printed import paper_table, write_table
from papers.tests.tables import tiny_figures
from sfumato.errors import UserError
from sfumato.reports.tables import tex
from sfumato.workflows.evaluation import OverSeeds

PAPERS = {"PCME++": "000_*.txt", "PVSE++": "001_*.txt", "PCME": "004_*.txt"}

WITHOUT_NUMBERS = {"PCME++": {"1", "2", "A.2", "B.1"}, "PVSE++": {"1", "3"}, "PCME": {"1", "2", "3", "4", "C.1", "C.2"}}
"""Figures that are diagrams, pseudo-code or photographs alone."""

SMALL = (*tiny_figures.SMALL, "model.dim=128")


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_with_numbers_is_listed(shared, paper):
    (path,) = (shared / "papers").glob(PAPERS[paper])
    captions = re.findall(r"^(Table|Figure) ([A-Z]?\.?\d+)[.:]", path.read_text(encoding="utf-8"), re.MULTILINE)
    printed = {number if kind == "Table" else f"Fig. {number}" for kind, number in captions}
    printed -= {f"Fig. {number}" for number in WITHOUT_NUMBERS[paper]}
    known = {item.number for item in paper_items().values() if item.paper == paper and not item.number.startswith("v1")}
    assert len(captions) >= 15 and printed == known


@pytest.fixture(scope="module")
def table(pictures, tmp_path_factory):
    """The arguments of a table of two rows and two seeds, and its folders."""
    work = tmp_path_factory.mktemp("tables")
    return work, (
        "table", "PVSE++ 6", "--data", pictures / "dataset_flickr8k.json", *SMALL, f"data.images={pictures / 'images'}",
        "--seeds", 2, "--runs", work / "runs", "--out", work / "out",
    )  # fmt: skip


def test_figures_are_means_and_deviations_of_evaluate_and_runs_are_reused(table, papers, sfumato):
    work, command = table
    made = papers.json(*command)
    trained = {path: path.stat().st_mtime_ns for path in work.glob("runs/*/model.safetensors")}
    repeated = [row for row in made["rows"] if row["runs"]]
    assert len(trained) == sum(len(row["runs"]) for row in repeated) >= 4
    for row in repeated:
        found = [sfumato.json("evaluate", "run", run, "--split", "val") for run in row["runs"]]
        recalls = [100 * one["t2i"]["recall@5"] for one in found]
        for name, values in (("t2i recall@5", recalls), ("rsum", [100 * one["rsum"] for one in found])):
            assert row["own"][name]["mean"] == pytest.approx(mean(values), rel=1e-9)
            assert row["own"][name]["deviation"] == pytest.approx(stdev(values), rel=1e-6, abs=1e-9)
    rsum = 100 * sum(v for s in found[0]["chance"].values() for k, v in s.items() if "@" in k)
    chance = made["rows"][-1]
    assert chance["label"] == "by chance" and chance["own"]["rsum"]["mean"] == pytest.approx(rsum)
    assert not made["same_data"] and made["rows"][0]["published"]["rsum"] > 400
    _, again, err = papers(*command, "--json")
    assert json.loads(again)["rows"] == made["rows"] and "training" not in err
    assert trained == {path: path.stat().st_mtime_ns for path in work.glob("runs/*/model.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "id", [item.id for item in paper_items().values() if item.columns and "flickr8k" in item.data_sets]
)
def test_every_table_is_made_from_tiny_runs(id, pictures, table, tmp_path):
    """All rows but those that read regions; equal runs are trained once for all tables."""
    given = (*tiny_figures.SMALL, "model.dim=32", "train.swa_epochs=0", f"data.images={pictures / 'images'}")
    item = find_item(id)
    data = paper_tables.choose_data(item, str(pictures / "dataset_flickr8k.json"), given)
    made = paper_tables.make_table(item, data, table[0] / "runs")
    rows = [row for row in made.rows if not any("flickr8k_regions" in reason for reason in row.failed)]
    assert not [row.failed for row in rows if row.failed] and any(row.runs for row in rows)
    assert all(len(row.own) == len(made.columns) for row in rows if row.runs), made
    assert [path.suffix for path in write_table(made, tmp_path)] == [".json", ".md", ".tex"]


def test_rows_ranked_by_strategies_share_one_run_and_those_of_faiss_search_its_lists(
    pictures, papers, tmp_path, monkeypatch
):
    built, original = [], strategies._faiss_index
    monkeypatch.setattr(strategies, "_faiss_index", lambda *a: built.append(a[1]) or original(*a))
    made = papers.json(
        "table", "PCME++ C.7", "--data", pictures / "dataset_flickr8k.json", *SMALL,
        f"data.images={pictures / 'images'}", "--runs", tmp_path / "runs", "--out", tmp_path / "out",
    )  # fmt: skip
    rows = [row for row in made["rows"] if row["runs"]]
    assert built == ["ivf"] * 4  # Two rows, two directions.
    (run,) = {run for row in rows for run in row["runs"]}
    asked = "mean,wasserstein2,csd,faiss_mean,faiss_rerank"
    found = papers.json("runs", "strategies", run, "--strategies", asked)
    for row, name in zip(rows, asked.split(","), strict=True):
        figures = found[name]["truths"]["test"]
        both = mean(figures[side]["recall@1"] for side in ("i2t", "t2i"))
        assert row["own"]["recall@1"]["mean"] == pytest.approx(100 * both, rel=1e-9), name


def test_what_is_written_says_ours_and_published(table, papers):
    work, command = table
    out = papers.printed(*command)
    (folder,) = (work / "out").iterdir()
    made = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (folder / "table.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    assert all(len(row) == 1 + 2 * len(made["columns"]) for row in cells) and len(cells) == 2 + len(made["rows"])
    for row, values in zip(cells[2:4], made["rows"], strict=False):
        assert row[0] == values["label"]
        last = made["columns"][-1]
        own, deviation = (values["own"][last][key] for key in ("mean", "deviation"))
        assert row[-2] == f"{own:.1f} ± {deviation:.1f}"
        assert float(row[-1].replace("−", "-")) == pytest.approx(values["published"][last])
    latex = (folder / "table.tex").read_text(encoding="utf-8")
    body = latex.split("\\midrule")[1].split("\\bottomrule")[0].strip().splitlines()
    assert all(line.count("&") == 2 * len(made["columns"]) and line.endswith("\\\\") for line in body)
    every = "".join("".join([item.about, item.note, item.source, *item.labels]) for item in paper_items().values())
    assert tex(every).isascii() and tex("a_b{c}\\") == r"a\_b\{c\}\textbackslash{}"
    assert "Flickr8k, split val, mean ± standard deviation over 2 seeds" in folded(out)


def test_rows_of_other_data_keep_their_own_paths_and_without_them_the_others_are_made(pictures):
    """The VSRN rows read regions; the images' path is not theirs."""
    item = find_item("PVSE++ 1")
    path = str(pictures / "dataset_flickr8k.json")
    chosen = paper_tables.choose_data(item, path, [f"data.images={pictures / 'images'}"])
    rows = {row.label: row for row in paper_tables.plan_table(item, chosen)}
    left = rows["VSRN ours"]
    assert left.missing == "no flickr8k_regions here, see `sfumato recipes flickr8k-probabilistic-vsrn`"
    assert not left.recipes and rows["VSE++ ours"].recipes[0].data.path == path


def test_ground_truths_are_looked_for_before_training(pictures, capsys, tmp_path, monkeypatch):
    """ECCV Caption's package and, for PMRP, COCO's instances."""
    coco = paper_tables.TableData("coco", "COCO", (f"data.path={pictures / 'dataset_flickr8k.json'}",))
    monkeypatch.setattr("papers.runs.grid.fit", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    raises(UserError, "eccv_caption", paper_tables.make_table, find_item("PCME++ 4"), coco, tmp_path)
    monkeypatch.setattr(paper_tables, "train_missing", failing(UserError("no figures")))
    raises(UserError, "no figures", paper_tables.make_table, find_item("PCME 3"), coco, tmp_path)
    assert "PMRP, which needs --instances instances_val2014.json" in folded(capsys.readouterr().err)
    assert "--instances" in find_item("PCME 3").needs and "sfumato[benchmarks]" in find_item("PCME++ 4").needs


@pytest.mark.parametrize("given", ["pictures.csv", "images"])
def test_own_data_repeat_a_table(pictures, papers, tmp_path, given):
    made = papers.json(
        "table", "PVSE++ 6", "--data", pictures / given, *SMALL, "data.val_fraction=0.2", "data.test_fraction=0.2",
        "--runs", tmp_path / "runs", "--out", tmp_path / "out",
    )  # fmt: skip
    assert all(row["own"]["rsum"]["mean"] > 0 for row in made["rows"] if row["runs"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["PCME++ 33"], "no table or figure 'PCME++ 33' in the papers; did you mean 'PCME++ 3'"),
        (["PCME 6"], "did you mean 'PCME Fig. 6'?"),
        (["PCME++ B.1"], "repeat it with `pytest papers/tests/tables/test_settings.py`"),
        (["PCME++ 3", "--data", "emoji", "--instances", "x.json"], "--instances is for PMRP on COCO; leave it out"),
        (["PCME++ 3"], "no dataset_coco.json here"),
        (["PCME++ 3", "--data", "nowhere"], "--data nowhere: neither a file or folder nor a data set; known: coco,"),
        (["PCME++ 3", "--data", "cub"], "--data cub has no recipes for it"),
        (["PCME++ 5"], "repeat it with `python -m papers zeroshot RUN"),
        (["PCME++ 3", "--data", "emoji", "train.epoch=3"], "train.epoch"),
        (["PCME++ 3", "--seeds", "0"], "--seeds"),
        (["PCME++ Fig. A.3", "--data", "emoji"], "made without data"),
        (["PCME++ Fig. A.3", "--seeds", "2"], "shows no run; leave out --seeds 2"),
        (["PCME Fig. 8", "--data", "emoji", "--seeds", "2"], "shows one run; leave out --seeds 2"),
        (["PCME Fig. E.3", "--data", "emoji"], "none of its rows can be repeated on the emoji set; give --data coco"),
    ],
)
def test_what_cannot_be_repeated_is_said_before_anything_is_trained(words, said, papers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = papers("table", *words)
    assert status == 2 and said in folded(err)
    assert not any(tmp_path.iterdir())


def test_published_figures_alone(papers):
    rows = papers.json("table", "PCME++ 4", "--published")
    assert rows["ViT-B/32 Proposed (Equation 1)"]["rsum"] == 534.5 and len(rows) == 7
    out = papers.printed("table", "PCME++ 4", "--published")
    assert "534.5" in out and "ours" not in out.lower()
    out = papers.printed("table", "PCME++ C.5", "--published")
    assert "0.0002" in out and "total variance and minus rho as they are" in folded(out)
    columns = ("rsum", "image log_sigma")
    own = dict.fromkeys(columns, OverSeeds(-0.01234, 0.00056, 2))
    row = paper_tables.TableRow("a", dict(zip(columns, (534.5, -13.01), strict=True)), own)
    made = paper_tables.Table(find_item("PCME D.1"), paper_tables.TableData("emoji", ""), 2, "val", columns, (row,))
    assert paper_table(made).rows == [["a", "0.0 ± 0.0", "534.5", "−0.0123 ± 0.00056", "−13.01"]]


def test_every_name_in_the_data_is_a_row():
    """The recipes themselves are trained in tests/training/test_published_recipes.py."""
    for item in paper_items().values():
        assert item.labels or not item.repeatable or item.command or item.draw, item.id
        rows = set(item.labels)
        assert set(item.rank_by) | {label for rows in item.other.values() for label in rows} <= rows, item.id
        assert set(item.data_sets) <= data_sets().keys(), item.id
