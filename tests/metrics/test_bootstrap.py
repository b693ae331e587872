"""Tables worked by hand, loops, scikit-learn and scipy, and how often a 95 % interval holds the truth."""

import itertools

import numpy as np
import pytest
import scipy

from sfumato.metrics import bootstrap as measures
from sfumato.metrics.bootstrap import (
    Interval,
    _row_ranks,
    auroc,
    balanced_spearman,
    bootstrap,
    mean_statistic,
    on_all,
    percentile_interval,
    resampled_balanced_spearman,
    spearman,
)
from sfumato.metrics.reliability import RecallByUncertainty

aurc, excess_aurc, prediction_rejection_ratio, risk_at_coverage = (
    lambda u, e, *given, statistic=statistic: on_all(statistic(u, e, *given), len(u))
    for statistic in (
        measures.aurc_statistic,
        lambda u, e: measures.risk_coverage_statistics(u, e)["e_aurc"],
        lambda u, e: measures.risk_coverage_statistics(u, e)["prr"],
        measures.risk_statistic,
    )
)


def scene(seed, n=57, levels=8):
    """Uncertainties with ties, and errors that follow them a little."""
    random = np.random.default_rng(seed)
    uncertainty = random.integers(0, levels, n).astype(float)
    return uncertainty, (random.random(n) < 0.2 + 0.5 * uncertainty / levels).astype(float)


def test_auroc_by_hand_and_by_pairs():
    assert auroc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([0, 0, 1, 1])) == 0.875
    assert auroc(np.array([1.0, 2.0, 3.0]), np.array([True, False, False])) == 0
    for seed in range(5):
        score, positive = scene(seed)
        pairs = [(p > q) + 0.5 * (p == q) for p, q in itertools.product(score[positive == 1], score[positive == 0])]
        assert auroc(score, positive) == pytest.approx(np.mean(pairs), abs=1e-12)
        assert auroc(-score, positive) == pytest.approx(1 - np.mean(pairs), abs=1e-12)


def test_infinite_scores_keep_their_place():
    assert auroc(np.array([-np.inf, -np.inf, 0.0, np.inf]), np.array([0, 1, 0, 1])) == pytest.approx(0.625)
    assert aurc(np.full(4, -np.inf), np.array([1.0, 0, 0, 1])) == pytest.approx(0.5)


def test_aurc_by_hand():
    # Sorted by uncertainty the errors are 0 1 0 1: risks 0, 1/2, 1/3, 1/2.
    uncertainty, error = np.array([3.0, 1.0, 4.0, 2.0]), np.array([0.0, 0.0, 1.0, 1.0])
    assert aurc(uncertainty, error) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    # The best order is 0 0 1 1: risks 0, 0, 1/3, 1/2; chance is 1/2.
    best = (1 / 3 + 1 / 2) / 4
    assert excess_aurc(uncertainty, error) == pytest.approx((1 / 2) / 4)
    assert prediction_rejection_ratio(uncertainty, error) == pytest.approx(1 - (1 / 8) / (1 / 2 - best))
    assert (prediction_rejection_ratio(error, error), excess_aurc(error, error)) == pytest.approx((1, 0))
    assert prediction_rejection_ratio(np.zeros(4), error) == pytest.approx(0, abs=1e-12)
    assert prediction_rejection_ratio(-error, error) < -0.5
    assert aurc(np.zeros(4), error) == pytest.approx(0.5)
    assert [risk_at_coverage(uncertainty, error, c) for c in (0.25, 0.26, 0.5, 0.6, 1.0)] == pytest.approx(
        [0, 1 / 2, 1 / 2, 1 / 3, 1 / 2]
    )


def test_aurc_with_ties_is_the_mean_over_all_orders():
    uncertainty, error = np.array([1.0, 2.0, 2.0, 2.0, 3.0, 3.0]), np.array([0.0, 1.0, 0.0, 0.5, 1.0, 0.0])
    areas, risks = [], []
    for middle, end in itertools.product(itertools.permutations([1, 2, 3]), itertools.permutations([4, 5])):
        order = [0, *middle, *end]
        curve = np.cumsum(error[order]) / np.arange(1, 7)
        areas.append(curve.mean())
        risks.append(curve[2])
    assert np.ptp(areas) > 0.05
    assert aurc(uncertainty, error) == pytest.approx(np.mean(areas), abs=1e-12)
    assert risk_at_coverage(uncertainty, error, 0.5) == pytest.approx(np.mean(risks), abs=1e-12)


def test_coverage_is_rounded_up_and_not_by_floating_point():
    # 0.1 * 30 is a little more than 3: three items, none of which is wrong.
    error = np.r_[np.zeros(3), np.ones(27)]
    assert risk_at_coverage(np.arange(30.0), error, 0.1) == 0
    assert risk_at_coverage(np.arange(30.0), error, 0.101) == 0.25


