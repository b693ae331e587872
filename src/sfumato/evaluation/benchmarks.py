"""Evaluation of embeddings, a score matrix or ranked lists against several ground truths at once.

Distances are computed once per direction, a block of queries at a time. The ranks that any ground truth needs are
counted while the block is in memory, and ranks that several ground truths share are counted once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sfumato.direction import Direction
from sfumato.distances import Distance, get_distance
from sfumato.evaluation.benchmark_ground_truths import coco_image_id
from sfumato.evaluation.ground_truth import RECALLS, GroundTruth
from sfumato.evaluation.protocols import Ranker
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance, sorted_distinct
from sfumato.metrics.retrieval import (
    Better,
    ScoreMatrix,
    ShortListError,
    per_query_metrics,
    ranks_from_lists,
    relevant_ranks,
    retrieval_metrics,
    score_blocks,
)
from sfumato.search.exact import distance_blocks


@dataclass(frozen=True, eq=False)
class RankedPart:
    """The ranks of a fold, or of the whole ground truth."""

    queries: np.ndarray  # (q,) positions among the queries of the ground truth
    relevance: Relevance  # of these queries, within the gallery of this part
    ranks: np.ndarray  # (p,) ranks from 0 of the relevant items, in the order of relevance.indices
    depth: np.ndarray | None = None  # (q,) lengths of the ranked lists; None if every rank is known


@dataclass(frozen=True, eq=False)
class GroundTruthRanks:
    """The ranks of a ground truth in one direction, from which all its metrics are computed."""

    ground_truth: GroundTruth  # the ground truth
    direction: Direction  # "i2t" or "t2i"
    parts: tuple[RankedPart, ...]  # its folds, or the whole as one part

    @property
    def _ids(self) -> tuple[str, ...]:
        return self.ground_truth.image_ids if self.direction == "i2t" else self.ground_truth.text_ids

    def metrics(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """Compute metrics, averaged over folds; "n_queries" and "n_without_positives" are summed."""
        names = self.ground_truth.metrics if names is None else names
        parts = []
        for part in self.parts:
            try:
                parts.append(retrieval_metrics(part.ranks, part.relevance, depth=part.depth, names=names))
            except ShortListError as error:
                name = self._ids[part.queries[error.query]]
                raise ValueError(
                    f"{self.ground_truth.name}, {self.direction}: the list of {name!r} {error.reason}"
                ) from error
            except ValueError as error:
                raise ValueError(f"{self.ground_truth.name}, {self.direction}: {error}") from error
        counted = ("n_queries", "n_without_positives")
        return {
            name: sum(p[name] for p in parts) if name in counted else float(np.mean([p[name] for p in parts]))
            for name in parts[0]
        }

    def per_query(self, names: Sequence[str] | None = None) -> tuple[list[str], dict[str, np.ndarray]]:
        """Compute metrics of single queries."""
        given = self.ground_truth.metrics if names is None else names
        names = list(dict.fromkeys("best_rank" if name in ("median_rank", "mean_rank") else name for name in given))
        kept: list[str] = []
        values: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for part in self.parts:
            has = part.relevance.totals > 0
            kept += [self._ids[i] for i in part.queries[has]]
            single = per_query_metrics(part.ranks, part.relevance, depth=part.depth, names=names)
            for name in names:
                values[name].append(single[name][has])
        return kept, {name: np.concatenate(parts) for name, parts in values.items()}


BenchmarkRanks = dict[str, dict[Direction, GroundTruthRanks]]
"""{name of the ground truth: {"i2t": ranks, "t2i": ranks}}"""


class GalleryGroup:
    """The parts of ground truths with the same gallery; their relevant items are ranked together, each once."""

    def __init__(self, gallery: np.ndarray) -> None:
        self.gallery = gallery
        self.parts: list[tuple[str, int, np.ndarray, np.ndarray, Relevance]] = []
        self.depth: np.ndarray | None = None

    def close(self, n_queries: int, n_gallery: int) -> None:
        """Compute the union over the parts, after the last part was added."""
        g = len(self.gallery)
        keys = [rows[relevance.query_of_item] * g + relevance.indices for *_, rows, relevance in self.parts]
        union = sorted_distinct(np.concatenate(keys))
        asked = np.zeros(n_queries, bool)
        for *_, rows, relevance in self.parts:
            asked[rows[relevance.totals > 0]] = True
        self.rows = np.flatnonzero(asked)
        starts = np.searchsorted(union, np.append(self.rows, n_queries) * g)
        self.relevance = Relevance(starts, union % max(g, 1), g)
        self.picks = [np.searchsorted(union, key) for key in keys]
        self.ranks = np.empty(len(union), np.int64)
        whole = g == n_gallery and bool((self.gallery == np.arange(g)).all())
        self.columns: slice | np.ndarray = slice(None) if whole else _as_slice(self.gallery)


def _as_slice(index: np.ndarray) -> slice | np.ndarray:
    """Consecutive positions as a slice, which avoids a copy."""
    if len(index) and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


class RankPlan:
    """The plan of all rankings in one direction."""

    def __init__(self, direction: Direction, groups: list[GalleryGroup], ground_truths: dict[str, GroundTruth]) -> None:
        self.direction: Direction = direction
        self.groups, self.ground_truths = groups, ground_truths

    def count(self, start: int, block: Tensor) -> None:
        """Count the ranks of a block of queries in every gallery. block (b, m)."""
        for group in self.groups:
            a, b = np.searchsorted(group.rows, (start, start + len(block)))
            if a == b:
                continue
            rows, columns = _as_slice(group.rows[a:b] - start), group.columns
            chosen = block[rows if isinstance(rows, slice) else torch.from_numpy(rows).to(block.device)]
            if isinstance(columns, slice):
                chosen = chosen[:, columns]
            else:
                chosen = chosen[:, torch.from_numpy(columns).to(block.device)]
            filled = slice(group.relevance.indptr[a], group.relevance.indptr[b])
            group.ranks[filled] = relevant_ranks(chosen, group.relevance, int(a))

    def collect(self, result: BenchmarkRanks) -> None:
        """Write the ranks of every part into the result."""
        found: dict[str, dict[int, RankedPart]] = {}
        for group in self.groups:
            for (name, fold, queries, rows, relevance), pick in zip(group.parts, group.picks, strict=True):
                depth = None
                if group.depth is not None:
                    everyone = np.zeros(max(rows.max(initial=-1), group.rows.max(initial=-1)) + 1, np.int64)
                    everyone[group.rows] = group.depth
                    depth = everyone[rows]
                found.setdefault(name, {})[fold] = RankedPart(queries, relevance, group.ranks[pick], depth)
        for name, folds in found.items():
            parts = tuple(folds[fold] for fold in sorted(folds))
            result[name][self.direction] = GroundTruthRanks(self.ground_truths[name], self.direction, parts)


def plan_ranks(
    ground_truths: Iterable[GroundTruth], image_ids: Sequence[str], text_ids: Sequence[str], shape: tuple[int, ...]
) -> Iterator[RankPlan]:
    """Plan the rankings of several ground truths, so that common ranks are counted once.

    shape (number of images, number of texts).
    """
    chosen = list(ground_truths)
    names = [ground_truth.name for ground_truth in chosen]
    if len(set(names)) != len(names):
        raise ValueError(f"benchmarks: the ground truths are named {', '.join(names)}; names must be distinct")
    if shape != (len(image_ids), len(text_ids)):
        raise ValueError(
            f"benchmarks: {len(image_ids)} image_ids and {len(text_ids)} text_ids for {' by '.join(map(str, shape))}"
            " images and texts; give one id for each"
        )
    images, texts = _Positions(image_ids, "image", coco_image_id), _Positions(text_ids, "text")
    places = [(images.of(one.image_ids, one), texts.of(one.text_ids, one)) for one in chosen]
    return iter(
        (
            _plan("i2t", chosen, places, (images.n, texts.n)),
            _plan("t2i", chosen, [place[::-1] for place in places], (texts.n, images.n)),
        )
    )


def _plan(
    direction: Direction,
    ground_truths: list[GroundTruth],
    places: list[tuple[np.ndarray, np.ndarray]],
    sizes: tuple[int, int],
) -> RankPlan:
    """Group the parts by gallery; places are (query, gallery) positions of each ground truth's ids."""
    groups: dict[bytes, GalleryGroup] = {}
    for ground_truth, (query_place, gallery_place) in zip(ground_truths, places, strict=True):
        relevance = ground_truth.i2t if direction == "i2t" else ground_truth.t2i
        everything = np.arange(relevance.n_queries), np.arange(relevance.n_gallery)
        folds = [fold if direction == "i2t" else fold[::-1] for fold in ground_truth.folds] or [everything]
        for f, (queries, gallery) in enumerate(folds):
            queries, gallery = np.asarray(queries, np.int64), np.asarray(gallery, np.int64)
            part = relevance.select_queries(queries).select_gallery(gallery) if ground_truth.folds else relevance
            position = gallery_place[gallery]
            group = groups.setdefault(position.tobytes(), GalleryGroup(position))
            group.parts.append((ground_truth.name, f, queries, query_place[queries], part))
    for group in groups.values():
        group.close(*sizes)
    return RankPlan(direction, list(groups.values()), {one.name: one for one in ground_truths})


