"""Verdicts at both sides of every border."""

import pytest

from sfumato.search.answer import verdict


@pytest.mark.parametrize(
    ("expected", "best", "abstained", "kind", "said"),
    [
        (212.4, 0.99, None, "many", "Many matches: about 212"),
        (7.0, 0.01, None, "many", "Many matches: about 7"),
        (6.9, 0.249, None, "unsure", "No clear match: the first result is right with a probability of 25%"),
        (4.4, 0.25, None, "few", "A few matches: about 4"),
        (3.0, 0.9, False, "few", "A few matches: about 3"),
        (2.9, 0.25, None, "few", "A possible match: the first result is right with a probability of 25%"),
        (2.9, 0.5, None, "few", "A likely match: the first result is right with a probability of 50%"),
        (2.0, 0.9, None, "few", "A likely match: the first result is right with a probability of 90%"),
        (1.9, 0.75, None, "clear", "One clear match"),
        (0.9, 0.749, None, "few", "with a probability of 75%"),
        (0.1, 0.004, None, "unsure", "with a probability of 0.4%"),
        (0.0, 0.0009, None, "unsure", "with a probability of less than 0.1%"),
        (2.4, 0.996, None, "few", "with a probability of more than 99%"),
        (212.4, 0.99, True, "abstained", "No confident match"),
    ],
)
def test_what_is_said(expected, best, abstained, kind, said):
    found = verdict(expected, best, abstained)
    assert found.kind == kind and said in found.text
