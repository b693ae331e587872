"""The registry of sources and its data sets: COCO, Karpathy's file, CUB, SCAN's regions, the hub, a toy.
The embedded set: its truth against the metadata, its splits against what they promise, its pictures one by one."""

import json
import warnings
import zipfile
from collections import Counter, defaultdict
from importlib import resources

import numpy as np
import pytest
from data.test_manifest import captions_of
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from support.pictures import png, write_tar
from support.raising import raises
from support.toy import make_toy

from sfumato import Problems, read_dataset, read_ground_truth, read_karpathy, read_manifest
from sfumato.data.coco import coco_image_id, json_kind, read_coco_captions
from sfumato.data.emoji import KINDS, emoji_names, load_emoji
from sfumato.data.feature_tables import RegionFile
from sfumato.data.image_decoding import decode_image
from sfumato.data.image_inputs import regions_from_bytes, regions_to_bytes
from sfumato.data.images import MemoryImage
from sfumato.data.layouts import CubOptions, read_cub, read_scan
from sfumato.data.pairs import PairSampler, make_pair_data
from sfumato.data.sources import SOURCES, DataConfig, get_source, register_source
from sfumato.errors import UserError
from sfumato.evaluation.benchmark_ground_truths import cub_captions
from sfumato.models.build import Assets, build_model, fresh_tokenizer
from sfumato.models.embed import load_splits, prepare_split
from sfumato.models.recipe import load_recipe, save_recipe
from sfumato.workflows.own_items import list_items, named_source


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
    register_source("toy", read_toy, options=ToyOptions)
    yield
    del SOURCES["toy"]


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
    assert found["train"].texts == ("1", "1", "2") and not len(problems)


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


BIRDS = [f"{k:03d}.Bird_{letter}" for k, letter in enumerate("abcdef", 1)]
LISTS = {
    "trainvalclasses": [3, 0, 1, 2], "testclasses": [5, 4],
    **{f"trainclasses{k}": [c for c in range(4) if c != k] for k in (1, 2, 3)},
    **{f"valclasses{k}": [k] for k in (1, 2, 3)},
}  # fmt: skip
SEEN = ["001.Bird_a/a1.jpg", "003.Bird_c/c0.jpg", "006.Bird_f/f2.jpg"]


def make_cub(top, birds, lists, seen):
    """Three images of each bird, named by the last letter of the bird; lists of numbers of birds."""
    for c, bird in enumerate(birds):
        for folder in ("images", "text_c10"):
            (top / folder / bird).mkdir(parents=True)
        for k in range(3):
            name = f"{bird[-1]}{k}"
            Image.new("RGB", (20, 16), (25 * c, 80 * k, 100)).save(top / "images" / bird / f"{name}.jpg")
            lines = [f"bird {bird[-1]} number {k}", "this red bird has wings", *([f"the {k} of {c}"] if k else [])]
            (top / "text_c10" / bird / f"{name}.txt").write_text("\n".join(lines) + "\n\n")
            (top / "text_c10" / bird / f"{name}.t7").write_bytes(b"other files are ignored")
    (top / "splits").mkdir()
    for name, classes in lists.items():
        (top / "splits" / f"{name}.txt").write_text("".join(f"{birds[c]}\n" for c in classes))
    (top / "splits" / "seen_test_images.txt").write_text("\n".join(seen))


@pytest.fixture
def cub(tmp_path):
    make_cub(tmp_path, BIRDS, LISTS, SEEN)
    return tmp_path


def cub_read(folder, **options):
    problems = Problems()
    splits = read_cub(folder, problems, CubOptions(**options))
    assert not len(problems)
    return splits


images_of = lambda classes: {f"{BIRDS[c]}/{BIRDS[c][-1]}{k}.jpg" for c in classes for k in range(3)}


@pytest.mark.parametrize("fold", [0, 2])
def test_splits_are_those_of_the_benchmark(cub, fold):
    train = LISTS["trainvalclasses" if fold == 0 else f"trainclasses{fold}"]
    expected = {"train": images_of(train) - set(SEEN), "test": images_of([4, 5])}
    expected["seen"] = images_of(train) & set(SEEN)
    if fold:
        expected["val"] = images_of([fold])
    assert {name: set(data.image_ids) for name, data in cub_read(cub, fold=fold).items()} == expected


