"""The numbers of the papers' figures against slow loops, hand-worked tables and other commands, on tiny runs."""

import json
import math
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from PIL import Image
from support.raising import raises

from papers.studies.gradients import pair_gradients
from papers.tables.figure_numbers import KINDS, Scene, make_figure
from papers.tables.items import find_item
from papers.tables.paper_tables import TableData, choose_data
from papers.tests.tables.tiny_figures import SMALL, make_pictures
from sfumato.errors import UserError
from sfumato.losses.contrastive import InfoNCEOptions, infonce_loss
from sfumato.losses.pcmepp import PCMEPPOptions, pcmepp_loss
from sfumato.losses.triplet import TripletOptions, triplet_loss
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import load_run


@pytest.fixture
def made(pictures):
    """Makes a figure on twenty images of a colour each; equal runs are trained once."""

    def make(name, *overrides, n_seeds=1, item=None):
        chosen = (f"data.images={pictures / 'images'}", *SMALL, *overrides)
        item = item or find_item(name)
        data = choose_data(item, str(pictures / "dataset_flickr8k.json"), chosen)
        return make_figure(item, data, pictures / "runs", n_seeds=n_seeds)

    return make


def embedded(folder, split="test"):
    run = load_run(folder)
    prepared = load_split(run.model, run.recipe.data, split)
    return prepared, *embed_split(run.model, prepared)


def points(panel, row):
    return [(p["x"], p["value"], p["low"], p["high"]) for p in panel["series"][row]]


def test_recall_in_bins_is_that_of_evaluate_and_a_mean_over_seeds(made, sfumato):
    figure = made("PCME++ Fig. 3", n_seeds=2)
    (runs,) = figure.runs.values()
    found = [sfumato.json("evaluate", "run", run)["uncertainty"] for run in runs]
    for panel in figure.numbers["panels"]:
        own = [one[panel["name"]] for one in found]
        assert panel["correlation"] == pytest.approx(mean(one["correlation"] for one in own))
        for k, b in enumerate(panel["bins"]):
            recalls = [one["bins"][k]["recall"] for one in own]
            assert b["value"] == pytest.approx(mean(recalls))
            assert [b["low"], b["high"]] == pytest.approx([mean(recalls) + k * stdev(recalls) for k in (-1, 1)])
            assert b["uncertainty"] == pytest.approx(mean(one["bins"][k]["uncertainty"] for one in own), rel=1e-5)


def test_the_papers_measure_sorts_the_queries(made):
    """PCME's bins are of the geometric mean of sigma: one seed, with Wilson's interval."""
    figure = made("PCME Fig. 6")
    ((run,),) = figure.runs.values()
    _, _, texts = embedded(run)
    ordered = np.sort(np.exp(texts.log_var.double().numpy().mean(1) / 2))
    (panel,) = [p for p in figure.numbers["panels"] if p["name"] == "t2i"]
    for part, b in zip(np.array_split(ordered, 10), panel["bins"], strict=True):
        assert b["uncertainty"] == pytest.approx(part.mean(), rel=1e-5)
        n, p, z = b["count"], b["value"], 1.959964
        centre, half = (p + z * z / 2 / n), z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
        assert b["low"] == pytest.approx(max(0, (centre - half) / (1 + z * z / n)), abs=1e-6)


def test_sorted_variances_are_means_over_items(made):
    figure = made("PCME Fig. D.1")
    for row, (run,) in figure.runs.items():
        _, images, texts = embedded(run)
        for panel, e in zip(figure.numbers["panels"], (images, texts), strict=True):
            var = np.exp(e.log_var.double().numpy())
            expected = sorted((var[:, k].mean() for k in range(e.d)), reverse=True)
            assert [p["value"] for p in panel["series"][row]] == pytest.approx(expected, rel=1e-5)
    isotropic = [p["value"] for p in figure.numbers["panels"][0]["series"]["PCME isotropic"]]
    assert max(isotropic) == pytest.approx(min(isotropic), rel=1e-5)


