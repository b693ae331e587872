"""Karpathy's JSON: small files that are wrong in every way, and the real Flickr8k where it lies."""

import json

import pytest
from support.pictures import png, write_tar
from support.raising import raises

from sfumato import Problems, read_karpathy
from sfumato.data.image_decoding import decode_image
from sfumato.errors import UserError


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
        "train": (("a.jpg", "c.jpg"), ("3", "4", "6")),
        "val": (("b.jpg",), ("5",)),
        "test": (("d.jpg",), ("7",)),
    }
    assert splits["train"].texts == ("A dog runs.", "Ein Hund – läuft", "joins training")
    assert splits["train"].pairs.tolist() == [[0, 0], [0, 1], [1, 2]]
    assert all(image.read_bytes() == png() for data in splits.values() for image in data.images)


def test_every_bad_entry_is_named_and_the_rest_is_read(tmp_path, images):
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


def test_flickr8k(shared):
    folder = shared / "data" / "flickr8k"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    problems = Problems()
    splits = read_karpathy(folder / "dataset_flickr8k.json", folder / "images_128.tar", problems)
    sizes = {name: (len(data.image_ids), len(data.text_ids)) for name, data in splits.items()}
    assert sizes == {"train": (6000, 30000), "val": (1000, 5000), "test": (1000, 5000)} and len(problems) == 0
    raw = {e["filename"]: e for e in json.loads((folder / "dataset_flickr8k.json").read_text())["images"]}
    data = splits["test"]
    for i in range(0, 1000, 97):
        own = data.pairs[data.pairs[:, 0] == i, 1]
        source = raw[data.image_ids[i]]
        assert source["split"] == "test"
        assert [data.texts[t] for t in own] == [" ".join(s["raw"].split()) for s in source["sentences"]]
        assert [data.text_ids[t] for t in own] == [str(s["sentid"]) for s in source["sentences"]]
        assert decode_image(data.images[i].read_bytes(), None).shape == (3, 128, 128)
