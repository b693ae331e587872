"""Several truths of one set of images and texts at once, from embeddings, from a score matrix or from ranked lists.

Distances are computed once for each direction, a block of queries at a time; the ranks that any truth needs are counted while its
block is at hand, and those that several truths share are counted once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sfumato.direction import Direction
from sfumato.distances import get_distance
from sfumato.evaluation.benchmark_ground_truths import coco_image_id
from sfumato.evaluation.ground_truth import RECALLS, GroundTruth
from sfumato.evaluation.protocols import Ranker
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
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

RankedLists = Mapping[Any, Sequence[Any] | np.ndarray] | np.ndarray
"""{query id: [gallery ids from best to worst]}, or an (n, k) array of gallery positions, a row for each query in order."""

_MEMORY_MB = 64.0
_LISTS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class RankedPart:
    """The ranks of a fold, or of the whole.

    Attributes:
        queries: (q,) positions among the truth's queries.
        relevance: of these queries, within the part's gallery.
        ranks: (p,) ranks from 0 of the relevant items, in the order of relevance.indices.
        depth: (q,) lengths of the ranked lists; None where every rank is known.
    """

    queries: np.ndarray
    relevance: Relevance
    ranks: np.ndarray
    depth: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class GroundTruthRanks:
    """What all metrics of a truth come from, in one direction.

    Attributes:
        truth: the truth.
        direction: "i2t" or "t2i".
        parts: the whole, or the folds.
    """

    ground_truth: GroundTruth
    direction: Direction
    parts: tuple[RankedPart, ...]

    @property
    def _ids(self) -> tuple[str, ...]:
        return self.ground_truth.image_ids if self.direction == "i2t" else self.ground_truth.text_ids

    def metrics(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """The figures of ``retrieval_metrics``, averaged over folds; "n_queries" and "n_without_positives" are added up.

        Args:
            names: the metrics to give; None gives the truth's.

        Raises:
            ValueError: a list is too short for a metric, or no query has a relevant item.
        """
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
        """(ids of the queries that have a relevant item, {metric: (q,) values}); the folds one after another.

        Args:
            names: metrics of ``per_query_metrics``; None gives the truth's, "best_rank" in place of median and mean rank.

        Raises:
            ValueError: a list is too short for a metric.
        """
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
"""{truth name: {"i2t": ..., "t2i": ...}}"""


def evaluate_benchmarks(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    distance: str = "csd",
    rank: Ranker | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate embeddings against several truths.

    Args:
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        image_ids, text_ids: n and m distinct ids. What a truth does not know is left out of its queries and gallery; COCO's file
            names stand for its numbers.
        truths: with distinct names.
        distance: name in DISTANCES to rank by.
        rank: what ranks, such as a search over several processes; it is called for every gallery that occurs. None ranks here,
            from distances that are computed once for each direction.
        progress: called with the number of queries just done, of n + m; not with rank.

    Returns:
        {truth name: {"i2t": metrics, "t2i": metrics, "rsum": ...}}; rsum, recall@1 + recall@5 + recall@10 of both directions and
        at most 6, where a truth reports these. Truths with averaged_as stand there once more, averaged under that name.

    Raises:
        ValueError: sizes do not fit, names or ids repeat, or an id of a truth is missing.
    """
    return benchmark_metrics(
        rank_ground_truths(
            images, texts, image_ids, text_ids, ground_truths, distance=distance, rank=rank, progress=progress
        )
    )


def evaluate_score_matrix(
    scores: ScoreMatrix,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    better: Better,
) -> dict[str, dict[str, Any]]:
    """Evaluate a matrix of scores against several truths; arguments and result as of :func:`evaluate_benchmarks`.

    Args:
        scores: (n, m) images by texts: an array, a memmap, a tensor. Ties go to the earlier gallery item.
        image_ids, text_ids, truths: see there.
        better: "larger" for similarities, "smaller" for distances.

    Raises:
        ValueError: as there, and where a score is NaN.
    """
    return benchmark_metrics(rank_ground_truths_by_scores(scores, image_ids, text_ids, ground_truths, better=better))


