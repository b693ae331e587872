"""Evaluation of embeddings, a score matrix or ranked lists against several ground truths at once.

``figures(rank(source, image_ids, text_ids, ground_truths))``: evaluation/protocols.py has the sources. Distances are
computed once per direction, a block of queries at a time. The ranks that any ground truth needs are counted while the
block is in memory, and ranks that several ground truths share are counted once.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sfumato.arrays import Array, like
from sfumato.data.coco import coco_image_id
from sfumato.errors import UserError, need_pyarrow
from sfumato.evaluation.ground_truth import GroundTruth
from sfumato.files import write_atomically
from sfumato.ids import DIRECTIONS, Direction
from sfumato.metrics import retrieval
from sfumato.metrics.relevance import Relevance, sorted_distinct


# ---------------------------------------------------------------- ranks and figures
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

    ground_truth: GroundTruth
    direction: Direction
    parts: tuple[RankedPart, ...]  # its folds, or the whole as one part

    @property
    def query_ids(self) -> tuple[str, ...]:
        """The ids of the queries of the ground truth."""
        return self.ground_truth.image_ids if self.direction == "i2t" else self.ground_truth.text_ids

    def metrics(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """Compute metrics, averaged over folds; "n_queries" and "n_without_positives" are summed."""
        names = self.ground_truth.metrics if names is None else names
        where, parts = f"{self.ground_truth.name}, {self.direction}", []
        for part in self.parts:
            try:
                parts.append(retrieval.retrieval_metrics(part.ranks, part.relevance, depth=part.depth, names=names))
            except retrieval.ShortListError as error:
                name = self.query_ids[part.queries[error.query]]
                raise ValueError(f"{where}: the list of {name!r} {error.reason}") from error
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        values = {name: [part[name] for part in parts] for name in parts[0]}
        counted = ("n_queries", "n_without_positives")
        return {name: sum(own) if name in counted else float(np.mean(own)) for name, own in values.items()}

    def per_query(self, names: Sequence[str] | None = None) -> tuple[list[str], dict[str, np.ndarray]]:
        """(ids, metrics) of the single queries that have a relevant item."""
        given = self.ground_truth.metrics if names is None else names
        names = list(dict.fromkeys("best_rank" if name in ("median_rank", "mean_rank") else name for name in given))
        kept = [part.relevance.totals > 0 for part in self.parts]
        single = [retrieval.per_query_metrics(p.ranks, p.relevance, depth=p.depth, names=names) for p in self.parts]
        ids = [self.query_ids[i] for part, has in zip(self.parts, kept, strict=True) for i in part.queries[has]]
        pairs = list(zip(single, kept, strict=True))
        return ids, {name: np.concatenate([values[name][has] for values, has in pairs]) for name in names}


BenchmarkRanks = dict[str, dict[Direction, GroundTruthRanks]]
"""{name of the ground truth: {"i2t": ranks, "t2i": ranks}}"""


def figures(ranks: BenchmarkRanks) -> dict[str, dict[str, Any]]:
    """{name of the ground truth: {"i2t": metrics, "t2i": metrics, "rsum": number}}.

    The rsum is recall@1 + recall@5 + recall@10 of both directions, at most 6; it is missing where a ground truth does
    not report these. Ground truths with averaged_as also stand under that name as their average.
    """
    result: dict[str, dict[str, Any]] = {}
    averages: dict[str, list[dict[str, Any]]] = {}
    for name, both in ranks.items():
        found: dict[str, Any] = {direction: of.metrics() for direction, of in both.items()}
        if len(both) == len(DIRECTIONS) and all(set(retrieval.RECALLS) <= set(found[direction]) for direction in both):
            found["rsum"] = sum(found[direction][recall] for direction in both for recall in retrieval.RECALLS)
        result[name] = found
        if (average := next(iter(both.values())).ground_truth.averaged_as) is not None:
            averages.setdefault(average, []).append(found)
    for name, members in averages.items():
        result[name] = _mean(members)
    return result


def _mean(values: list[Any]) -> Any:
    """The mean of numbers, or of each entry of dictionaries."""
    if isinstance(values[0], dict):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    return float(np.mean(values))


# ---------------------------------------------------------------- the plan
@dataclass
class GalleryGroup:
    """The parts of ground truths with the same gallery; their relevant items are ranked together, each once."""

    gallery: np.ndarray
    parts: list[tuple[str, int, np.ndarray, np.ndarray, Relevance]] = field(default_factory=list)
    depth: np.ndarray | None = None

    def close(self, n_queries: int, n_gallery: int) -> None:
        """Compute the union over the parts, after the last part was added."""
        g = len(self.gallery)
        keys = [rows[relevance.query_of_item] * g + relevance.indices for *_, rows, relevance in self.parts]
        union = sorted_distinct(np.concatenate(keys))
        asked = np.zeros(n_queries, bool)
        for *_, rows, relevance in self.parts:
            asked[rows[relevance.totals > 0]] = True
        self.rows = np.flatnonzero(asked)
        self.relevance = Relevance(np.searchsorted(union, np.append(self.rows, n_queries) * g), union % max(g, 1), g)
        self.picks = [np.searchsorted(union, key) for key in keys]
        self.ranks = np.empty(len(union), np.int64)
        whole = g == n_gallery and bool((self.gallery == np.arange(g)).all())
        self.columns: slice | np.ndarray = slice(None) if whole else _as_slice(self.gallery)

    def ranked(self) -> Iterable[tuple[str, int, RankedPart]]:
        """(name of the ground truth, number of the fold, ranks) of each part."""
        for (name, fold, queries, rows, relevance), pick in zip(self.parts, self.picks, strict=True):
            depth = None
            if self.depth is not None:
                everyone = np.zeros(max(rows.max(initial=-1), self.rows.max(initial=-1)) + 1, np.int64)
                everyone[self.rows] = self.depth
                depth = everyone[rows]
            yield name, fold, RankedPart(queries, relevance, self.ranks[pick], depth)


def _as_slice(index: np.ndarray) -> slice | np.ndarray:
    """Consecutive positions as a slice, which avoids a copy."""
    if len(index) and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _on(index: slice | np.ndarray, block: Array) -> slice | Array:
    return index if isinstance(index, slice) else like(index, block)


@dataclass(frozen=True)
class RankPlan:
    """All rankings in one direction."""

    direction: Direction
    query_ids: Sequence[str]
    gallery_ids: Sequence[str]
    groups: list[GalleryGroup]

    def count(self, start: int, block: Array) -> None:
        """Count the ranks of a block of queries in every gallery. block (b, m)."""
        for group in self.groups:
            a, b = np.searchsorted(group.rows, (start, start + len(block)))
            if a == b:
                continue
            chosen = block[_on(_as_slice(group.rows[a:b] - start), block)][:, _on(group.columns, block)]
            filled = slice(group.relevance.indptr[a], group.relevance.indptr[b])
            group.ranks[filled] = retrieval.relevant_ranks(chosen, group.relevance, int(a))


def plan_ranks(truths: Iterable[GroundTruth], image_ids: Sequence[str], text_ids: Sequence[str]) -> list[RankPlan]:
    """Plan the rankings of several ground truths in both directions, so that common ranks are counted once."""
    images, texts = _Positions(image_ids, "image"), _Positions(text_ids, "text")
    groups: dict[Direction, dict[bytes, GalleryGroup]] = {direction: {} for direction in DIRECTIONS}
    for one in truths:
        place = images.of(one.image_ids, one), texts.of(one.text_ids, one)
        for direction, found in groups.items():
            step = 1 if direction == "i2t" else -1
            (query_place, gallery_place), relevance = place[::step], one.i2t if direction == "i2t" else one.t2i
            everything = np.arange(relevance.n_queries), np.arange(relevance.n_gallery)
            for f, fold in enumerate([fold[::step] for fold in one.folds] or [everything]):
                queries, gallery = (np.asarray(index, np.int64) for index in fold)
                part = relevance.select_queries(queries).select_gallery(gallery) if one.folds else relevance
                position = gallery_place[gallery]
                group = found.setdefault(position.tobytes(), GalleryGroup(position))
                group.parts.append((one.name, f, queries, query_place[queries], part))
    plans = []
    for direction, found in groups.items():
        queries_of, gallery_of = (images, texts) if direction == "i2t" else (texts, images)
        for group in found.values():
            group.close(len(queries_of.ids), len(gallery_of.ids))
        plans.append(RankPlan(direction, queries_of.ids, gallery_of.ids, list(found.values())))
    return plans


class _Positions:
    """The positions of the ids of ground truths among the given ids."""

    def __init__(self, ids: Sequence[str], what: str) -> None:
        self.ids, self.what = [str(identity) for identity in ids], what
        self.position = {identity: i for i, identity in enumerate(self.ids)}
        if len(self.position) != len(ids):
            raise ValueError(f"benchmarks: only {len(self.position)} of the {len(ids)} {what}_ids are distinct")
        self.known, self.by_other_name = dict[tuple[str, ...], np.ndarray](), dict[str, int]()
        for identity, i in self.position.items():
            self.by_other_name.setdefault(coco_image_id(identity), i)

    def _find(self, identity: str) -> int | None:
        """The position of an id, else of the same image under another of COCO's names."""
        if identity in self.position or self.what == "text":
            return self.position.get(identity)
        return self.by_other_name.get(coco_image_id(identity))

    def of(self, ids: tuple[str, ...], ground_truth: GroundTruth) -> np.ndarray:
        """(k,) positions of the ids of a ground truth."""
        if ids not in self.known:
            found = [self._find(identity) for identity in ids]
            if missing := [identity for identity, i in zip(ids, found, strict=True) if i is None]:
                of, side = f"{len(missing):,} of the {len(ids):,}", f"{self.what}s"
                own = f"the {len(self.ids):,} {side} that were embedded, e.g. {missing[0]!r}"
                first = f"the first of the embedded {side} has the id {next(iter(self.position), None)!r}"
                way = "Evaluate on the images and texts of the benchmark, or give their ids as the benchmark has them"
                lacking = f"{of} {side} of the benchmark {ground_truth.name} are not among {own}"
                raise ValueError(f"{lacking}. The ids of both must agree; {first}. {way}")
            self.known[ids] = np.array(found, np.int64)
            if len(np.unique(self.known[ids])) != len(ids):
                raise ValueError(f"benchmarks: two {self.what}s of {ground_truth.name} have the same {self.what}_id")
        return self.known[ids]


