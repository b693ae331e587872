"""Reference queries: what earlier queries of a model say about a query and its first hit.

Some items lie close to many queries, and are often the first hit without a match (hubs). Some queries lie far from all
that a model has seen. A few thousand queries of the training show both, at the cost of two small products of matrices
for each search. docs/concepts/calibration.md has what they are worth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sfumato.direction import Direction
from sfumato.distances import Distance, get_distance
from sfumato.gaussian import GaussianEmbedding

N_REFERENCE = 2_000
"""Largest number of reference queries of a direction."""

_BLOCK = 1024

N_CLOSE = 10
"""Number of closest reference queries whose mean distance counts."""

REFERENCE_FEATURES = ("hub", "isolation")
"""What :meth:`ReferenceQueries.features` computes, in this order."""


@dataclass(frozen=True, eq=False)
class ReferenceQueries:
    """Queries that no later query is; make them with :meth:`of`."""

    embeddings: GaussianEmbedding  # (b, d) float32, rounded to float16
    distance: str  # name in DISTANCES
    direction: Direction  # of the queries, "t2i" if they are texts

    @classmethod
    def of(
        cls, queries: GaussianEmbedding, distance: str, direction: Direction, *, seed: int = 0
    ) -> "ReferenceQueries":
        """Keep at most N_REFERENCE of some queries. queries (n, d)."""
        if queries.n < N_CLOSE:
            raise ValueError(f"ReferenceQueries: needs at least {N_CLOSE} queries, got {queries.n}")
        if get_distance(distance).sampled:
            raise ValueError(f"ReferenceQueries: {distance} is sampled, so features would differ between searches")
        chosen = torch.randperm(queries.n, generator=torch.Generator().manual_seed(seed))[:N_REFERENCE].sort().values
        return cls(queries[chosen].detach().to("cpu").to(torch.float16).to(torch.float32), distance, direction)

    @cached_property
    def _oriented(self) -> Distance:
        return get_distance(self.distance).for_direction(self.direction)

    def features(self, queries: GaussianEmbedding, first: GaussianEmbedding) -> Tensor:
        """What the reference queries say about queries and their first hits. queries (n, d), first (n, d) -> (n, 2)."""
        return torch.stack([self.hub(first), self.isolation(queries)], dim=1)

    def hub(self, items: GaussianEmbedding) -> Tensor:
        """The mean distance of items from the reference queries closest to them: small for an item that many ask for.

        items (m, d) -> (m,).
        """
        return self._closest(items, lambda some: self._oriented.matrix(self.embeddings, some).T)

    def isolation(self, queries: GaussianEmbedding) -> Tensor:
        """The mean distance of queries from the reference queries closest to them. queries (n, d) -> (n,)."""
        return self._closest(queries, lambda some: self._oriented.matrix(some, self.embeddings))

    def _closest(self, some: GaussianEmbedding, distance: Callable[[GaussianEmbedding], Tensor]) -> Tensor:
        """(n,) mean of the N_CLOSE smallest of the (n, b) distances, block by block."""
        parts = [
            distance(some[start : start + _BLOCK]).topk(N_CLOSE, dim=1, largest=False).values.double().mean(1)
            for start in range(0, some.n, _BLOCK)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def no_reference_error(who: str) -> ValueError:
    """The error of a calibration with reference queries that is used without them."""
    return ValueError(
        f"{who}: this calibration reads reference queries; give"
        " reference=calibration.of(direction).reference.features(queries, first hits)"
    )
