"""What a vector store does: it keeps records under ids and finds the vectors nearest to a query by squared Euclidean distance.

A store knows nothing of Gaussians: lifting (search/lifting.py) has made every item a vector beforehand, and a
:class:`~sfumato.search.collection.GaussianCollection` computes the distances of what a store brings anew, from the vectors in
the records. So stores differ in which candidates they bring and in what they survive, never in the figures.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Records:
    """A batch of stored items.

    Attributes:
        ids: n distinct ids.
        vectors: (n, e) float32 on the CPU.
        uncertainty: (n,) float32, total variance of each item.
        payloads: n dictionaries of texts to hand out with the items.

    Raises:
        ValueError: sizes differ, an id occurs twice or is empty, a payload is not of
            texts, or a number is not finite; the message names the first such item.
    """

    ids: tuple[str, ...]
    vectors: Tensor
    uncertainty: Tensor
    payloads: tuple[Mapping[str, str], ...]

    def __post_init__(self) -> None:
        n = len(self.ids)
        if self.vectors.ndim != 2 or self.vectors.dtype != torch.float32:
            raise ValueError(
                f"Records: vectors must be (n, e) float32, got {tuple(self.vectors.shape)} {self.vectors.dtype}"
            )
        if not (len(self.vectors) == len(self.uncertainty) == len(self.payloads) == n):
            raise ValueError(
                f"Records: {n} ids, {len(self.vectors)} vectors, {len(self.uncertainty)} uncertainties and {len(self.payloads)} payloads;"
                " expected as many of each"
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
        """These records, in this order."""
        chosen = list(positions)
        return Records(
            tuple(self.ids[i] for i in chosen),
            self.vectors[chosen],
            self.uncertainty[chosen],
            tuple(self.payloads[i] for i in chosen),
        )

    @staticmethod
    def none(e: int) -> "Records":
        """No records of e dimensions."""
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
        where: by payload field, the values it may have; an item without the field is left out. All fields must fit.
        max_uncertainty: total variance that an item may have at most; any if None.

    Raises:
        ValueError: max_uncertainty is negative or not a number.
    """

    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    max_uncertainty: float | None = None

    def __post_init__(self) -> None:
        if self.max_uncertainty is not None and not self.max_uncertainty >= 0:
            raise ValueError(f"Filter: max_uncertainty must be at least 0, got {self.max_uncertainty}")

    def accepts(self, payload: Mapping[str, str], uncertainty: float) -> bool:
        """Whether an item fits; stores that filter by a language of their own must agree with this."""
        if self.max_uncertainty is not None and uncertainty > self.max_uncertainty:
            return False
        return all(payload.get(name) in values for name, values in self.where.items())


class VectorStore(Protocol):
    """Records on disk or behind a network. Made by :func:`~sfumato.search.stores.store_url.create_store` and opened by `open_store`.

    What upsert and delete have done when they return survives the death of this process and of the store.
    One process writes at a time; any number of threads of it may search meanwhile.
    """

    @property
    def url(self) -> str:
        """Where it is, without a password."""
        ...

    @property
    def dim(self) -> int:
        """e, of the vectors."""
        ...

    @property
    def fingerprint(self) -> str:
        """What :func:`create_store` was told of the meaning of the vectors; other vectors must not be mixed with them."""
        ...

    def upsert(self, records: Records) -> None:
        """Store records; those whose ids are there already are replaced as a whole.

        Raises:
            ValueError: vectors of another dimension.
            UserError: the store cannot be reached or is full; nothing, or a part that a repetition completes, was stored.
        """
        ...

    def delete(self, ids: Sequence[str]) -> int:
        """Remove items.

        Returns:
            How many of these ids were there.
        """
        ...

    def get(self, ids: Sequence[str]) -> Records:
        """The records of those of these ids that are there, in the order asked for."""
        ...

    def search(self, queries: Tensor, k: int, filter: Filter | None = None) -> list[Records]:
        """The nearest items of each query.

        Args:
            queries: (n, e) float32.
            k: at least 1.
            filter: which items may be found; all if None.

        Returns:
            For each query at most k records, nearest first by the store's own reckoning; fewer only if fewer fit the filter or an
            approximate engine finds no more.
        """
        ...

    def count(self, filter: Filter | None = None) -> int:
        """Number of items that fit."""
        ...

    def scan(self, batch: int = 4096, filter: Filter | None = None) -> Iterator[Records]:
        """All items that fit, in batches, each once, in an order of the store's own; as they were when the scan began if the store can."""
        ...

    def optimise(self) -> None:
        """Build what makes searching fast over all that was stored so far; searches are right without it."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...