# ---------------------------------------------------------------- sources
class Source(Protocol):
    """What is ranked: embeddings, scores or lists."""

    def shape(self) -> tuple[int, ...] | None:
        """(number of images, number of texts), if it is known."""

    def fill(self, plan: RankPlan) -> None:
        """Fill in the ranks of all groups of a plan."""


def rank(
    source: Source, image_ids: Sequence[str], text_ids: Sequence[str], ground_truths: Iterable[GroundTruth]
) -> BenchmarkRanks:
    """Rank the relevant items of several ground truths with distinct names.

    An item that is not in a ground truth is left out of its queries and gallery. COCO's file names are read as its
    image numbers.
    """
    shape = source.shape()
    if shape is not None and shape != (len(image_ids), len(text_ids)):
        given = f"{len(image_ids)} image_ids and {len(text_ids)} text_ids for {' by '.join(map(str, shape))}"
        raise ValueError(f"benchmarks: {given} images and texts; give one id for each")
    ground_truths = list(ground_truths)
    chosen = {one.name: one for one in ground_truths}
    result: BenchmarkRanks = {name: {} for name in chosen}
    for plan in plan_ranks(ground_truths, image_ids, text_ids):
        if getattr(source, plan.direction, ()) is None:  # Lists of the other direction alone.
            continue
        source.fill(plan)
        found: dict[str, dict[int, RankedPart]] = {}
        for group in plan.groups:
            for name, fold, part in group.ranked():
                found.setdefault(name, {})[fold] = part
        for name, folds in found.items():
            parts = tuple(folds[fold] for fold in sorted(folds))
            result[name][plan.direction] = GroundTruthRanks(chosen[name], plan.direction, parts)
    return result


