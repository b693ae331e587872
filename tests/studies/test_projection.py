"""The map against brute force: eigenvalues by numpy, covariances by drawing, and the degenerate galleries."""

import math

import numpy as np
import pytest
import torch

from sfumato import GaussianEmbedding
from sfumato.studies.maps import Projection, fit_map


def items(mean: torch.Tensor, log_var: torch.Tensor | None = None) -> GaussianEmbedding:
    return GaussianEmbedding(mean, torch.full_like(mean, -2.0) if log_var is None else log_var)


@pytest.fixture
def some() -> GaussianEmbedding:
    generator = torch.Generator().manual_seed(5)
    mean = torch.randn(40, 7, generator=generator) * torch.tensor([1.0, 5, 0.3, 2, 0.1, 0.5, 0.2]) + 3
    return items(mean, torch.randn(40, 7, generator=generator))


def test_axes_are_those_of_numpy(some: GaussianEmbedding):
    projection = fit_map(some)
    mean = some.mean.double().numpy()
    values, vectors = np.linalg.eigh(np.cov(mean, rowvar=False))
    for k in range(2):
        mine, theirs = projection.axes[:, k].numpy(), vectors[:, -1 - k]
        assert abs(mine @ theirs) == pytest.approx(1, abs=1e-12)
        assert mine[np.abs(mine).argmax()] > 0
        assert projection.explained[k] == pytest.approx(values[-1 - k] / values.sum(), rel=1e-12)
    torch.testing.assert_close(projection.axes.T @ projection.axes, torch.eye(2, dtype=torch.float64))
    x = np.array(projection.ellipses(some))[:, :2]
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-12)  # the centre of the gallery lies at 0
    np.testing.assert_allclose(x, (mean - mean.mean(0)) @ projection.axes.numpy(), atol=1e-12)


def test_ellipses_are_the_eigen_decomposition_of_the_projected_covariance(some: GaussianEmbedding):
    projection = fit_map(some)
    axes, var = projection.axes.numpy(), some.var.double().numpy()
    for row, (_, _, a, b, angle) in zip(var, projection.ellipses(some), strict=True):
        covariance = axes.T @ np.diag(row) @ axes
        small, large = np.linalg.eigh(covariance)[0]
        assert (a, b) == (pytest.approx(math.sqrt(large), rel=1e-6), pytest.approx(math.sqrt(small), rel=1e-6))
        assert a != pytest.approx(large, rel=1e-3)  # a standard deviation, not a variance
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        np.testing.assert_allclose(turn @ np.diag([a**2, b**2]) @ turn.T, covariance, rtol=1e-6, atol=1e-9)
        assert -math.pi / 2 < angle <= math.pi / 2


def test_draws_have_the_covariance_that_the_ellipse_says(some: GaussianEmbedding):
    projection = fit_map(some)
    draws, z = 40_000, 5  # z standard errors; 3 numbers for each of 4 items
    chosen = some[:4]
    sample = chosen.sample(draws, generator=torch.Generator().manual_seed(1)).double()
    flat = (sample - projection.centre) @ projection.axes
    for drawn, (x, y, a, b, angle) in zip(flat.numpy(), projection.ellipses(chosen), strict=True):
        assert np.all(np.abs(drawn.mean(0) - (x, y)) < z * a / math.sqrt(draws))
        first, second = np.array([math.cos(angle), math.sin(angle)]), np.array([-math.sin(angle), math.cos(angle)])
        along, across = (drawn - (x, y)) @ first, (drawn - (x, y)) @ second
        relative = z * math.sqrt(2 / draws)  # standard error of a variance, as a fraction of it
        assert along.var() == pytest.approx(a**2, rel=relative)
        assert across.var() == pytest.approx(b**2, rel=relative)
        assert abs((along * across).mean()) < z * a * b / math.sqrt(draws)


def test_equal_calls_and_mirrored_means(some: GaussianEmbedding):
    torch.testing.assert_close(fit_map(some).axes, fit_map(some).axes, rtol=0, atol=0)
    torch.testing.assert_close(fit_map(items(-some.mean)).axes, fit_map(some).axes)  # signs say nothing of the data


def test_points_have_no_ellipse(some: GaussianEmbedding):
    points = GaussianEmbedding.point(some.mean)
    assert all(row[2:] == (0, 0, 0) for row in fit_map(some).ellipses(points))


def test_equal_variances_give_circles(some: GaussianEmbedding):
    round_ = GaussianEmbedding(some.mean, torch.full_like(some.mean, math.log(0.09)))
    for _, _, a, b, _ in fit_map(some).ellipses(round_):
        assert (a, b) == (pytest.approx(0.3, rel=1e-5), pytest.approx(0.3, rel=1e-5))


@pytest.mark.parametrize(("n", "d"), [(1, 5), (2, 5), (9, 5), (3, 1), (1, 1), (4, 2)])
@pytest.mark.parametrize("equal", [False, True])
def test_degenerate_galleries(n: int, d: int, equal: bool):
    mean = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    if equal:
        mean = mean[:1].repeat(n, 1)
    projection = fit_map(items(mean))
    if equal or n == 1:
        assert projection.explained == (0, 0)
    elif n == 2 or d == 1:
        assert projection.explained == (pytest.approx(1), pytest.approx(0, abs=1e-12))
    else:
        assert 1 >= projection.explained[0] >= projection.explained[1] > 0
    for x, y, a, b, angle in projection.ellipses(items(mean)):
        assert all(map(math.isfinite, (x, y, a, b, angle)))
        assert a == pytest.approx(math.exp(-1)) and b == pytest.approx(math.exp(-1) if d > 1 else 0)
        if equal:
            assert (x, y) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6))


def test_no_items_and_another_width(some: GaussianEmbedding):
    with pytest.raises(ValueError, match="no embeddings"):
        fit_map(items(torch.zeros(0, 3)))
    with pytest.raises(ValueError, match="4 dimensions, the map has 7"):
        fit_map(some).ellipses(GaussianEmbedding.point(torch.zeros(2, 4)))


def test_no_embeddings_no_ellipses(some: GaussianEmbedding):
    projection: Projection = fit_map(some)
    assert projection.ellipses(some[:0]) == []
