"""What a caption says of its own multiplicity: numbers of its words, and of its place among captions without labels."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import snowballstemmer

from sfumato.search.texts import FUNCTION_WORDS

COVERAGE, DENSITY = (0.3, 0.6, 1.0, 2.0), (8, 15, 20, 30, 40)

FEATURES = (
    "words", "content words", "rarest word", "mean idf", "content idf", "log probability", "mean log probability",
    *(f"coverage {k:g}" for k in COVERAGE), "nearest", "mean of 10", "mean of 100", *(f"density {k}" for k in DENSITY),
)  # fmt: skip
"""The numbers of a caption. Probabilities are those of pairs of words. Coverage k is the log of the sum, over other
captions, of exp(-k * idf of the content words that it lacks); density k that of exp(k * (cosine - 1))."""

_BLOCK = 500
_stem = snowballstemmer.stemmer("english").stemWord
_STOPS = frozenset(map(_stem, FUNCTION_WORDS))


def _stems(text: str) -> list[str]:
    return [_stem(word) for word in re.findall("[a-z]+", text.lower())]


class References:
    """Captions without labels, among which others are placed."""

    def __init__(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """vectors (n, d) unit vectors."""
        self.vectors, self.n = vectors, len(texts)
        self._having = defaultdict[str, set[int]](set)
        self._pairs, self._firsts = Counter[tuple[str, str]](), Counter[str]()
        for i, words in enumerate(map(_stems, texts)):
            for word in words:
                self._having[word].add(i)
            self._pairs.update(pairwise(["", *words, ""]))
            self._firsts.update(["", *words])

    def features(self, texts: Sequence[str], vectors: np.ndarray, *, own: bool = False) -> np.ndarray:
        """(m, f) FEATURES of m captions; own: they are the references themselves, each placed among the others."""
        near = [self._near(vectors[k : k + _BLOCK], k if own else None) for k in range(0, len(texts), _BLOCK)]
        return np.column_stack([[self._of_words(_stems(text), own) for text in texts], np.concatenate(near)])

    def _of_words(self, words: list[str], own: bool) -> list[float]:
        idf = {word: float(np.log((self.n + 1) / (len(self._having.get(word, ())) - own + 0.5))) for word in words}
        content = [word for word in idf if word not in _STOPS]
        missing = np.full(self.n, sum(idf[word] for word in content))
        for word in content:
            missing[list(self._having.get(word, ()))] -= idf[word]
        pairs = pairwise(["", *words, ""])
        logs = np.log([(self._pairs[pair] - own + 0.5) / (self._firsts[pair[0]] - own + 5) for pair in pairs])
        of_idf = [max(idf.values(), default=0.0), sum(idf[word] for word in words) / max(1, len(words))]
        of_idf.append(sum(idf[word] for word in content))
        coverage = [np.log(np.exp(-k * missing).sum() - own + 0.01) for k in COVERAGE]
        return [len(words), len(content), *of_idf, logs.sum(), logs.mean(), *coverage]

    def _near(self, vectors: np.ndarray, start: int | None) -> np.ndarray:
        cosine = vectors @ self.vectors.T
        if start is not None:
            rows = np.arange(len(vectors))
            cosine[rows, start + rows] = -1
        first = -np.sort(-cosine, axis=1)[:, :100]
        density = [np.log(np.exp(k * (cosine - 1)).sum(1)) for k in DENSITY]
        return np.column_stack([first[:, 0], first[:, :10].mean(1), first.mean(1), *density])
