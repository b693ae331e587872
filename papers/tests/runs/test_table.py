"""Tables of runs: grouped by keys of their recipes, over seeds, with the best marked where it differs."""

import json
import shutil
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
from support.toy import make_two_methods
from support.words import folded

from papers.runs.grid import read_vary
from papers.runs.paired import (
    BOTH,
    PerQuery,
    compare_per_query,
    mean_per_query,
    queries_by_image,
    read_per_query,
    with_rsum,
)
from papers.runs.printed import runs_latex, runs_table, write_runs_table
from papers.runs.table import Best, RunsTable, TableOptions, table_of_runs
from sfumato.evaluation.benchmarks import COMPARED, per_query_table
from sfumato.evaluation.embedded_input import measure
from sfumato.models.embed import embed_for_evaluation, evaluate_run
from sfumato.models.recipe import load_recipe
from sfumato.models.run import load_run
from sfumato.training.loop import fit
from sfumato.training.step import DivergedError
from sfumato.workflows.evaluation import OverSeeds, Row


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Two methods with two seeds each; a folder of another data set, and a recipe."""
    folder = tmp_path_factory.mktemp("table")
    make_two_methods(folder)
    return folder


def queries(values, groups=None):
    """A table with one value in all metrics of each query, half of them in each direction."""
    n = len(values) // 2
    ids = np.array([f"q{i}" for i in range(len(values))])
    directions = np.array(["i2t"] * n + ["t2i"] * (len(values) - n))
    column = np.array(values, float)
    group = ids if groups is None else np.array(groups)
    return PerQuery(np.full(len(ids), "test"), directions, ids, group, dict.fromkeys(COMPARED, column))


def test_rsum_of_single_queries_by_hand():
    """One image query that is found, three texts of which one is found: 3 * (1 + 1/3)."""
    both = with_rsum(
        PerQuery(
            np.full(4, "test"), np.array(["i2t", "t2i", "t2i", "t2i"]), np.array(list("abcd")), np.array(list("aaae")),
            dict.fromkeys(COMPARED, np.array([1.0, 1.0, 0.0, 0.0])),
        )
    )  # fmt: skip
    of_rsum = both.select(np.flatnonzero(both.direction == BOTH))
    assert of_rsum.figures["rsum"].tolist() == [12.0, 4.0, 0.0, 0.0] and of_rsum.figures["rsum"].mean() == 4
    assert of_rsum.group.tolist() == list("aaae") and np.isnan(of_rsum.figures["recall@1"]).all()


def test_mean_per_query_goes_by_the_ids():
    first = queries([1, 0, 1, 0])
    second = first.select(np.array([3, 2, 1, 0]))
    figures = dict.fromkeys(COMPARED, np.array([0.0, 1.0, 1.0, 1.0]))
    second = replace(second, figures=figures)  # q3 0, q2 1, q1 1, q0 1
    assert mean_per_query([first, second]).figures["recall@1"].tolist() == [1.0, 0.5, 1.0, 0.0]


def test_queries_of_an_image_are_one_group_in_both_directions(work):
    """The toy's twins have the same two texts: one group of two images and two texts, as --compare has them."""
    run = load_run(work / "runs/pcmepp-0")
    embedded = embed_for_evaluation(run, run.recipe.data, "test")
    ranks = measure(embedded, run.ranking_distance()).ranks
    table, plain = queries_by_image(ranks), per_query_table(ranks)
    (truth,) = embedded.ground_truths
    for i, image in enumerate(truth.image_ids):
        own = table.group[(table.query == image) & (table.direction == "i2t")]
        for text in truth.i2t.indices[truth.i2t.indptr[i] : truth.i2t.indptr[i + 1]]:
            theirs = table.group[(table.query == truth.text_ids[text]) & (table.direction == "t2i")]
            assert theirs.tolist() == own.tolist()
    assert len(set(table.group)) < len(set(plain["group"])) and table.query.tolist() == plain["query"].tolist()


