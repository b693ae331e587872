"""Estimators of how uncertain a query is, on one interface: queries and a gallery in, one number per query out.

Higher is less certain, everywhere. An estimator never sees a label of the query that it judges. evaluation/trust.py
measures what each estimator is worth.

There are two kinds of uncertainty. *Aleatoric*: the query itself is ambiguous, as the text "animal" is. *Epistemic*:
the model does not know, because it was not trained for such a query or because the gallery holds no answer.

To add an estimator: write a function of a :class:`Block`, add its :class:`Estimator` to the list of ESTIMATORS below,
and its slow loop to ``by_loops`` in tests/evaluation/test_estimators.py. Code outside of the package calls
:func:`register_estimator` instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from sfumato.direction import Direction
from sfumato.distances import Distance, get_distance, squared_l2_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.inclusion import inclusion_test, log_inclusion
from sfumato.matching import match_logit
from sfumato.metrics.relevance import Relevance
from sfumato.search.exact import distance_blocks

NEAREST = 10
"""Number of nearest gallery items that the local estimators look at."""

N_SAMPLES = 8
"""Samples per query of the sampled estimators, as in PCME++'s appendix A.3."""

Kind = Literal["aleatoric", "epistemic", "both"]
"""The kind of uncertainty that an estimator is meant to see."""


