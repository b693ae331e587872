"""Embeddings of other models from plain files, tables and pairs; whatever could run code or does not fit is refused."""

import csv
import io
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.raising import raises

from sfumato import GaussianEmbedding, Problems, save_embeddings
from sfumato.data.feature_tables import EmbeddingRow, EmbeddingTable, open_table, read_embeddings, read_ids
from sfumato.data.image_inputs import regions_from_bytes
from sfumato.data.layouts import read_embedding_pairs
from sfumato.data.manifest import hashed_split
from sfumato.data.sources import DataConfig
from sfumato.data.splits import merge_equal_texts
from sfumato.errors import UserError
from sfumato.models.embed import load_splits

N, D = 5, 3
MEAN = np.random.default_rng(0).normal(size=(N, D))
LOG_VAR = np.random.default_rng(1).normal(size=(N, D))


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_is_points_with_the_numbers_of_the_file(dtype, order, tmp_path):
    array = np.array(MEAN, dtype, order=order)
    np.save(tmp_path / "a.npy", array)
    embeddings, ids = read_embeddings(tmp_path / "a.npy")
    assert ids is None
    np.testing.assert_array_equal(embeddings.mean, array.astype(array.dtype.newbyteorder("=")))
    assert np.isneginf(embeddings.log_var).all() and (embeddings.total_variance == 0).all()
    assert np.array_equal(embeddings[1:3].mean, embeddings.mean[1:3]) and embeddings.log_var.shape == (N, D)


def test_arrays_mapped_and_log_variances_from_a_second_file(tmp_path):
    np.save(tmp_path / "a.npy", np.float32(MEAN))
    before = (tmp_path / "a.npy").read_bytes()
    embeddings, _ = read_embeddings(tmp_path / "a.npy")
    maps = Path("/proc/self/maps")
    if maps.is_file():
        assert str(tmp_path / "a.npy") in maps.read_text()
    embeddings.mean[:] = 7
    assert (tmp_path / "a.npy").read_bytes() == before
    # The variances of points are one number in memory, however many there are.
    assert embeddings.log_var.strides == (0, 0)
    np.save(tmp_path / "a.npy", np.float32(MEAN))
    np.save(tmp_path / "v.npy", LOG_VAR)
    embeddings, _ = read_embeddings(tmp_path / "a.npy", log_var=tmp_path / "v.npy")
    np.testing.assert_array_equal(embeddings.log_var, np.float32(LOG_VAR))
    np.testing.assert_allclose(embeddings.total_variance, np.exp(LOG_VAR).sum(1), rtol=1e-6)
    np.save(tmp_path / "v.npy", LOG_VAR[:, :2])
    save_embeddings(tmp_path / "o.safetensors", GaussianEmbedding.point(torch.zeros(1, 2)), ["a"])
    for means, variances, error, message in (
        ("a.npy", "v.npy", ValueError, r"log variances of shape \(5, 2\) for means of shape \(5, 3\)"),
        ("o.safetensors", "v.npy", ValueError, r"holds log variances already; leave out .*v.npy"),
        ("a.npy", "nothing", FileNotFoundError, "no log variances at"),
    ):
        raises(error, message, read_embeddings, tmp_path / means, log_var=tmp_path / variances)


def test_tensors_by_their_usual_names_and_by_any_after_a_colon_and_files_of_ours_with_their_ids(tmp_path):
    mean, log_var = torch.from_numpy(MEAN).bfloat16(), torch.from_numpy(LOG_VAR).bfloat16()
    for name, asked in (("mean", ""), ("embeddings", ""), ("mean", ":mean"), ("of images", ":of images")):
        save_file({name: mean, "log_var": log_var, "other": mean + 1}, tmp_path / "a.safetensors")
        embeddings, _ = read_embeddings(f"{tmp_path}/a.safetensors{asked}")
        assert np.array_equal(embeddings.mean, mean.float())
        expected = torch.full_like(mean, -torch.inf) if name == "of images" else log_var
        assert np.array_equal(embeddings.log_var, expected.float())
    ours = GaussianEmbedding(torch.from_numpy(MEAN), torch.from_numpy(LOG_VAR))
    save_embeddings(tmp_path / "a.safetensors", ours, list("abcde"))
    embeddings, ids = read_embeddings(tmp_path / "a.safetensors")
    assert np.array_equal([embeddings.mean, embeddings.log_var], [MEAN, LOG_VAR]) and ids == list("abcde")
    (tmp_path / "i.txt").write_text("v\nw\nx\ny\nz\n")
    assert read_embeddings(tmp_path / "a.safetensors", ids=tmp_path / "i.txt")[1] == list("vwxyz")


