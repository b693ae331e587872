"""Which words go with certainty, and which with doubt: TF-IDF of the captions in each bin of uncertainty.

It knows numbers and captions, and nothing of models.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from sfumato.evaluation.caption_proxies import words_of

Corpus = Literal["bin", "split"]
"""Of which captions n_i and N of the inverse document frequency are counted."""

LEAST = 2
"""A word of fewer captions of a bin says nothing about it."""


@dataclass(frozen=True)
class Word:
    """A word of a bin.

    Attributes:
        word: in lower case.
        n: captions of the bin that hold it.
        weight: its TF-IDF.
    """

    word: str
    n: int
    weight: float


@dataclass(frozen=True)
class WordBin:
    """Items of about equal uncertainty, and what their captions say.

    Attributes:
        n_items: how many.
        n_captions: of these items; a caption of two items counts for both.
        low, mean, high: uncertainty of the items.
        words_per_caption: mean length.
        words: of the greatest weight, in descending order; none in fewer than LEAST captions, and none of weight 0.
    """

    n_items: int
    n_captions: int
    low: float
    mean: float
    high: float
    words_per_caption: float
    words: tuple[Word, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries."""
        return asdict(self) | {"words": [asdict(word) for word in self.words]}


def tf_idf(n_with: int, n_holding: int, n_captions: int) -> float:
    r"""Weight of a word.

        (1 + ln n_with) ln(n_captions / n_holding)

    Args:
        n_with: captions of the bin that hold the word, at least 1.
        n_holding: captions of the corpus that do.
        n_captions: captions of the corpus.

    Paper: Chun et al., CVPR 2021, F.2, where n_with and n_holding are one number, n_i: that is the corpus "bin" of
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
    """Cut items into bins of equal size by uncertainty, and weigh the words of each bin's captions.

    Args:
        uncertainty: (n,) of each item; equal ones stay in the order of the items.
        captions: n lists; of a text itself, of an image its true captions.
        n_bins: number of bins; the first ones have one item more where n is no multiple.
        top: words of each bin at most.
        corpus: "bin" takes n_i and N of the bin's own captions in both factors, the formula as PCME prints it: words in about
            sqrt(N / e) of the bin's captions come first. "split" takes the second factor from the captions of all bins, so that
            words come first which are frequent in the bin and rare elsewhere.

    Returns:
        The bins, the most certain first.

    Raises:
        ValueError: there are fewer items than bins, an uncertainty is NaN, lengths differ, or an option is out of range.
    """
    uncertainty = np.asarray(uncertainty, float)
    if uncertainty.shape != (len(captions),) or np.isnan(uncertainty).any():
        raise ValueError(
            f"words_by_uncertainty: got uncertainties of shape {uncertainty.shape} for {len(captions)} items; give each one number"
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