def evaluate_ranked_lists(
    i2t: RankedLists,
    t2i: RankedLists,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
) -> dict[str, dict[str, Any]]:
    """Evaluate ranked lists against several truths; result as of :func:`evaluate_benchmarks`.

    Args:
        i2t: lists of texts for images, whole or only their beginnings.
        t2i: lists of images for texts.
        image_ids, text_ids: what was searched.
        truths: see there.

    Raises:
        ValueError: as there, and where a query has no list, or a list repeats an item, holds an unknown one, or does not determine
            a metric that a truth reports (recall@K needs K items of the fold, R-Precision and mAP@R as many as are relevant).
    """
    return benchmark_metrics(rank_ground_truths_by_lists(i2t, t2i, image_ids, text_ids, ground_truths))


def benchmark_metrics(ranks: BenchmarkRanks) -> dict[str, dict[str, Any]]:
    """The figures of :func:`evaluate_benchmarks` from the ranks."""
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
            raise ValueError(f"benchmark_metrics: {name!r} is the name of a truth and of an average; rename one")
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
    distance: str = "csd",
    rank: Ranker | None = None,
    progress: Callable[[int], None] | None = None,
) -> BenchmarkRanks:
    """The ranks that :func:`evaluate_benchmarks` takes its figures from, for figures of one's own and for single queries.

    Args and errors: see :func:`evaluate_benchmarks`.
    """
    ground_truths = _checked(ground_truths, image_ids, text_ids, (images.n, texts.n))
    result: BenchmarkRanks = {ground_truth.name: {} for ground_truth in ground_truths}
    for plan in _plans(ground_truths, image_ids, text_ids):
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
            blocks = distance_blocks(queries, gallery, oriented, memory_mb=_MEMORY_MB)
            for start, block in blocks:
                plan.count(start, block)
                if progress:
                    progress(len(block))
        plan.collect(result)
    return result


def rank_ground_truths_by_scores(
    scores: ScoreMatrix,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    better: Better,
) -> BenchmarkRanks:
    """As :func:`rank_ground_truths`, from a score matrix; see :func:`evaluate_score_matrix`."""
    ground_truths = _checked(ground_truths, image_ids, text_ids, tuple(int(size) for size in scores.shape))
    result: BenchmarkRanks = {ground_truth.name: {} for ground_truth in ground_truths}
    for plan in _plans(ground_truths, image_ids, text_ids):
        side: Literal["rows", "columns"] = "rows" if plan.direction == "i2t" else "columns"
        for start, block in score_blocks(scores, better=better, queries=side, memory_mb=_MEMORY_MB):
            plan.count(start, block)
        plan.collect(result)
    return result


def rank_ground_truths_by_lists(
    i2t: RankedLists,
    t2i: RankedLists,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
) -> BenchmarkRanks:
    """As :func:`rank_ground_truths`, from ranked lists; see :func:`evaluate_ranked_lists`."""
    ground_truths = _checked(ground_truths, image_ids, text_ids, (len(image_ids), len(text_ids)))
    result: BenchmarkRanks = {ground_truth.name: {} for ground_truth in ground_truths}
    for plan in _plans(ground_truths, image_ids, text_ids):
        lists, queries, gallery = (i2t, image_ids, text_ids) if plan.direction == "i2t" else (t2i, text_ids, image_ids)
        _Lists(lists, queries, gallery, plan.direction).rank(plan)
        plan.collect(result)
    return result


# ---------------------------------------------------------------- what is counted together


class _Group:
    """What is ranked within one gallery: the union of the positives of all parts that have it."""

    def __init__(self, gallery: np.ndarray) -> None:
        self.gallery = gallery
        self.parts: list[tuple[str, int, np.ndarray, np.ndarray, Relevance]] = []
        self.depth: np.ndarray | None = None

    def close(self, n_queries: int, n_gallery: int) -> None:
        """After the last part: find the rows, and the place of every part's positives among all."""
        g = len(self.gallery)
        keys = [rows[relevance.query_of_item] * g + relevance.indices for *_, rows, relevance in self.parts]
        union = np.unique(np.concatenate(keys))
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
    """Consecutive positions as a slice, which copies nothing."""
    if len(index) and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