def test_images_and_captions_of_a_class_match_as_in_the_benchmark_and_own_pairs_are_for_training_only(cub):
    of = lambda identity: identity.split("/")[0]
    for data in cub_read(cub).values():
        match = data.match(np.arange(len(data.image_ids)), np.arange(len(data.text_ids)))
        assert match.tolist() == [[of(image) == of(text) for text in data.text_ids] for image in data.image_ids]
        same = [[of(a) == of(b) for b in data.image_ids] for a in data.image_ids]
        assert ((data.groups[:, None] == data.groups) == same).all()
    data = cub_read(cub)["test"]
    truth = cub_captions(cub / "text_c10", classes=cub / "splits" / "testclasses.txt")
    assert (data.image_ids, data.text_ids) == (truth.image_ids, truth.text_ids)
    ours = data.relevance()
    assert ours.indices.tolist() == truth.i2t.indices.tolist() and ours.indptr.tolist() == truth.i2t.indptr.tolist()
    splits = read_cub(cub, Problems(), CubOptions(classes=(BIRDS[5], BIRDS[0])), fractions=(0.3, 0.3))
    assert set().union(*(data.image_ids for data in splits.values())) == images_of([0, 5])
    assert set(splits) <= {"train", "val", "test"} and len(splits) > 1
    for name, data in read_cub(cub, Problems(), CubOptions(classes=(BIRDS[0],)), fractions=(0.3, 0.3)).items():
        assert set(data.image_ids) == set(splits[name].image_ids) & images_of([0])
    splits = cub_read(cub, train_pairs="own")
    train = splits["train"]
    assert all(train.text_ids[t].startswith(f"{train.image_ids[i]}#") for i, t in train.pairs)
    assert len(train.pairs) == len(train.text_ids)
    assert splits["test"].pairs.tolist() == cub_read(cub)["test"].pairs.tolist()
    sampler = PairSampler(train, 150, 0, epoch_over="groups", positives="sampled")
    batches = [batch for epoch in range(20) for batch in sampler.batches(epoch)]
    assert len(sampler) == len(train.text_ids) // 4 == len(batches) / 20
    for batch in batches:
        assert sorted(train.groups[batch.image_index]) == sorted(set(train.groups.tolist()))
        assert (batch.match == np.eye(4)).all()
    assert {i for batch in batches for i in batch.image_index.tolist()} == set(range(len(train.image_ids)))
    smaller = PairSampler(train, 3, 0, epoch_over="groups", positives="sampled")
    assert all(len(set(train.groups[batch.image_index].tolist())) == 3 for batch in smaller.batches(0))
    assert len({tuple(sorted(train.groups[b.image_index])) for b in smaller.batches(0)}) > 1


RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.standard_normal((4, 3, 5)).astype(np.float32)


def write(folder, name, features, captions, ids=None):
    np.save(folder / f"{name}_ims.npy", features)
    lines = [one if isinstance(one, bytes) else f"{one}\n".encode() for one in captions]
    (folder / f"{name}_caps.txt").write_bytes(b"".join(lines))
    if ids is not None:
        (folder / f"{name}_ids.txt").write_text("".join(f"{i}\n" for i in ids))


features_of = lambda data: np.stack([regions_from_bytes(image.read_bytes()) for image in data.images])


def test_five_captions_a_row_in_order_and_testall_for_test(tmp_path):
    write(tmp_path, "train", FEATURES, [f"caption {i}" for i in range(20)])
    write(tmp_path, "dev", FEATURES[:2], [f"dev {i}" for i in range(4)], ids=["a.jpg", "b.jpg"])
    problems = Problems()
    splits = read_scan(tmp_path, problems)
    assert set(splits) == {"train", "val"} and not len(problems)
    assert captions_of(splits["train"])["train-2"] == [f"caption {i}" for i in range(10, 15)]
    assert captions_of(splits["val"]) == {"a.jpg": ["dev 0", "dev 1"], "b.jpg": ["dev 2", "dev 3"]}
    assert splits["val"].text_ids == ("a.jpg#0", "a.jpg#1", "b.jpg#0", "b.jpg#1")
    assert np.array_equal(features_of(splits["train"]), FEATURES)
    assert splits["train"].images[1].location == f"{tmp_path / 'train_ims.npy'}[1]"
    write(tmp_path, "testall", FEATURES, "abcd")
    splits = read_scan(tmp_path, Problems())
    assert splits["test"] is splits["testall"]
    write(tmp_path, "test", FEATURES[:2], "ab")
    assert len(read_scan(tmp_path, Problems())["test"].image_ids) == 2


