import numpy as np
from support.raising import raises

from sfumato.metrics.relevance import Relevance


def test_from_pairs_sorts_and_merges():
    r = Relevance.from_pairs(np.array([2, 0, 2, 2]), np.array([3, 1, 0, 3]), n_queries=4, n_gallery=5)
    assert r.indptr.tolist() == [0, 1, 1, 3, 3] and r.indices.tolist() == [1, 0, 3]
    assert r.indptr.dtype == r.indices.dtype == np.int64
    assert r.n_queries == 4 and r.n_gallery == 5
    assert r.counts.tolist() == [1, 0, 2, 0] and r.query_of_item.tolist() == [0, 2, 2]


def test_lists_pairs_and_dense_agree():
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


def test_bad_positions_are_named():
    for rows, columns, message in (
        ([0, 0], [1, 3], r"gallery position is outside of 0\.\.2 \(found 1\.\.3\)"),
        ([-1], [0], "query position"),
        ([0, 0], [0], "must be equal"),
    ):
        pairs = np.array(rows), np.array(columns)
        raises(ValueError, message, Relevance.from_pairs, *pairs, n_queries=1, n_gallery=3)
    for wrong in ([1], [0, -1]):
        message, outside = "give each query one number, at least 0", np.array(wrong)
        raises(ValueError, message, Relevance.from_lists, [[0], [1]], n_gallery=2, n_outside=outside)


def test_items_outside_of_the_gallery_count_in_totals_and_stay_with_their_query():
    r = Relevance.from_lists([[1], [], [0, 2]], n_gallery=4, n_outside=np.array([2, 1, 0]))
    assert r.counts.tolist() == [1, 0, 2] and r.totals.tolist() == [3, 1, 2]
    chosen = r.select_queries(np.array([2, 0, 0]))
    assert chosen.totals.tolist() == [2, 3, 3] and chosen.counts.tolist() == [2, 1, 1]
    # A smaller gallery is another benchmark, and the other direction has no such queries.
    assert r.select_gallery(np.array([2, 1])).totals.tolist() == [1, 0, 1]
    assert r.transpose().totals.tolist() == [1, 1, 1, 0]
    assert Relevance.from_lists([[0]], n_gallery=1).totals.tolist() == [1]