def saved(array, save=np.save):
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def test_pickles_and_arrays_of_objects_are_never_loaded(tmp_path):
    for name in ("a.npy", "a.pkl", "a.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
        raises(ValueError, "can run code when", read_embeddings, tmp_path / name)
    np.save(tmp_path / "a.npy", np.array([[Bomb()]], dtype=object), allow_pickle=True)
    for reader in (read_embeddings, read_ids):
        raises(ValueError, r"pickle|Object arrays", reader, tmp_path / "a.npy")


def npy(shape, kind="<f4"):
    made = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({shape}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(made).to_bytes(2, "little") + made


def test_arrays_that_are_no_embeddings(tmp_path):
    for content, message in (
        (saved(np.float32(MEAN))[:-4], "not a complete .npy file"), (b"hello", "a.npy: "),
        (b"", "not a complete .npy file"), (saved(MEAN, np.savez), "an archive of several arrays"),
        (saved(np.ones((2, 3), int)), r"shape \(2, 3\) and type int64; expected \(n, d\) floating point"),
        (saved(np.ones(3)), r"shape \(3,\)"), (saved(np.ones((2, 3, 4))), r"shape \(2, 3, 4\)"),
        (saved(np.ones((2, 3), complex)), "complex128"),
        (saved(np.array([[1.0, 2.0], [3.0, np.nan]])), "embedding 1 holds NaN or infinity"),
        (saved(np.array([[1.0, -np.inf]])), "embedding 0 holds NaN or infinity"),
    ):  # fmt: skip
        (tmp_path / "a.npy").write_bytes(content)
        raises(ValueError, message, read_embeddings, tmp_path / "a.npy")
    # numpy lets a TokenError of Python through, an OverflowError, and a MemoryError.
    for shape in ("3, ", "9" * 40 + ", 2)}", "1099511627776, 1099511627776)}"):
        (tmp_path / "a.npy").write_bytes(npy(shape) + bytes(64))
        for reader in (read_embeddings, read_ids):
            raises(ValueError, r"a\.npy: not a complete \.npy file \(", reader, tmp_path / "a.npy")


def test_tensors_and_files_that_are_no_embeddings_or_do_not_fit(tmp_path):
    for tensors, name, message in (
        ({"x": torch.zeros(2, 3), "y": torch.zeros(1)}, "", "no tensor named mean or embeddings; it has x, y: choose"),
        ({"x": torch.zeros(2, 3)}, ":z", "no tensor 'z'; it has x"),
        ({"mean": torch.zeros(3)}, "", r"tensor 'mean' has shape \(3,\)"),
        ({"mean": torch.zeros(2, 3, dtype=torch.int32)}, "", "int32; expected"),
        ({"mean": torch.zeros(2, 3), "log_var": torch.zeros(2, 1)}, "", r"log_var has shape \(2, 1\), mean \(2, 3\)"),
        ({"mean": torch.zeros(2, 3), "log_var": torch.full((2, 3), torch.inf)}, "", "embedding 0 holds NaN or inf"),
    ):  # fmt: skip
        save_file(tensors, tmp_path / "a.safetensors")
        raises(ValueError, message, read_embeddings, f"{tmp_path}/a.safetensors{name}")
    np.save(tmp_path / "a.npy", MEAN)
    (tmp_path / "i.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"i.txt: 2 ids for 5 embeddings in .*a.npy"):
        read_embeddings(tmp_path / "a.npy", ids=tmp_path / "i.txt")
    save_embeddings(tmp_path / "o.safetensors", GaussianEmbedding.point(torch.zeros(1, 2)), ["a"])
    raises(ValueError, "holds one array and no names; leave out :mean", read_embeddings, f"{tmp_path}/a.npy:mean")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "o.safetensors").read_bytes()[:40])
    raises(ValueError, "not a complete .safetensors file", read_embeddings, tmp_path / "cut.safetensors")
    (tmp_path / "a.csv").write_text("1,2\n")
    with pytest.raises(ValueError, match=r"unknown kind of file '.csv'; expected .npy, .safetensors or .parquet"):
        read_embeddings(tmp_path / "a.csv")
    for path in ("none.npy", "none.safetensors:x"):
        raises(FileNotFoundError, r"no embeddings at .*none.(npy|safetensors)$", read_embeddings, tmp_path / path)
    raises(FileNotFoundError, "no ids at", read_embeddings, tmp_path / "a.npy", ids=tmp_path / "nothing")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"vectors": [[1.0, 2.0]]}), tmp_path / "v.parquet", store_schema=False)
    assert read_embeddings(tmp_path / "v.parquet")[0].mean.tolist() == [[1.0, 2.0]]
    (tmp_path / "v.parquet").write_bytes((tmp_path / "v.parquet").read_bytes().replace(b"vectors", b"v\xffctors"))
    raises(ValueError, r"v\.parquet: not a complete Parquet file", read_embeddings, tmp_path / "v.parquet")


