"""The type that crosses borders, its files, and arrays of NumPy, which stand wherever tensors do."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.raising import raises

import sfumato
from sfumato.arrays import as_tensor, smallest
from sfumato.calibration.logits import fit_logits
from sfumato.gaussian import GaussianEmbedding, load_embeddings, save_embeddings
from sfumato.metrics.reliability import brier_score, expected_calibration_error, log_loss, reliability_curve


def some(n=3, d=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return GaussianEmbedding(torch.randn(n, d, generator=generator), torch.randn(n, d, generator=generator))


def test_scalar_uncertainties_are_their_formulas_and_samples_have_the_stated_moments():
    e = GaussianEmbedding(torch.zeros(2, 3), torch.tensor([[1.0, 4.0, 0.25], [9.0, 1.0, 1.0]]).log())
    torch.testing.assert_close(e.total_variance, torch.tensor([5.25, 11.0]))
    torch.testing.assert_close(e.log_det, torch.tensor([0.0, math.log(9)]))
    torch.testing.assert_close(e.geometric_std, torch.tensor([1.0, 9 ** (1 / 6)]))
    half = GaussianEmbedding(*torch.full((2, 1, 4096), 3.0, dtype=torch.float16))  # Sums are taken in float32.
    torch.testing.assert_close(half.total_variance, torch.tensor([4096 * math.exp(3)]), rtol=1e-5, atol=0)
    p = GaussianEmbedding.point(torch.ones(2, 3))
    assert p.total_variance.eq(0).all() and p.geometric_std.eq(0).all() and p.log_det.isneginf().all()
    assert p.sample(2).eq(1).all()
    e = some(2, 3)
    z = e.sample(40_000, generator=torch.Generator().manual_seed(1))
    assert z.shape == (2, 40_000, 3) and ((z.mean(1) - e.mean).abs() < 5 * (e.var / 40_000).sqrt()).all()
    assert ((z.var(1) - e.var).abs() < 5 * e.var * math.sqrt(2 / 40_000)).all()
    mean, log_var = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    draws = [GaussianEmbedding(mean, log_var).sample(3, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draws)
    draws[0].square().sum().backward()
    assert mean.grad.abs().sum() > 0 and log_var.grad.abs().sum() > 0
    raises(ValueError, "n_samples must be at least 1, got 0", some().sample, 0)


def test_rows_are_chosen_joined_moved_and_detached_and_errors_named():
    two, dtype = torch.zeros(2, 3), "mean must be floating point, got torch.int64"
    for error, message, mean, log_var in (
        (ValueError, r"mean must have shape \(n, d\), got \(3,\).*x.None.", two[0], two[0]),
        (ValueError, "same shape; expand an isotropic variance", two, two[:, :1]),
        (ValueError, "float32.*float64.*move one", two, two.double()), (TypeError, dtype, two.long(), two),
        (TypeError, "log_var must be a tensor or an array, got list", two, [[0.0]]),
    ):  # fmt: skip
        raises(error, message, GaussianEmbedding, mean, log_var)
    with pytest.raises(AttributeError):
        some().mean = two
    e = some(5)
    assert torch.equal(e[1:3].mean, e.mean[1:3]) and len(e[torch.tensor([4, 0, 4])]) == 3
    assert len(e[torch.ones(5, dtype=torch.bool)]) == 5
    with pytest.raises(TypeError, match=r"x\[i : i \+ 1\]"):
        e[0]
    both = GaussianEmbedding.cat([e, e[:2]])
    assert both.n == 7 and torch.equal(both.log_var[5:], e.log_var[:2])
    mean = torch.zeros(2, 3, requires_grad=True)
    e = GaussianEmbedding(mean, mean)
    assert e.to(torch.float64).dtype == torch.float64 and e.to("cpu").device.type == "cpu"
    assert e.mean.requires_grad and not e.detach().mean.requires_grad and not e.detach().log_var.requires_grad
    raises(ValueError, "got no parts, expected at least one", GaussianEmbedding.cat, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_files_give_back_what_was_saved(tmp_path, dtype):
    e, ids = some().to(dtype), ["a", "ein Bär", "日本"]
    save_embeddings(tmp_path / "e.safetensors", e, ids)
    loaded, loaded_ids = load_embeddings(tmp_path / "e.safetensors")
    again = loaded.tensors()
    assert torch.equal(again.mean, e.mean) and torch.equal(again.log_var, e.log_var) and loaded_ids == ids
    save_embeddings(tmp_path / "p.safetensors", GaussianEmbedding.point(e.mean), ids)
    assert load_embeddings(tmp_path / "p.safetensors")[0].tensors().log_var.isneginf().all()


def test_files_of_parts_and_what_cannot_be_saved_or_loaded(tmp_path):
    save_embeddings(tmp_path / "e", some(0), [])
    loaded, ids = load_embeddings(tmp_path / "e")
    assert loaded.mean.shape == (0, 4) and ids == []
    mean = torch.randn(6, 4, requires_grad=True)
    save_embeddings(tmp_path / "e", GaussianEmbedding(mean, -mean)[::2], ["a", "b", "c"])  # not contiguous, has a graph
    assert torch.equal(load_embeddings(tmp_path / "e")[0].tensors().log_var, -mean.detach()[::2])
    raises(ValueError, "2 ids for 3 embeddings", save_embeddings, tmp_path / "new", some(), ["a", "b"])
    raises(ValueError, "id 'a' occurs more than once", save_embeddings, tmp_path / "new", some(), ["a", "b", "a"])
    e = some()
    e.mean[1, 2] = math.nan
    raises(ValueError, "embedding 1 holds NaN", save_embeddings, tmp_path / "new", e, ["a", "b", "c"])
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
    raises(FileNotFoundError, "save_embeddings", load_embeddings, tmp_path / "none")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    raises(ValueError, "not an embeddings file", load_embeddings, tmp_path / "other.safetensors")
    save_embeddings(tmp_path / "e.safetensors", some(), ["a", "b", "c"])
    for cut in (3, 40, 1000):
        (tmp_path / "cut").write_bytes((tmp_path / "e.safetensors").read_bytes()[:-cut])
        raises(ValueError, "damaged", load_embeddings, tmp_path / "cut")


def test_the_numbers_and_the_dtype_stay_and_what_is_no_array_is_named():
    for dtype in ("float16", "float32", "float64", "int64", "uint8", "bool", ">f4"):
        array = np.arange(6).reshape(2, 3).astype(dtype)
        fixed = array.copy()
        fixed.flags.writeable = False
        native = torch.from_numpy(array.astype(array.dtype.newbyteorder("="))).dtype
        for value in (array, array[::-1], array.T, np.lib.stride_tricks.as_strided(array), fixed):
            found = as_tensor(value, "x", "me")
            assert found.tolist() == value.tolist() and found.dtype == native, dtype
    tensor = torch.zeros(2, requires_grad=True)
    assert as_tensor(tensor, "x", "me") is tensor
    raises(TypeError, "me: x must be a tensor or an array, got list", as_tensor, [1.0, 2.0], "x", "me")
    for array, kind in ((np.array(["a"]), "<U1"), (np.array([None]), "object"), (np.array([1j]), "complex128")):
        raises(TypeError, f"me: x must be an array of numbers, got {kind}", as_tensor, array, "x", "me")
    if np.dtype(np.longdouble).itemsize > 8:
        raises(TypeError, "dtype float128, which torch lacks", as_tensor, np.zeros(2, np.longdouble), "x", "me")
    needs = "{} must be a tensor or an array"
    raises(TypeError, f"match_probability: {needs.format('distance')}", sfumato.match_probability, [1.0], 5.0, 5.0)
    raises(TypeError, f"fit_logits: {needs.format('match')}, got list", fit_logits, np.zeros(2), [1, 0])
    raises(TypeError, f"brier_score: {needs.format('probability')}", brier_score, [0.1], np.zeros(1))


def test_public_functions_give_the_same_from_arrays_as_from_tensors():
    generator = torch.Generator().manual_seed(0)
    mean, log_var = torch.randn(5, 3, generator=generator), torch.randn(5, 3, generator=generator)
    x, y = sfumato.GaussianEmbedding(mean, log_var), sfumato.GaussianEmbedding(mean.numpy(), log_var.numpy())
    assert y.mean is mean.numpy() or np.shares_memory(y.mean, mean.numpy())
    assert torch.equal(x.mean, y.tensors().mean) and np.array_equal(x.numpy().log_var, y.log_var)
    assert torch.equal(x[np.array([3, 1])].mean, mean[[3, 1]])
    assert torch.equal(x[np.array([True, False, True, False, False])].mean, mean[[0, 2]])
    distance, match = torch.rand(4, 6, generator=generator), torch.zeros(4, 6)
    match[range(4), range(4)] = 1
    distance[range(4), range(4)] /= 4
    fit = sfumato.Calibration.fit(distance, match, t2i=sfumato.QueryScores.fit(distance, match)).t2i
    flat, nearest = (distance.flatten(), match.flatten()), distance.sort(1).values
    for function, *given in (
        *((name, distance, match) for name in (fit_logits, sfumato.QueryScores.fit, sfumato.Calibration.fit)),
        *((name, *flat) for name in (reliability_curve, expected_calibration_error, brier_score, log_loss)),
        (lambda d: fit.probability(d, n_gallery=6).tolist(), distance),
        (lambda d, n: fit.hit_probability(d, n, n_gallery=6).tolist(), nearest[:, :2], nearest),
        (lambda d: np.round(sfumato.match_probability(d, 5.0, 5.0), 6).tolist(), distance),
    ):
        assert function(*(value.numpy() for value in given)) == function(*given)
    for name, formula in sfumato.DISTANCES.items():
        if not formula.sampled:
            for form in (formula.row, formula.matrix):
                found, other = form(x, x[torch.arange(4, -1, -1)]), form(y, y[np.arange(4, -1, -1)])
                assert isinstance(other, np.ndarray) and other.dtype == np.float32
                np.testing.assert_allclose(found, other, rtol=2e-5, atol=1e-3 if "2_" in name else 2e-6, err_msg=name)
    images, texts, labels = x, sfumato.GaussianEmbedding(mean + 0.1, log_var), torch.eye(5)
    for name, entry in sfumato.LOSSES.items():
        loss = entry()
        if name in ("daa", "pvse"):
            continue
        assert loss(images, texts, labels.numpy()).total == loss(images, texts, labels).total, name


def test_the_smallest_of_each_row_are_those_of_a_stable_sort():
    random = np.random.default_rng(0)
    for n, m, k in ((7, 1, 1), (7, 1000, 1), (7, 1031, 30), (7, 1031, 999), (7, 5, 9), (0, 9, 2), (3, 0, 2), (2, 4, 0)):
        values = random.integers(60, size=(n, m)).astype(np.float32)
        values[1:3], values[random.random((n, m)) < 0.3] = np.inf, np.nan
        values[2:3, : m // 2] = np.nan
        order = values.argsort(axis=1, kind="stable")[:, :k]
        for given in (values, torch.from_numpy(values)):
            np.testing.assert_array_equal(smallest(given, k), (np.take_along_axis(values, order, 1), order))