def test_a_row_for_each_caption_is_put_together_by_equal_rows_or_by_ids(tmp_path):
    repeated = np.repeat(FEATURES, [2, 1, 3, 1], axis=0)
    write(tmp_path, "train", repeated, "abcdefg")
    write(tmp_path, "test", repeated, "abcdefg", ids=["p", "q", "q", "p", "r", "s", "t"])
    splits = read_scan(tmp_path, Problems())
    of_rows = {"train-0": ["a", "b"], "train-2": ["c"], "train-3": ["d", "e", "f"], "train-6": ["g"]}
    assert captions_of(splits["train"]) == of_rows
    assert np.array_equal(features_of(splits["train"]), FEATURES)
    assert captions_of(splits["test"]) == {"p": ["a", "d"], "q": ["b", "c"], "r": ["e"], "s": ["f"], "t": ["g"]}
    write(tmp_path, "train", FEATURES[:2], "abcd", ids=["x", "x", "y", "y"])
    assert captions_of(read_scan(tmp_path, Problems())["train"]) == {"x": ["a", "b"], "y": ["c", "d"]}
    for ids, message in (
        (["x", "y", "y", "y"], r"train_ids.txt:2: 'y' stands where row 0 was 'x' before"),
        (["x", "y", "z"], "has 3 ids; expected one for each of 2 rows or 4 captions"),
        (["x", " "], r"train_ids.txt:2: a line without an id"),
    ):
        write(tmp_path, "train", FEATURES[:2], "abcd", ids=ids)
        raises(UserError, message, read_scan, tmp_path, Problems())


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_one_vector_a_picture_and_other_floats(tmp_path, dtype):
    write(tmp_path, "train", FEATURES[:, 0].astype(dtype), "abcd")
    found = features_of(read_scan(tmp_path, Problems())["train"])
    assert found.dtype == np.float32 and found.shape == (4, 1, 5)
    assert np.array_equal(found[:, 0], FEATURES[:, 0].astype(dtype).astype(np.float32))


def test_what_cannot_be_used_is_noted_and_left_out_and_bytes_that_are_no_features_say_why(tmp_path):
    write(tmp_path, "train", FEATURES, ["a", "  ", "c", b"\xff\n", "", "\tf  f ", "g", "h"], ids=["p", "q", "r", "p"])
    problems = Problems()
    data = read_scan(tmp_path, problems)["train"]
    assert captions_of(data) == {"p": ["a"], "q": ["c"], "r": ["f f"]}
    caps = tmp_path / "train_caps.txt"
    assert [(p.location, p.reason.split(":")[0]) for p in problems.items] == [
        (f"{caps}:2", "empty caption"), (f"{caps}:4", "not UTF-8"), (f"{caps}:5", "empty caption"),
        (f"{caps}:7", "id p belongs to another row already"), (f"{caps}:8", "id p belongs to another row already"),
    ]  # fmt: skip
    for data, message in (
        (b"\xff\xd8\xff\xe0 a JPEG", "not a .npy file: region features are expected here, not an image"),
        (regions_to_bytes(FEATURES[0])[:-3], "not a complete .npy file"),
        (regions_to_bytes(FEATURES), r"float32 of shape \(4, 3, 5\); expected the \(regions, channels\) of one image"),
        (regions_to_bytes(np.full((2, 5), np.nan, np.float32)), "NaN or infinity"),
        (regions_to_bytes(np.ones((2, 6), np.float32)), "has 6 channels; the model reads 5"),
        (regions_to_bytes(np.ones((2, 5), bool)), r"bool of shape \(2, 5\)"),
        (regions_to_bytes(np.full((2, 5), 1e300)), "NaN or infinity"), (b"\x93NUMPY\x01", "not a complete .npy file"),
    ):  # fmt: skip
        with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
            warnings.simplefilter("error")
            regions_from_bytes(data, 5)


