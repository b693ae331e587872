"""Estimators of a query's uncertainty with one interface: queries and a gallery in, one number per query out.

Higher is less certain, everywhere. An estimator never uses a label of its query. evaluation/trust.py measures the
quality of each estimator.

There are two kinds of uncertainty. *Aleatoric*: the query itself is ambiguous, as the text "animal" is. *Epistemic*:
the model does not know, because it was not trained for such a query or because the gallery holds no answer.

To add an estimator: write a function of a :class:`Block`, add its :class:`Estimator` to the list of ESTIMATORS below,
and its slow loop to ``by_loops`` in tests/evaluation/test_estimators.py. Code outside of the package calls
:func:`register_estimator` instead.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from sfumato.arrays import Array, as_numpy, like, namespace, sigmoid, smallest
from sfumato.calibration.fits import FEWEST_WORDS, images_and_precision
from sfumato.distances import get_distance, squared_l2_matrix
from sfumato.distances.distance import Distance
from sfumato.encoders.package_weights import sentence_vectors
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Direction
from sfumato.imports import claim_name
from sfumato.matching import match_logit, match_probability
from sfumato.metrics.relevance import Relevance
from sfumato.search.exact import distance_blocks
from sfumato.search.languages import words_of

NEAREST = 10
"""Number of nearest gallery items that the local estimators look at."""

Kind = Literal["aleatoric", "epistemic", "both"]
"""The kind of uncertainty that an estimator is meant to see."""

Texts = Sequence[str] | None
"""The texts of queries; None if they are images, or are known by their embeddings alone."""


@dataclass(frozen=True)
class Matching:
    """The matching of queries with a gallery by a model: the distance and the match logits."""

    distance: str = "csd"  # name in DISTANCES
    logit_scale: float = 5.0  # factor of the distance in the match logit; best the calibrated one
    logit_bias: float = 5.0  # constant of the match logit; best the calibrated one
    direction: Direction = "i2t"  # "i2t" if the queries are images, "t2i" if they are texts

    @property
    def oriented_distance(self) -> Distance:
        """The distance of (queries, gallery)."""
        return get_distance(self.distance).for_direction(self.direction)


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries with their distances to the gallery; all estimators use the same computed quantities.

    They are tensors if the embeddings are, else arrays of NumPy.
    """

    queries: GaussianEmbedding  # (b, d) embeddings
    gallery: GaussianEmbedding  # (m, d) embeddings
    distance: Array  # (b, m) distances; infinite for items that are left out
    matching: Matching  # the distance and the match logits
    seed: int = 0  # of the samples
    texts: Texts = None  # b texts of the queries; None if they have none

    @cached_property
    def logit(self) -> Array:
        """(b, m) match logits; minus infinity for items that are left out."""
        return match_logit(self.distance, self.matching.logit_scale, self.matching.logit_bias)

    @cached_property
    def nearest(self) -> tuple[Array, Array]:
        """((b, k) distances ascending, (b, k) positions) of the k = NEAREST closest items, or of all m if there are
        fewer."""
        values, index = (like(each, self.distance) for each in smallest(self.distance, NEAREST))
        return values, index

    @cached_property
    def nearest_logit(self) -> Array:
        """(b, k) match logits of the nearest items, descending."""
        return match_logit(self.nearest[0], self.matching.logit_scale, self.matching.logit_bias)

    @cached_property
    def images_and_precision(self) -> tuple[np.ndarray, np.ndarray]:
        """(b,) numbers of COCO's images and (b,) precisions at 10, predicted from the texts alone."""
        texts = () if self.texts is None else self.texts
        return images_and_precision(sentence_vectors(texts), np.array([len(words_of(text)) for text in texts], int))


UncertaintyFunction = Callable[[Block], Array]
"""Computes (b,) uncertainties of the b queries of a block; higher is less certain.

It must compute each row of the block independently, because the size of a block depends on the memory budget. It must
not change the block. It may return infinities but no NaN.
"""


@dataclass(frozen=True)
class Estimator:
    """An estimator of uncertainty, an entry of ESTIMATORS.

    Attributes:
        name: its key in ESTIMATORS.
        formula: its formula in one line.
        kind: the kind of uncertainty that it is intended to measure.
        cost: number of operations beyond the distances of a search, in n queries, m items and d dimensions.
        function: computes it; see :data:`UncertaintyFunction`.
        needs_gallery: whether it uses the gallery.
        needs_variance: whether it is undefined for points, which have no variance.
        needs_texts: whether it reads the texts of the queries, and is undefined for other queries.
    """

    name: str
    formula: str
    kind: Kind
    cost: str
    function: UncertaintyFunction
    needs_gallery: bool = True
    needs_variance: bool = False
    needs_texts: bool = False

    def __call__(
        self, queries: GaussianEmbedding, gallery: GaussianEmbedding, matching: Matching, texts: Texts = None
    ) -> np.ndarray:
        """(n,) float64 uncertainties of the queries: :func:`estimate_uncertainty` with this estimator alone."""
        return estimate_uncertainty(queries, gallery, matching, estimators={self.name: self}, texts=texts)[self.name]


