"""Galleries of the training images have probabilities of their own, fitted on captions that training left out."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.toy import make_toy

from sfumato import load
from sfumato.calibration.calibrator import Calibration
from sfumato.data.pairs import PairData
from sfumato.distances import get_distance
from sfumato.evaluation.hits import first_hits, measure_cross_fitted, measure_hits
from sfumato.models.calibrate import calibrate_run, calibrate_split
from sfumato.models.cross_fitting import cross_fitted
from sfumato.models.embed import embed_split, load_split
from sfumato.models.galleries import open_gallery
from sfumato.models.gallery_calibration import training_note
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import CALIBRATION, TRAINING_CALIBRATION, load_run
from sfumato.models.trust_run import trust_model
from sfumato.training.loop import fit

N, PER_IMAGE = 240, 3
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


def index(sfumato, run, out, *source):
    status, printed, errors = sfumato("index", run, *source, "--out", out, "--json")
    assert status == 0, errors
    return json.loads(printed)


def test_training_writes_both_calibrations(run):
    found = load_run(run)
    assert found.calibration.metadata["split"] == "val"
    assert found.training_calibration.metadata["split"] == "wordings"
    # 160 training and 40 validation images; each has one of three texts there.
    assert found.training_calibration.t2i.n_gallery == 200 and len(found.training_calibration.t2i.nearest) == 200


@pytest.mark.parametrize(("split", "own"), [("all", True), ("train", True), ("test", False), ("val", False)])
def test_a_gallery_has_the_calibration_of_its_images(run, sfumato, tmp_path, split, own):
    said, model = index(sfumato, run, tmp_path / "index", "--split", split), load_run(run)
    gallery = open_gallery(tmp_path / "index")
    expected = model.training_calibration if own else model.calibration
    assert gallery.calibration == expected
    assert gallery.scorer.logit_bias == expected.logit_bias
    if own:
        assert said["note"].startswith("160 of the 240" if split == "all" else "All images trained the model.")
        assert "fitted on 200 captions that training left out" in said["note"]
        assert ("Captions of the other 80 images" in said["note"]) == (split == "all")
    else:
        assert said["note"] == ""


def test_a_collection_and_the_interface_choose_alike(run, sfumato, tmp_path):
    sfumato("index", run, "--split", "all", "--out", tmp_path / "store", "--store", "file:")
    with open_gallery(tmp_path / "store") as collection:
        assert collection.scorer.calibration == load_run(run).training_calibration
        assert training_note(collection).startswith("160 of the 240 images")


def test_without_such_captions_the_note_says_the_way_out(folder, sfumato, tmp_path):
    plain = trained(folder, "plain")
    assert not (plain / TRAINING_CALIBRATION).exists()
    said = index(sfumato, plain, tmp_path / "index", "--split", "all")
    assert "rough guide" in said["note"] and "data.held_out_wordings=0/5" in said["note"]
    gallery = open_gallery(tmp_path / "index")
    assert training_note(replace(gallery, metadata=gallery.metadata | {"trained": 0})) == ""


def test_all_images_can_train_and_their_other_captions_validate(folder, tmp_path):
    rows = (folder / "pairs.csv").read_text().replace(",val", ",train").replace(",test", ",train")
    (tmp_path / "pairs.csv").write_text(rows)
    run = trained(folder, "everything", "data.held_out_wordings=0/3", f"data.path={tmp_path / 'pairs.csv'}")
    found = load_run(run)
    assert found.calibration.metadata["split"] == "wordings" and found.calibration.t2i.n_gallery == N
    assert found.training_calibration is None
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert "val/rsum" in log[-1]


def test_calibrating_again_writes_the_file_that_it_stands_for(run):
    before = {name: (run / name).read_bytes() for name in (CALIBRATION, TRAINING_CALIBRATION)}
    calibrate_run(run, "wordings", method="platt")
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


def test_a_folder_of_images_is_recognised_by_its_files(tmp_path, sfumato):
    recipe = make_toy(tmp_path, n_each=4)
    fit(load_recipe(recipe, ["train.epochs=8", "data.held_out_wordings=0/2"]), tmp_path / "run")
    said = index(sfumato, tmp_path / "run", tmp_path / "index", "--images", tmp_path / "data")
    n_trained = open_gallery(tmp_path / "index").metadata["trained"]
    model = load_run(tmp_path / "run")
    n_train = len(load_split(model.model, model.recipe.data, "train").data.images)
    assert n_trained == n_train and said["note"].startswith(f"{n_train} of the 96 images")
    searcher = load(tmp_path / "run").index(tmp_path / "data")
    assert searcher.gallery.metadata["trained"] == n_train


# Cross-fitted figures


def embedded(run, split):
    found = load_run(run)
    prepared = load_split(found.model, found.recipe.data, split)
    return found, prepared.data, embed_split(found.model, prepared)


def test_each_half_has_the_fit_on_the_other(run):
    """The folds, taken apart by hand."""
    found, data, (images, texts) = embedded(run, "wordings")
    folds = cross_fitted((images, texts), data, found.distance, split="wordings", seed=5)
    match = data.relevance().to_dense()
    assert torch.equal(sum(y for _, y in folds), torch.from_numpy(match).float()), "every query is in one fold"
    for k, (calibration, measured) in enumerate(folds):
        fitting = folds[1 - k][1].bool().any(0).numpy()
        pairs = np.array([(i, t) for i, t in data.pairs if fitting[t]])
        number = np.cumsum(fitting) - 1
        names = tuple(np.array(data.text_ids)[fitting].tolist())
        half = PairData(
            data.image_ids, data.images, names, names, ("caption",) * len(names),
            np.stack([pairs[:, 0], number[pairs[:, 1]]], axis=1),
        )  # fmt: skip
        by_hand = calibrate_split(
            (images, texts[torch.from_numpy(fitting)]), half, found.distance, split="wordings", seed=5
        )
        assert by_hand.conditional == calibration.conditional
        assert not measured[:, fitting].any()
    assert folds[0][0].conditional != folds[1][0].conditional


def test_figures_of_folds_are_those_of_all_their_queries(run):
    found, data, (images, texts) = embedded(run, "wordings")
    distance = get_distance(found.distance).matrix(images, texts)
    match = torch.from_numpy(data.relevance().to_dense()).float()
    first = torch.arange(len(match)) < 90
    folds = [(found.calibration, match * chosen.unsqueeze(1)) for chosen in (first, ~first)]
    together = measure_hits(found.calibration, distance, match, embedded=(images, texts), sizes=())
    divided = measure_cross_fitted(folds, distance, embedded=(images, texts), sizes=())
    for a, b in zip(together[:2], divided[:2], strict=True):
        assert a.direction == b.direction == "t2i" and (a.n, a.rate) == (b.n, pytest.approx(b.rate))
        assert a.mean_probability == pytest.approx(b.mean_probability) and a.ece == pytest.approx(b.ece, abs=1e-9)


def test_trust_measures_the_queries_of_the_calibration_by_halves(run):
    found, data, (images, texts) = embedded(run, "wordings")
    report = trust_model(found, found.recipe.data, "wordings", queries="text", n_resamples=0, n_corrupted=0, seed=5)
    (served,) = (f for f in report.hits["served"] if f.hits == 1 and f.n_gallery == 200)
    distance = get_distance(found.distance).matrix(images, texts)
    folds = cross_fitted((images, texts), data, found.distance, split="wordings", seed=5)
    hits = [first_hits(c, distance, y, "t2i", embedded=(images, texts)) for c, y in folds]
    p, y = torch.cat([h.probability for h in hits]), torch.cat([h.match for h in hits])
    assert served.n == len(p) == 200
    assert served.mean_probability == pytest.approx(float(p.mean()), abs=1e-6)
    assert served.rate == pytest.approx(float(y.mean()))
    assert abs(served.rate - served.mean_probability) < 0.12, "three standard deviations of 200 hits"
    assert any("each half has the probabilities of a fit on the other" in note for note in report.notes)
    in_sample = measure_hits(
        Calibration.load(run / TRAINING_CALIBRATION), distance, torch.from_numpy(data.relevance().to_dense()).float()
    )
    (own,) = (f for f in in_sample if f.hits == 1 and f.direction == "t2i" and f.n_gallery == 200)
    assert own.log_loss < served.log_loss, "the fit on the queries themselves looks better than it is"
