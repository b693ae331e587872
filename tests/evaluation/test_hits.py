"""Figures of hits on queries whose probabilities are known."""

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato.calibration.calibrator import Calibration, DirectionCalibration
from sfumato.calibration.logits import PairLogits
from sfumato.calibration.query_scores import QueryScores
from sfumato.evaluation.hits import hit_figures, measure_hits, without_nearest
from sfumato.metrics.reliability import calibration_error_by_chance, expected_calibration_error, log_loss


def of_distance(scale, bias):
    """A calibration that does not depend on the size of the gallery: matches grow with it."""
    pairs = PairLogits(scale, bias, 0.1)
    fit = DirectionCalibration(pairs, QueryScores.fit(torch.eye(3), torch.eye(3), growth=1.0))
    return Calibration(**vars(pairs), i2t=fit, t2i=fit)


def pairs(n=300, seed=0):
    """Distances of n images and n texts with outcomes drawn from sigmoid(2 - 2 distance)."""
    generator = torch.Generator().manual_seed(seed)
    distance = 3.5 + torch.randn(n, n, generator=generator)
    return distance, torch.bernoulli(torch.sigmoid(2 - 2 * distance), generator=generator)


@pytest.mark.parametrize(("direction", "population"), [("t2i", "planted"), ("i2t", "independent")])
def test_a_loop_over_queries_has_the_same_figures(direction, population):
    distance, match = pairs(n=40)
    measured = measure_hits(of_distance(2.0, 2.0), distance, match, sizes=(), population=population)
    [figures] = [one for one in measured if (one.direction, one.hits) == (direction, 10)]
    p, y, beside = [], [], match.bool().any(0)
    asked = (distance[:, beside], match[:, beside]) if direction == "i2t" else (distance.T, match.T)
    for d, own in zip(*asked, strict=True):
        if own.any() or population == "independent":
            order = d.argsort()[:10]
            p += torch.sigmoid(2 - 2 * d[order]).tolist()
            y += own[order].tolist()
    p, y = np.array(p), np.array(y)
    assert figures.n == len(p) and figures.n_gallery == 40
    assert figures.rate == pytest.approx(y.mean()) and figures.mean_probability == pytest.approx(p.mean(), abs=1e-6)
    slow = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    assert figures.log_loss == pytest.approx(slow, abs=1e-5)
    assert figures.brier_skill == pytest.approx(1 - np.mean((p - y) ** 2) / (y.mean() * (1 - y.mean())), abs=1e-5)
    higher = p[y == 1][:, None] - p[y == 0][None, :]
    assert figures.auroc == pytest.approx((higher > 0).mean() + (higher == 0).mean() / 2, abs=1e-6)
    error = expected_calibration_error(torch.from_numpy(p), torch.from_numpy(y))
    assert figures.ece == pytest.approx(error, abs=1e-6)
    assert figures.ece_by_chance == pytest.approx(calibration_error_by_chance(torch.from_numpy(p)), abs=1e-6)


def test_sizes_populations_and_errors_by_chance():
    distance, match = pairs(n=120)
    calibration = of_distance(2.0, 2.0)
    planted = measure_hits(calibration, distance, match, sizes=(30, 60, 5000), n_galleries=2)
    assert [(f.direction, f.n_gallery, f.hits) for f in planted] == [
        (d, n, h) for d in ("t2i", "i2t") for n in (30, 60, 120) for h in (1, 10)
    ]
    every = measure_hits(calibration, distance, match, sizes=(30,), population="independent")
    assert every[0].n > planted[0].n and every[0].rate < planted[0].rate and without_nearest(calibration) == calibration
    p = torch.rand(3000, generator=torch.Generator().manual_seed(1)).double()
    drawn = (torch.bernoulli(p, generator=torch.Generator().manual_seed(s)) for s in range(200, 230))
    mean = np.mean([expected_calibration_error(p, match, binning="count") for match in drawn])
    assert calibration_error_by_chance(p) == pytest.approx(float(mean), abs=0.002)
    assert calibration_error_by_chance(p[:60]) > 3 * calibration_error_by_chance(p)
    assert log_loss(torch.tensor([0.5, 0.25]), torch.tensor([1, 0])) == pytest.approx(-(np.log(0.5) + np.log(0.75)) / 2)
    raises(ValueError, "log_loss", log_loss, torch.zeros(0), torch.zeros(0))


def verdict_of(n, off, seed):
    """The verdict on probabilities of n first hits whose true probabilities differ by `off`, towards one half."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.sigmoid(2 * torch.randn(n, generator=generator).double() + 0.8)
    true = torch.where(p > 0.5, p - off, p + off)
    return hit_figures(p.numpy(), torch.bernoulli(true, generator=generator).numpy(), "t2i", n, 1).verdict


def test_verdicts_of_few_and_of_many_queries():
    few = [verdict_of(36, 0.0, seed) for seed in range(20)]
    assert few.count("too few") >= 16
    assert [verdict_of(3000, off, 1) for off in (0.0, 0.1, 0.25)] == ["holds", "rough", "misleads"]
    wrong = [verdict_of(150, 0.1, seed) for seed in range(40)]
    assert wrong.count("holds") <= 4  # At most 5 % by the rule.
