"""What a caption says of its own multiplicity: numbers of its words, and of its place among captions without labels."""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import snowballstemmer

from sfumato.calibration.fits import SHARPNESS, place
from sfumato.search.texts import FUNCTION_WORDS

COVERAGE = 0.3, 0.6, 1.0, 2.0

FEATURES = (
    "words", "content words", "rarest word", "mean idf", "content idf", "log probability", "mean log probability",
    *(f"coverage {k:g}" for k in COVERAGE), "nearest", "mean of 10", "mean of 100",
    *(f"density {k}" for k in SHARPNESS),
)  # fmt: skip
"""The numbers of a caption among others. Probabilities are those of pairs of words. Coverage k is the log of .01 and
the sum of exp(-k * idf of its content words that another lacks); density k that of the sum of exp(k * (cosine - 1))."""

_BLOCK = 500
_stem = functools.cache(snowballstemmer.stemmer("english").stemWord)
_STOPS = frozenset(map(_stem, FUNCTION_WORDS))


def _stems(text: str) -> list[str]:
    return [_stem(word) for word in re.findall("[a-z]+", text.lower())]


class References:
    """Captions without labels, each placed among the others."""

    def __init__(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """vectors (n, d) unit vectors."""
        self._vectors, self._n, self._stems = vectors, len(texts), [*map(_stems, texts)]
        having = defaultdict[str, list[int]](list)
        self._pairs, self._firsts = Counter[tuple[str, str]](), Counter[str]()
        for i, words in enumerate(self._stems):
            for word in set(words):
                having[word].append(i)
            self._pairs.update(pairwise(["", *words, ""]))
            self._firsts.update(["", *words])
        self._having = {word: np.array(rows) for word, rows in having.items()}

    def features(self) -> np.ndarray:
        """(n, f) FEATURES."""
        near = [self._near(start) for start in range(0, self._n, _BLOCK)]
        return np.column_stack([[*map(self._of_words, self._stems)], np.concatenate(near)])

    def _of_words(self, words: list[str]) -> list[float]:
        idf = {word: float(np.log(self._n / (len(self._having[word]) - 0.5))) for word in words}
        content = [word for word in idf if word not in _STOPS]
        missing = np.full(self._n, sum(idf[word] for word in content))
        for word in content:
            missing[self._having[word]] -= idf[word]
        pairs = [*pairwise(["", *words, ""])]
        own, firsts = Counter(pairs), Counter(first for first, _ in pairs)
        logs = np.log([(self._pairs[p] - own[p] + 0.5) / (self._firsts[p[0]] - firsts[p[0]] + 5) for p in pairs])
        of_idf = [max(idf.values(), default=0.0), sum(idf[word] for word in words) / max(1, len(words))]
        of_idf.append(sum(idf[word] for word in content))
        coverage = [np.log(np.exp(-k * missing).sum() - 0.99) for k in COVERAGE]
        return [len(words), len(content), *of_idf, logs.sum(), logs.mean(), *coverage]

    def _near(self, start: int) -> np.ndarray:
        rows = np.arange(start, min(start + _BLOCK, self._n))
        cosine = self._vectors[rows] @ self._vectors.T
        cosine[rows - start, rows] = -1  # Of a caption with itself: as far as one can be.
        return place(cosine, np.zeros(len(rows)))[:, 1:]
