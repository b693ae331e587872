"""Data sets of the package datasets: written, read by the package, and read back.

The package is not among those of the tests; in an environment of its own:

    python -m venv env && env/bin/pip install -c constraints.txt -e '.[datasets]' pytest hypothesis
    env/bin/python -m pytest tests/data/test_hub_datasets.py

Run with datasets 5.2.0.
"""

import json

import numpy as np
import pytest
from support.pictures import png

from sfumato import Problems, read_dataset, write_dataset
from sfumato.data.images import FileImage, MemoryImage
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig, get_source
from sfumato.errors import UserError


def split_of(n, first=0):
    """n images with one to three captions, the last of which all share; the ids need not be in order."""
    images = tuple(MemoryImage(f"m{i}", png((first + i, 0, 0))) for i in range(n))
    texts = [f"text {first}-{i}-{k}" for i in range(n) for k in range(i % 3)] + ["shared"]
    pairs, position = [(i, len(texts) - 1) for i in range(n)], 0
    for i in range(n):
        for _ in range(i % 3):
            pairs.append((i, position))
            position += 1
    ids = tuple(f"t{first}-{k}" for k in range(len(texts)))
    named = tuple(f"folder/{first + i}.png" for i in range(n))
    return PairData(named, images, ids, tuple(texts), ("caption",) * len(texts), np.array(pairs))


def listed(data):
    """Image id -> its bytes and its (id, text) pairs."""
    found = {name: (image.read_bytes(), set()) for name, image in zip(data.image_ids, data.images, strict=True)}
    for i, t in data.pairs:
        found[data.image_ids[i]][1].add((data.text_ids[t], data.texts[t]))
    return found


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    package = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return package


def read(path, **options):
    problems = Problems()
    return read_dataset(path, problems, **options), problems


def test_what_is_written_is_read_by_the_package_and_read_back(datasets, tmp_path):
    splits = {"train": split_of(7), "val": split_of(3, 100), "test": split_of(2, 200)}
    files = write_dataset(splits, tmp_path / "out", per_file=3)
    assert [path.name for path in files][:4] == [
        *(f"train-0000{k}-of-00003.parquet" for k in range(3)), "val-00000-of-00001.parquet",
    ]  # fmt: skip
    loaded = datasets.load_dataset(str(tmp_path / "out"))
    assert {name: len(rows) for name, rows in loaded.items()} == {"train": 7, "val": 3, "test": 2}
    assert loaded["train"][4]["image"].getpixel((0, 0)) == (4, 0, 0)
    assert loaded["train"][4]["captions"] == ["text 0-4-0", "shared"]
    loaded.save_to_disk(str(tmp_path / "saved"))
    for place in ("out", "saved"):
        found, problems = read(tmp_path / place)
        assert not len(problems) and found.keys() == splits.keys()
        for name, data in splits.items():
            assert listed(found[name]) == listed(data) and found[name].image_ids == data.image_ids