def test_figures_are_those_of_evaluate_and_tests_those_of_compare(work, papers):
    runs = sorted((work / "runs").iterdir())
    made = papers.json(
        "runs", "table", *runs, "--group", "loss.name", "--metrics", "rsum,t2i.recall@1,i2t.map@r,i2t.median_rank"
    )
    assert [row["label"] for row in made["rows"]] == [{"loss.name": "infonce"}, {"loss.name": "pcmepp"}]
    assert [row["runs"] for row in made["rows"]] == [[str(r) for r in runs[:2]], [str(r) for r in runs[2:]]]
    for row in made["rows"]:
        found = [evaluate_run(load_run(run), "test")[0] for run in row["runs"]]
        for column, values in {
            "rsum": [f.rsum for f in found],
            "t2i.recall@1": [f.t2i["recall@1"] for f in found],
            "i2t.median_rank": [f.i2t["median_rank"] for f in found],
        }.items():
            assert row["figures"][column]["mean"] == pytest.approx(mean(values))
            assert row["figures"][column]["deviation"] == pytest.approx(stdev(values))
    best = made["best"]["i2t.map@r"]
    sides = [
        mean_per_query([with_rsum(read_per_query(next(run.glob("queries-test-*.csv")))) for run in part])
        for part in (runs[:2], runs[2:])
    ]
    means = [row["figures"]["i2t.map@r"]["mean"] for row in made["rows"]]
    first, second = (
        sides[k].select(np.flatnonzero(sides[k].direction == "i2t")) for k in (best["row"], 1 - best["row"])
    )
    assert best["row"] == means.index(max(means)) and "i2t.median_rank" not in made["best"]
    (by_hand,) = compare_per_query(first, second, metrics=["map@r"])
    assert best["others"] == [{"row": 1 - best["row"]} | by_hand.to_json()]
    assert by_hand.first == pytest.approx(max(means)) and by_hand.second == pytest.approx(min(means))
    rsum = made["best"]["rsum"]["others"][0]
    assert rsum["second"] == pytest.approx(made["rows"][rsum["row"]]["figures"]["rsum"]["mean"])


@pytest.fixture
def by_hand():
    """Two methods; the first is best in both columns, and differs in the rsum alone."""
    differs = compare_per_query(queries([1] * 40), queries([0] * 40), metrics=["recall@1"])[0]
    level = compare_per_query(queries([1, 0] * 20), queries([0, 1] * 20), metrics=["recall@1"])[0]
    assert differs.p_value < 0.001 and level.p_value > 0.9
    rows = (
        Row(("a_b", 0.1), ("r0", "r1"), {"rsum": OverSeeds(2.5, 0.0125, ()), "t2i.recall@1": OverSeeds(0.3, 0.01, ())}),
        Row(("50%", None), ("r2",), {"rsum": OverSeeds(2.0, None, ()), "t2i.recall@1": OverSeeds(0.299, None, ())}),
    )  # fmt: skip
    best = {"rsum": Best(0, {1: differs}), "t2i.recall@1": Best(0, {1: level})}
    columns = ("rsum", "t2i.recall@1")
    return RunsTable(("loss.name", "loss.alpha"), columns, "test", ("csd",), rows, best, 40, 20, ("optim.lr",))


def test_a_table_by_hand_as_latex_and_markdown(by_hand, tmp_path):
    write_runs_table(by_hand, tmp_path)
    latex = (tmp_path / "table.tex").read_text()
    assert latex == runs_latex(by_hand) and "over 1 to 2 seeds" in latex and "over 40 queries" in latex
    assert r"a\_b & 0.1 & \textbf{250.0 $\pm$ 1.2} & 30.0 $\pm$ 1.0 \\" in latex
    assert r"50\% & -- & 200.0 & 29.9 \\" in latex and "the queries of one of 20 images swapped together" in latex
    assert "| a_b | 0.1 | **250.0 ± 1.2** | 30.0 ± 1.0 |" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "table.json").read_text())["best"]["rsum"]["differs"] is True
    assert runs_table(by_hand, str.upper, "").rows[1] == ["50%", "–", "200.0", "29.9"]


def test_best_needs_to_differ_from_every_other_row(by_hand):
    differs, level = (by_hand.best[name].others[1] for name in by_hand.columns)
    assert Best(0, {1: differs, 2: differs}).differs and not Best(0, {1: differs, 2: level}).differs
    assert not Best(0, {}).differs


