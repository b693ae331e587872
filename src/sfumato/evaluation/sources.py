"""What is ranked: embeddings by a distance or a similarity of the means, a matrix of scores, or ranked lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sfumato.data.coco import coco_image_id
from sfumato.distances import DISTANCES, get_distance
from sfumato.distances.distance import Distance
from sfumato.evaluation.benchmarks import RankPlan, Source
from sfumato.evaluation.ground_truth import GroundTruth, first_twice
from sfumato.evaluation.protocols import Ranker
from sfumato.gaussian import GaussianEmbedding, ScalarUncertainty, accumulation_dtype
from sfumato.matching import MATCH_PROBABILITY
from sfumato.metrics import retrieval
from sfumato.search.exact import distance_blocks

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

    def to(self, device: torch.device) -> "EmbeddedSet":
        """Move the embeddings to another device."""
        return replace(self, images=self.images.to(device), texts=self.texts.to(device))

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

    def __getitem__(self, index: Any) -> Tensor:
        """A block of rows, or of rows and columns, given by slices; in float32 or the higher precision of the means."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        dtype = torch.promote_types(*(accumulation_dtype(e.dtype) for e in (self.images, self.texts)))
        a, b = self.images.mean[rows].to(dtype), self.texts.mean[columns].to(dtype)
        if self.kind == "cosine":
            a, b = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1)
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
                some, others = (
                    e[torch.from_numpy(index).to(e.device)]
                    for e, index in ((queries, group.rows), (gallery, group.gallery))
                )
                group.ranks = self.ranker(some, others, group.relevance, oriented)
            return
        for start, block in distance_blocks(queries, gallery, oriented, memory_mb=self.memory_mb):
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

    i2t: Mapping[Any, Sequence[Any]]  # {query id: [gallery ids from best to worst]}
    t2i: Mapping[Any, Sequence[Any]]
    batch_size: int = 256  # number of queries whose lists are read at once

    def shape(self) -> None:
        """See :meth:`Source.shape`."""
        return

    def fill(self, plan: RankPlan) -> None:
        """See :meth:`Source.fill`."""
        lists = {str(query): items for query, items in (self.i2t if plan.direction == "i2t" else self.t2i).items()}
        if unknown := lists.keys() - set(plan.query_ids):
            raise ValueError(
                f"{plan.direction}: there is a list for {min(unknown)!r}, which is not among the query ids"
            )
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


def _positions(
    plan: RankPlan, query: int, lists: Mapping[str, Sequence[Any]], position: Mapping[str, int]
) -> np.ndarray:
    """(k,) positions of the items in the list of one query."""
    name = plan.query_ids[query]
    if name not in lists:
        raise ValueError(f"{plan.direction}: there is no list for query {name!r}")
    items = [str(item) for item in lists[name]]
    if unknown := [item for item in items if item not in position]:
        raise ValueError(f"{plan.direction}: the list of {name!r} holds the unknown id {unknown[0]!r}")
    if (twice := first_twice(items)) is not None:
        raise ValueError(f"{plan.direction}: the list of {name!r} holds {twice!r} more than once")
    return np.array([position[item] for item in items], np.int64)
