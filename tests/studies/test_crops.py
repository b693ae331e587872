"""The study of crops: A, B and C by hand, selection by hand and by loops, the layout of Visual Genome, the command."""

import base64
import io
import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from support.toy import make_toy
from support.words import folded

from sfumato import cli
from sfumato.data.images import Problems
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.reports.studies import print_crops
from sfumato.studies.crops import CANDIDATES, ROLES, Triplet, choose_triplet, join_captions, measure_crops, overlap
from sfumato.studies.phrase_boxes import read_boxed_images


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
    assert chosen.a == 0 and chosen.b == 4
    assert overlap(SCENE[0], SCENE[4:5])[0] == pytest.approx(225 / (3600 + 1296 - 225))
    # Strictly below: at 0.16 the box of 1,600 is out, and ten are left.
    chosen = choose_triplet(SCENE, 100 * 100, 0.16)
    # Four of them do not touch it: 40 to 75, 45 to 81, 30 to 58 and 80 to 100 from the left. The largest is taken.
    assert (chosen.a, chosen.b) == (2, 3) and chosen.boxes[2].tolist() == [0, 0, 75, 80]
    assert choose_triplet(SCENE, 100 * 100, 0.15) is None and CANDIDATES == 10


def test_ties_go_to_what_stands_first():
    same = np.array([box(20 * k, 0, 10, 10) for k in range(12)], dtype=float)
    chosen = choose_triplet(same, 1000, 0.5)
    assert (chosen.a, chosen.b) == (0, 1)
    chosen = choose_triplet(same[::-1], 1000, 0.5)
    assert chosen.boxes[2].tolist() == [200, 0, 230, 10]


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


def triplets(n):
    return [Triplet(0, 1, np.array([[0, 0, 10, 10], [5, 0, 15, 10], [0, 0, 15, 10]], float))] * n


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
    areas = np.full(5, 1000.0)
    return measure_crops(CROPS, CAPTIONS, triplets(5), areas, threshold=0.3, left_out=2, distance="csd", **options)


def test_selection_by_hand():
    """Squared distances of the means, of crop and caption AA, AC, CA, CC:

    1, 17, 17, 1 | 9, 1, 1, 9 | 1, 29, 17, 29 | 1, 1, 1, 1 | 4, 25, 1, 16.
    """
    found = measured(n_resamples=0)
    by_means = {cell: value.value for cell, value in found.selection["squared_l2"].items()}
    # image A (AA < AC): yes, no, yes, tie, yes. image C (CC < CA): yes, no, no, tie, no. text A (AA < CA): yes, no,
    # yes, tie, no. text C (CC < AC): yes, no, tie, tie, yes.
    assert by_means == {"image A": 3.5 / 5, "image C": 1.5 / 5, "text A": 2.5 / 5, "text C": 3 / 5}
    # csd adds two dimensions of both variances. Caption C of the fourth has 6, caption A 2: image A right, image C
    # wrong. Crops C have 4, 1, 2, 4, 2 where crops A have 2: of the fourth text A is right and text C wrong; the others
    # stay.
    by_csd = {cell: value.value for cell, value in found.selection["csd"].items()}
    assert by_csd == {"image A": 4 / 5, "image C": 1 / 5, "text A": 3 / 5, "text C": 2.5 / 5}
    assert list(found.selection) == ["csd", "squared_l2"]


def test_uncertainties_by_hand():
    found = measured(seed=1)
    means = {role: found.crops.mean[role].value for role in ROLES}
    assert means == pytest.approx({"A": 2, "B": 6, "C": (4 + 1 + 2 + 4 + 2) / 5})
    assert found.crops.c_above_a.value == 3 / 5 and found.crops.difference.value == pytest.approx(0.6)
    assert found.crops.standard_error["C"] == pytest.approx(np.std([4, 1, 2, 4, 2], ddof=1) / 5**0.5)
    assert found.crops.mean["C"].low < 2.6 < found.crops.mean["C"].high
    assert found.captions.c_above_a.value == (1 + 4 / 2) / 5
    assert found.area == pytest.approx({"A": 0.1, "B": 0.1, "C": 0.15}) and found.overlap == pytest.approx(1 / 3)
    log_det = measured(uncertainty="log_det", n_resamples=0).crops.mean["C"].value
    assert log_det == pytest.approx(2 * (math.log(2) + math.log(0.5) + 0 + math.log(2) + 0) / 5)