def test_values_are_read_from_the_rows_and_figures_are_those_of_evaluate(made, sfumato):
    item = find_item("PCME Fig. D.2")
    figure = made("", item=replace(item, runs={row: item.runs[row] for row in ("PCME, 1", "PCME, 7")}))
    (panel,) = figure.numbers["panels"]
    assert [x for x, *_ in points(panel, "PCME")] == [1, 7] and figure.split == "val"
    for (_, value, *_), (run,) in zip(points(panel, "PCME"), figure.runs.values(), strict=True):
        found = sfumato.json("evaluate", "run", run, "--split", "val")
        assert value == pytest.approx(50 * (found["i2t"]["r_precision"] + found["t2i"]["r_precision"]))


def test_samples_at_test_time_are_those_of_evaluate(made, sfumato):
    figure = made("PCME Fig. E.1")
    (panel,) = figure.numbers["panels"]
    ((run,),) = figure.runs.values()

    def r_precision(*distance):
        found = sfumato.json("evaluate", "run", run, "--distance", *distance)
        return 50 * sum(found[side]["r_precision"] for side in ("i2t", "t2i"))

    for n, value, *_ in points(panel, "PCME, match probability"):
        assert value == pytest.approx(r_precision("match_probability", "--samples", int(n))), n
    alone = [value for _, value, *_ in points(panel, "PCME, means alone")]
    assert alone == pytest.approx([r_precision("squared_l2")] * len(alone))


def test_two_metrics_of_each_row(made, sfumato):
    item = find_item("PCME Fig. E.2")
    figure = made("", item=replace(item, runs={row: item.runs[row] for row in ("VSE0", "PVSE K=2")}))
    point = figure.numbers["panels"][1]["points"][-1]
    (run,) = figure.runs[point["row"]]
    found = sfumato.json("evaluate", "run", run)["t2i"]
    own = 100 * found["recall@1"], 100 * found["r_precision"]
    assert (point["x"]["value"], point["y"]["value"]) == pytest.approx(own)


def test_pseudo_positives_are_those_of_the_log(made):
    figure = made("PCME++ Fig. C.1", "train.epochs=2")
    score, number = figure.numbers["panels"]
    with_them, without = ({row: run for row, (run,) in figure.runs.items() if word in row} for word in ("0.1", "= 0,"))
    ((row, run),) = with_them.items()
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    expected = [(k + 1, (e["pseudo_positives_i2t"] + e["pseudo_positives_t2i"]) / 2) for k, e in enumerate(log)]
    assert [p[:2] for p in points(number, row)] == [(x, pytest.approx(y)) for x, y in expected]
    rsums = [pytest.approx(100 * e["val/rsum"]) for e in log]
    assert [p[:2] for p in points(score, row)] == [*enumerate(rsums, 1)]
    assert set(score["series"]) == {*with_them, *without} and set(number["series"]) == {row}


@pytest.mark.parametrize("name", ["PVSE++ Fig. 4", "PVSE++ Fig. 7", "PCME++ Fig. C.3"])
def test_examples_are_the_most_and_the_least_uncertain_with_their_nearest(made, name):
    figure = made(name)
    ((run,),) = figure.runs.values()
    prepared, images, texts = embedded(run)
    data, options = prepared.data, figure.item.options
    squared = np.square(images.mean.double().numpy()[:, None] - texts.mean.double().numpy()).sum(2)
    var = {"image": images.var.double().numpy(), "text": texts.var.double().numpy()}
    if options["uncertainty"] == "log_det":  # The second paper ranks by its Wasserstein distance as printed.
        distance = squared + np.square(var["image"][:, None] - var["text"]).sum(2)
    else:
        distance = squared + var["image"].sum(1)[:, None] + var["text"].sum(1)
    for side, shown in figure.numbers["sides"].items():
        value = np.log(var[side]).sum(1) if options["uncertainty"] == "log_det" else var[side].sum(1)
        order = sorted(range(len(value)), key=lambda i: value[i] * (-1 if options["order"] == "most" else 1))[:4]
        assert [one["uncertainty"] for one in shown] == pytest.approx([value[i] for i in order], rel=1e-4)
        names = list(data.texts if side == "text" else data.image_ids)
        others = list(data.image_ids if side == "text" else data.texts)
        matrix, match = distance, np.asarray(data.relevance().to_dense())
        matrix, match = (matrix.T, match.T) if side == "text" else (matrix, match)
        for one in shown:
            i = names.index(one["query"].get("text", one["query"].get("id")))
            assert one["uncertainty"] == pytest.approx(value[i], rel=1e-4)
            found = [others.index(r.get("text", r.get("id"))) for r in one["results"]]
            assert matrix[i, found] == pytest.approx(np.sort(matrix[i])[:4], rel=1e-4) and len(set(found)) == 4
            assert [r["true"] for r in one["results"]] == match[i, found].astype(bool).tolist()
    assert set(figure.pictures) >= {
        item["picture"]
        for shown in figure.numbers["sides"].values()
        for one in shown
        for item in (one["query"], *one["results"])
        if "picture" in item
    }


