"""A search result in one word and one sentence, from the number of expected matches and the best match probability."""

from dataclasses import dataclass
from typing import Literal

MANY = 10
"""With this many expected matches or more, a query could mean many things."""

_UNSURE, _SURE, _ONE = 0.15, 0.5, 1.7


@dataclass(frozen=True)
class Verdict:
    """A search result in words.

    Attributes:
        kind: one word.
        text: one sentence.
    """

    kind: Literal["clear", "few", "many", "unsure", "abstained"]
    text: str


def verdict(expected_matches: float, best_probability: float, abstained: bool | None = None) -> Verdict:
    """Put a search result into words.

    Args:
        expected_matches: sum of the match probabilities over the gallery.
        best_probability: match probability of the closest item; 0 if there is none.
        abstained: whether the query should not be answered at the requested risk; None if no risk was requested.

    Returns:
        The verdict.

    Example:
        >>> verdict(1.2, 0.9).text
        'One clear match'
    """
    if abstained:
        return Verdict("abstained", "No confident match: an answer would exceed the risk that you allow")
    if expected_matches >= MANY:
        return Verdict("many", f"This could mean many things: about {expected_matches:.0f} matches expected")
    if best_probability < _UNSURE or (expected_matches < _ONE and best_probability < _SURE):
        return Verdict("unsure", f"No clear match: the best result has a probability of {_percent(best_probability)}")
    if expected_matches < _ONE:
        return Verdict("clear", "One clear match")
    return Verdict("few", f"Few matches: about {expected_matches:.0f} expected")


def _percent(p: float) -> str:
    if p < 0.001:
        return "less than 0.1%"
    return f"{p:.0%}" if p >= 0.1 else f"{p:.1%}"