# ---------------------------------------------------------------- tables of single queries
COMPARED = ("recall@1", "recall@5", "recall@10", "r_precision", "map@r")
"""Metrics of single queries that are compared; larger is better."""

PER_QUERY_ENDINGS = (".parquet", ".csv")
"""Endings of the files of single queries."""

NEEDS_PYARROW = "Parquet files need pyarrow", ", or use a name that ends in .csv"
"""What :func:`~sfumato.errors.need_pyarrow` says for these files."""

KEYS = ("truth", "direction", "query", "group")
"""Columns of texts: ground truth, direction and query are the key of a row."""
_METRICS = (*COMPARED, "best_rank")


def per_query_table(
    ranks: BenchmarkRanks, uncertainty: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, np.ndarray]:
    """The columns of the table of single queries, a row for each ground truth, direction and query with a match.

    Returns arrays (r,) by name.
    """
    parts: list[dict[str, np.ndarray]] = []
    for name, both in ranks.items():
        for direction, of in both.items():
            ids, single = of.per_query(_METRICS if all(p.depth is None for p in of.parts) else None)
            if (best := single.get("best_rank")) is not None:
                single["best_rank"] = np.where(np.isfinite(best) & (best >= retrieval.UNLISTED), np.nan, best)
            missing = np.full(len(ids), np.nan)
            own = (uncertainty or {}).get(direction)
            values = missing if own is None else np.array([own.get(i, math.nan) for i in ids], float)
            groups = [of.query_ids[g] for part in of.parts for g in _groups(part.relevance, part.queries)]
            texts = np.full(len(ids), name), np.full(len(ids), direction), strings(ids), strings(groups)
            columns = dict(zip(KEYS, texts, strict=True)) | {m: single.get(m, missing) for m in _METRICS}
            parts.append(columns | {"uncertainty": values})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def strings(values: Sequence[str]) -> np.ndarray:
    """(n,) array of strings, also of none."""
    return np.array(values, dtype=np.str_) if len(values) else np.empty(0, np.str_)