def test_corruption_of_several_seeds_is_a_mean_of_its_study(made):
    figure = made("PCME Fig. 7", n_seeds=2)
    assert [panel["name"] for panel in figure.numbers["panels"]] == ["erased", "dropped_words"]
    (runs,) = figure.runs.values()
    clean = []
    for run in runs:
        _, _, texts = embedded(run)
        clean.append(float(texts.log_var.double().mean(1).div(2).exp().mean()))
    first = figure.numbers["panels"][1]["series"]["PCME"][0]
    assert first["x"] == 0 and first["value"] == pytest.approx(mean(clean), rel=1e-4)
    assert first["high"] - first["value"] == pytest.approx(stdev(clean), rel=1e-2)


def test_runs_on_ready_features_have_nothing_to_damage():
    scene = Scene(find_item("PCME Fig. 7"), TableData("flickr8k", "Flickr8k"), {})
    raises(UserError, "ready features alone", KINDS["corruption"].numbers, scene)


def test_gradients_of_pairs_are_those_of_the_formulas():
    """The match loss: a (y - p) / n m of each pair; InfoNCE by its softmax; a hinge of two pairs worked by hand."""
    random = np.random.default_rng(0)
    image, text = torch.from_numpy(random.normal(size=(5, 5))), torch.from_numpy(random.normal(size=(5, 5)))
    d = np.square(image.numpy()[:, None] - text.numpy()).sum(2)
    match = torch.eye(5, dtype=torch.float64)
    plain = PCMEPPOptions(distance="squared_l2", alpha=0.0, beta=0.0)
    own = pair_gradients(
        lambda x, y: pcmepp_loss(x, y, match, plain, logit_scale=0.5, logit_bias=3.0).total, image, text
    )
    assert np.allclose(own, 2 * 0.5 * (np.eye(5) - 1 / (1 + np.exp(0.5 * d - 3))) / 25)  # The match term counts twice.
    own = pair_gradients(lambda x, y: infonce_loss(x, y, match, InfoNCEOptions(), logit_scale=0.3).total, image, text)
    softmax = [np.exp(-0.3 * d) / np.exp(-0.3 * d).sum(axis, keepdims=True) for axis in (0, 1)]
    expected = sum(0.3 * (np.eye(5) - p) / 5 for p in softmax)
    assert np.allclose(own, expected / 2)
    hinge = TripletOptions(margin=100.0)
    own = pair_gradients(lambda x, y: triplet_loss(x, y, match, hinge).total, image, text)
    expected = 2 * np.eye(5)
    others = d + 1e9 * np.eye(5)
    for k in range(5):
        expected[k, others[k].argmin()] -= 1
        expected[others[:, k].argmin(), k] -= 1
    assert np.allclose(own, expected / 5)


def test_the_gradients_of_the_figure_say_what_the_paper_says():
    item = find_item("PCME++ Fig. A.3")
    figure = make_figure(item, choose_data(item, None, ()), None)
    pairs = {name: np.abs(np.array(rows)) > 1e-14 for name, rows in figure.numbers["matrices"].items()}
    assert pairs["match loss of PCME++"].all() and pairs["InfoNCE"].all()
    assert 0 < pairs["triplet, hardest negative"].sum() < pairs["triplet, all negatives"].sum() < 32
    disturbed, matrices = figure.numbers["disturbed"], figure.numbers["matrices"]
    assert disturbed["match loss of PCME++"] == 0 < disturbed["triplet, hardest negative"] < disturbed["InfoNCE"] == 56
    plain, mixed = (np.array(matrices[name]) for name in ("match loss of PCME++", "mixed image"))
    assert (plain[1:] == mixed[1:]).all() and (plain[0] != mixed[0]).any()


