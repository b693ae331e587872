import itertools

import numpy as np
import pytest
import torch
from support.raising import raises
from support.references_metrics import metrics_by_definition, ranks_by_sorting

from sfumato.metrics import retrieval
from sfumato.metrics.relevance import Relevance


@pytest.mark.parametrize("levels", [2, 5, 10**6])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.95])
def test_agrees_with_sorting_with_and_without_ties(levels, fraction):
    # The fractions 0.5 and 0.95 of 141 items take the sorting branch for most queries, the small ones the counting one.
    random = np.random.default_rng([levels, int(fraction * 100)])
    distance = random.integers(0, levels, (23, 141)).astype(np.float32)
    ground_truths = [np.flatnonzero(row).tolist() for row in random.random((23, 141)) < fraction]
    ground_truths[0] = [140]
    relevance = Relevance.from_lists(ground_truths, n_gallery=141)
    ranks = retrieval.relevant_ranks(torch.from_numpy(distance), relevance)
    np.testing.assert_array_equal(ranks, ranks_by_sorting(distance, ground_truths))
    ours, theirs = retrieval.retrieval_metrics(ranks, relevance), metrics_by_definition(distance, ground_truths)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=1e-12), name


LIMITS = {"_COUNT_AT_MOST": (0, 12, 40), "_CPU_CHUNK": (1, 57), "_BUFFER": (1, 57)}


@pytest.mark.parametrize(("name", "limit"), [(name, limit) for name, limits in LIMITS.items() for limit in limits])
def test_neither_branches_nor_blocks_nor_the_device_change_the_ranks(monkeypatch, name, limit):
    monkeypatch.setattr(f"sfumato.metrics.retrieval.{name}", limit)
    for levels in (3, 50, 10**6):
        random = np.random.default_rng(levels)
        distance = torch.from_numpy(random.integers(0, levels, (37, 21)).astype(np.float32)).T
        dense = random.random((21, 37)) < random.choice([0.1, 0.7], (21, 1))
        ground_truths = [np.flatnonzero(row).tolist() for row in dense]
        relevance, right = Relevance.from_lists(ground_truths, n_gallery=37), ranks_by_sorting(distance, ground_truths)
        for ranks_of in (retrieval.relevant_ranks, retrieval._ranks_on_device):
            ours = [ranks_of(distance[s : s + 6], relevance, s) for s in range(0, 21, 6)]
            np.testing.assert_array_equal(np.concatenate(ours), right)
        assert len(retrieval.relevant_ranks(distance[:0], relevance)) == 0


@pytest.mark.gpu
def test_an_accelerator_agrees_with_the_processor():
    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
    random = np.random.default_rng(7)
    distance = torch.from_numpy(random.integers(0, 99, (301, 997)).astype(np.float32))
    relevance = Relevance.from_lists([np.flatnonzero(row) for row in random.random((301, 997)) < 0.02], n_gallery=997)
    ranks = [retrieval.relevant_ranks(block, relevance) for block in (distance.cuda(), distance)]
    np.testing.assert_array_equal(*ranks)


@pytest.mark.parametrize("m", [1, 7, 8, 9, 2040, 2041, 8 * 255 * 3 + 5])
def test_the_last_of_a_long_gallery_has_the_largest_rank(m):
    falling = torch.arange(m, 0, -1.0)[None]  # Counts in bytes would overflow from 255 words of 8 bytes.
    relevance = Relevance.from_lists([[0, m - 1]], n_gallery=m)
    assert retrieval.relevant_ranks(falling, relevance).tolist() == ([0] if m == 1 else [m - 1, 0])
    assert retrieval.relevant_ranks(torch.zeros(1, m), relevance).tolist() == ([0] if m == 1 else [0, m - 1])