class _Plan:
    """All groups of one direction."""

    def __init__(self, direction: Direction, groups: list[_Group], ground_truths: dict[str, GroundTruth]) -> None:
        self.direction: Direction = direction
        self.groups, self.ground_truths = groups, ground_truths

    def count(self, start: int, block: Tensor) -> None:
        """Count the ranks of a block of queries in every gallery."""
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
            place = slice(group.relevance.indptr[a], group.relevance.indptr[b])
            group.ranks[place] = relevant_ranks(chosen, group.relevance, int(a))

    def collect(self, result: BenchmarkRanks) -> None:
        """Hand every part its ranks."""
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


def _plans(ground_truths: list[GroundTruth], image_ids: Sequence[str], text_ids: Sequence[str]) -> list[_Plan]:
    images, texts = _Places(image_ids, "image", coco_image_id), _Places(text_ids, "text")
    plans = []
    for direction in ("i2t", "t2i"):
        groups: dict[bytes, _Group] = {}
        n_queries, n_gallery = (images.n, texts.n) if direction == "i2t" else (texts.n, images.n)
        for ground_truth in ground_truths:
            here = (images.of(ground_truth.image_ids, ground_truth), texts.of(ground_truth.text_ids, ground_truth))
            query_place, gallery_place = here if direction == "i2t" else here[::-1]
            relevance = ground_truth.i2t if direction == "i2t" else ground_truth.t2i
            everything = np.arange(relevance.n_queries), np.arange(relevance.n_gallery)
            folds = [fold if direction == "i2t" else fold[::-1] for fold in ground_truth.folds] or [everything]
            for f, (queries, gallery) in enumerate(folds):
                queries, gallery = np.asarray(queries, np.int64), np.asarray(gallery, np.int64)
                part = relevance.select_queries(queries).select_gallery(gallery) if ground_truth.folds else relevance
                position = gallery_place[gallery]
                group = groups.setdefault(position.tobytes(), _Group(position))
                group.parts.append((ground_truth.name, f, queries, query_place[queries], part))
        for group in groups.values():
            group.close(n_queries, n_gallery)
        plans.append(
            _Plan("i2t" if direction == "i2t" else "t2i", list(groups.values()), {t.name: t for t in ground_truths})
        )
    return plans


class _Places:
    """Where the ids of truths are among those given."""

    def __init__(self, ids: Sequence[str], what: str, other_name: Callable[[str], str] | None = None) -> None:
        self.n, self.what = len(ids), what
        self.place = {str(identity): i for i, identity in enumerate(ids)}
        if len(self.place) != len(ids):
            raise ValueError(f"benchmarks: {what}_ids are {len(ids)}, but only {len(self.place)} of them are distinct")
        if other_name is not None:
            for identity, i in list(self.place.items()):
                self.place.setdefault(other_name(identity), i)
        self.known: dict[tuple[str, ...], np.ndarray] = {}

    def of(self, ids: tuple[str, ...], ground_truth: GroundTruth) -> np.ndarray:
        """(k,) positions of a truth's ids."""
        if ids not in self.known:
            if missing := [identity for identity in ids if identity not in self.place]:
                raise ValueError(
                    f"benchmarks: {len(missing)} of the {len(ids)} {self.what}s of {ground_truth.name} are not among the {self.n}"
                    f" {self.what}_ids, for instance {missing[0]!r} (given, for instance: {next(iter(self.place), None)!r})"
                )
            self.known[ids] = np.array([self.place[identity] for identity in ids], np.int64)
            if len(np.unique(self.known[ids])) != len(ids):
                raise ValueError(f"benchmarks: two {self.what}s of {ground_truth.name} are one of the {self.what}_ids")
        return self.known[ids]


