"""Embeddings of other models, read from plain files; whatever could run code or does not fit is refused by name."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.raising import raises

from sfumato.data.feature_tables import read_embeddings, read_ids
from sfumato.gaussian import GaussianEmbedding, save_embeddings

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
    """The beginning of a .npy file with this header."""
    made = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({shape}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(made).to_bytes(2, "little") + made


def test_arrays_that_are_no_embeddings(tmp_path):
    for content, message in (
        (saved(np.float32(MEAN))[:-4], "not a complete .npy file"),
        (b"hello", "a.npy: "),
        (b"", "not a complete .npy file"),
        (saved(MEAN, np.savez), "an archive of several arrays"),
        (saved(np.ones((2, 3), int)), r"shape \(2, 3\) and type int64; expected \(n, d\) floating point"),
        (saved(np.ones(3)), r"shape \(3,\)"),
        (saved(np.ones((2, 3, 4))), r"shape \(2, 3, 4\)"),
        (saved(np.ones((2, 3), complex)), "complex128"),
        (saved(np.array([[1.0, 2.0], [3.0, np.nan]])), "embedding 1 holds NaN or infinity"),
        (saved(np.array([[1.0, -np.inf]])), "embedding 0 holds NaN or infinity"),
    ):
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
        ("i.json", b'{"a": 1}', "expected a list of strings or whole numbers"),
        ("i.json", b"[true]", "expected a list of strings or whole numbers"),
        ("i.json", b"[1.5]", "expected a list of strings or whole numbers"),
        ("i.json", b'["a", 1, "1"]', "'1' occurs at entry 2 and again at 3"),
        ("i.npy", b"", "not a complete .npy file"), ("i.npy", npy("10000000000000,)}", "<i8"), "not a complete .npy"),
        ("i.npy", saved(np.ones(2)), r"ids of shape \(2,\) and type float64"),
        ("i.npy", saved(np.ones((2, 2), int)), r"ids of shape \(2, 2\)"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        raises(ValueError, message, read_ids, tmp_path / name)
