"""From distances to probabilities, learnt, calibrated and sampled."""

import math

import pytest
import scipy
import torch
from support.raising import raises

from sfumato import GaussianEmbedding, MatchingLogits
from sfumato.calibration.logits import fit_logits
from sfumato.distances.distance import seeded_samples
from sfumato.matching import match_probability, match_probability_distance
from sfumato.search.exact import distance_blocks


def test_learnable_logits_that_are_not_positive_are_refused():
    logits, distance = MatchingLogits(3.0, -1.0), torch.rand(2, 3)
    torch.testing.assert_close(logits(distance), -1 - 3 * distance)
    logits(distance).sum().backward()
    torch.testing.assert_close(logits.log_logit_scale.grad, -3 * distance.sum())
    for wrong in (0.0, -2.0, math.inf, math.nan):
        raises(ValueError, "logit_scale must be positive", MatchingLogits, wrong)
    logits = MatchingLogits(5.0, 5.0, free=True)
    logits.constrain()
    logits.free_logit_scale.data.fill_(-0.25)
    raises(ArithmeticError, "free scale of the match logits is -0.25, which reverses all distances", logits.constrain)


@pytest.mark.parametrize("free", [True, False])
def test_a_scale_is_kept_below_its_largest_and_can_come_back(free):
    logits = MatchingLogits(49.0, 0.0, free=free, largest=50.0)
    with torch.no_grad():
        next(logits.parameters()).add_(2.0)
    logits.constrain()
    assert logits.logit_scale.item() == pytest.approx(50, rel=1e-6)
    logits.logit_scale.backward()
    assert next(logits.parameters()).grad != 0
    raises(ValueError, "logit_scale must be at most 50, the largest, got 51", MatchingLogits, 51.0, 0.0, largest=50.0)


def labelled(seed=0, k=4000, scale=4.0, bias=3.0):
    generator = torch.Generator().manual_seed(seed)
    distance = 2 * torch.rand(k, generator=generator)
    match = (torch.rand(k, generator=generator) < match_probability(distance, scale, bias)).double()
    return distance, match


def test_fit_is_the_maximum_that_another_optimiser_finds_also_with_weights_and_of_separable_distances():
    distance, match = labelled()

    def loss(parameters):
        logit = torch.as_tensor(parameters[1]) - parameters[0] * distance.double()
        return torch.nn.functional.binary_cross_entropy_with_logits(logit, match).item()

    exact = {"xatol": 1e-9, "fatol": 1e-14, "maxiter": 4000}
    best = scipy.optimize.minimize(loss, [1.0, 0.0], method="Nelder-Mead", options=exact)
    fitted = fit_logits(distance, match)
    assert loss(fitted) <= best.fun + 1e-9 and fitted == pytest.approx(tuple(best.x), rel=1e-4)
    distance, match = labelled(k=300)
    weight = torch.randint(1, 4, (300,))
    copies = fit_logits(distance.repeat_interleave(weight), match.repeat_interleave(weight))
    assert fit_logits(distance, match, weight=weight) == pytest.approx(copies, rel=1e-5)
    scale, bias = fit_logits(torch.tensor([0.1, 0.2, 0.9, 1.0]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert 10 < scale < 1e6 and math.isfinite(bias)
    for message, distance, match in (
        ("needs matching and non-matching pairs", [0.1, 0.2], [1.0, 1.0]),
        ("are not closer than non-matches", [0.9, 0.2], [1.0, 0.0]), ("must be finite", [0.9, math.nan], [1.0, 0.0]),
        (r"match must lie in \[0, 1\]", [0.9, 0.1], [2.0, 0.0]), ("got 1 distances, 2 labels", [0.9], [1.0, 0.0]),
    ):  # fmt: skip
        raises(ValueError, message, fit_logits, torch.tensor(distance), torch.tensor(match))


def pair(offset=0.0, d=6):
    generator = torch.Generator().manual_seed(0)
    x = GaussianEmbedding(torch.randn(3, d, generator=generator), torch.randn(3, d, generator=generator))
    return x, GaussianEmbedding(torch.randn(4, d, generator=generator) + offset, torch.randn(4, d, generator=generator))


def test_match_probability_ranks_by_the_mean_sigmoid_and_not_by_the_sigmoid_of_the_mean():
    x, y = pair()
    distance = match_probability_distance(1.5, 2.0, n_samples=5)
    seeded = lambda: torch.Generator().manual_seed(3)
    by_loops = lambda a, b: torch.stack(
        [torch.stack([-torch.sigmoid(2 - 1.5 * torch.cdist(p, q)).mean().log() for q in b]) for p in a]
    )
    generator = seeded()
    expected = by_loops(*(e.sample(5, generator=generator) for e in (x, y)))
    for memory_mb in (64.0, 1e-4):
        found = distance.matrix(x, y, generator=seeded(), memory_mb=memory_mb)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    rows, first = distance.row(x, y[:3], generator=seeded()), distance.matrix(x, y[:3], generator=seeded())
    torch.testing.assert_close(rows, first.diagonal(), rtol=1e-4, atol=1e-5)
    a, b = (seeded_samples(e, 5, seed=0, side=side) for e, side in ((x, "image"), (y, "text")))
    ((_, blocks),) = distance_blocks(x, y, distance)
    torch.testing.assert_close(blocks, by_loops(a, b), rtol=1e-4, atol=1e-5)
    raises(ValueError, "logit_scale > 0 and n_samples >= 1, got -1", match_probability_distance, -1.0, 0.0)


def test_sampled_probability_does_not_underflow_and_carries_the_gradient_of_the_scale_alone():
    x, y = pair(offset=1e4)
    value = match_probability_distance(5.0, 5.0, n_samples=2).matrix(x, y)
    assert torch.isfinite(value).all() and (value > 1e4).all()
    x, y = pair()
    gradients = []
    for memory_mb in (64.0, 1e-4):
        scale, generator = torch.tensor(1.5, requires_grad=True), torch.Generator().manual_seed(3)
        distance = match_probability_distance(scale, 2.0, n_samples=3)
        distance.matrix(x, y, generator=generator, memory_mb=memory_mb).sum().backward()
        gradients.append(scale.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0] > 0
    raises(ValueError, "same d", distance.matrix, x, pair(d=5)[1])
