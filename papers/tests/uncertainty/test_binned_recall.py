"""-S*R^2 in all binnings: the released numbers, a table by hand, slow loops, and what the score hides."""

import itertools
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from papers.uncertainty.binned_recall import RecallBinning, binned_recall, binned_recall_statistic
from sfumato.metrics.bootstrap import auroc, bootstrap, on_all
from sfumato.metrics.reliability import expected_calibration_error, log_loss

BINNINGS = RecallBinning.__args__


@pytest.fixture(scope="module")
def released(shared):
    path = shared / "parity" / "posthoc" / "uncertainty_metrics.json"
    return json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))


def queries(n=97, seed=0):
    rng = np.random.default_rng(seed)
    u = rng.gamma(2.0, size=n)
    return u, (rng.random(n) > u / u.max()).astype(float)


def test_bins_and_correlations_of_the_fixture(released):
    _, t = released
    for side, n_bins, binning in itertools.product(("txt", "img"), (5, 10), BINNINGS):
        prefix = f"ours/{side}/{binning}_{n_bins}/"
        found = binned_recall(t[f"inputs/u_{side}"], t[f"hits/{side}"], binning=binning, n_bins=n_bins, n_resamples=0)
        np.testing.assert_array_equal(found.counts, t[f"{prefix}counts"], prefix)
        np.testing.assert_allclose(found.recall, t[f"{prefix}recall"], rtol=1e-12, err_msg=prefix)
        s, r2 = float(t[f"{prefix}S"]), float(t[f"{prefix}R2"])
        ours = [found.spearman, found.r_squared, found.score.value]
        np.testing.assert_allclose(ours, [s, r2, -s * r2], rtol=1e-12, err_msg=prefix)


def test_the_other_figures_of_the_fixture(released):
    """Error AUROC by ranks, ECE of top-1 confidences in 20 bins, and NLPD, by the functions that we had before."""
    _, t = released
    wrong = 1 - t["hits/txt"].astype(float)
    for case in ("plain", "tiny_float64", "tiny_float32", "large_float32"):
        u = t[f"auroc/{case}/uncertainty"]
        np.testing.assert_allclose(auroc(u, wrong), t[f"ours/auroc/{case}"], rtol=1e-12)
    assert abs(float(t["auroc/tiny_float32/official"]) - 0.5) < 1e-9  # What a sigmoid in float32 leaves.
    p, label = torch.from_numpy(t["cal/probs"]), torch.from_numpy(t["cal/labels"])
    confidence, best = p.max(1)
    ece = expected_calibration_error(confidence, (best == label).double(), n_bins=20, binning="width")
    np.testing.assert_allclose(ece, t["ours/cal/ece"], rtol=1e-12)
    np.testing.assert_allclose(ece, t["cal/ece"], atol=1e-7)
    of_label = p.gather(1, label[:, None])[:, 0]
    np.testing.assert_allclose(log_loss(of_label, torch.ones_like(of_label)), t["cal/nlpd"], rtol=1e-6)


def test_a_table_by_hand():
    u = np.array([5.0, 1, 2, 9, 3, 4, 8])
    hit = np.array([0.0, 1, 1, 0, 1, 0, 1])
    count = binned_recall(u, hit, n_bins=3, n_resamples=0)
    assert count.counts == (3, 2, 2)  # 1 2 3 | 4 5 | 8 9
    assert count.recall == (1.0, 0.0, 0.5)
    # Ranks of the recalls are 3 1 2: S = -1/2. Pearson of (0, 1, 2) and (1, 0, 1/2) is -1/2, too.
    assert (count.spearman, count.r_squared) == pytest.approx((-0.5, 0.25))
    assert count.score.value == pytest.approx(0.125)
    width = binned_recall(u, hit, n_bins=4, binning="width", n_resamples=0)
    assert width.counts == (2, 2, 1, 2)  # [1, 3) [3, 5) [5, 7) [7, 9]
    assert width.recall == (1.0, 0.5, 0.0, 0.5)


@pytest.mark.parametrize("binning", BINNINGS)
def test_a_resample_is_binned_anew(binning):
    u, hit = queries(n=61)
    rng = np.random.default_rng(1)
    picked = rng.integers(61, size=61)
    counts = np.bincount(picked, minlength=61).astype(float)
    statistic = binned_recall_statistic(u, hit, binning=binning, n_bins=5)
    rows = np.sort(picked)
    drawn = on_all(binned_recall_statistic(u[rows], hit[rows], binning=binning, n_bins=5), 61)
    assert statistic(counts[None])[0] == pytest.approx(drawn)
    found = binned_recall(u, hit, binning=binning, n_bins=5, n_resamples=50, seed=3).score
    assert found == bootstrap({"x": statistic}, 61, n_resamples=50, seed=3)["x"]
    assert found.low <= found.high


def test_nothing_is_lost_and_undefined_is_none():
    u, hit = queries(n=103)
    for binning in BINNINGS:
        assert sum(binned_recall(u, hit, binning=binning, n_resamples=0).counts) == 103
        constant = binned_recall(np.ones(20), np.arange(20) % 2, binning=binning, n_resamples=5)
        assert constant.score.value is constant.spearman is constant.r_squared is None
        json.dumps(asdict(constant), allow_nan=False)
    assert binned_recall(np.arange(20.0), np.ones(20), n_resamples=5).score.value is None
