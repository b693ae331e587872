"""Evaluation of a set of images and texts in both directions, for any ground truth and any distance."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, get_args

import numpy as np
import torch

from sfumato.distances import get_distance
from sfumato.distances.distance import Distance
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding, ScalarUncertainty
from sfumato.ids import DIRECTIONS, Direction
from sfumato.metrics.bootstrap import balanced_spearman, none_if_nan, spearman
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import RecallByUncertainty
from sfumato.metrics.retrieval import beats_chance, chance_metrics, per_query_metrics, retrieval_metrics
from sfumato.search.exact import rank_relevant


@dataclass(frozen=True, eq=False)
class Query:
    """One direction of a split: its queries search in its gallery."""

    direction: Direction
    queries: GaussianEmbedding  # (n, d) embeddings
    gallery: GaussianEmbedding  # (m, d) embeddings
    relevance: Relevance  # query -> its true items

    def first_hits(self, distance: str | Distance) -> np.ndarray:
        """(n,) whether the closest item of each query is a true one, 0 or 1; NaN for queries without any."""
        oriented = get_distance(distance).for_direction(self.direction)
        ranks = rank_relevant(self.queries, self.gallery, self.relevance, oriented)
        return per_query_metrics(ranks, self.relevance)["recall@1"]


@dataclass(frozen=True, eq=False)
class EmbeddedSplit:
    """The embedded images and texts of a split and which of them match."""

    images: GaussianEmbedding  # (n, d) embeddings
    texts: GaussianEmbedding  # (m, d) embeddings
    relevance: Relevance  # image -> its true texts

    def query(self, direction: Direction) -> Query:
        """The split as queries of one direction and their gallery."""
        if direction == "i2t":
            return Query(direction, self.images, self.texts, self.relevance)
        return Query(direction, self.texts, self.images, self.relevance.transpose())


class Ranker(Protocol):
    """The interface of :func:`~sfumato.search.exact.rank_relevant`, for several processes or another search."""

    def __call__(
        self, queries: GaussianEmbedding, gallery: GaussianEmbedding, relevance: Relevance, distance: str | Distance
    ) -> np.ndarray:
        """Rank the relevant items of each query within the gallery.

        Args:
            queries: (n, d) embeddings.
            gallery: (m, d) embeddings.
            relevance: query -> its relevant items.
            distance: of (queries, gallery).

        Returns:
            (p,) ranks from 0 of all relevant items, in the order of relevance.indices.
        """
        ...


@dataclass(frozen=True)
class EvaluationOptions:
    """What an evaluation measures beside the distance."""

    n_samples: int | None = None  # samples of each embedding at test time; None for those of the model
    seed: int = 0  # of these samples
    uncertainty: ScalarUncertainty = "total_variance"  # of the queries

    def __post_init__(self) -> None:
        if self.uncertainty not in get_args(ScalarUncertainty):
            known = ", ".join(get_args(ScalarUncertainty))
            raise UserError(f"--uncertainty {self.uncertainty}: unknown; known: {known}")
        if self.n_samples is not None and self.n_samples < 1:
            raise UserError(f"--samples {self.n_samples}: give at least 1")

    def check_samples(self, distance: Distance) -> None:
        """Refuse a number of samples that has no effect."""
        if self.n_samples is not None and not distance.sampled:
            raise UserError(
                "--samples is for distances that are estimated from samples, average_l2 and match_probability;"
                f" {distance.name} needs none. Leave --samples out, or rank by one of these"
            )

    def sampled(self, distance: Distance) -> Distance:
        """A distance with the samples of these options."""
        return distance.with_samples(self.n_samples, self.seed)


@dataclass(frozen=True)
class Evaluation:
    """The figures of an evaluation; recalls and precisions are fractions in [0, 1]."""

    distance: str  # name of the distance used for ranking
    n_images: int  # number of images
    n_texts: int  # number of texts
    i2t: dict[str, float]  # retrieval metrics of images as queries
    t2i: dict[str, float]  # retrieval metrics of texts as queries
    rsum: float  # recall@1 + recall@5 + recall@10 of both directions; at most 6
    t2i_by_kind: dict[str, dict[str, float]]  # text to image metrics of the texts of each kind
    i2t_by_kind: dict[str, dict[str, float]]  # image to text metrics with only the texts of that kind as gallery
    uncertainty: dict[str, Any] | None
    multiplicity: dict[str, float | None] | None
    total_variance: dict[str, float]  # means of "image" and "text"
    chance: dict[str, dict[str, float]]
    uncertainty_measure: str = "total_variance"
    samples: dict[str, int] | None = None  # {"n", "seed"} of a sampled distance; None for the others

    @property
    def chance_rsum(self) -> float:
        """The rsum of a random order."""
        return sum(metrics[f"recall@{k}"] for metrics in self.chance.values() for k in (1, 5, 10))

    @property
    def above_chance(self) -> bool:
        """Whether either direction ranks better than a random order, see :func:`beats_chance`.

        The captions of an image do not count as independent: a direction has at most as many queries as there are
        images and texts on the smaller side.
        """
        independent = min(self.n_images, self.n_texts)
        return any(
            beats_chance(metrics, self.chance[direction], independent)
            for direction, metrics in (("i2t", self.i2t), ("t2i", self.t2i))
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)


def evaluate_retrieval(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    relevance: Relevance,
    *,
    distance: str | Distance = "csd",
    text_kinds: Sequence[str] | None = None,
    rank: Ranker = rank_relevant,
    uncertainty: ScalarUncertainty = "total_variance",
) -> Evaluation:
    """Evaluate both directions.

    Args:
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        relevance: image -> true texts.
        distance: to rank by: a name in DISTANCES, or a distance with images as its first argument.
        text_kinds: (m,) kinds of the texts for a breakdown; no breakdown if None or if there is only one kind.
        rank: the ranking function; by default exact search in this process.
        uncertainty: the scalar uncertainty of the queries.

    Returns:
        All figures.

    Raises:
        ValueError: sizes do not fit, or nothing matches.
    """
    if text_kinds is not None and len(text_kinds) != texts.n:
        raise ValueError(f"evaluate_retrieval: got {len(text_kinds)} text_kinds for {texts.n} texts; give one for each")
    chosen, split = get_distance(distance), EmbeddedSplit(images, texts, relevance)
    sides = {direction: split.query(direction) for direction in DIRECTIONS}
    ranks = {d: rank(q.queries, q.gallery, q.relevance, chosen.for_direction(d)) for d, q in sides.items()}
    metrics = {d: retrieval_metrics(ranks[d], q.relevance) for d, q in sides.items()}
    other = sides["t2i"].relevance
    kinds = np.array(text_kinds if text_kinds is not None else ["caption"] * texts.n)
    t2i_by_kind, i2t_by_kind = {}, {}
    if len(set(kinds)) > 1:
        for kind in dict.fromkeys(kinds.tolist()):
            index = np.flatnonzero(kinds == kind)
            of_kind = np.isin(other.query_of_item, index)
            narrowed = relevance.select_gallery(index)
            if len(narrowed.indices):
                t2i_by_kind[kind] = retrieval_metrics(ranks["t2i"][of_kind], other.select_queries(index))
                i2t_by_kind[kind] = retrieval_metrics(
                    rank(images, texts[torch.from_numpy(index).to(texts.device)], narrowed, chosen), narrowed
                )
    values = {d: q.queries.uncertainty(uncertainty).cpu().numpy() for d, q in sides.items()}
    by_uncertainty: dict[str, Any] | None = None
    if any(v.min(initial=np.inf) < v.max(initial=-np.inf) for v in values.values()):
        hits = {d: per_query_metrics(ranks[d], q.relevance)["recall@1"] for d, q in sides.items()}
        by_uncertainty = {d: vars(RecallByUncertainty.of(values[d], hits[d])) for d in sides}
    has = other.counts > 0
    return Evaluation(
        distance=chosen.name,
        n_images=images.n,
        n_texts=texts.n,
        i2t=metrics["i2t"],
        t2i=metrics["t2i"],
        rsum=sum(of[f"recall@{k}"] for of in metrics.values() for k in (1, 5, 10)),
        t2i_by_kind=t2i_by_kind,
        i2t_by_kind=i2t_by_kind,
        uncertainty=by_uncertainty,
        multiplicity=_multiplicity(values["t2i"][has], other.counts[has]) if by_uncertainty else None,
        total_variance={name: float(e.total_variance.mean()) for name, e in (("image", images), ("text", texts))},
        chance={direction: chance_metrics(q.relevance) for direction, q in sides.items()},
        uncertainty_measure=uncertainty,
        samples=samples_of(chosen),
    )


def table_rows(evaluation: Evaluation) -> list[tuple[str, dict[str, float]]]:
    """List the rows of a table. Returns (name, metrics)."""
    rows = [("image -> text", evaluation.i2t), ("text -> image", evaluation.t2i)]
    rows += [(f"image -> {kind}", metrics) for kind, metrics in evaluation.i2t_by_kind.items()]
    rows += [(f"{kind} -> image", metrics) for kind, metrics in evaluation.t2i_by_kind.items()]
    return rows


def samples_of(distance: Distance) -> dict[str, int] | None:
    """The samples by which a distance ranks."""
    return {"n": distance.n_samples, "seed": distance.seed} if distance.sampled else None


def _multiplicity(uncertainty: np.ndarray, counts: np.ndarray) -> dict[str, float | None] | None:
    if counts.max(initial=0) <= 1:
        return None
    return {
        "all": none_if_nan(spearman(uncertainty, counts)),
        "balanced": none_if_nan(balanced_spearman(uncertainty, counts)),
        "n_texts": len(counts),
    }
