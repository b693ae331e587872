"""Correlations, areas and resamples: tables worked by hand, loops and scipy."""

import itertools
import math

import numpy as np
import pytest
import scipy
import torch
from support.raising import raises

from sfumato.metrics import bootstrap as measures
from sfumato.metrics import reliability
from sfumato.metrics.reliability import RecallByUncertainty, mean_loss_p_value, reliability_curve, wilson_interval

whole = lambda statistic: lambda u, e, *given: measures.on_all(statistic(u, e, *given), len(u))
aurc, risk_at_coverage = whole(measures.aurc_statistic), whole(measures.risk_statistic)
shared = lambda name: lambda u, e: measures.on_all(measures.risk_coverage_statistics(u, e)[name], len(u))
excess_aurc, prediction_rejection_ratio = shared("e_aurc"), shared("prr")


def scene(seed, n=57, levels=8):
    random = np.random.default_rng(seed)
    uncertainty = random.integers(0, levels, n).astype(float)
    return uncertainty, (random.random(n) < 0.2 + 0.5 * uncertainty / levels).astype(float)


def test_auroc_by_pairs_and_aurc_with_ties_is_the_mean_over_all_orders():
    uncertainty, error = np.array([1.0, 2.0, 2.0, 2.0, 3.0, 3.0]), np.array([0.0, 1.0, 0.0, 0.5, 1.0, 0.0])
    areas, risks = [], []
    for middle, end in itertools.product(itertools.permutations([1, 2, 3]), itertools.permutations([4, 5])):
        order = [0, *middle, *end]
        curve = np.cumsum(error[order]) / np.arange(1, 7)
        areas.append(curve.mean())
        risks.append(curve[2])
    assert aurc(uncertainty, error) == pytest.approx(np.mean(areas), abs=1e-12)
    assert risk_at_coverage(uncertainty, error, 0.5) == pytest.approx(np.mean(risks), abs=1e-12)
    error = np.array([0.0, 0.0, 1.0, 1.0])
    assert prediction_rejection_ratio(np.zeros(4), error) == pytest.approx(0, abs=1e-12)
    assert aurc(np.full(4, -np.inf), error) == pytest.approx(0.5)
    error = np.r_[np.zeros(3), np.ones(27)]  # 0.1 * 30 is a little more than 3: three items, none of which is wrong.
    assert [risk_at_coverage(np.arange(30.0), error, coverage) for coverage in (0.1, 0.101)] == [0, 0.25]
    assert measures.auroc(np.array([-np.inf, -np.inf, 0.0, np.inf]), np.array([0, 1, 0, 1])) == pytest.approx(0.625)
    for seed in range(5):
        score, positive = scene(seed)
        pairs = [(p > q) + 0.5 * (p == q) for p, q in itertools.product(score[positive == 1], score[positive == 0])]
        assert measures.auroc(score, positive) == pytest.approx(np.mean(pairs), abs=1e-12)
        assert measures.auroc(-score, positive) == pytest.approx(1 - np.mean(pairs), abs=1e-12)


def plain_statistic(function, *arrays):
    def statistic(counts):
        rows = (np.repeat(np.arange(counts.shape[1]), row.astype(np.int64)) for row in counts)
        return np.array([function(*(a[index] for a in arrays)) for index in rows], float)

    return statistic


