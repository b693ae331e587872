"""CUB Captions and region features: splits against set arithmetic, labels against loops over classes."""

import warnings

import numpy as np
import pytest
from PIL import Image
from support.raising import raises

from sfumato import Problems, read_manifest
from sfumato.data.feature_tables import RegionFile
from sfumato.data.image_inputs import regions_from_bytes, regions_to_bytes
from sfumato.data.layouts import CubOptions, read_cub, read_scan
from sfumato.data.pairs import PairSampler
from sfumato.errors import UserError
from sfumato.evaluation.benchmark_ground_truths import cub_captions

BIRDS = [f"{k:03d}.Bird_{letter}" for k, letter in enumerate("abcdef", 1)]
LISTS = {
    "trainvalclasses": [3, 0, 1, 2],
    "testclasses": [5, 4],
    **{f"trainclasses{k}": [c for c in range(4) if c != k] for k in (1, 2, 3)},
    **{f"valclasses{k}": [k] for k in (1, 2, 3)},
}
SEEN = ["001.Bird_a/a1.jpg", "003.Bird_c/c0.jpg", "006.Bird_f/f2.jpg"]


@pytest.fixture
def cub(tmp_path):
    for c, bird in enumerate(BIRDS):
        for folder in ("images", "text_c10"):
            (tmp_path / folder / bird).mkdir(parents=True)
        for k in range(3):
            name = f"{bird[-1]}{k}"
            Image.new("RGB", (20, 16), (40 * c, 80 * k, 100)).save(tmp_path / "images" / bird / f"{name}.jpg")
            lines = [f"bird {bird[-1]} number {k}", "this bird has wings", *([f"the {k} of {c}"] if k else [])]
            (tmp_path / "text_c10" / bird / f"{name}.txt").write_text("\n".join(lines) + "\n\n")
            (tmp_path / "text_c10" / bird / f"{name}.t7").write_bytes(b"other files are ignored")
    (tmp_path / "splits").mkdir()
    for name, classes in LISTS.items():
        (tmp_path / "splits" / f"{name}.txt").write_text("".join(f"{BIRDS[c]}\n" for c in classes))
    (tmp_path / "splits" / "seen_test_images.txt").write_text("\n".join(SEEN))
    return tmp_path


def read(folder, **options):
    problems = Problems()
    splits = read_cub(folder, problems, CubOptions(**options))
    assert not len(problems)
    return splits


images_of = lambda classes: {f"{BIRDS[c]}/{BIRDS[c][-1]}{k}.jpg" for c in classes for k in range(3)}


@pytest.mark.parametrize("fold", [0, 2])
def test_splits_are_those_of_the_benchmark(cub, fold):
    splits = read(cub, fold=fold)
    train = LISTS["trainvalclasses" if fold == 0 else f"trainclasses{fold}"]
    expected = {"train": images_of(train) - set(SEEN), "test": images_of([4, 5])}
    expected["seen"] = images_of(train) & set(SEEN)
    if fold:
        expected["val"] = images_of([fold])
    assert {name: set(data.image_ids) for name, data in splits.items()} == expected


def test_images_and_captions_of_a_class_match_as_in_the_benchmark(cub):
    of = lambda identity: identity.split("/")[0]
    for data in read(cub).values():
        match = data.match(np.arange(len(data.image_ids)), np.arange(len(data.text_ids)))
        assert match.tolist() == [[of(image) == of(text) for text in data.text_ids] for image in data.image_ids]
        same = [[of(a) == of(b) for b in data.image_ids] for a in data.image_ids]
        assert ((data.groups[:, None] == data.groups) == same).all()
    data = read(cub)["test"]
    truth = cub_captions(cub / "text_c10", classes=cub / "splits" / "testclasses.txt")
    assert (data.image_ids, data.text_ids) == (truth.image_ids, truth.text_ids)
    ours = data.relevance()
    assert ours.indices.tolist() == truth.i2t.indices.tolist() and ours.indptr.tolist() == truth.i2t.indptr.tolist()
    splits = read_cub(cub, Problems(), CubOptions(classes=(BIRDS[5], BIRDS[0])), val_fraction=0.3, test_fraction=0.3)
    assert set().union(*(data.image_ids for data in splits.values())) == images_of([0, 5])
    assert set(splits) <= {"train", "val", "test"} and len(splits) > 1
    again = read_cub(cub, Problems(), CubOptions(classes=(BIRDS[0],)), val_fraction=0.3, test_fraction=0.3)
    for name, data in again.items():
        assert set(data.image_ids) == set(splits[name].image_ids) & images_of([0])


