"""What is ranked, and its evaluation in both directions, for any ground truth and any distance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from sfumato.arrays import Array, as_numpy, namespace
from sfumato.data.coco import coco_image_id
from sfumato.distances import DISTANCES, get_distance
from sfumato.distances.distance import Distance
from sfumato.errors import UserError
from sfumato.evaluation.benchmarks import RankPlan, Source
from sfumato.evaluation.ground_truth import GroundTruth
from sfumato.gaussian import GaussianEmbedding, ScalarUncertainty, accumulation_dtype
from sfumato.ids import DIRECTIONS, Direction, first_twice
from sfumato.matching import MATCH_PROBABILITY
from sfumato.metrics import retrieval
from sfumato.metrics.bootstrap import balanced_spearman, none_if_nan, spearman
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import RecallByUncertainty
from sfumato.metrics.retrieval import beats_chance, chance_metrics, per_query_metrics, retrieval_metrics
from sfumato.search.exact import distance_blocks, rank_relevant


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


Ranker = Callable[[GaussianEmbedding, GaussianEmbedding, Relevance, str | Distance], np.ndarray]
"""Called as :func:`~sfumato.search.exact.rank_relevant`, for several processes or another search.

It is given (n, d) queries, a gallery (m, d), the relevant items of each query, and the distance of (queries, gallery).
It returns (p,) ranks from 0 of all relevant items, in the order of relevance.indices.
"""


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
            those = "distances that are estimated from samples, average_l2 and match_probability"
            needless = f"{distance.name} needs none. Leave --samples out, or rank by one of these"
            raise UserError(f"--samples is for {those}; {needless}")

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
        return any(beats_chance(getattr(self, name), self.chance[name], independent) for name in DIRECTIONS)

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
                i2t_by_kind[kind] = retrieval_metrics(rank(images, texts[index], narrowed, chosen), narrowed)
    values = {d: as_numpy(q.queries.uncertainty(uncertainty)) for d, q in sides.items()}
    by_uncertainty: dict[str, Any] | None = None
    if any(v.min(initial=np.inf) < v.max(initial=-np.inf) for v in values.values()):
        hits = {d: per_query_metrics(ranks[d], q.relevance)["recall@1"] for d, q in sides.items()}
        by_uncertainty = {d: vars(RecallByUncertainty.of(values[d], hits[d])) for d in sides}
    has = other.counts > 0
    return Evaluation(
        distance=chosen.name, n_images=images.n, n_texts=texts.n, i2t=metrics["i2t"], t2i=metrics["t2i"],
        rsum=sum(of[f"recall@{k}"] for of in metrics.values() for k in (1, 5, 10)), t2i_by_kind=t2i_by_kind,
        i2t_by_kind=i2t_by_kind, uncertainty=by_uncertainty,
        multiplicity=_multiplicity(values["t2i"][has], other.counts[has]) if by_uncertainty else None,
        total_variance={name: float(e.total_variance.mean()) for name, e in (("image", images), ("text", texts))},
        chance={direction: chance_metrics(q.relevance) for direction, q in sides.items()},
        uncertainty_measure=uncertainty, samples=samples_of(chosen),
    )  # fmt: skip


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
    balanced = none_if_nan(balanced_spearman(uncertainty, counts))
    return {"all": none_if_nan(spearman(uncertainty, counts)), "balanced": balanced, "n_texts": len(counts)}


Similarity = Literal["cosine", "dot"]

SCORES = (*DISTANCES, *get_args(Similarity))
"""Names of the scores to rank by: the distances, and two similarities of the means."""


@dataclass(frozen=True, eq=False)
class EmbeddedSet:
    """Embedded images and texts with their ground truths."""

    images: GaussianEmbedding  # (n, d) embeddings
    texts: GaussianEmbedding  # (m, d) embeddings
    image_ids: tuple[str, ...]  # n distinct ids
    text_ids: tuple[str, ...]  # m distinct ids
    ground_truths: tuple[GroundTruth, ...]  # with distinct names
    text_kinds: tuple[str, ...] | None = None  # (m,) kinds of the texts, if they have any

    def uncertainty(self, measure: ScalarUncertainty = "total_variance") -> dict[str, dict[str, float]] | None:
        """Compute uncertainties in the form of :func:`~sfumato.evaluation.benchmarks.per_query_table`."""
        sides = {"i2t": (self.image_ids, self.images), "t2i": (self.text_ids, self.texts)}
        found = {name: dict(zip(ids, e.uncertainty(measure).tolist(), strict=True)) for name, (ids, e) in sides.items()}
        if not any(bool((e.total_variance != 0).any()) for _, e in sides.values()):
            return None
        found = {name: {coco_image_id(i): v for i, v in side.items()} | side for name, side in found.items()}
        images = found["i2t"]
        for identity in {i for one in self.ground_truths for i in one.image_ids} - images.keys():
            if (other := coco_image_id(identity)) in images:
                images[identity] = images[other]
        return found


@dataclass(frozen=True, eq=False)
class SimilarityMatrix:
    """The similarities of all images and texts: a ScoreMatrix that computes each block when it is read."""

    images: GaussianEmbedding  # (n, d) embeddings
    texts: GaussianEmbedding  # (m, d) embeddings
    kind: Similarity  # "dot", the product of the means, or "cosine", the product of means scaled to length 1

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.images.n, self.texts.n

    def __getitem__(self, index: Any) -> Array:
        """A block of rows, or of rows and columns, given by slices; in float32 or the higher precision of the means."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        sides = (self.images[rows], self.texts[columns])
        a, b = (e.to(accumulation_dtype(e.dtype)).detach().mean for e in sides)
        xp = namespace(a)
        a, b = (xp.astype(x, xp.result_type(a, b)) for x in (a, b))
        if self.kind == "cosine":
            a, b = (x / xp.clip(xp.linalg.vector_norm(x, axis=1, keepdims=True), 1e-12, None) for x in (a, b))
        return a @ b.T