# ---------------------------------------------------------------- the functions
def entropy(logit: Array) -> Array:
    """(b,) entropy, in nats, of the softmax of logits (b, m)."""
    xp = namespace(logit)
    odds = xp.exp(logit - xp.max(logit, axis=1, keepdims=True))
    p = odds / xp.sum(odds, axis=1, keepdims=True)
    return -xp.sum(p * xp.log(xp.where(p > 0, p, 1.0)), axis=1)


def _expected_matches(block: Block) -> Array:
    p = match_probability(block.distance, block.matching.logit_scale, block.matching.logit_bias)
    xp = namespace(p)
    return xp.sum(p, axis=1, dtype=xp.float64)


def _misses(block: Block) -> np.ndarray:
    """(b, k) probabilities that the nearest items do not match."""
    # In float32 all queries without a likely match would tie at 1.
    return sigmoid(-as_numpy(block.nearest_logit).astype(np.float64))


def _nearest_mean(block: Block) -> Array:
    distance = squared_l2_matrix(block.queries, block.gallery)
    xp = namespace(distance)
    return xp.min(xp.where(block.distance == np.inf, np.inf, distance), axis=1)


# ---------------------------------------------------------------- the registry
_MEANT_FOR = f"meant for English captions of {FEWEST_WORDS} words or more"
ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator(
            "total_variance",
            "sum of the query's variances (Chun 2024, 3.4); under csd it lowers all logits of a query equally",
            "aleatoric", "n d", lambda block: block.queries.total_variance, needs_gallery=False,
        ),
        Estimator(
            "expected_matches", "sum of the match probabilities over the gallery: the expected number of true matches",
            "aleatoric", "n m", _expected_matches,
        ),
        Estimator(
            "match_entropy", "entropy, in nats, of the softmax of the match logits over the gallery",
            "both", "n m", lambda block: entropy(block.logit),
        ),
        Estimator(
            "top1_mismatch",
            "probability that the best item does not match; same order as the distance to the nearest item",
            "both", "n m", lambda block: _misses(block)[:, 0],
        ),
        Estimator(
            "margin", "second best match logit minus the best; under csd independent of the query's own variance",
            "both", "n m", lambda block: block.nearest_logit[:, 1] - block.nearest_logit[:, 0],
        ),
        Estimator(
            "nearest_mean",
            "squared distance of the query's mean to the nearest mean of the gallery; it ignores variances",
            "epistemic", "n m d, a second matrix product", _nearest_mean,
        ),
        Estimator(
            "expected_misses", f"1 - mean match probability of the {NEAREST} nearest items",
            "both", f"n m for the best {NEAREST}", lambda block: _misses(block).mean(1),
        ),
        Estimator(
            "text_misses",
            f"fraction of misses in COCO's 10 best by CLIP and BLIP-2, predicted from the text alone; {_MEANT_FOR}",
            "both", "n sentence vectors", lambda block: 1 - block.images_and_precision[1],
            needs_gallery=False, needs_texts=True,
        ),
        Estimator(
            "text_multiplicity",
            f"number of COCO's images that people would find for the text, predicted from it alone; {_MEANT_FOR}",
            "aleatoric", "n sentence vectors", lambda block: block.images_and_precision[0],
            needs_gallery=False, needs_texts=True,
        ),
    )
}  # fmt: skip
"""Every estimator by name, the registered ones included."""

BUILT_IN = frozenset(ESTIMATORS)
"""The names of those of the package."""


def register_estimator(estimator: Estimator) -> Estimator:
    """Add an estimator to ESTIMATORS, so that all measurements include it.

    After this call :func:`estimate_uncertainty`, :func:`~sfumato.evaluation.trust.measure_trust` and the commands of
    the same process know it by its name. ``ESTIMATORS.pop(name)`` removes it.

    Args:
        estimator: its name must be new.

    Returns:
        The estimator.

    Raises:
        ValueError: another place has taken the name, it is not an identifier, or the kind is unknown.

    Example:
        >>> def largest_variance(block: Block) -> np.ndarray:
        ...     return block.queries.var.max(1)
        >>> entry = Estimator(
        ...     "largest_variance", "largest variance of the query", "aleatoric", "n d", largest_variance,
        ...     needs_gallery=False,
        ... )
        >>> entry is register_estimator(entry)
        True
        >>> query = GaussianEmbedding(np.zeros((1, 2)), np.array([[0.0, -1.0]]))
        >>> found = estimate_uncertainty(query, query[:0], Matching(), estimators={"largest_variance": entry})
        >>> float(found["largest_variance"][0])
        1.0
        >>> ESTIMATORS.pop("largest_variance") is entry
        True
    """
    if estimator.kind not in get_args(Kind):
        raise ValueError(f"register_estimator: unknown kind {estimator.kind!r}; known: {', '.join(get_args(Kind))}")
    claim_name("estimator", estimator.name, ESTIMATORS, estimator.function)
    ESTIMATORS[estimator.name] = estimator
    return estimator


