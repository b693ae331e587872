"""The registry of sources: a toy from outside, own options, data sets of the hub, and the keys of version 0.1."""

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from support.pictures import png
from support.raising import raises
from support.toy import make_toy

from sfumato import Problems, read_dataset
from sfumato.data.images import MemoryImage
from sfumato.data.pairs import make_pair_data
from sfumato.data.sources import SOURCES, DataConfig, get_source, register_source
from sfumato.errors import UserError
from sfumato.models.build import Assets, build_model, fresh_tokenizer
from sfumato.models.embed import load_splits, prepare_split
from sfumato.models.recipe import load_recipe, save_recipe


class ToyOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    n: int = Field(6, ge=2)
    colour: str = "red"


def read_toy(config, problems):
    options = ToyOptions(**config.options)
    files = [png(options.colour, (8 + k, 8))[: 20 if k == options.n - 1 else None] for k in range(options.n)]
    images = [MemoryImage(f"toy {k}", data) for k, data in enumerate(files)]
    captions = [[f"a {options.colour} square", f"number {k}"] for k in range(options.n)]
    return {"train": make_pair_data([f"toy-{k}" for k in range(options.n)], images, captions)}


@pytest.fixture
def toy():
    before = dict(SOURCES)
    register_source("toy", read_toy, options=ToyOptions)
    yield
    SOURCES.clear()
    SOURCES.update(before)


RECIPE = """
name = "outside"
[data]
source = "toy"
options = { n = 5, colour = "blue" }
[model]
dim = 8
image = { kind = "small", size = 16, width = 4 }
text = { kind = "small", vocabulary = 40, width = 8 }
"""


def test_a_recipe_names_a_source_from_outside(toy, tmp_path):
    (tmp_path / "outside.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "outside.toml", ["data.options.n=7"])
    problems = Problems()
    splits = load_splits(recipe.data, problems)
    assert splits["train"].texts[:2] == ("a blue square", "number 0") and len(splits["train"].image_ids) == 7
    model = build_model(recipe.model, Assets(fresh_tokenizer(recipe.model, splits["train"].texts)))
    prepared = prepare_split(model, splits["train"], problems, "train")
    assert prepared.data.image_ids == tuple(f"toy-{k}" for k in range(6)), "the damaged image is left out"
    assert [problem.location for problem in problems.items] == ["toy 6"]
    assert prepared.images.batch(np.arange(6)).values.shape == (6, 3, 16, 16)
    save_recipe(recipe, tmp_path / "saved.toml")
    assert load_recipe(tmp_path / "saved.toml") == recipe


def test_unknown_sources_and_options(toy, tmp_path):
    recipe = make_toy(tmp_path)
    told = r"unknown source 'emojy'; did you mean 'emoji'\? known: emoji, manifest, folder, "
    raises(UserError, told, load_recipe, recipe, ["data.source=emojy"])
    raises(ValueError, "there is a source 'folder' already; known: emoji, ", register_source, "folder", read_toy)
    for source, options, message in (
        ("folder", {"n": 1}, "data.source='folder' takes no options; leave out n "),
        ("toy", {"n": 1}, r"data\.options\.n: .*greater than or equal to 2"),
        ("toy", {"size": 3}, r"data\.options\.size: Extra"),
    ):
        raises(ValidationError, message, DataConfig, source=source, path="data", options=options)
    for key in ("noise_rate=0.1", "graded=true", "leave_out=0/2"):
        message = r"needs all pairs in memory, but data\.source='shards' is read as a stream"
        raises(UserError, message, load_recipe, recipe, ["data.source=shards", "data.path=a.tar", f"data.{key}"])


@pytest.mark.parametrize(("equal_texts", "n_texts", "matches"), [(None, 2, 5), ("merged", 2, 5), ("separate", 5, 5)])
def test_equal_captions_of_a_folder_are_one_text_unless_they_are_kept_separate(tmp_path, equal_texts, n_texts, matches):
    for name, caption in (("a", "a dog"), ("b", "A  dog"), ("c", "a dog\na cat"), ("d", "a cat")):
        Image.new("RGB", (8, 8), "red").save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(caption)
    own = {} if equal_texts is None else {"equal_texts": equal_texts}
    config = DataConfig(source="folder", path=str(tmp_path), val_fraction=0, test_fraction=0, **own)
    (data,) = load_splits(config, Problems()).values()
    assert (len(data.texts), len(data.pairs)) == (n_texts, matches)
    assert data.relevance().transpose().counts.tolist() == ([3, 2] if n_texts == 2 else [1] * 5)


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
