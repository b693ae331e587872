"""Curves of uncertainty against slow loops and scipy."""

import numpy as np
import pytest
import torch
from scipy import stats

from sfumato import ESTIMATORS, GaussianEmbedding
from sfumato.evaluation.estimators import Matching, estimate_uncertainty
from sfumato.evaluation.trust import Corrupted, measure_trust
from sfumato.metrics.relevance import Relevance
from sfumato.studies.corruption import corruption_curves


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
    found = corruption_curves(
        queries, gallery, ground_truth, matching, [corrupted], estimator=ESTIMATORS[name], n_resamples=400, seed=1
    )["made up"]
    steps = [queries[torch.from_numpy(corrupted.index)], *corrupted.embeddings]
    u = np.array([ESTIMATORS[name](e, gallery, matching) for e in steps])  # (s, k)
    assert [m.value for m in found.mean] == pytest.approx(u.mean(1).tolist())
    each = [stats.spearmanr([0, 0.5, 1, 2], values).statistic for values in u.T]
    assert found.spearman.value == pytest.approx(np.mean(each))
    assert found.spearman.value != pytest.approx(stats.spearmanr(np.repeat([0, 0.5, 1, 2], 7), u.ravel()).statistic)
    assert found.rises.value == pytest.approx(np.mean(u[-1] > u[0]))
    assert found.monotone.value == pytest.approx(np.mean((np.diff(u, axis=0) >= 0).all(0)))
    assert found.auroc.value == pytest.approx(np.mean(u[-1][:, None] > u[0]))
    recall = []
    for e in steps:
        d = (e.mean[:, None] - gallery.mean).square().sum(2) + gallery.var.sum(1)
        recall.append(float(np.mean(d.argmin(1).numpy() == corrupted.index)))
    assert found.recall == pytest.approx(recall) and found.strengths == [0, 0.5, 1, 2] and found.n == 7
    # A mean's interval is about 1.96 standard errors on either side, of few items somewhat less.
    for interval, values in zip(found.mean, u, strict=True):
        error = values.std() / np.sqrt(7)
        assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.25)


@pytest.mark.parametrize("groups", [None, np.arange(12) // 4])
def test_curves_and_the_benchmark_of_trust_say_the_same(groups):
    queries, gallery, ground_truth, corrupted = scene(seed=3)
    matching, options = Matching("csd", 2.0, 3.0), {"n_resamples": 50, "seed": 2, "groups": groups}
    chosen = {name: ESTIMATORS[name] for name in ("total_variance", "margin")}
    trust = measure_trust(queries, gallery, ground_truth, matching, estimators=chosen, corrupted=[corrupted], **options)
    theirs = trust.corruptions["made up"]
    for name, estimator in chosen.items():
        own = corruption_curves(queries, gallery, ground_truth, matching, [corrupted], estimator=estimator, **options)[
            "made up"
        ]
        for figure in ("spearman", "rises", "monotone", "auroc"):
            assert getattr(own, figure) == theirs.estimators[name][figure]
        assert [m.value for m in own.mean] == pytest.approx([m.value for m in theirs.means[name]], rel=1e-6)
        assert own.recall == theirs.recall


def test_items_of_a_group_are_resampled_together():
    """Every item twice, in one group with itself, tells no more than every item once."""
    queries, gallery, ground_truth, once = scene(seed=4)
    rows = np.repeat(np.arange(len(once.index)), 2)
    worse = tuple(e[torch.from_numpy(rows)] for e in once.embeddings)
    twice = Corrupted("made up", once.index[rows], once.strengths, worse)
    estimator = ESTIMATORS["total_variance"]

    def curve(corrupted, groups):
        return corruption_curves(
            queries, gallery, ground_truth, Matching(), [corrupted], estimator=estimator, groups=groups, n_resamples=200
        )["made up"]

    def benchmark(corrupted, groups):
        found = measure_trust(
            queries, gallery, ground_truth, Matching(), estimators={"total_variance": estimator}, corrupted=[corrupted],
            groups=groups, n_resamples=200,
        )  # fmt: skip
        return found.corruptions["made up"].estimators["total_variance"]

    each = np.arange(queries.n)
    for figures in (lambda *a: vars(curve(*a)), benchmark):
        alone, together, apart = figures(once, None), figures(twice, each), figures(twice, None)
        for name in ("spearman", "rises", "auroc"):
            assert vars(together[name]) == pytest.approx(vars(alone[name]))
            assert apart[name].high - apart[name].low < 0.95 * (alone[name].high - alone[name].low), name


def test_an_infinite_mean_is_undefined():
    queries, gallery, ground_truth, corrupted = scene()
    points = Corrupted("made up", corrupted.index, (1.0,), (GaussianEmbedding.point(corrupted.embeddings[0].mean),))
    found = corruption_curves(
        queries,
        gallery,
        ground_truth,
        Matching("csd", 2.0, 3.0),
        [points],
        estimator=ESTIMATORS["log_det"],
        n_resamples=9,
    )["made up"]
    assert found.mean[1].value is None and found.mean[0].value == pytest.approx(
        float(
            estimate_uncertainty(
                queries[torch.from_numpy(corrupted.index)],
                gallery,
                Matching(),
                estimators={"log_det": ESTIMATORS["log_det"]},
            )["log_det"].mean()
        )
    )
    assert found.rises.value == 0
