"""Engine exact against float64 by brute force, on data chosen to break it, and its bounds against observed errors."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato import GaussianEmbedding, GaussianIndex, get_distance
from sfumato.search import blocks, screening
from sfumato.search import index as index_module
from sfumato.search.screening import Comparison, Screen

LIFTED = ["csd", "squared_l2", "wasserstein2"]
DTYPES = [np.dtype(name) for name in ("int8", "uint8", "float32")]  # products by torch, by onnxruntime, by NumPy
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
normalize = lambda vectors: vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def items(kind, n, seed, d=24):
    """A gallery, or queries of the same kind."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((n, d), np.float32)
    small, which = np.float32(0.3) * random.standard_normal((n, d), np.float32), random.integers(40, size=n)
    bases = np.random.default_rng(99).standard_normal((40, d), np.float32)
    if kind == "random":
        return GaussianEmbedding(noise, small - 3)
    if kind == "two tight clusters far apart":
        side = np.where(np.arange(n) % 2 == 0, np.float32(100), np.float32(-100))[:, None]
        return GaussianEmbedding(side + np.float32(0.01) * noise, small - 14)
    if kind == "near-duplicates":
        return GaussianEmbedding(normalize(normalize(bases)[which] + np.float32(2e-4) * noise), small / 3 - 20)
    if kind == "duplicates":
        return GaussianEmbedding(bases[which], np.full((n, d), -2, np.float32))
    if kind == "variances of six decades":
        decades = 6 * random.random((n, 1), np.float32) - 3
        return GaussianEmbedding(normalize(noise), small - 6 + np.float32(2.302585) * decades)
    if kind == "a few outliers":
        factor = np.where(np.arange(n) % 97 == 0, np.float32(1e6), np.float32(1))[:, None]
        return GaussianEmbedding(noise * factor, small - 3)
    if kind == "squares that overflow":
        return GaussianEmbedding(np.float32(1e25) * noise, small)
    assert kind == "squares that underflow"
    return GaussianEmbedding(np.float32(1e-25) * noise, small - 100)


KINDS = [
    "random", "two tight clusters far apart", "near-duplicates", "duplicates", "variances of six decades",
    "a few outliers", "squares that overflow", "squares that underflow",
]  # fmt: skip


def true_distances(queries, gallery, distance):
    """(n, m) by the row form in float64."""
    wide, row = gallery.to(np.float64), get_distance(distance).row
    return np.stack([row(queries[np.full(gallery.n, i)].to(np.float64), wide) for i in range(queries.n)])


def screen_of(gallery, distance="csd", dtype=DTYPES[0]):
    return Screen.of(gallery, get_distance(distance).for_direction("t2i"), dtype=dtype)


def with_each_distance(kinds):
    """All kinds of data by csd, and one by the other distances."""
    others = [("near-duplicates", distance) for distance in LIFTED[1:]]
    return pytest.mark.parametrize("kind, distance", [*((kind, "csd") for kind in kinds), *others])


@of_dtypes
@with_each_distance(KINDS)
def test_closest_are_those_of_float64(kind, distance, dtype):
    """And those within a radius."""
    gallery, queries = items(kind, 1500, 1), items(kind, 9, 2)
    true, screen = true_distances(queries, gallery, distance), screen_of(gallery, distance, dtype)
    order = true.argsort(axis=1, kind="stable")
    values = np.take_along_axis(true, order, 1)
    for k in (1, 10, 700, 2000):
        found, position = screen.closest(queries, k)
        assert np.array_equal(position, order[:, :k]) and np.array_equal(found, values[:, :k])
    some = np.flatnonzero(np.random.default_rng(3).random(1500) < 0.4)
    order = some[true[:, some].argsort(axis=1, kind="stable")]
    assert np.array_equal(screen.among(some).closest(queries, 10)[1], order[:, :10])
    for radius in (-1.0, *np.quantile(true.astype(np.float32), [0.01, 0.6]).tolist(), np.inf):
        for row, (found, position) in zip(true, screen.within(queries, radius), strict=True):
            inside = np.flatnonzero(row.astype(np.float32) <= radius)
            assert np.array_equal(position, inside[row[inside].argsort(kind="stable")])
            assert np.array_equal(found, row[position])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_an_item_whose_code_is_shorter_than_it_is_found(dtype):
    exact, short = np.full((1, 24), 0.995), np.array([[1.0] + 23 * [1 - 0.51 / 127]])
    gallery = GaussianEmbedding.point(np.concatenate([np.zeros((1023, 24)), exact, short]).astype(np.float32))
    query = GaussianEmbedding.point(np.full((1, 24), 20, np.float32))
    assert screen_of(gallery, "squared_l2", dtype).closest(query, 1)[1].item() == 1024


