"""Every strategy of table C.7 against sorted lists made by loops, whatever the length of the list that FAISS brings."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from support.references_metrics import csd_by_loops, metrics_by_definition

from papers.runs.strategies import STRATEGIES, STRATEGY_SETS, FaissRanker, evaluate_strategies
from sfumato.evaluation.ground_truth import ground_truth_from_pairs, in_folds
from sfumato.evaluation.protocols import EmbeddedSet
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import UNLISTED, per_query_metrics, ranks_from_lists

N, M, D = 40, 80, 4
LISTED = ("recall@1", "recall@5", "recall@10", "r_precision", "map@r")
INDEXED = [s.name for s in STRATEGIES.values() if s.indexed]


def scene(seed=0, n=N, m=M):
    """Unnormalised means, variances that change the order, and images with one to 21 texts or more."""
    random = np.random.default_rng(seed)
    mean = random.normal(size=(n, D))
    own = np.sort(np.concatenate([np.arange(n), [5] * 20, random.integers(n, size=m - n - 20)]))
    text = mean[own] + 0.7 * random.normal(size=(m, D))
    spread = [random.normal(size=(k, 1)) + 0.3 * random.normal(size=(k, D)) - 1 for k in (n, m)]
    images, texts = (
        GaussianEmbedding(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip((mean, text), spread, strict=True)
    )
    names = [[f"{letter}{i}" for i in range(k)] for letter, k in (("i", n), ("t", m))]
    ground_truth = ground_truth_from_pairs("all", *names, [(f"i{i}", f"t{j}") for j, i in enumerate(own)])
    return images, texts, *names, ground_truth


def strategies_of(images, texts, image_ids, text_ids, ground_truths, *chosen, **options):
    return evaluate_strategies(EmbeddedSet(images, texts, image_ids, text_ids, ground_truths), *chosen, **options)


def rows(relevance):
    return [relevance.indices[a:b].tolist() for a, b in zip(relevance.indptr[:-1], relevance.indptr[1:], strict=True)]


def distance_of(name, images, texts):
    arrays = [x.numpy() for e in (images, texts) for x in (e.mean, e.var)]
    if name == "csd":
        return csd_by_loops(*arrays)
    means = cdist(arrays[0], arrays[2], "sqeuclidean")
    return means + cdist(np.sqrt(arrays[1]), np.sqrt(arrays[3]), "sqeuclidean") * (name == "wasserstein2")


def expected_order(name, images, texts, candidates, direction):
    """(queries, gallery) numbers in the strategy's order; re-ranking: csd among the closest means, then the rest."""
    strategy = STRATEGIES[name]
    final = distance_of(strategy.distance, images, texts)
    means = distance_of("squared_l2", images, texts)
    if direction == "t2i":
        final, means = final.T, means.T
    if not strategy.reranks:
        return final
    place = means.argsort(axis=1, kind="stable").argsort(axis=1)
    behind = final.max() + 1 + place
    return np.where(place < candidates, final, behind)


@pytest.mark.parametrize("engine", ["exact", "ivf", "hnsw"])
@pytest.mark.parametrize("candidates", [1, 7, 100])
def test_every_strategy_by_loops(engine, candidates):
    """Approximate engines too, told to look everywhere. 7 candidates are fewer than the positives of some queries."""
    if engine != "exact":
        pytest.importorskip("faiss", reason="needs the extra faiss")
    images, texts, image_ids, text_ids, ground_truth = scene()
    assert ground_truth.i2t.counts.max() > 12 and ground_truth.i2t.counts.min() == 1
    results = strategies_of(images, texts, image_ids, text_ids, [ground_truth], engine=engine, candidates=candidates)
    assert list(results) == list(STRATEGY_SETS["all"])
    for name, result in results.items():
        assert result.seconds > 0 and result.strategy is STRATEGIES[name]
        for direction, relevance in (("i2t", ground_truth.i2t), ("t2i", ground_truth.t2i)):
            order = expected_order(name, images, texts, candidates, direction)
            expected = metrics_by_definition(order, rows(relevance))
            found = result.figures["all"][direction]
            for metric in LISTED:
                assert found[metric] == pytest.approx(expected[metric], abs=1e-12), (name, direction, metric)
            if name in INDEXED:
                assert "median_rank" not in found and "mean_rank" not in found
            else:
                assert found["mean_rank"] == pytest.approx(expected["mean_rank"])


