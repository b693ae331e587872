"""The ground truth of an evaluation: for every query, which gallery items are relevant."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Relevance:
    """Queries and their relevant gallery items, in compressed rows.

    Attributes:
        indptr: (n + 1,) int64; query i has items indices[indptr[i]:indptr[i + 1]].
        indices: (p,) int64 gallery positions, ascending within a query, each once.
        n_gallery: number of gallery items m.
        n_outside: (n,) int64 number of relevant items that are not in the gallery. No search can find them, but they
            count in the R of R-Precision and mAP@R. None means that there are none; ECCV Caption has two.

    Raises:
        ValueError: n_outside is not one number >= 0 for each query.
    """

    indptr: np.ndarray
    indices: np.ndarray
    n_gallery: int
    n_outside: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.n_outside is None:
            return
        outside = np.asarray(self.n_outside, np.int64)
        if outside.shape != (self.n_queries,) or (outside < 0).any():
            found = f"has shape {outside.shape} for {self.n_queries} queries, the least is {outside.min(initial=0)}"
            raise ValueError(f"Relevance: n_outside {found}; give each query one number, at least 0")
        object.__setattr__(self, "n_outside", outside)

    def __repr__(self) -> str:
        return f"Relevance({self.n_queries} queries, {self.n_gallery} items, {len(self.indices)} matches)"

    @classmethod
    def from_pairs(
        cls,
        query_index: np.ndarray,
        gallery_index: np.ndarray,
        *,
        n_queries: int,
        n_gallery: int,
        n_outside: np.ndarray | None = None,
    ) -> "Relevance":
        """A ground truth from positions of queries and gallery items; duplicates are merged.

        Args:
            query_index, gallery_index: (p,) each.
            n_queries, n_gallery: sizes n and m.
            n_outside: (n,) see :class:`Relevance`.

        Returns:
            The ground truth of n queries.

        Raises:
            ValueError: the arrays differ in length, or a position is outside.
        """
        query, gallery = np.asarray(query_index, np.int64), np.asarray(gallery_index, np.int64)
        if query.shape != gallery.shape or query.ndim != 1:
            raise ValueError(f"Relevance: got {query.shape} queries for {gallery.shape} items; they must be equal")
        for what, index, n in (("query", query, n_queries), ("gallery", gallery, n_gallery)):
            if len(index) and not (index.min() >= 0 and index.max() < n):
                found = f"(found {index.min()}..{index.max()})"
                raise ValueError(f"Relevance: a {what} position is outside of 0..{n - 1} {found}")
        keys = sorted_distinct(query * n_gallery + gallery)
        rows = keys // max(n_gallery, 1)
        return cls(np.searchsorted(rows, np.arange(n_queries + 1)), keys % max(n_gallery, 1), n_gallery, n_outside)

    @classmethod
    def from_lists(
        cls, lists: Sequence[Iterable[int]], *, n_gallery: int, n_outside: np.ndarray | None = None
    ) -> "Relevance":
        """A ground truth from the relevant gallery positions of each query.

        Args:
            lists: n lists of positions; duplicates are merged.
            n_gallery: size m of the gallery.
            n_outside: (n,) see :class:`Relevance`.

        Returns:
            The ground truth of n queries.

        Raises:
            ValueError: a position is outside of the gallery.

        Example:
            >>> Relevance.from_lists([[2], [0, 1], []], n_gallery=3).counts
            array([1, 2, 0])
        """
        rows = [list(items) for items in lists]
        query = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        gallery = np.array([g for row in rows for g in row], dtype=np.int64)
        return cls.from_pairs(query, gallery, n_queries=len(rows), n_gallery=n_gallery, n_outside=n_outside)

    @property
    def n_queries(self) -> int:
        """Number of queries n."""
        return len(self.indptr) - 1

    @property
    def counts(self) -> np.ndarray:
        """(n,) number of relevant gallery items of each query."""
        return np.diff(self.indptr)

    @property
    def totals(self) -> np.ndarray:
        """(n,) number of relevant items inside and outside of the gallery: the R of R-Precision and mAP@R."""
        return self.counts if self.n_outside is None else self.counts + self.n_outside

    @property
    def query_of_item(self) -> np.ndarray:
        """(p,) the query that each entry of indices belongs to."""
        return np.repeat(np.arange(self.n_queries), self.counts)

    def transpose(self) -> "Relevance":
        """The ground truth of the other direction, without items outside of the gallery.

        Returns:
            The ground truth of m queries and a gallery of n items.
        """
        n, m = self.n_gallery, self.n_queries
        return Relevance.from_pairs(self.indices, self.query_of_item, n_queries=n, n_gallery=m)

    def select_queries(self, index: np.ndarray) -> "Relevance":
        """Select the queries at some positions, in this order.

        Args:
            index: (k,) positions of queries.

        Returns:
            The ground truth of k queries and the same gallery.
        """
        index = np.asarray(index, np.int64)
        counts = self.counts[index]
        indptr = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        within = np.arange(indptr[-1]) - np.repeat(indptr[:-1], counts)
        outside = None if self.n_outside is None else self.n_outside[index]
        return Relevance(indptr, self.indices[np.repeat(self.indptr[index], counts) + within], self.n_gallery, outside)

    def select_gallery(self, index: np.ndarray) -> "Relevance":
        """Select the gallery items at some distinct positions, renumbered in this order.

        Omitted items, and items that were outside of the gallery before, do not count: the result is the ground truth
        of a smaller benchmark.

        Args:
            index: (k,) distinct positions of gallery items.

        Returns:
            The ground truth of the same queries and a gallery of k items.
        """
        index = np.asarray(index, np.int64)
        position = np.full(self.n_gallery, -1)
        position[index] = np.arange(len(index))
        kept = position[self.indices] >= 0
        pairs = self.query_of_item[kept], position[self.indices[kept]]
        return Relevance.from_pairs(*pairs, n_queries=self.n_queries, n_gallery=len(index))

    def to_dense(self) -> np.ndarray:
        """The ground truth as a matrix.

        Returns:
            (n, m) bool, true where an item is relevant.
        """
        dense = np.zeros((self.n_queries, self.n_gallery), dtype=bool)
        dense[self.query_of_item, self.indices] = True
        return dense


def sorted_distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values in ascending order.

    NumPy's own function goes through a hash table, which takes many times longer for millions of keys.

    values (n,) -> (k,).
    """
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=-1) > 0]
