r"""Margins: how far a query is from having another best item.

Unit gallery vectors g and a unit query q; c_j = q . g_j, item 1 is the best. The shortest change of q with another best
item crosses the nearest of the planes between item 1 and the others:

    shortest change = min over j of q . (g_1 - g_j) / ||g_1 - g_j||

No two unit vectors are further apart than 2, so an item with (c_1 - c_j) / 2 above the best change found cannot be
nearer, and items are visited by falling cosine.
"""

from collections.abc import Mapping
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from sfumato.gaussian import accumulation_dtype
from sfumato.posthoc.method import (
    FrozenPairs,
    PosthocMethod,
    Side,
    check_side,
    pack_options,
    unit,
    unpack_options,
)
from sfumato.posthoc.top1 import checked_gallery

Search = Literal["exact", "linear", "iterative"]
"""How the change is found: "exact", or one of the two approximations of the uCLIP repository."""

STEP_SIZE, MAX_STEPS = 0.025, 50
"""Published step and number of steps of the iterative search: no change above 1.25 is found."""

_LINEAR_EPS, _ITERATIVE_EPS = 1e-8, 1e-10
"""Added to the norm of a gradient by the released code."""

_BLOCK, _FIRST = 256, 32
"""Queries in memory at a time, and items that a query visits first."""


