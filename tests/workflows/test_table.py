"""Tables of runs: grouped by keys of their recipes, mean and deviation over seeds, and what is refused."""

import os
import shutil
from statistics import mean, stdev

import pytest
from support.toy import make_two_methods
from support.words import folded

from sfumato.models.embed import evaluate_run
from sfumato.models.run import load_run
from sfumato.reports.evaluation import runs_latex, runs_table
from sfumato.reports.tables import tex
from sfumato.workflows.table import OverSeeds, Row, over_seeds


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Two methods with two seeds each, and what does not fit beside them."""
    folder = tmp_path_factory.mktemp("table")
    make_two_methods(folder)
    return folder


@pytest.mark.slow
def test_figures_are_those_of_evaluate(work, sfumato):
    runs, columns = sorted((work / "runs").iterdir()), "rsum,t2i.recall@1,i2t.map@r,i2t.median_rank"
    made = sfumato.json("table", *runs, "--group", "loss.name", "--metrics", columns)
    assert [row["label"] for row in made] == [{"loss.name": "infonce"}, {"loss.name": "pcmepp"}]
    assert [row["runs"] for row in made] == [[str(r) for r in runs[:2]], [str(r) for r in runs[2:]]]
    for row in made:
        found = [evaluate_run(load_run(run), "test")[0] for run in row["runs"]]
        for column, values in {
            "rsum": [f.rsum for f in found],
            "t2i.recall@1": [f.t2i["recall@1"] for f in found],
            "i2t.median_rank": [f.i2t["median_rank"] for f in found],
        }.items():
            assert row["figures"][column]["values"] == pytest.approx(values)
            assert row["figures"][column]["mean"] == pytest.approx(mean(values))
            assert row["figures"][column]["deviation"] == pytest.approx(stdev(values))
    (one,) = sfumato.json("table", *runs[:2])
    assert one["label"] == {} and list(one["figures"]) == ["rsum", "t2i.recall@1", "i2t.recall@1"]
    assert "all runs" in sfumato.printed("table", *runs[:2])
    assert r"\begin{tabular}{lrrr}" in sfumato.printed("table", *runs, "--group", "loss.name", "--latex")


def test_what_is_there_is_taken_unless_older_than_the_weights_and_nonsense_refused(work, sfumato, tmp_path):
    shutil.copytree(work / "runs", tmp_path / "runs")
    for file in (tmp_path / "runs").glob("*/*-test-*"):
        file.unlink()
    command = ("table", *sorted((tmp_path / "runs").iterdir()), "--group", "loss.name", "--json")
    status, out, err = sfumato(*command)
    again = sfumato(*command)
    assert status == 0 and "evaluating" in err and again[1] == out and "evaluating" not in again[2]
    file = tmp_path / "runs/pcmepp-0/evaluation-test-csd.json"
    file.write_text(file.read_text().replace('"rsum": ', '"rsum": 1'))
    later = file.stat().st_mtime + 5
    os.utime(tmp_path / "runs/pcmepp-0/model.safetensors", (later, later))
    _, repaired, err = sfumato(*command)
    assert repaired == out and err.count("evaluating") == 1 and "pcmepp-0" in err
    runs = work / "runs"
    a, b, c = runs / "pcmepp-0", runs / "pcmepp-1", runs / "infonce-0"
    shutil.copytree(a, work / "copy")
    for words, said in (
        (
            (a, b, c),
            [f"{a} and {c} differ in more than train.seed", "loss.name (pcmepp, infonce)", "--group loss.name"],
        ),
        ((a, b, c, "--group", "loss.nam"), ["no recipe of these runs has this key; did you mean 'loss.name'?"]),
        ((a, b, "--metrics", "t2i.recall@2"), ["has no metric 't2i.recall@2'; did you mean t2i.recall@"]),
        ((a, a), [f"{a} and {a} are the same run; give it once"]),
        ((a, work / "copy"), ["the same recipe and the same train.seed=0, so they are not two seeds"]),
        ((work / "nowhere",), ["nowhere is not a trained run (no recipe.toml in it)"]),
    ):
        status, out, err = sfumato("table", *words)
        assert status == 2 and not out and all(one in folded(err) for one in said), (words, err)


LATEX = r"""\begin{table}
\centering
\begin{tabular}{llrr}
\toprule
loss.name & loss.alpha & RSUM & t2i R@1 \\
\midrule
a\_b & 0.1 & 250.0 $\pm$ 1.2 & 30.0 $\pm$ 1.0 \\
50\% & -- & 200.0 & 29.9 \\
\bottomrule
\end{tabular}
\caption{Split test; per cent, RSUM of 600; mean $\pm$ standard deviation over 1 to 2 seeds.}
\end{table}
"""


def test_over_seeds_and_latex_by_hand():
    rows = [
        Row(("a_b", 0.1), ("r0", "r1"), {"rsum": OverSeeds(2.5, 0.0125, ()), "t2i.recall@1": OverSeeds(0.3, 0.01, ())}),
        Row(("50%", None), ("r2",), {"rsum": OverSeeds(2.0, None, ()), "t2i.recall@1": OverSeeds(0.299, None, ())}),
    ]
    assert runs_latex(runs_table(rows, ["loss.name", "loss.alpha"], "Split test", tex)) == LATEX
    found = over_seeds([{"a": 1.0, "b": None, "c": 5.0}, {"a": 2.0, "b": None, "d": 1.0}, {"a": 6.0, "c": 5.0}])
    assert list(found) == ["a", "c", "d"]
    # Deviations from 3 are 2, 1, 3: (4 + 1 + 9) / 2 = 7.
    assert (found["a"].mean, found["a"].deviation, found["a"].values) == (3, pytest.approx(7**0.5), (1, 2, 6))
    assert str(found["a"]) == "3.00 ± 2.65" and str(found["c"]) == "5.00 ± 0.00"
    assert found["d"].deviation is None and str(found["d"]) == "1.00" and over_seeds([]) == {}