@dataclass(frozen=True)
class Matching:
    """How a model matches queries with a gallery.

    Attributes:
        distance: name in DISTANCES.
        logit_scale: factor of the distance in the match logit; best the calibrated one.
        logit_bias: constant of the match logit; best the calibrated one.
        direction: "i2t" if the queries are images, "t2i" if they are texts.
    """

    distance: str = "csd"
    logit_scale: float = 5.0
    logit_bias: float = 5.0
    direction: Direction = "i2t"

    @property
    def oriented_distance(self) -> Distance:
        """The distance of (queries, gallery)."""
        return get_distance(self.distance).for_direction(self.direction)


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries, and what one pass over the gallery knows of them. Estimators share what is computed here.

    Attributes:
        queries: (b, d) embeddings.
        gallery: (m, d) embeddings.
        distance: (b, m) distances; infinite for items that are left out.
        matching: the distance and the match logits.
        seed: of the samples.
    """

    queries: GaussianEmbedding
    gallery: GaussianEmbedding
    distance: Tensor
    matching: Matching
    seed: int = 0

    @cached_property
    def logit(self) -> Tensor:
        """(b, m) match logits; minus infinity for items that are left out."""
        return match_logit(self.distance, self.matching.logit_scale, self.matching.logit_bias)

    @cached_property
    def nearest(self) -> tuple[Tensor, Tensor]:
        """((b, k) distances ascending, (b, k) positions) of the k = NEAREST closest items, or of all m if there are
        fewer."""
        values, index = self.distance.topk(min(NEAREST, self.distance.shape[1]), dim=1, largest=False)
        return values, index

    @cached_property
    def sample_distances(self) -> Tensor:
        """(b, p) squared distances between all p pairs of N_SAMPLES samples of each query.

        All queries share the same noise. Two queries therefore differ by their variances alone, and the size of a block
        does not change the result.
        """
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(N_SAMPLES, self.queries.d, generator=generator).to(self.queries.device)
        first, second = torch.triu_indices(N_SAMPLES, N_SAMPLES, 1, device=noise.device)
        distance: Tensor = self.queries.var.float() @ (noise[first] - noise[second]).square().T
        return distance

    def mean_over_nearest(self, function: Callable[[GaussianEmbedding, GaussianEmbedding], Tensor]) -> Tensor:
        """The mean of a function of (item, query) over the nearest items and over dimensions.

        Args:
            function: ((r, d) items, (r, d) queries) -> (r, d), row by row.

        Returns:
            (b,) means.
        """
        index = self.nearest[1]
        k = index.shape[1]
        rows = torch.arange(len(index), device=index.device).repeat_interleave(k)
        return function(self.gallery[index.flatten()], self.queries[rows]).mean(1).view(-1, k).mean(1)


class UncertaintyFunction(Protocol):
    """What an estimator computes: any function with this signature.

    It must treat each row of the block by itself, as the size of a block depends on the memory budget. It must not
    change the block. It may return infinities but no NaN.
    """

    def __call__(self, block: Block, /) -> Tensor:
        """Compute the uncertainty of every query of a block.

        Args:
            block: b queries with their distances to the gallery.

        Returns:
            (b,) numbers; higher is less certain.
        """
        ...


@dataclass(frozen=True)
class Estimator:
    """An estimator of uncertainty, as it stands in ESTIMATORS.

    Attributes:
        name: its key in ESTIMATORS.
        formula: what it computes, in one line.
        kind: the kind of uncertainty that it is meant to see.
        cost: number of operations beyond the distances of a search, in n queries, m items and d dimensions.
        function: computes it; see :class:`UncertaintyFunction`.
        needs_gallery: whether it looks at the gallery.
        needs_variance: whether it is undefined for points, which have no variance.
    """

    name: str
    formula: str
    kind: Kind
    cost: str
    function: UncertaintyFunction
    needs_gallery: bool = True
    needs_variance: bool = False

    def __call__(self, queries: GaussianEmbedding, gallery: GaussianEmbedding, matching: Matching) -> np.ndarray:
        """(n,) float64 uncertainties of the queries: :func:`estimate_uncertainty` with this estimator alone."""
        return estimate_uncertainty(queries, gallery, matching, estimators={self.name: self})[self.name]


# ---------------------------------------------------------------- the functions


def _total_variance(block: Block) -> Tensor:
    return block.queries.total_variance


def _log_det(block: Block) -> Tensor:
    return block.queries.log_det


def _geometric_std(block: Block) -> Tensor:
    return block.queries.geometric_std


def _sample_spread(block: Block) -> Tensor:
    return block.sample_distances.sqrt().mean(1)


def _self_mismatch(block: Block) -> Tensor:
    squared = block.sample_distances
    distance = squared.sqrt() if block.matching.distance == "average_l2" else squared
    return torch.sigmoid(-match_logit(distance.double(), block.matching.logit_scale, block.matching.logit_bias)).mean(1)


def _expected_matches(block: Block) -> Tensor:
    return torch.sigmoid(block.logit).sum(1, dtype=torch.float64)


def _entropy(logit: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(logit.softmax(1)).sum(1)
    return entropy


def _match_entropy(block: Block) -> Tensor:
    return _entropy(block.logit)


def _match_entropy_top10(block: Block) -> Tensor:
    return _entropy(match_logit(block.nearest[0], block.matching.logit_scale, block.matching.logit_bias))


def _top1_mismatch(block: Block) -> Tensor:
    # In float32 all hopeless queries would tie at 1.
    return torch.sigmoid(-block.logit.amax(1).double())


def _margin(block: Block) -> Tensor:
    best = block.logit.topk(2, dim=1).values
    return best[:, 1] - best[:, 0]


def _knn_distance(block: Block) -> Tensor:
    return block.nearest[0].mean(1)


def _nearest_mean(block: Block) -> Tensor:
    distance = squared_l2_matrix(block.queries, block.gallery)
    return distance.masked_fill(torch.isposinf(block.distance), torch.inf).amin(1)


def _inclusion(block: Block) -> Tensor:
    return block.mean_over_nearest(inclusion_test)


def _not_included(block: Block) -> Tensor:
    return -block.mean_over_nearest(lambda item, query: log_inclusion(query, item))


# ---------------------------------------------------------------- the registry

ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator(
            "total_variance",
            "sum of the query's variances (Chun 2024, 3.4); under csd it lowers all logits of a query equally",
            "aleatoric", "n d", _total_variance, needs_gallery=False,
        ),
        Estimator(
            "log_det",
            "sum of the query's log variances, the log of its squared volume (Pishdad et al., 3.3)",
            "aleatoric", "n d", _log_det, needs_gallery=False,
        ),
        Estimator(
            "geometric_std",
            "geometric mean of the query's standard deviations (Chun et al. 2021, 3.2.1); same order as log_det",
            "aleatoric", "n d", _geometric_std, needs_gallery=False,
        ),
        Estimator(
            "sample_spread",
            f"mean distance between two of {N_SAMPLES} samples of the query",
            "aleatoric", f"n d {N_SAMPLES * (N_SAMPLES - 1) // 2}, no sample is stored", _sample_spread,
            needs_gallery=False,
        ),
        Estimator(
            "self_mismatch",
            f"mean probability that two of {N_SAMPLES} samples of the query do not match (PCME)",
            "aleatoric", "as sample_spread", _self_mismatch, needs_gallery=False,
        ),
        Estimator(
            "expected_matches",
            "sum of the match probabilities over the gallery: the expected number of true matches",
            "aleatoric", "n m", _expected_matches,
        ),
        Estimator(
            "match_entropy",
            "entropy, in nats, of the softmax of the match logits over the gallery",
            "both", "n m", _match_entropy,
        ),
        Estimator(
            "match_entropy_top10",
            f"entropy, in nats, of the softmax of the match logits over the {NEAREST} nearest items",
            "both", f"n m for the best {NEAREST}", _match_entropy_top10,
        ),
        Estimator(
            "top1_mismatch",
            "probability that the best item does not match; same order as the distance to the nearest item",
            "both", "n m", _top1_mismatch,
        ),
        Estimator(
            "margin",
            "second best match logit minus the best; under csd independent of the query's own variance",
            "both", "n m", _margin,
        ),
        Estimator(
            "knn_distance",
            f"mean distance to the {NEAREST} nearest items",
            "epistemic", f"n m for the best {NEAREST}", _knn_distance,
        ),
        Estimator(
            "nearest_mean",
            "squared distance of the query's mean to the nearest mean of the gallery; it ignores variances",
            "epistemic", "n m d, a second matrix product", _nearest_mean,
        ),
        Estimator(
            "inclusion",
            f"log inclusion of the {NEAREST} nearest items in the query minus that of the query in them (ProLIP)",
            "aleatoric", f"n d {NEAREST}", _inclusion, needs_variance=True,
        ),
        Estimator(
            "not_included",
            f"negated mean log inclusion of the query in its {NEAREST} nearest items: high if none covers it",
            "epistemic", f"n d {NEAREST}", _not_included, needs_variance=True,
        ),
    )
}  # fmt: skip
"""Every estimator by name, the registered ones included."""


def register_estimator(estimator: Estimator) -> Estimator:
    """Add an estimator to ESTIMATORS, so that everything that measures all estimators measures it too.

    After this call :func:`estimate_uncertainty`, :func:`~sfumato.evaluation.trust.measure_trust` and the commands of
    the same process know it by its name. ``ESTIMATORS.pop(name)`` removes it.

    Args:
        estimator: its name must be new.

    Returns:
        The estimator.

    Raises:
        ValueError: the name is taken or is not an identifier, or the kind is unknown.

    Example:
        >>> def largest_variance(block: Block) -> Tensor:
        ...     return block.queries.var.amax(1)
        >>> entry = Estimator(
        ...     "largest_variance", "largest variance of the query", "aleatoric", "n d", largest_variance,
        needs_gallery=False ... ) >>> entry is register_estimator(entry) True >>> query =
        GaussianEmbedding(torch.zeros(1, 2), torch.tensor([[0.0, -1.0]])) >>> float(estimate_uncertainty(query,
        query[:0], Matching(), estimators={"largest_variance": entry})["largest_variance"]) 1.0 >>>
        ESTIMATORS.pop("largest_variance") is entry True
    """
    if not estimator.name.isidentifier():
        raise ValueError(f"register_estimator: {estimator.name!r} is not an identifier; use letters, digits and _")
    if estimator.name in ESTIMATORS:
        raise ValueError(f"register_estimator: there is an estimator {estimator.name!r} already; choose another name")
    if estimator.kind not in get_args(Kind):
        raise ValueError(f"register_estimator: unknown kind {estimator.kind!r}; known: {', '.join(get_args(Kind))}")
    ESTIMATORS[estimator.name] = estimator
    return estimator


@torch.no_grad()
def estimate_uncertainty(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    matching: Matching,
    *,
    estimators: Mapping[str, Estimator] = ESTIMATORS,
    without: Relevance | None = None,
    memory_mb: float = 32.0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Compute the uncertainties of queries by several estimators, in one pass over the gallery.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings; m >= 2 if an estimator looks at the gallery.
        matching: the distance and the match logits.
        estimators: by name; all of ESTIMATORS by default.
        without: for n queries and m items, the items that are left out of a query's gallery; at least NEAREST must
            remain.
        memory_mb: size of a block of distances, in MiB; the working memory is about six times that.
        seed: of the samples of sample_spread and self_mismatch.

    Returns:
        For each estimator (n,) float64, higher is less certain. Points have a log_det of minus infinity.

    Raises:
        ValueError: sizes do not fit, the gallery is too small, or an estimator needs variances and gets points.

    Example:
        >>> queries = GaussianEmbedding(torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [-1.0, -1.0]]))
        >>> gallery = GaussianEmbedding.point(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
        >>> chosen = {"total_variance": ESTIMATORS["total_variance"]}
        >>> estimate_uncertainty(queries, gallery, Matching(), estimators=chosen)["total_variance"].round(3)
        array([2.   , 0.736])
    """
    _check(queries, gallery, estimators, without)
    parts: dict[str, list[Tensor]] = {name: [] for name in estimators}
    if any(e.needs_gallery for e in estimators.values()):
        blocks = distance_blocks(queries, gallery, matching.oriented_distance, memory_mb=memory_mb)
    else:
        blocks = iter([(0, queries.mean.new_empty(queries.n, 0))])
    for start, distance in blocks:
        own = queries[start : start + len(distance)]
        if without is not None and distance.shape[1]:
            low, high = without.indptr[start], without.indptr[start + own.n]
            rows = torch.from_numpy(without.query_of_item[low:high] - start)
            distance = distance.clone()
            distance[rows, torch.from_numpy(without.indices[low:high])] = torch.inf
        block = Block(own, gallery, distance, matching, seed)
        for name, estimator in estimators.items():
            parts[name].append(estimator.function(block).double().cpu())
    return {name: torch.cat(values).numpy() if values else np.empty(0) for name, values in parts.items()}


