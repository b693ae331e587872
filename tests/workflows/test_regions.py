"""Region features: made from images, trained on, evaluated, loaded, indexed and searched; and errors without images."""

import json
import shlex

import numpy as np
import pytest
from PIL import Image
from support.toy import make_toy
from support.words import folded

from sfumato.data.image_decoding import decode_image
from sfumato.data.images import Problems
from sfumato.data.layouts import read_scan
from sfumato.errors import UserError
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import load_run
from sfumato.models.split import load_splits
from sfumato.training.loop import fit
from sfumato.workflows.regions import write_regions

COLOURS = ("red", "green", "blue", "black")
THINGS = ("cat", "dog", "bus", "cup", "tree", "hat")
TINY = [
    "model.dim=8", "model.image.channels=10", "model.text.hidden=8", "model.text.width=6", "model.text.min_count=1",
    "model.feature_dropout=0", "optim.lr=2e-2", "train.epochs=10", "train.batch_size=8", "train.threads=1",
    "train.evaluate_every=10", "train.select=last", "loss.sum_epochs=10",
]  # fmt: skip


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    """Pictures of a coloured thing each, three regions that tell which; two captions."""
    folder = tmp_path_factory.mktemp("scan")
    random = np.random.default_rng(0)
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


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_gaussians_train_within_their_bounds_and_come_back(run, scan, sfumato):
    first, *_, last = lines(run)
    assert last["loss"] < first["loss"] and first["total_variance/image"] == pytest.approx(8, rel=0.2)
    model = load_run(run).model
    (train, *_), twice = (list(read_scan(scan, Problems())[s].images) for s in ("train", "test"))
    both = model.embed_images([train.read_bytes(), *(i.read_bytes() for i in twice)])
    variance = both.log_var.exp()
    assert variance.min() > 0.1 and variance.max() < 10 and variance.std() > 0
    status, out, _ = sfumato("evaluate", "run", run, "--json")
    assert status == 0 and json.loads(out)["n_images"] == 24
    again = json.loads(sfumato("evaluate", "run", run, "--split", "val", "--json")[1])
    assert again["i2t"]["recall@10"] == pytest.approx(last["val/i2t/recall@10"])


def test_regions_are_embedded_indexed_and_searched(run, scan, tmp_path, sfumato):
    features = np.load(scan / "test_ims.npy")
    (tmp_path / "in").mkdir()
    for k in range(5):
        np.save(tmp_path / "in" / f"{k}.npy", features[k, : 3 - k % 2])
    Image.new("RGB", (9, 9)).save(tmp_path / "in" / "ignored.png")
    rows = "".join(f'{{"image": "in/{k}.npy", "captions": ["x"]}}\n' for k in range(5))
    (tmp_path / "m.jsonl").write_text(rows)
    for source, name in (("--images", "in"), ("--manifest", "m.jsonl")):
        status, out, err = sfumato("embed", run, source, tmp_path / name, "--out", tmp_path / f"parts-{name}", "--json")
        assert status == 0 and json.loads(out)["n"] == 5 and json.loads(out)["problems"] == 0, err
    status, out, err = sfumato("index", run, "--split", "test", "--out", tmp_path / "index")
    assert status == 0 and "24 images" in folded(out), err
    status, out, err = sfumato("search", tmp_path / "index", "--image", tmp_path / "in" / "2.npy", "-k", "1", "--json")
    assert status == 0 and json.loads(out)[0]["hits"][0]["id"] == "test-2", err
    status, out, err = sfumato("search", tmp_path / "index", "--image", tmp_path / "in" / "ignored.png")
    assert status == 2 and "region features are expected here, not an image" in err


def test_where_a_picture_would_be_shown_it_is_said_that_there_is_none(run, tmp_path, sfumato):
    status, _, err = sfumato("report", run, "--out", tmp_path / "r.html")
    assert status == 0, err
    assert "region features: there are no image files to show" in (tmp_path / "r.html").read_text()
    status, _, err = sfumato("audit", run, "--out", tmp_path / "audit")
    assert status == 0 and 'class="thumb gone">test-' in (tmp_path / "audit" / "audit.html").read_text(), err
    status, out, err = sfumato("trust", run, "--bootstrap", "0", "--corrupted", "4", "--json")
    assert status == 0 and any("images are not corrupted" in note for note in json.loads(out)["notes"]), err
    exported = sfumato("export", run, tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert exported[0] == 0 and 'open("regions-of-a-photo.npy", "rb")' in card and "photo.jpg" not in card


def test_regions_are_made_from_pictures(tmp_path, monkeypatch):
    """With a backbone of our own, in both layouts; the features are those of the pictures."""

    class Corners:
        channels, fingerprint = 3, "corners of a picture"

        def __call__(self, items):
            return [(decode_image(i, 8)[:, ::7, ::7].reshape(3, 4).T / 255).astype(np.float16) for i in items]

    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    config = load_recipe(make_toy(tmp_path)).data
    shapes, problems = write_regions(config, tmp_path / "scan", Corners())
    assert not len(problems) and {name: shape[1:] for name, shape in shapes.items()} == dict.fromkeys(shapes, (4, 3))
    splits = read_scan(tmp_path / "scan", Problems())
    assert {name: len(data.image_ids) for name, data in splits.items()} == {
        name: shape[0] for name, shape in shapes.items()
    }
    config = config.model_copy(update={"equal_texts": "separate"})
    for name, data in load_splits(config, Problems()).items():
        assert data.image_ids == splits[name].image_ids and data.texts == splits[name].texts
        mine = Corners()([image.read_bytes() for image in data.images])
        assert np.array_equal(
            np.load(tmp_path / "scan" / f"{'dev' if name == 'val' else name}_ims.npy"), np.stack(mine)
        )
    write_regions(config, tmp_path / "manifest", Corners(), layout="manifest", splits=["val"])
    found = load_splits(
        config.model_copy(update={"source": "manifest", "path": str(tmp_path / "manifest" / "manifest.jsonl")}),
        Problems(),
    )
    assert (
        list(found) == ["val"]
        and found["val"].image_ids == splits["val"].image_ids
        and found["val"].texts == splits["val"].texts
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--splits", "nowhere"], "has no split 'nowhere'"),
        (["--layout", "zip"], "--layout zip: unknown; known: scan, manifest"),
        (["--splits", "val"], "write a manifest instead: --layout manifest"),
    ],
)
def test_regions_refuses(tmp_path, sfumato, arguments, message):
    recipe = make_toy(tmp_path)
    for path in sorted((tmp_path / "data").glob("*.txt"))[::2]:
        path.write_text("one caption\n")
    status, _, err = sfumato("regions", recipe, "--size", "32", "--out", tmp_path / "out", *arguments)
    assert status == 2 and message in err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_recipes_that_make_no_sense_are_refused():
    for override, message in (
        ("data.source=folder", "model.image.kind='regions' reads features, and data.source='folder' has images"),
        ("model.image.kind=small", "data.source='scan' has region features, which model.image.kind='small' does not"),
        ("augment.mixed_share=0.5", "augment.mixed_share changes pixels"),
    ):
        with pytest.raises(UserError, match=message):
            load_recipe(find_recipe("flickr8k-vsrn"), [override])


