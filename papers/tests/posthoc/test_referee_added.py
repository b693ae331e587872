"""Anybody's estimators in the referee: built-in ones from their numbers, bad files, the guide's lines, the schema."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.raising import raises
from support.toy import make_toy
from support.words import folded

from papers.posthoc.added import COLUMNS, read_added
from papers.posthoc.contestants import fit_contestant, pair_calibration
from papers.posthoc.frozen_model import FrozenModel, FrozenSplit, freeze
from papers.posthoc.referee import RefereeOptions, referee_model
from papers.posthoc.referee_report import report_schema
from sfumato.errors import UserError
from sfumato.models.embed import load_split
from sfumato.models.recipe import load_recipe
from sfumato.models.run import load_run
from sfumato.training.loop import fit

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "papers" / "docs" / "referee.md").read_text(encoding="utf-8")
SIDES = {"t2i": "text", "i2t": "image"}
COSTS = {"ms_per_query", "query_megabytes"}


def split_of(n, seed, *, many=False):
    """Noisy images and two texts each, in an order that is not that of their ids; one text has no match."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda k: torch.randn(k, 6, generator=generator)
    latent = draw(n)
    texts = torch.cat([latent.repeat_interleave(2, 0) + 0.7 * draw(2 * n), draw(1)])
    pairs = [(t // 2, t) for t in range(2 * n)]
    pairs += [((t // 2 + k) % n, t) for t in range(0, 2 * n, 3) for k in range(1, t % 5)] if many else []
    # Both splits use the same ids, as wordings that are held out do.
    ids = [tuple(f"{side}, {(7 * k) % 1009}" for k in range(count)) for side, count in (("i", n), ("t", 2 * n + 1))]
    return FrozenSplit(latent + 0.7 * draw(n), texts, np.array(pairs), image_ids=ids[0], text_ids=ids[1])


def model_of(n_val=60, **options):
    return FrozenModel("tiny", split_of(80, 1), split_of(n_val, 2), {"test": split_of(61, 3, **options)})


def rows_of(model, method, name="mine"):
    """The uncertainties of a built-in method, by id."""
    contestant = fit_contestant(method, model, pair_calibration(model, reference=False))
    return [
        [name, split, direction, query, repr(float(u))]
        for split, x in {"val": model.val, **model.tests}.items()
        for direction, side in SIDES.items()
        for query, u in zip(x.ids(side), contestant.uncertainty(x, side, None), strict=True)
    ]


def written(path, rows, header=COLUMNS):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def figures_of(report, name, *without):
    found = report["methods"][name]["tests"]
    return {
        place: {key: value for key, value in figures.items() if key not in COSTS | set(without)}
        for place, figures in ((f"{split} {d}", found[split][d]) for split in found for d in found[split])
    }


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("method", ["top1", "margin"])
def test_the_numbers_of_a_built_in_method_give_its_figures(tmp_path, method, many):
    model = model_of(many=many)
    added = read_added([written(tmp_path / "scores.csv", rows_of(model, method)[::-1])])
    report = referee_model(model, RefereeOptions(methods=(method,), n_resamples=20, n_absent=9), added=added)
    mine = figures_of(report, "mine", "absent_auroc")
    assert mine == figures_of(report, method, "absent_auroc") and sorted(mine) == ["test i2t", "test t2i"]
    assert all(f["absent_auroc"] == 0.5 for f in figures_of(report, "mine").values())
    assert (mine["test t2i"]["ambiguity"] is not None) == many
    own = report["methods"]["mine"]
    assert own["added"].endswith("scores.csv") and not own["needs_gallery"] and not own["corruptions"]
    assert [own[cost] for cost in ("fit_seconds", "fit_megabytes", "bytes")] == [None] * 3


def test_a_method_of_the_item_alone_is_the_same_in_dealt_galleries(tmp_path):
    """Three galleries, whose queries are not those of the file in order; every figure, that of absent matches too."""
    model = model_of(n_val=20, many=True)
    added = read_added([written(tmp_path / "scores.csv", rows_of(model, "whitened_norm"))])
    report = referee_model(model, RefereeOptions(methods=("whitened_norm",), n_resamples=9, n_absent=9), added=added)
    mine, own = (figures_of(report, name, "recall_after", "recall_csd") for name in ("mine", "whitened_norm"))
    assert mine == own
    assert {f["n_galleries"] for f in figures_of(report, "mine").values()} == {3}


def test_added_methods_are_measured_anew_and_the_others_are_kept(tmp_path):
    model, path = model_of(), tmp_path / "tiny.json"
    options, rows = RefereeOptions(methods=("constant",), n_resamples=2, n_absent=2), rows_of(model, "top1")
    last = {"val": model.val.text_ids[-1], "test": model.tests["test"].text_ids[-1]}
    texts = [["texts", *row[1:]] for row in rows if row[2] == "t2i" and row[3] != last[row[1]]]
    added = read_added([written(tmp_path / "a.csv", rows), written(tmp_path / "b.csv", texts)])
    said = []
    report = json.loads(json.dumps(referee_model(model, options, path=path, say=said.append, added=added)))
    assert list(report["methods"]) == ["constant", "mine", "texts"] and json.loads(path.read_text()) == report
    # A text without a match needs no row; ids do not change the model.
    assert figures_of(report, "texts") == {"test t2i": figures_of(report, "mine")["test t2i"]}
    assert replace(model, val=replace(model.val, text_ids=())).digest == model.digest
    changed = [[*row[:4], str(-float(row[4]))] for row in rows]
    added = read_added([written(tmp_path / "a.csv", changed)])
    again = referee_model(model, options, path=path, say=said.append, added=added)
    assert again["methods"]["constant"] == report["methods"]["constant"] and len(said) == 1
    auroc = [r["methods"]["mine"]["tests"]["test"]["t2i"]["wrong_auroc"]["value"] for r in (report, again)]
    assert sum(auroc) == pytest.approx(1) and "texts" not in again["methods"]
    assert list(referee_model(model, options, path=path)["methods"]) == ["constant"]
    assert list(json.loads(path.read_text())["methods"]) == ["constant"]


def test_rows_that_do_not_fit_the_data_are_named_before_anything_is_fitted(tmp_path, monkeypatch):
    model = model_of()
    monkeypatch.setattr("papers.posthoc.referee.fit_contestant", None)
    rows, path = rows_of(model, "top1"), tmp_path / "scores.csv"

    def refused(rows, message, model=model):
        raises(UserError, message, referee_model, model, added=read_added([written(path, rows)]))

    place = next(k for k, row in enumerate(rows) if row[1:3] == ["test", "t2i"])
    query = rows[place][3]
    refused([*rows[:place], *rows[place + 2 :]], rf"lacks 2 of 122 queries of split test, .* the first is '{query}'")
    wrong = [*rows[:place], [*rows[place][:3], f"{query}x", "1"], *rows[place + 1 :]]
    refused(wrong, rf"scores.csv:{place + 2}: text '{query}x' is not in split test; expected the id of one of its 123")
    refused([row for row in rows if row[1] != "val"], "no rows of split val, direction i2t; expected a number for each")
    refused([row for row in rows if row[1] == "val"], "no rows of split test, direction i2t; .*which is measured")
    tset = [[row[0], row[1].replace("test", "tset"), *row[2:]] for row in rows]
    refused(tset, f"scores.csv:{place + 2}: split 'tset' is not measured; expected val, test. .*--split")
    plain = replace(model, val=replace(model.val, text_ids=()))
    refused(rows, r"texts of split val have no ids.*FrozenSplit\(images, texts, pairs, image_ids=", plain)


def test_ids_are_one_for_each_item_or_none():
    make = lambda **ids: FrozenSplit(torch.ones(2, 3), torch.ones(2, 3), np.array([[0, 0]]), **ids)
    raises(ValueError, "text_ids has 2 ids, 1 of them distinct, for 2 texts", make, text_ids=("a", "a"))
    raises(ValueError, "image_ids has 1 ids, 1 of them distinct, for 2 images", make, image_ids=("a",))
    split = split_of(9, 5)
    part = split.select_images(np.array([1, 4]))
    assert part.image_ids == ("i, 7", "i, 28") and part.text_ids == tuple(f"t, {7 * k}" for k in (2, 3, 8, 9))
    other = split.with_queries("text", np.array([3, 5]), torch.ones(2, 6))
    assert other.text_ids == ("t, 21", "t, 35") and other.image_ids == split.image_ids


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("added")
    fit(load_recipe(make_toy(folder / "toy"), ["train.epochs=1"]), folder / "runs" / "mine")
    return folder / "runs" / "mine"


@pytest.fixture(scope="module")
def scores(run):
    """The file that the lines of the guide write."""
    section = GUIDE.partition("## Add your own estimator")[2]
    block = re.search(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.parents[1])
        exec(block, {})
    return run.parents[1] / "scores.csv"


def test_the_lines_of_the_guide_write_a_file_that_the_command_takes(run, scores, papers):
    loaded = load_run(run)
    data = load_split(loaded.model, loaded.recipe.data, "test").data
    split = freeze(loaded, loaded.recipe.data, ("test",), name="mine").tests["test"]
    assert (split.image_ids, split.text_ids) == (data.image_ids, data.text_ids)
    arguments = "--methods", "constant,top1", "--bootstrap", 5, "--absent", 3, "--corrupted", 4, "--add", scores
    words = folded(papers.printed("referee", run, *arguments))
    assert "mine (scores.csv)" in words and "uncertainties from scores.csv" in words and "[mine]" not in words
    assert "Not measured: mine (scores.csv) (a file has no uncertainties of damaged queries)" in words
    path = run / "referee-test" / "mine-seed0.json"
    report = json.loads(path.read_text())
    assert "| mine (scores.csv) |" in path.with_suffix(".md").read_text() and list(report["methods"])[-1] == "mine"
    mine, top1 = (report["methods"][name]["tests"]["test"] for name in ("mine", "top1"))
    for direction in SIDES:
        assert mine[direction]["log_loss"]["value"] == pytest.approx(top1[direction]["log_loss"]["value"], rel=1e-4)
    short = scores.with_name("short.csv")
    short.write_text("\n".join(scores.read_text().splitlines()[:-1]))
    status, _, err = papers("referee", run, *arguments[:-1], short)
    assert status == 2 and "lacks 1 of" in folded(err) and "Traceback" not in err


def test_a_report_fits_its_schema(run, scores):
    jsonschema = pytest.importorskip("jsonschema", reason="comes with schemathesis")
    schema = json.loads(report_schema())
    loaded = load_run(run)
    model = freeze(loaded, loaded.recipe.data, ("test",), name="mine", n_corrupted=4)
    options = RefereeOptions(methods=("constant", "top1", "laplace"), n_resamples=5, n_absent=3)
    report = json.loads(json.dumps(referee_model(model, options, added=read_added([scores]))))
    assert report["methods"]["top1"]["corruptions"] and "unavailable" in report["methods"]["laplace"]
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    assert not list(validator.iter_errors(report))
    for key, value in (("ece", "small"), ("platt", [1.0]), ("recall", {"value": 1.0})):
        wrong = json.loads(json.dumps(report))
        wrong["methods"]["top1"]["tests"]["test"]["t2i"][key] = value
        assert list(validator.iter_errors(wrong)), key


def test_the_schema_in_the_documentation_is_this_one():
    """Otherwise: python -c 'import papers.posthoc.referee_report as r; print(r.report_schema(), end="")' > FILE."""
    assert (ROOT / "papers" / "docs" / "referee.schema.json").read_text(encoding="utf-8") == report_schema()