def test_points_have_a_selection_and_no_uncertainty():
    points = [{role: GaussianEmbedding.point(e.mean) for role, e in side.items()} for side in (CROPS, CAPTIONS)]
    found = measure_crops(
        *points, triplets(5), np.full(5, 1000.0), threshold=0.3, left_out=0, distance="squared_l2", n_resamples=0
    )
    assert found.crops.mean is None and found.captions.c_above_a is None
    assert found.selection["squared_l2"]["image A"].value == 3.5 / 5 and len(found.selection) == 1


def region(x, y, width, height, phrase, number=0):
    return {"region_id": number, "x": x, "y": y, "width": width, "height": height, "phrase": phrase, "image_id": 1}


def write(folder, entries, **options):
    path = folder / "region_descriptions.json"
    path.write_text(json.dumps(entries, **options), encoding="utf-8")
    return path


def picture(path):
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [7, 2**20])
def test_images_are_read_chunk_by_chunk(tmp_path, chunk, indent):
    picture(tmp_path / "1.jpg")
    picture(tmp_path / "VG_100K" / "2.jpg")
    picture(tmp_path / "VG_100K_2" / "33.png")
    entries = [{"id": i, "regions": [region(0, 1, 2.5, 3, f" a “{i}”,\n thing ")]} for i in (33, 1, 2)]
    path = write(tmp_path, entries, indent=indent, ensure_ascii=False)
    found = read_boxed_images(path, tmp_path, Problems(), chunk_size=chunk)
    assert [p.id for p in found] == ["33", "1", "2"]
    (only,) = found[0].boxes
    assert (only.x, only.y, only.width, only.height, only.phrase) == (0, 1, 2.5, 3, "a “33”, thing")


def test_a_sample_depends_on_ids_and_seed_alone(tmp_path):
    for i in range(30):
        picture(tmp_path / f"{i}.png")
    entries = [{"id": i, "regions": [region(0, 0, 1, 1, "x")]} for i in range(30)]
    samples = []
    for listed, seed in ((entries, 0), (entries[::-1], 0), (entries, 1)):
        samples.append(
            [p.id for p in read_boxed_images(write(tmp_path, listed), tmp_path, Problems(), sample=6, seed=seed)]
        )
    assert len(samples[0]) == 6 and samples[1] == samples[0][::-1] and set(samples[2]) != set(samples[0])


