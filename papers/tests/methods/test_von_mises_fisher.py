"""Von Mises-Fisher densities: the distance by samples and by both of its forms, and the loss by its gradient."""

import math

import pytest
import scipy
import torch
from torch.nn import functional

from papers.methods.von_mises_fisher import csd_vmf, densities, vmf_loss
from papers.tests.methods.test_ncr import batch
from sfumato.distances import csd_matrix, get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses import LOSSES


def spread(side, seed):
    noise = torch.randn(side.n, side.d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return GaussianEmbedding(side.mean, noise - 1)


def test_the_distance_is_that_of_samples_on_the_sphere():
    image, text, _ = batch(d=3)
    x, y = spread(image, 1), spread(text, 2)
    found = get_distance("csd_vmf").matrix(x, y)
    torch.testing.assert_close(found, csd_matrix(densities(x), densities(y)), atol=1e-9, rtol=1e-9)
    draws = [
        torch.from_numpy(scipy.stats.vonmises_fisher(m.numpy(), float((-v.mean()).exp()), seed=k).rvs(4000))
        for k, (m, v) in enumerate(((x.mean[0], x.log_var[0]), (y.mean[1], y.log_var[1])))
    ]
    squared = (draws[0] - draws[1]).square().sum(1)
    assert abs(float(found[0, 1]) - float(squared.mean())) < 3 * float(squared.std()) / math.sqrt(4000)
    certain = GaussianEmbedding(image.mean, torch.full_like(image.mean, -30))
    torch.testing.assert_close(
        csd_vmf(certain[:1], certain[1:2])[0], (image.mean[0] - image.mean[1]).square().sum(), atol=1e-6, rtol=1e-6
    )


def test_a_full_covariance_counts_by_its_trace():
    """By samples: a Gaussian with correlated dimensions has the csd of the isotropic one with the same trace."""
    factor = torch.tensor([[1.0, 0.0], [0.9, 0.3]], dtype=torch.float64)
    torch.manual_seed(0)
    x = torch.randn(40_000, 2, dtype=torch.float64) @ factor.T + torch.tensor([1.0, 2.0])
    trace = float((factor @ factor.T).trace())
    same = GaussianEmbedding(torch.tensor([[1.0, 2.0]]), torch.full((1, 2), math.log(trace / 2)))
    other = GaussianEmbedding(torch.zeros(1, 2), torch.zeros(1, 2))
    squared = (x - torch.randn(40_000, 2, dtype=torch.float64)).square().sum(1)
    assert abs(float(squared.mean()) - float(csd_matrix(same, other))) < 3 * float(squared.std()) / 200


def test_gradients_are_those_of_differences_and_reach_the_concentration():
    image, text, match = batch(d=4)
    options = LOSSES["vmf"].Options()

    def total(m, v):
        x = GaussianEmbedding(functional.normalize(m, dim=1), v)
        return vmf_loss(x, spread(text, 2), match, options).total

    inputs = image.mean.clone().requires_grad_(), spread(image, 1).log_var.clone().requires_grad_()
    assert torch.autograd.gradcheck(total, inputs, atol=1e-4)
    (gradient,) = torch.autograd.grad(total(*inputs), inputs[1:])
    assert gradient.abs().min() > 0 and torch.allclose(gradient, gradient[:, :1])
    assert float(total(*inputs).detach()) == pytest.approx(
        float(LOSSES["vmf"]()(spread(image, 1), spread(text, 2), match).total.detach()), rel=1e-6
    )
