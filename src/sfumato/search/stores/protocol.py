"""The contract of a vector store: keep records under ids, and find the nearest vectors by squared L2.

A store does not depend on Gaussians: every item has been lifted to a vector beforehand (search/exact.py), and a
:class:`~sfumato.search.collection.GaussianCollection` recomputes the distances of a store's candidates from the
vectors in their records. So stores differ in the candidates that they return and in the failures that they survive,
never in figures.

Store URLs say where the records of a collection are. The registry STORES maps a scheme to a kind of store.

runs/store?engine=hnsw              a local folder (file:runs/store is the same); engines flat, hnsw, ivf, ivf-pq
milvus:runs/store.db                Milvus Lite, embedded
milvus+http://host:19530/name       a Milvus server or cluster
postgresql://user@host/db?table=t   PostgreSQL with pgvector

To add a store, write one module with the functions `create` and `open` (a
:class:`~sfumato.search.stores.open.StoreFactory`) that return a
:class:`~sfumato.search.stores.protocol.VectorStore`, and register it under a scheme.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import UserError

Row = TypeVar("Row")


class StoreInUseError(UserError):
    """Another process writes to a store that takes one writer at a time. Nothing was stored."""


@dataclass(frozen=True, eq=False)
class Records:
    """A batch of stored items."""

    ids: tuple[str, ...]  # n distinct ids
    vectors: Tensor  # (n, e) float32 on the CPU
    uncertainty: Tensor  # (n,) float32, total variance of each item
    payloads: tuple[Mapping[str, str], ...]  # n dictionaries of texts that searches return with the items

    def __post_init__(self) -> None:
        n = len(self.ids)
        if self.vectors.ndim != 2 or self.vectors.dtype != torch.float32:
            raise ValueError(
                f"Records: vectors must be (n, e) float32, got {tuple(self.vectors.shape)} {self.vectors.dtype}"
            )
        if not (len(self.vectors) == len(self.uncertainty) == len(self.payloads) == n):
            raise ValueError(
                f"Records: {n} ids, {len(self.vectors)} vectors, {len(self.uncertainty)} uncertainties and"
                f" {len(self.payloads)} payloads; expected the same number of each"
            )
        seen: set[str] = set()
        for i in self.ids:
            if not i or not _is_text(i) or i in seen:
                raise ValueError(f"Records: ids must be distinct, non-empty Unicode texts without NUL, got {i!r}")
            seen.add(i)
        for i, payload in zip(self.ids, self.payloads, strict=True):
            if not all(_is_text(text) for pair in payload.items() for text in pair):
                raise ValueError(
                    f"Records: the payload of {i!r} must be Unicode texts without NUL by name, got {dict(payload)!r}"
                )
        wrong = ~(torch.isfinite(self.vectors).all(dim=1) & torch.isfinite(self.uncertainty))
        if wrong.any():
            raise ValueError(
                f"Records: the vector or uncertainty of {self.ids[int(wrong.nonzero()[0])]!r} is not finite"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, positions: Sequence[int]) -> "Records":
        """Select some of the records."""
        chosen = list(positions)
        return Records(
            tuple(self.ids[i] for i in chosen),
            self.vectors[chosen],
            self.uncertainty[chosen],
            tuple(self.payloads[i] for i in chosen),
        )

    @staticmethod
    def none(e: int) -> "Records":
        """An empty batch."""
        return Records((), torch.empty(0, e), torch.empty(0), ())


def _is_text(value: object) -> bool:
    """Whether every store can keep it: a string that UTF-8 can write, so without lone surrogates, and without NUL."""
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class Filter:
    """Which items a search may find.

    Attributes:
        where: by payload field, the values that it may have. All fields must fit; an item without the field is left
            out.
        max_uncertainty: largest total variance of an item; any if None.
        ranges: by payload field, (at least, below) in the order of code points; "" is an open end. All fields must
            fit; an item without the field, or with an empty one, is left out.

    Raises:
        ValueError: max_uncertainty is negative or not a number.
    """

    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    max_uncertainty: float | None = None
    ranges: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_uncertainty is not None and not self.max_uncertainty >= 0:
            raise ValueError(f"Filter: max_uncertainty must be at least 0, got {self.max_uncertainty}")

    def accepts(self, payload: Mapping[str, str], uncertainty: float) -> bool:
        """Whether an item passes the filter. Stores that filter in a language of their own must agree with this.

        Args:
            payload: texts of the item.
            uncertainty: total variance of the item.

        Returns:
            True if it passes.
        """
        if self.max_uncertainty is not None and uncertainty > self.max_uncertainty:
            return False
        return all(payload.get(name) in values for name, values in self.where.items()) and all(
            (value := payload.get(name, "")) and value >= least and (not below or value < below)
            for name, (least, below) in self.ranges.items()
        )


_CONDITION = re.compile(r"([^:=<>]+)(:|>=|<=|>|<|=)(.*)", re.DOTALL)
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01])(T\d\d(:\d\d(:\d\d)?)?)?)?)?")
_LAST = "\U0010ffff"
"""Follows every other character: a text with it stands behind all texts that begin with this text."""


def parse_where(texts: Iterable[str]) -> Filter:
    """A filter in words: FIELD=VALUE, FIELD>=VALUE, FIELD<=VALUE, FIELD>VALUE, FIELD<VALUE, or FIELD:VALUE (exact).

    Several values of one field are alternatives, several fields must all fit. A part of a date stands for its whole:
    date=2024-06 and date<=2024-06 accept all of June, date>2024 begins with 2025.
    """
    where, ranges = dict[str, tuple[str, ...]](), dict[str, tuple[str, str]]()
    for text in texts:
        if (found := _CONDITION.fullmatch(text)) is None or not (
            found[1].strip() and (found[2] == ":" or found[3].strip())
        ):
            raise ValueError(f"where: got {text!r}, expected FIELD=VALUE, e.g. folder=beach or date>=2024-06")
        name, sign, value = found[1].strip(), found[2], found[3].strip()
        if name == "date" and sign != ":":
            value = value.replace(" ", "T")
            if not _DATE.fullmatch(value):
                raise ValueError(f"where: got {text!r}, expected a date such as 2024, 2024-06 or 2024-06-13")
        if sign == ":" or (sign == "=" and name != "date"):
            value = found[3] if sign == ":" else value
            where[name] = (*where.get(name, ()), value)
            continue
        if sign == "=" and name in ranges:
            raise ValueError(f"where: got {text!r} beside another date; give one span, date>=FIRST and date<=LAST")
        least = {">=": value, "=": value, ">": value + _LAST}.get(sign, "")
        below = {"<": value, "<=": value + _LAST, "=": value + _LAST}.get(sign, "")
        before = ranges.get(name, ("", ""))
        ends = [end for end in (before[1], below) if end]
        ranges[name] = max(before[0], least), min(ends, default="")
    return Filter(where, None, ranges)


def filter_of(where: Sequence[str]) -> Filter | None:
    """:func:`parse_where`; None without conditions."""
    return parse_where(where) if where else None


class VectorStore(Protocol):
    """Records on disk or behind a network.

    Effects of upsert and delete, once they have returned, survive the death of this process and of the store.
    One process writes at a time; any number of its threads may search meanwhile.
    """

    @property
    def url(self) -> str:
        """The store URL, without a password. :func:`~sfumato.search.stores.open.open_store` opens it again."""
        ...

    @property
    def dim(self) -> int:
        """Dimensions e of the vectors."""
        ...

    @property
    def fingerprint(self) -> str:
        """The text about the meaning of the vectors; a store must not mix vectors of different meaning."""
        ...

    def upsert(self, records: Records) -> None:
        """Store records; a record replaces the one with the same id as a whole.

        Args:
            records: vectors of dimension e.

        Raises:
            ValueError: the vectors have another dimension.
            UserError: the store cannot be reached or is full. Nothing was stored, or a part that the same call
                completes.
        """
        ...

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items.

        Args:
            ids: ids of the items; unknown ones are skipped.

        Returns:
            Number of removed items.
        """
        ...

    def get(self, ids: Sequence[str]) -> Records:
        """Records by id.

        Args:
            ids: wanted ids.

        Returns:
            The records of those ids that exist, in the order of `ids`, each once.
        """
        ...

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        """The nearest items of each query.

        Args:
            queries: (n, e) float32.
            k: number of results, at least 1.
            filter: which items may be found; all if None.

        Returns:
            For each query at most k records, nearest first by the store's own distances. There are fewer only if
            fewer pass the filter or an approximate engine finds no more.

        Raises:
            ValueError: the queries have another dimension, or k < 1.
        """
        ...

    def count(self, filter: Filter | None = None) -> int:
        """Number of items.

        Args:
            filter: which items count; all if None.

        Returns:
            The number.
        """
        ...

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """All items, each once, in any order; as they were when the scan began, if the store can do that.

        Args:
            batch: largest number of records at a time.
            filter: which items are wanted; all if None.

        Yields:
            Batches of records.
        """
        ...

    def ids_after(self, after: str, n: int) -> list[str]:
        """The next ids in the order of their UTF-8 bytes, so that all items can be listed page by page.

        Args:
            after: ids up to and with this one are left out; "" for none.
            n: number of ids, at least 1.

        Returns:
            n ids; fewer only if no more follow.
        """
        ...

    def optimise(self) -> None:
        """Build search structures over all stored items. They make searches fast; searches are correct without."""
        ...

    def close(self) -> None:
        """Release files and connections. Closing twice does no harm."""
        ...


