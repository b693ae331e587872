import numpy as np
import pytest
import torch
from support.raising import raises
from support.references_metrics import order_of, ranks_by_sorting

from sfumato import DISTANCES, GaussianEmbedding, Relevance, get_distance
from sfumato.distances.distance import seeded_samples
from sfumato.models.process_group import ProcessGroup
from sfumato.search.exact import (
    LIFTED_DISTANCES,
    LiftedGallery,
    closest_candidates,
    distance_blocks,
    gallery_centre,
    in_parallel,
    lift_gallery,
    lift_queries,
    query_constant,
    rank_relevant,
    top_k,
)

gaussians = lambda n, d, seed: GaussianEmbedding(*np.random.default_rng(seed).standard_normal((2, n, d)))


def grid(n, d, seed):
    """Points on a coarse grid: many ties, and for n a power of two a mean, hence distances, without rounding."""
    return GaussianEmbedding.point(np.random.default_rng(seed).integers(3, size=(n, d)).astype(np.float32))


@pytest.mark.parametrize("name", [n for n, d in DISTANCES.items() if not d.sampled])
@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_blocks_are_the_matrix(name, direction):
    x, y = gaussians(11, 4, 0), gaussians(7, 4, 1)
    blocks = list(distance_blocks(x, y, get_distance(name).for_direction(direction), memory_mb=3 * 7 * 4 / 2**20))
    assert [s for s, _ in blocks] == [0, 3, 6, 9] and [len(b) for _, b in blocks] == [3, 3, 3, 2]
    whole = get_distance(name).matrix(x, y) if direction == "i2t" else get_distance(name).matrix(y, x).T
    np.testing.assert_allclose(np.concatenate([b for _, b in blocks]), whole, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_a_sampled_distance_does_not_depend_on_the_blocks(direction):
    x, y = gaussians(150, 3, 0), gaussians(70, 3, 1)
    oriented = get_distance("average_l2").for_direction(direction)

    def whole(queries, memory_mb, distance=oriented, **options):
        return np.concatenate([b for _, b in distance_blocks(queries, y, distance, memory_mb=memory_mb, **options)])

    expected = whole(x, 1.0)
    for rows in (1, 7, 64, 100):
        np.testing.assert_allclose(whole(x, rows * 70 * 4 / 2**20), expected, rtol=1e-12, atol=1e-12)
    for first in (1, 63, 64, 130):
        np.testing.assert_allclose(whole(x[first:], 1.0, first=first), expected[first:], rtol=1e-12, atol=1e-12)
        assert np.abs(whole(x[first:], 1.0) - expected[first:]).mean() > 0.01  # Other items, other noise.
    assert np.abs(whole(x, 1.0, oriented.with_samples(None, 1)) - expected).mean() > 0.01
    other = get_distance("average_l2").for_direction("t2i" if direction == "i2t" else "i2t")
    backward = np.concatenate([b for _, b in distance_blocks(y, x, other)])
    np.testing.assert_allclose(backward.T, expected, rtol=1e-12, atol=1e-12)


def test_a_sampled_distance_is_the_mean_over_its_samples_in_all_processes_together(monkeypatch):
    x, y = gaussians(3, 2, 0), gaussians(4, 2, 1)
    a, b = (seeded_samples(e, 8, seed=5, side=side) for e, side in ((x, "image"), (y, "text")))
    loops = [[np.mean([float((p - q).norm()) for p in s for q in t]) for t in b] for s in a]
    ((_, found),) = distance_blocks(x, y, get_distance("average_l2").with_samples(None, 5))
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
    whole = rank_relevant(x, y, relevance, "average_l2")
    for size in (2, 3, 5):
        groups = [ProcessGroup(rank, size, torch.device("cpu")) for rank in range(size)]
        parts = [group.rank_relevant(x, y, relevance, "average_l2") for group in groups]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("k", [1, 3, 17, 32, 100])
def test_top_k_by_loops_with_ties(k):
    x, y = grid(13, 3, 0), grid(32, 3, 1)
    distance, index = top_k(x, y, k, "squared_l2")
    assert distance.shape == index.shape == (13, min(k, 32))
    assert torch.equal(top_k(x.tensors(), y.tensors(), k, "squared_l2")[1], torch.from_numpy(index))
    for i in range(13):
        loops = [sum(float(a - b) ** 2 for a, b in zip(x.mean[i], y.mean[j], strict=True)) for j in range(32)]
        assert index[i].tolist() == order_of(loops)[:k] and distance[i].tolist() == sorted(loops)[:k]


def test_rank_relevant_by_loops_with_ties():
    x, y = grid(31, 3, 4), grid(64, 3, 5)
    ground_truths = [np.flatnonzero(row).tolist() for row in np.random.default_rng(0).random((31, 64)) < 0.2]
    relevance = Relevance.from_lists(ground_truths, n_gallery=64)
    ranks = rank_relevant(x, y, relevance, "squared_l2")
    np.testing.assert_array_equal(ranks, ranks_by_sorting(DISTANCES["squared_l2"].matrix(x, y), ground_truths))
    with pytest.raises(ValueError, match="31 queries and 64 gallery items, but a relevance of 64 by 31"):
        rank_relevant(x, y, relevance.transpose())


@pytest.mark.parametrize("name", ["csd", "kl", "wasserstein2"])
@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_candidates_in_their_true_order(name, direction):
    queries, gallery = gaussians(5, 3, 0), gaussians(9, 3, 1)
    gallery = gallery[np.array([0, 1, 2, 3, 4, 5, 6, 7, 0])]  # 0 and 8 are equal
    candidates = torch.tensor([[8, 0, 3, 4], [7, 6, 5, 4], [1, -1, 2, 3], [-1, 8, -1, 0], [2, 4, 6, 8]])
    found, order = closest_candidates(queries, gallery, candidates, get_distance(name).for_direction(direction))
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


def of_five(n, seed, dtype=np.float32, offset=0.0):
    mean, noise = np.random.default_rng(seed).standard_normal((2, n, 5))
    return GaussianEmbedding(mean + offset, 2 * noise).to(dtype)


def test_each_of_several_threads_computes_on_one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    found = in_parallel(lambda _: torch.get_num_threads(), 5), torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == ([1] * 5, 3)


def test_of_nothing_and_bad_input():
    queries, gallery = gaussians(2, 3, 0), gaussians(4, 3, 1)
    none = queries[:0]
    assert [t.shape for t in top_k(none, gallery, 2)] == [(0, 2)] * 2
    assert [t.shape for t in top_k(queries, none, 2)] == [(2, 0)] * 2
    raises(ValueError, "k must be at least 1, got 0", top_k, queries, queries, 0)
    with pytest.raises(ValueError, match="average_l2 is sampled"):
        closest_candidates(queries, gallery, np.zeros((2, 1), int), "average_l2")
    assert closest_candidates(none, gallery, np.empty((0, 5), int))[1].shape == (0, 5)
    assert closest_candidates(queries, gallery, np.empty((2, 0), int))[0].shape == (2, 0)
    found, order = closest_candidates(queries, none, np.full((2, 3), -1))
    assert np.isposinf(found).all() and (order == -1).all()
    x = of_five(2, 0)
    for function in (lift_gallery, lift_queries, query_constant):
        raises(ValueError, "'elk' is not a Euclidean distance .* a GaussianIndex", function, x, "elk")
    raises(ValueError, r"shape \(5,\), got \(4,\)", lift_gallery, x, centre=np.zeros(4))


@pytest.mark.parametrize("distance", LIFTED_DISTANCES)
@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_a_lifted_gallery_gives_the_distances_in_blocks_of_any_size(distance, offset):
    gallery, queries = (gaussians(n, 7, n).to(np.float32) for n in (53, 11))
    gallery, queries = (GaussianEmbedding(each.mean + offset, each.log_var) for each in (gallery, queries))
    centre = gallery_centre(gallery)
    lifted = LiftedGallery.of(lift_gallery(gallery, distance, centre=centre), distance, centre)
    expected = DISTANCES[distance].matrix(queries.to(np.float64), gallery.to(np.float64))
    for memory_mb in (256.0, 4 * 53 * 4 / 2**20, 1e-9):  # all at once, fours with an uneven last block, one by one
        blocks = list(lifted.distance_blocks(queries, memory_mb=memory_mb))
        assert [start for start, _ in blocks] == list(range(0, 11, len(blocks[0][1])))
        found, close = np.concatenate([block for _, block in blocks]), 1e-3 if offset else 1e-5
        np.testing.assert_allclose(found, expected, rtol=close, atol=close)
    assert list(lifted.distance_blocks(queries[:0])) == []