def test_ids_of_every_kind_of_file_and_files_that_are_no_ids(tmp_path):
    for name, content, expected in (
        ("i.txt", "a b\r\nü\r\n12".encode(), ["a b", "ü", "12"]), ("i.txt", "\ufeffa\nb\n".encode(), ["a", "b"]),
        ("i.txt", b"", []), ("i.json", b'["a\\nb", 12]', ["a\nb", "12"]),
        ("i.npy", saved(np.array([391895, 7])), ["391895", "7"]), ("i.npy", saved(np.array(["a", "üb"])), ["a", "üb"]),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        assert read_ids(tmp_path / name) == expected
    for name, content, message in (
        ("i.txt", b"a\n\nb", "line 2 is empty"), ("i.txt", b"a\nb\na\n", "'a' occurs at line 1 and again at 3"),
        ("i.txt", b"\xff", "cannot read ids"), ("i.json", b"[", "cannot read ids"),
        ("i.json", b"[" * 100_000, "cannot read ids"),
        ("i.json", b'["a", 1, "1"]', "'1' occurs at entry 2 and again at 3"),
        *(("i.json", x, "expected a list of strings or whole numbers") for x in (b'{"a": 1}', b"[true]", b"[1.5]")),
        ("i.npy", b"", "not a complete .npy file"), ("i.npy", npy("10000000000000,)}", "<i8"), "not a complete .npy"),
        ("i.npy", saved(np.ones(2)), r"ids of shape \(2,\) and type float64"),
        ("i.npy", saved(np.ones((2, 2), int)), r"ids of shape \(2, 2\)"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        raises(ValueError, message, read_ids, tmp_path / name)


numbers = lambda n, c, dtype, seed=0: np.random.default_rng(seed).standard_normal((n, c)).astype(dtype)


def write_shards(folder, *shards, name="part_{}.npy", first=0):
    folder.mkdir(parents=True)
    for k, shard in enumerate(shards, first):
        np.save(folder / name.format(k), shard)
    return folder


def test_shards_and_files_side_by_side_are_one_array_and_opening_reads_no_row(tmp_path):
    """Twelve shards, so that the order of numbers differs from that of letters; float16 beside float64."""
    shards = [numbers(3 if k else 2, 4, np.float16, k) for k in range(12)]
    wide = numbers(35, 2, np.float64, 99)
    np.save(tmp_path / "wide.npy", wide)
    folder = write_shards(tmp_path / "img", *shards)
    table = open_table(f"{folder}+{tmp_path / 'wide.npy'}").table
    expected = np.concatenate([np.concatenate(shards).astype(np.float32), wide.astype(np.float32)], axis=1)
    assert (table.n, table.channels) == (35, 6)
    index = np.array([34, 0, 1, 2, 2, 17, 33, 5])
    np.testing.assert_array_equal(table.rows(index), expected[index])
    assert table.rows(index).dtype == np.float32 and table.rows(index[:0]).shape == (0, 6)
    row = EmbeddingRow(table, 17)
    np.testing.assert_array_equal(regions_from_bytes(row.read_bytes()), expected[17:18])
    assert row() == row.read_bytes() and row.location.endswith("wide.npy[17]")
    array = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float16, (100_000_000, 512))
    array[-1] = 1
    del array
    table = open_table(str(tmp_path / "a.npy")).table
    assert table.rows(np.array([99_999_999, 3])).sum(1).tolist() == [512, 0]


def test_wrong_columns_of_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"a": [[1.0], [2.0]], "b": [[3.0], [4.0]], "id": ["x", "y"]}), path)
    with pytest.raises(UserError, match="2 columns of vectors; lists of floating point numbers are in a, b: choose"):
        open_table(str(path))
    assert open_table(f"{path}:b").table.rows(np.arange(2)).tolist() == [[3], [4]]
    raises(UserError, "no column 'id' of vectors", open_table, f"{path}:id")
    for values in ([[1.0], [2.0, 3.0]], [[1.0], None]):
        parquet.write_table(arrow.table({"a": values}), path)
        raises(UserError, "of column 'a' differ in length, or some are missing", open_table, str(path))