class _Positions:
    """The positions of the ids of ground truths among the given ids."""

    def __init__(self, ids: Sequence[str], what: str, other_name: Callable[[str], str] | None = None) -> None:
        self.n, self.what = len(ids), what
        self.position = {str(identity): i for i, identity in enumerate(ids)}
        if len(self.position) != len(ids):
            raise ValueError(f"benchmarks: only {len(self.position)} of the {len(ids)} {what}_ids are distinct")
        if other_name is not None:
            for identity, i in list(self.position.items()):
                self.position.setdefault(other_name(identity), i)
        self.known: dict[tuple[str, ...], np.ndarray] = {}

    def of(self, ids: tuple[str, ...], ground_truth: GroundTruth) -> np.ndarray:
        """(k,) positions of the ids of a ground truth."""
        if ids not in self.known:
            if missing := [identity for identity in ids if identity not in self.position]:
                raise ValueError(
                    f"{len(missing):,} of the {len(ids):,} {self.what}s of the benchmark {ground_truth.name} are not"
                    f" among the {self.n:,} {self.what}s that were embedded, e.g. {missing[0]!r}. The ids of both must"
                    f" agree; the first of the embedded {self.what}s has the id {next(iter(self.position), None)!r}."
                    " Evaluate on the images and texts of the benchmark, or give their ids as the benchmark has them"
                )
            self.known[ids] = np.array([self.position[identity] for identity in ids], np.int64)
            if len(np.unique(self.known[ids])) != len(ids):
                raise ValueError(f"benchmarks: two {self.what}s of {ground_truth.name} have the same {self.what}_id")
        return self.known[ids]