def test_a_bad_file_is_refused_by_its_name(tmp_path):
    path = tmp_path / "train_ims.npy"
    for array, message in (
        (np.ones((4, 3, 5), np.int32), r"of shape \(4, 3, 5\) and type int32; expected .* float32"),
        (FEATURES[..., None], r"shape \(4, 3, 5, 1\) and type float32; expected \(images, regions, channels\)"),
        (np.asfortranarray(FEATURES), "saved row by row"), (FEATURES[:0], r"shape \(0, 3, 5\)"),
        (np.array([None]), "holds pickled Python objects"),
    ):  # fmt: skip
        write(tmp_path, "train", array, "abcd")
        raises(UserError, rf"train_ims.npy.*{message}|{message}.*train_ims.npy", read_scan, tmp_path, Problems())
    path.write_bytes(b"\x93NUMPY\x01")
    raises(UserError, "train_ims.npy: not a complete .npy file", read_scan, tmp_path, Problems())
    path.unlink()
    raises(UserError, "there is no file .*train_ims.npy", read_scan, tmp_path, Problems())
    path = tmp_path / "a.npy"
    np.save(path, FEATURES)
    file = RegionFile(path)
    assert np.array_equal(file.features(3), FEATURES[3])
    path.write_bytes(path.read_bytes()[:-4])
    raises(OSError, "ends within row 3", file.features, 3)


def test_files_of_each_picture_and_of_rows_that_differ(tmp_path, monkeypatch):
    """6 rows of 40 kB of which two are equal: no more than these two are read whole, and with ids none."""
    rows = RANDOM.standard_normal((6, 20, 512)).astype(np.float32)
    rows[4] = rows[3]
    rows[1, 0, :300] = rows[0, 0, :300]  # The beginnings agree, the rows do not.
    sizes, fromfile = [], np.fromfile

    def counting(path, dtype, count, offset):
        sizes.append(count * dtype.itemsize)
        return fromfile(path, dtype, count, offset=offset)

    monkeypatch.setattr(np, "fromfile", counting)
    write(tmp_path, "train", rows, "abcdef")
    found = captions_of(read_scan(tmp_path, Problems())["train"])
    assert found == {"train-0": ["a"], "train-1": ["b"], "train-2": ["c"], "train-3": ["d", "e"], "train-5": ["f"]}
    assert sum(sizes) < 4 * rows[0].nbytes + 10_000
    sizes.clear()
    write(tmp_path, "train", rows, "abcdef", ids="pqrsst")
    assert len(read_scan(tmp_path, Problems())["train"].image_ids) == 5 and not sizes
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", FEATURES[k, : k + 1])
    (tmp_path / "m.jsonl").write_text(
        "".join(f'{{"image": "{k}.npy", "captions": ["text {k}"], "split": "train"}}\n' for k in range(3))
    )
    data = read_manifest(tmp_path / "m.jsonl", Problems())["train"]
    assert [regions_from_bytes(image.read_bytes()).shape for image in data.images] == [(1, 5), (2, 5), (3, 5)]


