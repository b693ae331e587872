"""Items of a gallery as a search sees them: candidates with distances, records with embeddings, and a sample."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding
from sfumato.search.texts import ItemTexts


@dataclass(frozen=True, eq=False)
class GalleryRecords:
    """Stored items of a gallery with their embeddings."""

    ids: tuple[str, ...]  # n ids
    embeddings: GaussianEmbedding
    payloads: tuple[Mapping[str, str], ...]  # n dictionaries


@dataclass(frozen=True, eq=False)
class Candidates:
    """Items close to one query, as columns."""

    ids: tuple[str, ...]  # c ids
    distance: Tensor  # (c,) distances, ascending unless joined
    uncertainty: Tensor  # (c,) total variances
    payloads: tuple[Mapping[str, str], ...]  # c dictionaries
    closest: GaussianEmbedding | None = None

    def first(self, n: int | None) -> "Candidates":
        """The closest of the candidates; None: all."""
        return Candidates(self.ids[:n], self.distance[:n], self.uncertainty[:n], self.payloads[:n], self.closest)

    def take(self, order: list[int]) -> "Candidates":
        """Some of the candidates, in an order."""
        payloads = tuple(self.payloads[j] for j in order)
        return Candidates(tuple(self.ids[j] for j in order), self.distance[order], self.uncertainty[order], payloads)

    def joined(self, others: "Candidates") -> "Candidates":
        """With other candidates behind them."""
        return Candidates(
            self.ids + others.ids,
            torch.cat([self.distance, others.distance]),
            torch.cat([self.uncertainty, others.uncertainty]),
            self.payloads + others.payloads,
        )


@dataclass(frozen=True, eq=False)
class SampledItems:
    """Some items of a gallery."""

    ids: tuple[str, ...]
    items: Callable[[Tensor], GaussianEmbedding]  # their embeddings, by position among them
    blocks: Callable[[GaussianEmbedding], Iterator[tuple[int, Tensor]]]  # distances of blocks of queries to them
    whole: bool  # whether they are all items
    uncertainty: Tensor = field(default_factory=lambda: torch.empty(0))  # (s,) total variances
    payloads: tuple[Mapping[str, str], ...] = ()
    texts: ItemTexts | None = None

    def candidates(self, distance: Tensor) -> Candidates:
        """All of them. distance (s,)."""
        return Candidates(self.ids, distance, self.uncertainty, self.payloads)

    def without(self, ids: Sequence[str]) -> Tensor:
        """(1, s) whether an item is none of these."""
        outside = torch.ones(1, len(self.ids), dtype=torch.bool)
        outside[0, [self.column[key] for key in ids if key in self.column]] = False
        return outside

    @functools.cached_property
    def column(self) -> dict[str, int]:
        """Positions by id."""
        return {i: j for j, i in enumerate(self.ids)}


def padded(found: Sequence[Candidates]) -> Tensor:
    """(n, c) distances of candidates, infinite where a query has fewer."""
    widest = max((len(each.ids) for each in found), default=0)
    padded = [functional.pad(each.distance, (0, widest - len(each.ids)), value=torch.inf) for each in found]
    return torch.stack(padded) if padded else torch.empty(0, 0)


def with_margin(k: int) -> int:
    """Number of candidates to fetch for k results, so that a wrong order of near ties has no effect."""
    return k + max(8, k // 4)