RankedLists = Mapping[Any, Sequence[Any] | np.ndarray] | np.ndarray
"""{query id: [gallery ids from best to worst]}, or an (n, k) array of gallery positions with a row for each query."""


class ListRanker:
    """Ranks relevant items by the lists of one direction, some queries at a time."""

    def __init__(
        self, lists: RankedLists, query_ids: Sequence[str], gallery_ids: Sequence[str], direction: Direction
    ) -> None:
        self.direction, self.query_ids, self.n_gallery = direction, [str(q) for q in query_ids], len(gallery_ids)
        self.gallery = [str(item) for item in gallery_ids]
        self.position_of = {item: j for j, item in enumerate(self.gallery)}
        self.by_id: dict[str, Any] | None = None
        if isinstance(lists, Mapping):
            self.by_id = {str(query): items for query, items in lists.items()}
            if unknown := self.by_id.keys() - set(self.query_ids):
                raise ValueError(f"{direction}: there is a list for {min(unknown)!r}, which is not among the query ids")
        else:
            self.array = np.asarray(lists)
            if self.array.ndim != 2 or len(self.array) != len(self.query_ids) or self.array.dtype.kind not in "iu":
                raise ValueError(
                    f"{direction}: got lists of shape {self.array.shape} and type {self.array.dtype} for"
                    f" {len(self.query_ids)} queries; expected a row of gallery positions each, or a dictionary of ids"
                )
        # Binary search for all numbers of a list at once is far faster than a dictionary.
        self.numbers: np.ndarray | None = None
        if all(item.isdecimal() and str(int(item)) == item and len(item) < 19 for item in self.gallery):
            numbers = np.array([int(item) for item in self.gallery], np.int64)
            self.order = numbers.argsort()
            self.numbers = numbers[self.order]

    def rank(self, plan: RankPlan, *, batch_size: int = 256) -> None:
        """Fill in the ranks and depths of all groups of a plan."""
        places = []  # For each group, the position within its gallery of every item, or -1.
        for group in plan.groups:
            place = np.full(self.n_gallery, -1)
            place[group.gallery] = np.arange(len(group.gallery))
            places.append(place)
            group.depth = np.zeros(len(group.rows), np.int64)
        everyone = np.unique(np.concatenate([group.rows for group in plan.groups])) if plan.groups else np.empty(0, int)
        for start in range(0, len(everyone), batch_size):
            some = everyone[start : start + batch_size]
            positions = {int(query): self.positions(int(query)) for query in some}
            for group, place in zip(plan.groups, places, strict=True):
                a, b = np.searchsorted(group.rows, (some[0], some[-1] + 1))
                inside = [(own := place[positions[q]])[own >= 0] for q in group.rows[a:b].tolist()]
                ranks, depth = ranks_from_lists(inside, group.relevance.select_queries(np.arange(a, b)))
                group.ranks[group.relevance.indptr[a] : group.relevance.indptr[b]] = ranks
                assert group.depth is not None
                group.depth[a:b] = depth

    def positions(self, query: int) -> np.ndarray:
        """Read the list of one query. Returns (k,)."""
        name = self.query_ids[query]
        if self.by_id is None:
            row = self.array[query].astype(np.int64)
            if len(row) and not (row.min() >= 0 and row.max() < self.n_gallery):
                raise ValueError(
                    f"{self.direction}: the list of {name!r} holds positions from {row.min()} to {row.max()};"
                    f" expected 0 to {self.n_gallery - 1}"
                )
        elif name not in self.by_id:
            raise ValueError(f"{self.direction}: there is no list for query {name!r}")
        else:
            row = self._look_up(name, self.by_id[name])
        if len(row) > self.n_gallery or np.bincount(row, minlength=1).max(initial=0) > 1:
            twice = self.gallery[int(np.bincount(row).argmax())]
            raise ValueError(f"{self.direction}: the list of {name!r} holds {twice!r} more than once")
        return np.asarray(row)

    def _look_up(self, name: str, items: Any) -> np.ndarray:
        given = np.asarray(items)
        if self.numbers is not None and len(self.numbers) and given.ndim == 1 and given.dtype.kind in "iu":
            at = np.searchsorted(self.numbers, given).clip(max=len(self.numbers) - 1)
            if (wrong := self.numbers[at] != given).any():
                raise ValueError(f"{self.direction}: the list of {name!r} holds the unknown id {given[wrong][0]}")
            return np.asarray(self.order[at])
        try:
            return np.array([self.position_of[str(item)] for item in items], np.int64)
        except KeyError as error:
            raise ValueError(f"{self.direction}: the list of {name!r} holds the unknown id {error}") from error


