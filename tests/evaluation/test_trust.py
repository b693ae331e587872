"""The benchmark on scenes whose answer is known: figures by loops, and estimators that are right, wrong or blind by
construction."""

import itertools
import json

import numpy as np
import pytest
import scipy
import torch
from support.raising import raises
from support.references_metrics import csd_by_loops

from sfumato import DISTANCES, GaussianEmbedding, RecallByUncertainty, Relevance, measure_trust
from sfumato.evaluation import trust
from sfumato.evaluation.estimators import ESTIMATORS, Matching, estimate_uncertainty, usable_estimators
from sfumato.metrics.bootstrap import balanced_spearman

N, M, D = 41, 29, 4
MATCHING = Matching("csd", 0.8, 1.0, direction="t2i")
QUICK = {"n_resamples": 20}


def scene(seed=0):
    """Queries near the mean of their true items; a fifth of them has none; some have many."""
    random = np.random.default_rng(seed)
    ground_truth = random.random((N, M)) < random.choice([0.04, 0.1, 0.4], size=(N, 1))
    ground_truth[::5] = False
    generator = torch.Generator().manual_seed(seed)
    items = 2 * torch.randn(M, D, generator=generator)
    share = torch.from_numpy(ground_truth / np.maximum(ground_truth.sum(1, keepdims=True), 1)).float()
    mean = share @ items + torch.randn(N, D, generator=generator)
    queries = GaussianEmbedding(mean, torch.randn(N, D, generator=generator) - 1)
    gallery = GaussianEmbedding(items, torch.randn(M, D, generator=generator) - 1)
    return queries, gallery, Relevance.from_pairs(*np.nonzero(ground_truth), n_queries=N, n_gallery=M), ground_truth


by_pairs = lambda low, high: np.mean([(b > a) + 0.5 * (a == b) for a, b in itertools.product(low, high)])


def test_every_figure_of_every_estimator_by_loops():
    queries, gallery, relevance, ground_truth = scene()
    has = ground_truth.any(1)
    distance = csd_by_loops(gallery.mean.numpy(), gallery.var.numpy(), queries.mean.numpy(), queries.var.numpy()).T
    hit = ground_truth[np.arange(N), distance.argmin(1)][has].astype(float)
    assert 0.2 < hit.mean() < 0.8
    result = measure_trust(queries, gallery, relevance, MATCHING, multiplicity=True, **QUICK)
    scores = estimate_uncertainty(queries[torch.from_numpy(has)], gallery, MATCHING)
    assert (result.n_queries, result.n_gallery) == (has.sum(), M) and result.recall.value == pytest.approx(hit.mean())
    order = np.sort(1 - hit)
    assert result.risk_best.value == pytest.approx((np.cumsum(order) / np.arange(1, len(hit) + 1)).mean())
    enough = M - ground_truth[has].sum(1) >= 10
    assert result.n_out_of_gallery == enough.sum()
    rests = {i: gallery[torch.from_numpy(~ground_truth[i])] for i in np.flatnonzero(has)[enough]}
    absent = [estimate_uncertainty(queries[i : i + 1], rest, MATCHING) for i, rest in rests.items()]
    for name, u in scores.items():
        figures = result.estimators[name]
        assert figures["wrong_auroc"].value == pytest.approx(by_pairs(u[hit == 1], u[hit == 0])), name
        sorted_error = (1 - hit)[np.argsort(u)]
        risks = np.cumsum(sorted_error) / np.arange(1, len(hit) + 1)
        assert figures["wrong_aurc"].value == pytest.approx(risks.mean()), name
        assert figures["wrong_excess_aurc"].value == pytest.approx(risks.mean() - result.risk_best.value), name
        gain = (1 - hit.mean() - risks.mean()) / (1 - hit.mean() - result.risk_best.value)
        assert figures["wrong_gain"].value == pytest.approx(gain), name
        assert figures["risk_at_half"].value == pytest.approx(risks[int(np.ceil(len(hit) / 2)) - 1]), name
        expected = vars(RecallByUncertainty.of(u, hit))
        assert figures["deciles"].value == pytest.approx(expected["correlation"]), name
        assert result.deciles[name] == pytest.approx([b["recall"] for b in expected["bins"]]), name
        counts = ground_truth[has].sum(1)
        assert figures["multiplicity"].value == pytest.approx(scipy.stats.spearmanr(u, counts).statistic), name
        assert figures["multiplicity_balanced"].value == pytest.approx(balanced_spearman(u, counts)), name
        assert ("out_of_gallery" in figures) == ESTIMATORS[name].needs_gallery
        if ESTIMATORS[name].needs_gallery:
            expected = by_pairs(u[enough], [each[name][0] for each in absent])
            assert figures["out_of_gallery"].value == pytest.approx(expected, abs=0.01), name
        for figure, interval in figures.items():
            assert figure in trust.FIGURES and interval.low <= interval.high, (name, figure)


def test_kl_goes_from_image_to_text_whoever_asks():
    texts, images, relevance, ground_truth = scene(6)
    has, matrix = ground_truth.any(1), DISTANCES["kl"].matrix(images, texts).numpy().T
    chosen = {"nearest_mean": ESTIMATORS["nearest_mean"]}
    found = measure_trust(texts, images, relevance, Matching("kl", 1, 0, "t2i"), estimators=chosen, **QUICK)
    assert found.recall.value == pytest.approx(ground_truth[np.arange(N), matrix.argmin(1)][has].mean())
    other = measure_trust(texts, images, relevance, Matching("kl", 1, 0, "i2t"), estimators=chosen, **QUICK)
    assert other.right_pairs.value != found.right_pairs.value
    # The pairs are drawn with the same seed: true and random distances from the matrix of the right direction.
    pairs = trust.random_pairs(relevance.select_queries(np.flatnonzero(has)), np.random.default_rng(0))
    own = matrix[has]
    assert ground_truth[has][pairs[:, 0], pairs[:, 1]].all() and not ground_truth[has][pairs[:, 0], pairs[:, 2]].any()
    expected = by_pairs(own[pairs[:, 0], pairs[:, 1]], own[pairs[:, 0], pairs[:, 2]])
    assert found.right_pairs.value == pytest.approx(expected, abs=0.002)


