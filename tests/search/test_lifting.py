import pytest
import torch
from support.references_metrics import csd_by_loops, squared_l2_by_broadcast

from sfumato.distances import DISTANCES, get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.lifting import (
    LIFTED_DISTANCES,
    LiftedGallery,
    gallery_centre,
    lift_gallery,
    lift_queries,
    query_constant,
)

WIDTH = {"csd": 6, "wasserstein2": 10, "squared_l2": 5}


def gaussians(n, seed, dtype=torch.float32, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, 5, generator=generator, dtype=torch.float64) + offset
    log_var = 2 * torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return GaussianEmbedding(mean.to(dtype), log_var.to(dtype))


def with_constant(squared_l2, queries, distance="csd"):
    """(n, k) distances from the squared L2 of lifted vectors."""
    return squared_l2 + query_constant(queries, distance).unsqueeze(1)


@pytest.mark.parametrize("distance", LIFTED_DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("centred", [False, True])
def test_squared_l2_of_lifted_vectors_is_the_distance(distance, dtype, centred):
    x, y = gaussians(4, 0, dtype), gaussians(7, 1, dtype)
    centre = gallery_centre(y) if centred else None
    a, b = lift_queries(x, distance, centre=centre), lift_gallery(y, distance, centre=centre)
    assert a.shape == (4, WIDTH[distance]) and b.shape == (7, WIDTH[distance]) and a.dtype == b.dtype == torch.float32
    lifted = with_constant(torch.from_numpy(squared_l2_by_broadcast(a, b)), x, distance)
    exact = get_distance(distance).matrix(x.to(torch.float64), y.to(torch.float64))
    torch.testing.assert_close(lifted, exact, rtol=2e-6, atol=2e-6)


def test_csd_by_loops_and_the_tempting_mistakes():
    x, y = gaussians(4, 2), gaussians(7, 3)
    ground_truth = torch.from_numpy(csd_by_loops(x.mean.numpy(), x.var.numpy(), y.mean.numpy(), y.var.numpy()))
    a, b = lift_queries(x), lift_gallery(y)

    def lifted(a, b):
        return with_constant(torch.from_numpy(squared_l2_by_broadcast(a, b)), x)

    torch.testing.assert_close(lifted(a, b), ground_truth, rtol=1e-6, atol=1e-6)
    wrong = {
        "the variance itself instead of its root": (a, torch.cat([b[:, :-1], b[:, -1:].square()], 1)),
        "the gallery's lifting for the queries too": (lift_gallery(x), b),
        "the norm of sigma summed, not squared": (a, torch.cat([y.mean, y.var.sqrt().sum(1, keepdim=True)], 1)),
    }
    for what, (p, q) in wrong.items():
        assert not torch.allclose(lifted(p, q), ground_truth, rtol=0.01), what


def test_a_point_needs_nothing_and_its_constant_is_zero():
    points = GaussianEmbedding.point(torch.randn(3, 5))
    for distance in LIFTED_DISTANCES:
        assert (lift_gallery(points, distance)[:, 5:] == 0).all() and (query_constant(points, distance) == 0).all()


def test_the_centre_keeps_the_digits_of_far_means():
    """Engines multiply: far from the origin their float32 product loses everything that the centre saves."""
    x, y = gaussians(20, 4, offset=3000.0), gaussians(50, 5, offset=3000.0)
    exact = get_distance("csd").matrix(x.to(torch.float64), y.to(torch.float64))

    def by_product(centre):
        a, b = lift_queries(x, centre=centre), lift_gallery(y, centre=centre)
        squared = a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T
        return with_constant(squared, x).double()

    assert ((by_product(gallery_centre(y)) - exact).abs() / exact).max() < 1e-4
    assert ((by_product(None) - exact).abs() / exact).max() > 0.1


def test_one_huge_variance_costs_the_others_nothing():
    y = gaussians(50, 6)
    log_var = y.log_var.clone()
    log_var[0] = 20.0
    y, x = GaussianEmbedding(y.mean, log_var), gaussians(8, 7)
    centre = gallery_centre(y)
    a, b = lift_queries(x, centre=centre), lift_gallery(y, centre=centre)
    squared = a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T
    exact = get_distance("csd").matrix(x.to(torch.float64), y.to(torch.float64))
    torch.testing.assert_close(with_constant(squared, x).double()[:, 1:], exact[:, 1:], rtol=1e-5, atol=1e-5)


def test_bad_input_is_named():
    x = gaussians(2, 0)
    for function in (lift_gallery, lift_queries, query_constant):
        with pytest.raises(ValueError, match=r"'elk' is not a Euclidean distance .* engine=\"exact\""):
            function(x, "elk")
    with pytest.raises(ValueError, match=r"shape \(5,\), got \(4,\)"):
        lift_gallery(x, centre=torch.zeros(4))


@pytest.mark.parametrize("distance", LIFTED_DISTANCES)
@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_a_lifted_gallery_gives_the_distances_in_blocks_of_any_size(distance, offset):
    generator = torch.Generator().manual_seed(5)
    gallery, queries = (
        GaussianEmbedding(torch.randn(n, 7, generator=generator) + offset, torch.randn(n, 7, generator=generator))
        for n in (53, 11)
    )
    lifted = LiftedGallery.of(gallery, distance, gallery_centre(gallery))
    expected = DISTANCES[distance].matrix(queries.to(torch.float64), gallery.to(torch.float64))
    for memory_mb in (256.0, 4 * 53 * 4 / 2**20, 1e-9):  # all at once, fours with an uneven last block, one by one
        blocks = list(lifted.distance_blocks(queries, memory_mb=memory_mb))
        assert [start for start, _ in blocks] == list(range(0, 11, len(blocks[0][1])))
        found = torch.cat([block for _, block in blocks])
        torch.testing.assert_close(
            found.double(), expected, rtol=1e-3 if offset else 1e-5, atol=1e-3 if offset else 1e-5
        )
    assert list(lifted.distance_blocks(queries[:0])) == []
