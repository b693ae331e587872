"""What an answer means, in words: one clear match, a few, many, or nothing sure."""

from dataclasses import dataclass
from typing import Literal

MANY = 10
"""From so many expected matches on, a query could mean many things."""

_UNSURE, _SURE, _ONE = 0.15, 0.5, 1.7


@dataclass(frozen=True)
class Verdict:
    """In one word, and in one sentence."""

    kind: Literal["clear", "few", "many", "unsure", "abstained"]
    text: str


def verdict(expected_matches: float, best_probability: float, abstained: bool | None = None) -> Verdict:
    """Put an answer into words.

    Args:
        expected_matches: sum of the match probabilities over the gallery.
        best_probability: of the closest item; 0 if there is none.
        abstained: whether the query is better not answered at the risk asked for; None if none was.
    """
    if abstained:
        return Verdict("abstained", "No confident match: at the risk you allow, this is better not answered")
    if expected_matches >= MANY:
        return Verdict("many", f"This could mean many things: about {expected_matches:.0f} matches expected")
    if best_probability < _UNSURE:
        return Verdict(
            "unsure", f"Nothing it is sure of: the best hit has a probability of {_percent(best_probability)}"
        )
    if expected_matches < _ONE:
        if best_probability >= _SURE:
            return Verdict("clear", "One clear match")
        return Verdict("unsure", f"Not sure: the best hit has a probability of {_percent(best_probability)}")
    return Verdict("few", f"Few matches: about {expected_matches:.0f} expected")


def _percent(p: float) -> str:
    if p < 0.001:
        return "less than 0.1%"
    return f"{p:.0%}" if p >= 0.1 else f"{p:.1%}"
