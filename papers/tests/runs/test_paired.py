"""Tables of single queries there and back, and differences against scipy."""

import json

import numpy as np
import pytest
import scipy
import torch
from support.raising import raises

from papers.runs.paired import PerQuery, compare_per_query, from_columns, read_per_query, swap_test
from papers.runs.strategies import STRATEGIES, FaissRanker
from sfumato.errors import UserError
from sfumato.evaluation.benchmarks import COMPARED, per_query_table, rank, write_per_query
from sfumato.evaluation.ground_truth import ground_truth_from_pairs
from sfumato.evaluation.protocols import Embeddings, Lists
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance

# Three images and four texts on a line. Distances: a to t1..t4 = 1, 4, 9, 16; b: 1, 0, 1, 4 ...
IMAGES = GaussianEmbedding(torch.tensor([[0.0], [2.0], [10.0]]), torch.log(torch.tensor([[0.5], [0.25], [1.0]])))
TEXTS = GaussianEmbedding(torch.tensor([[1.5], [2.1], [3.0], [9.0]]), torch.full((4, 1), -torch.inf))
IMAGE_IDS, TEXT_IDS = ["a", "b", "c"], ["t1", "t2", "t3", "t4"]
PAIRS = [("a", "t1"), ("a", "t3"), ("b", "t2"), ("c", "t1"), ("c", "t3")]


def ground_truth(metrics=("recall@1", "r_precision", "map@r")):
    return ground_truth_from_pairs("hand", IMAGE_IDS, TEXT_IDS, PAIRS, metrics=metrics)


def table():
    ranks = rank(Embeddings(IMAGES, TEXTS, "squared_l2"), IMAGE_IDS, TEXT_IDS, [ground_truth()])
    uncertainty = {"i2t": dict(zip(IMAGE_IDS, (0.5, 0.25, 1.0), strict=True)), "t2i": {"t1": 7.0}}
    return from_columns(per_query_table(ranks, uncertainty))


def test_a_table_worked_by_hand():
    """Distances by hand.

    a ranks t1 t2 t3 t4, b t2 t1 t3 t4 (0.1, 0.5, 1, 7 away), c t4 t3 t2 t1; t1 ranks b a c, t2 b a c, t3 b a c,
    t4 c b a.
    """
    found = table()
    assert found.keys() == [
        *[("hand", "i2t", i) for i in "abc"], *[("hand", "t2i", t) for t in ("t1", "t2", "t3")]
    ]  # fmt: skip
    # t4 matches nothing and is no query. t1 and t3 match the same images; a and c match the same texts.
    assert found.group.tolist() == ["a", "b", "a", "t1", "t2", "t1"]
    expected = {
        "recall@1": [1, 1, 0, 0, 1, 0],
        "recall@5": [1, 1, 1, 1, 1, 1],
        "best_rank": [0, 0, 1, 1, 0, 1],
        "r_precision": [1 / 2, 1, 1 / 2, 1 / 2, 1, 1 / 2],
        "map@r": [1 / 2, 1, 1 / 4, 1 / 4, 1, 1 / 4],
        "uncertainty": [0.5, 0.25, 1.0, 7.0, np.nan, np.nan],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found.figures[name], values, err_msg=name)


def test_lists_give_what_they_determine():
    lists = {"a": ["t1", "t2"], "b": ["t2"], "c": ["t4", "t3"]}, {"t1": ["b", "a"], "t2": ["b"], "t3": ["b", "a"]}
    found = from_columns(per_query_table(rank(Lists(*lists), IMAGE_IDS, TEXT_IDS, [ground_truth()])))
    whole = table()
    for name in ("recall@1", "r_precision", "map@r"):
        np.testing.assert_array_equal(found.figures[name], whole.figures[name])
    for name in ("recall@5", "best_rank", "uncertainty"):
        assert np.isnan(found.figures[name]).all()
    longer = rank(Lists(*lists), IMAGE_IDS, TEXT_IDS, [ground_truth(("recall@5",))])
    raises(ValueError, "recall@5 needs 4", per_query_table, longer)


def test_ranks_beyond_a_list_of_faiss_are_undefined_not_huge():
    mean = torch.arange(40.0).unsqueeze(1)
    line, ids = GaussianEmbedding.point(mean), [str(i) for i in range(40)]
    far = ground_truth_from_pairs("far", ids, ids, [(i, str((int(i) + 30) % 40)) for i in ids], metrics=("recall@1",))
    ranker = FaissRanker(STRATEGIES["faiss_mean"], "exact")
    found = from_columns(per_query_table(rank(Embeddings(line, line, "squared_l2", ranker), ids, ids, [far])))
    assert np.isnan(found.figures["best_rank"]).all() and (found.figures["recall@10"] == 0).all()


