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
    """

    indptr: np.ndarray
    indices: np.ndarray
    n_gallery: int

    @classmethod
    def from_pairs(
        cls, query_index: np.ndarray, gallery_index: np.ndarray, *, n_queries: int, n_gallery: int
    ) -> "Relevance":
        """From (p,) positions of queries and gallery items; duplicates are merged.

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
        return cls(np.searchsorted(rows, np.arange(n_queries + 1)), keys % max(n_gallery, 1), n_gallery)

    @classmethod
    def from_lists(cls, lists: Sequence[Iterable[int]], *, n_gallery: int) -> "Relevance":
        """From the relevant gallery positions of each query."""
        rows = [list(items) for items in lists]
        query = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        gallery = np.array([g for row in rows for g in row], dtype=np.int64)
        return cls.from_pairs(query, gallery, n_queries=len(rows), n_gallery=n_gallery)

    @property
    def n_queries(self) -> int:
        """Number of queries n."""
        return len(self.indptr) - 1

    @property
    def counts(self) -> np.ndarray:
        """(n,) number of relevant items of each query."""
        return np.diff(self.indptr)

    @property
    def query_of_item(self) -> np.ndarray:
        """(p,) the query that each entry of indices belongs to."""
        return np.repeat(np.arange(self.n_queries), self.counts)

    def transpose(self) -> "Relevance":
        """The other direction: gallery items as queries."""
        return Relevance.from_pairs(
            self.indices, self.query_of_item, n_queries=self.n_gallery, n_gallery=self.n_queries
        )

    def select_queries(self, index: np.ndarray) -> "Relevance":
        """Only the queries at these positions, in this order."""
        index = np.asarray(index, np.int64)
        lists = [self.indices[self.indptr[i] : self.indptr[i + 1]] for i in index]
        indices = np.concatenate(lists) if lists else np.empty(0, np.int64)
        return Relevance(
            np.concatenate([[0], np.cumsum([len(x) for x in lists], dtype=np.int64)]), indices, self.n_gallery
        )

    def select_gallery(self, index: np.ndarray) -> "Relevance":
        """Only the gallery items at these distinct positions, renumbered in this order."""
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
