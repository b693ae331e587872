"""The study of crops: A, B and C by hand, selection by hand and by loops, the layout of Visual Genome, the command."""

import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from support.raising import raises
from support.toy import make_toy
from support.words import folded

from papers.studies.crops import (
    CANDIDATES,
    choose_triplet,
    cut_crops,
    embed_crops,
    measure_crops,
    overlap,
    read_boxed_images,
)
from sfumato.data.images import Problems
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.recipe import load_recipe
from sfumato.models.run import load_model
from sfumato.training.loop import fit


def box(x, y, width, height):
    return [x, y, x + width, y + height]


# In an image of 100 x 100: twelve boxes, of which the first is too large below a quarter and the last is the eleventh.
SCENE = np.array(
    [
        box(0, 0, 60, 60),  # 3,600
        box(10, 10, 40, 40),  # 1,600: A below 0.25
        box(0, 0, 30, 50),  # 1,500: 20 x 40 = 800 of A, IoU 800 / 2,300
        box(40, 40, 35, 40),  # 1,400: 10 x 10 = 100, IoU 100 / 2,900
        box(45, 45, 36, 36),  # 1,296: 5 x 5 = 25, IoU 25 / 2,871, the least
        box(20, 20, 30, 40),  # 1,200
        box(10, 10, 30, 36),  # 1,080
        box(15, 12, 32, 32),  # 1,024
        box(10, 40, 30, 30),  # 900: 30 x 10 = 300
        box(30, 30, 28, 28),  # 784: 20 x 20 = 400
        box(10, 10, 20, 30),  # 600, the tenth below
        box(80, 80, 20, 20),  # 400, apart from A, but the eleventh
    ],
    dtype=float,
)


def test_a_b_and_c_by_hand():
    chosen = choose_triplet(SCENE, 100 * 100, 0.25)
    assert (chosen.a, chosen.b) == (1, 4)
    assert chosen.boxes.tolist() == [[10, 10, 50, 50], [45, 45, 81, 81], [10, 10, 81, 81]]
    # Below 0.4 the largest takes part, the tenth of before does not, and the one least within A is the fourth again.
    chosen = choose_triplet(SCENE, 100 * 100, 0.4)
    assert (chosen.a, chosen.b) == (0, 4)
    assert overlap(SCENE[0], SCENE[4:5])[0] == pytest.approx(225 / (3600 + 1296 - 225))
    # Strictly below: at 0.16 the box of 1,600 is out, and ten are left.
    chosen = choose_triplet(SCENE, 100 * 100, 0.16)
    # Four of them do not touch it: 40 to 75, 45 to 81, 30 to 58 and 80 to 100 from the left. The largest is taken.
    assert (chosen.a, chosen.b) == (2, 3) and chosen.boxes[2].tolist() == [0, 0, 75, 80]
    assert choose_triplet(SCENE, 100 * 100, 0.15) is None and CANDIDATES == 10


def test_ties_go_to_what_stands_first():
    same = np.array([box(20 * k, 0, 10, 10) for k in range(12)], dtype=float)
    chosen, turned = choose_triplet(same, 1000, 0.5), choose_triplet(same[::-1], 1000, 0.5)
    assert (chosen.a, chosen.b) == (0, 1) and turned.boxes[2].tolist() == [200, 0, 230, 10]


def test_overlap_is_the_loop():
    random = np.random.default_rng(0)
    corners = random.integers(0, 12, (40, 2, 2))
    some = np.concatenate([corners.min(1), corners.max(1) + 1], axis=1)
    for one in some[:5]:
        for other, found in zip(some, overlap(one, some), strict=True):
            grids = [np.zeros((14, 14), bool), np.zeros((14, 14), bool)]
            for grid, (left, top, right, bottom) in zip(grids, (one, other), strict=True):
                grid[top:bottom, left:right] = True
            assert found == pytest.approx((grids[0] & grids[1]).sum() / (grids[0] | grids[1]).sum())


def gaussians(means, variances):
    mean = torch.tensor(means, dtype=torch.float64)
    return GaussianEmbedding(mean, torch.tensor(variances, dtype=torch.float64).log().unsqueeze(1).expand_as(mean))