def evaluate_benchmarks(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    distance: str | Distance = "csd",
    rank: Ranker | None = None,
    progress: Callable[[int], None] | None = None,
    memory_mb: float = 64.0,
) -> dict[str, dict[str, Any]]:
    """Evaluate embeddings against several ground truths.

    Args:
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        image_ids: n distinct ids. An item that is not in a ground truth is left out of its queries and gallery. COCO's
            file names are read as its image numbers.
        text_ids: m distinct ids.
        ground_truths: with distinct names.
        distance: to rank by: a name in DISTANCES, or a distance with images as its first argument.
        rank: the ranking function, such as a search over several processes; it is called for every gallery. None ranks
            in this process, by distances that are computed once per direction.
        progress: called with the number of queries just ranked, n + m in all; not called if rank is given.
        memory_mb: size of a block of distances, in MiB.

    Returns:
        {name of the ground truth: {"i2t": metrics, "t2i": metrics, "rsum": number}}. The rsum is recall@1 + recall@5 +
        recall@10 of both directions, at most 6; it is missing where a ground truth does not report these. Ground truths
        with averaged_as also stand under that name as their average.

    Raises:
        ValueError: sizes do not fit, names or ids repeat, or an id of a ground truth is missing.

    Example:
        >>> from sfumato.evaluation.ground_truth import ground_truth_from_pairs
        >>> embeddings = GaussianEmbedding.point(torch.eye(2))
        >>> pairs = [("a", "x"), ("b", "y")]
        >>> mine = ground_truth_from_pairs("mine", ["a", "b"], ["x", "y"], pairs, metrics=["recall@1"])
        >>> evaluate_benchmarks(embeddings, embeddings, ["a", "b"], ["x", "y"], [mine])["mine"]["i2t"]["recall@1"]
        1.0
    """
    ranks = rank_ground_truths(
        images, texts, image_ids, text_ids, ground_truths,
        distance=distance, rank=rank, progress=progress, memory_mb=memory_mb,
    )  # fmt: skip
    return benchmark_metrics(ranks)