def test_a_positive_outside_of_the_gallery_stands_alone_and_infinitely_far(tmp_path):
    own = ground_truth()
    i2t = Relevance.from_lists([[0], [], []], n_gallery=4, n_outside=np.array([0, 1, 1]))
    outside = type(own)("out", own.image_ids, own.text_ids, i2t, own.t2i, ("map@r",))
    found = from_columns(per_query_table(rank(Embeddings(IMAGES, TEXTS), IMAGE_IDS, TEXT_IDS, [outside])))
    assert found.group[:3].tolist() == ["a", "b", "c"]
    assert found.figures["best_rank"][:3].tolist() == [0, np.inf, np.inf]
    for ending in ("csv", "parquet"):
        if ending == "parquet":
            pytest.importorskip("pyarrow", reason="needs the extra parquet")
        write_per_query(tmp_path / f"x.{ending}", found.columns())
        assert read_per_query(tmp_path / f"x.{ending}").figures["best_rank"][:3].tolist() == [0, np.inf, np.inf]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_there_and_back(ending, tmp_path):
    """Every bit of every number, ids with commas, quotes and line breaks, and undefined figures."""
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra parquet")
    random = np.random.default_rng(0)
    ids = np.array(['a,"b"', "line\nbreak", "猫", "", "nan", "007"])
    figures = {name: random.normal(size=6) * 10.0 ** random.integers(-20, 20, size=6) for name in COMPARED}
    figures["uncertainty"] = np.array([np.nan, 0.1, 1 / 3, np.inf, 5e-324, -0.0])
    given = PerQuery(np.full(6, "t"), np.full(6, "i2t"), ids, ids[::-1].copy(), figures)
    path = tmp_path / f"x.{ending}"
    write_per_query(path, given.columns())
    again = read_per_query(path)
    assert again.keys() == given.keys() and again.group.tolist() == given.group.tolist()
    assert set(again.figures) == set(figures)
    for name, values in figures.items():
        assert again.figures[name].tobytes() == values.tobytes(), name
    before = path.read_bytes()
    write_per_query(path, given.columns())
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_csv_is_readable_by_others(tmp_path):
    write_per_query(tmp_path / "x.csv", table().columns())
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines[0] == "truth,direction,query,group,recall@1,recall@5,recall@10,r_precision,map@r,best_rank,uncertainty"
    assert lines[1] == "hand,i2t,a,a,1.0,1.0,1.0,0.5,0.5,0.0,0.5" and lines[6].endswith(",1.0,")


def test_other_files_are_refused(tmp_path):
    raises(UserError, "no results of single queries at", read_per_query, tmp_path / "none.csv")
    head = "truth,direction,query,group,recall@1\n"
    for content, message in (
        (head + "t,i2t,a,a\n", "x.csv:2: 4 values for 5 columns"),
        (head + "t,i2t,a,a,one\n", "column 'recall@1' holds a value that is not a number"),
        (head + "t,i2t,a,a,1\nt,i2t,a,a,0\n", r"query 'a' \(t, i2t\) occurs twice"),
        ("truth,direction,query,recall@1\n", "no column 'group'"),
        (head + '"t,i2t', "not CSV in UTF-8"),
    ):
        (tmp_path / "x.csv").write_text(content)
        raises(UserError, message, read_per_query, tmp_path / "x.csv")


def runs(n=60, seed=0, gain=0.3, n_groups=None):
    """Two runs whose queries are hard for both, so that pairing matters."""
    random = np.random.default_rng(seed)
    hard = random.normal(size=n)
    group = np.array([f"g{i if n_groups is None else i % n_groups}" for i in range(n)])
    keys = [np.full(n, "t"), np.full(n, "i2t"), np.array([f"q{i}" for i in range(n)]), group]
    a = hard + 0.3 * random.normal(size=n)
    b = hard + gain * 0.3 + 0.3 * random.normal(size=n)
    return tuple(PerQuery(*keys, {"map@r": x, "recall@1": np.round(x)}) for x in (a, b))


