import numpy as np
import pytest
import scipy
import torch
from support.raising import raises

from sfumato.metrics.bootstrap import average_ranks, balanced_spearman, pearson, spearman
from sfumato.metrics.reliability import RecallByUncertainty, wilson_interval


@pytest.mark.parametrize("levels", [2, 4, 50, 10**9])
def test_spearman_equals_scipys(levels):
    random = np.random.default_rng(levels)
    for _ in range(10):
        x = random.integers(0, levels, 37)
        y = x * random.integers(0, 2, 37) + random.integers(0, levels, 37)
        assert spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
        np.testing.assert_allclose(average_ranks(x), scipy.stats.rankdata(x) - 1)
        assert pearson(x, y) == pytest.approx(scipy.stats.pearsonr(x, y).statistic, abs=1e-12)


def test_undefined_correlations_are_nan():
    assert np.isnan(spearman(np.zeros(5), np.arange(5)))
    assert np.isnan(spearman(np.array([1.0]), np.array([2.0])))
    raises(ValueError, "must be equal", pearson, np.zeros(3), np.zeros(4))


def test_bins_worked_by_hand():
    uncertainty = np.array([5.0, 1.0, 3.0, 2.0, 4.0, 9.0, 9.0])
    hit = np.array([0, 1, 0, 1, 1, 0, np.nan])
    result = RecallByUncertainty.of(torch.from_numpy(uncertainty), hit, n_bins=3)
    # Without the NaN: in order 1 2 | 3 4 | 5 9, hits 1 1 | 0 1 | 0 0.
    assert result.bins == [
        {"uncertainty": 1.5, "recall": 1.0, "count": 2},
        {"uncertainty": 3.5, "recall": 0.5, "count": 2},
        {"uncertainty": 7.0, "recall": 0.0, "count": 2},
    ]
    assert result.correlation == pytest.approx(-1)
    assert result.spearman == pytest.approx(scipy.stats.spearmanr(uncertainty[:6], hit[:6]).statistic)
    assert result == RecallByUncertainty(**vars(result)) and "6 queries in 3 groups" in repr(result)


def test_ten_bins_of_equal_size_and_none_rather_than_nan():
    uncertainty = np.random.default_rng(0).permutation(1003) / 1003
    rises = RecallByUncertainty.of(uncertainty, (uncertainty > 0.55).astype(float))
    assert [b["count"] for b in rises.bins] == [101] * 3 + [100] * 7 and rises.correlation > 0.8
    constant = RecallByUncertainty.of(np.zeros(20), np.arange(20) % 2)
    assert constant.correlation is None and constant.spearman is None
    few = RecallByUncertainty.of(np.array([1.0, 2.0]), np.array([1.0, 0.0]))
    assert [b["count"] for b in few.bins] == [1, 1]


def test_balanced_spearman_hears_the_rare_ambiguous_items():
    # 500 items of multiplicity 1 and 2 with noise in x, and 5 in each higher power of two where x follows exactly.
    random = np.random.default_rng(3)
    multiplicity = np.concatenate([random.integers(1, 3, 500), np.repeat(2 ** np.arange(2, 8), 5)])
    x = np.where(multiplicity > 2, multiplicity, random.normal(1.5, 1.0, len(multiplicity)))
    plain, balanced = spearman(x, multiplicity), balanced_spearman(x, multiplicity, per_bin=5)
    assert balanced > 0.8 > 0.5 > plain


def test_balanced_spearman_is_exact_when_every_bin_is_taken_whole_and_seeded_otherwise():
    random = np.random.default_rng(4)
    multiplicity, x = random.integers(1, 40, 60), random.normal(size=60)
    assert balanced_spearman(x, multiplicity, per_bin=60, n_sets=3) == pytest.approx(
        scipy.stats.spearmanr(x, multiplicity).statistic
    )
    draws = [balanced_spearman(x, multiplicity, per_bin=3, n_sets=7, seed=s) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert np.isnan(balanced_spearman(x, np.ones(60)))


def test_the_figure_has_each_group_with_its_interval():
    import matplotlib

    matplotlib.use("Agg")
    u = np.arange(40.0)
    found = RecallByUncertainty.of(u, (u < 24).astype(float), n_bins=4)
    axes = found.plot()
    line = axes.lines[0]
    assert line.get_xdata().tolist() == [1, 2, 3, 4] and line.get_ydata().tolist() == [1.0, 1.0, 0.4, 0.0]
    [bars] = [c for c in axes.collections if len(c.get_segments()) == 4]
    ends = [tuple(segment[:, 1]) for segment in bars.get_segments()]
    assert ends == [pytest.approx(wilson_interval(r, 10)) for r in (1.0, 1.0, 0.4, 0.0)]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["4.5", "14.5", "24.5", "34.5"]
    assert "10 queries" in axes.get_xlabel() and f"{found.correlation:.2f}" in axes.get_title(loc="left")
    assert axes.get_ylim()[0] == 0 and found.plot(axes) is axes
    constant = RecallByUncertainty.of(np.zeros(4), np.ones(4), n_bins=2)
    assert "correlation of group and recall undefined" in constant.plot().get_title(loc="left")
    infinite = RecallByUncertainty.of(np.array([1.0, np.inf]), np.array([1.0, 0.0]), n_bins=2)
    assert infinite.plot().get_xticklabels()[1].get_text() == "∞"