def test_a_grid_is_trained_once_and_ranked_by_several_distances(work, papers, tmp_path, monkeypatch):
    command = (
        "runs", "grid", work / "toy.toml", "train.epochs=1", "--vary", "loss.distance=csd,wasserstein2", "--seeds", 2,
        "--distance", "csd,kl", "--metrics", "rsum", "--runs", tmp_path,
    )  # fmt: skip
    made = papers.json(*command)
    plain = load_recipe(work / "toy.toml", ["train.epochs=1"]).model_dump(mode="json")
    assert made["columns"] == ["rsum by csd", "rsum by kl"] and made["also"] == []
    for row, name in zip(made["rows"], ("csd", "wasserstein2"), strict=True):
        assert row["label"] == {"loss.distance": name}
        for k, run in enumerate(row["runs"]):
            own = load_recipe(f"{run}/recipe.toml").model_dump(mode="json")
            assert (own["loss"]["distance"], own["train"]["seed"]) == (name, plain["train"]["seed"] + k)
            own["loss"]["distance"], own["train"]["seed"] = plain["loss"]["distance"], plain["train"]["seed"]
            assert own == plain
        for by in ("csd", "kl"):
            rsums = [evaluate_run(load_run(run), "test", by)[0].rsum for run in row["runs"]]
            assert row["figures"][f"rsum by {by}"]["values"] == pytest.approx(rsums)
    monkeypatch.setattr("papers.runs.grid.fit", lambda *_: pytest.fail("trained"))
    assert papers.json(*command)["rows"] == made["rows"]
    assert r"\begin{tabular}{lrr}" in papers.printed(*command, "--latex")


def test_a_diverged_run_of_a_grid_is_named_and_the_others_go_on(work, papers, monkeypatch, tmp_path):
    def fails(one, folder):
        if one.loss.distance == "kl":
            raise DivergedError("epoch 1, step 2: the gradient is nan")
        return fit(one, folder)

    monkeypatch.setattr("papers.runs.grid.fit", fails)
    made = papers.json(
        "runs", "grid", work / "toy.toml", "train.epochs=1", "--vary", "loss.distance=kl,csd", "--runs", tmp_path
    )
    assert [row["label"]["loss.distance"] for row in made["rows"]] == ["csd"]
    assert "the gradient is nan" in made["notes"][0]


def test_points_do_not_hear_of_distances(work, papers, tmp_path):
    """For points csd and squared_l2 train the same model, which is no row of its own."""
    points = "train.epochs=1", "model.variance=false", "loss.beta=0"
    vary = "--vary", "loss.distance=csd,squared_l2"
    status, out, err = papers("runs", "grid", work / "toy.toml", *points, *vary, "--runs", tmp_path)
    assert status == 2 and not out and "Traceback" not in err and "have equal weights" in folded(err)


def test_commas_within_brackets_do_not_divide():
    assert read_vary(["optim.betas=[0.9,0.99],[0.9,0.999]", "loss.alpha=0, .1"]) == {
        "optim.betas": ["[0.9,0.99]", "[0.9,0.999]"], "loss.alpha": ["0", ".1"],
    }  # fmt: skip


def test_an_unknown_loss_and_an_unfinished_run_are_in_the_table(work, tmp_path):
    """A run of somebody's own loss is read without its code; a run with fewer epochs than its recipe says so."""
    shutil.copytree(work / "runs/pcmepp-0", tmp_path / "mine")
    recipe = tmp_path / "mine/recipe.toml"
    text = recipe.read_text().replace('name = "pcmepp"', 'name = "mine"')
    recipe.write_text('imports = ["mine.py"]\n' + text.replace("epochs = 1\nbatch", "epochs = 3\nbatch"))
    weights = tmp_path / "mine/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    made = table_of_runs([work / "runs/pcmepp-0", tmp_path / "mine"], ["loss.name"], TableOptions(("rsum",)))
    assert [row.label for row in made.rows] == [("pcmepp",), ("mine",)] and made.distances == ("csd",)
    assert made.also == ("imports", "train.epochs")
    assert made.notes == (f"{tmp_path / 'mine'} has 1 of its 3 epochs.",)