def evaluate_score_matrix(
    scores: ScoreMatrix,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    better: Better,
    memory_mb: float = 64.0,
) -> dict[str, dict[str, Any]]:
    """Evaluate a matrix of scores against several ground truths.

    Args:
        scores: (n, m) images by texts: an array, a memory map or a tensor. Ties go to the earlier gallery item.
        image_ids: n distinct ids, see :func:`evaluate_benchmarks`.
        text_ids: m distinct ids.
        ground_truths: with distinct names.
        better: "larger" for similarities, "smaller" for distances.
        memory_mb: size of a block of scores, in MiB.

    Returns:
        As :func:`evaluate_benchmarks`.

    Raises:
        ValueError: as :func:`evaluate_benchmarks`, or a score is NaN.
    """
    ranks = rank_ground_truths_by_scores(
        scores, image_ids, text_ids, ground_truths, better=better, memory_mb=memory_mb
    )  # fmt: skip
    return benchmark_metrics(ranks)


def evaluate_ranked_lists(
    i2t: RankedLists,
    t2i: RankedLists,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    batch_size: int = 256,
) -> dict[str, dict[str, Any]]:
    """Evaluate ranked lists against several ground truths.

    Args:
        i2t: lists of texts for images, complete or only their beginnings.
        t2i: lists of images for texts.
        image_ids: n distinct ids of the images that were searched, see :func:`evaluate_benchmarks`.
        text_ids: m distinct ids of the texts that were searched.
        ground_truths: with distinct names.
        batch_size: number of queries whose lists are read at once.

    Returns:
        As :func:`evaluate_benchmarks`.

    Raises:
        ValueError: as :func:`evaluate_benchmarks`, or a query has no list, or a list repeats an item, holds an unknown
            one, or is too short for a metric: recall@K needs K items of the fold, R-Precision and mAP@R as many as are
            relevant.
    """
    ranks = rank_ground_truths_by_lists(i2t, t2i, image_ids, text_ids, ground_truths, batch_size=batch_size)
    return benchmark_metrics(ranks)