NINES = gaussians([[9.0, 9]] * 5, [3] * 5)
CROPS = {
    "A": gaussians([[0.0, 0]] * 5, [1, 1, 1, 1, 1]),
    "B": NINES,
    "C": gaussians([[4.0, 0], [4, 0], [4, 0], [0, 0], [1, 0]], [2, 0.5, 1, 2, 1]),
}
CAPTIONS = {
    "A": gaussians([[0.0, 1], [3, 0], [0, 1], [1, 0], [2, 0]], [1, 1, 1, 1, 1]),
    "B": NINES,
    "C": gaussians([[4.0, 1], [1, 0], [2, 5], [1, 0], [5, 0]], [1, 1, 1, 3, 1]),
}


def measured(**options):
    return measure_crops(CROPS, CAPTIONS, distance="csd", **options)


def test_selection_by_hand():
    """Squared distances of the means, of crop and caption AA, AC, CA, CC:

    1, 17, 17, 1 | 9, 1, 1, 9 | 1, 29, 17, 29 | 1, 1, 1, 1 | 4, 25, 1, 16.
    """
    selection = measured(n_resamples=0)["selection"]
    # image A (AA < AC): yes, no, yes, tie, yes. image C (CC < CA): yes, no, no, tie, no. text A (AA < CA): yes, no,
    # yes, tie, no. text C (CC < AC): yes, no, tie, tie, yes.
    by_means = {cell: interval["value"] for cell, interval in selection["squared_l2"].items()}
    assert by_means == {"image A": 3.5 / 5, "image C": 1.5 / 5, "text A": 2.5 / 5, "text C": 3 / 5}
    # csd adds two dimensions of both variances. Caption C of the fourth has 6, caption A 2: image A right, image C
    # wrong. Crops C have 4, 1, 2, 4, 2 where crops A have 2: of the fourth text A is right and text C wrong; the others
    # stay.
    by_csd = {cell: interval["value"] for cell, interval in selection["csd"].items()}
    assert by_csd == {"image A": 4 / 5, "image C": 1 / 5, "text A": 3 / 5, "text C": 2.5 / 5}
    assert list(selection) == ["csd", "squared_l2"]


def test_uncertainties_by_hand():
    found = measured(seed=1)
    crops, captions = found["crops"], found["captions"]
    assert {role: crops[role]["value"] for role in "ABC"} == pytest.approx({"A": 2, "B": 6, "C": 13 / 5})
    assert crops["above"]["value"] == 3 / 5 and crops["difference"]["value"] == pytest.approx(0.6)
    assert crops["C"]["low"] < 2.6 < crops["C"]["high"]
    assert captions["above"]["value"] == (1 + 4 / 2) / 5
    log_det = measured(uncertainty="log_det", n_resamples=0)["crops"]["C"]["value"]
    assert log_det == pytest.approx(2 * (math.log(2) + math.log(0.5) + 0 + math.log(2) + 0) / 5)
    one = measure_crops(*({k: e[:1] for k, e in side.items()} for side in (CROPS, CAPTIONS)), distance="csd")
    # One image drawn many times would give an interval of no width.
    assert one["crops"]["difference"] == {"value": 2.0, "low": None, "high": None}


def test_points_have_a_selection_and_no_uncertainty():
    points = [{role: GaussianEmbedding.point(e.mean) for role, e in side.items()} for side in (CROPS, CAPTIONS)]
    found = measure_crops(*points, distance="squared_l2", n_resamples=0)
    assert found["crops"] is None and found["captions"] is None
    assert found["selection"]["squared_l2"]["image A"]["value"] == 3.5 / 5 and len(found["selection"]) == 1


def region(x, y, width, height, phrase, number=0):
    return {"region_id": number, "x": x, "y": y, "width": width, "height": height, "phrase": phrase, "image_id": 1}


def write(folder, entries, **options):
    path = folder / "region_descriptions.json"
    path.write_text(json.dumps(entries, **options), encoding="utf-8")
    return path


def picture(path):
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)