def test_other_channels_are_told_by_their_number(scan, tmp_path, sfumato):
    settings = [*TINY, f"data.path={scan}", "model.image.channels=9", "data.max_problem_fraction=1"]
    status, _, err = sfumato("train", "flickr8k-vsrn", *settings, "--out", tmp_path / "run")
    assert status == 2 and "has 10 channels; the model reads 9 (model.image.channels)" in err


def test_layers_that_are_not_there_have_no_settings(sfumato, tmp_path):
    for setting, key in (("width=99", "width"), ("variance_layers=false", "variance_layers")):
        plain = ["model.image.graph_layers=0", "model.image.recurrent=false", f"model.image.{setting}"]
        status, _, err = sfumato("train", "flickr8k-vsrn", *plain, "--out", tmp_path / "run")
        assert status == 2 and f"model.image.{key} has no effect" in err


class Grey:
    """A backbone of our own: the mean of a picture, one region of one channel."""

    channels, fingerprint = 1, "the mean of a picture"

    def __call__(self, items):
        return [np.array([[decode_image(i, 8).mean() / 255]], np.float16) for i in items]


@pytest.mark.parametrize(("name", "layout"), [("../evil", "scan"), ("..", "scan"), ("a\\b", "manifest")])
def test_a_split_whose_name_is_a_path_is_refused_before_anything_is_written(tmp_path, monkeypatch, name, layout):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    Image.new("RGB", (9, 9)).save(tmp_path / "p.png")
    rows = [{"image": "p.png", "captions": ["x"], "split": split, "id": split} for split in ("train", name)]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = sorted(tmp_path.rglob("*"))
    config = load_recipe(
        find_recipe("emoji-pcmepp"), ["data.source=manifest", f"data.path={tmp_path / 'm.jsonl'}"]
    ).data
    with pytest.raises(UserError, match="this name cannot be a file name"):
        write_regions(config, tmp_path / "deep" / "out", Grey(), layout=layout)
    assert sorted(tmp_path.rglob("*")) == before
    shapes, _ = write_regions(config, tmp_path / "out", Grey(), layout=layout, splits=["train", "train"])
    assert shapes == {"train": (1, 1, 1)}


def test_what_no_layout_can_say_is_refused(tmp_path):
    config = load_recipe(find_recipe("emoji-pcmepp")).data
    for layout in ("scan", "manifest"):
        with pytest.raises(
            UserError, match=r"has texts of several images and kinds of texts and groups of images,.*frozen"
        ):
            write_regions(config, tmp_path / "out", Grey(), layout=layout)
    assert not (tmp_path / "out").exists()


def test_a_grid_of_copies_is_refused(tmp_path, sfumato):
    settings = [make_toy(tmp_path), "--size", "64", "--out", tmp_path / "out"]
    status, _, err = sfumato("regions", *settings, "--grid", "3")
    assert status == 2 and "a grid of 3 x 3 is larger than the backbone's map of 2 x 2 cells" in err
    status, out, err = sfumato("regions", *settings, "--grid", "2", "--splits", "val")
    assert status == 0, err
    path = tmp_path / "out"
    keys = "data.source=scan", f"data.path={path}", "model.image.kind=regions", "model.image.channels=1280"
    assert shlex.split(out.splitlines()[-1])[-5:] == ["RECIPE", *keys]


def test_a_class_folder_of_regions_is_classified(run, scan, tmp_path, sfumato):
    features = np.load(scan / "test_ims.npy")
    for c, colour in enumerate(COLOURS[:2]):
        (tmp_path / "in" / colour).mkdir(parents=True)
        for t in range(2):
            np.save(tmp_path / "in" / colour / f"{t}.npy", features[c * len(THINGS) + t])
    chosen = "analyse", run, "--only", "zeroshot", f"zeroshot.images={tmp_path / 'in'}"
    status, out, err = sfumato(*chosen, "--bootstrap", "0", "--out", tmp_path / "out", "--json")
    assert status == 0, err
    report = json.loads(out)["zeroshot"]["report"]
    assert report["n_images"] == 4 - report["n_chosen_on"]