def test_any_type_of_distance_is_ranked_infinite_ones_last_and_nan_is_refused():
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64):
        distance = torch.tensor([[3.0, 1.0, 2.0, 1.0]]).to(dtype)
        ranks = retrieval.relevant_ranks(distance, Relevance.from_lists([[0, 1, 3]], n_gallery=4))
        assert ranks.tolist() == [3, 0, 1], dtype
    relevance = Relevance.from_lists([[0, 2]], n_gallery=3)
    assert retrieval.relevant_ranks(torch.tensor([[torch.inf, 1.0, torch.inf]]), relevance).tolist() == [1, 2]
    raises(ValueError, "NaN", retrieval.relevant_ranks, torch.tensor([[0.0, torch.nan, 1.0]]), relevance)


def ranks_from_scores(scores, relevance, **given):
    blocks = retrieval.score_blocks(scores, **given)
    return np.concatenate([retrieval.relevant_ranks(block, relevance, start) for start, block in blocks])


@pytest.mark.parametrize("kind", ["float32", "float16", ">f4", "int64", "uint8", "bool", "memmap", "tensor", "fortran"])
def test_score_matrices_of_any_kind_both_ways(kind, tmp_path):
    random = np.random.default_rng(5)
    scores = random.integers(0, 2 if kind == "bool" else 6, (7, 11)).astype(np.float32)
    dense = random.random((7, 11)) < 0.3
    if kind == "memmap":
        np.save(tmp_path / "scores.npy", scores)
        given = np.load(tmp_path / "scores.npy", mmap_mode="r")
    elif kind == "tensor":
        given = torch.from_numpy(scores)
    else:
        given = np.asfortranarray(scores) if kind == "fortran" else scores.astype(kind)
    for queries, matrix, ground_truth in (("rows", scores, dense), ("columns", scores.T, dense.T)):
        ground_truths = [np.flatnonzero(row).tolist() for row in ground_truth]
        relevance = Relevance.from_lists(ground_truths, n_gallery=ground_truth.shape[1])
        # In one block, and in blocks with an uneven last one.
        for (better, sign), memory_mb in itertools.product((("larger", -1), ("smaller", 1)), (64, 3 * 4 * 11 / 2**20)):
            ours = ranks_from_scores(given, relevance, better=better, queries=queries, memory_mb=memory_mb)
            np.testing.assert_array_equal(ours, ranks_by_sorting(sign * matrix, ground_truths))


def test_extreme_integers_keep_their_order_bad_scores_are_refused_and_blocks_are_small():
    relevance = Relevance.from_lists([[0]], n_gallery=3)
    for scores, given, message in (
        (np.zeros((1, 3)), {"queries": "columns"}, "1 columns for a gallery of 3"),
        (np.zeros((1, 2)), {}, "2 columns for a gallery of 3"),
        (np.zeros((1, 3), complex), {}, "expected real numbers"), (np.full((1, 3), "a"), {}, "expected real numbers"),
        (np.zeros((1, 3), np.uint64), {}, "expected real numbers"), (np.array([[0, np.nan, 1]]), {}, "NaN"),
    ):  # fmt: skip
        raises(ValueError, message, ranks_from_scores, scores, relevance, **{"better": "larger", **given})
    blocks = retrieval.score_blocks(np.zeros((10, 256), np.float32), better="larger", memory_mb=4 / 1024)
    assert [(start, len(block)) for start, block in blocks] == [(0, 4), (4, 4), (8, 2)]
    limits = np.iinfo(np.int64)
    scores = np.array([[limits.min, limits.max, 0, 2**53 + 1, 2**53]])
    relevance = Relevance.from_lists([range(5)], n_gallery=5)
    assert ranks_from_scores(scores, relevance, better="larger").tolist() == [4, 0, 3, 1, 2]
    assert ranks_from_scores(scores, relevance, better="smaller").tolist() == [0, 4, 1, 3, 2]


