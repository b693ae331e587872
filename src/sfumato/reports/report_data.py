"""The data of a report: the embeddings of a split, and the search results in both directions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from sfumato.direction import Direction
from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.search.exact import top_k

RESULTS = 5
"""Results that are kept of each query."""


@dataclass(frozen=True, eq=False)
class ReportData:
    """The input data of a report page.

    Attributes:
        model: name of the model, for the title.
        split: name of the split, for the title.
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        relevance: image -> texts that truly match.
        distance: name of the model's distance; results are ranked by it.
        logits: (scale, bias) of the match probabilities.
        calibrated: whether these were fitted on held-out pairs.
        learnt_logits: (scale, bias) that the loss learnt in training, for comparison; None if there are none.
        captions: (m,) the texts.
        text_kinds: (m,) kinds for a breakdown; None for none.
        image_names: (n,) ids of the images.
        thumbnail: the bytes of a small WebP, PNG or JPEG file of the image at a position; None if it cannot be read.
        others: evaluations of the same split by other distances, as :meth:`Evaluation.to_json` gives them.
        trust: the figures of the estimators of uncertainty, as `sfumato trust` writes them.
        analyses: results of the studies by name, in the form that `sfumato analyse` writes.
        analysis_image: the bytes of an image that a study names; None if it is missing.
        recipe: the text of the run's recipe.
        log: of training, one dictionary for each epoch.
        notes: sentences about omitted parts.
        version: of the program that makes the page.

    Raises:
        ValueError: the number of captions, names or kinds does not fit the embeddings.
    """

    model: str
    split: str
    images: GaussianEmbedding
    texts: GaussianEmbedding
    relevance: Relevance
    distance: str
    logits: tuple[float, float]
    calibrated: bool
    captions: Sequence[str]
    image_names: Sequence[str]
    thumbnail: Callable[[int], bytes | None]
    learnt_logits: tuple[float, float] | None = None
    text_kinds: Sequence[str] | None = None
    others: Sequence[Mapping[str, Any]] = ()
    trust: Mapping[str, Any] | None = None
    analyses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    analysis_image: Callable[[str], bytes | None] = lambda name: None
    recipe: str = ""
    log: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    version: str = ""

    def __post_init__(self) -> None:
        for name, side, n in (
            ("captions", "texts", self.texts.n),
            ("image_names", "images", self.images.n),
            *((("text_kinds", "texts", self.texts.n),) if self.text_kinds is not None else ()),
        ):
            if len(getattr(self, name)) != n:
                raise ValueError(f"ReportData: got {len(getattr(self, name))} {name} for {n} {side}; give one for each")


@dataclass(frozen=True, eq=False)
class DirectionResult:
    """The search results of one direction.

    Attributes:
        key: "i2t" or "t2i".
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings.
        ground_truth: query -> gallery items that truly match.
        ranks: (p,) ranks of these items, from 0.
        closest: (n, RESULTS) positions of the closest items.
        distances: (n, RESULTS) their distances.
    """

    key: Direction
    queries: GaussianEmbedding
    gallery: GaussianEmbedding
    ground_truth: Relevance
    ranks: np.ndarray
    closest: np.ndarray
    distances: Tensor

    def true_items(self, query: int) -> np.ndarray:
        """The true items of a query, the best-ranked first.

        Args:
            query: position of the query.

        Returns:
            Positions in the gallery.
        """
        start, stop = self.ground_truth.indptr[query : query + 2]
        items: np.ndarray = self.ground_truth.indices[start:stop][np.argsort(self.ranks[start:stop], kind="stable")]
        return items

    def best_rank(self, query: int) -> int:
        """The rank of a query's best-ranked true item.

        Args:
            query: position of a query that has a true item.

        Returns:
            The rank, from 1.
        """
        return int(self.ranks[slice(*self.ground_truth.indptr[query : query + 2])].min()) + 1

    @property
    def first_is_right(self) -> np.ndarray:
        """(n,) 1 where the first result is true, 0 where not, NaN for queries without a true item."""
        return per_query_metrics(self.ranks, self.ground_truth)["recall@1"]


def direction_result(data: ReportData, direction: Direction, ranks: np.ndarray) -> DirectionResult:
    """Search in one direction.

    Args:
        data: the embeddings and the ground truth.
        direction: "i2t" or "t2i".
        ranks: (p,) ranks of the true items of all queries, from 0.

    Returns:
        The results.
    """
    queries, gallery = (data.images, data.texts) if direction == "i2t" else (data.texts, data.images)
    ground_truth = data.relevance if direction == "i2t" else data.relevance.transpose()
    distances, closest = top_k(queries, gallery, RESULTS, get_distance(data.distance).for_direction(direction))
    return DirectionResult(direction, queries, gallery, ground_truth, ranks, closest.cpu().numpy(), distances.cpu())
