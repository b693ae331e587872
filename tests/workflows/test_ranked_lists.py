"""Ranked lists of other engines and judged answers of an index: fitted, measured on held-out queries, and scored."""

import json
import shutil

import numpy as np
import pytest
from support.raising import raises
from support.serving import SQUARES, make_squares
from support.words import folded

from sfumato import ScoreCalibrator, load_index
from sfumato.calibration.fits import FitsCalibration
from sfumato.errors import UserError
from sfumato.evaluation.judgements import Judgement, qrels_of, write_judgements
from sfumato.metrics.reliability import expected_calibration_error
from sfumato.workflows.judgements import RankedLists, fit_lists, score_lists


def write(folder, n=60, seed=0, name="run"):
    random = np.random.default_rng(seed)
    run, qrels = [], []
    for q in range(n):
        score = np.sort(random.normal(0, 1, 12))[::-1]
        score[0] += random.exponential(2)
        for i, s in enumerate(score):
            run.append(f"query%20{q} Q0 <é#{i}> {i + 1} {s:.6f} bm25")
        right = random.random() < 0.4 + 0.1 * (score[0] - score[1])
        qrels.append(f"query%20{q} 0 <é#{0 if right else 5}> 1")
        qrels.append(f"query%20{q} 0 %3C%C3%A9%233%3E 0")
    (folder / f"{name}.trec").write_text("\n".join(run) + "\n")
    (folder / f"{name}.qrels").write_text("\n".join(qrels) + "\n")
    return folder / f"{name}.trec", folder / f"{name}.qrels"


def test_held_out_figures_are_those_of_fits_on_the_other_queries(tmp_path):
    run, qrels = write(tmp_path)
    made = ScoreCalibrator()
    found, hits = fit_lists(run, qrels, made), RankedLists.read(run)
    label = hits.labels(qrels, "no")
    assert (found.queries, found.judged, found.matches) == (60, 720, 60) and label.sum() == 60
    queries, p = np.random.default_rng(0).permutation(60), np.empty(720)
    for k in range(5):
        asked = np.isin(hits.groups, queries[k::5])
        other = ScoreCalibrator().fit(hits.score[~asked], label[~asked], groups=hits.groups[~asked])
        p[asked] = other.predict_proba(hits.score[asked], groups=hits.groups[asked])[:, 1]
    first = np.arange(720) % 12 == 0
    assert found.figures[0].rate == pytest.approx(label[first].mean())
    assert found.figures[0].mean_probability == pytest.approx(p[first].mean())
    assert found.figures[0].ece == pytest.approx(expected_calibration_error(p[first], label[first]), abs=1e-6)
    assert found.figures[1].hits == 10 and found.figures[1].n == 600
    whole = ScoreCalibrator().fit(hits.score, label, groups=hits.groups)
    assert made.formula_ == whole.formula_ and np.isnan(hits.labels(qrels, "unknown")).sum() == 720 - 120
    assert fit_lists(run, qrels, ScoreCalibrator(), unjudged="unknown").judged == 120


def test_a_scored_run_keeps_the_order_and_says_the_rest_in_json(tmp_path):
    run, qrels = write(tmp_path)
    made = ScoreCalibrator()
    fit_lists(run, qrels, made)
    other, _ = write(tmp_path, 7, seed=5, name="other")
    assert score_lists(other, made, tmp_path / "out.trec")[:2] == (7, 84)
    score_lists(other, made, tmp_path / "out.jsonl")
    before, after = RankedLists.read(other), RankedLists.read(tmp_path / "out.trec")
    assert after.query == before.query and after.item == before.item and before.item[0] == "<é#0>"
    p = made.predict_proba(before.score, groups=before.query)[:, 1]
    np.testing.assert_allclose(after.score, p, rtol=1e-8)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["query"] for line in lines] == [f"query%20{q}" for q in range(7)]
    assert lines[0]["expected_matches"] == pytest.approx(p[:12].sum())
    assert [hit["match_probability"] for hit in lines[0]["hits"]] == pytest.approx(p[:12])
    assert lines[0]["hits"][0]["score"] == before.score[0] and 0 < lines[0]["nothing_probability"] < 1


def test_the_commands(sfumato, tmp_path):
    run, qrels = write(tmp_path)
    out = tmp_path / "calibrator.json"
    shown = folded(sfumato.printed("calibrate", "--run", run, "--qrels", qrels, "--out", out))
    assert "60 queries, 720 judged hits" in shown and "first hit" in shown and "sfumato score --run" in shown
    found = json.loads(sfumato.printed("calibrate", "--run", run, "--qrels", qrels, "--out", out, "--json"))
    assert found["queries"] == 60 and found["figures"][0]["hits"] == 1
    scored = sfumato.printed("score", "--run", run, "--calibrator", out, "--out", tmp_path / "scored.trec")
    assert "720 hits of 60 queries scored" in folded(scored)
    for message, *arguments in (
        ("together", "calibrate", "--run", run, "--qrels", qrels),
        ("leave RUN", "calibrate", "folder", "--run", run, "--qrels", qrels, "--out", out),
        ("give RUN", "calibrate"),
        ("one of the other files", "score", "--run", run, "--calibrator", out, "--out", run),
        ("no file of a score calibrator", "score", "--run", run, "--calibrator", run, "--out", "x"),
    ):
        assert message in folded(sfumato.refused(*arguments))


