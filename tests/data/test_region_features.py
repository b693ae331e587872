"""Region features: SCAN's layout in its variants, what is wrong with files, and how little of them is read."""

import warnings

import numpy as np
import pytest
from support.raising import raises

from sfumato import Problems, read_manifest
from sfumato.data.feature_tables import RegionFile
from sfumato.data.image_inputs import regions_from_bytes, regions_to_bytes
from sfumato.data.layouts import read_scan
from sfumato.errors import UserError

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
        (f"{caps}:2", "empty caption"),
        (f"{caps}:4", "not UTF-8"),
        (f"{caps}:5", "empty caption"),
        (f"{caps}:7", "id p belongs to another row already"),
        (f"{caps}:8", "id p belongs to another row already"),
    ]
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
