"""calibrate --judgements and evaluate index: verdicts measure probabilities and refine them."""

import shutil

import pytest
from support.serving import SQUARES, make_squares
from support.words import folded

from sfumato import load_index
from sfumato.calibration.fits import FitsCalibration
from sfumato.evaluation.judgements import Judgement, qrels_of, write_judgements

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
