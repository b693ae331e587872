"""The example about Laplace and von Mises-Fisher densities, against scipy, torch and loops over samples."""

import numpy as np
import pytest
import scipy
import torch
from densities import bessel_ratio, laplace, sampled_csd_matrix, von_mises_fisher

from sfumato.distances import csd_matrix

seeded = lambda: torch.Generator().manual_seed(0)


@pytest.mark.parametrize("d", [2, 3, 64])
def test_bessel_ratio_is_that_of_scipy(d):
    kappa = np.array([1e-3, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4])
    known = scipy.special.ive(d / 2, kappa) / scipy.special.ive(d / 2 - 1, kappa)
    np.testing.assert_allclose(bessel_ratio(torch.from_numpy(kappa), d).numpy(), known, rtol=1e-10)


@pytest.mark.parametrize(("d", "kappa", "value"), [(1024, 10.0, 0.0097646956694267), (1024, 1e8, 0.99999488501305604)])
def test_bessel_ratio_where_bessel_functions_underflow(d, kappa, value):
    ratio = bessel_ratio(torch.tensor([kappa], dtype=torch.float64), d).item()
    assert ratio == pytest.approx(value, rel=1e-10) and 1 - ratio**2 == pytest.approx(1 - value**2, rel=1e-6)


def test_sampled_csd_is_the_loop_and_the_closed_form_what_samples_tend_to():
    """Within 5 standard errors of the mean over 20,000 pairs of samples."""
    x, y = torch.randn(3, 4, 5, generator=seeded(), dtype=torch.float64), torch.rand(2, 6, 5, dtype=torch.float64)
    loop = [[sum((a - b).square().sum() for a in p for b in q) / 24 for q in y] for p in x]
    torch.testing.assert_close(sampled_csd_matrix(x, y), torch.tensor(loop, dtype=torch.float64))
    mean, scale = (torch.rand(2, 3, generator=seeded(), dtype=torch.float64) for _ in range(2))
    torch.manual_seed(0)
    samples = torch.distributions.Laplace(mean, scale).sample((20_000,)).transpose(0, 1)
    direction = torch.tensor([[0.6, 0.0, 0.8], [0.0, 1.0, 0.0]], dtype=torch.float64)
    kappa = torch.tensor([4.0, 20.0], dtype=torch.float64)
    pairs = zip(direction, kappa, strict=True)
    drawn = [scipy.stats.vonmises_fisher(m, float(k), seed=1).rvs(20_000) for m, k in pairs]
    drawn = torch.from_numpy(np.stack(drawn))
    closed = csd_matrix(laplace(mean, scale), von_mises_fisher(direction, kappa))
    for i, j in np.ndindex(2, 2):
        squared = (samples[i] - drawn[j]).square().sum(1)
        assert abs(squared.mean() - closed[i, j]) < 5 * squared.std() / 20_000**0.5