def test_bad_rows_are_found_in_every_block_and_sizes_that_do_not_fit_are_named(tmp_path):
    values = torch.ones(10_000, 3)
    values[1, 2], values[5000, 0], values[7000] = torch.nan, -torch.inf, 0
    values[9_999] = torch.tensor([0, 0, -1])
    table = EmbeddingTable("t", [[values]])
    infinite = dict.fromkeys((1, 5000), "holds NaN or infinity")
    assert table.errors(np.arange(10_000)) == infinite | {7000: "holds zeros alone"}
    assert table.errors(np.array([0, 2, 7000])) == {7000: "holds zeros alone"}
    large = EmbeddingTable("t", [[torch.full((1, 2), 1e300, dtype=torch.float64)]])
    assert large.errors(np.arange(1)) == {0: "holds NaN or infinity"}
    with pytest.raises(UserError, match="img: its files have 4 and 5 channels"):
        open_table(str(write_shards(tmp_path / "img", numbers(2, 4, np.float32), numbers(2, 5, np.float32))))
    np.save(tmp_path / "a.npy", numbers(3, 2, np.float32))
    np.save(tmp_path / "b.npy", numbers(4, 2, np.float32))
    raises(UserError, re.escape("3 and 4 rows side by side"), open_table, f"{tmp_path / 'a.npy'}+{tmp_path / 'b.npy'}")
    (tmp_path / "empty").mkdir()
    raises(UserError, "expected a folder of .npy files", open_table, str(tmp_path / "empty"))
    raises(UserError, "no embeddings at", open_table, str(tmp_path / "none.npy"))
    raises(ValueError, "holds no array", EmbeddingTable, "t", [[]])


def test_ids_and_captions_stand_beside_the_table_and_in_the_folders_of_clip_retrieval(tmp_path):
    np.save(tmp_path / "a.npy", numbers(3, 2, np.float32))
    assert open_table(str(tmp_path / "a.npy")).ids is None
    (tmp_path / "a_ids.txt").write_text("x\ny\nz\n")
    (tmp_path / "a.txt").write_text("a dog\n\nthe cat\n")
    found = open_table(str(tmp_path / "a.npy"))
    assert found.ids == ["x", "y", "z"] and found.captions == ["a dog", "", "the cat"]
    (tmp_path / "a_ids.txt").write_text("x\ny\n")
    raises(UserError, r"a.npy: 2 ids for 3 rows", open_table, str(tmp_path / "a.npy"))
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    shards = [numbers(2, 3, np.float16, k) for k in range(11)]
    images = write_shards(tmp_path / "img_emb", *shards, name="img_emb_{}.npy")
    write_shards(tmp_path / "text_emb", *shards, name="text_emb_{}.npy")
    (tmp_path / "metadata").mkdir()
    for k in range(11):
        rows = {"image_path": [f"{k}-0", f"{k}-1"], "caption": [f"caption {k}", None]}
        parquet.write_table(arrow.table(rows), tmp_path / "metadata" / f"metadata_{k}.parquet")
    found = open_table(str(images))
    assert found.ids is not None and found.ids[4:6] == ["2-0", "2-1"] and found.ids[20] == "10-0"
    assert found.captions is not None and found.captions[20:] == ["caption 10", ""]


EMBEDDING_PAIRS_N, M = 30, 70


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    images, texts = random.standard_normal((EMBEDDING_PAIRS_N, 5)), random.standard_normal((M, 3))
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
    return list({(int(random.integers(EMBEDDING_PAIRS_N)), int(random.integers(M))) for _ in range(n_pairs)})