def estimate_uncertainty(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    matching: Matching,
    *,
    estimators: Mapping[str, Estimator] | None = None,
    texts: Texts = None,
    without: Relevance | None = None,
    memory_mb: float = 32.0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Compute the uncertainties of queries by several estimators, in one pass over the gallery.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings; m >= 2 if an estimator uses the gallery.
        matching: the distance and the match logits.
        estimators: by name; by default all of ESTIMATORS that are defined for these queries and this gallery.
        texts: the n texts of the queries, if they are texts.
        without: for n queries and m items, the items that are left out of a query's gallery; at least NEAREST must
            remain.
        memory_mb: size of a block of distances, in MiB; the working memory is about six times that.
        seed: of the samples of an estimator that takes some.

    Returns:
        For each estimator (n,) float64, higher is less certain. Points have a log_det of minus infinity.

    Raises:
        ValueError: sizes do not fit, the gallery is too small, or an estimator needs variances and gets points, or
            needs texts and gets none.

    Example:
        >>> queries = GaussianEmbedding(np.zeros((2, 2)), np.array([[0.0, 0.0], [-1.0, -1.0]]))
        >>> gallery = GaussianEmbedding.point(np.array([[0.0, 1.0], [2.0, 0.0]]))
        >>> chosen = {"total_variance": ESTIMATORS["total_variance"]}
        >>> estimate_uncertainty(queries, gallery, Matching(), estimators=chosen)["total_variance"].round(3)
        array([2.   , 0.736])
    """
    if texts is not None and len(texts) != queries.n:
        raise ValueError(f"estimate_uncertainty: {len(texts)} texts for {queries.n} queries; give one for each")
    if without is not None and (without.n_queries, without.n_gallery) != (queries.n, gallery.n):
        listed = f"`without` is of {without.n_queries} by {without.n_gallery}"
        raise ValueError(f"estimate_uncertainty: {queries.n} queries and {gallery.n} items, but {listed}")
    if without is not None and gallery.n - without.counts.max(initial=0) < NEAREST:
        raise ValueError(f"estimate_uncertainty: `without` leaves a query fewer than {NEAREST} items; leave it out")
    usable = usable_estimators(queries, gallery, estimators=estimators, texts=texts)
    estimators = usable if estimators is None else estimators
    looking = [name for name, e in estimators.items() if e.needs_gallery]
    if looking and gallery.n < 2:
        raise ValueError(f"estimate_uncertainty: {looking[0]} needs a gallery of at least two items, got {gallery.n}")
    if missing := [name for name in estimators if name not in usable]:
        needs = "texts, got none" if estimators[missing[0]].needs_texts and texts is None else "variances, got points"
        raise ValueError(f"estimate_uncertainty: {missing[0]} needs {needs}; choose with usable_estimators()")
    queries, gallery = queries.detach(), gallery.detach()
    parts: dict[str, list[np.ndarray]] = {name: [np.empty(0)] for name in estimators}
    blocks: Iterable[tuple[int, Array]] = [(0, queries.mean[:, :0])]
    if looking:
        blocks = distance_blocks(queries, gallery, matching.oriented_distance, memory_mb=memory_mb)
    for start, distance in blocks:
        own = queries[start : start + len(distance)]
        if without is not None and distance.shape[1]:
            low, high = without.indptr[start], without.indptr[start + own.n]
            at = without.query_of_item[low:high] - start, without.indices[low:high]
            distance = namespace(distance).asarray(distance, copy=True)
            distance[tuple(like(index, distance) for index in at)] = np.inf
        block = Block(own, gallery, distance, matching, seed, None if texts is None else texts[start : start + own.n])
        for name, estimator in estimators.items():
            parts[name].append(as_numpy(estimator.function(block)).astype(np.float64))
    return {name: np.concatenate(values) for name, values in parts.items()}


def usable_estimators(
    *embeddings: GaussianEmbedding, estimators: Mapping[str, Estimator] | None = None, texts: Texts = None
) -> dict[str, Estimator]:
    """Choose the estimators, of all by default, that are defined for these embeddings and texts of queries."""
    points = any(bool((e.log_var == -np.inf).any()) for e in embeddings)
    known = ESTIMATORS if estimators is None else estimators
    return {n: e for n, e in known.items() if not ((points and e.needs_variance) or (texts is None and e.needs_texts))}