def test_every_fast_statistic_is_the_plain_one_on_the_drawn_items():
    x, error = scene(3)
    y = x + np.random.default_rng(0).integers(0, 6, len(x))
    distinct = np.random.default_rng(1).permutation(len(x)).astype(float)
    risk = lambda u, e: risk_at_coverage(u, e, 0.3)
    rho = lambda a, b: scipy.stats.spearmanr(a, b).statistic
    deciles = lambda u, h: RecallByUncertainty.of(u, h).correlation
    shared = measures.risk_coverage_statistics(x, error)
    pairs = {
        "auroc": (measures.auroc_statistic(x, error), plain_statistic(measures.auroc, x, error)),
        "aurc": (measures.aurc_statistic(x, error), plain_statistic(aurc, x, error)),
        "excess": (shared["e_aurc"], plain_statistic(excess_aurc, x, error)),
        "gain": (shared["prr"], plain_statistic(prediction_rejection_ratio, x, error)),
        "risk": (measures.risk_statistic(x, error, 0.3), plain_statistic(risk, x, error)),
        "mean": (measures.mean_statistic(y), plain_statistic(np.mean, y)),
        "spearman": (measures.spearman_statistic(x, y), plain_statistic(rho, x, y)),
        "deciles": (measures.decile_statistic(distinct, error), plain_statistic(deciles, distinct, error)),
    }  # fmt: skip
    for groups in (None, np.arange(len(x)) // 5):
        sides = ({name: pair[k] for name, pair in pairs.items()} for k in (0, 1))
        fast, plain = (measures.bootstrap(side, len(x), n_resamples=40, groups=groups) for side in sides)
        for name, ours in fast.items():
            assert ours.low < ours.high, name
            assert tuple(vars(ours).values()) == pytest.approx(tuple(vars(plain[name]).values()), abs=1e-10), name


def test_undefined_figures_are_none_and_bad_input_is_named():
    only_right = measures.auroc_statistic(np.arange(4.0), np.zeros(4))
    assert measures.bootstrap({"a": only_right}, 4, n_resamples=9)["a"] == measures.Interval(None, None, None)
    assert np.isnan(prediction_rejection_ratio(np.arange(4.0), np.ones(4)))
    alone, ones = measures.Interval(1.0, None, None), measures.mean_statistic(np.ones(3))
    assert measures.bootstrap({"m": ones}, 3, n_resamples=0)["m"] == alone
    assert measures.percentile_interval(1.0, np.array([np.nan, np.nan, 1.0])) == alone
    constant = measures.spearman_statistic(np.zeros(5), np.arange(5.0))
    assert measures.bootstrap({"s": constant}, 5, n_resamples=9)["s"].value is None
    assert measures.bootstrap({"m": measures.mean_statistic(np.empty(0))}, 0)["m"].value is None
    good = torch.tensor([0.5])
    raises(ValueError, r"\[0, 1\]", reliability_curve, torch.tensor([1.5]), good)
    raises(ValueError, r"\[0, 1\]", reliability_curve, torch.tensor([torch.nan]), good)
    raises(ValueError, "n_bins", reliability_curve, good, good, n_bins=0)
    for function in (reliability_curve, reliability.brier_score):
        raises(ValueError, r"must be \(k,\)", function, torch.zeros(2), torch.zeros(3))
    raises(ValueError, "k >= 1", reliability.expected_calibration_error, torch.zeros(0), torch.zeros(0))


def test_balanced_spearman_and_its_resamples_are_exact_of_whole_bins_seeded_otherwise_and_see_ties():
    random = np.random.default_rng(4)
    multiplicity = np.concatenate([random.integers(1, 4, 200), random.integers(4, 40, 60)])
    x = np.log(multiplicity) + random.normal(size=260)
    measured = {"x": x, "flat": np.zeros(260), "same": x}
    drawn = measures.resampled_balanced_spearman(measured, multiplicity, n_resamples=300, seed=1)
    assert drawn["x"].shape == (300,) and (drawn["x"] == drawn["same"]).all() and np.isnan(drawn["flat"]).all()
    # 300 resamples: the mean is within five standard errors of the value on the data, and a bias of 0.03 is allowed for
    # ties.
    gap = abs(drawn["x"].mean() - measures.balanced_spearman(x, multiplicity))
    assert gap < 5 * drawn["x"].std() / np.sqrt(300) + 0.03
    # Everything in one set: each draw is the plain correlation of its resample.
    whole = measures.resampled_balanced_spearman({"x": x}, multiplicity, per_bin=1000, n_resamples=200, n_sets=1)["x"]
    assert abs(whole.mean() - measures.spearman(x, multiplicity)) < 0.03 and 0.01 < whole.std() < 0.1
    assert np.isnan(measures.resampled_balanced_spearman({"x": x}, np.ones(260), n_resamples=3)["x"]).all()
    values, chosen = random.integers(0, 4, 30), random.integers(0, 30, (20, 11))
    np.testing.assert_array_equal(measures._row_ranks(values, chosen), scipy.stats.rankdata(values[chosen], axis=1) - 1)
    random = np.random.default_rng(4)
    multiplicity, x = random.integers(1, 40, 60), random.normal(size=60)
    whole = measures.balanced_spearman(x, multiplicity, per_bin=60, n_sets=3)
    assert whole == pytest.approx(scipy.stats.spearmanr(x, multiplicity).statistic)
    draws = [measures.balanced_spearman(x, multiplicity, per_bin=3, n_sets=7, seed=s) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert np.isnan(measures.balanced_spearman(x, np.ones(60)))
    # 500 items of multiplicity 1 and 2 with noise in x, and 5 in each higher power of two where x follows exactly.
    random = np.random.default_rng(3)
    multiplicity = np.concatenate([random.integers(1, 3, 500), np.repeat(2 ** np.arange(2, 8), 5)])
    x = np.where(multiplicity > 2, multiplicity, random.normal(1.5, 1.0, len(multiplicity)))
    plain, balanced = measures.spearman(x, multiplicity), measures.balanced_spearman(x, multiplicity, per_bin=5)
    assert balanced > 0.8 > 0.5 > plain


@pytest.mark.parametrize("levels", [2, 4, 50, 10**9])
def test_correlations_equal_scipys(levels):
    random = np.random.default_rng(levels)
    for _ in range(10):
        x = random.integers(0, levels, 37)
        y = x * random.integers(0, 2, 37) + random.integers(0, levels, 37)
        assert measures.spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
        np.testing.assert_allclose(measures.average_ranks(x), scipy.stats.rankdata(x) - 1)
        assert measures.pearson(x, y) == pytest.approx(scipy.stats.pearsonr(x, y).statistic, abs=1e-12)
    for x, y in ((np.zeros(5), np.arange(5)), (np.array([1.0]), np.array([2.0]))):
        assert np.isnan(measures.spearman(x, y))


def test_recall_by_uncertainty_worked_by_hand_in_ten_bins_of_equal_size():
    uncertainty = np.array([5.0, 1.0, 3.0, 2.0, 4.0, 9.0, 9.0])
    hit = np.array([0, 1, 0, 1, 1, 0, np.nan])
    result = RecallByUncertainty.of(torch.from_numpy(uncertainty), hit, n_bins=3)
    bins = (1.5, 1.0), (3.5, 0.5), (7.0, 0.0)  # Without the NaN: in order 1 2 | 3 4 | 5 9, hits 1 1 | 0 1 | 0 0.
    assert result.bins == [{"uncertainty": u, "recall": recall, "count": 2} for u, recall in bins]
    assert result.correlation == pytest.approx(-1)
    assert result.spearman == pytest.approx(scipy.stats.spearmanr(uncertainty[:6], hit[:6]).statistic)
    assert result == RecallByUncertainty(**vars(result)) and "6 queries in 3 groups" in repr(result)
    uncertainty = np.random.default_rng(0).permutation(1003) / 1003
    rises = RecallByUncertainty.of(uncertainty, (uncertainty > 0.55).astype(float))
    assert [b["count"] for b in rises.bins] == [101] * 3 + [100] * 7 and rises.correlation > 0.8
    constant = RecallByUncertainty.of(np.zeros(20), np.arange(20) % 2)
    assert constant.correlation is None and constant.spearman is None
    few = RecallByUncertainty.of(np.array([1.0, 2.0]), np.array([1.0, 0.0]))
    assert [b["count"] for b in few.bins] == [1, 1]


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
    assert f"{found.correlation:.2f}" in axes.get_title(loc="left") and found.plot(axes) is axes
    odd = RecallByUncertainty.of(np.array([1.0, np.inf]), np.ones(2), n_bins=2).plot()
    assert odd.get_xticklabels()[1].get_text() == "∞"
    assert "correlation of group and recall undefined" in odd.get_title(loc="left")


@pytest.mark.parametrize(("binning", "probability", "match", "bins", "ece"), [  # (count, mean probability, observed)
    ("width", [0.0, 0.1, 0.5, 0.6, 0.9, 1.0], [0, 1, 0, 1, 1, 1], [(2, 0.05, 0.5), (4, 0.75, 0.75)], 0.9 / 6),
    ("width", [0.9, 0.01, 0.02, 0.03, 0.04], [1, 0, 0, 0, 1], [(4, 0.025, 0.25), (1, 0.9, 1)], 0.2),
    ("count", [0.9, 0.01, 0.02, 0.03, 0.04], [1, 0, 0, 0, 1], [(3, 0.02, 0), (2, 0.47, 1)], (0.06 + 1.06) / 5),
])  # fmt: skip
def test_bins_worked_by_hand(binning, probability, match, bins, ece):
    probability, match = torch.tensor(probability), torch.tensor(match, dtype=torch.float32)
    curve = reliability_curve(probability, match, n_bins=2, binning=binning)
    found = [tuple(b[key] for key in ("count", "probability", "observed")) for b in curve]
    assert found == list(map(pytest.approx, bins))
    assert reliability.expected_calibration_error(probability, match, n_bins=2, binning=binning) == pytest.approx(ece)
    by_default = reliability.expected_calibration_error(probability, match, n_bins=2)
    assert by_default == reliability.expected_calibration_error(probability, match, n_bins=2, binning="count")
    slow = sum((p - y) ** 2 for p, y in zip(probability.tolist(), match.tolist(), strict=True)) / len(match)
    assert reliability.brier_score(probability, match) == pytest.approx(slow)


def test_intervals_of_means_and_binomials_are_scipys_and_resamples_seeded_and_common():
    for hits, n in itertools.product((0, 2, 8), (8, 20, 400)):
        expected = scipy.stats.binomtest(hits, n).proportion_ci(method="wilson")
        assert wilson_interval(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-12), (hits, n)
    assert wilson_interval(0.25, 0) == (0.0, 1.0)
    for k, n in ((0, 1), (0, 29), (3, 10), (10, 10), (0, 0), (40, 3000), (2999, 3000)):
        for p in (0.0, 1e-5, 0.02, 0.5, 0.97, 1.0):
            right = scipy.stats.binom.cdf(k, n, p)
            assert reliability.binomial_tail(k, n, p) == pytest.approx(right, rel=1e-9, abs=1e-12), (k, n, p)
    values = np.random.default_rng(5).exponential(size=400)
    ours = measures.bootstrap({"mean": measures.mean_statistic(values)}, 400, n_resamples=4000, seed=1)["mean"]
    theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=4000, method="percentile", rng=0).confidence_interval
    # The deviation of a 2.5 % percentile of 4,000 draws is about 0.04 standard errors: 0.25 of one is six of them.
    error = values.std() / 20
    assert abs(ours.low - theirs.low) < 0.25 * error and abs(ours.high - theirs.high) < 0.25 * error
    assert ours.low == pytest.approx(values.mean() - 1.96 * error, abs=0.3 * error)
    x, error = scene(9)
    both = {"a": measures.auroc_statistic(x, error), "b": measures.auroc_statistic(x, error)}
    first = measures.bootstrap(both, len(x), n_resamples=50, seed=7)
    assert first["a"] == first["b"] != measures.bootstrap(both, len(x), n_resamples=50, seed=8)["a"]
    assert measures.bootstrap(both, len(x), n_resamples=50, seed=7, max_counts=7 * len(x)) == first


@pytest.mark.parametrize("loss, n, limit", [(0.0, 10, 0.3), (0.1, 30, 0.2), (0.17, 600, 0.2), (0.19, 5000, 0.2)])
def test_p_values_of_mean_losses_are_scipys_bounds_of_hoeffding_and_bentkus(loss, n, limit):
    hoeffding = math.exp(-n * scipy.stats.entropy([loss, 1 - loss], [limit, 1 - limit]))
    bentkus = math.e * scipy.stats.binom.cdf(math.ceil(n * loss - 1e-9), n, limit)
    assert mean_loss_p_value(loss, n, limit) == pytest.approx(min(hoeffding, bentkus, 1), rel=1e-9)
    assert mean_loss_p_value(limit, n, limit) == mean_loss_p_value(0.0, 0, limit) == 1