def matches(data):
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
    np.save("images_ids.npy", np.array([f"photo-{i}" for i in range(EMBEDDING_PAIRS_N)]))
    write_csv("pairs.csv", [(f"photo-{i}", t) for i, t in some_pairs()], ("image", "text"))
    found = read(pairs="pairs.csv", fractions=(0.3, 0.2))
    assert set(found) == {"train", "val", "test"}
    for split, data in found.items():
        assert all(hashed_split(i, 0.3, 0.2) == split for i in data.image_ids)
        assert len(matches(data)[0]) == len(data.pairs)
    assert sum(len(data.pairs) for data in found.values()) == len(some_pairs())
    Path("images_ids.npy").unlink()
    found = read_embedding_pairs("images.npy", "images.npy", Problems(), fractions=(0, 0))
    assert matches(found["train"])[0] == {(str(i), str(i)) for i in range(EMBEDDING_PAIRS_N)}
    raises(UserError, "images.npy has 30 rows and texts.npy has 70; without pairs row i", read)


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_other_files_of_pairs(arrays, ending):
    rows = [{"image": i, "text": t, "caption": f"words of {t}"} for i, t in some_pairs()]
    if ending == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), "pairs.parquet")
    else:
        Path(f"pairs.{ending}").write_text(json.dumps(rows) if ending == "json" else "\n".join(map(json.dumps, rows)))
    (data,) = read(pairs=f"pairs.{ending}", fractions=(0, 0)).values()
    assert matches(data)[0] == {(str(i), str(t)) for i, t in some_pairs()}
    assert data.texts == tuple(f"words of {t}" for t in data.text_ids)


def test_bad_rows_are_named_and_left_out_with_their_pairs(arrays):
    images, texts = arrays
    images[3, 1], texts[5], texts[6, 2] = np.nan, 0, np.inf
    images[29] = 0  # In no pair.
    np.save("images.npy", images)
    np.save("texts.npy", texts)
    np.save("texts_ids.npy", np.array([f"t{k}" for k in range(M)]))
    write_csv("pairs.csv", [(0, "t1"), (3, "t2"), (3, "t7"), (4, "t5"), (4, "t8"), (9, "t6")], ("image", "text"))
    problems = Problems()
    (data,) = read(problems, pairs="pairs.csv", fractions=(0, 0)).values()
    assert matches(data)[0] == {("0", "t1"), ("4", "t8")} and data.text_ids == ("t1", "t8")
    assert [(p.location, p.reason) for p in problems.items] == [
        ("images.npy[3]", "image '3' holds NaN or infinity"), ("texts.npy[5]", "text 't5' holds zeros alone"),
        ("texts.npy[6]", "text 't6' holds NaN or infinity"),
    ]  # fmt: skip


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
    Path("images_ids.txt").write_text("\n".join(str(100 + i) for i in range(EMBEDDING_PAIRS_N)))
    write_csv("pairs.csv", [(105, 0), (106, 1)], ("image", "text"))
    (data,) = read(pairs="pairs.csv", fractions=(0, 0)).values()
    assert data.image_ids == ("105", "106") and [source.row for source in data.images] == [5, 6]
    write_csv("pairs.csv", [(5, 0), (6, 1)], ("image", "text"))  # No id among them: row numbers.
    (data,) = read(pairs="pairs.csv", fractions=(0, 0)).values()
    assert data.image_ids == ("105", "106")
    write_csv("pairs.csv", [(105, 0), (6, 1)], ("image", "text"))
    raises(UserError, re.escape("pairs.csv:3: image '6' is not an id of images.npy"), read, pairs="pairs.csv")


def test_a_karpathy_file_names_rows_and_captions(arrays):
    entries, sentence = [], 0
    for i in range(EMBEDDING_PAIRS_N):
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
    raises(UserError, "dataset.json has 67 sentences and texts.npy has 70 rows", read, pairs="dataset.json")
    entries[4]["sentences"] = "none"
    Path("dataset.json").write_text(json.dumps({"images": entries}))
    raises(UserError, r"images\[4\]: sentences is of .* can then not be counted", read, pairs="dataset.json")


def test_equal_wordings_are_merged_but_ids_are_not_wordings(arrays):
    np.save("texts_ids.npy", np.array(["a", "A", *(f"t{k}" for k in range(M - 2))]))
    rows = [(0, "a", ""), (1, "A", ""), (2, "t0", "A dog"), (3, "t1", "a  dog")]
    write_csv("pairs.csv", rows, ("image", "text", "caption"))
    (data,) = read(pairs="pairs.csv", fractions=(0, 0)).values()
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