def _checked(
    ground_truths: Iterable[GroundTruth], image_ids: Sequence[str], text_ids: Sequence[str], shape: tuple[int, ...]
) -> list[GroundTruth]:
    chosen = list(ground_truths)
    names = [ground_truth.name for ground_truth in chosen]
    if len(set(names)) != len(names):
        raise ValueError(f"benchmarks: the truths are named {', '.join(names)}; names must be distinct")
    if shape != (len(image_ids), len(text_ids)):
        raise ValueError(
            f"benchmarks: {len(image_ids)} image_ids and {len(text_ids)} text_ids for {' by '.join(map(str, shape))}"
            " images and texts; give one id for each"
        )
    return chosen


# ---------------------------------------------------------------- ranked lists


class _Lists:
    """Ranked lists of one direction, turned into positions a few at a time."""

    def __init__(
        self, lists: RankedLists, query_ids: Sequence[str], gallery_ids: Sequence[str], direction: Direction
    ) -> None:
        self.direction, self.query_ids, self.n_gallery = direction, [str(q) for q in query_ids], len(gallery_ids)
        self.gallery = [str(item) for item in gallery_ids]
        self.place = {item: j for j, item in enumerate(self.gallery)}
        self.by_id: dict[str, Any] | None = None
        if isinstance(lists, Mapping):
            self.by_id = {str(query): items for query, items in lists.items()}
            if unknown := self.by_id.keys() - set(self.query_ids):
                raise ValueError(f"{direction}: there is a list for {min(unknown)!r}, which is not among the query ids")
        else:
            self.array = np.asarray(lists)
            if self.array.ndim != 2 or len(self.array) != len(self.query_ids) or self.array.dtype.kind not in "iu":
                raise ValueError(
                    f"{direction}: lists of shape {self.array.shape} and type {self.array.dtype} for {len(self.query_ids)}"
                    " queries; expected a row of gallery positions for each, or a dictionary of ids"
                )
        # Whole numbers are looked up by search, which is far faster than one after another.
        self.numbers: np.ndarray | None = None
        if all(item.isdecimal() and str(int(item)) == item and len(item) < 19 for item in self.gallery):
            numbers = np.array([int(item) for item in self.gallery], np.int64)
            self.order = numbers.argsort()
            self.numbers = numbers[self.order]

    def rank(self, plan: _Plan) -> None:
        """Fill the ranks and depths of all groups."""
        places = []
        for group in plan.groups:
            place = np.full(self.n_gallery, -1)
            place[group.gallery] = np.arange(len(group.gallery))
            places.append(place)
            group.depth = np.zeros(len(group.rows), np.int64)
        everyone = np.unique(np.concatenate([group.rows for group in plan.groups])) if plan.groups else np.empty(0, int)
        for start in range(0, len(everyone), _LISTS_AT_ONCE):
            some = everyone[start : start + _LISTS_AT_ONCE]
            positions = {int(query): self.positions(int(query)) for query in some}
            for group, place in zip(plan.groups, places, strict=True):
                a, b = np.searchsorted(group.rows, (some[0], some[-1] + 1))
                inside = [(own := place[positions[q]])[own >= 0] for q in group.rows[a:b].tolist()]
                ranks, depth = ranks_from_lists(inside, group.relevance.select_queries(np.arange(a, b)))
                group.ranks[group.relevance.indptr[a] : group.relevance.indptr[b]] = ranks
                assert group.depth is not None
                group.depth[a:b] = depth

    def positions(self, query: int) -> np.ndarray:
        """Gallery positions of a query's list, distinct."""
        name = self.query_ids[query]
        if self.by_id is None:
            row = self.array[query].astype(np.int64)
            if len(row) and not (row.min() >= 0 and row.max() < self.n_gallery):
                raise ValueError(
                    f"{self.direction}: the list of {name!r} holds position {row.min()}..{row.max()} of a gallery of {self.n_gallery}"
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
            return np.array([self.place[str(item)] for item in items], np.int64)
        except KeyError as error:
            raise ValueError(f"{self.direction}: the list of {name!r} holds the unknown id {error}") from error
