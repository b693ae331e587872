"""Pairs of embeddings against slow loops: rows, ids, splits, captions, bad rows, and what is refused."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.raising import raises

from sfumato.data.images import Problems
from sfumato.data.layouts import read_embedding_pairs
from sfumato.data.manifest import hashed_split
from sfumato.data.sources import DataConfig
from sfumato.data.splits import merge_equal_texts
from sfumato.errors import UserError
from sfumato.models.embed import load_splits

N, M = 30, 70


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    images, texts = random.standard_normal((N, 5)), random.standard_normal((M, 3))
    np.save("images.npy", images.astype(np.float16))
    np.save("texts.npy", texts.astype(np.float32))
    return images.astype(np.float16), texts.astype(np.float32)


def write_csv(path, rows, columns=("image", "text", "split")):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def some_pairs(n_pairs=90):
    random = np.random.default_rng(1)
    return list({(int(random.integers(N)), int(random.integers(M))) for _ in range(n_pairs)})


def matches(data):
    """{(image id, text id)} of a split, and {id: its row of numbers} of each side."""
    sides = (data.image_ids, data.images), (data.text_ids, data.text_rows)
    read = lambda row: row.table.rows(np.array([row.row]))[0]
    images, texts = ({i: read(row) for i, row in zip(*side, strict=True)} for side in sides)
    return {(data.image_ids[i], data.text_ids[t]) for i, t in data.pairs}, images, texts


def read(problems=None, **options):
    return read_embedding_pairs("images.npy", "texts.npy", Problems() if problems is None else problems, **options)


def test_pairs_and_splits_are_those_of_a_loop_or_of_a_hash(arrays):
    pairs = some_pairs()
    names = ["train", "val", "test", "dev", ""]
    split_of = {image: names[image % 5] for image, _ in pairs}
    write_csv("pairs.csv", [(i, t, split_of[i]) for i, t in pairs])
    found = read(pairs="pairs.csv")
    expected = {}
    for image, text in pairs:
        split = {"dev": "val", "": "train"}.get(split_of[image], split_of[image])
        expected.setdefault(split, set()).add((str(image), str(text)))
    assert set(found) == set(expected)
    for split, data in found.items():
        own, images, texts = matches(data)
        assert own == expected[split] and data.texts == data.text_ids
        for i, row in images.items():
            np.testing.assert_array_equal(row, arrays[0][int(i)].astype(np.float32))
        for t, row in texts.items():
            np.testing.assert_array_equal(row, arrays[1][int(t)])
    np.save("images_ids.npy", np.array([f"photo-{i}" for i in range(N)]))
    write_csv("pairs.csv", [(f"photo-{i}", t) for i, t in some_pairs()], ("image", "text"))
    found = read(pairs="pairs.csv", val_fraction=0.3, test_fraction=0.2)
    assert set(found) == {"train", "val", "test"}
    for split, data in found.items():
        assert all(hashed_split(i, 0.3, 0.2) == split for i in data.image_ids)
        assert len(matches(data)[0]) == len(data.pairs)
    assert sum(len(data.pairs) for data in found.values()) == len(some_pairs())
    Path("images_ids.npy").unlink()
    found = read_embedding_pairs("images.npy", "images.npy", Problems(), val_fraction=0, test_fraction=0)
    assert matches(found["train"])[0] == {(str(i), str(i)) for i in range(N)}
    raises(UserError, "images.npy has 30 rows and texts.npy has 70; without pairs row i", read)


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_other_files_of_pairs(arrays, ending):
    rows = [{"image": i, "text": t, "caption": f"words of {t}"} for i, t in some_pairs()]
    if ending == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), "pairs.parquet")
    else:
        text = json.dumps(rows) if ending == "json" else "\n".join(map(json.dumps, rows))
        Path(f"pairs.{ending}").write_text(text)
    (data,) = read(pairs=f"pairs.{ending}", val_fraction=0, test_fraction=0).values()
    assert matches(data)[0] == {(str(i), str(t)) for i, t in some_pairs()}
    assert data.texts == tuple(f"words of {t}" for t in data.text_ids)


def test_bad_rows_are_named_and_left_out_with_their_pairs(arrays):
    images, texts = arrays
    images[3, 1], texts[5], texts[6, 2] = np.nan, 0, np.inf
    images[29] = 0  # In no pair.
    np.save("images.npy", images)
    np.save("texts.npy", texts)
    np.save("texts_ids.npy", np.array([f"t{k}" for k in range(M)]))
    pairs = [(0, "t1"), (3, "t2"), (3, "t7"), (4, "t5"), (4, "t8"), (9, "t6")]
    write_csv("pairs.csv", pairs, ("image", "text"))
    problems = Problems()
    (data,) = read(problems, pairs="pairs.csv", val_fraction=0, test_fraction=0).values()
    assert matches(data)[0] == {("0", "t1"), ("4", "t8")} and data.text_ids == ("t1", "t8")
    assert [(p.location, p.reason) for p in problems.items] == [
        ("images.npy[3]", "image '3' holds NaN or infinity"),
        ("texts.npy[5]", "text 't5' holds zeros alone"),
        ("texts.npy[6]", "text 't6' holds NaN or infinity"),
    ]


def test_lines_that_cannot_be_used_are_reported_and_a_row_outside_is_an_error(arrays):
    Path("pairs.csv").write_text("image,text,split\n0,1,train\n,2,train\n1,2,val\n1,3,test\n2,4,train,5\n")
    problems = Problems()
    found = read(problems, pairs="pairs.csv")
    assert {split: matches(data)[0] for split, data in found.items()} == {"train": {("0", "1")}, "val": {("1", "2")}}
    assert sorted(p.location for p in problems.items) == ["pairs.csv:3", "pairs.csv:5", "pairs.csv:6"]
    assert any("image '1' was in split 'val' before" in p.reason for p in problems.items)
    for row, message in (
        ((30, 0), "pairs.csv:3: image '30' is not a row number from 0 to 29 of images.npy; ids would stand beside it"),
        ((0, 70), "text '70' is not a row number from 0 to 69 of texts.npy"),
        *(((i, 0), f"image '{i}' is not a row number") for i in (-1, "cat.jpg", 1.5)),
    ):
        write_csv("pairs.csv", [(0, 0), row], ("image", "text"))
        raises(UserError, re.escape(message), read, pairs="pairs.csv")


def test_an_unknown_id_is_an_error_and_ids_of_digits_are_ids(arrays):
    Path("images_ids.txt").write_text("\n".join(str(100 + i) for i in range(N)))
    write_csv("pairs.csv", [(105, 0), (106, 1)], ("image", "text"))
    (data,) = read(pairs="pairs.csv", val_fraction=0, test_fraction=0).values()
    assert data.image_ids == ("105", "106") and [source.row for source in data.images] == [5, 6]
    write_csv("pairs.csv", [(5, 0), (6, 1)], ("image", "text"))  # No id among them: row numbers.
    (data,) = read(pairs="pairs.csv", val_fraction=0, test_fraction=0).values()
    assert data.image_ids == ("105", "106")
    write_csv("pairs.csv", [(105, 0), (6, 1)], ("image", "text"))
    raises(UserError, re.escape("pairs.csv:3: image '6' is not an id of images.npy"), read, pairs="pairs.csv")


def test_a_karpathy_file_names_rows_and_captions(arrays):
    entries, sentence = [], 0
    for i in range(N):
        own = 3 if i < 10 else 2
        sentences = [{"sentid": 1000 + sentence + k, "raw": f"Caption {sentence + k}"} for k in range(own)]
        sentence += own
        split = ["train", "val", "restval", ""][i % 4]
        entries.append({"filename": f"{i}.jpg", "split": split, "sentences": sentences})
    Path("dataset.json").write_text(json.dumps({"images": entries}))
    found = read(pairs="dataset.json")
    assert set(found) == {"train", "val"}
    expected, row = {"train": set(), "val": set()}, 0
    for i, entry in enumerate(entries):
        for _ in entry["sentences"]:
            if i % 4 != 3:
                expected["val" if i % 4 == 1 else "train"].add((f"{i}.jpg", str(1000 + row)))
            row += 1
    for split, data in found.items():
        own, images, texts = matches(data)
        assert own == expected[split]
        assert data.texts == tuple(f"Caption {int(t) - 1000}" for t in data.text_ids)
        assert all((row == arrays[0][int(i.removesuffix(".jpg"))]).all() for i, row in images.items())
        assert all((row == arrays[1][int(t) - 1000]).all() for t, row in texts.items())
    Path("dataset.json").write_text(json.dumps({"images": entries[:-1]}))
    raises(UserError, "dataset.json has 29 images and images.npy has 30 rows", read, pairs="dataset.json")
    entries[4]["sentences"] = []
    Path("dataset.json").write_text(json.dumps({"images": entries}))
    with pytest.raises(UserError, match=r"images\[4\]: sentences is missing, empty .* can then not be counted"):
        read(pairs="dataset.json")


def test_equal_wordings_are_merged_but_ids_are_not_wordings(arrays):
    np.save("texts_ids.npy", np.array(["a", "A", *(f"t{k}" for k in range(M - 2))]))
    rows = [(0, "a", ""), (1, "A", ""), (2, "t0", "A dog"), (3, "t1", "a  dog")]
    write_csv("pairs.csv", rows, ("image", "text", "caption"))
    (data,) = read(pairs="pairs.csv", val_fraction=0, test_fraction=0).values()
    merged = merge_equal_texts(data)
    assert merged.text_ids == ("a", "A", "t0") and [row.row for row in merged.text_rows] == [0, 1, 2]
    assert matches(merged)[0] == {("0", "a"), ("1", "A"), ("2", "t0"), ("3", "t0")}
    kept = merged.keep_images(np.array([3, 1]))
    assert matches(kept)[0] == {("3", "t0"), ("1", "A")} and [row.row for row in kept.text_rows] == [1, 2]


def test_the_source_its_keys_and_what_is_not_taken_for_pairs(arrays):
    write_csv("pairs.csv", [(0, 0), (1, 1)], ("image", "text"))
    options = {"source": "embeddings", "images": "images.npy", "val_fraction": 0, "test_fraction": 0}
    config = DataConfig(**options, texts="texts.npy", path="pairs.csv")
    assert load_splits(config, Problems())["train"].image_ids == ("0", "1")
    raises(ValueError, "needs data.images and data.texts", DataConfig, **options)
    raises(ValueError, "data.texts is for data.source=embeddings, not 'emoji'", DataConfig, texts="texts.npy")
    with pytest.raises(UserError, match=r"data.path: there is no none.csv"):
        load_splits(DataConfig(**options, texts="texts.npy", path="none.csv"), Problems())
    raises(UserError, "holds embeddings, not pairs; pairs are a .csv", read, pairs="images.npy")
    write_csv("near.csv", some_pairs(), ("img", "caption"))
    with pytest.raises(UserError, match=r"the columns are img, caption; .* \(is 'img' image\? is 'caption' text\?\)"):
        read(pairs="near.csv")
