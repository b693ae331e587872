"""Region features: made from images, trained on, evaluated, loaded, indexed and searched; and errors without images."""

import numpy as np
import pytest
from PIL import Image
from support.charts import undrawn
from support.raising import raises

from sfumato import find_recipe, fit, load_recipe
from sfumato.errors import UserError

COLOURS = ("red", "green", "blue", "black")
THINGS = ("cat", "dog", "bus", "cup", "tree", "hat")
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


@pytest.fixture(scope="module")
def run(scan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    recipe = load_recipe(
        find_recipe("flickr8k-probabilistic-vsrn"),
        [*TINY, f"data.path={scan}", "model.init_total_variance=8", "augment.image_tokens=0.2"],
    )
    fit(recipe, folder)
    return folder


def test_regions_are_embedded_indexed_searched_and_have_no_picture(run, scan, tmp_path, sfumato):
    features = np.load(scan / "test_ims.npy")
    (tmp_path / "in").mkdir()
    for k in range(5):
        np.save(tmp_path / "in" / f"{k}.npy", features[k, : 3 - k % 2])
    Image.new("RGB", (9, 9)).save(tmp_path / "in" / "ignored.png")
    made = sfumato.json("index", run, "--images", tmp_path / "in", "--out", tmp_path / "own")
    assert (made["n"], made["problems"]) == (5, 0)
    assert sfumato.json("index", run, "--split", "test", "--out", tmp_path / "index")["n"] == 24
    (found,) = sfumato.json("search", tmp_path / "index", "--image", tmp_path / "in" / "2.npy", "-k", "1")
    assert found["hits"][0]["id"] == "test-2"
    told = sfumato.refused("search", tmp_path / "index", "--image", tmp_path / "in" / "ignored.png")
    assert "region features are expected here, not an image" in told
    with undrawn():
        sfumato.printed("report", run, "--out", tmp_path / "r.html")
    assert "region features: there are no image files to show" in (tmp_path / "r.html").read_text()
    sfumato.printed("audit", run, "--out", tmp_path / "audit")
    assert 'class="thumb gone">test-' in (tmp_path / "audit" / "audit.html").read_text()
    sfumato.printed("export", run, tmp_path / "exported")
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
