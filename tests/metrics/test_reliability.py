import itertools
import math

import pytest
import scipy
import torch
from support.raising import raises

from sfumato.metrics.reliability import (
    binomial_tail,
    brier_score,
    expected_calibration_error,
    mean_loss_p_value,
    reliability_curve,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("binning", "probability", "match", "bins", "ece"),
    [  # (count, mean probability, observed)
        ("width", [0.0, 0.1, 0.5, 0.6, 0.9, 1.0], [0, 1, 0, 1, 1, 1], [(2, 0.05, 0.5), (4, 0.75, 0.75)], 0.9 / 6),
        ("width", [0.9, 0.01, 0.02, 0.03, 0.04], [1, 0, 0, 0, 1], [(4, 0.025, 0.25), (1, 0.9, 1)], 0.2),
        ("count", [0.9, 0.01, 0.02, 0.03, 0.04], [1, 0, 0, 0, 1], [(3, 0.02, 0), (2, 0.47, 1)], (0.06 + 1.06) / 5),
    ],
)
def test_bins_worked_by_hand(binning, probability, match, bins, ece):
    probability, match = torch.tensor(probability), torch.tensor(match, dtype=torch.float32)
    curve = reliability_curve(probability, match, n_bins=2, binning=binning)
    assert [tuple(b[key] for key in ("count", "probability", "observed")) for b in curve] == list(
        map(pytest.approx, bins)
    )
    assert expected_calibration_error(probability, match, n_bins=2, binning=binning) == pytest.approx(ece)
    by_default = expected_calibration_error(probability, match, n_bins=2)
    assert by_default == expected_calibration_error(probability, match, n_bins=2, binning="count")
    slow = sum((p - y) ** 2 for p, y in zip(probability.tolist(), match.tolist(), strict=True)) / len(match)
    assert brier_score(probability, match) == pytest.approx(slow)


def test_bad_input_is_named():
    good = torch.tensor([0.5])
    raises(ValueError, r"\[0, 1\]", reliability_curve, torch.tensor([1.5]), good)
    raises(ValueError, r"\[0, 1\]", reliability_curve, torch.tensor([torch.nan]), good)
    raises(ValueError, "n_bins", reliability_curve, good, good, n_bins=0)
    raises(ValueError, "unknown binning 'mass'; known: width, count", reliability_curve, good, good, binning="mass")
    for function in (reliability_curve, brier_score):
        raises(ValueError, r"must be \(k,\)", function, torch.zeros(2), torch.zeros(3))
    raises(ValueError, "got no probabilities", expected_calibration_error, torch.zeros(0), torch.zeros(0))


def test_intervals_and_tails_of_binomials_are_scipys():
    for hits, n, confidence in itertools.product((0, 2, 8), (8, 20, 400), (0.8, 0.95)):
        expected = scipy.stats.binomtest(hits, n).proportion_ci(confidence, method="wilson")
        found = wilson_interval(hits / n, n, confidence=confidence)
        assert found == pytest.approx((expected.low, expected.high), abs=1e-12), (hits, n, confidence)
    assert wilson_interval(0.25, 0) == (0.0, 1.0)
    raises(ValueError, "confidence must be between 0 and 1, got 95", wilson_interval, 1, 3, confidence=95)
    for k, n in ((0, 1), (0, 29), (3, 10), (10, 10), (0, 0), (40, 3000), (2999, 3000)):
        for p in (0.0, 1e-5, 0.02, 0.5, 0.97, 1.0):
            right = scipy.stats.binom.cdf(k, n, p)
            assert binomial_tail(k, n, p) == pytest.approx(right, rel=1e-9, abs=1e-12), (k, n, p)


@pytest.mark.parametrize("loss, n, limit", [(0.0, 10, 0.3), (0.1, 30, 0.2), (0.17, 600, 0.2), (0.19, 5000, 0.2)])
def test_p_values_of_mean_losses_are_scipys_bounds_of_hoeffding_and_bentkus(loss, n, limit):
    hoeffding = math.exp(-n * scipy.stats.entropy([loss, 1 - loss], [limit, 1 - limit]))
    bentkus = math.e * scipy.stats.binom.cdf(math.ceil(n * loss - 1e-9), n, limit)
    assert mean_loss_p_value(loss, n, limit) == pytest.approx(min(hoeffding, bentkus, 1), rel=1e-9)
    assert mean_loss_p_value(limit, n, limit) == mean_loss_p_value(0.0, 0, limit) == 1