def captions(path, images, annotations):
    """A file of COCO; images {number: file name}, annotations [(id, image, caption)]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"license": 1, "file_name": name, "id": number} for number, name in images.items()]
    annotations = [{"image_id": i, "id": a, "caption": text} for a, i, text in annotations]
    path.write_text(json.dumps({"info": {}, "images": images, "licenses": [], "annotations": annotations}))
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
    split = coco_write(tmp_path, [entry("COCO_val2014_000000000042.jpg", "test", (1, "x"), filepath="val2014")])
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
        coco / "annotations" / "captions_val2017.json", {139: padded(139), 140: padded(140), 141: padded(9)},
        [(1, 139, "good"), (1, 139, "again"), (2, 139, " "), (3, 7, "no image"), (4, 140, "gone"), (5, 139, 6)],
    )  # fmt: skip
    (coco / "val2017" / padded(9)).write_bytes(png())
    loaded = json.loads(path.read_text())
    loaded["images"] += [{"id": "139", "file_name": "x.jpg"}, {"id": 139, "file_name": "x.jpg"}]
    path.write_text(json.dumps(loaded))
    problems = Problems()
    assert read_coco_captions(coco / "annotations", problems)["val"].text_ids == ("1",)
    said = problems.summary(100)
    for reason in (
        "images[3]: malformed entry", "images[4]: image 139 occurred before", "annotations[1] (kept): annotation 1",
        "annotations[2] and 1 more (kept): empty caption, or no text",
        "annotations[3]: image 7 is not among", f"image {padded(140)} is missing",
        "image 141: no caption; 3 of 4 images have one",
    ):  # fmt: skip
        assert reason in said
    assert problems.left_out == 5, "images alone, and what names none"
    path.write_text(json.dumps({"images": loaded["images"][:3:2], "annotations": []}))
    raises(UserError, "no usable pair", read_coco_captions, path, Problems())
    assert [item.id for item in list_items(named_source(str(path)), frozenset(), Problems())] == ["139", "141"]


def test_each_reader_names_the_other_ones_file_and_an_index_tells_them(coco, tmp_path):
    path = coco / "annotations" / "captions_val2017.json"
    split = coco_write(tmp_path, [entry("a.jpg", "test", (1, "x"))])
    instances = tmp_path / "instances_val2017.json"
    instances.write_text(json.dumps({"images": [], "annotations": [{"image_id": 1, "category_id": 2}]}))
    message = "this is COCO's own captions file, not a Karpathy split file. Read it with data.source=coco"
    raises(UserError, message, read_karpathy, path, coco, Problems())
    message = "a Karpathy split file; read it with data.source=karpathy"
    raises(UserError, message, read_coco_captions, split, Problems())
    message = "COCO's annotations without captions"
    raises(UserError, message, read_karpathy, instances, coco, Problems())
    raises(UserError, message, read_coco_captions, instances, Problems())
    kinds = [json_kind(json.loads(p.read_text())) for p in (path, split, instances)]
    assert kinds == ["coco", "karpathy", "instances"] and json_kind([]) == ""
    source = named_source(str(coco / "annotations" / "captions_train2017.json"))
    assert (source.kind, source.root) == ("coco", str(coco))
    items = {item.id: item for item in list_items(source, frozenset({".jpg"}), Problems())}
    assert items.keys() == {"9", "42"} and items["42"].file == f"train2017/{padded(42)}"
    assert items["42"].fields(png(), Problems())["captions"] == "image 42, said 0\nimage 42, said 1"


def entry(name, split, *sentences, **more):
    return {"filename": name, "split": split, "sentences": [{"sentid": i, "raw": t} for i, t in sentences], **more}


@pytest.fixture(params=["folder", "tar", "tar with ./"])
def images(request, tmp_path):
    names = ("a.jpg", "val2014/b.jpg", "c.jpg", "d.jpg")
    if request.param == "folder":
        (tmp_path / "val2014").mkdir()
        for name in names:
            (tmp_path / name).write_bytes(png())
        return tmp_path
    write_tar(tmp_path / "images.tar", [("./" * ("./" in request.param) + name, png()) for name in names])
    return tmp_path / "images.tar"


def coco_write(tmp_path, entries):
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps({"images": entries, "dataset": "toy"}), "utf-8")
    return path


def test_splits_ids_and_pictures(tmp_path, images):
    problems = Problems()
    entries = [
        entry("a.jpg", "train", (3, " A dog  runs. "), (4, "Ein Hund – läuft")),
        entry("b.jpg", "val", (5, "in its subfolder"), filepath="./val2014/"),
        entry("c.jpg", "restval", (6, "joins training"), filepath="train2014"),  # Flat in spite of its filepath.
        entry("d.jpg", "test", (7, "x")), entry("a.jpg", "", (8, "no split")),
        {k: v for k, v in entry("a.jpg", "", (9, "none either")).items() if k != "split"},
        entry("a.jpg", "none", (10, "nor here")),
    ]  # fmt: skip
    splits = read_karpathy(coco_write(tmp_path, entries), images, problems)
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
        {"filename": "a.jpg", "split": "train", "sentences": "x"},
        {"filename": "a.jpg", "split": "train", "sentences": [{"raw": "x"}]},
        {"filename": "a.jpg", "split": "train", "sentences": [{"sentid": 1, "raw": None}]},
        entry("a.jpg", ["train"], (1, "x")), entry("a.jpg", "train", (1, "x"), filepath=7),
        entry("gone.jpg", "train", (1, "x")),
    ]  # fmt: skip
    bare = [entry("d.jpg", "train", (1, " ")), {"filename": "b.jpg", "filepath": "val2014", "split": "train"}]
    good = [entry("a.jpg", "train", (1, "one"), (2, "\n"), (3, "three"))]
    again = [entry("a.jpg", "test", (4, "x")), entry("c.jpg", "train", (3, "taken"), (5, "five"))]
    problems = Problems()
    path = coco_write(tmp_path, bad + good + again + bare)
    splits = read_karpathy(path, images, problems)
    assert list(splits) == ["train"] and splits["train"].image_ids == ("a.jpg", "c.jpg")
    assert splits["train"].texts == ("one", "three", "five")
    found = [(p.location.removeprefix(f"{path}:"), p.reason) for p in problems.items]
    assert [place for place, _ in found] == [f"images[{k}]" for k in (*range(9), 10)]
    expected = [
        *("expected an object", "filename is None", "filename is 5", "sentences is of type str"),
        *("a sentence lacks sentid", "a sentence lacks", "split is of type list", "filepath is of type int"),
        *("image gone.jpg is missing from", "image a.jpg occurred before"),
    ]
    assert [e in reason for e, (_, reason) in zip(expected, found, strict=True)] == [True] * 10, found
    told = ["empty caption", "this sentid occurred before; it is left out", "empty caption"]
    assert [p.reason for p in problems.remarks] == told and [*problems.bare] == ["d.jpg", "b.jpg"]


def test_missing_files_archives_that_are_none_and_json_of_another_layout(tmp_path):
    path = coco_write(tmp_path, [entry("gone.jpg", "train", (1, "x"))])
    raises(UserError, "cannot read .*absent", read_karpathy, tmp_path / "absent.json", tmp_path, Problems())
    message = r"data\.images: there is no folder or tar file"
    raises(UserError, message, read_karpathy, path, tmp_path / "absent", Problems())
    raises(UserError, r"data\.images: .*not an uncompressed tar file", read_karpathy, path, path, Problems())
    message = r"no usable pair(.|\n)*images\[0\]: image gone\.jpg is missing"
    raises(UserError, message, read_karpathy, path, tmp_path, Problems())
    for text in ("", "{", "[]", "5", '{"annotations": []}', '{"images": 5}', '{"images": {"a": 1}}'):
        path.write_text(text)
        raises(UserError, r"dataset\.json: .*(expected|not usable JSON)", read_karpathy, path, tmp_path, Problems())


FOLDER = resources.files("sfumato.data") / "emoji_set"


@pytest.fixture(scope="module")
def splits():
    return load_emoji()


@pytest.fixture(scope="module")
def concepts():
    return {c["hexcode"]: c for c in json.loads((FOLDER / "concepts.json").read_text("utf-8"))}


concept_of = lambda image_id: image_id.split("/")[0]


def test_styles_concepts_and_held_out_wordings_of_the_splits_depend_on_nothing_else(splits):
    parts = [load_emoji(held_out_wordings=f"{k}/5") for k in range(5)]
    times = Counter()
    for part in parts:
        new = set(part["wordings"].texts)
        assert not new & set(part["train"].texts) and len(part["train"].image_ids) == len(splits["train"].image_ids)
        assert part["test"].texts == splits["test"].texts and part["val"].texts == splits["val"].texts
        missing = set(splits["train"].texts) - set(part["train"].texts)
        assert new == missing & set(splits["test"].texts)
        times.update(missing)
    assert set(times) == set(splits["train"].texts) and set(times.values()) == {1}
    kinds = [Counter(part["wordings"].text_kinds) for part in parts]
    counts = [np.bincount(part["wordings"].pairs[:, 1]) for part in parts]
    for kind in KINDS:  # Parts are alike: a random deal would differ by more.
        assert max(k[kind] for k in kinds) - min(k[kind] for k in kinds) < 0.1 * sum(k[kind] for k in kinds) / 5 + 9
    assert max(map(len, counts)) - min(map(len, counts)) < 30
    styles = {name: {i.split("/")[1] for i in data.image_ids} for name, data in splits.items()}
    assert styles == {"train": {"noto", "twemoji"}, "val": {"fluent3d"}, "test": {"fluent3d"}, "style": {"fluent3d"}}
    val, test = ({concept_of(i) for i in splits[name].image_ids} for name in ("val", "test"))
    assert not val & test and val | test == {concept_of(i) for i in splits["style"].image_ids}
    assert set(load_emoji(val_fraction=0.1)["val"].image_ids) < set(splits["val"].image_ids)
    other = {concept_of(i) for i in load_emoji(held_out_style="noto")["val"].image_ids}
    assert {concept_of(i) for i in splits["val"].image_ids} <= other


def test_held_out_concepts_are_absent_in_all_styles_with_their_own_names_and_no_part_is_refused(splits):
    part = load_emoji(held_out_concepts="3/10")
    new = {concept_of(i) for i in part["concepts"].image_ids}
    assert 170 < len(new) < 200 and not new & {concept_of(i) for i in part["train"].image_ids}
    assert {i.split("/")[1] for i in part["concepts"].image_ids} == {"fluent3d"}
    everyone = {concept_of(i) for i in splits["train"].image_ids}
    missing = everyone - {concept_of(i) for i in part["train"].image_ids}
    assert new == missing & {concept_of(i) for i in splits["style"].image_ids} and 185 < len(missing) < 197
    names = {t for t, kind in zip(part["concepts"].texts, part["concepts"].text_kinds, strict=True) if kind == "name"}
    assert len(names - set(part["train"].texts)) > 100
    raises(ValueError, "expected a part I/K", load_emoji, held_out_wordings="5/5")
    with pytest.raises(ValueError, match=r"data\.options\.held_out_concepts: .*expected a part I/K"):
        DataConfig(options={"held_out_concepts": "10"})
    raises(ValueError, "unknown style 'apple'; known: noto, twemoji, fluent3d", load_emoji, held_out_style="apple")
    raises(ValueError, "val_fraction must be between 0 and 1, got 1", load_emoji, val_fraction=1)


def test_every_text_is_true_of_exactly_the_concepts_that_carry_it(splits, concepts):
    wordings = {"animals & nature": ("group", "animals-nature"), "fruit": ("subgroup", "food-fruit")}
    wordings |= {"smiling face": ("subgroup", "face-smiling"), "ground transport": ("subgroup", "transport-ground")}
    for data in (splits["val"], splits["test"]):
        shown = {concept_of(i) for i in data.image_ids}
        carriers, members, ground_truth = defaultdict(set), defaultdict(set), defaultdict(set)
        for code in shown:
            for wording in (concepts[code]["label"], *concepts[code]["tags"]):
                carriers[" ".join(wording.lower().split())].add(code)
            for key in ("subgroup", "group"):
                members[key, concepts[code][key]].add(code)
        for i, t in data.pairs.tolist():
            ground_truth[data.texts[t]].add(concept_of(data.image_ids[i]))
        assert carriers.keys() <= ground_truth.keys()
        for text, own in ground_truth.items():
            assert own >= carriers[text], text
            # A wording can be that of a group or subgroup as well: then whole ones of them are true besides.
            besides = own - carriers[text]
            for key in ("subgroup", "group"):
                wholes = [members[key, name] for name in {concepts[c][key] for c in besides}]
                besides = besides.difference(*(whole for whole in wholes if whole <= own))
            assert not besides, text
        for wording, key in wordings.items():
            assert ground_truth[wording] >= members[key] and members[key], wording
        kind = dict(zip(data.texts, data.text_kinds, strict=True))
        assert all(kind[emoji_names()[code].lower()] == "name" for code in shown)


def test_texts_are_distinct_pictures_decode_and_show_something_and_licences_lie_beside_them(splits):
    for data in splits.values():
        assert set(data.text_kinds) == set(KINDS)
        assert len(set(data.texts)) == len(data.texts) and all(t == t.strip().lower() and t for t in data.texts)
        assert set(data.pairs[:, 1]) == set(range(len(data.texts)))
        assert set(data.pairs[:, 0]) == set(range(len(data.image_ids)))
    with zipfile.ZipFile((FOLDER / "pictures.zip").open("rb")) as archive:
        assert archive.testzip() is None
        images = splits["train"].images + splits["style"].images
        members = {image.location.rpartition("!")[2] for image in images}
        assert members == {name for name in archive.namelist() if name.endswith(".png")}
    pixels = np.stack([decode_image(image.read_bytes(), None) for image in images[::10]])
    assert pixels.shape[1:] == (3, 64, 64) and pixels.min(axis=(1, 2, 3)).max() < 255
    assert (pixels < 240).any(1).mean() > 0.3
    attribution = (FOLDER / "ATTRIBUTION.md").read_text("utf-8")
    for style, licence in (
        ("noto", "Noto-Apache-2.0"), ("twemoji", "Twemoji-CC-BY-4.0"), ("fluent3d", "FluentEmoji-MIT"),
    ):  # fmt: skip
        assert f"`{style}/`" in attribution and f"licences/{licence}.txt" in attribution
        assert len((FOLDER / "licences" / f"{licence}.txt").read_text("utf-8")) > 500
    assert len((FOLDER / "licences" / "emojibase-MIT.txt").read_text("utf-8")) > 500
