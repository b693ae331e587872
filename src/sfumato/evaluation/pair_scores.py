"""Scores of pairs: how much farther a listed pair is apart than its neighbours, and which unlisted pairs are close."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sfumato.arrays import Array, as_numpy, like, namespace, sigmoid, smallest
from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import relevant_ranks
from sfumato.search.exact import distance_blocks

NEIGHBOURS = 10
"""Number of closest unlisted items that a pair is compared with."""

Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class _Scores:
    image: np.ndarray  # (p,) positions of the images
    text: np.ndarray  # (p,) positions of the texts
    distance: np.ndarray  # (p,) between image and text

    def __len__(self) -> int:
        return len(self.image)


@dataclass(frozen=True, eq=False)
class ListedScores(_Scores):
    """The p listed pairs, by image and then by text."""

    excess: np.ndarray
    text_rank: np.ndarray
    image_rank: np.ndarray  # (p,) number of unlisted images that are closer to the text, likewise
    better_text: np.ndarray  # (p,) closest unlisted text of the image; -1 if all texts are listed
    better_image: np.ndarray  # (p,) closest unlisted image of the text; -1 if all images are listed
    better_text_distance: np.ndarray  # (p,) distance of that text from the image; infinite if there is none
    better_image_distance: np.ndarray  # (p,) distance of that image from the text; infinite if there is none


@dataclass(frozen=True, eq=False)
class MissingScores(_Scores):
    """Unlisted pairs that may match, the closest first; a small distance is suspicious."""

    text_rank: np.ndarray  # (p,) rank from 0 among the unlisted texts of the image; -1 beyond NEIGHBOURS
    image_rank: np.ndarray  # (p,) rank from 0 among the unlisted images of the text; -1 beyond NEIGHBOURS


@dataclass(frozen=True, eq=False)
class _Side:
    """One direction: (p,) distances and ranks of the listed pairs, (n, k) closest unlisted items of each query."""

    distance: np.ndarray
    rank: np.ndarray
    near: np.ndarray
    near_distance: np.ndarray

    def reference(self, query: np.ndarray) -> np.ndarray:
        """(p,) mean distance of a pair's query to its closest unlisted items; the pair's distance if there are none."""
        there = np.isfinite(self.near_distance)
        mean = np.where(there, self.near_distance, 0).sum(1) / np.maximum(there.sum(1), 1)
        return np.where(there.any(1)[query], mean[query], self.distance)


def audit_pairs(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    relevance: Relevance,
    *,
    distance: str = "csd",
    wording: Sequence[str] | None = None,
    memory_mb: float = 64.0,
    progress: Progress | None = None,
) -> tuple[ListedScores, MissingScores]:
    """Score all listed pairs, and the unlisted pairs that are closest.

    Args:
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        relevance: the listed pairs, image -> texts.
        distance: name in DISTANCES.
        wording: (m,) the texts. An unlisted text with the same words as a listed text of the image is not a missing
            match. Among unlisted texts with the same words only the closest is kept. Case and spaces are ignored. None
            compares no words.
        memory_mb: size of a block of distances, in MiB; the working memory is a few times that. All n * m distances are
            never in memory at once.
        progress: called with the number of images and texts just compared, n + m in all.

    Returns:
        (the listed pairs, candidates for missing pairs: at most NEIGHBOURS of each image and each text).

    Raises:
        ValueError: sizes do not fit, nothing is listed, or a distance is NaN.

    Example:
        >>> images = GaussianEmbedding.point(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]]))
        >>> texts = GaussianEmbedding.point(np.array([[0.0, 0.1], [0.0, 2.9], [1.0, 0.1]]))
        >>> listed = Relevance.from_lists([[0], [1], [2]], n_gallery=3)  # The last two are swapped.
        >>> audit_pairs(images, texts, listed)[0].excess > 0
        array([False,  True,  True])
    """
    if (images.n, texts.n) != (relevance.n_queries, relevance.n_gallery):
        of_list = f"a list of {relevance.n_queries} by {relevance.n_gallery}"
        raise ValueError(f"audit_pairs: {images.n} images and {texts.n} texts, but {of_list}")
    if wording is not None and len(wording) != texts.n:
        raise ValueError(f"audit_pairs: got {len(wording)} wordings for {texts.n} texts; give one for each")
    if not len(relevance.indices):
        raise ValueError("audit_pairs: no pair is listed; there is nothing to audit")
    images, texts = images.detach(), texts.detach()
    image, text = relevance.query_of_item, relevance.indices
    by_text = np.lexsort((image, text))
    i2t = get_distance(distance)
    of_images = _side(distance_blocks(images, texts, i2t, memory_mb=memory_mb), relevance, progress)
    blocks = distance_blocks(texts, images, i2t.for_direction("t2i"), memory_mb=memory_mb)
    found = _side(blocks, relevance.transpose(), progress)
    back = by_text.argsort()
    of_texts = _Side(found.distance[back], found.rank[back], found.near, found.near_distance)
    reference = (of_images.reference(image) + of_texts.reference(text)) / 2
    listed = ListedScores(
        image, text, of_images.distance, of_images.distance - reference, of_images.rank, of_texts.rank,
        of_images.near[image, 0], of_texts.near[text, 0], of_images.near_distance[image, 0],
        of_texts.near_distance[text, 0],
    )  # fmt: skip
    return listed, _missing(of_images, of_texts, relevance, wording)


def wrong_fraction(log_odds: np.ndarray, *, n_steps: int = 1000) -> float:
    """The fraction of wrong pairs among the listed ones, of maximum likelihood, by expectation maximisation.

    The listed pairs are a mixture of right pairs, with the distances of the calibration's matches, and wrong pairs,
    with the distances of its random pairs. Wrong pairs that are as close as right pairs count as right. log_odds (p,)
    = log(p(distance | match) / p(distance | no match)), the calibrated logit at equal fractions.

    Paper: Saerens, Latinne and Decaestecker, "Adjusting the outputs of a classifier to new a priori probabilities",
        2002.
    """
    fraction = 0.5
    for _ in range(n_steps):
        before, fraction = fraction, float(wrong_probability(log_odds, fraction).mean())
        if abs(fraction - before) < 1e-9:
            break
    return fraction


def wrong_fraction_interval(log_odds: np.ndarray) -> tuple[float, float]:
    """The fractions of wrong pairs that the distances do not contradict: an interval of 95 % by the likelihood ratio.

    Returns (low, high).
    """
    fractions = np.linspace(0, 1, 401)
    ratio = np.asarray(log_odds, np.float64)
    with np.errstate(divide="ignore"):
        likelihood = np.array([np.logaddexp(np.log(1 - f) + ratio, np.log(f)).sum() for f in fractions])
    near = fractions[2 * (likelihood.max() - likelihood) <= _CHI_SQUARE]
    return float(near[0]), float(near[-1])


_CHI_SQUARE = 3.841
"""95 % quantile of chi squared with one degree of freedom."""


def wrong_probability(log_odds: np.ndarray, fraction: float) -> np.ndarray:
    """(p,) probabilities that listed pairs are wrong, given the fraction of wrong pairs."""
    with np.errstate(divide="ignore"):
        prior = np.log(1 - fraction) - np.log(fraction)
    return sigmoid(-(np.asarray(log_odds, np.float64) + prior))


def _side(blocks: Iterable[tuple[int, Array]], relevance: Relevance, progress: Progress | None) -> _Side:
    k = min(NEIGHBOURS, relevance.n_gallery)
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for start, block in blocks:
        own = relevance.select_queries(np.arange(start, start + len(block)))
        at = tuple(like(i, block) for i in (own.query_of_item, own.indices))
        listed = as_numpy(block[at]).astype(np.float64)
        rank = _among_unlisted(relevant_ranks(block, own), own)
        block = namespace(block).asarray(block, copy=True)
        block[at] = np.inf
        near_distance, place = smallest(block, k)
        near = np.where(np.isfinite(near_distance), place, -1)
        parts.append((listed, rank, near, near_distance.astype(np.float64)))
        if progress:
            progress(len(block))
    return _Side(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _among_unlisted(rank: np.ndarray, ground_truth: Relevance) -> np.ndarray:
    """Ranks among all items -> ranks among those that are not listed."""
    order = np.lexsort((rank, ground_truth.query_of_item))
    own = np.empty_like(rank)
    own[order] = np.arange(len(rank)) - np.repeat(ground_truth.indptr[:-1], ground_truth.counts)
    return np.asarray(rank - own)


def _missing(of_images: _Side, of_texts: _Side, listed: Relevance, wording: Sequence[str] | None) -> MissingScores:
    """The union of the closest unlisted pairs of both directions."""
    m = len(of_texts.near)
    found = []
    for side in (of_images, of_texts):
        query, rank = np.nonzero(side.near >= 0)
        found.append((query, side.near[query, rank], side.near_distance[query, rank], rank))
    (i, t, d, rank_of_text), (t2, i2, d2, rank_of_image) = found
    key, at = np.unique(np.concatenate([i * m + t, i2 * m + t2]), return_inverse=True)
    distance = np.empty(len(key))
    distance[at] = np.concatenate([d, d2])
    ranks = np.full((2, len(key)), -1)
    ranks[0, at[: len(i)]], ranks[1, at[len(i) :]] = rank_of_text, rank_of_image
    order = np.argsort(distance, kind="stable")
    if wording is not None:
        says = np.unique([" ".join(words.lower().split()) for words in wording], return_inverse=True)[1]
        image, said = key // m, says[key % m]
        new = np.zeros(len(key), bool)
        new[order[np.unique((image * m + said)[order], return_index=True)[1]]] = True
        new &= ~np.isin(image * m + said, listed.query_of_item * m + says[listed.indices])
        order = order[new[order]]
    key = key[order]
    return MissingScores(key // m, key % m, distance[order], ranks[0, order], ranks[1, order])
