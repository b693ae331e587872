"""Runs on embeddings and regions, indexes of them, how far their probabilities hold; ranked lists."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from data.test_embedding_files import write_csv
from PIL import Image
from support.charts import undrawn
from support.raising import failing, raises
from support.serving import SQUARES, make_squares
from support.toy import make_toy
from support.words import folded

from sfumato import ESTIMATORS, ScoreCalibrator, find_recipe, fit, get_distance, load, load_index, load_recipe
from sfumato.calibration.calibrator import Calibration, QueryScores
from sfumato.calibration.fits import FitsCalibration
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.errors import UserError
from sfumato.evaluation import trust as measures
from sfumato.evaluation.hits import first_hits, measure_hits
from sfumato.evaluation.judgements import Judgement, qrels_of, write_judgements
from sfumato.metrics.reliability import expected_calibration_error
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.models.calibrate import calibrate_run, calibrate_split
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import CALIBRATION, TRAINING_CALIBRATION, load_model, load_run
from sfumato.search.exact import rank_relevant
from sfumato.search.searcher import open_gallery
from sfumato.workflows import evaluation
from sfumato.workflows import judgements as judging
from sfumato.workflows.evaluation import cross_fitted, trust_model
from sfumato.workflows.index import training_note
from sfumato.workflows.judgements import RankedLists, fit_lists, score_lists

N, PER_IMAGE = 360, 3
SMALL = "model.dim=8", "model.hidden=16", "train.batch_size=32", "train.epochs=8", "optim.lr=1e-2", "train.device=cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images and texts that are noisy maps of one hidden vector, two of three images train; and a text that is NaN."""
    folder, random = tmp_path_factory.mktemp("wordings"), np.random.default_rng(0)
    hidden = random.standard_normal((N, 4))
    texts = np.repeat(hidden, PER_IMAGE, axis=0) + 0.4 * random.standard_normal((N * PER_IMAGE, 4))
    np.save(folder / "images.npy", (hidden @ random.standard_normal((4, 6)) + 3).astype(np.float16))
    texts = (texts @ random.standard_normal((4, 5)) - 2).astype(np.float32)
    np.save(folder / "texts.npy", np.concatenate([texts, np.full((1, 5), np.nan, np.float32)]))
    np.save(folder / "images_ids.npy", np.array([f"photo-{i}" for i in range(N)]))
    np.save(folder / "query.npy", texts[PER_IMAGE * 33])
    split_of = lambda image: "train" if image % 3 else ("val", "test")[image % 2]
    pairs = ((text // PER_IMAGE % N, text) for text in range(N * PER_IMAGE + 1))
    write_csv(folder / "pairs.csv", [(f"photo-{image}", text, split_of(image)) for image, text in pairs])
    return folder


def trained(folder, name, *overrides):
    files = {"images": "images.npy", "texts": "texts.npy", "path": "pairs.csv"}
    data = [f"data.{key}={folder / file}" for key, file in files.items()]
    fit(load_recipe(find_recipe("embeddings"), [*SMALL, *data, *overrides]), folder / name)
    return folder / name


@pytest.fixture(scope="module")
def run(folder):
    return trained(folder, "run", "data.held_out_wordings=0/3")


def test_a_run_leaves_out_the_bad_row_learns_and_opens_without_its_data(folder, run, sfumato):
    (problem,) = map(json.loads, (run / "problems.jsonl").read_text().splitlines())
    assert problem == {"place": f"{folder / 'texts.npy'}[1080]", "reason": "text '1080' holds NaN or infinity"}
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < 0.6 * log[0]["loss"]
    assert json.loads((run / "encoders.json").read_text()) == {"image": {"channels": 6}, "text": {"channels": 5}}
    (folder / "images.npy").rename(folder / "elsewhere.npy")
    try:
        assert load_run(run).model.image.processor.channels == 6
        told = sfumato.refused("evaluate", "run", run)
        assert "images.npy" in told and "no embeddings at" in told
    finally:
        (folder / "elsewhere.npy").rename(folder / "images.npy")


def test_a_run_starts_from_another_and_is_anchored_to_it(folder, run):
    recipe = load_recipe(run / "recipe.toml", [f"train.start={run}", "train.epochs=2", "train.seed=5"])
    kept = {}
    for anchor in (0, 0.75):
        config = recipe.train.model_copy(update={"anchor": anchor, "ema_decay": 0.9, "select": "last"})
        fit(recipe.model_copy(update={"train": config}), folder / f"anchor-{anchor}")
        kept[anchor] = load_run(folder / f"anchor-{anchor}").model.state_dict()
    moved = 0.0
    for name, start in load_run(run).model.state_dict().items():
        torch.testing.assert_close(kept[0.75][name], start.lerp(kept[0][name], 0.25))
        moved += (kept[0][name] - start).abs().sum().item()
    assert moved > 1
    wrong = load_recipe(run / "recipe.toml", [f"train.start={run}", "model.dim=4"])
    told = r"train.start=.*does not fit the model of this recipe.*train.start= train.anc"
    raises(UserError, told, fit, wrong, folder / "wrong")
    told, changes = "train.anchor=0.5 mixes averaged weights with those", ["train.anchor=0.5", "train.ema_decay=0.9"]
    raises(UserError, told, load_recipe, run / "recipe.toml", changes)


def test_evaluate_and_the_other_commands(folder, run, sfumato):
    images, texts = np.load(folder / "images.npy").astype(np.float32), np.load(folder / "texts.npy")
    model, chosen = load_run(run).model, range(3, N, 6)
    own = [PER_IMAGE * i + k for i in chosen for k in range(PER_IMAGE)]
    inputs = lambda row: Inputs(torch.from_numpy(row).view(1, 1, -1))
    means = lambda tower, rows: torch.stack([tower.head(tower.encoder(inputs(row))).mean[0] for row in rows])
    with torch.no_grad():
        a, b = means(model.image, images[chosen]), means(model.text, texts[own])
    hits = np.mean([k == text // PER_IMAGE for text, k in enumerate(torch.cdist(b, a).argmin(1).tolist())])
    assert sfumato.json("evaluate", "run", run)["t2i"]["recall@1"] == pytest.approx(hits) and hits > 5 / len(chosen)
    for command in (("report", run), ("audit", run, "--split", "test"), ("export", run, folder / "exported")):
        sfumato.printed(*command)
    exported, query = load_model(folder / "exported"), (folder / "query.npy").read_bytes()
    assert torch.equal(exported.model.embed_texts([query]).mean, model.embed_texts([query]).mean)


@pytest.mark.parametrize(("split", "own"), [("all", True), ("train", True), ("test", False)])
def test_a_gallery_has_the_calibration_of_its_images(run, sfumato, tmp_path, split, own):
    said, model = sfumato.json("index", run, "--split", split, "--out", tmp_path / "index"), load_run(run)
    gallery, expected = open_gallery(tmp_path / "index"), model.training_calibration if own else model.calibration
    assert gallery.scorer.calibration.t2i.conditional == expected.t2i.conditional
    assert gallery.scorer.calibration.metadata == expected.metadata and gallery.scorer.logit_bias == expected.logit_bias
    if own:
        assert said["note"].startswith("240 of the 360" if split == "all" else "All images trained the model.")
        assert "fitted on 300 captions that training left out" in said["note"]
        assert ("searches for the other 120 find theirs less often" in said["note"]) == (split == "all")
    else:
        assert said["note"] == ""


def test_without_such_captions_the_note_says_the_way_out(run, sfumato, tmp_path):
    plain = shutil.copytree(run, tmp_path / "plain")
    (plain / TRAINING_CALIBRATION).unlink()
    said = sfumato.json("index", plain, "--split", "all", "--out", tmp_path / "index")
    assert "rough guide" in said["note"] and "data.held_out_wordings=0/5" in said["note"]
    gallery = open_gallery(tmp_path / "index")
    assert (gallery.note == "") == (training_note(gallery)[:3] == "All"), "without a mix a search says nothing"
    gallery.metadata |= {"trained": 0}
    assert training_note(gallery) == ""
    gallery.close()
    moved = plain.rename(tmp_path / "moved")
    told = sfumato.refused("index", "--add", "--images", tmp_path, "--out", tmp_path / "index")
    assert "is not at" in told and "name it first: sfumato index MODEL" in told
    assert "--run" in sfumato.refused("search", tmp_path / "index", "a dog") and moved.is_dir()


@pytest.mark.slow
def test_all_images_can_train_and_their_other_captions_validate(folder, tmp_path):
    rows = (folder / "pairs.csv").read_text().replace(",val", ",train").replace(",test", ",train")
    (tmp_path / "pairs.csv").write_text(rows)
    changes = ["data.held_out_wordings=0/3", f"data.path={tmp_path / 'pairs.csv'}", "train.epochs=2"]
    run = trained(folder, "everything", *changes)
    found = load_run(run)
    assert found.calibration.metadata["split"] == "wordings" and found.calibration.t2i.scores.n_gallery == N
    assert found.training_calibration is None
    assert "val/rsum" in [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()][-1]
    before = (run / CALIBRATION).read_bytes()
    assert calibrate_run(run, population="independent").metadata == found.calibration.metadata | {
        "queries": "independent", "set_sizes": found.calibration.metadata["set_sizes"],
    }, "the default split is that of the training's own calibration"  # fmt: skip
    assert load_run(run).calibration.metadata["queries"] == "independent"
    calibrate_run(run)
    assert (run / CALIBRATION).read_bytes() == before


@pytest.mark.slow
def test_training_writes_both_calibrations_and_calibrating_again_the_same(run):
    found = load_run(run)
    assert found.calibration.metadata["split"] == "val" and found.training_calibration.metadata["split"] == "wordings"
    # 240 training and 60 validation images; each has one of three texts there.
    scores = found.training_calibration.t2i.scores
    assert scores.n_gallery == len(scores.nearest) == 300
    before = {name: (run / name).read_bytes() for name in (CALIBRATION, TRAINING_CALIBRATION)}
    calibrate_run(run, "wordings")
    assert {name: (run / name).read_bytes() for name in before} == before, "the same fit, in the same file"
    calibrate_run(run, "wordings", population="independent")
    assert (run / CALIBRATION).read_bytes() == before[CALIBRATION]
    assert (run / TRAINING_CALIBRATION).read_bytes() != before[TRAINING_CALIBRATION]
    calibrate_run(run, population="independent")
    again = load_run(run)
    for calibration in (again.calibration, again.training_calibration):
        assert calibration.metadata["queries"] == "independent", "the default split fits both"
    calibrate_run(run)
    assert load_run(run).training_calibration.metadata["queries"] == "planted"


@pytest.mark.slow
def test_a_mix_is_said_at_every_search_also_of_copied_files_and_as_the_collection_grows(tmp_path, sfumato):
    changes = ["train.epochs=8", "data.held_out_wordings=0/2", "data.val_fraction=0", "data.test_fraction=0"]
    fit(load_recipe(make_toy(tmp_path, n_each=4), changes), tmp_path / "run")
    shutil.copytree(tmp_path / "data", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "data")
    folder, out = tmp_path / "elsewhere", tmp_path / "index"
    made = sfumato.json("index", tmp_path / "run", "--images", folder, "--store", "file:", "--out", out)
    assert "All images trained" in made["note"]
    note = lambda: sfumato.json("search", out, "a red circle")[0]["note"]
    assert note() == "", "no mix"
    assert load(tmp_path / "run").index(folder).gallery.metadata["trained"] == 96
    for k in range(3):
        Image.new("RGB", (24, 24), (9 * k, 90, 200)).save(folder / f"new {k}.png")
    added = sfumato.json("index", tmp_path / "run", "--images", folder, "--add", "--out", out)
    assert note().startswith("96 of the 99 images trained the model") and note() in added["note"]
    assert "note: 96 of the 99" in " ".join(sfumato("search", out, "a red circle")[1].split())
    sfumato("delete", out, "new 0.png", "new 1.png", "new 2.png")
    assert note() == ""


def embedded(run, split):
    found = load_run(run)
    prepared = load_split(found.model, found.recipe.data, split)
    return found, prepared.data, embed_split(found.model, prepared)


fit_wordings = partial(calibrate_split, split="wordings")


@pytest.mark.parametrize("seed", range(2))
def test_texts_of_both_halves_cannot_be_halved(run, seed):
    found, data, (images, texts) = embedded(run, "wordings")
    of_one_text = {name: getattr(data, name)[:1] for name in ("text_ids", "texts", "text_kinds", "text_rows")}
    halved = (images, texts), replace(data, pairs=np.array([[0, 0], [images.n - 1, 0]]), **of_one_text), found.distance
    raises(ValueError, "the split cannot be halved", cross_fitted, *halved, fit_wordings, seed)


def test_each_half_has_the_fit_on_the_other_and_trust_measures_it(run):
    found, data, (images, texts) = embedded(run, "wordings")
    folds = cross_fitted((images, texts), data, found.distance, fit_wordings, 5)
    assert sorted(np.concatenate([fold.texts for fold in folds]).tolist()) == list(range(texts.n)), "each query once"
    assert sorted(np.concatenate([fold.images for fold in folds]).tolist()) == list(range(images.n))
    of_text = dict(data.pairs[:, ::-1].tolist())
    for k, fold in enumerate(folds):
        assert {of_text[t] for t in fold.texts.tolist()} <= set(fold.images.tolist())
        kept = np.isin(np.arange(texts.n), folds[1 - k].texts)
        distance = get_distance(found.distance).for_direction("t2i").matrix(texts[kept], images)
        by_hand = QueryScores.fit(distance, data.keep_texts(kept).relevance().to_dense().T)
        assert fold.calibration.t2i.scores.n_gallery == by_hand.n_gallery == images.n
        np.testing.assert_allclose(fold.calibration.t2i.scores.nearest, by_hand.nearest, rtol=1e-4)
        np.testing.assert_allclose(fold.calibration.t2i.scores.closest_match, by_hand.closest_match, rtol=1e-4)
        of_images = fold.calibration.i2t.scores
        assert of_images.n_gallery == texts.n and len(of_images.nearest) == len(kept) // 2
    assert folds[0].calibration.t2i.conditional != folds[1].calibration.t2i.conditional
    report = trust_model(found, found.recipe.data, "wordings", n_resamples=0, seed=5)
    distance, match = get_distance(found.distance).matrix(images, texts), data.relevance().to_dense()
    for direction in ("t2i", "i2t"):
        (served,) = (f for f in report.hits["served"] if (f.hits, f.n_gallery, f.direction) == (1, 300, direction))
        p, y = [], []
        for fold in folds:
            hits = first_hits(fold.calibration, distance, match, direction, embedded=(images, texts))
            kept = np.isin(hits.queries, fold.texts if direction == "t2i" else fold.images)
            p.append(hits.probability[kept])
            y.append(hits.match[kept])
        p, y = np.concatenate(p), np.concatenate(y)
        assert served.n == len(p) == 300 and served.mean_probability == pytest.approx(float(p.mean()), abs=1e-6)
        assert served.rate == pytest.approx(float(y.mean()))
        assert served.rate == pytest.approx(report.directions[direction].recall.value), "the recall@1 beside it"
        assert abs(served.rate - served.mean_probability) < 0.12, "three standard deviations of 300 hits and more"
    assert any("each half has the probabilities of a fit on the other" in note for note in report.notes)
    assert "expected_misses" in report.estimators and "text_misses" not in report.estimators, "rows have ids, no texts"
    (served,) = (f for f in report.hits["served"] if (f.hits, f.n_gallery, f.direction) == (1, 300, "t2i"))
    in_sample = measure_hits(Calibration.load(run / TRAINING_CALIBRATION), distance, match)
    (own,) = (f for f in in_sample if f.hits == 1 and f.direction == "t2i" and f.n_gallery == 300)
    assert own.log_loss < served.log_loss, "the fit on the queries themselves looks better than it is"


@pytest.fixture(scope="module")
def trust_run(toy):
    return load_run(toy / "run")


@pytest.mark.slow
def test_captions_of_an_image_are_resampled_together_and_share_its_proxy(trust_run, monkeypatch):
    seen, real = {}, measures.measure_trust

    def spy(queries, gallery, relevance, matching, **options):
        seen[matching.direction] = options | {"relevance": relevance}
        return real(queries, gallery, relevance, matching, **options)

    monkeypatch.setattr(measures, "measure_trust", spy)
    trust_model(trust_run, trust_run.recipe.data.model_copy(update={"equal_texts": "separate"}), "test", n_resamples=0)
    texts, images = seen["t2i"], seen["i2t"]
    image_of = texts["relevance"].indices[texts["relevance"].indptr[:-1]].tolist()
    assert texts["groups"].tolist() == image_of and len(set(images["groups"].tolist())) == images["relevance"].n_queries
    for name in ("caption_distance", "caption_words"):
        np.testing.assert_array_equal(texts["proxies"][name], images["proxies"][name][image_of])
    assert np.ptp(images["proxies"]["caption_distance"]) > 0
    assert not texts["multiplicity"] and texts["relevance"].n_queries == len(texts["texts"]) > len(set(texts["texts"]))
    trust_model(trust_run, trust_run.recipe.data, "test", n_resamples=0)
    shared, images = seen["t2i"], seen["i2t"]
    counts = shared["relevance"].counts
    assert (counts == 2).sum() == 2 and len(counts) == 24, "two equal captions are one text of two images each"
    assert not shared["multiplicity"] and len(shared["groups"]) == 24
    for text, image in enumerate(shared["groups"]):
        own = shared["relevance"].indices[shared["relevance"].indptr[text] :][: counts[text]]
        assert image == own[-1]
        assert shared["proxies"]["caption_distance"][text] == images["proxies"]["caption_distance"][image]


def test_probabilities_of_hits_are_those_that_a_search_shows(trust_run):
    report = trust_model(trust_run, trust_run.recipe.data, "test", n_resamples=5)
    of_texts, of_images = (report.directions[direction].estimators for direction in ("t2i", "i2t"))
    assert set(of_texts) - set(of_images) == {"text_misses", "text_multiplicity"}, "images are not texts"
    assert set(report.estimators) == set(of_texts) == set(ESTIMATORS)
    prepared = load_split(trust_run.model, trust_run.recipe.data, "test")
    queries, gallery = embed_split(trust_run.model, prepared)
    distance, truth = get_distance(trust_run.distance), prepared.data.relevance()
    missed = 1 - per_query_metrics(rank_relevant(queries, gallery, truth, distance), truth)["recall@1"]
    assert 0 < missed.mean() < 1
    of_images = {kind: [f for f in found if f.direction == "i2t"] for kind, found in report.hits.items()}
    served, alone = (next(f for f in of_images[kind] if f.hits == 1) for kind in ("served", "distance"))
    d = distance.matrix(queries, gallery).sort(dim=1).values
    p = trust_run.calibration.i2t.hit_probability(d[:, :1], d[:, :50], n_gallery=gallery.n).double()
    assert served.n_gallery == served.n == len(missed) == queries.n
    assert served.mean_probability == pytest.approx(float(p.mean()), abs=1e-6)
    assert served.rate == alone.rate == pytest.approx(1 - missed.mean())
    error, of_constant = (p[:, 0].numpy() - (1 - missed)) ** 2, served.rate * (1 - served.rate)
    assert served.brier_skill == pytest.approx(1 - error.mean() / of_constant, abs=1e-6)


def test_splits_without_probabilities_of_hits_or_with_those_of_some_images(trust_run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "cross_fitted", failing(ValueError("the split cannot be halved")))
        report = trust_model(trust_run, trust_run.recipe.data, "val", n_resamples=0)
    assert report.hits == {} and "the probabilities of hits are left out: the split cannot be halved" in report.notes
    monkeypatch.setattr(evaluation, "_HIT_IMAGES", 5)
    report = trust_model(trust_run, trust_run.recipe.data, "test", n_resamples=0)
    assert {f.n_gallery for f in report.hits["served"]} == {5}
    assert "the probabilities of hits are those among 5 random images" in report.notes


def write(folder, n=60, seed=0, name="run"):
    random, run, qrels = np.random.default_rng(seed), [], []
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
        ("leave RUN", "calibrate", "folder", "--run", run, "--qrels", qrels, "--out", out), ("give RUN", "calibrate"),
        ("one of the other files", "score", "--run", run, "--calibrator", out, "--out", run),
        ("no file of a score calibrator", "score", "--run", run, "--calibrator", run, "--out", "x"),
    ):  # fmt: skip
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
        answers = searcher.search([f"a plain {colour} square" for colour in SQUARES], 24)
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
    assert done["after"]["calibration_error"]["value"] < 0.6 * done["before"]["calibration_error"]["value"]
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
def test_few_verdicts_change_nothing_and_undo_a_refinement(sfumato, index, tmp_path, monkeypatch):
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
    asked, placed = verdicts[0].query, lambda query, *_: replace(query, facts=(("rome",) * (query.text == asked), ()))
    monkeypatch.setattr(judging, "with_facts", placed)
    with load_index(index) as searcher:
        found, n_asked = judging.refine(searcher, verdicts), sum(one.query == asked for one in verdicts)
        assert 0 < n_asked == found.not_found == len(verdicts) - found.n
        raises(judging.NotRefinedError, "time and place", judging.refine, searcher, verdicts[:1])


COLOURS, THINGS = ("red", "green", "blue", "black"), ("cat", "dog", "bus", "cup", "tree", "hat")
TINY = [
    "model.dim=8", "model.image.channels=10", "model.text.hidden=8", "model.text.width=6", "model.text.min_count=1",
    "model.feature_dropout=0", "optim.lr=2e-2", "train.epochs=10", "train.batch_size=8", "train.threads=1",
    "train.evaluate_every=10", "train.select=last", "loss.sum_epochs=10",
]  # fmt: skip


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("scan"), np.random.default_rng(0)
    for name, turns in (("train", 2), ("dev", 1), ("test", 1)):
        rows, captions = [], []
        for _ in range(turns):
            for c, colour in enumerate(COLOURS):
                for t, thing in enumerate(THINGS):
                    regions = 0.1 * random.standard_normal((3, 10))
                    regions[0, c] += 1
                    regions[1, 4 + t] += 1
                    rows.append(regions)
                    captions += [f"a {colour} {thing}", f"some {thing} in {colour}"]
        np.save(folder / f"{name}_ims.npy", np.array(rows, np.float32))
        (folder / f"{name}_caps.txt").write_text("".join(f"{c}\n" for c in captions))
    return folder


def test_regions_are_embedded_indexed_searched_and_have_no_picture(scan, tmp_path, sfumato):
    changes = [f"data.path={scan}", "model.init_total_variance=8", "augment.image_tokens=0.2"]
    regions_run = tmp_path / "run"
    fit(load_recipe(find_recipe("flickr8k-probabilistic-vsrn"), [*TINY, *changes]), regions_run)
    features = np.load(scan / "test_ims.npy")
    (tmp_path / "in").mkdir()
    for k in range(5):
        np.save(tmp_path / "in" / f"{k}.npy", features[k, : 3 - k % 2])
    Image.new("RGB", (9, 9)).save(tmp_path / "in" / "ignored.png")
    made = sfumato.json("index", regions_run, "--images", tmp_path / "in", "--out", tmp_path / "own")
    assert (made["n"], made["problems"]) == (5, 0)
    assert sfumato.json("index", regions_run, "--split", "test", "--out", tmp_path / "index")["n"] == 24
    (found,) = sfumato.json("search", tmp_path / "index", "--image", tmp_path / "in" / "2.npy", "-k", "1")
    assert found["hits"][0]["id"] == "test-2"
    told = sfumato.refused("search", tmp_path / "index", "--image", tmp_path / "in" / "ignored.png")
    assert "region features are expected here, not an image" in told
    with undrawn():
        sfumato.printed("report", regions_run, "--out", tmp_path / "r.html")
    assert "region features: there are no image files to show" in (tmp_path / "r.html").read_text()
    sfumato.printed("audit", regions_run, "--out", tmp_path / "audit")
    assert 'class="thumb gone">test-' in (tmp_path / "audit" / "audit.html").read_text()
    sfumato.printed("export", regions_run, tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert 'open("regions-of-a-photo.npy", "rb")' in card and "photo.jpg" not in card


def test_recipes_and_channels_that_make_no_sense_are_refused(scan, tmp_path, sfumato):
    plain = "model.image.graph_layers=0 model.image.recurrent=false model.image"
    for overrides, message in (
        ("data.source=folder", "model.image.kind='regions' reads features, and data.source='folder' has images"),
        ("model.image.kind=small", "data.source='scan' has region features, which model.image.kind='small' does not"),
        ("augment.mixed_share=0.5", "augment.mixed_share changes pixels"),
        (f"{plain}.width=99", "model.image.width has no effect"),
        (f"{plain}.variance_layers=false", "model.image.variance_layers has no effect"),
    ):
        raises(UserError, message, load_recipe, find_recipe("flickr8k-vsrn"), overrides.split())
    settings = [*TINY, f"data.path={scan}", "model.image.channels=9", "data.max_problem_fraction=1"]
    told = sfumato.refused("train", "flickr8k-vsrn", *settings, "--out", tmp_path / "run")
    assert "has 10 channels; the model reads 9 (model.image.channels)" in told
