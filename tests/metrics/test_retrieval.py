import numpy as np
import pytest
import torch
from references_metrics import metrics_by_definition, ranks_by_sorting

from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics, relevant_ranks, retrieval_metrics

# Worked by hand. Query 0 orders the gallery 1 3 0 2 4, query 1 has a tie of items 0, 2 and 4, query 2 has no truth.
DISTANCE = torch.tensor(
    [[0.3, 0.1, 0.4, 0.2, 0.9], [0.5, 0.8, 0.5, 0.7, 0.5], [0.1, 0.2, 0.3, 0.4, 0.5], [4.0, 3.0, 2.0, 1.0, 0.0]]
)
TRUTHS = [[0, 1, 2], [2, 4], [], [0]]


def test_table_worked_by_hand():
    relevance = Relevance.from_lists(TRUTHS, n_gallery=5)
    ranks = relevant_ranks(DISTANCE, relevance)
    assert ranks.tolist() == [2, 0, 3, 1, 2, 4]
    single = per_query_metrics(ranks, relevance, ks=(1, 2))
    np.testing.assert_array_equal(single["recall@1"], [1, 0, np.nan, 0])
    np.testing.assert_array_equal(single["recall@2"], [1, 1, np.nan, 0])
    np.testing.assert_allclose(single["r_precision"], [2 / 3, 1 / 2, np.nan, 0])
    np.testing.assert_allclose(single["map@r"], [(1 + 2 / 3) / 3, (1 / 2) / 2, np.nan, 0])
    np.testing.assert_array_equal(single["best_rank"], [0, 1, np.nan, 4])
    result = retrieval_metrics(ranks, relevance, ks=(1, 2))
    assert result["median_rank"] == 2 and result["mean_rank"] == pytest.approx(8 / 3)
    assert result["n_queries"] == 3 and result["n_without_positives"] == 1
    assert result["recall@1"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("levels", [2, 5, 10**6])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.95])
def test_agrees_with_sorting_with_and_without_ties(levels, share):
    # Shares 0.5 and 0.95 of 41 items take the sorting branch for most queries, the small ones the counting branch.
    random = np.random.default_rng([levels, int(share * 100)])
    distance = random.integers(0, levels, (23, 41)).astype(np.float32)
    dense = random.random((23, 41)) < share
    truths = [np.flatnonzero(row).tolist() for row in dense]
    truths[0] = [40]
    relevance = Relevance.from_lists(truths, n_gallery=41)
    ranks = relevant_ranks(torch.from_numpy(distance), relevance)
    np.testing.assert_array_equal(ranks, ranks_by_sorting(distance, truths))
    ours, theirs = retrieval_metrics(ranks, relevance), metrics_by_definition(distance, truths)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=1e-12), name


def test_counting_and_sorting_branches_agree(monkeypatch):
    random = np.random.default_rng(1)
    distance = torch.from_numpy(random.integers(0, 9, (13, 40)).astype(np.float32))
    relevance = Relevance.from_lists([np.flatnonzero(row) for row in random.random((13, 40)) < 0.4], n_gallery=40)
    results = []
    for limit in (0, 12, 40):
        monkeypatch.setattr("sfumato.metrics.retrieval._COUNT_AT_MOST", limit)
        results.append(relevant_ranks(distance, relevance))
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()


def test_blocks_with_an_uneven_last_one_equal_the_whole():
    random = np.random.default_rng(2)
    distance = torch.from_numpy(random.integers(0, 5, (17, 19)).astype(np.float32))
    relevance = Relevance.from_lists([np.flatnonzero(row) for row in random.random((17, 19)) < 0.2], n_gallery=19)
    parts = [relevant_ranks(distance[s : s + 5], relevance, s) for s in range(0, 17, 5)]
    np.testing.assert_array_equal(np.concatenate(parts), relevant_ranks(distance, relevance))


@pytest.mark.parametrize("elements", [1, 57, 19 * 4])
def test_chunks_of_rows_change_nothing(monkeypatch, elements):
    random = np.random.default_rng(3)
    distance = torch.from_numpy(random.integers(0, 5, (19, 17)).astype(np.float32)).T  # not contiguous
    truths = [np.flatnonzero(row).tolist() for row in random.random((17, 19)) < 0.2]
    relevance = Relevance.from_lists(truths, n_gallery=19)
    monkeypatch.setattr("sfumato.metrics.retrieval._CPU_CHUNK", elements)
    np.testing.assert_array_equal(relevant_ranks(distance, relevance), ranks_by_sorting(distance.numpy(), truths))
    assert len(relevant_ranks(distance[:0], relevance)) == 0


def test_tempting_mistakes_differ():
    # Reversed sorting, a tie rule that favours the relevant item, and dividing by R of all queries: all visibly different here.
    distance = torch.tensor([[0.0, 0.0, 0.0]])
    assert relevant_ranks(distance, Relevance.from_lists([[2]], n_gallery=3)).tolist() == [2]
    assert relevant_ranks(distance, Relevance.from_lists([[0]], n_gallery=3)).tolist() == [0]


def test_infinite_distances_rank_last_and_nan_is_refused():
    relevance = Relevance.from_lists([[0, 2]], n_gallery=3)
    assert relevant_ranks(torch.tensor([[torch.inf, 1.0, torch.inf]]), relevance).tolist() == [1, 2]
    with pytest.raises(ValueError, match="NaN"):
        relevant_ranks(torch.tensor([[0.0, torch.nan, 1.0]]), relevance)


def test_bad_sizes_are_refused():
    relevance = Relevance.from_lists([[0]], n_gallery=3)
    with pytest.raises(ValueError, match="2 columns for a gallery of 3"):
        relevant_ranks(torch.zeros(1, 2), relevance)
    with pytest.raises(ValueError, match=r"queries 1\.\.1 of 1 queries"):
        relevant_ranks(torch.zeros(1, 3), relevance, 1)
    with pytest.raises(ValueError, match="2 ranks for 1 relevant"):
        per_query_metrics(np.array([0, 1]), relevance)
    with pytest.raises(ValueError, match="no query has a relevant item"):
        retrieval_metrics(np.array([], int), Relevance.from_lists([[]], n_gallery=3))