def test_pmrp_by_tolerance_against_sets_of_classes(tmp_path):
    """Twenty images of COCO's form: a text matches an image whose classes differ in at most zeta."""
    folder, random = make_pictures(tmp_path, coco=True), np.random.default_rng(1)
    layout = json.loads((folder / "dataset_coco.json").read_text())["images"]
    ids = {entry["filename"]: int(entry["filename"][-16:-4]) for entry in layout}
    classes = {i: set(random.choice(6, random.integers(1, 4), replace=False).tolist()) for i in ids.values()}
    annotations = [{"image_id": i, "category_id": c} for i, chosen in classes.items() for c in chosen]
    instances = {"images": [{"id": i} for i in ids.values()], "annotations": annotations}
    (folder / "instances.json").write_text(json.dumps(instances))
    item = find_item("PCME Fig. E.3")
    item = replace(item, runs={"PCME": item.runs["PCME"]})
    shrunk = (*SMALL, 'model.text.kind="small"', "model.local_attention=false", "optim.first_stage_epochs=0")
    overrides = (f"data.path={folder / 'dataset_coco.json'}", f"data.images={folder / 'images'}", *shrunk)
    data = choose_data(item, None, overrides)
    raises(UserError, "--instances", make_figure, item, data, folder / "runs")
    figure = make_figure(item, data, folder / "runs", instances=[folder / "instances.json"])
    ((run,),) = figure.runs.values()
    prepared, images, texts = embedded(run)
    matrix = load_run(run).ranking_distance().matrix(images, texts).double().numpy()
    image_of = [ids[i] if i in ids else int(i) for i in prepared.data.image_ids]
    own = np.asarray(prepared.data.relevance().to_dense()).argmax(0)
    text_of = [image_of[k] for k in own]
    for zeta, value, *_ in points(figure.numbers["panels"][1], "PCME"):
        by_fold = []
        for fold in np.array_split(np.arange(images.n), 5):
            for t in [t for t, i in enumerate(text_of) if i in {image_of[k] for k in fold}]:
                true = [len(classes[image_of[k]] ^ classes[text_of[t]]) <= zeta for k in fold]
                order = np.argsort(matrix[fold, t], kind="stable")[: sum(true)]
                by_fold.append(np.array(true)[order].mean())
        assert value == pytest.approx(100 * np.mean(by_fold)), zeta


def test_prompts_kept_are_those_of_zeroshot(made, papers, tmp_path, monkeypatch):
    (tmp_path / "templates.txt").write_text("a {}\nsome {}\n{}\n")
    monkeypatch.setattr("papers.studies.prompts.CLIP_TEMPLATES", tmp_path / "templates.txt")
    run = next(iter(made("PCME++ Fig. 3").runs.values()))[0]
    for k, name in enumerate(("red", "green")):
        (tmp_path / "val" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (20, 20), (200 - 150 * k, 50 + 40 * i, 90)).save(tmp_path / "val" / name / f"{i}.png")
    (tmp_path / "classes.tsv").write_text("red\ta red dog\ngreen\tthe grass\n")
    files = {"images": str(tmp_path / "val"), "classes": str(tmp_path / "classes.tsv")}
    item = replace(find_item("PCME++ Fig. C.2"), options=files)
    numbers = KINDS["prompts_kept"].numbers(Scene(item, TableData("imagenet", "ImageNet"), {"PCME++": (run,)}))
    settings = *(f"zeroshot.{key}={file}" for key, file in files.items()), "zeroshot.filter=oracle"
    found = papers.json("analyse", run, "--only", "zeroshot", *settings, "--out", tmp_path / "out")
    assert found["zeroshot"]["report"]["prompts_kept"] == [numbers["kept"]] and numbers["n_images"] == 6