def test_own_pairs_are_for_training_only_and_a_batch_has_one_of_each_class(cub):
    splits = read(cub, train_pairs="own")
    train = splits["train"]
    assert all(train.text_ids[t].startswith(f"{train.image_ids[i]}#") for i, t in train.pairs)
    assert len(train.pairs) == len(train.text_ids)
    assert splits["test"].pairs.tolist() == read(cub)["test"].pairs.tolist()
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
    (folder / f"{name}_caps.txt").write_bytes(
        b"".join(c if isinstance(c, bytes) else f"{c}\n".encode() for c in captions)
    )
    if ids is not None:
        (folder / f"{name}_ids.txt").write_text("".join(f"{i}\n" for i in ids))


def captions_of(data):
    """{image id: its captions in order}"""
    found = {i: [] for i in data.image_ids}
    for image, text in data.pairs:
        found[data.image_ids[image]].append(data.texts[text])
    return found


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
    lines = ["a", "  ", "c", b"\xff\n", "", "\tf  f ", "g", "h"]
    write(tmp_path, "train", FEATURES, lines, ids=["p", "q", "r", "p"])
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
        (regions_to_bytes(np.full((2, 5), 1e300)), "NaN or infinity"),
        (b"\x93NUMPY\x01", "not a complete .npy file"),
    ):
        with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
            warnings.simplefilter("error")
            regions_from_bytes(data, 5)


def test_a_bad_file_is_refused_by_its_name(tmp_path):
    path = tmp_path / "train_ims.npy"
    for array, message in (
        (np.ones((4, 3, 5), np.int32), r"of shape \(4, 3, 5\) and type int32; expected .* float32"),
        (FEATURES[..., None], r"shape \(4, 3, 5, 1\) and type float32; expected \(images, regions, channels\)"),
        (np.asfortranarray(FEATURES), "saved row by row"),
        (FEATURES[:0], r"shape \(0, 3, 5\)"),
        (np.array([None]), "holds pickled Python objects"),
    ):
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
    read, fromfile = [], np.fromfile

    def counting(path, dtype, count, offset):
        read.append(count * dtype.itemsize)
        return fromfile(path, dtype, count, offset=offset)

    monkeypatch.setattr(np, "fromfile", counting)
    write(tmp_path, "train", rows, "abcdef")
    found = captions_of(read_scan(tmp_path, Problems())["train"])
    assert found == {"train-0": ["a"], "train-1": ["b"], "train-2": ["c"], "train-3": ["d", "e"], "train-5": ["f"]}
    assert sum(read) < 4 * rows[0].nbytes + 10_000
    read.clear()
    write(tmp_path, "train", rows, "abcdef", ids="pqrsst")
    assert len(read_scan(tmp_path, Problems())["train"].image_ids) == 5 and not read
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", FEATURES[k, : k + 1])
    (tmp_path / "m.jsonl").write_text(
        "".join(f'{{"image": "{k}.npy", "captions": ["text {k}"], "split": "train"}}\n' for k in range(3))
    )
    data = read_manifest(tmp_path / "m.jsonl", Problems())["train"]
    assert [regions_from_bytes(image.read_bytes()).shape for image in data.images] == [(1, 5), (2, 5), (3, 5)]