def ranked_by(score: str | Distance, images: GaussianEmbedding, texts: GaussianEmbedding) -> Source:
    """The embeddings as a source that ranks by any score. images (n, d), texts (m, d)."""
    if (distance := distance_of_score(score)) is not None:
        return Embeddings(images, texts, distance)
    return Scores(SimilarityMatrix(images, texts, "cosine" if score == "cosine" else "dot"), "larger")


def distance_of_score(score: str | Distance) -> Distance | None:
    """The distance of a score."""
    if score in get_args(Similarity):
        return None
    if score == MATCH_PROBABILITY:
        raise ValueError(f"the score {score} needs match logits; give match_probability_distance(scale, bias)")
    try:
        return get_distance(score)
    except ValueError as error:
        raise ValueError(f"unknown score {score!r}; known: {', '.join(SCORES)}, nearest_of_K") from error


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Ranks by a distance with images as its first argument."""

    images: GaussianEmbedding  # (n, d) embeddings
    texts: GaussianEmbedding  # (m, d) embeddings
    distance: str | Distance = "csd"
    ranker: Ranker | None = None  # called for every gallery; None ranks by distances that are computed once
    memory_mb: float = 64.0  # size of a block of distances, in MiB

    def shape(self) -> tuple[int, ...]:
        """See :meth:`Source.shape`."""
        return self.images.n, self.texts.n

    def fill(self, plan: RankPlan) -> None:
        """See :meth:`Source.fill`."""
        queries, gallery = (self.images, self.texts) if plan.direction == "i2t" else (self.texts, self.images)
        oriented = get_distance(self.distance).for_direction(plan.direction)
        if self.ranker is not None:
            for group in plan.groups:
                group.ranks = self.ranker(queries[group.rows], gallery[group.gallery], group.relevance, oriented)
            return
        for start, block in distance_blocks(queries.detach(), gallery.detach(), oriented, memory_mb=self.memory_mb):
            plan.count(start, block)
            del block  # Else it stays in memory until the next one is made.


@dataclass(frozen=True, eq=False)
class Scores:
    """Ranks by a matrix of scores: an array, a memory map or a tensor. Ties go to the earlier gallery item."""

    scores: retrieval.ScoreMatrix  # (n, m) images by texts
    better: retrieval.Better  # "larger" for similarities, "smaller" for distances
    memory_mb: float = 64.0  # size of a block of scores, in MiB

    def shape(self) -> tuple[int, ...]:
        """See :meth:`Source.shape`."""
        return tuple(int(size) for size in self.scores.shape)

    def fill(self, plan: RankPlan) -> None:
        """See :meth:`Source.fill`."""
        queries = "rows" if plan.direction == "i2t" else "columns"
        blocks = retrieval.score_blocks(self.scores, better=self.better, queries=queries, memory_mb=self.memory_mb)  # type: ignore[arg-type]
        for start, block in blocks:
            plan.count(start, block)
            del block  # As above.


@dataclass(frozen=True, eq=False)
class Lists:
    """Ranks by lists of texts for images and of images for texts, complete or only their beginnings.

    Every query of a ground truth needs one. A list must not repeat an item, hold an unknown one, or be too short for a
    metric: recall@K needs K items of the fold, R-Precision and mAP@R as many as are relevant.
    """

    i2t: Mapping[Any, Sequence[Any]] | None  # {query id: [gallery ids from best to worst]}; None: not ranked
    t2i: Mapping[Any, Sequence[Any]] | None
    batch_size: int = 256  # number of queries whose lists are read at once

    def shape(self) -> None:
        """See :meth:`Source.shape`."""
        return

    def fill(self, plan: RankPlan) -> None:
        """See :meth:`Source.fill`."""
        lists = {str(query): items for query, items in (getattr(self, plan.direction) or {}).items()}
        if unknown := lists.keys() - set(plan.query_ids):
            raise ValueError(f"{plan.direction}: there is a list for {min(unknown)!r}, which is not among the queries")
        position = {item: j for j, item in enumerate(plan.gallery_ids)}
        places = []  # For each group, the position within its gallery of every item, or -1.
        for group in plan.groups:
            place = np.full(len(plan.gallery_ids), -1)
            place[group.gallery] = np.arange(len(group.gallery))
            places.append(place)
            group.depth = np.zeros(len(group.rows), np.int64)
        everyone = np.unique(np.concatenate([group.rows for group in plan.groups])) if plan.groups else np.empty(0, int)
        for start in range(0, len(everyone), self.batch_size):
            some = everyone[start : start + self.batch_size]
            positions = {query: _positions(plan, query, lists, position) for query in some.tolist()}
            for group, place in zip(plan.groups, places, strict=True):
                a, b = np.searchsorted(group.rows, (some[0], some[-1] + 1))
                inside = [(own := place[positions[q]])[own >= 0] for q in group.rows[a:b].tolist()]
                ranks, depth = retrieval.ranks_from_lists(inside, group.relevance.select_queries(np.arange(a, b)))
                group.ranks[group.relevance.indptr[a] : group.relevance.indptr[b]] = ranks
                assert group.depth is not None
                group.depth[a:b] = depth


def _positions(plan: RankPlan, query: int, lists: Mapping[str, Sequence[Any]], place: Mapping[str, int]) -> np.ndarray:
    """(k,) positions of the items in the list of one query."""
    name = plan.query_ids[query]
    if name not in lists:
        raise ValueError(f"{plan.direction}: there is no list for query {name!r}")
    items = list(map(str, lists[name]))
    found = list(map(place.get, items))
    if None in found:
        unknown = items[found.index(None)]
        raise ValueError(f"{plan.direction}: the list of {name!r} holds the unknown id {unknown!r}")
    if len(set(items)) < len(items):
        raise ValueError(f"{plan.direction}: the list of {name!r} holds {first_twice(items)!r} more than once")
    return np.array(found, np.int64)
