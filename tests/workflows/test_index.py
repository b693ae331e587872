"""Galleries of the training images have probabilities of their own, fitted on captions that training left out."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from support.toy import make_toy

from sfumato import load
from sfumato.calibration.calibrator import Calibration, QueryScores
from sfumato.distances import get_distance
from sfumato.evaluation.hits import first_hits, measure_hits
from sfumato.models.calibrate import calibrate_run
from sfumato.models.embed import embed_split, load_split
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import CALIBRATION, TRAINING_CALIBRATION, load_run
from sfumato.training.loop import fit
from sfumato.workflows.index import open_gallery, training_note
from sfumato.workflows.trust import cross_fitted, trust_model

N, PER_IMAGE = 360, 3
SMALL = "model.dim=8", "model.hidden=16", "train.batch_size=32", "train.epochs=8", "optim.lr=1e-2", "train.device=cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images and texts that are noisy maps of one hidden vector; two of three images train."""
    folder = tmp_path_factory.mktemp("wordings")
    random = np.random.default_rng(0)
    hidden = random.standard_normal((N, 4))
    texts = np.repeat(hidden, PER_IMAGE, axis=0) + 0.4 * random.standard_normal((N * PER_IMAGE, 4))
    np.save(folder / "images.npy", (hidden @ random.standard_normal((4, 6))).astype(np.float32))
    np.save(folder / "texts.npy", (texts @ random.standard_normal((4, 5))).astype(np.float32))
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "text", "split"])
        for text in range(N * PER_IMAGE):
            image = text // PER_IMAGE
            writer.writerow([image, text, "train" if image % 3 else ("val", "test")[image % 2]])
    return folder


def trained(folder, name, *overrides):
    files = {"images": "images.npy", "texts": "texts.npy", "path": "pairs.csv"}
    data = [f"data.{key}={folder / file}" for key, file in files.items()]
    fit(load_recipe(find_recipe("embeddings"), [*SMALL, *data, *overrides]), folder / name)
    return folder / name


@pytest.fixture(scope="module")
def run(folder):
    return trained(folder, "run", "data.held_out_wordings=0/3")


@pytest.mark.slow
def test_training_writes_both_calibrations(run):
    found = load_run(run)
    assert found.calibration.metadata["split"] == "val"
    assert found.training_calibration.metadata["split"] == "wordings"
    # 240 training and 60 validation images; each has one of three texts there.
    scores = found.training_calibration.t2i.scores
    assert scores.n_gallery == len(scores.nearest) == 300


@pytest.mark.parametrize(("split", "own"), [("all", True), ("train", True), ("test", False)])
def test_a_gallery_has_the_calibration_of_its_images(run, sfumato, tmp_path, split, own):
    said, model = sfumato.json("index", run, "--split", split, "--out", tmp_path / "index"), load_run(run)
    gallery = open_gallery(tmp_path / "index")
    expected = model.training_calibration if own else model.calibration
    assert gallery.scorer.calibration.t2i.conditional == expected.t2i.conditional
    assert gallery.scorer.calibration.metadata == expected.metadata
    assert gallery.scorer.logit_bias == expected.logit_bias
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


@pytest.mark.slow
def test_all_images_can_train_and_their_other_captions_validate(folder, tmp_path):
    rows = (folder / "pairs.csv").read_text().replace(",val", ",train").replace(",test", ",train")
    (tmp_path / "pairs.csv").write_text(rows)
    run = trained(folder, "everything", "data.held_out_wordings=0/3", f"data.path={tmp_path / 'pairs.csv'}")
    found = load_run(run)
    assert found.calibration.metadata["split"] == "wordings" and found.calibration.t2i.scores.n_gallery == N
    assert found.training_calibration is None
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert "val/rsum" in log[-1]
    before = (run / CALIBRATION).read_bytes()
    assert calibrate_run(run, population="independent").metadata == found.calibration.metadata | {
        "queries": "independent", "set_sizes": found.calibration.metadata["set_sizes"],
    }, "the default split is that of the training's own calibration"  # fmt: skip
    assert load_run(run).calibration.metadata["queries"] == "independent"
    calibrate_run(run)
    assert (run / CALIBRATION).read_bytes() == before


@pytest.mark.slow
def test_calibrating_again_writes_the_file_that_it_stands_for(run):
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
    recipe = make_toy(tmp_path, n_each=4)
    changes = ["train.epochs=8", "data.held_out_wordings=0/2", "data.val_fraction=0", "data.test_fraction=0"]
    fit(load_recipe(recipe, changes), tmp_path / "run")
    shutil.copytree(tmp_path / "data", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "data")
    folder, out = tmp_path / "elsewhere", tmp_path / "index"
    assert (
        "All images trained"
        in sfumato.json("index", tmp_path / "run", "--images", folder, "--store", "file:", "--out", out)["note"]
    )

    def note():
        return sfumato.json("search", out, "a red circle")[0]["note"]

    assert note() == "", "no mix"
    assert load(tmp_path / "run").index(folder).gallery.metadata["trained"] == 96
    for k in range(3):
        Image.new("RGB", (24, 24), (9 * k, 90, 200)).save(folder / f"new {k}.png")
    added = sfumato.json("index", tmp_path / "run", "--images", folder, "--add", "--out", out)
    assert note().startswith("96 of the 99 images trained the model") and note() in added["note"]
    assert "note: 96 of the 99" in " ".join(sfumato("search", out, "a red circle")[1].split())
    sfumato("delete", out, "new 0.png", "new 1.png", "new 2.png")
    assert note() == ""