@pytest.mark.parametrize("d", [1, 2, 3, 15, 16, 17])
def test_narrow_vectors(d):
    mean = np.indices((40, 3), np.float32).reshape(2, -1).T[:, np.arange(d) % 2]
    for m in (d, 33, 120):
        grid = GaussianEmbedding.point(mean[:m])
        order = true_distances(grid, grid, "csd").argsort(axis=1, kind="stable")
        for dtype in (*DTYPES, None):
            for k in (1, 10, 120):
                assert np.array_equal(screen_of(grid, dtype=dtype).closest(grid, k)[1], order[:, :k])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_products_of_codes_are_exact_where_they_are_used(dtype):
    code, random = blocks.largest_code(dtype), np.random.default_rng(7)
    assert code in (127, 64), "this machine has no product of int8"
    for n, e, b in ((1, 16, 1), (1, 1000, 300), (5, 24, 2), (1000, 16, 1), (257, 513, 256), (4096, 64, 31)):
        rows, queries = random.integers(-127, 128, (n, e)), random.integers(-code, code + 1, (b, e))
        rows[::2], queries[::2] = 127, code
        coded = (rows + 128 * (dtype == np.uint8)).astype(dtype)
        assert np.array_equal(blocks.multiplied(coded, queries.astype(np.int8)), rows @ queries.T)


@pytest.mark.slow
def test_with_avx2_alone(request):
    """It has products of int8 that saturate: the same tests in a process that may use nothing newer."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA"):
        pytest.skip("this is that process")
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    tests = "exact_where or (int8 and csd and tight and closest_are_those)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "-k", tests, __file__]
    done = subprocess.run(command, cwd=request.config.rootpath, env={**os.environ, **limits}, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()[-3000:]


def test_few_and_many_candidates(monkeypatch):
    screen = screen_of(items("random", 30, 1))
    assert [t.shape for t in screen.closest(items("random", 0, 2), 3)] == [(0, 3)] * 2
    assert list(screen.within(items("random", 0, 2), 1.0)) == []
    nothing = screen.among(np.empty(0, np.int64))
    assert [t.shape for t in nothing.closest(items("random", 2, 2), 3)] == [(2, 0)] * 2
    raises(ValueError, "'kl' does not lift", Screen.of, items("random", 3, 1), get_distance("kl"))
    monkeypatch.setattr(screening, "_MANY_PAIRS", 2000)
    gallery, queries = items("near-duplicates", 1500, 1), items("near-duplicates", 13, 2)
    true, screen = true_distances(queries, gallery, "csd"), screen_of(gallery)
    assert np.array_equal(screen.closest(queries, 20)[1], true.argsort(axis=1, kind="stable")[:, :20])
    assert [len(p) for _, p in screen.within(queries, 1e3)] == [1500] * 13


def test_several_threads_find_the_same_and_leave_the_number_of_threads_alone():
    gallery, queries = items("random", 20_000, 1), items("random", 300, 2)
    screen, before = screen_of(gallery), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        distance, position = screen.closest(queries, 10)
        torch.set_num_threads(3)
        for _ in range(3):
            found = screen.closest(queries, 10)
            assert np.array_equal(found[0], distance) and np.array_equal(found[1], position)
        with ThreadPoolExecutor(1) as other:
            assert torch.get_num_threads() == other.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def bounds(screen, queries):
    """(n, m) lower and upper bounds of all pairs, and the true values that they are of."""
    compared = screen.comparison(queries)
    pairs = compared.pairs(np.full(queries.n, np.inf), None)
    true = true_distances(queries, screen.gallery, screen.distance) - compared.constant[:, None]
    assert len(pairs) == queries.n * screen.n
    return pairs.lower, pairs.upper, true[pairs.query, pairs.item]


@of_dtypes
@with_each_distance([kind for kind in KINDS if not kind.startswith("squares")])
def test_bounds_hold_the_observed_errors(kind, distance, dtype, monkeypatch):
    gallery, queries = items(kind, 1500, 1, d=64), items(kind, 9, 2, d=64)
    screen = screen_of(gallery, distance, dtype)
    lower, upper, true = bounds(screen, queries)
    assert (lower <= true).all() and (true <= upper).all()
    # Not vacuous: relative to the lengths of the factors they are as narrow as the dtype lets them be.
    scale = true + (gallery.mean.astype(np.float64) ** 2).sum(1).max() + 1
    assert np.median((upper - lower) / scale) < (0.1 if dtype != np.float32 else 1e-3)
    if dtype != np.float32:
        monkeypatch.setattr(Comparison, "_error", lambda self, relative, length, rounding: 0 * relative.length)
        lower, upper, true = bounds(screen, queries)
        assert (lower > true).any() or (true > upper).any(), "the bound of the coding error is needed"


@pytest.mark.parametrize("distance", ["csd", "kl"])
def test_large_galleries_are_estimated(distance, monkeypatch):
    gallery, queries = items("random", 3000, 1, d=6), items("random", 20, 2, d=6)
    scale = {"csd": (1.0, 4.0), "kl": (0.05, 4.0)}[distance]
    told = {"distance": distance, "logit_scale": scale[0], "logit_bias": scale[1]}
    index = GaussianIndex.build(gallery, [str(i) for i in range(3000)], **told)
    exact = index.expected_matches(queries)
    true = true_distances(queries, gallery, get_distance(distance).for_direction("t2i"))
    assert exact == pytest.approx(index.match_probability(true).sum(1).tolist(), rel=1e-3)
    monkeypatch.setattr(index_module, "N_WHOLE", 1000)
    del index.__dict__["_sample"]
    found = index.expected_matches(queries)
    assert len(index._sample.ids) == 2048 and found != exact and found == pytest.approx(exact, rel=0.1)