def test_short_lists_give_exactly_what_they_determine_and_bad_ones_are_refused():
    relevance = Relevance.from_lists([[4, 1], [2], []], n_gallery=5)
    ranks, depth = retrieval.ranks_from_lists([[3, 4], [2, 0], []], relevance)
    assert ranks.tolist() == [retrieval.UNLISTED, 1, 0] and depth.tolist() == [2, 2, 0]
    wanted = ("recall@1", "recall@2", "r_precision", "map@r", "mean_rank")
    result = retrieval.retrieval_metrics(ranks, relevance, depth=depth, names=wanted)
    whole, _ = retrieval.ranks_from_lists([[3, 4, 0, 1, 2], [2, 0, 1, 3, 4], [0, 1, 2, 3, 4]], relevance)
    assert result == retrieval.retrieval_metrics(whole, relevance, names=wanted)
    short = r"query 0 holds 2 of 5 items, but recall@3 needs 3 \(2 of 2 lists"
    for lists, names, message in (
        ([[3, 4], [2, 0], []], ["recall@1", "recall@3"], short),
        ([[4], [0, 1], []], ["r_precision"], r"query 0 holds 1 of 5 items, but r_precision needs 2 \(1 of 2"),
        ([[4], [0, 1], []], ["median_rank"], "query 1 holds 2 of 5 items, but the rank of its best item needs 5"),
        ([[4], [0, 1], []], retrieval.ALL_METRICS, "needs"),
    ):  # fmt: skip
        ranks, depth = retrieval.ranks_from_lists(lists, relevance)
        raises(ValueError, message, retrieval.retrieval_metrics, ranks, relevance, depth=depth, names=names)
    # Whole lists are fine for any k, and for items that nothing can find.
    relevance = Relevance.from_lists([[0, 1]], n_gallery=3, n_outside=np.array([4]))
    ranks, depth = retrieval.ranks_from_lists([[1, 2, 0]], relevance)
    result = retrieval.retrieval_metrics(ranks, relevance, names=("recall@10", "r_precision", "map@r"), depth=depth)
    assert result["recall@10"] == 1 and result["r_precision"] == pytest.approx(2 / 6)
    assert result["map@r"] == pytest.approx((1 + 2 / 3) / 6)
    for lists, message in (
        ([[0, 1, 0], [1]], "query 0 holds position 0 more than once"),
        ([[0], [2, 3]], r"query 1 holds 2\.\.3, but the gallery has positions 0\.\.2"),
        ([[0], [-1]], r"query 1 holds -1\.\.-1"), ([[0], [0, 1, 2, 1]], "query 1 holds position 1 more than once"),
    ):  # fmt: skip
        raises(ValueError, message, retrieval.ranks_from_lists, lists, Relevance.from_lists([[0], [1]], n_gallery=3))


def test_items_outside_of_the_gallery_count_in_r_and_in_totals_and_are_never_found():
    # Query 0: R = 3 of which one cannot be found, ranks 0 and 2. Query 1: its one item cannot be found at all. Query 2:
    # no truth.
    relevance = Relevance.from_lists([[0, 1], [], []], n_gallery=4, n_outside=np.array([1, 1, 0]))
    single = retrieval.per_query_metrics(np.array([0, 2]), relevance)
    np.testing.assert_allclose(single["r_precision"], [2 / 3, 0, np.nan])
    np.testing.assert_allclose(single["map@r"], [(1 + 2 / 3) / 3, 0, np.nan])
    np.testing.assert_array_equal(single["best_rank"], [0, np.inf, np.nan])
    np.testing.assert_array_equal(single["recall@10"], [1, 0, np.nan])
    result = retrieval.retrieval_metrics(np.array([0, 2]), relevance)
    assert result["n_queries"] == 2 and result["n_without_positives"] == 1 and result["recall@1"] == 0.5
    r = Relevance.from_lists([[1], [], [0, 2]], n_gallery=4, n_outside=np.array([2, 1, 0]))
    assert r.counts.tolist() == [1, 0, 2] and r.totals.tolist() == [3, 1, 2]
    chosen = r.select_queries(np.array([2, 0, 0]))
    assert chosen.totals.tolist() == [2, 3, 3] and chosen.counts.tolist() == [2, 1, 1]
    # A smaller gallery is another benchmark, and the other direction has no such queries.
    assert r.select_gallery(np.array([2, 1])).totals.tolist() == [1, 0, 1]
    assert r.transpose().totals.tolist() == [1, 1, 1, 0]
    assert Relevance.from_lists([[0]], n_gallery=1).totals.tolist() == [1]


