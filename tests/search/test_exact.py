"""Exact search and its screening: neighbours against sorting, with far, huge and equal vectors."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.raising import raises
from support.references_metrics import order_of, ranks_by_sorting

from sfumato import DISTANCES, GaussianEmbedding, GaussianIndex, Relevance, get_distance
from sfumato.distances.distance import seeded_samples
from sfumato.models.process_group import ProcessGroup
from sfumato.search import blocks, screening
from sfumato.search import exact as near
from sfumato.search import index as index_module
from sfumato.search.screening import Screen

gaussians = lambda n, d, seed: GaussianEmbedding(*np.random.default_rng(seed).standard_normal((2, n, d)))


def grid(n, d, seed):
    """Points on a coarse grid: many ties, and for n a power of two a mean, hence distances, without rounding."""
    return GaussianEmbedding.point(np.random.default_rng(seed).integers(3, size=(n, d)).astype(np.float32))


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_a_sampled_distance_does_not_depend_on_the_blocks(direction):
    x, y, oriented = gaussians(150, 3, 0), gaussians(70, 3, 1), get_distance("average_l2").for_direction(direction)

    def whole(queries, memory_mb, distance=oriented, **options):
        blocks = near.distance_blocks(queries, y, distance, memory_mb=memory_mb, **options)
        return np.concatenate([block for _, block in blocks])

    expected = whole(x, 1.0)
    for rows in (1, 7, 64, 100):
        np.testing.assert_allclose(whole(x, rows * 70 * 4 / 2**20), expected, rtol=1e-12, atol=1e-12)
    for first in (1, 63, 64, 130):
        np.testing.assert_allclose(whole(x[first:], 1.0, first=first), expected[first:], rtol=1e-12, atol=1e-12)
        assert np.abs(whole(x[first:], 1.0) - expected[first:]).mean() > 0.01  # Other items, other noise.
    assert np.abs(whole(x, 1.0, oriented.with_samples(None, 1)) - expected).mean() > 0.01
    other = get_distance("average_l2").for_direction("t2i" if direction == "i2t" else "i2t")
    backward = np.concatenate([b for _, b in near.distance_blocks(y, x, other)])
    np.testing.assert_allclose(backward.T, expected, rtol=1e-12, atol=1e-12)


def test_a_sampled_distance_is_the_mean_over_its_samples_in_all_processes_together(monkeypatch):
    x, y = gaussians(3, 2, 0), gaussians(4, 2, 1)
    a, b = (seeded_samples(e, 8, seed=5, side=side) for e, side in ((x, "image"), (y, "text")))
    loops = [[np.mean([float((p - q).norm()) for p in s for q in t]) for t in b] for s in a]
    ((_, found),) = near.distance_blocks(x, y, get_distance("average_l2").with_samples(None, 5))
    np.testing.assert_allclose(found, loops, rtol=1e-7, atol=1e-7)
    # The samples have the moments of the embedding, and both sides noise of their own.
    many = seeded_samples(x, 4000, seed=0, side="image")
    np.testing.assert_allclose(many.mean(1), x.mean, rtol=0, atol=0.1)
    np.testing.assert_allclose(many.var(1), x.var, rtol=0.1, atol=0.1)
    assert not torch.equal(many, seeded_samples(x, 4000, seed=0, side="text"))
    monkeypatch.setattr(ProcessGroup, "counts", lambda self, own: [own])
    monkeypatch.setattr(ProcessGroup, "gather", lambda self, value, counts: value)  # Each process keeps its part.
    x, y = gaussians(37, 3, 0), gaussians(19, 3, 1)
    relevance = Relevance.from_lists([[i % 19] for i in range(37)], n_gallery=19)
    whole = near.rank_relevant(x, y, relevance, "average_l2")
    for size in (2, 3, 5):
        groups = [ProcessGroup(rank, size, torch.device("cpu")) for rank in range(size)]
        parts = [group.rank_relevant(x, y, relevance, "average_l2") for group in groups]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("k", [1, 3, 17, 32, 100])
def test_top_k_by_loops_with_ties(k):
    x, y = grid(13, 3, 0), grid(32, 3, 1)
    distance, index = near.top_k(x, y, k, "squared_l2")
    assert distance.shape == index.shape == (13, min(k, 32))
    assert torch.equal(near.top_k(x.tensors(), y.tensors(), k, "squared_l2")[1], torch.from_numpy(index))
    for i in range(13):
        loops = [sum(float(a - b) ** 2 for a, b in zip(x.mean[i], y.mean[j], strict=True)) for j in range(32)]
        assert index[i].tolist() == order_of(loops)[:k] and distance[i].tolist() == sorted(loops)[:k]


@pytest.mark.parametrize("name", ["csd", "kl", "wasserstein2"])
@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_candidates_in_their_true_order(name, direction):
    queries, gallery = gaussians(5, 3, 0), gaussians(9, 3, 1)
    gallery = gallery[np.array([0, 1, 2, 3, 4, 5, 6, 7, 0])]  # 0 and 8 are equal
    candidates = torch.tensor([[8, 0, 3, 4], [7, 6, 5, 4], [1, -1, 2, 3], [-1, 8, -1, 0], [2, 4, 6, 8]])
    found, order = near.closest_candidates(queries, gallery, candidates, get_distance(name).for_direction(direction))
    matrix = get_distance(name).matrix
    whole = matrix(queries, gallery) if direction == "i2t" else matrix(gallery, queries).T
    for i, row in enumerate(candidates.tolist()):
        own = sorted((float(whole[i, j]), j) for j in row if j >= 0)
        if 0 in row and 8 in row:  # The matrix form may tell equal items apart by rounding.
            assert order[i].tolist().index(0) + 1 == order[i].tolist().index(8)
        else:
            assert order[i].tolist() == [j for _, j in own] + [-1] * row.count(-1)
        torch.testing.assert_close(found[i][: len(own)], torch.tensor([d for d, _ in own], dtype=torch.float64))
        assert torch.isposinf(found[i][len(own) :]).all()


def test_rank_relevant_by_loops_with_ties_of_nothing_and_of_bad_input():
    queries, gallery = gaussians(2, 3, 0), gaussians(4, 3, 1)
    none = queries[:0]
    assert [t.shape for t in near.top_k(none, gallery, 2)] == [(0, 2)] * 2
    assert [t.shape for t in near.top_k(queries, none, 2)] == [(2, 0)] * 2
    raises(ValueError, "k must be at least 1, got 0", near.top_k, queries, queries, 0)
    with pytest.raises(ValueError, match="average_l2 is sampled"):
        near.closest_candidates(queries, gallery, np.zeros((2, 1), int), "average_l2")
    assert near.closest_candidates(none, gallery, np.empty((0, 5), int))[1].shape == (0, 5)
    assert near.closest_candidates(queries, gallery, np.empty((2, 0), int))[0].shape == (2, 0)
    found, order = near.closest_candidates(queries, none, np.full((2, 3), -1))
    assert np.isposinf(found).all() and (order == -1).all()
    x = gaussians(2, 5, 0)
    for function in (near.lift_gallery, near.lift_queries, near.query_constant):
        raises(ValueError, "'elk' is not a Euclidean distance .* a GaussianIndex", function, x, "elk")
    raises(ValueError, r"shape \(5,\), got \(4,\)", near.lift_gallery, x, centre=np.zeros(4))
    x, y = grid(31, 3, 4), grid(64, 3, 5)
    ground_truths = [np.flatnonzero(row).tolist() for row in np.random.default_rng(0).random((31, 64)) < 0.2]
    relevance = Relevance.from_lists(ground_truths, n_gallery=64)
    ranks = near.rank_relevant(x, y, relevance, "squared_l2")
    np.testing.assert_array_equal(ranks, ranks_by_sorting(DISTANCES["squared_l2"].matrix(x, y), ground_truths))
    with pytest.raises(ValueError, match="31 queries and 64 gallery items, but a relevance of 64 by 31"):
        near.rank_relevant(x, y, relevance.transpose())


@pytest.mark.parametrize("distance", near.LIFTED_DISTANCES)
@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_a_lifted_gallery_gives_the_distances_in_blocks_of_any_size(distance, offset):
    gallery, queries = (gaussians(n, 7, n).to(np.float32) for n in (53, 11))
    gallery, queries = (GaussianEmbedding(each.mean + offset, each.log_var) for each in (gallery, queries))
    centre = near.gallery_centre(gallery)
    lifted = near.LiftedGallery.of(near.lift_gallery(gallery, distance, centre=centre), distance, centre)
    expected = DISTANCES[distance].matrix(queries.to(np.float64), gallery.to(np.float64))
    for memory_mb in (256.0, 4 * 53 * 4 / 2**20, 1e-9):  # all at once, fours with an uneven last block, one by one
        blocks = list(lifted.distance_blocks(queries, memory_mb=memory_mb))
        assert [start for start, _ in blocks] == list(range(0, 11, len(blocks[0][1])))
        found, close = np.concatenate([block for _, block in blocks]), 1e-3 if offset else 1e-5
        np.testing.assert_allclose(found, expected, rtol=close, atol=close)
    assert list(lifted.distance_blocks(queries[:0])) == []


DTYPES = [np.dtype(name) for name in ("int8", "float32")]  # products by torch, by NumPy
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
normalize = lambda vectors: vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def items(kind, n, seed, d=24):
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
    wide, row = gallery.to(np.float64), get_distance(distance).row
    return np.stack([row(queries[np.full(gallery.n, i)].to(np.float64), wide) for i in range(queries.n)])


def screen_of(gallery, distance="csd", dtype=DTYPES[0]):
    return Screen.of(gallery, get_distance(distance).for_direction("t2i"), dtype=dtype)


def with_each_distance(kinds):
    others = [("near-duplicates", distance) for distance in ("squared_l2", "wasserstein2")]
    return pytest.mark.parametrize("kind, distance", [*((kind, "csd") for kind in kinds), *others])


@of_dtypes
@with_each_distance(KINDS)
def test_closest_are_those_of_float64(kind, distance, dtype):
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


def test_products_of_codes_are_exact_where_they_are_used():
    code, random = blocks.largest_code(), np.random.default_rng(7)
    assert code in (127, 64), "this machine has no product of int8"
    for n, e, b in ((1, 16, 1), (1, 1000, 300), (5, 24, 2), (1000, 16, 1), (257, 513, 256), (4096, 64, 31)):
        rows, queries = random.integers(-127, 128, (n, e)), random.integers(-code, code + 1, (b, e))
        rows[::2], queries[::2] = 127, code
        assert np.array_equal(blocks.multiplied(rows.astype(np.int8), queries.astype(np.int8)), rows @ queries.T)


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


def test_several_threads_find_the_same_each_on_one_core_and_leave_the_number_of_threads_alone():
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
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    found = near.in_parallel(lambda _: torch.get_num_threads(), 5), torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == ([1] * 5, 3)


@of_dtypes
@with_each_distance([kind for kind in KINDS if not kind.startswith("squares")])
def test_bounds_hold_the_observed_errors(kind, distance, dtype):
    gallery, queries = items(kind, 1500, 1, d=64), items(kind, 9, 2, d=64)
    screen = screen_of(gallery, distance, dtype)
    compared = screen.comparison(queries)
    pairs = compared.pairs(np.full(queries.n, np.inf), None)
    true = (true_distances(queries, gallery, screen.distance) - compared.constant[:, None])[pairs.query, pairs.item]
    assert len(pairs) == queries.n * screen.n and (pairs.lower <= true).all() and (true <= pairs.upper).all()
    # Not vacuous: relative to the lengths of the factors they are as narrow as the dtype lets them be.
    scale = true + (gallery.mean.astype(np.float64) ** 2).sum(1).max() + 1
    assert np.median((pairs.upper - pairs.lower) / scale) < (0.1 if dtype != np.float32 else 1e-3)


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