def _groups(relevance: Relevance, queries: np.ndarray) -> list[int]:
    """For each query that has a relevant item, the first query of the part with the same relevant items."""
    first: dict[bytes, int] = {}
    outside = relevance.totals - relevance.counts
    groups = []
    for i in np.flatnonzero(relevance.totals > 0):
        items = relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]
        # Items outside of the gallery are unknown, so a query that has some is a group of its own.
        key = items.tobytes() if not outside[i] else b"outside %d" % i
        groups.append(first.setdefault(key, int(queries[i])))
    return groups


def write_per_query(path: str | Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write a table atomically as Parquet or CSV. Undefined metrics are empty."""
    path = Path(path)
    if path.suffix == ".parquet":
        arrow = need_pyarrow(*NEEDS_PYARROW)
        kinds = {name: arrow.string() if name in KEYS else arrow.float64() for name in columns}
        arrays = {name: arrow.array(v.tolist(), kinds[name], from_pandas=True) for name, v in columns.items()}
        sink = io.BytesIO()
        arrow.parquet.write_table(arrow.table(arrays), sink)
        write_atomically(path, sink.getvalue())
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    # repr of a float, which a writer takes, is the shortest text that reads back as the same number.
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    writer.writerows(["" if value != value else value for value in row] for row in rows)
    write_atomically(path, text.getvalue())


def check_per_query_path(path: Path) -> None:
    """Check before the computation that :func:`write_per_query` can write this file."""
    if path.suffix not in PER_QUERY_ENDINGS:
        found = path.suffix or "no ending"
        raise UserError(f"{path}: results of single queries must be a .parquet or .csv file, got {found}")
    if path.suffix == ".parquet":
        need_pyarrow(*NEEDS_PYARROW)
