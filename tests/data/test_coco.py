"""COCO's own captions and Karpathy's file: folders, what is malformed, and what is told by content."""

import json

import pytest
from support.pictures import png, write_tar
from support.raising import raises

from sfumato import Problems, read_ground_truth, read_karpathy
from sfumato.data.coco import coco_image_id, json_kind, read_coco_captions
from sfumato.data.sources import DataConfig, get_source
from sfumato.errors import UserError
from sfumato.models.embed import load_splits
from sfumato.workflows.own_items import list_items, named_source


def captions(path, images, annotations):
    """A file of COCO; images {number: file name}, annotations [(id, image, caption)]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"license": 1, "file_name": name, "id": number} for number, name in images.items()]
    annotations = [{"image_id": i, "id": a, "caption": text} for a, i, text in annotations]
    path.write_text(json.dumps({"info": {}, "images": images, "licenses": [], "annotations": annotations}))
    return path


def karpathy(path, name, **more):
    of_image = {"filename": name, "split": "test", "sentences": [{"sentid": 1, "raw": "x"}], **more}
    path.write_text(json.dumps({"images": [of_image], "dataset": "coco"}))
    return path


padded = lambda number: f"{number:012d}.jpg"


@pytest.fixture
def coco(tmp_path):
    for part, numbers in (("train", (9, 42)), ("val", (139,))):
        (tmp_path / f"{part}2017").mkdir()
        for number in numbers:
            (tmp_path / f"{part}2017" / padded(number)).write_bytes(png())
        texts = [(100 * n + k, n, f" image {n},\n said {k} ") for k in range(2) for n in numbers]
        file = tmp_path / "annotations" / f"captions_{part}2017.json"
        captions(file, {number: padded(number) for number in numbers}, texts)
    return tmp_path


def test_a_folder_of_annotations_is_train_and_val_by_years_and_one_file_is_divided_by_the_fractions(coco):
    problems = Problems()
    splits = read_coco_captions(coco / "annotations", problems)
    assert not problems and list(splits) == ["train", "val"]
    train = splits["train"]
    assert (train.image_ids, train.text_ids) == (("9", "42"), ("900", "901", "4200", "4201"))
    assert train.texts[0] == "image 9, said 0" and train.pairs.tolist() == [[0, 0], [0, 1], [1, 2], [1, 3]]
    assert splits["val"].images[0].path == coco / "val2017" / padded(139)
    by_recipe = load_splits(DataConfig(source="coco", path=str(coco / "annotations")), Problems())
    assert by_recipe["train"].text_ids == train.text_ids
    path = coco / "annotations" / "captions_train2017.json"
    config = DataConfig(source="coco", path=str(path), val_fraction=0.0, test_fraction=0.0)
    assert list(get_source("coco").read(config, Problems())) == ["train"]
    found = read_coco_captions(path, Problems(), val_fraction=0.499, test_fraction=0.5)
    assert sorted(i for data in found.values() for i in data.image_ids) == ["42", "9"]
    truth = read_ground_truth(coco / "annotations" / "captions_train2017.json")
    assert (truth.image_ids, truth.text_ids) == (("9", "42"), ("900", "4200", "901", "4201"))
    assert truth.i2t.to_dense().tolist() == [[True, False, True, False], [False, True, False, True]]
    captions(coco / "annotations" / "captions_val2014.json", {139: "COCO_val2014_000000000139.jpg"}, [(1, 139, "x")])
    message = "captions_val2014.json and captions_val2017.json; choose with data.options.year=2017"
    raises(UserError, message, read_coco_captions, coco / "annotations", Problems())
    found = read_coco_captions(coco / "annotations", Problems(), year="2014")
    assert found["val"].text_ids == ("1",) and "train" not in found  # With the image under its name of 2017.
    options = DataConfig(source="coco", path=str(coco / "annotations"), options={"year": 2017})
    assert get_source("coco").read(options, Problems())["val"].text_ids == ("13900", "13901")
    message = r"no captions_train\*.json or captions_val\*.json of 2015"
    raises(UserError, message, read_coco_captions, coco / "annotations", Problems(), year="2015")


def test_karpathys_names_of_2014_find_the_images_of_2017_and_the_other_way_round(coco, tmp_path):
    split = karpathy(tmp_path / "dataset.json", "COCO_val2014_000000000042.jpg", filepath="val2014")
    found = read_karpathy(split, coco, Problems())["test"]
    assert found.images[0].path == coco / "train2017" / padded(42)
    old = tmp_path / "old" / "val2014" / "COCO_val2014_000000000042.jpg"
    old.parent.mkdir(parents=True)
    old.write_bytes(png())
    new = captions(tmp_path / "captions.json", {42: padded(42)}, [(1, 42, "x")])
    found = read_coco_captions(new, Problems(), images=tmp_path / "old", val_fraction=0, test_fraction=0)
    assert found["train"].images[0].path == old
    for name in ("COCO_val2014_000000000042.jpg", "000000000042", "val2014/COCO_val2014_000000000042.jpg", "42"):
        assert coco_image_id(name) == "42"
    for name in ("0042", "0042.jpg", "1000268201_693b08cb0e.jpg", "x000000000042.jpg", "a/42.jpg"):
        assert coco_image_id(name) == name


def test_every_bad_entry_is_named_and_the_rest_is_read(coco):
    path = captions(
        coco / "annotations" / "captions_val2017.json",
        {139: padded(139), 140: padded(140), 141: padded(9)},
        [(1, 139, "good"), (1, 139, "again"), (2, 139, " "), (3, 7, "no image"), (4, 140, "gone"), (5, 139, 6)],
    )
    loaded = json.loads(path.read_text())
    loaded["images"] += [{"id": "139", "file_name": "x.jpg"}, {"id": 139, "file_name": "x.jpg"}]
    path.write_text(json.dumps(loaded))
    problems = Problems()
    assert read_coco_captions(coco / "annotations", problems)["val"].text_ids == ("1",)
    said = problems.summary(100)
    for reason in (
        "images[3]: malformed entry", "images[4]: image 139 occurred before", "annotations[1]: annotation 1 occurred",
        "annotations[2]: empty caption", "annotations[3]: image 7 is not among", "annotations[5]: malformed entry",
        f"image {padded(140)} is missing", "image 141: no usable caption",
    ):  # fmt: skip
        assert reason in said


def test_each_reader_names_the_other_ones_file_and_an_index_tells_them(coco, tmp_path):
    path = coco / "annotations" / "captions_val2017.json"
    split, instances = karpathy(tmp_path / "dataset.json", "a.jpg"), tmp_path / "instances_val2017.json"
    instances.write_text(json.dumps({"images": [], "annotations": [{"image_id": 1, "category_id": 2}]}))
    message = "this is COCO's own captions file, not a Karpathy split file. Read it with data.source=coco"
    raises(UserError, message, read_karpathy, path, coco, Problems())
    message = "a Karpathy split file; read it with data.source=karpathy"
    raises(UserError, message, read_coco_captions, split, Problems())
    for read in (lambda: read_karpathy(instances, coco, Problems()), lambda: read_coco_captions(instances, Problems())):
        raises(UserError, "COCO's annotations without captions", read)
    kinds = [json_kind(json.loads(p.read_text())) for p in (path, split, instances)]
    assert kinds == ["coco", "karpathy", "instances"] and json_kind([]) == ""
    source = named_source(str(coco / "annotations" / "captions_train2017.json"))
    assert (source.kind, source.root) == ("coco", str(coco))
    items = {item.id: item for item in list_items(source, frozenset({".jpg"}), Problems())}
    assert items.keys() == {"9", "42"} and items["42"].file == f"train2017/{padded(42)}"
    assert items["42"].fields(png(), Problems())["captions"] == "image 42, said 0\nimage 42, said 1"


def entry(name, split, *sentences, **more):
    return {"filename": name, "split": split, "sentences": [{"sentid": i, "raw": t} for i, t in sentences], **more}


NAMES = ("a.jpg", "val2014/b.jpg", "c.jpg", "d.jpg")


@pytest.fixture(params=["folder", "tar", "tar with ./"])
def images(request, tmp_path):
    if request.param == "folder":
        (tmp_path / "val2014").mkdir()
        for name in NAMES:
            (tmp_path / name).write_bytes(png())
        return tmp_path
    write_tar(tmp_path / "images.tar", [("./" * ("./" in request.param) + name, png()) for name in NAMES])
    return tmp_path / "images.tar"


def write(tmp_path, entries):
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps({"images": entries, "dataset": "toy"}), "utf-8")
    return path


def test_splits_ids_and_pictures(tmp_path, images):
    problems = Problems()
    entries = [
        entry("a.jpg", "train", (3, " A dog  runs. "), (4, "Ein Hund – läuft")),
        entry("b.jpg", "val", (5, "in its subfolder"), filepath="./val2014/"),
        entry("c.jpg", "restval", (6, "joins training"), filepath="train2014"),  # Flat in spite of its filepath.
        entry("d.jpg", "test", (7, "x")),
        entry("a.jpg", "", (8, "no split")),
        {k: v for k, v in entry("a.jpg", "", (9, "none either")).items() if k != "split"},
        entry("a.jpg", "none", (10, "nor here")),
    ]
    splits = read_karpathy(write(tmp_path, entries), images, problems)
    assert len(problems) == 0
    assert {name: (d.image_ids, d.text_ids) for name, d in splits.items()} == {
        "train": (("a.jpg", "c.jpg"), ("3", "4", "6")), "val": (("b.jpg",), ("5",)), "test": (("d.jpg",), ("7",)),
    }  # fmt: skip
    assert splits["train"].texts == ("A dog runs.", "Ein Hund – läuft", "joins training")
    assert splits["train"].pairs.tolist() == [[0, 0], [0, 1], [1, 2]]
    assert all(image.read_bytes() == png() for data in splits.values() for image in data.images)


def test_every_bad_entry_of_karpathys_file_is_named_and_the_rest_is_read(tmp_path, images):
    bad = [
        "a string", {"split": "train", "sentences": []}, entry(5, "train", (1, "x")),
        {"filename": "a.jpg", "split": "train"}, entry("a.jpg", "train"),
        {"filename": "a.jpg", "split": "train", "sentences": [{"raw": "x"}]},
        {"filename": "a.jpg", "split": "train", "sentences": [{"sentid": 1, "raw": None}]},
        entry("a.jpg", ["train"], (1, "x")), entry("a.jpg", "train", (1, "x"), filepath=7),
        entry("gone.jpg", "train", (1, "x")), entry("d.jpg", "train", (1, " ")),
    ]  # fmt: skip
    good = [entry("a.jpg", "train", (1, "one"), (2, "\n"), (3, "three"))]
    again = [entry("a.jpg", "test", (4, "x")), entry("c.jpg", "train", (3, "taken"), (5, "five"))]
    problems = Problems()
    path = write(tmp_path, bad + good + again)
    splits = read_karpathy(path, images, problems)
    assert list(splits) == ["train"] and splits["train"].image_ids == ("a.jpg", "c.jpg")
    assert splits["train"].texts == ("one", "three", "five")
    found = [(p.location.removeprefix(f"{path}:"), p.reason) for p in problems.items]
    assert [place.split()[0] for place, _ in found] == [f"images[{k}]" for k in range(14)]
    expected = [
        *("expected an object", "filename is None", "filename is 5", "sentences is missing", "sentences is missing"),
        *("a sentence lacks sentid", "a sentence lacks", "split is of type list", "filepath is of type int"),
        *("image gone.jpg is missing from", "empty caption", "empty caption", "image a.jpg occurred before"),
        "this sentid occurred before",
    ]
    assert [e in reason for e, (_, reason) in zip(expected, found, strict=True)] == [True] * 14, found


def test_missing_files_archives_that_are_none_and_json_of_another_layout(tmp_path):
    path = write(tmp_path, [entry("gone.jpg", "train", (1, "x"))])
    raises(UserError, "cannot read .*absent", read_karpathy, tmp_path / "absent.json", tmp_path, Problems())
    message = r"data\.images: there is no folder or tar file"
    raises(UserError, message, read_karpathy, path, tmp_path / "absent", Problems())
    raises(UserError, r"data\.images: .*not an uncompressed tar file", read_karpathy, path, path, Problems())
    message = r"no usable pair(.|\n)*images\[0\]: image gone\.jpg is missing"
    raises(UserError, message, read_karpathy, path, tmp_path, Problems())
    for text in ("", "{", "[]", "5", '{"annotations": []}', '{"images": 5}', '{"images": {"a": 1}}'):
        path.write_text(text)
        raises(UserError, r"dataset\.json: .*(expected|not usable JSON)", read_karpathy, path, tmp_path, Problems())