def benchmark_metrics(ranks: BenchmarkRanks) -> dict[str, dict[str, Any]]:
    """Compute the metrics of :func:`evaluate_benchmarks` from ranks."""
    result: dict[str, dict[str, Any]] = {}
    averages: dict[str, list[dict[str, Any]]] = {}
    for name, both in ranks.items():
        found: dict[str, Any] = {direction: of.metrics() for direction, of in both.items()}
        if all(set(RECALLS) <= set(found[direction]) for direction in both):
            found["rsum"] = sum(found[direction][recall] for direction in both for recall in RECALLS)
        result[name] = found
        if (average := next(iter(both.values())).ground_truth.averaged_as) is not None:
            averages.setdefault(average, []).append(found)
    for name, members in averages.items():
        if name in result:
            raise ValueError(f"benchmark_metrics: {name!r} is the name of a ground truth and of an average; rename one")
        result[name] = {}
        for key, value in members[0].items():
            if isinstance(value, dict):
                result[name][key] = {inner: float(np.mean([m[key][inner] for m in members])) for inner in value}
            else:
                result[name][key] = float(np.mean([m[key] for m in members]))
    return result


@torch.no_grad()
def rank_ground_truths(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    distance: str | Distance = "csd",
    rank: Ranker | None = None,
    progress: Callable[[int], None] | None = None,
    memory_mb: float = 64.0,
) -> BenchmarkRanks:
    """Rank embeddings for several ground truths; see :func:`evaluate_benchmarks` for arguments and errors."""
    ground_truths = list(ground_truths)
    result: BenchmarkRanks = {ground_truth.name: {} for ground_truth in ground_truths}
    for plan in plan_ranks(ground_truths, image_ids, text_ids, (images.n, texts.n)):
        queries, gallery = (images, texts) if plan.direction == "i2t" else (texts, images)
        oriented = get_distance(distance).for_direction(plan.direction)
        if rank is not None:
            for group in plan.groups:
                some, others = (
                    e[torch.from_numpy(index).to(e.device)]
                    for e, index in ((queries, group.rows), (gallery, group.gallery))
                )
                group.ranks = rank(some, others, group.relevance, oriented)
        else:
            blocks = distance_blocks(queries, gallery, oriented, memory_mb=memory_mb)
            for start, block in blocks:
                plan.count(start, block)
                if progress:
                    progress(len(block))
                del block  # Else it stays in memory until the next one is made.
        plan.collect(result)
    return result


def rank_ground_truths_by_scores(
    scores: ScoreMatrix,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    better: Better,
    memory_mb: float = 64.0,
) -> BenchmarkRanks:
    """Rank by a score matrix for several ground truths; see :func:`evaluate_score_matrix` for arguments and errors."""
    ground_truths = list(ground_truths)
    result: BenchmarkRanks = {ground_truth.name: {} for ground_truth in ground_truths}
    for plan in plan_ranks(ground_truths, image_ids, text_ids, tuple(int(size) for size in scores.shape)):
        side: Literal["rows", "columns"] = "rows" if plan.direction == "i2t" else "columns"
        for start, block in score_blocks(scores, better=better, queries=side, memory_mb=memory_mb):
            plan.count(start, block)
            del block  # As above.
        plan.collect(result)
    return result


def rank_ground_truths_by_lists(
    i2t: RankedLists,
    t2i: RankedLists,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    batch_size: int = 256,
) -> BenchmarkRanks:
    """Rank by ranked lists for several ground truths; see :func:`evaluate_ranked_lists` for arguments and errors."""
    ground_truths = list(ground_truths)
    result: BenchmarkRanks = {ground_truth.name: {} for ground_truth in ground_truths}
    for plan in plan_ranks(ground_truths, image_ids, text_ids, (len(image_ids), len(text_ids))):
        lists, queries, gallery = (i2t, image_ids, text_ids) if plan.direction == "i2t" else (t2i, text_ids, image_ids)
        ListRanker(lists, queries, gallery, plan.direction).rank(plan, batch_size=batch_size)
        plan.collect(result)
    return result