WORDS = "_words"
"""Payload field of the distinct word stems of an item's texts, with spaces between them."""


@runtime_checkable
class WordStore(Protocol):
    """What a store may have beside :class:`VectorStore`: a search by words. Stores without it find no words."""

    def match_words(self, stems: Sequence[str], n: int, filter: Filter | None = None) -> list[str]:
        """The items whose payload field WORDS has the most of some stems, by the store's own ranking.

        Args:
            stems: word stems; an item needs one of them.
            n: largest number of items, at least 1.
            filter: which items may be found; all if None.

        Returns:
            Their ids, best first. Nothing from a store that was made before stores had words.
        """
        ...


class StoreBase:
    """What the stores of this package share: the checks of what they are given, and records from rows."""

    url: str
    dim: int
    fingerprint: str
    waits_for_index = True  # whether optimise() waits for a server that builds its index behind

    def begin_writing(self) -> None:
        """Acquire the write lock of a store that has one, as the first write would; it is held until close."""

    def check_vectors(self, records: Records) -> None:
        """Refuse vectors of another dimension."""
        if (e := records.vectors.shape[1]) != self.dim:
            raise ValueError(f"store {self.url}: vectors must have {self.dim} dimensions, got {e}")

    def check_queries(self, queries: Tensor, k: int) -> Tensor:
        """(n, e) float32 queries on the CPU."""
        if k < 1:
            raise ValueError(f"store {self.url}: k must be at least 1, got {k}")
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(f"store {self.url}: queries must be (n, {self.dim}), got {tuple(queries.shape)}")
        wanted = queries.detach().to("cpu", torch.float32).contiguous()
        if not torch.isfinite(wanted).all():
            raise ValueError(f"store {self.url}: a query has a number that is not finite")
        return wanted

    def records(self, rows: Sequence[tuple[str, float, Mapping[str, str]]], vectors: Any) -> Records:
        """Records of rows (id, uncertainty, payload) with an array of numbers, n * e in all."""
        ids, uncertainty, payloads = zip(*rows, strict=True) if rows else ((), (), ())
        numbers = torch.from_numpy(np.asarray(vectors, dtype=np.float32).reshape(len(rows), self.dim))
        return Records(ids, numbers, torch.tensor(uncertainty, dtype=torch.float32), payloads)


def nearest_of(candidates: Records, query: Tensor, k: int) -> Records:
    """The k nearest of the candidates of a query, by their full vectors in float64. query (e,)."""
    distance = (candidates.vectors.double() - query.double()).square().sum(1)
    return candidates.take(distance.sort(stable=True)[1][:k].tolist())


def in_order(ids: Sequence[str], found: Mapping[str, Row]) -> list[Row]:
    """What was found, in the order of the wanted ids, each once."""
    return [found[i] for i in dict.fromkeys(ids) if i in found]
