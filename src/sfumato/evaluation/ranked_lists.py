"""Ranked lists of any program as a source of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfumato.evaluation.benchmarks import RankPlan
from sfumato.metrics import retrieval

RankedLists = Mapping[Any, Sequence[Any] | np.ndarray] | np.ndarray
"""{query id: [gallery ids from best to worst]}, or an (n, k) array of gallery positions with a row for each query."""


@dataclass(frozen=True, eq=False)
class Lists:
    """Ranks by lists of texts for images and of images for texts, complete or only their beginnings.

    Every query of a ground truth needs one. A list must not repeat an item, hold an unknown one, or be too short for a
    metric: recall@K needs K items of the fold, R-Precision and mAP@R as many as are relevant.
    """

    i2t: RankedLists
    t2i: RankedLists
    batch_size: int = 256  # number of queries whose lists are read at once

    def shape(self) -> None:
        """See :meth:`Source.shape`."""
        return

    def fill(self, plan: RankPlan) -> None:
        """See :meth:`Source.fill`."""
        lists = _DirectionLists(self.i2t if plan.direction == "i2t" else self.t2i, plan)
        places = []  # For each group, the position within its gallery of every item, or -1.
        for group in plan.groups:
            place = np.full(len(plan.gallery_ids), -1)
            place[group.gallery] = np.arange(len(group.gallery))
            places.append(place)
            group.depth = np.zeros(len(group.rows), np.int64)
        everyone = np.unique(np.concatenate([group.rows for group in plan.groups])) if plan.groups else np.empty(0, int)
        for start in range(0, len(everyone), self.batch_size):
            some = everyone[start : start + self.batch_size]
            positions = {query: lists.positions(query) for query in some.tolist()}
            for group, place in zip(plan.groups, places, strict=True):
                a, b = np.searchsorted(group.rows, (some[0], some[-1] + 1))
                inside = [(own := place[positions[q]])[own >= 0] for q in group.rows[a:b].tolist()]
                ranks, depth = retrieval.ranks_from_lists(inside, group.relevance.select_queries(np.arange(a, b)))
                group.ranks[group.relevance.indptr[a] : group.relevance.indptr[b]] = ranks
                assert group.depth is not None
                group.depth[a:b] = depth


class _DirectionLists:
    """The lists of one direction as gallery positions."""

    def __init__(self, lists: RankedLists, plan: RankPlan) -> None:
        self.direction, self.query_ids, self.gallery = plan.direction, plan.query_ids, plan.gallery_ids
        self.position_of = {item: j for j, item in enumerate(self.gallery)}
        self.by_id: dict[str, Any] | None = None
        if isinstance(lists, Mapping):
            self.by_id = {str(query): items for query, items in lists.items()}
            if unknown := self.by_id.keys() - set(self.query_ids):
                raise ValueError(
                    f"{self.direction}: there is a list for {min(unknown)!r}, which is not among the query ids"
                )
        else:
            self.array = np.asarray(lists)
            if self.array.ndim != 2 or len(self.array) != len(self.query_ids) or self.array.dtype.kind not in "iu":
                raise ValueError(
                    f"{self.direction}: got lists of shape {self.array.shape} and type {self.array.dtype} for"
                    f" {len(self.query_ids)} queries; expected a row of gallery positions each, or a dictionary of ids"
                )
        # Binary search for all numbers of a list at once is far faster than a dictionary.
        self.numbers: np.ndarray | None = None
        if all(item.isdecimal() and str(int(item)) == item and len(item) < 19 for item in self.gallery):
            numbers = np.array([int(item) for item in self.gallery], np.int64)
            self.order = numbers.argsort()
            self.numbers = numbers[self.order]

    def positions(self, query: int) -> np.ndarray:
        """(k,) positions in the list of one query."""
        who = f"{self.direction}: the list of {self.query_ids[query]!r}"
        if self.by_id is None:
            row = self.array[query].astype(np.int64)
            if len(row) and not (row.min() >= 0 and row.max() < len(self.gallery)):
                raise ValueError(
                    f"{who} holds positions from {row.min()} to {row.max()}; expected 0 to {len(self.gallery) - 1}"
                )
        elif self.query_ids[query] not in self.by_id:
            raise ValueError(f"{self.direction}: there is no list for query {self.query_ids[query]!r}")
        else:
            row = self._look_up(who, self.by_id[self.query_ids[query]])
        if len(row) > len(self.gallery) or np.bincount(row, minlength=1).max(initial=0) > 1:
            raise ValueError(f"{who} holds {self.gallery[int(np.bincount(row).argmax())]!r} more than once")
        return np.asarray(row)

    def _look_up(self, who: str, items: Any) -> np.ndarray:
        given = np.asarray(items)
        if self.numbers is not None and len(self.numbers) and given.ndim == 1 and given.dtype.kind in "iu":
            at = np.searchsorted(self.numbers, given).clip(max=len(self.numbers) - 1)
            if (wrong := self.numbers[at] != given).any():
                raise ValueError(f"{who} holds the unknown id {given[wrong][0]}")
            return np.asarray(self.order[at])
        try:
            return np.array([self.position_of[str(item)] for item in items], np.int64)
        except KeyError as error:
            raise ValueError(f"{who} holds the unknown id {error}") from error
