"""Proxies of an image's ambiguity, computed from its own captions."""

from collections.abc import Sequence

import numpy as np

from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance


def caption_distance(texts: GaussianEmbedding, relevance: Relevance) -> np.ndarray:
    """Mean squared distance between the means of an image's own captions, over all pairs of them.

    A proxy of an image's ambiguity for data in which nobody counted the true matches. It uses the ground truth, namely
    which captions belong to the image, so it can judge estimators but is none.

    Args:
        texts: (m, d) embeddings.
        relevance: image -> its texts.

    Returns:
        (n,) squared distances, one per image; NaN for an image with fewer than two texts.
    """
    mean = texts.mean.double().cpu().numpy()
    result = np.full(relevance.n_queries, np.nan)
    for i, count in enumerate(relevance.counts):
        if count > 1:
            own = mean[relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]]
            result[i] = 2 * count / (count - 1) * np.square(own - own.mean(0)).sum(1).mean()
    return result


def caption_words(texts: Sequence[str], relevance: Relevance) -> np.ndarray:
    """One minus the mean Jaccard overlap of the word sets of an image's own captions, over all pairs of them.

    It is a proxy of ambiguity as :func:`caption_distance` is, but needs no model.

    Args:
        texts: m captions.
        relevance: image -> its texts.

    Returns:
        (n,) in [0, 1], one per image; NaN for an image with fewer than two texts.

    Example:
        >>> caption_words(["A red dog.", "a dog"], Relevance.from_lists([[0, 1]], n_gallery=2)).round(3)
        array([0.333])
    """
    words = [set(words_of(text)) for text in texts]
    result = np.full(relevance.n_queries, np.nan)
    for i, count in enumerate(relevance.counts):
        if count > 1:
            own = [words[t] for t in relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]]
            overlaps = [len(a & b) / max(len(a | b), 1) for k, a in enumerate(own) for b in own[:k]]
            result[i] = 1 - sum(overlaps) / len(overlaps)
    return result


def words_of(text: str) -> list[str]:
    """Split a text into lower-case words, which are runs of letters and digits.

    Args:
        text: any text.

    Returns:
        The words in the order of the text.

    Example:
        >>> words_of("A dog's ball, 2x")
        ['a', 'dog', 's', 'ball', '2x']
    """
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()
