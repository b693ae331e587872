import pytest
import torch

from sfumato.metrics.calibration import brier_score, expected_calibration_error, reliability_curve


def test_worked_by_hand():
    probability = torch.tensor([0.0, 0.1, 0.5, 0.6, 0.9, 1.0])
    match = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    curve = reliability_curve(probability, match, n_bins=2)
    assert [b["count"] for b in curve] == [2, 4]
    assert [b["probability"] for b in curve] == pytest.approx([0.05, 0.75])
    assert [b["observed"] for b in curve] == pytest.approx([0.5, 0.75])
    assert expected_calibration_error(probability, match, n_bins=2) == pytest.approx(2 / 6 * 0.45)
    assert brier_score(probability, match) == pytest.approx((0.81 + 0.25 + 0.16 + 0.01) / 6)


def test_agrees_with_a_loop():
    generator = torch.Generator().manual_seed(0)
    probability, match = torch.rand(301, generator=generator), (torch.rand(301, generator=generator) < 0.3).float()
    total = 0.0
    for b in range(15):
        inside = [i for i in range(301) if min(int(float(probability[i]) * 15), 14) == b]
        if inside:
            total += abs(sum(float(probability[i]) - float(match[i]) for i in inside)) / 301
    assert expected_calibration_error(probability, match) == pytest.approx(total, abs=1e-6)


def test_a_calibrated_forecast_passes_and_an_overconfident_one_does_not():
    # 20,000 calibrated predictions in 15 bins: the expected error is about 0.01 and its deviation below 0.002, so that 0.03 is
    # beyond 8 of them: a false alarm in fewer than 1e-9 of seeds (and the seed is fixed).
    generator = torch.Generator().manual_seed(1)
    truth = torch.rand(20_000, generator=generator)
    match = (torch.rand(20_000, generator=generator) < truth).float()
    assert expected_calibration_error(truth, match) < 0.03
    assert expected_calibration_error(torch.sigmoid(4 * torch.logit(truth)), match) > 0.1


def test_bad_input_is_named():
    good = torch.tensor([0.5])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        reliability_curve(torch.tensor([1.5]), good)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        reliability_curve(torch.tensor([torch.nan]), good)
    with pytest.raises(ValueError, match="n_bins"):
        reliability_curve(good, good, n_bins=0)
    for function in (reliability_curve, brier_score):
        with pytest.raises(ValueError, match=r"must be \(k,\)"):
            function(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="got no probabilities"):
        expected_calibration_error(torch.zeros(0), torch.zeros(0))