def test_only_the_metrics_asked_for_are_given_and_chance_is_the_mean_over_all_orders():
    relevance = Relevance.from_lists([[2], [0, 1], []], n_gallery=4)
    hits = {1: [], 2: [], 3: []}
    for order in itertools.permutations(range(4)):
        for relevant in ({2}, {0, 1}):
            for k, found in hits.items():
                found.append(bool(relevant & set(order[:k])))
    chance = retrieval.chance_metrics(relevance, ks=[1, 2, 3])
    for k, found in hits.items():
        assert chance[f"recall@{k}"] == pytest.approx(np.mean(found))
    assert chance["r_precision"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert retrieval.chance_metrics(relevance, ks=[9])["recall@9"] == 1
    nothing = Relevance.from_lists([[]], n_gallery=4)
    raises(ValueError, "no query has a relevant item", retrieval.chance_metrics, nothing)
    ranks = retrieval.relevant_ranks(torch.tensor([[3, 1, 2, 4], [1, 4, 3, 2], [1, 1, 1, 1]]), relevance)
    everything = retrieval.retrieval_metrics(ranks, relevance, names=(*retrieval.ALL_METRICS, "recall@7"))
    some = retrieval.retrieval_metrics(ranks, relevance, names=("map@r", "recall@7", "median_rank"))
    assert list(some) == ["map@r", "recall@7", "median_rank", "n_queries", "n_without_positives"]
    assert some == {name: everything[name] for name in some}
    for wrong in ("recall@0", "recall", "precision@5"):
        raises(ValueError, f"unknown metric '{wrong}'", retrieval.retrieval_metrics, ranks, relevance, names=[wrong])
        raises(ValueError, "median_rank", retrieval.check_metric, wrong)
    retrieval.check_metric("recall@3")
    retrieval.check_metric("mean_rank")


def test_lists_pairs_and_dense_agree_and_bad_positions_are_named():
    lists = [[4, 1], [], [0, 0, 2], [3]]
    r = Relevance.from_lists(lists, n_gallery=6)
    dense = np.zeros((4, 6), bool)
    for i, row in enumerate(lists):
        dense[i, row] = True
    assert (r.to_dense() == dense).all()
    assert (r.transpose().to_dense() == dense.T).all()
    assert (r.select_queries(np.array([2, 0, 2])).to_dense() == dense[[2, 0, 2]]).all()
    assert (r.select_gallery(np.array([3, 0, 5])).to_dense() == dense[:, [3, 0, 5]]).all()
    assert r.select_queries(np.array([], int)).n_queries == 0
    r = Relevance.from_lists([], n_gallery=0)
    assert r.n_queries == 0 and r.transpose().n_queries == 0
    r = Relevance.from_lists([[], []], n_gallery=3)
    assert r.counts.tolist() == [0, 0] and r.transpose().counts.tolist() == [0, 0, 0]
    r = Relevance.from_pairs(np.array([2, 0, 2, 2]), np.array([3, 1, 0, 3]), n_queries=4, n_gallery=5)
    assert r.indptr.tolist() == [0, 1, 1, 3, 3] and r.indices.tolist() == [1, 0, 3]
    assert r.indptr.dtype == r.indices.dtype == np.int64
    assert r.n_queries == 4 and r.n_gallery == 5
    assert r.counts.tolist() == [1, 0, 2, 0] and r.query_of_item.tolist() == [0, 2, 2]
    for rows, columns, message in (
        ([0, 0], [1, 3], r"gallery position is outside of 0\.\.2 \(found 1\.\.3\)"), ([-1], [0], "query position"),
        ([0, 0], [0], "must be equal"),
    ):  # fmt: skip
        pairs = np.array(rows), np.array(columns)
        raises(ValueError, message, Relevance.from_pairs, *pairs, n_queries=1, n_gallery=3)
    for wrong in ([1], [0, -1]):
        message, outside = "give each query one number, at least 0", np.array(wrong)
        raises(ValueError, message, Relevance.from_lists, [[0], [1]], n_gallery=2, n_outside=outside)