def test_a_sample_is_found_and_depends_on_ids_and_seed_alone(tmp_path):
    names = [f"{folder}{i}.{'png' if i % 2 else 'jpg'}" for i, folder in enumerate(["", "VG_100K/", "VG_100K_2/"] * 10)]
    for name in names:
        picture(tmp_path / name)
    entries = [{"id": i, "regions": [region(0, 1, 2.5, 3, f" a “{i}”,\n thing ")]} for i in range(30)]
    sampled = lambda path, seed, n: read_boxed_images(path, tmp_path, Problems(), sample=n, seed=seed)
    read = lambda listed, seed, n=6: sampled(write(tmp_path, listed), seed, n)
    every = read(entries, 0, 99)
    assert [p.path for p in every] == [tmp_path / name for name in names]
    assert every[7].boxes == [(0, 1, 2.5, 3)] and every[7].phrases == ["a “7”, thing"]
    first, turned, other = ([p.id for p in read(*how)] for how in ((entries, 0), (entries[::-1], 0), (entries, 1)))
    assert len(first) == 6 and turned == first[::-1] and set(other) != set(first)


def test_what_cannot_be_used_is_told(tmp_path):
    picture(tmp_path / "1.png")
    picture(tmp_path / "2.png")
    whole = (0, 0, 5, 5)
    regions = [
        region(*whole, "good"), region(*whole, "  "), region(0, 0, 0, 5, "thin"), region("0", 0, 5, 5, "text"),
        region(0, 0, float("nan"), 5, "nan"), {"phrase": "no box"}, 7,
    ]  # fmt: skip
    entries = [{"id": name, "regions": regions if k == 0 else []} for k, name in enumerate((1, 3, 1, "../1", 2))]
    entries.insert(3, 5)
    problems = Problems()
    found = read_boxed_images(write(tmp_path, entries), tmp_path, problems, sample=9)
    assert [(p.id, len(p.boxes)) for p in found] == [("1", 1), ("2", 0)]
    told = {p.location.split("json")[1]: p.reason for p in problems.items}
    assert told["[1]"].startswith("image 3 is missing") and told["[2]"] == "id 1 occurred before"
    assert told["[3]"] == told["[4]"] == 'expected an object with an "id" and a list of "regions"'
    assert told["[0].regions[1]"] == "empty phrase" and "has no area" in told["[0].regions[2]"]
    for k in (3, 4, 5, 6):
        assert told[f"[0].regions[{k}]"] == "expected numbers x, y, width and height"
    for text, message in (
        ('{"id": 1}', "expected a list of images"),
        ('[{"id": 1, "regions": []}', "not usable JSON"),
        ("[]", "gives no usable box"),
    ):
        (tmp_path / "r.json").write_text(text)
        raises(UserError, message, read_boxed_images, tmp_path / "r.json", tmp_path, Problems(), sample=9)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A trained toy, and scenes of a dozen squares with phrases."""
    folder = tmp_path_factory.mktemp("crops")
    fit(load_recipe(make_toy(folder), ["train.epochs=1"]), folder / "run")
    entries = []
    for number in range(3):
        scene = Image.new("RGB", (120, 90), "white")
        draw, regions = ImageDraw.Draw(scene), []
        for k in range(12):
            side = 30 - k - 3 * number
            x, y = 30 * (k % 4), 30 * (k // 4)
            colour = ("red", "green", "blue")[k % 3]
            draw.rectangle((x, y, x + side - 1, y + side - 1), fill=colour)
            regions.append(region(x, y, side, side, f"a {colour} square", k))
        regions.append(region(-10, 80, 40, 30, "extends beyond"))
        regions.append(region(500, 80, 40, 30, "outside"))
        scene.save(folder / f"{number}.png")
        entries.append({"id": number, "regions": regions})
    write(folder, [*entries, {"id": 99, "regions": []}])
    return folder


def settings(work, **changed):
    given = {"model": work / "run", "regions": work / "region_descriptions.json", "images": work, **changed}
    return [f"crops.{key}={value}" for key, value in given.items()]


def test_table_4_is_measured_drawn_and_said(work, papers, tmp_path):
    given = settings(work, thresholds="0.02,0.08,0.3", bootstrap=20)
    found = papers.json("table", "PVSE++ 4", *given, "--out", tmp_path)["numbers"]
    rows = found["thresholds"]
    assert found["n_pictures"] == 3
    assert [(row["threshold"], row["n"], row["left_out"]) for row in rows] == [(0.08, 3, 0), (0.3, 3, 0)]
    kinds = ("extends beyond", "no pixel", "is missing")
    assert [sum(n for reason, n in found["problems"].items() if kind in reason) for kind in kinds] == [3, 3, 1]
    drawn = {panel["name"]: panel["series"] for panel in found["panels"]}
    assert list(drawn) == ["crops", "captions", "own partner closer by csd", "own partner closer by squared_l2"]
    assert [point["value"] for point in drawn["captions"]["C"]] == [row["captions"]["C"]["value"] for row in rows]
    selected = [row["selection"]["csd"]["text C"]["value"] for row in rows]
    assert [point["value"] for point in drawn["own partner closer by csd"]["text C"]] == selected
    assert (tmp_path / "pvsepp-4" / "figure.png").stat().st_size > 10_000
    words = folded(papers.printed("table", "PVSE++ Fig. 2", *settings(work, bootstrap=0), "--out", tmp_path))
    assert "images, mean" in words and "published" not in words
    assert "boxes below 10%, 3 images, captions: A" in words and "3: the box extends beyond" in words


def test_crops_are_cut_where_the_boxes_are_in_the_pixels_of_the_file(work, tmp_path):
    """Nothing is turned as EXIF data says: in a file of 120 x 20 with orientation 6 all boxes lie within."""
    scene = Image.new("RGB", (120, 20), "white")
    for k in range(12):
        scene.paste((20 * k, 255 - 20 * k, 90), (10 * k, 2, 10 * k + 9, 17 - k))
    exif = Image.Exif()
    exif[0x0112] = 6
    scene.save(tmp_path / "5.png", exif=exif)
    regions = [region(10 * k, 2, 9, 15 - k, f"colour {k}") for k in range(12)]
    problems, chosen = Problems(), {0.1: [], 0.2: []}
    pictures = read_boxed_images(write(tmp_path, [{"id": 5, "regions": regions}]), tmp_path, problems, sample=1)
    files = dict(cut_crops(pictures, chosen, problems))
    ((one,), (again,)) = chosen.values()
    assert not problems.items and one.captions == ("colour 0", "colour 1", "colour 0 and colour 1")
    assert len(files) == 3 and one.keys() == again.keys() and set(files) == set(one.keys())
    crop = np.asarray(Image.open(io.BytesIO(files[one.keys()[0]])))
    assert np.array_equal(crop, np.asarray(scene)[2:17, 0:9])
    # The embedding of a crop is that of the cut image.
    model = load_model(work / "run")
    place, embedded = embed_crops(model, iter(files.items()))
    expected = model.model.embed_images(list(files.values()))
    assert list(place) == list(files) and torch.allclose(embedded.mean, expected.mean, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"thresholds": "0.1,x"}, "expected fractions with commas between"),
        ({"thresholds": "0.1,1.5"}, "thresholds must be different fractions in (0, 1]"),
        ({"thresholds": "0.001"}, "none of 3 images has 10 boxes below a threshold of 0.001"),
        ({"uncertainty": "entropy"}, "unknown; known: total_variance, geometric_std, log_det"),
        ({"images": "nowhere"}, "there is no folder nowhere"),
        ({"regions": "nowhere.json"}, "nowhere.json"),
        ({"regions": ""}, "add crops.regions=..."),
        ({"sample": "few"}, "crops.sample=few: expected 2000 or another number"),
        ({"folder": "x"}, "PVSE++ 4 has the settings crops.model, crops.regions"),
    ],
)
def test_what_cannot_be_measured_is_said(work, papers, changed, message, tmp_path):
    assert message in folded(papers.refused("table", "PVSE++ 4", *settings(work, **changed), "--out", tmp_path))
