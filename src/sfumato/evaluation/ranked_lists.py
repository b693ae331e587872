"""Ranked lists as the result of a search: item ids or positions from best to worst for every query."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sfumato.direction import Direction
from sfumato.evaluation.rank_plan import RankPlan
from sfumato.metrics.retrieval import ranks_from_lists

RankedLists = Mapping[Any, Sequence[Any] | np.ndarray] | np.ndarray
"""{query id: [gallery ids from best to worst]}, or an (n, k) array of gallery positions with a row for each query."""


class ListRanker:
    """Ranks relevant items by the lists of one direction, some queries at a time.

    Args:
        lists: for every query that is evaluated, items from best to worst.
        query_ids: of the queries.
        gallery_ids: of the items.
        direction: "i2t" or "t2i", for messages.

    Raises:
        ValueError: there is a list for an unknown query, or the shape or type of an array does not fit.
    """

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
        """Fill in the ranks and depths of all groups of a plan.

        Args:
            plan: of the same direction, queries and items.
            batch_size: number of queries whose lists are in memory at once.

        Raises:
            ValueError: a list is missing, repeats an item, or holds an unknown one.
        """
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
        """Read the list of one query.

        Args:
            query: its position.

        Returns:
            (k,) distinct gallery positions from best to worst.

        Raises:
            ValueError: the list is missing, repeats an item, or holds an unknown one.
        """
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