def plain_statistic(function, *arrays):
    """Any function of (k,) arrays, called once for each resample on the items that are in it."""

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
        "auroc": (measures.auroc_statistic(x, error), plain_statistic(auroc, x, error)),
        "aurc": (measures.aurc_statistic(x, error), plain_statistic(aurc, x, error)),
        "excess": (shared["e_aurc"], plain_statistic(excess_aurc, x, error)),
        "gain": (shared["prr"], plain_statistic(prediction_rejection_ratio, x, error)),
        "risk": (measures.risk_statistic(x, error, 0.3), plain_statistic(risk, x, error)),
        "mean": (mean_statistic(y), plain_statistic(np.mean, y)),
        "spearman": (measures.spearman_statistic(x, y), plain_statistic(rho, x, y)),
        "deciles": (measures.decile_statistic(distinct, error), plain_statistic(deciles, distinct, error)),
    }  # fmt: skip
    for groups in (None, np.arange(len(x)) // 5):
        fast, plain = (
            bootstrap({name: pair[k] for name, pair in pairs.items()}, len(x), n_resamples=40, groups=groups)
            for k in (0, 1)
        )
        for name, ours in fast.items():
            assert ours.low < ours.high, name
            assert tuple(vars(ours).values()) == pytest.approx(tuple(vars(plain[name]).values()), abs=1e-10), name


def test_intervals_of_a_mean_are_scipys_and_those_of_theory():
    values = np.random.default_rng(5).exponential(size=400)
    ours = bootstrap({"mean": mean_statistic(values)}, 400, n_resamples=4000, seed=1)["mean"]
    theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=4000, method="percentile", rng=0).confidence_interval
    # The deviation of a 2.5 % percentile of 4,000 draws is about 0.04 standard errors: 0.25 of one is six of them.
    error = values.std() / 20
    assert abs(ours.low - theirs.low) < 0.25 * error and abs(ours.high - theirs.high) < 0.25 * error
    assert ours.low == pytest.approx(values.mean() - 1.96 * error, abs=0.3 * error)


def test_95_percent_intervals_hold_the_truth_95_times_in_a_hundred():
    # 300 data sets; a binomial with p = 0.95 (0.94 for the percentile method at n = 150) has a deviation of 1.3 %:
    # outside of [0.90, 0.985] in fewer than 1 of 1,000 seeds (and the seed is fixed). The true AUROC of N(1,1) against
    # N(0,1) is 0.7602.
    ground_truth, random, held = scipy.stats.norm.cdf(1 / np.sqrt(2)), np.random.default_rng(0), 0
    for _ in range(300):
        positive = random.random(150) < 0.4
        score = random.normal(size=150) + positive
        found = bootstrap({"a": measures.auroc_statistic(score, positive)}, 150, n_resamples=400)["a"]
        held += found.low <= ground_truth <= found.high
    assert 0.90 <= held / 300 <= 0.985


def test_items_that_belong_together_are_resampled_together():
    # Five equal copies of each of 80 values: the interval is that of 80, about sqrt(5) as wide as if all 400 were
    # independent.
    values = np.repeat(np.random.default_rng(2).normal(size=80), 5)
    alone = bootstrap({"m": mean_statistic(values)}, 400, seed=3)["m"]
    together = bootstrap({"m": mean_statistic(values)}, 400, seed=3, groups=np.repeat(np.arange(80), 5))["m"]
    assert (together.high - together.low) / (alone.high - alone.low) == pytest.approx(np.sqrt(5), rel=0.15)


def test_resamples_are_seeded_and_common_and_chunks_change_nothing():
    x, error = scene(9)
    both = {"a": measures.auroc_statistic(x, error), "b": measures.auroc_statistic(x, error)}
    first = bootstrap(both, len(x), n_resamples=50, seed=7)
    assert first["a"] == first["b"] != bootstrap(both, len(x), n_resamples=50, seed=8)["a"]
    assert bootstrap(both, len(x), n_resamples=50, seed=7, max_counts=7 * len(x)) == first


def test_undefined_figures_are_none():
    only_right = measures.auroc_statistic(np.arange(4.0), np.zeros(4))
    assert bootstrap({"a": only_right}, 4, n_resamples=9)["a"] == Interval(None, None, None)
    assert np.isnan(prediction_rejection_ratio(np.arange(4.0), np.ones(4)))
    assert bootstrap({"m": mean_statistic(np.ones(3))}, 3, n_resamples=0)["m"] == Interval(1.0, None, None)
    assert percentile_interval(1.0, np.array([np.nan, np.nan, 1.0])) == Interval(1.0, None, None)
    constant = measures.spearman_statistic(np.zeros(5), np.arange(5.0))
    assert bootstrap({"s": constant}, 5, n_resamples=9)["s"].value is None
    assert bootstrap({"m": mean_statistic(np.empty(0))}, 0)["m"].value is None


def test_balanced_resamples_are_centred_on_the_balanced_correlation_and_see_ties():
    random = np.random.default_rng(4)
    multiplicity = np.concatenate([random.integers(1, 4, 200), random.integers(4, 40, 60)])
    x = np.log(multiplicity) + random.normal(size=260)
    drawn = resampled_balanced_spearman(
        {"x": x, "flat": np.zeros(260), "same": x}, multiplicity, n_resamples=300, seed=1
    )
    assert drawn["x"].shape == (300,) and (drawn["x"] == drawn["same"]).all() and np.isnan(drawn["flat"]).all()
    # 300 resamples: the mean is within five standard errors of the value on the data, and a bias of 0.03 is allowed for
    # ties.
    assert abs(drawn["x"].mean() - balanced_spearman(x, multiplicity)) < 5 * drawn["x"].std() / np.sqrt(300) + 0.03
    # Everything in one set: each draw is the plain correlation of its resample.
    whole = resampled_balanced_spearman({"x": x}, multiplicity, per_bin=1000, n_resamples=200, n_sets=1)["x"]
    assert abs(whole.mean() - spearman(x, multiplicity)) < 0.03 and 0.01 < whole.std() < 0.1
    assert np.isnan(resampled_balanced_spearman({"x": x}, np.ones(260), n_resamples=3)["x"]).all()
    values, chosen = random.integers(0, 4, 30), random.integers(0, 30, (20, 11))
    np.testing.assert_array_equal(_row_ranks(values, chosen), scipy.stats.rankdata(values[chosen], axis=1) - 1)
