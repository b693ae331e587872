"""People's verdicts: files, agreement, samples with known probabilities, and estimates without bias."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato.errors import UserError
from sfumato.evaluation import judgements
from sfumato.metrics.bootstrap import on_all
from sfumato.metrics.reliability import calibration_error_statistic, expected_calibration_error

ONE = judgements.Judgement("a dog", "x y.jpg", 1, "ann", "2025-01-01T10:00:00+00:00", "rank 1", 0.7, 2.0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"yes": 2}, "yes is 2, expected 0 or 1"), ({"yes": True}, "yes is True"), ({"query": ""}, "query is ''"),
        ({"when": "yesterday"}, "yesterday"), ({"yes": 1.0}, "yes is 1.0"), ({"weight": 0}, "weight is 0"),
        ({"weight": 10**400}, "weight is 1000"), ({"weight": math.nan}, "weight is nan"),
        ({"target": 3}, "target is 3"), ({"probability": 1.5}, "probability is 1.5"),
        ({"probability": "high"}, "probability is 'high'"), ({"who": "me"}, "unknown field 'who'"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_by_its_number(tmp_path, wrong, said):
    judgements.write_judgements(path := tmp_path / "a.jsonl", [ONE])
    path.write_text(path.read_text() + "\n" + json.dumps(vars(ONE) | wrong) + "\n")
    with pytest.raises(UserError, match="line 3: .*correct the line") as error:
        judgements.read_judgements(path)
    assert said in str(error.value)
    path.write_text("[1]\n")
    raises(UserError, "line 1: got list, expected an object", judgements.read_judgements, path)
    raises(UserError, "cannot read", judgements.read_judgements, tmp_path / "none.jsonl")


def test_the_latest_verdict_of_one_judge_counts_and_files_come_back(tmp_path):
    all_of_them = [ONE, replace(ONE, id="ü", yes=0, probability=None), replace(ONE, judge="bob", weight=1.5)]
    judgements.write_judgements(tmp_path / "a.jsonl", all_of_them)
    assert judgements.read_judgements(tmp_path / "a.jsonl") == all_of_them
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["judge"] == "ann"
    later = replace(ONE, yes=0, when="2025-01-01T09:30:00-01:00")  # 10:30 in UTC.
    other = replace(ONE, yes=0, judge="bob", when="2024-01-01T00:00:00")
    assert judgements.merged([later], [ONE]) == judgements.merged([ONE, later]) == [later]
    assert judgements.merged([ONE], [replace(ONE, yes=0)])[0].yes == 0, "the last of equally late ones"
    assert {(one.judge, one.yes) for one in judgements.merged([ONE], [other])} == {("ann", 1), ("bob", 0)}
    (both,) = judgements.pair_verdicts([ONE, replace(other, weight=4.0)])
    assert (both.yes, both.weight) == (0.5, 3.0)


def test_qrels_are_four_columns_and_come_back(tmp_path):
    others = [replace(ONE, judge=name, yes=yes) for name, yes in (("bob", 0), ("eve", 1))]
    second = replace(ONE, query="100% ü", id="b", yes=0)
    (tmp_path / "q").write_text(judgements.qrels_of([ONE, *others, second]))
    lines = (tmp_path / "q").read_text().splitlines()
    assert lines[0] == "a%20dog 0 x%20y.jpg 1" and all(len(line.split()) == 4 for line in lines)
    back = judgements.read_qrels(tmp_path / "q", "team")
    verdicts = [("a dog", "x y.jpg", 1, "team"), ("100% ü", "b", 0, "team")]
    assert [(b.query, b.id, b.yes, b.judge) for b in back] == verdicts
    assert [b.pair for b in judgements.read_verdicts(tmp_path / "q")] == [b.pair for b in back]
    (tmp_path / "q").write_text("301\tQ0\tdoc\t2\n301 0 spam -2\n")
    assert [(b.query, b.id, b.yes) for b in judgements.read_qrels(tmp_path / "q")] == [("301", "doc", 1)]
    (tmp_path / "q").write_text("301 0 doc 1\n301 0 doc\n")
    raises(UserError, "line 2: '301 0 doc' is no line of TREC qrels", judgements.read_qrels, tmp_path / "q")


def lists(n_queries=30, k=12, seed=0):
    draw = random.Random(seed)
    shown = lambda q, i: judgements.ShownHit(f"q{q}", f"i{i}", i + 1, round(draw.uniform(0.2, 1) * 0.85**i, 6))
    hits = [shown(q, i) for q in range(n_queries) for i in range(k)]
    return hits, {hit.pair: int(draw.random() < 0.8 * hit.probability) for hit in hits}


def test_a_sample_has_known_probabilities():
    hits, _ = lists()
    for n in (1, 2, 5, 40, 200, 1000):
        found = judgements.sample_hits(hits, n)
        assert len(found) == min(n, len(hits)) == len({hit.pair for hit in found})
        assert sum(hit.weight for hit in found) == pytest.approx(len(hits))
    assert (
        judgements.sample_hits(hits, 40)
        == judgements.sample_hits(hits[::-1], 40)
        != judgements.sample_hits(hits, 40, seed=1)
    )
    strata = {hit.why: hit.weight for hit in judgements.sample_hits(hits, 60)}
    assert "rank 1, probability 0.9-1" in strata and strata["rank 4-10, probability 0.1-0.5"] > 2
    assert {hit.pair for hit in judgements.sample_hits(hits, 40)} <= {
        hit.pair for hit in judgements.sample_hits(hits, 80)
    }
    assert judgements.sample_hits([], 5) == []
    bare = [replace(hit, probability=None) for hit in hits]
    assert {hit.why for hit in judgements.sample_hits(bare, 60)} == {"rank 1", "rank 2-3", "rank 4-10", "rank 11-"}


@pytest.mark.slow
def test_estimates_are_unbiased():
    """Over 100 samples of 40 of 360 hits. A false alarm has z = 4.5: seven in a million for each of three."""
    hits, yes = lists()
    whole, p = np.mean(list(yes.values())), np.mean([hit.probability for hit in hits])
    first = np.mean([yes[hit.pair] for hit in hits if hit.rank == 1])
    found, unweighted = [], []
    for seed in range(100):
        sample = judgements.sample_hits(hits, 40, seed=seed)
        given = [replace(ONE, query=h.query, id=h.id, yes=yes[h.pair], weight=h.weight) for h in sample]
        figures = judgements.judged_figures(hits, given, n_resamples=0)
        found.append((figures.precision.value, figures.excess.value, figures.first.value))
        unweighted.append(np.mean([yes[h.pair] for h in sample]))
    for values, truth in zip(np.array(found).T, (whole, p - whole, first), strict=True):
        assert abs(values.mean() - truth) < 4.5 * values.std() / 10
    assert abs(np.mean(unweighted) - whole) > 5 * np.std(unweighted) / 10, "without the weights it is biased"


def test_figures_by_hand_unjudged_hits_and_the_calibration_error_with_weights():
    hits = [
        judgements.ShownHit(*hit)
        for hit in (("a", "1", 1, 0.9), ("a", "2", 2, 0.5), ("a", "3", 3, 0.4), ("b", "1", 1, 0.2))
    ]
    given = [replace(ONE, query=q, id=i, yes=y, weight=w) for q, i, y, w in (("a", "1", 0, 1), ("a", "3", 1, 3))]
    found = judgements.judged_figures(hits, [*given, replace(ONE, query="gone")], n_resamples=50)
    assert found.n == 2 and found.n_queries == 1 and found.judged == 0.5
    assert found.precision.value == 0.75 and found.first.value == 0
    assert found.said.value == pytest.approx((0.9 + 3 * 0.4) / 4) and found.excess.value == pytest.approx(0.525 - 0.75)
    assert found.ndcg.value == pytest.approx(1 / math.log2(3)), "the one between is not there"
    assert judgements.condensed_ndcg([1, 0, 1]) == pytest.approx((1 + 1 / 2) / (1 + 1 / math.log2(3)))
    assert judgements.condensed_ndcg([1, 1, 0]) == 1 and math.isnan(judgements.condensed_ndcg([0, 0]))
    assert found.calibration_error.value == pytest.approx(0.225), "one bin"
    bare = judgements.judged_figures([replace(hit, probability=None) for hit in hits], given)
    assert bare.calibration_error.value is None and bare.precision == found.precision
    raises(UserError, "none of the hits was judged", judgements.judged_figures, hits, [replace(ONE, query="gone")])
    # Intervals are over queries: ten hits of one query that agree say less than ten of ten queries.
    many = [judgements.ShownHit(f"q{q}", f"{i}", i + 1, 0.5) for q in range(20) for i in range(10)]
    given = [replace(ONE, query=h.query, id=h.id, yes=int(h.query[1:]) % 2, weight=1.0) for h in many]
    found = judgements.judged_figures(many, given).precision
    assert found.value == 0.5 and 0.3 < found.high - found.low < 0.6, "20 cases, not 200"
    generator = torch.Generator().manual_seed(0)
    p, w = torch.rand(60, generator=generator).double(), torch.randint(1, 4, (60,), generator=generator).double()
    y = torch.bernoulli(p / 2, generator=generator)
    plain = on_all(calibration_error_statistic(p, y, torch.ones(60), n_bins=6), 60)
    assert plain == pytest.approx(expected_calibration_error(p, y, n_bins=6))
    order, total = p.argsort(), 0.0
    for rows in order.split(10):
        total += abs(sum(float(w[i] * (p[i] - y[i])) for i in rows))
    assert on_all(calibration_error_statistic(p, y, w, n_bins=6), 60) == pytest.approx(total / float(w.sum()))
