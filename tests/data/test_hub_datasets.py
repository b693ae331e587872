"""Data sets of the package datasets, read in their forms; run with datasets 5.2.0, in an environment of its own:

env/bin/pip install -c constraints.txt -e '.[datasets]' pytest hypothesis
"""

import pytest
from support.pictures import png
from support.raising import raises

from sfumato import Problems, read_dataset
from sfumato.data.sources import DataConfig, get_source
from sfumato.errors import UserError


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    package = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return package


def read(path, **options):
    problems = Problems()
    return read_dataset(path, problems, **options), problems


def test_images_with_captions_of_their_own_and_shared_ones(datasets, tmp_path):
    words, several = datasets.Value("string"), datasets.List(datasets.Value("string"))
    kinds = {"image": datasets.Image(), "captions": several, "id": words, "caption_ids": several}
    rows = [
        {"image": {"bytes": png((i, 0, 0)), "path": None}, "captions": [f"text {i}", "shared"], "id": f"{i}.png",
         "caption_ids": [f"t{i}", "s"]}
        for i in range(3)
    ]  # fmt: skip
    table = datasets.Dataset.from_list(rows, datasets.Features(kinds))
    (tmp_path / "parquet").mkdir()
    table.to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    for place in ("parquet", "saved"):
        found, problems = read(tmp_path / place, val_fraction=0, test_fraction=0)
        data = found["train"]
        assert not len(problems) and data.image_ids == ("0.png", "1.png", "2.png")
        assert data.images[2].read_bytes() == png((2, 0, 0))
        assert data.text_ids == ("t0", "s", "t1", "t2") and data.texts[:2] == ("text 0", "shared")
        assert data.pairs.tolist() == [[0, 0], [0, 1], [1, 1], [1, 2], [2, 1], [2, 3]]


def test_a_row_for_each_caption_a_column_of_splits_and_equal_file_names(datasets, tmp_path):
    splits, image = ("train", "train", "val", "test"), lambda i: {"bytes": png((i, 0, 0)), "path": f"{i}.png"}
    numbers = [(i, k) for i in range(4) for k in range(2)]
    rows = [{"image": image(i), "sentences": f"{i} {k}", "split": splits[i]} for i, k in numbers]
    kinds = {"image": datasets.Image(), "sentences": datasets.Value("string"), "split": datasets.Value("string")}
    datasets.Dataset.from_list(rows, datasets.Features(kinds)).save_to_disk(str(tmp_path / "saved"))
    found, problems = read(tmp_path / "saved")
    own = {name: data.image_ids for name, data in found.items()}
    assert own == {"train": ("0.png", "1.png"), "val": ("2.png",), "test": ("3.png",)}
    assert found["train"].texts == ("0 0", "0 1", "1 0", "1 1") and not len(problems)
    config = DataConfig(source="datasets", path=str(tmp_path / "saved"), options={"captions": "sentences"})
    assert get_source("datasets").read(config, Problems())["test"].texts == ("3 0", "3 1")
    kinds = {"image": datasets.Image(), "caption": datasets.Value("string")}
    row = lambda red: {"image": {"bytes": png((red, 0, 0)), "path": "1.png"}, "caption": f"{red}"}
    made = lambda reds: datasets.Dataset.from_list([*map(row, reds)], datasets.Features(kinds))
    datasets.DatasetDict({"train": made([1, 2, 1]), "test": made([3])}).save_to_disk(str(tmp_path / "saved"))
    found, problems = read(tmp_path / "saved")
    assert found["train"].image_ids == ("1.png", "train-1") and found["test"].image_ids == ("test-0",)
    assert found["train"].texts == ("1", "1", "2") or sorted(found["train"].texts) == ["1", "1", "2"]
    assert not len(problems)


def test_what_cannot_be_used_is_named(datasets, tmp_path):
    images = {"bytes": png((1, 0, 0)), "path": None}, None, {"bytes": png((3, 0, 0)), "path": None}
    rows = [{"a": image, "caption": text} for image, text in zip(images, ("one", "two", " "), strict=True)]
    kinds = {"a": datasets.Image(), "caption": datasets.Value("string")}
    datasets.Dataset.from_list(rows, datasets.Features(kinds)).save_to_disk(str(tmp_path / "saved"))
    found, problems = read(tmp_path / "saved", val_fraction=0, test_fraction=0)
    assert found["train"].texts == ("one", "two") and "row 2: no caption; 2 of 3 images" in problems.summary()
    raises(OSError, "row 1: no image", found["train"].images[1].read_bytes)
    both = datasets.load_from_disk(str(tmp_path / "saved")).add_column("n", [1, 2, 3])
    both = both.map(lambda row: {"b": row["a"]}, features=datasets.Features({**both.features, "b": datasets.Image()}))
    both.save_to_disk(str(tmp_path / "both"))
    raises(UserError, r"2 columns of images \(a, b\).*data.options.image=COLUMN", read, tmp_path / "both")
    assert set(read(tmp_path / "both", image="b", val_fraction=0, test_fraction=0)[0]) == {"train"}
    raises(UserError, "column n has .*expected images", read, tmp_path / "both", image="n")
    raises(UserError, "expected.*words", read, tmp_path / "both", image="a", captions="words")
    told = "n has 1, expected a string or a list of strings"
    raises(UserError, told, read, tmp_path / "both", image="a", captions="n")
    datasets.Dataset.from_dict({"n": [1]}).save_to_disk(str(tmp_path / "none"))
    raises(UserError, "no column of images, expected one, among n", read, tmp_path / "none")
    for missing in ("absent-folder", "nobody/nothing"):
        raises(UserError, "cannot read the data set", read, missing)
