"""The referee on tiny frozen models: every figure against loops, files that resume, tables by hand, the command."""

import csv
import gc
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
from support.raising import raises
from support.toy import make_toy
from support.words import folded, too_wide
from torch.nn import functional

from papers.posthoc import METHODS, frozen_model, peak_memory
from papers.posthoc import referee as referee_module
from papers.posthoc.closed_forms import fit_hit_logits
from papers.posthoc.contestants import BASELINES, contestants, fit_contestant, pair_calibration
from papers.posthoc.frozen_model import FrozenCorruption, FrozenModel, FrozenSplit, freeze
from papers.posthoc.peak_memory import PeakMemory
from papers.posthoc.referee import RefereeOptions, adapter_epochs, referee_model
from papers.posthoc.referee_tables import referee_summary, referee_table, referee_tables
from papers.shown import markdown
from papers.uncertainty.corruption import corrupted_queries
from sfumato.errors import UserError
from sfumato.evaluation.estimators import ESTIMATORS, Estimator
from sfumato.metrics.reliability import log_loss
from sfumato.models.embed import load_split
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import load_run
from sfumato.training.loop import fit

TINY = {
    name: {"training": replace(given["training"], widths=(8,) * len(given["training"].widths), batch_size=32)}
    for name, given in adapter_epochs(2).items()
}
QUICK = RefereeOptions(fit=TINY, n_resamples=10, n_absent=30)
SIDES = {"t2i": "text", "i2t": "image"}


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def split_of(n, seed, *, per_image=2, many=False, hidden=True):
    """Noisy linear views of one latent vector; texts match one image, or also the next few images."""
    latent = draw(n, 5, seed=seed)
    inputs = [latent @ draw(5, p, seed=p) for p in (7, 8)]
    inputs[1] = inputs[1].repeat_interleave(per_image, 0)
    inputs = [x + 0.5 * draw(*x.shape, seed=seed + k + 50) for k, x in enumerate(inputs)]
    images, texts = (x @ w.T + b for x, (w, b) in zip(inputs, PROJECTIONS.values(), strict=True))
    pairs = [(text // per_image, text) for text in range(n * per_image)]
    if many:
        pairs += [((t // per_image + k) % n, t) for t in range(0, n * per_image, 3) for k in range(1, t % 5)]
    return FrozenSplit(images, texts, np.array(pairs), np.arange(n), *(inputs if hidden else ()))


def projection(p):
    """A layer that finds the latent vector in its inputs, and a small bias."""
    matrix = torch.linalg.pinv(draw(5, p, seed=p)) @ draw(5, 6, seed=1)
    return matrix.T.contiguous(), 0.2 * draw(6, seed=2)


PROJECTIONS = {"image": projection(7), "text": projection(8)}


def model_of(**options):
    tests = {"test": split_of(61, 12, **options)}
    projections = PROJECTIONS if options.get("hidden", True) else {}
    return FrozenModel("tiny", split_of(80, 10, **options), split_of(60, 11, **options), tests, projections)


@pytest.fixture(autouse=True)
def _quick_collections():
    """Every measurement of memory collects garbage first, and need not look at what was there before the test."""
    gc.freeze()


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def report(model):
    gc.freeze()
    return referee_model(model, QUICK)


def untimed(report):
    """Without what differs between equal calls."""
    costs = "fit_seconds", "fit_megabytes", "ms_per_query", "query_megabytes"
    kept = lambda found: {key: value for key, value in found.items() if key not in costs}
    return json.loads(json.dumps(report), object_hook=kept)


def by_loops(split, side):
    """(cosine, matches) as lists of lists, rows are queries of the side."""
    x, y = (split.images, split.texts) if side == "image" else (split.texts, split.images)
    x, y = (functional.normalize(v.double(), dim=1) for v in (x, y))
    truth = {(int(i), int(t)) for i, t in split.pairs}
    match = [[((q, g) if side == "image" else (g, q)) in truth for g in range(len(y))] for q in range(len(x))]
    return (x @ y.T).tolist(), match


def first_hit(cosine, match):
    return float(match[max(range(len(cosine)), key=lambda g: cosine[g])])


def auroc_by_loops(low, high):
    pairs = [(a, b) for a in low for b in high]
    return sum((b > a) + 0.5 * (b == a) for a, b in pairs) / len(pairs)


def test_every_contestant_is_there_for_every_direction(report):
    assert list(report["methods"]) == list(contestants()) == [*BASELINES, *METHODS]
    for name, method in report["methods"].items():
        sides = METHODS[name].sides if name in METHODS else ("text", "image")
        directions = [direction for direction, side in SIDES.items() if side in sides]
        assert sorted(method["tests"]["test"]) == sorted(directions) and method["summary"]
        for figures in method["tests"]["test"].values():
            assert figures["n_galleries"] == 1 and math.isfinite(figures["log_loss"]["value"])
            # Without the gallery nobody knows that a match is absent.
            assert method["needs_gallery"] == (figures["absent_auroc"] != 0.5), name
            assert figures["absent_auroc"] > 0.6 or name != "top1"
            has = name in METHODS and METHODS[name].per_item
            assert (figures["recall_after"] is not None) == has == (figures["recall_csd"] is not None)
            assert not has or figures["recall_after"] == pytest.approx(figures["recall"]["value"]), name
            assert [figures["minus_s_r2"][b]["n_bins"] for b in ("count", "width")] == [10, 10]
            assert all(sum(b["counts"]) == figures["n_queries"] for b in figures["minus_s_r2"].values())
    json.dumps(report, allow_nan=False)
    for figures in report["methods"]["constant"]["tests"]["test"].values():
        assert figures["wrong_auroc"]["value"] == 0.5 and figures["wrong_gain"]["value"] == pytest.approx(0, abs=1e-12)
        assert figures["platt"] is None and figures["minus_s_r2"]["count"]["score"]["value"] is None
        assert figures["wrong_aurc"]["value"] == pytest.approx(1 - figures["recall"]["value"])


@pytest.mark.parametrize("direction", SIDES)
def test_recall_and_top1_are_those_of_loops(model, report, direction):
    split, side = model.tests["test"], SIDES[direction]
    cosine, match = by_loops(split, side)
    hits = [first_hit(c, m) for c, m in zip(cosine, match, strict=True)]
    figures = report["methods"]["top1"]["tests"]["test"][direction]
    assert figures["recall"]["value"] == pytest.approx(np.mean(hits))
    u = [1 - max(c) for c in cosine]
    wrong, right = ([x for x, hit in zip(u, hits, strict=True) if hit == k] for k in (0, 1))
    assert figures["wrong_auroc"]["value"] == pytest.approx(auroc_by_loops(right, wrong), abs=1e-3)

    cosine, match = by_loops(model.val, side)
    of_val = torch.tensor([1 - max(c) for c in cosine])
    val_hits = torch.tensor([first_hit(c, m) for c, m in zip(cosine, match, strict=True)])
    scale, bias = fit_hit_logits(of_val, val_hits)
    assert figures["platt"] == pytest.approx([scale, bias], rel=1e-3)
    p = [1 / (1 + math.exp(scale * x - bias)) for x in u]
    expected = -np.mean([math.log(q if hit else 1 - q) for q, hit in zip(p, hits, strict=True)])
    assert figures["log_loss"]["value"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("direction", SIDES)
@pytest.mark.parametrize("name", ["top1", "margin", "match_entropy", "sfumato"])
def test_matches_are_taken_out_of_the_gallery_of_their_query(model, name, direction):
    """Against a whole split of which this query's matches are deleted."""
    split, side = model.tests["test"], SIDES[direction]
    contestant = fit_contestant(name, model, pair_calibration(model, reference=False))
    rows = np.arange(0, 60, 7)
    found = contestant.uncertainty(split, side, rows)
    relevance = split.relevance(side)
    assert np.abs(found - contestant.uncertainty(split, side, None)[rows]).max() > 1e-3
    for k, row in enumerate(rows):
        own = relevance.select_queries(np.array([row])).indices
        kept = np.setdiff1d(np.arange(relevance.n_gallery), own)
        other = split.texts if side == "image" else split.images
        images, texts = (split.images, other[kept]) if side == "image" else (other[kept], split.texts)
        smaller = FrozenSplit(images, texts, np.array([[0, 0]]))
        expected = contestant.uncertainty(smaller, side, None)[row]
        # The size of the gallery shifts sfumato's logits a little: here it stays that of the whole gallery.
        assert found[k] == pytest.approx(expected, abs=0.1 if name == "sfumato" else 1e-5)


def test_sfumato_is_the_probability_of_its_calibration(model, report):
    """Its first-hit probabilities, by the public function of the calibration, query by query."""
    calibration = pair_calibration(model, reference=False)
    for direction, side in SIDES.items():
        cosine, match = by_loops(model.tests["test"], side)
        p = []
        for row in cosine:
            nearest = torch.tensor(sorted(2 - 2 * c for c in row)[:50])
            p.append(calibration.of(direction).hit_probability(nearest[:1], nearest, n_gallery=len(row)))
        hits = torch.tensor([first_hit(c, m) for c, m in zip(cosine, match, strict=True)])
        figures = report["methods"]["sfumato_no_reference"]["tests"]["test"][direction]
        assert figures["platt"] is None
        assert figures["log_loss"]["value"] == pytest.approx(log_loss(torch.cat(p), hits), rel=1e-4)


def test_a_method_with_the_wrong_sign_on_validation_gets_the_hit_rate(model, monkeypatch):
    class Inverted(METHODS["top1"]):
        def uncertainty(self, *args, **options):
            return -super().uncertainty(*args, **options)

    monkeypatch.setitem(METHODS, "top1", Inverted)
    chosen = RefereeOptions(methods=("constant", "top1"), n_resamples=0, n_absent=0)
    methods = referee_model(model, chosen)["methods"]
    of = {name: methods[name]["tests"]["test"]["t2i"] for name in methods}
    assert of["top1"]["platt"] is None and of["top1"]["wrong_auroc"]["value"] < 0.5
    assert of["top1"]["log_loss"] == of["constant"]["log_loss"]


def test_a_label_free_probability_is_measured_as_it_is(model, report):
    """The package's own probability of the first hit; the other row has the same order and fitted probabilities."""
    from bayesian_bm25 import VectorProbabilityTransform

    for direction, side in SIDES.items():
        names = "bayesian_bm25", "bayesian_bm25_platt"
        own, fitted = (report["methods"][name]["tests"]["test"][direction] for name in names)
        cosine, match = by_loops(model.tests["test"], side)
        losses = []
        for row, truth in zip(cosine, match, strict=True):
            distance = np.sort(1 - np.array(row))
            p = VectorProbabilityTransform(distance.mean(), distance.std()).calibrate(distance[:100])[0]
            losses.append(-math.log(p if first_hit(row, truth) else 1 - p))
        assert own["platt"] is None and own["log_loss"]["value"] == pytest.approx(np.mean(losses), rel=1e-3)
        assert own["wrong_auroc"] == fitted["wrong_auroc"] and own["log_loss"] != fitted["log_loss"]


def test_registered_estimators_take_part_unless_they_need_texts(monkeypatch):
    own = Estimator("own", "largest variance", "aleatoric", "n d", lambda block: block.queries.var.amax(1), False)
    monkeypatch.setitem(ESTIMATORS, "own", own)
    monkeypatch.setitem(ESTIMATORS, "reads", replace(own, name="reads", needs_texts=True))
    assert contestants() == (*BASELINES, *METHODS, "own")


def test_ambiguity_where_texts_have_many_matches(report):
    assert all(f["ambiguity"] is None for m in report["methods"].values() for f in m["tests"]["test"].values())
    many = referee_model(model_of(many=True), RefereeOptions(methods=("top1", "constant"), n_resamples=5, n_absent=5))
    values = {n: m["tests"]["test"]["t2i"]["ambiguity"] for n, m in many["methods"].items()}
    assert -1 <= values["top1"]["low"] <= values["top1"]["high"] <= 1 and values["constant"]["value"] is None


def test_a_large_split_is_dealt_into_galleries_of_the_size_of_validation(model):
    large = FrozenModel("tiny", model.train, split_of(20, 11), {"test": model.tests["test"]}, PROJECTIONS)
    options = RefereeOptions(methods=("top1",), n_resamples=5, n_absent=9, seed=4)
    found = referee_model(large, options)["methods"]["top1"]["tests"]["test"]
    parts = model.tests["test"].galleries(20, seed=4)
    assert [len(part.images) for part in parts] == [21, 20, 20]
    for direction, side in SIDES.items():
        hits = [first_hit(c, m) for part in parts for c, m in zip(*by_loops(part, side), strict=True)]
        assert found[direction]["n_galleries"] == 3 and found[direction]["n_queries"] == len(hits)
        assert found[direction]["recall"]["value"] == pytest.approx(np.mean(hits))


def test_selected_images_keep_their_texts_and_matches():
    split = split_of(9, 5, many=True)
    index = np.array([1, 4, 5])
    part = split.select_images(index)
    texts = [t for t in range(18) if any((i, t) in {tuple(p) for p in split.pairs.tolist()} for i in index)]
    expected = {(k, texts.index(t)) for i, t in split.pairs.tolist() for k in range(3) if index[k] == i}
    assert {tuple(pair) for pair in part.pairs.tolist()} == expected
    assert torch.equal(part.images, split.images[index]) and torch.equal(part.texts, split.texts[texts])
    assert torch.equal(part.image_hidden, split.image_hidden[index])
    assert torch.equal(part.text_hidden, split.text_hidden[texts])


def test_other_queries_keep_the_gallery_and_their_matches():
    split = split_of(9, 5, many=True)
    for side, column in (("image", 0), ("text", 1)):
        index = np.array([1, 4, 5])
        x, hidden = draw(3, 6, seed=9), draw(3, 4, seed=8)
        part, other = split.with_queries(side, index, x, hidden), {"image": "text", "text": "image"}[side]
        expected = {
            tuple(index.tolist().index(v) if c == column else v for c, v in enumerate(pair))
            for pair in split.pairs.tolist()
            if pair[column] in index
        }
        assert {tuple(pair) for pair in part.pairs.tolist()} == expected
        assert torch.equal(part.embeddings(side), x) and torch.equal(part.hidden(side), hidden)
        assert torch.equal(part.embeddings(other), split.embeddings(other))
        assert len(part.groups) == len(part.images)


def noisier(split, side, index, strength):
    """Queries with noise on the inputs of the last layer."""
    rows, (matrix, bias) = torch.from_numpy(index), PROJECTIONS[side]
    hidden = split.hidden(side)[rows] + strength * draw(len(index), matrix.shape[1], seed=33)
    return split.with_queries(side, index, hidden @ matrix.T + bias, hidden)


@pytest.fixture(scope="module")
def damaged(model):
    """The model with noisy texts and images; the strengths are standard deviations."""
    split, strengths, found = model.tests["test"], (0.0, 0.5, 2.0, 8.0), []
    for side, index in (("text", np.arange(0, 90, 3)), ("image", np.arange(0, 60, 2))):
        splits = tuple(noisier(split, side, index, s) for s in strengths)
        found.append(FrozenCorruption(f"noisy_{side}s", side, strengths, splits))
    return replace(model, corruptions=tuple(found))


def test_the_response_to_corruptions_is_that_of_loops(damaged):
    options = RefereeOptions(methods=("constant", "top1", "asymvlm"), fit=TINY, n_resamples=20, n_absent=0)
    methods = referee_model(damaged, options)["methods"]
    assert set(methods["asymvlm"]["corruptions"]) == {"noisy_texts"}
    for corruption in damaged.corruptions:
        steps = []
        for split in corruption.splits:
            cosine, match = by_loops(split, corruption.side)
            steps.append([1 - max(row) for row in cosine])
            recall = np.mean([first_hit(c, m) for c, m in zip(cosine, match, strict=True)])
            figures = methods["top1"]["corruptions"][corruption.name]
            assert figures["recall"][len(steps) - 1] == pytest.approx(recall)
        assert figures["auroc"]["value"] == pytest.approx(auroc_by_loops(steps[0], steps[-1]), abs=0.01)
        rho = [scipy.stats.spearmanr(range(4), u).statistic for u in zip(*steps, strict=True)]
        assert figures["spearman"]["value"] == pytest.approx(np.mean(rho), abs=0.02)
        assert figures["auroc"]["low"] <= figures["auroc"]["value"] <= figures["auroc"]["high"]
        assert figures["recall"][0] > figures["recall"][-1] + 0.2 and figures["auroc"]["value"] > 0.6
        chance = methods["constant"]["corruptions"][corruption.name]
        assert chance["auroc"]["value"] == 0.5 and chance["spearman"]["value"] == 0
    # Other corruptions are another model.
    assert len({damaged.digest, replace(damaged, corruptions=damaged.corruptions[:1]).digest}) == 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can reset the peak of its memory")
def test_peak_memory_sees_what_is_freed_again_and_not_what_was_there(monkeypatch, tmp_path):
    kept = torch.ones(10_000_000)  # 40 MB, there before
    torch.ones(30_000_000)  # 120 MB, freed before
    with PeakMemory() as memory:
        (kept[:5_000_000] + 1).sum()  # 20 MB that tracemalloc does not see
    assert 19 < memory.megabytes < 35
    monkeypatch.setattr(peak_memory, "_RESET", tmp_path / "none" / "clear_refs")  # As on other systems.
    with PeakMemory() as unknown:
        pass
    assert unknown.megabytes is None


def test_finished_contestants_are_not_computed_again(model, tmp_path, monkeypatch):
    path = tmp_path / "tiny.json"
    whole = referee_model(model, RefereeOptions(methods=("constant", "top1", "margin"), n_resamples=5, n_absent=5))
    referee_model(model, RefereeOptions(methods=("top1",), n_resamples=5, n_absent=5), path=path)
    asked, kept = [], referee_module.fit_contestant
    monkeypatch.setattr(referee_module, "fit_contestant", lambda n, *a, **k: asked.append(n) or kept(n, *a, **k))
    options = RefereeOptions(methods=("constant", "top1", "margin"), n_resamples=5, n_absent=5)
    resumed = referee_model(model, options, path=path, about={"commit": "abc"})
    assert asked == ["constant", "margin"] and resumed["about"] == {"commit": "abc"}
    assert untimed(resumed)["methods"] == untimed(whole)["methods"]
    assert json.loads(path.read_text()) == json.loads(json.dumps(resumed))
    assert referee_model(model, options, path=path) == json.loads(path.read_text()) and len(asked) == 2
    changed = RefereeOptions(methods=("top1",), n_resamples=6, n_absent=5)
    assert list(referee_model(model, changed, path=path)["methods"]) == ["top1"] and len(asked) == 3
    other = FrozenModel("tiny", model.train, model.val, {"test": split_of(61, 13)}, PROJECTIONS)
    referee_model(other, changed, path=path)
    assert len(asked) == 4
    path.write_text("{")
    referee_model(other, changed, path=path)
    assert len(asked) == 5


def made(values, seed=0):
    interval = lambda v: {"value": v, "low": v - 0.1, "high": v + 0.1}
    figures = {
        name: {
            "n_galleries": 1, "recall": interval(0.25), "recall_csd": None, "log_loss": interval(loss), "ece": 0.01,
            "wrong_auroc": interval(auroc), "wrong_aurc": interval(0.5), "wrong_excess_aurc": interval(0.2),
            "wrong_gain": interval(0.3), "absent_auroc": 0.5, "ambiguity": None, "ms_per_query": 1.5,
            "query_megabytes": 3.0,
            "minus_s_r2": {b: {"score": {"value": None, "low": None, "high": None}} for b in ("count", "width")},
        }
        for name, (loss, auroc) in values.items()
    }  # fmt: skip
    methods = {
        n: {"fit_seconds": 12.0, "fit_megabytes": 40.0, "bytes": 2e6, "tests": {"test": {"t2i": f}}}
        for n, f in figures.items()
    }
    methods["laplace"] = {"unavailable": "no layers"}
    sizes = {"train": {}, "val": {}, "test": {"images": 1000, "texts": 5000}}
    about = {"model": "tiny", "seed": seed, "notes": ["a note"], "not_built": {"g": "slow"}}
    return about | {"sizes": sizes, "methods": methods}


def test_a_table_by_hand():
    reports = [made({"worse": (0.7, 0.6), "better": (0.5, 0.6)}), made({"worse": (0.9, 0.7), "better": (0.5, 0.6)}, 1)]
    table = referee_table(reports, "test", "t2i")
    lines = markdown(table).splitlines()
    assert lines[0].startswith("| method | log loss | ECE | wrong: AUROC | AURC |") and "S·R²" not in lines[0]
    assert lines[2].startswith("| better | **.500** ± .000 | **.010** ± .000 | .600 ± .000 |")
    assert lines[3].startswith("| worse | .800 ± .141 | **.010** ± .000 | **.650** ± .071 |")
    assert lines[0].endswith("| fit, s | fit, MB | ms a query | query, MB | stored, MB |")
    assert lines[3].endswith("| 12 | 40 | 1.50 | 3.00 | 2.00 |")
    assert table.notes == ["Not available: laplace (no layers)."]
    assert table.title == "tiny, split test, text -> image: 1,000 images, 5,000 texts, recall@1 25.0%, 2 seeds"
    alone = referee_tables(reports[:1], ["better"])
    assert "| better | **.500** [.400, .600] |" in alone and "worse" not in alone and "image -> text" not in alone
    assert alone.endswith("Note: a note.\nNot built: g. slow.")


def test_a_summary_by_hand():
    first = [made({"constant": (0.8, 0.5), "mine": (0.8, 0.7)}), made({"constant": (0.8, 0.5), "mine": (0.4, 0.7)}, 1)]
    second = [made({"constant": (0.5, 0.5), "mine": (0.6, 0.9)}) | {"model": "other"}]
    lines = referee_summary([first, second], "skill").splitlines()
    assert lines[0] == "| method | tiny t2i | other t2i | tiny i2t | other i2t | mean |"
    # 1 - .8 / .8 and 1 - .4 / .8: 0 and .5; 1 - .6 / .5 = -.2.
    assert lines[2] == "| mine | **.250** | -.200 | – | – | .025 |"
    assert lines[3] == "| constant | .000 | **.000** | – | – | .000 |" and len(lines) == 4
    line = referee_summary([first, second], "wrong_auroc").splitlines()[2]
    assert line.endswith("| **.700** | **.900** | – | – | .800 |")
    both = [first[1], first[0] | {"methods": {"constant": first[0]["methods"]["constant"]}}]
    assert referee_summary([both], "skill").splitlines()[2].startswith("| mine | **.500** |")
    assert "Not available: mine (not measured with every seed)." in referee_table(both, "test", "t2i").notes
    chosen = markdown(referee_table(first, "test", "t2i", ("ece", "log_loss")))
    assert chosen.startswith("| method | ECE | log loss |\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Heads on made-up embeddings: 60 images for training, 30 each for validation and test, two texts an image."""
    folder = tmp_path_factory.mktemp("referee")
    latent = draw(120, 4, seed=0)
    images = latent @ draw(4, 6, seed=1) + 0.3 * draw(120, 6, seed=2)
    texts = latent.repeat_interleave(2, 0) @ draw(4, 5, seed=3) + 0.3 * draw(240, 5, seed=4)
    np.save(folder / "images.npy", images.numpy())
    np.save(folder / "texts.npy", texts.numpy())
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "text", "split"])
        for t in range(240):
            writer.writerow([t // 2, t, "train" if t < 120 else ("val", "test")[t // 2 % 2]])
    names = ("images", "images.npy"), ("texts", "texts.npy"), ("path", "pairs.csv")
    data = [f"data.{key}={folder / name}" for key, name in names]
    small = "model.dim=8", "model.hidden=16", "train.batch_size=16", "train.epochs=4", "train.device=cpu"
    fit(load_recipe(find_recipe("embeddings"), [*small, *data]), folder / "run")
    return folder / "run"


def test_a_frozen_run_is_its_last_layer_on_its_inputs(run, monkeypatch):
    loaded = load_run(run)
    frozen = freeze(loaded, loaded.recipe.data, ("test",), name="run")
    monkeypatch.setattr(frozen_model, "last_layer", lambda tower: None)
    outside = freeze(loaded, loaded.recipe.data, ("test",), name="run")
    assert frozen.tests["test"].image_hidden.shape == (30, 6 + 16) and not outside.projections
    for split, plain in ((frozen.train, outside.train), (frozen.tests["test"], outside.tests["test"])):
        for side in ("image", "text"):
            matrix, bias = frozen.projections[side]
            by_layer = split.hidden(side) @ matrix.T + bias
            torch.testing.assert_close(by_layer, split.embeddings(side))
            torch.testing.assert_close(functional.normalize(by_layer, dim=1), plain.embeddings(side))
            assert (by_layer.norm(dim=1) - 1).abs().max() > 0.01
        assert np.array_equal(split.pairs, plain.pairs)
    pairs = frozen.training_pairs(10.0)
    assert pairs.logit_scale == 10 and torch.equal(pairs.text_hidden, frozen.train.text_hidden)
    assert not outside.training_pairs().projections and frozen.digest != outside.digest


def test_the_command_prints_tables_writes_files_and_resumes(run, papers):
    chosen = "--methods", "constant,sfumato,top1,margin,laplace,pfe", "--bootstrap", 5, "--absent", 5, "--epochs", 1
    status, out, err = papers("referee", run, *chosen)
    assert status == 0 and "run, seed 0: pfe" in err
    words = folded(out)
    assert words.count("run, split test") == 2 and "|" not in out
    assert re.search("run, split test[^|]{,20}text -> image: 30 images, 60 texts", words)
    path = run / "referee-test" / "run-seed0.json"
    assert not too_wide(out, run)
    assert all(out.count(f"\n{name} ") == 3 and f"[{name}]" in out for name in chosen[1].split(","))
    assert "note: images are not corrupted: the model reads embeddings" in words and "corrupted queries" not in words
    markdown = path.with_suffix(".md").read_text()
    assert markdown.startswith("**run, split test")
    assert all(f"\n| {name} |" in markdown for name in chosen[1].split(","))
    assert "PRR" in markdown and "Note: images are not corrupted" in markdown
    first = path.read_text()
    status, out, err = papers("referee", run, *chosen, "--json")
    (printed,) = json.loads(out)
    assert status == 0 and "pfe" not in err and path.read_text() == first
    assert printed == json.loads(first) | {"out": str(path)}
    assert printed["options"]["fit"]["pfe"] == {"training": str(adapter_epochs(1)["pfe"]["training"])}


def test_other_models_and_other_distances_are_refused(papers, tmp_path):
    assert "is not a run folder" in papers.refused("referee", tmp_path)
    recipe = make_toy(tmp_path / "toy")
    fit(load_recipe(recipe, ["train.epochs=1"]), tmp_path / "csd")
    words = folded(papers.printed("referee", tmp_path / "csd", "--methods", "top1,laplace", "--bootstrap", 5))
    assert "note: its variances are left out: methods see the means" in words
    assert "Not available: laplace" in words and "corrupted queries" in words
    loaded = load_run(tmp_path / "csd")
    frozen = freeze(loaded, loaded.recipe.data, ("test",), name="csd", n_corrupted=4, seed=3)
    data = load_split(loaded.model, loaded.recipe.data, "test").data
    usable = {"image": np.ones(len(data.images), bool), "text": np.ones(len(data.texts), bool)}
    found = {(c.side, c.name): c for c in frozen.corruptions}
    expected = {
        (side, c.name): c
        for side, kept in usable.items()
        for c in corrupted_queries(loaded.model, side, data, kept, 4, 3)
    }
    assert found.keys() == expected.keys() and len(found) == 5
    for key, c in found.items():
        assert c.strengths == (0.0, *expected[key].strengths)
        steps = [frozen.tests["test"].points(key[0])[torch.from_numpy(expected[key].index)], *expected[key].embeddings]
        for split, step in zip(c.splits, steps, strict=True):
            torch.testing.assert_close(split.points(key[0]).mean, functional.normalize(step.mean, dim=1))
    fit(load_recipe(recipe, ["train.epochs=1", "model.item_offset=true"]), tmp_path / "offset")
    status, _, err = papers("referee", tmp_path / "offset")
    assert status == 2 and "not of unit length, so the model does not search by their cosine" in err
    for name in ("average_l2", "kl"):
        message, sampled = f"searches by {name}, and not by the cosine", replace(loaded, distance=name)
        raises(UserError, message, freeze, sampled, loaded.recipe.data, ("test",), name="x")