def test_the_interval_is_scipys():
    first, second = runs()
    found = {d.metric: d for d in compare_per_query(first, second, n_resamples=20_000)}
    for metric in ("map@r", "recall@1"):
        a, b = first.figures[metric], second.figures[metric]
        expected = scipy.stats.bootstrap(
            (b - a,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(5)
        ).confidence_interval
        d = found[metric]
        width = expected.high - expected.low
        # Percentiles of 20,000 resamples vary by about 1 per cent of the width.
        assert d.difference.low == pytest.approx(expected.low, abs=0.04 * width)
        assert d.difference.high == pytest.approx(expected.high, abs=0.04 * width)
        assert d.difference.value == pytest.approx((b - a).mean())
        assert (d.first, d.second, d.n_queries) == (pytest.approx(a.mean()), pytest.approx(b.mean()), 60)
        # Not that of two separate runs, which leaves the hardness of the queries in.
        apart = scipy.stats.bootstrap(
            (a, b), lambda x, y, axis: y.mean(axis) - x.mean(axis), n_resamples=2000, method="percentile"
        ).confidence_interval  # fmt: skip
        assert apart.high - apart.low > 2 * width


def test_the_p_value_is_scipys_exact_one():
    first, second = runs(12, seed=3)
    for metric in ("map@r", "recall@1"):
        a, b = first.figures[metric], second.figures[metric]
        exact = scipy.stats.permutation_test(
            (b, a), lambda x, y, axis: (x - y).mean(axis), permutation_type="samples", n_resamples=np.inf
        ).pvalue  # fmt: skip
        found = swap_test({metric: b - a}, np.arange(12), n_resamples=40_000)[metric]
        assert 0.02 < exact < 0.9
        assert found == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 40_000))


def test_groups_are_drawn_and_swapped_together():
    """Sixty queries that are five groups of twelve equal ones tell as much as five queries."""
    one_first, one_second = runs(5, seed=8)
    keys = [np.tile(x, 12) for x in (one_first.ground_truth, one_first.direction)]
    query, group = np.array([f"q{i}" for i in range(60)]), np.tile(one_first.query, 12)
    tiled = [{"map@r": np.tile(run.figures["map@r"], 12)} for run in (one_first, one_second)]
    (few,) = compare_per_query(one_first, one_second, metrics=["map@r"], n_resamples=4000)
    (many,) = compare_per_query(*(PerQuery(*keys, query, group, each) for each in tiled), n_resamples=4000)
    assert (many.n_queries, many.n_groups, few.n_groups) == (60, 5, 5)
    assert many.difference.low == pytest.approx(few.difference.low) and many.p_value == few.p_value
    (wrong,) = compare_per_query(*(PerQuery(*keys, query, query, each) for each in tiled), n_resamples=4000)
    assert wrong.difference.high - wrong.difference.low < 0.5 * (many.difference.high - many.difference.low)
    assert wrong.p_value < many.p_value


def test_rows_in_any_order_and_the_same_twice():
    first, second = runs()
    order = np.random.default_rng(1).permutation(60)
    assert compare_per_query(first, second.select(order)) == compare_per_query(first, second)
    assert compare_per_query(first, second, seed=1) != compare_per_query(first, second)
    (same, _) = compare_per_query(first, first, metrics=["map@r", "recall@1"])
    assert (same.difference.value, same.difference.low, same.difference.high, same.p_value) == (0, 0, 0, 1)
    forth, back = (compare_per_query(*pair, metrics=["map@r"])[0] for pair in ((first, second), (second, first)))
    assert forth.difference.value == -back.difference.value and forth.p_value == back.p_value
    assert forth.difference.low == pytest.approx(-back.difference.high, abs=1e-12)
    assert json.loads(json.dumps(forth.to_json()))["low"] == forth.difference.low


def test_figures_that_are_not_defined_for_all_are_left_out():
    first, second = runs()
    second.figures["recall@1"][3] = np.nan
    assert [d.metric for d in compare_per_query(first, second)] == ["map@r"]
    second.figures["map@r"][0] = np.nan
    message = r"no metric among recall@1, .* is defined for all queries of both runs"
    raises(ValueError, message, compare_per_query, first, second)


def test_other_queries_are_refused_by_name():
    first, second = runs()
    shorter = second.select(np.delete(np.arange(60), 7))
    other = PerQuery(second.ground_truth, second.direction, second.query, second.query, second.figures)
    for one, another, message in (
        (first, shorter, r"query 'q7' \(t, i2t\) is in the first run but not in the second"),
        (shorter, second, r"query 'q7' \(t, i2t\) is in the second run but not in the first"),
        (first, other, "'q0'.* is in group 'g0' of the first run and in 'q0' of the second"),
    ):
        raises(ValueError, message, compare_per_query, one, another)
