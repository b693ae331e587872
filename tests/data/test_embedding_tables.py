"""Tables of embeddings against plain NumPy: shards below each other, files side by side, bad rows, and names."""

import re

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato.data.feature_tables import EmbeddingRow, EmbeddingTable, open_table
from sfumato.data.image_inputs import regions_from_bytes
from sfumato.errors import UserError

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
