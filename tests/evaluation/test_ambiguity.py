"""Rank correlations with the number of matches, and the baselines that every one of them stands beside."""

import itertools

import numpy as np
import pytest

from sfumato.evaluation import ambiguity
from sfumato.evaluation.ambiguity import FIGURES, baselines, measure_ambiguity
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.uncertainty import balanced_spearman, spearman


def truth(n=200, m=60, seed=0):
    random = np.random.default_rng(seed)
    sizes = np.minimum(m, np.round(np.exp(random.exponential(1.2, n)))).astype(int)
    return Relevance.from_lists([random.choice(m, k, replace=False) for k in sizes], n_gallery=m), random


def test_values_are_those_of_the_metrics_of_queries_with_a_match():
    relevance, random = truth()
    lists = [relevance.indices[start:end] for start, end in itertools.pairwise(relevance.indptr)]
    relevance = Relevance.from_lists([*lists[:7], [], *lists[8:]], n_gallery=60)
    values = random.normal(size=200) + np.log(np.maximum(relevance.counts, 1))
    found = measure_ambiguity({"mine": values}, relevance, n_resamples=0)["mine"]
    kept, few = relevance.counts > 0, (relevance.counts > 0) & (relevance.counts < 16)
    assert found["all"].value == pytest.approx(spearman(values[kept], relevance.counts[kept]))
    assert found["balanced"].value == pytest.approx(balanced_spearman(values[kept], relevance.counts[kept], n_sets=50))
    assert found["balanced_below_16"].value == pytest.approx(
        balanced_spearman(values[few], relevance.counts[few], n_sets=50)
    )


def test_a_constant_is_undefined_and_a_perfect_predictor_is_one():
    relevance, _ = truth()
    found = measure_ambiguity(
        {"constant": np.zeros(200), "truth": relevance.counts.astype(float)}, relevance, n_resamples=0
    )
    assert all(found["constant"][figure].value is None for figure in FIGURES)
    assert all(found["truth"][figure].value == pytest.approx(1) for figure in FIGURES)


def test_intervals_cover_a_known_correlation_and_noise_covers_zero(monkeypatch):
    monkeypatch.setattr(ambiguity, "balanced_spearman", lambda *_, **__: 0.0)  # Slow, and not looked at here.
    # 40 draws of the data; an interval of 90 % that covers less than 75 % of them has a chance below 1 %.
    covered = 0
    for seed in range(40):
        relevance, random = truth(seed=seed)
        found = measure_ambiguity({"noise": random.normal(size=200)}, relevance, n_resamples=60, level=0.9, seed=seed)
        interval = found["noise"]["all"]
        covered += interval.low <= 0 <= interval.high
    assert covered >= 30


def test_resampled_items_widen_the_interval():
    # One item matches half of the queries: whether it is drawn decides their counts.
    lists = [[0, 1] if k % 2 else [1] for k in range(100)]
    relevance = Relevance.from_lists(lists, n_gallery=2)
    values = np.array([k % 2 for k in range(100)], float)
    interval = measure_ambiguity({"mine": values}, relevance, n_resamples=100)["mine"]["all"]
    assert interval.value == pytest.approx(1) and interval.low <= interval.high


def test_another_number_of_queries_is_refused():
    relevance, _ = truth()
    with pytest.raises(ValueError, match="200 queries, but 'mine' has 3 values"):
        measure_ambiguity({"mine": np.zeros(3)}, relevance)


def test_baselines_by_hand():
    training = ["fox", "red fox", "dog"]
    features = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    found = baselines(
        ["fox", "a big dog"], np.array([[2.0, 0.0], [0.0, 3.0]]), training, features, np.array([4, 2, 1]), n_nearest=2
    )
    np.testing.assert_allclose(found["lookup"], [np.log(4), 0])
    np.testing.assert_allclose(found["nearest texts"], [np.log(8) / 2, np.log(2) / 2])
    np.testing.assert_allclose(found["few words"], [-1, -3])
