"""Arrays of NumPy stand wherever tensors do, by one conversion that names the argument."""

import numpy as np
import torch
from support.raising import raises

import sfumato
from sfumato.arrays import as_tensor, smallest
from sfumato.calibration.logits import fit_logits
from sfumato.metrics.reliability import brier_score, expected_calibration_error, log_loss, reliability_curve


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
    raises(TypeError, "me: x must be a tensor or an array, got NoneType", as_tensor, None, "x", "me")
    for array, kind in ((np.array(["a"]), "<U1"), (np.array([None]), "object"), (np.array([1j]), "complex128")):
        raises(TypeError, f"me: x must be an array of numbers, got {kind}", as_tensor, array, "x", "me")
    if np.dtype(np.longdouble).itemsize > 8:
        raises(TypeError, "dtype float128, which torch lacks", as_tensor, np.zeros(2, np.longdouble), "x", "me")
    needs = "{} must be a tensor or an array"
    raises(TypeError, f"GaussianEmbedding: {needs.format('mean')}", sfumato.GaussianEmbedding, [[0.0]], [[0.0]])
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