def usable_estimators(
    *embeddings: GaussianEmbedding, estimators: Mapping[str, Estimator] = ESTIMATORS
) -> dict[str, Estimator]:
    """Choose the estimators that are defined for these embeddings.

    Args:
        embeddings: all embeddings that are involved.
        estimators: those to choose from.

    Returns:
        By name. If some of the embeddings are points, the estimators that need variances are missing.
    """
    points = any(bool(torch.isneginf(e.log_var).any()) for e in embeddings)
    return {name: e for name, e in estimators.items() if not (points and e.needs_variance)}


def _check(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    estimators: Mapping[str, Estimator],
    without: Relevance | None,
) -> None:
    if without is not None and (without.n_queries, without.n_gallery) != (queries.n, gallery.n):
        raise ValueError(
            f"estimate_uncertainty: {queries.n} queries and {gallery.n} items, but `without` is of"
            f" {without.n_queries} by {without.n_gallery}"
        )
    if without is not None and gallery.n - without.counts.max(initial=0) < NEAREST:
        raise ValueError(
            f"estimate_uncertainty: `without` leaves a query fewer than {NEAREST} items; leave such queries out"
        )
    looking = [name for name, e in estimators.items() if e.needs_gallery]
    if looking and gallery.n < 2:
        raise ValueError(f"estimate_uncertainty: {looking[0]} needs a gallery of at least two items, got {gallery.n}")
    missing = [name for name in estimators if name not in usable_estimators(queries, gallery, estimators=estimators)]
    if missing:
        raise ValueError(
            f"estimate_uncertainty: {', '.join(missing)} need variances, got points; choose with usable_estimators()"
        )