def test_folds_have_lists_of_their_own():
    """Ten items of a whole list may hold none of a fold: each fold is searched by itself."""
    images, texts, image_ids, text_ids, ground_truth = scene()
    folds = in_folds(ground_truth, 4, name="folds")
    results = strategies_of(images, texts, image_ids, text_ids, [ground_truth, folds], engine="exact", candidates=5)
    for name, result in results.items():
        expected = []
        for own_images, own_texts in folds.folds:
            a, b = images[torch.from_numpy(own_images)], texts[torch.from_numpy(own_texts)]
            order = expected_order(name, a, b, 5, "i2t")
            inside = ground_truth.i2t.select_queries(own_images).select_gallery(own_texts)
            expected.append(metrics_by_definition(order, rows(inside))["recall@5"])
        assert result.figures["folds"]["i2t"]["recall@5"] == pytest.approx(np.mean(expected)), name


def test_a_list_is_as_long_as_the_longest_metric_needs():
    """Whatever K: a query with 21 positives has an R-Precision over 21 items; a list of K would under-count it."""
    images, texts, _, _, ground_truth = scene()
    strategy = STRATEGIES["faiss_rerank"]
    ranker = FaissRanker(strategy, "exact", candidates=3)
    ranks = ranker(images, texts, ground_truth.i2t, "csd")
    longest = int(ground_truth.i2t.counts.max())
    assert (ranks[ranks != UNLISTED] < longest).all() and (ranks == UNLISTED).any()
    short = ranker.lists(images, texts, 3)
    assert short.shape == (N, 3)
    cut, depth = ranks_from_lists(list(short.numpy()), ground_truth.i2t)
    right = np.nanmean(per_query_metrics(ranks, ground_truth.i2t)["r_precision"])
    assert np.nanmean(per_query_metrics(cut, ground_truth.i2t)["r_precision"]) < right - 0.01
    with pytest.raises(ValueError, match="holds 3 of 80 items, but r_precision needs"):
        per_query_metrics(cut, ground_truth.i2t, depth=depth, names=["r_precision"])


def test_what_is_outside_of_the_gallery_counts_in_the_length_of_a_list():
    """With 12 positives of which 9 are outside, the 12th item of the list still counts."""
    mean = torch.arange(30.0).unsqueeze(1)
    gallery, query = GaussianEmbedding.point(mean), GaussianEmbedding.point(torch.zeros(1, 1) - 0.1)
    outside = Relevance.from_lists([[0, 5, 11]], n_gallery=30, n_outside=np.array([9]))
    ranks = FaissRanker(STRATEGIES["faiss_mean"], "exact", at_least=1)(query, gallery, outside, "squared_l2")
    assert ranks.tolist() == [0, 5, 11]
    assert per_query_metrics(ranks, outside)["r_precision"] == pytest.approx(3 / 12)
    ground_truth = ground_truth_from_pairs("x", ["q"], range(30), [("q", j) for j in (0, 5, 11)])
    ids = ground_truth.image_ids, ground_truth.text_ids
    ground_truth = type(ground_truth)("x", *ids, outside, ground_truth.t2i, ("r_precision",))
    found = strategies_of(query, gallery, ["q"], ground_truth.text_ids, [ground_truth], engine="exact")
    for result in found.values():
        assert result.figures["x"]["i2t"]["r_precision"] == pytest.approx(3 / 12)
