"""Queries that show what a gallery can answer, chosen by its answers: a vague one, a precise one, no words at all."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from sfumato.serve.schemas import Answer, Example

N_LOOKED_AT = 200
"""Items whose names are looked at."""

N_ITEMS, N_HITS = 6, 3
"""Items to start from, and hits of an example."""

_WORDS, _NAMES, _LONGEST = 8, 100, 40
_GENERAL = ("animal", "people", "food", "a red car", "a dog", "a person on a bicycle", "two people at a table")
_NO_WORDS = ("qwzx vbrkt", "xkqz wvbt", "zzkfp grlmx")
_KINDS: dict[Literal["vague", "precise", "nonsense"], tuple[str, ...]] = {
    "vague": ("many",),
    "precise": ("clear", "few"),
    "nonsense": ("unfamiliar", "unsure"),
}
"""Verdicts that each kind of example may have, the best first."""


def candidates(payloads: Iterable[Mapping[str, str]]) -> list[str]:
    """Texts that may serve as examples for a gallery."""
    names = [next(filter(None, (one.get(field) for field in ("label", "text", "name"))), "") for one in payloads]
    count = Counter(word for name in names for word in set(re.findall(r"[^\W\d_]{3,}", name.casefold())))
    words = [word for word, n in count.most_common(_WORDS) if n > 1]
    short = [name for name in dict.fromkeys(names) if name.strip() and len(name) <= _LONGEST]
    return list(dict.fromkeys([*words, *short[:_NAMES], *_GENERAL, *_NO_WORDS]))


def chosen(answers: Sequence[Answer]) -> list[Example]:
    """The clearest example of each kind, by the verdicts of the answers."""
    found = []
    for kind, verdicts in _KINDS.items():
        some = [one for one in answers if (one.query in _NO_WORDS) == (kind == "nonsense")]
        for verdict in verdicts:
            if fitting := [one for one in some if one.verdict is not None and one.verdict.kind == verdict]:
                found.append(Example(kind=kind, answer=max(fitting, key=_certainty)))
                break
    return found


def _certainty(answer: Answer) -> float:
    """Of the hits that the verdict speaks of: all for many matches, else the first."""
    probabilities = [hit.match_probability or 0.0 for hit in answer.hits]
    if answer.verdict is None or answer.verdict.kind != "many":
        probabilities = probabilities[:1]
    return sum(probabilities) / max(1, len(probabilities))