def test_what_cannot_be_used_is_told(tmp_path):
    picture(tmp_path / "1.png")
    picture(tmp_path / "2.png")
    regions = [
        region(0, 0, 5, 5, "good"),
        region(0, 0, 5, 5, "  "),
        region(0, 0, 0, 5, "thin"),
        region("0", 0, 5, 5, "text"),
        region(0, 0, float("nan"), 5, "nan"),
        {"phrase": "no box"},
        7,
    ]
    entries = [
        {"id": 1, "regions": regions},
        {"id": 3, "regions": []},
        {"id": 1, "regions": []},
        5,
        {"id": "../1", "regions": []},
        {"id": 2, "regions": []},
    ]
    problems = Problems()
    found = read_boxed_images(write(tmp_path, entries), tmp_path, problems)
    assert [(p.id, len(p.boxes)) for p in found] == [("1", 1), ("2", 0)]
    told = {p.location.split("json")[1]: p.reason for p in problems.items}
    assert told["[1]"].startswith("image 3 is missing") and told["[2]"] == "id 1 occurred before"
    assert told["[3]"] == told["[4]"] == 'expected an object with an "id" and a list of "regions"'
    assert told["[0].regions[1]"] == "empty phrase" and "has no area" in told["[0].regions[2]"]
    for k in (3, 4, 5, 6):
        assert told[f"[0].regions[{k}]"] == "expected numbers x, y, width and height"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}', "expected a list of images"),
        ("", "expected a list of images"),
        ('[{"id": 1, "regions": []}', "not JSON, or cut short"),
        ('[{"id": 1, "regions": [}]', "not JSON, or cut short"),
        ('[{"id": 1, "regions": []} {"id": 2, "regions": []}]', "expected a comma"),
        ("[]", "gives no usable box"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, text, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_boxed_images(tmp_path / "r.json", tmp_path, Problems())


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A trained toy, and scenes of a dozen squares with phrases."""
    folder = tmp_path_factory.mktemp("crops")
    recipe = make_toy(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv", ["sfumato", "train", str(recipe), "train.epochs=1", "--out", str(folder / "run"), "--json"]
        )
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert not stop.value.code
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


def test_the_command_measures_writes_and_says(work, sfumato, tmp_path, capsys):
    arguments = "crops", work / "run", "--regions", work / "region_descriptions.json", "--images", work
    status, out, err = sfumato(
        *arguments, "--thresholds", "0.02,0.08,0.3", "--bootstrap", "20", "--out", tmp_path / "out", "--json"
    )
    assert status == 0, err
    result = json.loads(out)
    assert result["n_pictures"] == 3 and [(f["threshold"], f["n"], f["left_out"]) for f in result["thresholds"]] == [
        (0.08, 3, 0),
        (0.3, 3, 0),
    ]
    assert {key: value for key, value in json.loads((tmp_path / "out" / "crops.json").read_text()).items()} == {
        k: v for k, v in result.items() if k != "out"
    }
    # The largest square below 0.08 of 10,800 pixels, 864: sides 29, 27 and 24.
    assert result["thresholds"][0]["area"]["A"] == pytest.approx((29**2 + 27**2 + 24**2) / 3 / 10800)
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out" / "problems.jsonl").read_text().splitlines()]
    assert (
        sum("extends beyond" in r for r in reasons) == 3
        and sum("no pixel" in r for r in reasons) == 3
        and sum("is missing" in r for r in reasons) == 1
    )
    page = (tmp_path / "out" / "crops.html").read_text()
    assert (
        page.count("<svg") == 2
        and page.count("data:image/webp") == 9
        and "a red square and a" in page
        and "<script" not in page
    )
    printed = json.loads((tmp_path / "out" / "crops.json").read_text())
    print_crops(printed)
    said = folded(capsys.readouterr().out)
    assert (
        "±: one standard error of the mean; in brackets: 95% intervals" in said and "bootstrap resamples of the" in said
    )
    for row in printed["thresholds"]:  # As of points.
        for side in ("crops", "captions"):
            row[side] = dict.fromkeys(row[side])
    print_crops(printed)
    said = folded(capsys.readouterr().out)
    assert "embeds points, which have no uncertainty" in said and "below" in said and "±" not in said
    assert "C above A" not in said and "In brackets: 95% intervals" in said
    status, out, err = sfumato(*arguments, "--bootstrap", "0", "--uncertainty", "log_det")
    words = folded(out)
    assert "±: one standard error of the mean" in words and "brackets" not in words
    assert (
        status == 0
        and "published" in words
        and "extends beyond" in words
        and (work / "run" / "crops" / "crops.html").is_file()
    ), err


def test_crops_are_cut_where_the_boxes_are(work):
    """The embedding of a crop is that of the cut image."""
    from sfumato.models.load import load_model
    from sfumato.studies.crops import study_crops

    _, examples, _ = study_crops(
        load_model(work / "run"),
        work / "region_descriptions.json",
        work,
        name="toy",
        thresholds=[0.08],
        sample=None,
        n_resamples=0,
    )
    for example in examples:
        scene = np.asarray(Image.open(work / f"{example.picture}.png"))
        side = {"0": 29, "1": 27, "2": 24}[example.picture]
        left = {"0": 30, "1": 0, "2": 0}[example.picture]
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(example.crops[0]))), scene[:side, left : left + side])
        assert example.captions[2] == join_captions(*example.captions[:2])


def test_one_picture_has_no_error(work, sfumato, tmp_path):
    entries = json.loads((work / "region_descriptions.json").read_text())[:1]
    arguments = (
        "crops",
        work / "run",
        "--regions",
        write(tmp_path, entries),
        "--images",
        work,
        "--out",
        tmp_path / "out",
    )
    status, out, err = sfumato(*arguments, "--thresholds", "0.08", "--bootstrap", "20")
    assert status == 0 and " ± –" in folded(out) and "nan" not in out, err
    (found,) = json.loads((tmp_path / "out" / "crops.json").read_text())["thresholds"]
    for side in ("crops", "captions"):
        assert found["n"] == 1 and found[side]["standard_error"] == {"A": None, "B": None, "C": None}
        # One image drawn twenty times would give an interval of no width, and the page a finding.
        assert found[side]["difference"]["value"] and found[side]["difference"]["low"] is None
    page = (tmp_path / "out" / "crops.html").read_text()
    assert page.count("<svg") == 2 and "<li>Boxes below" not in page


def test_the_page_holds_small_examples(tmp_path):
    from sfumato.data.transforms import encode_png
    from sfumato.reports.studies import write_crops
    from sfumato.studies.crops import CropStudy, Example

    noise = np.random.default_rng(0).integers(0, 256, (3, 500, 700)).astype(np.uint8)
    example = Example("7", 0.3, (encode_png(noise),) * 3, ("a", "b", "a and b"))
    study = CropStudy("m", "csd", "total_variance", 5, [measured(n_resamples=0)], 0, 0.95, 0, {})
    text = write_crops(study, [example], Problems(), tmp_path, "1").read_text()
    pictures = [base64.b64decode(p) for p in re.findall(r'"data:image/webp;base64,([^"]+)"', text)]
    assert [Image.open(io.BytesIO(p)).size for p in pictures] == [(144, 103)] * 3 and len(text) < 150_000


def test_boxes_are_in_the_pixels_of_the_file(work, tmp_path):
    """Nothing is turned as EXIF data says: in a file of 120 x 20 with orientation 6 all boxes lie within."""
    from sfumato.models.load import load_model
    from sfumato.studies.crops import study_crops

    scene = Image.new("RGB", (120, 20), "white")
    for k in range(12):
        scene.paste((20 * k, 255 - 20 * k, 90), (10 * k, 2, 10 * k + 9, 17 - k))
    exif = Image.Exif()
    exif[0x0112] = 6
    scene.save(tmp_path / "5.png", exif=exif)
    regions = [region(10 * k, 2, 9, 15 - k, f"colour {k}") for k in range(12)]
    path = write(tmp_path, [{"id": 5, "regions": regions}])
    _, (example,), problems = study_crops(
        load_model(work / "run"), path, tmp_path, name="toy", thresholds=[0.1], sample=None, n_resamples=0
    )
    assert not problems.items and example.captions[0] == "colour 0"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(example.crops[0]))), np.asarray(scene)[2:17, 0:9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--thresholds", "0.1,x"], "expected fractions with commas between"),
        (["--thresholds", "0.1,1.5"], "thresholds must be different fractions in (0, 1]"),
        (["--thresholds", "0.001"], "none of 3 images has 10 boxes below a threshold of 0.001"),
        (["--uncertainty", "entropy"], "unknown; known: total_variance, geometric_std, log_det"),
        (["--images", "nowhere"], "there is no folder nowhere"),
        (["--regions", "nowhere.json"], "nowhere.json"),
    ],
)
def test_the_command_refuses(work, sfumato, arguments, message):
    usual = ["--regions", work / "region_descriptions.json", "--images", work]
    status, _, err = sfumato("crops", work / "run", *usual, *arguments)
    assert status == 2 and message in err