def test_the_schema_is_that_of_the_hub_without_the_package(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    [path] = write_dataset({"train": split_of(5)}, tmp_path / "out")
    table = parquet.read_table(path)
    assert table.column_names == ["image", "captions", "id", "caption_ids"] and table.num_rows == 5
    known = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert list(known) == table.column_names and known["image"] == {"_type": "Image"}
    assert table["image"][2].as_py() == {"bytes": png((2, 0, 0)), "path": "2.png"}
    assert table["captions"][2].as_py() == ["text 0-2-0", "text 0-2-1", "shared"]


def test_a_row_for_each_caption_and_a_column_of_splits(datasets, tmp_path):
    rows = [
        {"image": {"bytes": png((i, 0, 0)), "path": f"{i}.png"}, "sentences": f"{i} {k}", "split": split}
        for i, split in enumerate(["train", "train", "val", "test"])
        for k in range(2)
    ]
    kinds = {"image": datasets.Image(), "sentences": datasets.Value("string"), "split": datasets.Value("string")}
    datasets.Dataset.from_list(rows, datasets.Features(kinds)).save_to_disk(str(tmp_path / "saved"))
    found, problems = read(tmp_path / "saved")
    assert {name: data.image_ids for name, data in found.items()} == {
        "train": ("0.png", "1.png"), "val": ("2.png",), "test": ("3.png",),
    }  # fmt: skip
    assert found["train"].texts == ("0 0", "0 1", "1 0", "1 1") and not len(problems)
    config = DataConfig(source="datasets", path=str(tmp_path / "saved"), options={"captions": "sentences"})
    assert get_source("datasets").read(config, Problems())["test"].texts == ("3 0", "3 1")


def test_equal_file_names_of_other_images_are_other_images(datasets, tmp_path):
    kinds = {"image": datasets.Image(), "caption": datasets.Value("string")}
    made = lambda reds: datasets.Dataset.from_list(
        [{"image": {"bytes": png((red, 0, 0)), "path": "1.png"}, "caption": f"{red}"} for red in reds],
        datasets.Features(kinds),
    )
    datasets.DatasetDict({"train": made([1, 2, 1]), "test": made([3])}).save_to_disk(str(tmp_path / "saved"))
    found, problems = read(tmp_path / "saved")
    assert found["train"].image_ids == ("1.png", "train-1") and found["test"].image_ids == ("test-0",)
    assert found["train"].texts == ("1", "1", "2") or sorted(found["train"].texts) == ["1", "1", "2"]
    assert not len(problems)


def test_what_cannot_be_used_is_named(datasets, tmp_path):
    rows = [
        {"a": {"bytes": png((1, 0, 0)), "path": None}, "caption": "one"},
        {"a": None, "caption": "two"},
        {"a": {"bytes": png((3, 0, 0)), "path": None}, "caption": " "},
    ]
    kinds = {"a": datasets.Image(), "caption": datasets.Value("string")}
    datasets.Dataset.from_list(rows, datasets.Features(kinds)).save_to_disk(str(tmp_path / "saved"))
    found, problems = read(tmp_path / "saved", val_fraction=0, test_fraction=0)
    assert found["train"].texts == ("one", "two") and "row 2: empty caption" in problems.summary()
    with pytest.raises(OSError, match="row 1: no image"):
        found["train"].images[1].read_bytes()
    both = datasets.load_from_disk(str(tmp_path / "saved")).add_column("n", [1, 2, 3])
    both = both.map(lambda row: {"b": row["a"]}, features=datasets.Features({**both.features, "b": datasets.Image()}))
    both.save_to_disk(str(tmp_path / "both"))
    with pytest.raises(UserError, match=r"2 columns of images \(a, b\).*data.options.image=COLUMN"):
        read(tmp_path / "both")
    assert set(read(tmp_path / "both", image="b", val_fraction=0, test_fraction=0)[0]) == {"train"}
    with pytest.raises(UserError, match="column n has .*expected images"):
        read(tmp_path / "both", image="n")
    with pytest.raises(UserError, match="expected.*words"):
        read(tmp_path / "both", image="a", captions="words")
    with pytest.raises(UserError, match="n has 1, expected a string or a list of strings"):
        read(tmp_path / "both", image="a", captions="n")
    datasets.Dataset.from_dict({"n": [1]}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(UserError, match="no column of images, expected one, among n"):
        read(tmp_path / "none")
    for missing in ("absent-folder", "nobody/nothing"):
        with pytest.raises(UserError, match="cannot read the data set"):
            read(missing)


def test_nothing_half_is_written(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    data = split_of(2)
    broken = PairData(data.image_ids, (data.images[0], FileImage(tmp_path / "gone.png")),
                      data.text_ids, data.texts, data.text_kinds, data.pairs)  # fmt: skip
    with pytest.raises(OSError):
        write_dataset({"train": broken}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    problems = Problems()
    write_dataset({"train": broken}, tmp_path / "out", problems=problems)
    assert "gone.png" in problems.summary()
    with pytest.raises(UserError, match="not empty"):
        write_dataset({"train": data}, tmp_path / "out")
    with pytest.raises(UserError, match="a split is named 'a/b'"):
        write_dataset({"a/b": data}, tmp_path / "new")
    with pytest.raises(ValueError, match="per_file must be at least 1"):
        write_dataset({"a": data}, tmp_path / "new", per_file=0)
