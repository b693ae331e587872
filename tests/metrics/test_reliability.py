import itertools

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


def test_worked_by_hand():
    probability = torch.tensor([0.0, 0.1, 0.5, 0.6, 0.9, 1.0])
    match = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    curve = reliability_curve(probability, match, n_bins=2, binning="width")
    assert [b["count"] for b in curve] == [2, 4]
    assert [b["probability"] for b in curve] == pytest.approx([0.05, 0.75])
    assert [b["observed"] for b in curve] == pytest.approx([0.5, 0.75])
    ece = expected_calibration_error(probability, match, n_bins=2, binning="width")
    assert ece == pytest.approx(2 / 6 * 0.45)
    assert brier_score(probability, match) == pytest.approx((0.81 + 0.25 + 0.16 + 0.01) / 6)


def test_bad_input_is_named():
    good = torch.tensor([0.5])
    raises(ValueError, r"\[0, 1\]", reliability_curve, torch.tensor([1.5]), good)
    raises(ValueError, r"\[0, 1\]", reliability_curve, torch.tensor([torch.nan]), good)
    raises(ValueError, "n_bins", reliability_curve, good, good, n_bins=0)
    for function in (reliability_curve, brier_score):
        raises(ValueError, r"must be \(k,\)", function, torch.zeros(2), torch.zeros(3))
    raises(ValueError, "got no probabilities", expected_calibration_error, torch.zeros(0), torch.zeros(0))


def test_bins_of_equal_count_by_hand():
    probability = torch.tensor([0.9, 0.01, 0.02, 0.03, 0.04])
    match = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0])
    curve = reliability_curve(probability, match, n_bins=2, binning="count")
    assert [b["count"] for b in curve] == [3, 2]
    assert [b["probability"] for b in curve] == pytest.approx([0.02, 0.47])
    assert [b["observed"] for b in curve] == pytest.approx([0.0, 1.0])
    by_count = expected_calibration_error(probability, match, n_bins=2, binning="count")
    assert by_count == pytest.approx((3 * 0.02 + 2 * 0.53) / 5)
    assert by_count == expected_calibration_error(probability, match, n_bins=2), "bins with equally many by default"
    by_width = expected_calibration_error(probability, match, n_bins=2, binning="width")
    assert by_width == pytest.approx((4 * 0.225 + 0.1) / 5) and by_width != by_count
    with pytest.raises(ValueError, match="unknown binning 'mass'; known: width, count"):
        reliability_curve(probability, match, binning="mass")


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


def test_bounds_by_hand():
    # Hoeffding's form for no loss at all: (1 - limit)^n; Bentkus' is e times that.
    assert mean_loss_p_value(0.0, 10, 0.3) == pytest.approx(0.7**10)
    assert mean_loss_p_value(0.3, 10, 0.3) == mean_loss_p_value(0.0, 0, 0.3) == 1


@pytest.mark.parametrize("shape", [(0.5, 2.0), (8.0, 32.0), (0.02, 0.08)])
def test_p_values_of_mean_losses_are_valid(shape):
    # Beta losses of mean 0.2 against a limit of 0.2: at most a tenth of 2,000 p-values is below 0.1, up to 4.5 standard
    # errors.
    losses = scipy.stats.beta.rvs(*shape, size=(2000, 60), random_state=1)
    rejected = sum(mean_loss_p_value(float(row.mean()), 60, 0.2) <= 0.1 for row in losses) / 2000
    assert rejected <= 0.1 + 4.5 * 0.0067
    assert mean_loss_p_value(0.1, 200, 0.2) < 0.01
