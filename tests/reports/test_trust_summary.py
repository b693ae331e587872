"""What the summary of `sfumato trust` says to do, where the model ranks by chance or nearly so."""

from dataclasses import replace

import pytest
from support.words import folded

from sfumato.evaluation.hits import HitFigures
from sfumato.evaluation.trust import DirectionTrust, TrustReport
from sfumato.metrics.bootstrap import Interval
from sfumato.reports.evaluation import print_trust_summary

CHANCE = 0.01
HITS = HitFigures("t2i", 100, 1, 1000, CHANCE, CHANCE, 0.004, 0.005, 0.01, 0.06, 0.06, 0.0, 0.5)
DIRECTION = DirectionTrust(
    n_queries=1000, n_gallery=100, recall=Interval(0.4, 0.37, 0.43), chance=CHANCE, above_chance=True,
    risk_best=Interval(0.3, 0.2, 0.4), right_pairs=Interval(0.9, 0.8, 0.95), n_out_of_gallery=0, estimators={},
    deciles={},
)  # fmt: skip
REPORT = TrustReport("test", "csd", True, 100, 1000, 1000, 0.95, 0, {}, {}, [], {"served": [HITS], "distance": [HITS]})


def said(capsys, **changes):
    print_trust_summary(replace(REPORT, directions={"t2i": replace(DIRECTION, **changes)}), "runs/a on test")
    return folded(capsys.readouterr().out)


def test_probabilities_that_hold_are_to_be_shown_and_a_model_at_chance_gets_no_advice_at_all(capsys):
    assert HITS.verdict == "holds"
    words = said(capsys)
    assert "; show it; it holds for queries" in words and "at chance" not in words
    assert "it holds" in said(capsys, recall=Interval(0.4, None, None)), "without resamples the value decides"
    words = said(capsys, above_chance=False, recall=Interval(0.01, 0.005, 0.015))
    assert "rely on nothing: the model does not rank better than chance here" in words
    assert "show it" not in words


@pytest.mark.parametrize("recall", [Interval(0.012, 0.008, 0.016), Interval(0.01, None, None), Interval(0.0, 0.0, 0.0)])
def test_first_hits_at_chance_are_named_instead_of_show_it(capsys, recall):
    words = said(capsys, recall=recall)
    assert "do not show it; the first hits are at chance" in words and "it holds" not in words
    assert "rely on nothing" not in words