# Cross-fitted figures


def embedded(run, split):
    found = load_run(run)
    prepared = load_split(found.model, found.recipe.data, split)
    return found, prepared.data, embed_split(found.model, prepared)


@pytest.mark.parametrize("seed", range(2))
def test_texts_of_both_halves_cannot_be_halved(run, seed):
    """The one text left is of two images: in no half, or in one alone, whichever half is drawn."""
    found, data, (images, texts) = embedded(run, "wordings")
    of_one_text = {name: getattr(data, name)[:1] for name in ("text_ids", "texts", "text_kinds", "text_rows")}
    two = replace(data, pairs=np.array([[0, 0], [images.n - 1, 0]]), **of_one_text)
    with pytest.raises(ValueError, match="the split cannot be halved"):
        cross_fitted((images, texts), two, found.distance, split="wordings", seed=seed)


def test_each_half_has_the_fit_on_the_other(run):
    """The folds, taken apart by hand: of texts that search images, the same as a split with only these texts."""
    found, data, (images, texts) = embedded(run, "wordings")
    folds = cross_fitted((images, texts), data, found.distance, split="wordings", seed=5)
    assert sorted(torch.cat([fold.texts for fold in folds]).tolist()) == list(range(texts.n)), "each query once"
    assert sorted(torch.cat([fold.images for fold in folds]).tolist()) == list(range(images.n))
    of_text = dict(data.pairs[:, ::-1].tolist())
    for k, fold in enumerate(folds):
        assert {of_text[t] for t in fold.texts.tolist()} <= set(fold.images.tolist())
        kept = np.isin(np.arange(texts.n), folds[1 - k].texts.numpy())
        by_hand = QueryScores.fit(
            get_distance(found.distance).for_direction("t2i").matrix(texts[torch.from_numpy(kept)], images),
            torch.from_numpy(data.keep_texts(kept).relevance().to_dense()).float().T,
        )
        assert fold.calibration.t2i.scores.n_gallery == by_hand.n_gallery == images.n
        np.testing.assert_allclose(fold.calibration.t2i.scores.nearest, by_hand.nearest, rtol=1e-4)
        np.testing.assert_allclose(fold.calibration.t2i.scores.closest_match, by_hand.closest_match, rtol=1e-4)
        assert (
            fold.calibration.i2t.scores.n_gallery == texts.n
            and len(fold.calibration.i2t.scores.nearest) == len(kept) // 2
        )
    assert folds[0].calibration.t2i.conditional != folds[1].calibration.t2i.conditional


def test_trust_measures_the_queries_of_the_calibration_by_halves(run):
    found, data, (images, texts) = embedded(run, "wordings")
    report = trust_model(found, found.recipe.data, "wordings", n_resamples=0, seed=5)
    distance, match = get_distance(found.distance).matrix(images, texts), torch.from_numpy(data.relevance().to_dense())
    folds = cross_fitted((images, texts), data, found.distance, split="wordings", seed=5)
    for direction in ("t2i", "i2t"):
        (served,) = (
            f for f in report.hits["served"] if (f.hits, f.n_gallery, f.direction) == (1, 300, direction)
        )  # fmt: skip
        p, y = [], []
        for fold in folds:
            hits = first_hits(fold.calibration, distance, match.float(), direction, embedded=(images, texts))
            kept = torch.isin(hits.queries, fold.texts if direction == "t2i" else fold.images)
            p.append(hits.probability[kept])
            y.append(hits.match[kept])
        p, y = torch.cat(p), torch.cat(y)
        assert served.n == len(p) == 300
        assert served.mean_probability == pytest.approx(float(p.mean()), abs=1e-6)
        assert served.rate == pytest.approx(float(y.mean()))
        assert served.rate == pytest.approx(report.directions[direction].recall.value), "the recall@1 beside it"
        assert abs(served.rate - served.mean_probability) < 0.12, "three standard deviations of 300 hits and more"
    assert any("each half has the probabilities of a fit on the other" in note for note in report.notes)
    (served,) = (f for f in report.hits["served"] if (f.hits, f.n_gallery, f.direction) == (1, 300, "t2i"))
    in_sample = measure_hits(
        Calibration.load(run / TRAINING_CALIBRATION), distance, torch.from_numpy(data.relevance().to_dense()).float()
    )
    (own,) = (f for f in in_sample if f.hits == 1 and f.direction == "t2i" and f.n_gallery == 300)
    assert own.log_loss < served.log_loss, "the fit on the queries themselves looks better than it is"
