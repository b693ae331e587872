"""Verdicts at both sides of every border."""

import pytest

from sfumato.search.gallery import verdict


@pytest.mark.parametrize(
    ("expected", "best", "abstained", "kind", "said"),
    [
        (212.4, 0.99, None, "many", "about 212 matches expected"),
        (10.0, 0.01, None, "many", "about 10 matches expected"),
        (9.9, 0.149, None, "unsure", "No clear match: the best result has a probability of 15%"),
        (9.9, 0.15, None, "few", "about 10 expected"),
        (1.7, 0.9, False, "few", "about 2 expected"),
        (1.69, 0.5, None, "clear", "One clear match"),
        (1.69, 0.49, None, "unsure", "No clear match: the best result has a probability of 49%"),
        (0.1, 0.004, None, "unsure", "a probability of 0.4%"),
        (0.0, 0.0009, None, "unsure", "a probability of less than 0.1%"),
        (212.4, 0.99, True, "abstained", "No confident match"),
    ],
)
def test_what_is_said(expected, best, abstained, kind, said):
    found = verdict(expected, best, abstained)
    assert found.kind == kind and said in found.text