def test_proxies_of_captions_are_judged_by_spearman():
    queries, gallery, relevance, ground_truth = scene(3)
    values = np.random.default_rng(0).random(N)
    values[[1, 2]] = np.nan
    result = measure_trust(queries, gallery, relevance, MATCHING, proxies={"caption_words": values}, **QUICK)
    use = ground_truth.any(1) & ~np.isnan(values)
    u, found = queries.total_variance.numpy()[use], result.estimators["total_variance"]["caption_words"]
    assert found.value == pytest.approx(scipy.stats.spearmanr(u, values[use]).statistic)
    assert "multiplicity" not in result.estimators["total_variance"]
    relevance = Relevance.from_lists([[0, 1, 2], [3, 4], [5], []], n_gallery=6)
    mean = torch.tensor([[0.0, 0], [3, 4], [0, 1], [1, 1], [1, 1], [9, 9]])
    found = trust.caption_distance(GaussianEmbedding(mean, torch.zeros(6, 2)), relevance)
    np.testing.assert_allclose(found, [(25 + 1 + 18) / 3, 0, np.nan, np.nan])
    words = ["A red dog.", "a dog", "the dog runs", "Two men", "two  men!", "alone"]
    expected = 1 - (2 / 3 + 1 / 5 + 1 / 4) / 3
    np.testing.assert_allclose(trust.caption_words(words, relevance), [expected, 0, np.nan, np.nan])


def test_equal_seeds_give_equal_figures_and_scenes_without_wrong_or_true_items_are_told():
    everything = Relevance.from_lists([list(range(12))] * 9, n_gallery=12)
    gallery, queries = (GaussianEmbedding(torch.eye(n, 2), torch.zeros(n, 2)) for n in (12, 9))
    result = measure_trust(queries, gallery, everything, MATCHING, **QUICK)
    assert result.right_pairs.value is None and result.n_out_of_gallery == 0
    queries, gallery, relevance, _ = scene(4)
    options = QUICK | {"estimators": {name: ESTIMATORS[name] for name in ("margin", "nearest_mean")}}
    results = [measure_trust(queries, gallery, relevance, MATCHING, seed=s, **options) for s in (0, 0, 1)]
    assert results[0] == results[1] != results[2]
    nothing = Relevance.from_lists([[]] * N, n_gallery=M)
    raises(ValueError, "no query has a true item", measure_trust, queries, gallery, nothing, MATCHING, **options)


def test_points_have_no_variance_to_judge_and_all_the_rest():
    queries, gallery, relevance, _ = scene(7)
    queries, gallery = (GaussianEmbedding.point(x.mean) for x in (queries, gallery))
    usable = usable_estimators(queries, gallery)
    result = measure_trust(queries, gallery, relevance, MATCHING, estimators=usable, multiplicity=True, **QUICK)
    silent = {name for name, figures in result.estimators.items() if not figures}
    assert silent == {"total_variance"}
    report = trust.TrustReport("test", "csd", False, M, N, 20, 0.95, 0, trust.described(usable), {"t2i": result}, [])
    again = json.loads(json.dumps(report.to_json(), allow_nan=False))
    value = again["directions"]["t2i"]["estimators"]["margin"]["wrong_auroc"]
    assert value["low"] <= value["value"] <= value["high"] and again["estimators"]["margin"]["kind"] == "both"


def test_groups_widen_the_intervals_where_texts_have_one_image():
    # Five equal queries for each of 25 things: drawn together, the interval of the recall is about sqrt(5) as wide.
    generator = torch.Generator().manual_seed(5)
    items = torch.randn(25, 3, generator=generator)
    noisy = (items + 0.8 * torch.randn(25, 3, generator=generator)).repeat_interleave(5, 0)
    queries = GaussianEmbedding(noisy, torch.zeros(125, 3))
    gallery = GaussianEmbedding(items, torch.zeros(25, 3))
    ground_truth, widths = Relevance.from_lists([[i // 5] for i in range(125)], n_gallery=25), []
    for groups in (None, np.arange(125) // 5):
        r = measure_trust(queries, gallery, ground_truth, MATCHING, groups=groups, n_resamples=1000).recall
        widths.append(r.high - r.low)
    assert widths[1] / widths[0] == pytest.approx(np.sqrt(5), rel=0.2)
    few = Relevance.from_lists([[0, 1], [2], *[[k] for k in range(3, 11)]], n_gallery=11)
    many = Relevance.from_lists([[0, 1], [1, 2], *[[k] for k in range(3, 9)]], n_gallery=9)
    groups = np.arange(10)
    assert trust.resampled_together(few, groups, True).tolist() == [0, 0, 1, *range(2, 10)]
    shared = Relevance.from_lists([[0, 1], [1], *[[k] for k in range(2, 11)]], n_gallery=11)
    assert trust.resampled_together(shared, groups, True).tolist() == [0, 1, *range(2, 11)]
    assert (
        trust.resampled_together(many, groups, True) is None and trust.resampled_together(many, groups, False) is groups
    )
