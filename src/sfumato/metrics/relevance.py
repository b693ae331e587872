"""The truth of an evaluation: for every query, which gallery items are relevant."""

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
        n_outside: (n,) int64 number of relevant items that are not in the gallery: no search can find them, but they count in
            the R of R-Precision and mAP@R. None is none; ECCV Caption has two.

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
            raise ValueError(
                f"Relevance: n_outside has shape {outside.shape} for {self.n_queries} queries"
                f"{' and negative numbers' if (outside < 0).any() else ''}; give each query one number, at least 0"
            )
        object.__setattr__(self, "n_outside", outside)

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
        """From (p,) positions of queries and gallery items; duplicates are merged.

        Args:
            query_index, gallery_index: (p,) each.
            n_queries, n_gallery: sizes n and m.
            n_outside: (n,) see :class:`Relevance`.

        Raises:
            ValueError: the arrays differ in length, or a position is outside.
        """
        query, gallery = np.asarray(query_index, np.int64), np.asarray(gallery_index, np.int64)
        if query.shape != gallery.shape or query.ndim != 1:
            raise ValueError(
                f"Relevance: got {query.shape} queries for {gallery.shape} gallery items; they must be as many"
            )
        for what, index, n in (("query", query, n_queries), ("gallery", gallery, n_gallery)):
            if len(index) and not (index.min() >= 0 and index.max() < n):
                raise ValueError(
                    f"Relevance: a {what} position is outside of 0..{n - 1} (found {index.min()}..{index.max()})"
                )
        keys = np.unique(query * n_gallery + gallery) if n_gallery else np.empty(0, np.int64)
        rows = keys // max(n_gallery, 1)
        return cls(np.searchsorted(rows, np.arange(n_queries + 1)), keys % max(n_gallery, 1), n_gallery, n_outside)

    @classmethod
    def from_lists(
        cls, lists: Sequence[Iterable[int]], *, n_gallery: int, n_outside: np.ndarray | None = None
    ) -> "Relevance":
        """From the relevant gallery positions of each query."""
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
        """(n,) number of relevant items of each query inside and outside of the gallery: the R of R-Precision and mAP@R."""
        return self.counts if self.n_outside is None else self.counts + self.n_outside

    @property
    def query_of_item(self) -> np.ndarray:
        """(p,) the query that each entry of indices belongs to."""
        return np.repeat(np.arange(self.n_queries), self.counts)

    def transpose(self) -> "Relevance":
        """The other direction: gallery items as queries. What is outside of the gallery is no query, and left out."""
        return Relevance.from_pairs(
            self.indices, self.query_of_item, n_queries=self.n_gallery, n_gallery=self.n_queries
        )

    def select_queries(self, index: np.ndarray) -> "Relevance":
        """Only the queries at these positions, in this order."""
        index = np.asarray(index, np.int64)
        counts = self.counts[index]
        indptr = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        within = np.arange(indptr[-1]) - np.repeat(indptr[:-1], counts)
        indices = self.indices[np.repeat(self.indptr[index], counts) + within]
        outside = None if self.n_outside is None else self.n_outside[index]
        return Relevance(indptr, indices, self.n_gallery, outside)

    def select_gallery(self, index: np.ndarray) -> "Relevance":
        """Only the gallery items at these distinct positions, renumbered in this order.

        What is left out counts no more, and neither does what was outside before: this is the truth of a smaller benchmark.
        """
        index = np.asarray(index, np.int64)
        place = np.full(self.n_gallery, -1)
        place[index] = np.arange(len(index))
        kept = place[self.indices] >= 0
        return Relevance.from_pairs(
            self.query_of_item[kept], place[self.indices[kept]], n_queries=self.n_queries, n_gallery=len(index)
        )

    def to_dense(self) -> np.ndarray:
        """(n, m) bool."""
        dense = np.zeros((self.n_queries, self.n_gallery), dtype=bool)
        dense[self.query_of_item, self.indices] = True
        return dense