class CosineMargin(PosthocMethod):
    """The second best cosine minus the best. Nothing is fitted; it depends on query and gallery."""

    name = "margin"
    summary = "second best cosine minus the best, in [-2, 0]"
    needs_gallery = True

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0) -> Self:
        """See :meth:`PosthocMethod.fit`: there is nothing to fit."""
        return cls()

    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`."""
        check_side(side)
        items = checked_gallery(self.name, queries, gallery, at_least=2)
        best = [(rows @ items.T).topk(2, dim=1).values for rows in unit(queries).split(_BLOCK)]
        found = torch.cat([*best, items.new_zeros(0, 2)])
        return found[:, 1] - found[:, 0]

    def state(self) -> dict[str, Tensor]:
        """See :meth:`PosthocMethod.state`: there is nothing to store."""
        return {}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """See :meth:`PosthocMethod.from_state`."""
        return cls()


class AdversarialMargin(PosthocMethod):
    """Minus the length of the shortest change of a unit query that gives it another best item.

    With a search other than "exact" it is minus tanh of the length that the released code finds on raw queries; that
    number grows with the length of the query, and the iterative one ends at tanh(1.25) without notice.

    Source: adversarial and adversarial_lin of the uCLIP repository; the exact form is ours.
    """

    name = "adversarial_margin"
    summary = "minus the length of the shortest change of the unit query that changes its best item, in [-1, 0]"
    needs_gallery = True

    def __init__(self, search: Search = "exact") -> None:
        if search not in get_args(Search):
            raise ValueError(f"{self.name}: unknown search {search!r}; known: {', '.join(get_args(Search))}")
        self.search = search

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0, search: Search = "exact") -> Self:
        """Make the method; nothing is fitted."""
        return cls(search)

    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`."""
        check_side(side)
        items = checked_gallery(self.name, queries, gallery, at_least=2)
        if self.search == "exact":
            return -shortest_change(unit(queries), items)
        raw = queries.to(items.dtype)
        if self.search == "linear":
            return -linear_change(raw, items).tanh()
        return -iterative_change(raw, items).tanh()

    def state(self) -> dict[str, Tensor]:
        """See :meth:`PosthocMethod.state`."""
        return {"options": pack_options({"search": self.search})}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """See :meth:`PosthocMethod.from_state`."""
        return cls(**unpack_options(state, cls.name))


@torch.no_grad()
def shortest_change(queries: Tensor, gallery: Tensor) -> Tensor:
    r"""Length of the shortest change of each query that makes another item the best, exactly.

    A duplicate of the best item gives 0. Each query visits items by falling cosine until no other can be nearer, at
    most the whole gallery: O(m d) for a query.

    queries (q, d), gallery (m, d) -> (q,).
    """
    dtype = accumulation_dtype(queries.dtype)
    queries, gallery = queries.to(dtype), gallery.to(dtype)
    found = [_shortest_of_block(rows, gallery) for rows in queries.split(_BLOCK)]
    return torch.cat([*found, queries.new_zeros(0)])


def _shortest_of_block(queries: Tensor, gallery: Tensor) -> Tensor:
    cosine, m = queries @ gallery.T, len(gallery)
    best = queries.new_full((len(queries),), torch.inf)
    open_rows, k = torch.arange(len(queries), device=queries.device), min(_FIRST, m)
    while len(open_rows):
        values, index = cosine[open_rows].topk(k, dim=1)
        for rows in torch.arange(len(open_rows), device=queries.device).split(max(1, 2**22 // (k * gallery.shape[1]))):
            q, own = queries[open_rows[rows]], index[rows]
            change = _changes(q, gallery[own[:, :1]], gallery[own[:, 1:]])
            best[open_rows[rows]] = torch.minimum(best[open_rows[rows]], change.amin(1))
        # Rounding of the cosines must not end the visit too early.
        slack = 8 * torch.finfo(cosine.dtype).eps * queries[open_rows].norm(dim=1)
        unfinished = values[:, 0] - values[:, -1] - slack < 2 * best[open_rows]
        open_rows = open_rows[unfinished & (k < m)]
        k = min(4 * k, m)
    return best


def _changes(queries: Tensor, best: Tensor, others: Tensor) -> Tensor:
    """(q, k) lengths for queries (q, d), best items (q, 1, d) and others (q, k, d)."""
    difference = best - others
    length = difference.norm(dim=2)
    lead = torch.einsum("qd,qkd->qk", queries, difference).clamp_min(0)
    return torch.where(length > 0, lead / length.clamp_min(torch.finfo(length.dtype).tiny), 0)


def linear_change(queries: Tensor, gallery: Tensor) -> Tensor:
    r"""The lead over the runner-up divided by its gradient: ||q|| tan t, where the exact length is ||q|| sin t.

    queries (q, d), gallery (m, d) -> (q,).
    """
    found = []
    for rows in queries.split(_BLOCK):
        best, second = (unit(rows) @ gallery.T).topk(2, dim=1).indices.T
        difference = gallery[best] - gallery[second]
        gradient = _gradient(rows, difference)
        found.append((unit(rows) * difference).sum(1).clamp_min(0) / (gradient.norm(dim=1) + _LINEAR_EPS))
    return torch.cat([*found, queries.new_zeros(0)])


def iterative_change(
    queries: Tensor, gallery: Tensor, *, step_size: float = STEP_SIZE, max_steps: int = MAX_STEPS
) -> Tensor:
    """Length of the change after steps against the current runner-up, until another item is the best.

    queries (q, d), gallery (m, d) -> (q,).
    """
    change = torch.zeros_like(queries)
    first = torch.cat([(unit(rows) @ gallery.T).argmax(1) for rows in queries.split(_BLOCK)]) if len(queries) else None
    rows = torch.arange(len(queries), device=queries.device)
    for _ in range(max_steps if first is not None else 0):
        assert first is not None
        moved = queries[rows] + change[rows]
        two = torch.cat([(unit(part) @ gallery.T).topk(2, dim=1).indices for part in moved.split(_BLOCK)])
        kept = two[:, 0] == first[rows]
        rows, moved, two = rows[kept], moved[kept], two[kept]
        if not len(rows):
            break
        gradient = _gradient(moved, gallery[two[:, 0]] - gallery[two[:, 1]])
        change[rows] -= step_size * gradient / (gradient.norm(dim=1, keepdim=True) + _ITERATIVE_EPS)
    length: Tensor = change.norm(dim=1)
    return length


def _gradient(x: Tensor, difference: Tensor) -> Tensor:
    """(q, d) gradient of unit(x) . difference for x."""
    direction = unit(x)
    along = (direction * difference).sum(1, keepdim=True)
    length: Tensor = x.norm(dim=1, keepdim=True)
    return (difference - along * direction) / length