def test_bad_files(tmp_path):
    for text, message in (
        ("\nq Q0 a 1 x t\n", "line 2: 'q Q0 a 1 x t' is no line of a TREC run"),
        ("q Q0 a 1 nan t\n", "is no line of a TREC run"), ("q a 1 2\n", "is no line of a TREC run"),
        ("\n", "holds no hit"), ("q Q0 a 1 2 t\nq Q0 a 2 1 t\n", "'a' is twice"),
    ):  # fmt: skip
        (tmp_path / "bad.trec").write_text(text)
        raises(UserError, message, RankedLists.read, tmp_path / "bad.trec")
    raises(UserError, "cannot read", RankedLists.read, tmp_path / "gone")
    good, qrels = write(tmp_path, 3)
    qrels.write_text("other 0 a 1\n")
    raises(UserError, "judges no query of", fit_lists, good, qrels, ScoreCalibrator())
    qrels.write_text("query%200 0 zzz 1\n")
    raises(UserError, "all judged hits match none", fit_lists, good, qrels, ScoreCalibrator())


QUERIES = [f"a plain {colour} square" for colour in SQUARES]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_squares(tmp_path_factory.mktemp("judged"))


@pytest.fixture
def index(made, tmp_path):
    shutil.copytree(made, tmp_path / "index")
    return tmp_path / "index"


def test_what_cannot_be_measured_or_refined_is_refused(sfumato, index, tmp_path):
    out = tmp_path / "v.jsonl"
    assert "cannot read" in sfumato.refused("evaluate", "index", index, "--judgements", out)
    out.write_text("{}\n")
    assert "line 1: 'query' is missing" in sfumato.refused("calibrate", index, "--judgements", out)
    write_judgements(out, [Judgement("q", "gone", 1, "ann", "2025-01-01", "rank 1")])
    assert "none of the items" in folded(sfumato.refused("calibrate", index, "--judgements", out))
    assert "none of the hits was judged" in folded(sfumato.refused("evaluate", "index", index, "--judgements", out))
    assert "leave --split" in folded(sfumato.refused("calibrate", index, "--judgements", out, "--split", "test"))
    told = folded(sfumato.refused("calibrate", index))
    assert "is a collection; refine its probabilities with --judgements FILE" in told


def all_verdicts(index, yes):
    with load_index(index) as searcher:
        answers = searcher.search(QUERIES, 24)
    return [
        Judgement(answer.query, hit.id, yes(answer, hit), "ann", "2025-01-01", "rank 1", hit.match_probability)
        for answer in answers
        for hit in answer
    ]


@pytest.mark.slow
def test_verdicts_refine_the_probabilities_of_searches(sfumato, index, tmp_path):
    out = tmp_path / "v.jsonl"
    write_judgements(out, all_verdicts(index, lambda answer, hit: 1))
    with load_index(index) as searcher:
        before = {hit.id: hit.match_probability for hit in searcher.search("a red square", 24)}
        assert searcher.gallery.fits is FitsCalibration.packaged()
    measured = sfumato.json("evaluate", "index", index, "--judgements", out)
    assert measured["figures"]["precision"]["value"] == 1 and measured["figures"]["judged"] == 1
    done = sfumato.json("calibrate", index, "--judgements", out)
    assert set(done["changed"]) == {"items with texts", "items without texts"} and done["n"] == 8 * 24
    assert done["after"]["calibration_error"]["value"] < done["before"]["calibration_error"]["value"] / 2
    with load_index(index) as searcher:
        after = {hit.id: hit.match_probability for hit in searcher.search("a red square", 24)}
        assert all(after[i] > before[i] for i in before if before[i] < 0.5) and min(before.values()) < 0.5
        assert sum(after.values()) > sum(before.values())
    later = sfumato.json("evaluate", "index", index, "--judgements", out)
    assert later["figures"]["said"]["value"] > measured["figures"]["said"]["value"]
    (qrels := tmp_path / "v.qrels").write_text(qrels_of(all_verdicts(index, lambda answer, hit: 1)))
    assert sfumato.json("evaluate", "index", index, "--judgements", qrels)["figures"] == later["figures"]
    assert sfumato.json("calibrate", index, "--judgements", qrels)["changed"] == done["changed"]
    printed = folded(sfumato.printed("evaluate", "index", index, "--judgements", out))
    assert "judged fraction of hits 1 to 10 100.0% (80 of 80 hits)" in printed
    printed = folded(sfumato.printed("calibrate", index, "--judgements", out))
    assert "Refined: items with texts and items without texts" in printed


@pytest.mark.slow
def test_few_verdicts_change_nothing_and_undo_a_refinement(sfumato, index, tmp_path):
    out = tmp_path / "v.jsonl"
    write_judgements(out, verdicts := all_verdicts(index, lambda answer, hit: 1))
    sfumato.json("calibrate", index, "--judgements", out)
    write_judgements(out, [*verdicts[:3], Judgement("a red one", "gone", 1, "ann", "2025-01-01", "rank 1")])
    done = sfumato.json("calibrate", index, "--judgements", out)
    assert done["changed"] == [] and done["not_found"] == 1
    errors = [done[when]["calibration_error"]["value"] for when in ("before", "after")]
    assert errors[0] == pytest.approx(errors[1], abs=1e-9)
    with load_index(index) as searcher:
        assert searcher.gallery.fits is FitsCalibration.packaged()
    assert "constants stay" in folded(sfumato.printed("calibrate", index, "--judgements", out))
