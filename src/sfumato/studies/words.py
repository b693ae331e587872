"""The words of certain and of uncertain items, by TF-IDF of the captions in bins of uncertainty."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from sfumato.evaluation.trust import words_of

Corpus = Literal["bin", "split"]
"""The captions over which the inverse document frequency counts n_i and N."""

LEAST = 2
"""Words in fewer captions of a bin are left out."""


@dataclass(frozen=True)
class Word:
    """A word of a bin."""

    word: str  # in lower case
    n: int  # number of captions of the bin with this word
    weight: float  # its TF-IDF


@dataclass(frozen=True)
class WordBin:
    """Items of similar uncertainty and the words of their captions."""

    n_items: int  # number of items
    n_captions: int  # number of captions of these items; a caption of two items counts twice
    low: float  # smallest uncertainty
    mean: float  # mean uncertainty
    high: float  # largest uncertainty
    words_per_caption: float  # mean number of words
    words: tuple[Word, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self) | {"words": [asdict(word) for word in self.words]}


def tf_idf(n_with: int, n_holding: int, n_captions: int) -> float:
    r"""Weight of a word.

        (1 + ln n_with) ln(n_captions / n_holding)

    Paper: Chun et al., CVPR 2021, F.2, where n_with and n_holding are one number, n_i; this is the corpus "bin" of
    :func:`words_by_uncertainty`.
    """
    return (1 + math.log(n_with)) * math.log(n_captions / n_holding)


def words_by_uncertainty(
    uncertainty: np.ndarray,
    captions: Sequence[Sequence[str]],
    *,
    n_bins: int = 10,
    top: int = 12,
    corpus: str = "bin",
) -> list[WordBin]:
    """Sort items into bins of equal size by uncertainty, and weight the words of each bin's captions.

    uncertainty (n,).
    """
    uncertainty = np.asarray(uncertainty, float)
    if uncertainty.shape != (len(captions),) or np.isnan(uncertainty).any():
        raise ValueError(
            f"words_by_uncertainty: got uncertainties of shape {uncertainty.shape} for {len(captions)} items; expected"
            " one number without NaN for each"
        )
    if n_bins < 1 or top < 1:
        raise ValueError(f"words_by_uncertainty: n_bins and top must be at least 1, got {n_bins} and {top}")
    if corpus not in get_args(Corpus):
        raise ValueError(f"words_by_uncertainty: corpus must be one of {', '.join(get_args(Corpus))}, got {corpus!r}")
    if len(captions) < n_bins:
        raise ValueError(
            f"words_by_uncertainty: {len(captions)} items are too few for {n_bins} bins; ask for fewer bins"
        )
    parts = np.array_split(np.argsort(uncertainty, kind="stable"), n_bins)
    found = []
    for part in parts:
        own = [words_of(text) for i in part for text in captions[i]]
        found.append((own, Counter(word for words in own for word in set(words))))
    everywhere = sum((counts for _, counts in found), Counter[str]())
    n_everywhere = sum(len(own) for own, _ in found)
    bins = []
    for part, (own, counts) in zip(parts, found, strict=True):
        weights = (
            (word, n, tf_idf(n, n, len(own)) if corpus == "bin" else tf_idf(n, everywhere[word], n_everywhere))
            for word, n in counts.items()
        )
        best = sorted(
            (one for one in weights if one[1] >= LEAST and one[2] > 0), key=lambda one: (-one[2], -one[1], one[0])
        )[:top]
        values = uncertainty[part]
        bins.append(
            WordBin(
                n_items=len(part),
                n_captions=len(own),
                low=float(values.min()),
                mean=float(values.mean()),
                high=float(values.max()),
                words_per_caption=sum(map(len, own)) / max(len(own), 1),
                words=tuple(Word(*one) for one in best),
            )
        )
    return bins
