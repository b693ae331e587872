"""Curves of uncertainty against slow loops and scipy."""

import numpy as np
import pytest
import scipy
import torch

from papers.uncertainty.corruption import Corrupted, follow_corruption
from papers.uncertainty.estimators import ESTIMATORS
from sfumato import GaussianEmbedding
from sfumato.evaluation.estimators import Matching
from sfumato.metrics.relevance import Relevance


def scene(n=12, k=7, d=4, seed=0):
    random = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, d, generator=random)
    queries, gallery = (
        GaussianEmbedding(mean + 0.4 * torch.randn(n, d, generator=random), torch.randn(n, d, generator=random) - 2)
        for _ in "qg"
    )
    index = np.sort(np.random.default_rng(seed).permutation(n)[:k])
    rows = torch.from_numpy(index)
    worse = tuple(
        GaussianEmbedding(
            queries.mean[rows] + s * torch.randn(k, d, generator=random),
            queries.log_var[rows] + s * torch.randn(k, d, generator=random) + 0.3 * s,
        )
        for s in (0.5, 1.0, 2.0)
    )
    ground_truth = Relevance.from_pairs(np.arange(n), np.arange(n), n_queries=n, n_gallery=n)
    return queries, gallery, ground_truth, Corrupted("made up", index, (0.5, 1.0, 2.0), worse)


@pytest.mark.parametrize("name", ["total_variance", "expected_matches"])
def test_curves_are_those_of_loops(name):
    queries, gallery, ground_truth, corrupted = scene()
    matching = Matching("csd", 2.0, 3.0)
    found = follow_corruption(
        corrupted, queries, gallery, ground_truth, matching, ESTIMATORS[name], n_resamples=400, seed=1
    )
    steps = [queries[torch.from_numpy(corrupted.index)], *corrupted.embeddings]
    u = np.array([ESTIMATORS[name](e, gallery, matching) for e in steps])  # (s, k)
    assert [m["value"] for m in found["mean"]] == pytest.approx(u.mean(1).tolist())
    each = [scipy.stats.spearmanr([0, 0.5, 1, 2], values).statistic for values in u.T]
    assert found["spearman"]["value"] == pytest.approx(np.mean(each))
    assert found["spearman"]["value"] != pytest.approx(
        scipy.stats.spearmanr(np.repeat([0, 0.5, 1, 2], 7), u.ravel()).statistic
    )
    assert found["rises"]["value"] == pytest.approx(np.mean(u[-1] > u[0]))
    assert found["monotone"]["value"] == pytest.approx(np.mean((np.diff(u, axis=0) >= 0).all(0)))
    assert found["auroc"]["value"] == pytest.approx(np.mean(u[-1][:, None] > u[0]))
    recall = []
    for e in steps:
        d = (e.mean[:, None] - gallery.mean).square().sum(2) + gallery.var.sum(1)
        recall.append(float(np.mean(d.argmin(1).numpy() == corrupted.index)))
    assert found["recall"] == pytest.approx(recall) and found["strengths"] == [0, 0.5, 1, 2] and found["n"] == 7
    # A mean's interval is about 1.96 standard errors on either side, of few items somewhat less.
    for interval, values in zip(found["mean"], u, strict=True):
        error = values.std() / np.sqrt(7)
        assert interval["high"] - interval["low"] == pytest.approx(2 * 1.96 * error, rel=0.25)


def test_items_of_a_group_are_resampled_together():
    """Every item twice, in one group with itself, tells no more than every item once."""
    queries, gallery, ground_truth, once = scene(seed=4)
    rows = np.repeat(np.arange(len(once.index)), 2)
    worse = tuple(e[torch.from_numpy(rows)] for e in once.embeddings)
    twice = Corrupted("made up", once.index[rows], once.strengths, worse)

    def figures(corrupted, groups):
        estimator = ESTIMATORS["total_variance"]
        return follow_corruption(
            corrupted, queries, gallery, ground_truth, Matching(), estimator, groups=groups, n_resamples=200
        )

    each = np.arange(queries.n)
    alone, together, apart = figures(once, None), figures(twice, each), figures(twice, None)
    for name in ("spearman", "rises", "auroc"):
        assert together[name] == pytest.approx(alone[name])
        assert apart[name]["high"] - apart[name]["low"] < 0.95 * (alone[name]["high"] - alone[name]["low"]), name


def test_an_infinite_mean_is_undefined():
    queries, gallery, ground_truth, corrupted = scene()
    points = Corrupted("made up", corrupted.index, (1.0,), (GaussianEmbedding.point(corrupted.embeddings[0].mean),))
    log_det, matching = ESTIMATORS["log_det"], Matching("csd", 2.0, 3.0)
    found = follow_corruption(points, queries, gallery, ground_truth, matching, log_det, n_resamples=9)
    clean, infinite = found["mean"]
    expected = log_det(queries[torch.from_numpy(corrupted.index)], gallery, Matching()).mean()
    assert infinite["value"] is None and clean["value"] == pytest.approx(float(expected))
    assert found["rises"]["value"] == 0
