"""Manifests and folders as users write them: what is read, and what is said about each thing that cannot be."""

import base64
import csv
import json
import re

import pytest
from PIL import Image
from support.raising import raises

from sfumato.data.images import Problems
from sfumato.data.layouts import read_cub
from sfumato.data.manifest import manifest_items, read_image_folder, read_manifest, splits_of_items
from sfumato.errors import UserError


@pytest.fixture
def pictures(tmp_path):
    (tmp_path / "my pictures").mkdir()
    for name in ("a.png", "b.jpg", "c.webp", "my pictures/d.PNG"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / name)
    return tmp_path


def captions_of(data):
    texts = lambda i: [data.texts[t] for t in data.pairs[data.pairs[:, 0] == i, 1]]
    return {image: texts(i) for i, image in enumerate(data.image_ids)}


def read(path, **options):
    """(split -> image id -> captions, the problems as (place without folder, reason))."""
    problems = Problems()
    reader = read_image_folder if path.is_dir() else read_manifest
    splits = reader(path, problems, **({"val_fraction": 0, "test_fraction": 0} | options))
    found = [(p.location.removeprefix(str(path)).lstrip("/"), p.reason) for p in problems.items]
    return {name: captions_of(data) for name, data in splits.items()}, found


ROWS = [
    {"image": "a.png", "captions": ["a red square", " red  "], "split": "train", "id": 7},
    {"image": "b.jpg", "captions": "größer, „bunt“", "split": "val", "id": ""},
    {"image": "my pictures/d.PNG", "captions": ['said "no"'], "split": "test", "id": "d"},
]
READ = {"train": {"7": ["a red square", "red"]}, "val": {"b.jpg": ["größer, „bunt“"]}, "test": {"d": ['said "no"']}}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def written(pictures, kind, rows):
    path = pictures / f"m.{kind}"
    if kind == "jsonl":
        return write_jsonl(path, rows)
    if kind == "csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, [*rows[0], "more"], restval="x")
            writer.writeheader()
            plain = lambda value: json.dumps(value) if isinstance(value, list) else value
            writer.writerows({name: plain(value) for name, value in row.items()} for row in rows)
        return path
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lists = {"captions": lambda v: [v] if isinstance(v, str) else v, "id": str}
    table = pyarrow.table({key: [lists.get(key, lambda v: v)(row[key]) for row in rows] for key in rows[0]})
    parquet.write_table(table.append_column("blob", [[b"x" * 1000] * len(rows)]), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_every_kind_of_manifest_gives_the_same(pictures, kind):
    path = written(pictures, kind, ROWS)
    assert read(path) == (READ, [])
    if kind == "jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n"))
        assert read(path) == (READ, [])
    rows = [
        {"image": "a.png", "captions": ["x", "y"], "caption_ids": ["1", "2"]},
        {"image": "b.jpg", "captions": ["x"], "caption_ids": ["1"]},
        {"image": "c.webp", "captions": ["z"], "caption_ids": None},
    ]
    data, problems = many_to_many(written(pictures, kind, rows))
    assert not problems and data.text_ids == ("1", "2", "c.webp#0")
    assert data.pairs.tolist() == [[0, 0], [0, 1], [1, 0], [2, 2]]


def test_damaged_parquet(pictures):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = pictures / "m.parquet"
    parquet.write_table(pyarrow.table({"image": ["a.png"] * 5000, "captions": [f"{k} x" for k in range(5000)]}), path)
    whole = path.read_bytes()
    for data in (b"no parquet", b"", whole[: len(whole) // 2], whole[:100] + b"\xff" * 2000 + whole[2100:]):
        path.write_bytes(data)
        raises(UserError, r"m\.parquet: damaged after row 0, or not a Parquet file", read, path)
    parquet.write_table(pyarrow.table({"image": ["a.png"], "captions": ["x"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"captions", b"capti\xffns"))  # A name that is not UTF-8.
    raises(UserError, r"m\.parquet: damaged after row 0, or not a Parquet file", read, path)


def test_every_bad_line_is_named_with_its_place_and_the_rest_is_read(pictures):
    path = pictures / "m.jsonl"
    good = '{"image": "a.png", "captions": ["fine", "", "  "]}'
    lines = [
        good, '{"image": "a.png", "captions": ["cut off"', "", '["a.png", "a list"]', '{"captions": "no image"}',
        '{"image": 5, "captions": "a number"}', '{"image": "a.png", "captions": ["x", 5]}', '{"image": "a.png"}',
        '{"image": "b.jpg", "captions": []}', '{"image": "b.jpg", "captions": " "}',
        '{"image": "gone.png", "captions": "x"}', '{"image": "my pictures", "captions": "a folder"}',
        '{"image": "b\\u0000.jpg", "captions": "x"}', '{"image": "b.jpg", "captions": "half \\ud83d a pair"}',
        "[" * 100_000, '{"image": "b.jpg", "captions": "x", "id": ' + "9" * 5000 + "}",
        '{"image": "' + base64.b64encode(bytes(3000)).decode() + '", "captions": "a picture, not a path"}',
        '{"image": "c.webp", "captions": "fine too"}', json.dumps({"image": "b.jpg", "captions": "dog " * 250_001}),
    ]  # fmt: skip
    path.write_bytes("\n".join(lines).encode() + b'\n{"image": "b.jpg", "captions": "caf\xe9"}\n')
    splits, found = read(path)
    assert splits == {"train": {"a.png": ["fine"], "c.webp": ["fine too"]}}
    reasons = dict(found)
    assert [place for place, _ in found] == [f":{k}" for k in (2, *range(4, 8), *range(11, 18), 19, 20)]
    problems = Problems()
    read_manifest(path, problems)
    assert "m.jsonl:9: no caption; 2 of 3 images have one and are used" in problems.summary(3)
    assert "m.jsonl:8 (kept): no captions: the columns are image; expected captions" in problems.summary(3)
    starts = {
        2: "not JSON", 4: "expected an object with image and captions, got list",
        5: "no image: the columns are captions; expected image among them", 6: "no image: found 5; expected a path",
        7: "captions: found ['x', 5]", 11: f"image {pictures}/gone.png is missing",
        12: f"image {pictures}/my pictures is missing",
        13: "not UTF-8", 14: "not UTF-8", 15: "not JSON", 16: "not JSON", 17: "image 'AAA",
        19: "not UTF-8", 20: "not UTF-8",
    }  # fmt: skip
    for line, start in starts.items():
        assert reasons[f":{line}"].startswith(start), (line, reasons[f":{line}"])
    assert max(map(len, reasons.values())) < 500


def test_bad_csv_lines(pictures):
    path = pictures / "m.csv"
    path.write_bytes(
        b'image,captions\na.png,fine\nb.jpg,one, two\nb.jpg,"a "big" dog"\nb.jpg\nb.jpg,caf\xe9\nb.jpg,[not JSON\n'
        b'b.jpg,"[""x"", 5]"\nc.webp,"two\nlines"\nc.webp,' + b"x" * 200_000 + b"\nmy pictures/d.PNG,last\n"
    )
    splits, found = read(path)
    own = {"a.png": ["fine"], "b.jpg": ["[not JSON"], "c.webp": ["two\nlines"], "my pictures/d.PNG": ["last"]}
    assert splits["train"] == own
    starts = {
        ":3": "more values than the 2 columns", ":4": "not CSV", ":6": "not UTF-8",
        ":8": "captions: found ['x', 5]", ":11": "not CSV: field larger",
    }  # fmt: skip
    assert [place for place, _ in found] == list(starts)
    assert [reason for place, reason in found if not reason.startswith(starts[place])] == []
    # A missing quote swallows no row in silence.
    path.write_text('image,captions\na.png,"no end\nb.jpg,"x"\nc.webp,fine\n')
    splits, found = read(path)
    assert splits == {"train": {"c.webp": ["fine"]}}
    assert len(found) == 1 and found[0][0] == ":3" and "from line 2 on, a quote may be missing" in found[0][1]
    path.write_text('image,captions\nc.webp,fine\na.png,"no end\nb.jpg,x\n')
    splits, found = read(path)
    assert splits == {"train": {"c.webp": ["fine"]}} and "from line 3 on" in found[0][1]


def test_split_names_and_drawn_shares_by_id_of_which_adding_rows_moves_none(pictures):
    names = ["Train", "validation", "restval", None]
    images = ["a.png", "b.jpg", "c.webp", "my pictures/d.PNG"]
    rows = [{"image": i, "captions": "x", "split": s} for i, s in zip(images, names, strict=True)]
    splits, found = read(write_jsonl(pictures / "m.jsonl", rows))
    assert {name: set(own) for name, own in splits.items()} == {"train": {images[0], *images[2:]}, "val": {images[1]}}
    assert found == []
    rows = [{"image": "a.png", "captions": "x", "id": k} for k in range(2000)]
    path = write_jsonl(pictures / "m.jsonl", rows[:1000])
    first, _ = read(path, val_fraction=0.2, test_fraction=0.1)
    both, _ = read(write_jsonl(path, rows[::-1]), val_fraction=0.2, test_fraction=0.1)
    assert all(set(first[name]) < set(both[name]) for name in ("train", "val", "test"))
    sizes = {name: len(own) for name, own in both.items()}
    # Standard deviations of 18 and 13.
    assert sum(sizes.values()) == 2000 and abs(sizes["val"] - 400) < 72 and abs(sizes["test"] - 200) < 54
    message = "val_fraction and test_fraction must not be negative, and below 1 together"
    for val, test in ((0.5, 0.5), (-0.1, 0.1), (0.1, float("nan"))):
        for path in (write_jsonl(pictures / "m.jsonl", ROWS), pictures):
            raises(ValueError, message, read, path, val_fraction=val, test_fraction=test)
        raises(ValueError, message, splits_of_items, [], path, Problems(), val, test)
        raises(ValueError, message, read_cub, path, Problems(), fractions=(val, test))


def test_manifests_and_folders_that_cannot_be_used(pictures, tmp_path_factory):
    problems = Problems()
    raises(UserError, "there is no folder", read_image_folder, pictures / "absent", problems)
    with pytest.raises(UserError, match=r"holds no image \(.avif, .bmp.*with a .txt file of the same name"):
        read_image_folder(tmp_path_factory.mktemp("empty"), problems)
    raises(UserError, "there is no manifest", read_manifest, pictures / "absent.jsonl", problems)
    (pictures / "m.xlsx").write_text("")
    with pytest.raises(UserError, match=r"unknown kind of manifest '\.xlsx'; expected \.jsonl, \.csv, \.parquet"):
        read_manifest(pictures / "m.xlsx", problems)
    with pytest.raises(UserError, match=r"holds no usable pair(.|\n)*:1: image .*gone\.png is missing"):
        read_manifest(write_jsonl(pictures / "m.jsonl", [{"image": "gone.png", "captions": "x"}]), problems)
    rows = [{"image": "a.png", "captions": "x"}, {"image": str(pictures / "b.jpg"), "captions": "y"}]
    path = write_jsonl(tmp_path_factory.mktemp("elsewhere") / "m.jsonl", rows)
    assert read(path, image_root=pictures)[1] == []
    assert [p for p, _ in read(path)[1]] == [":1"]


def test_folders_of_pictures_and_captions(pictures):
    (pictures / "a.txt").write_bytes("\ufeffone\r\n\r\n  zwei \r\n".encode())
    (pictures / "my pictures" / "d.txt").write_text("three")
    (pictures / "b.txt").write_text(" \n\n")
    (pictures / "readme.md").write_text("not a picture")
    splits, found = read(pictures)
    assert splits == {"train": {"a.png": ["one", "zwei"], "my pictures/d.PNG": ["three"]}}
    problems = Problems()
    read_image_folder(pictures, problems)
    assert found == [] and [*problems.bare] == ["b.jpg", "c.webp"] and problems.left_out == 2
    assert "b.jpg and 1 more: no caption; 2 of 4 images have one and are used" in problems.summary()
    (pictures / "a.txt").write_bytes(b"caf\xe9")
    (pictures / "b.txt").write_text("fine")
    strange = pictures / "caf\udce9.png"
    try:
        strange.write_bytes(b"")
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    strange.with_suffix(".txt").write_text("x")
    splits, found = read(pictures)
    assert splits == {"train": {"b.jpg": ["fine"], "my pictures/d.PNG": ["three"]}}
    assert found[0][0] == "a.txt" and found[0][1].startswith("not UTF-8")
    assert ("caf\\udce9.png", "the name is not valid UTF-8") in found


def test_folder_with_splits(pictures):
    for k, split in enumerate(["train", "train/deeper", "validation", "test", "other"]):
        (pictures / split).mkdir()
        (pictures / split / f"{k}.png").write_bytes((pictures / "a.png").read_bytes())
        (pictures / split / f"{k}.txt").write_text(f"caption {k}")
    (pictures / "a.txt").write_text("at the top")
    splits, found = read(pictures)
    others = {"val": {"validation/2.png": ["caption 2"]}, "test": {"test/3.png": ["caption 3"]}}
    assert splits == {"train": {"train/0.png": ["caption 0"], "train/deeper/1.png": ["caption 1"]}, **others}
    outside = "lies outside of the split folders test, train, validation"
    assert ("a.png", outside) in found and ("other/4.png", outside) in found


def many_to_many(path):
    problems = Problems()
    (data,) = read_manifest(path, problems, val_fraction=0, test_fraction=0).values()
    return data, [(p.location.rpartition(":")[2], p.reason) for p in problems.items]


def test_caption_ids_that_rows_share_or_that_do_not_fit(pictures):
    rows = [
        {"image": "a.png", "captions": ["a dog", "", "red"], "caption_ids": [1, "x", "r"]},
        {"image": "b.jpg", "caption": "a dog", "caption_id": "1"},
        *({"image": image, "captions": [caption]} for image, caption in (("b.jpg", "blue"), ("c.webp", "a dog"))),
    ]
    data, problems = many_to_many(write_jsonl(pictures / "m.jsonl", rows))
    assert problems == []
    assert data.text_ids == ("1", "r", "b.jpg#1", "c.webp#0") and data.texts == ("a dog", "red", "blue", "a dog")
    assert data.pairs.tolist() == [[0, 0], [0, 1], [1, 0], [1, 2], [2, 3]]
    rows = [{"image": "b.jpg", "captions": ["one", "two"], "caption_ids": ids} for ids in [[1], [1, 2.5], [2, "seen"]]]
    rows = [{"image": "a.png", "captions": ["a dog"], "caption_ids": ["seen"]}, *rows]
    data, problems = many_to_many(write_jsonl(pictures / "m.jsonl", rows))
    assert problems == [
        ("2", "caption_ids: found 1 for 2 captions; give one for each"),
        ("3", "caption_ids: found [1, 2.5], expected strings or whole numbers"),
    ]
    assert data.texts == ("a dog", "one")
    rows = [
        {"image": image, key: caption, "id": 1, "split": split} for image, key, caption, split in (
            ("a.png", "captions", "x", "train"), ("b.jpg", "captions", "y", "train"),
            ("a.png", "captions", "z", "test"), ("a.png", "caption", "of the same row", "train"),
        )
    ]  # fmt: skip
    splits, found = read(write_jsonl(pictures / "m.jsonl", rows))
    assert splits == {"train": {"1": ["x", "of the same row"]}}
    assert found == [(f":{k}", "id '1' occurred before, with another image or split") for k in (2, 3)]


@pytest.mark.parametrize(("content", "captions"), [
    (b"image, caption\na.png, two dogs\n", ["two dogs"]), (b"image,captions\na.png,nan\n", []),
    (b"image,captions\na.png,\"['two dogs', 'a \"\"b\"\"']\"\n", ["two dogs", 'a "b"']),
    (b"image,captions\na.png,\"['two dogs'\n 'a' nan]\"\n", ["two dogs", "a"]),
    (b"image,captions\na.png,[dog] 'x'\n", ["[dog] 'x'"]), (b"image,captions\na.png,caf\xe9\n", "not UTF-8"),
    (b"img,caption\n", "expected image among them"), (b"image;captions\na.png;x\n", "';' separates"),
    (b"image\tcaptions\na.png\tx\n", "'.t' separates"),
    ("image,captions\na.png,x\n".encode("utf-16"), "not UTF-8"), (b"image,captions,x\na.png,x,a\0b\n", "NUL"),
    (b'{"image": "a.png", "captions": ["x", null, NaN]}', ["x"]),
    (b'{"image": "a.png", "captions": NaN}', []), (b'{"image": "a.png", "x": "\\ud83d"}', "half a char"),
])  # fmt: skip
def test_manifests_as_people_write_them(pictures, content, captions):
    path = pictures / ("m.jsonl" if content.startswith(b"{") else "m.csv")
    path.write_bytes(content)
    problems = Problems()
    try:
        found = [[t for _, t in item.texts] for item, _ in manifest_items(path, pictures, problems, captioned=False)]
    except UserError as error:
        problems.add(path, str(error))
    if isinstance(captions, str):
        assert len(problems) == 1 and re.search(captions, problems.summary())
    else:
        assert found == [captions] and problems.left_out == 0
