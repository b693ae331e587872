"""The distance of the best item: the floor that every other uncertainty has to beat."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from sfumato.calibration.platt import fit_logits
from sfumato.posthoc.method import FrozenPairs, PosthocMethod, Side, check_embeddings, check_side, unit

_BLOCK = 1024
"""Queries whose cosines are in memory at a time."""


class Top1Distance(PosthocMethod):
    """1 - the largest cosine of the query with the gallery. Nothing is fitted; it depends on query and gallery.

    Source: top1similarity of the uCLIP repository; the "deterministic" baseline of GroVE.
    """

    name = "top1"
    summary = "1 - the largest cosine with the gallery, in [0, 2]"
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
        items = checked_gallery(self.name, queries, gallery)
        q = unit(queries)
        return torch.cat([1 - (rows @ items.T).amax(1) for rows in q.split(_BLOCK)]) if len(q) else q.new_zeros(0)

    def state(self) -> dict[str, Tensor]:
        """See :meth:`PosthocMethod.state`: there is nothing to store."""
        return {}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """See :meth:`PosthocMethod.from_state`."""
        return cls()


def checked_gallery(who: str, queries: Tensor, gallery: Tensor | None, *, at_least: int = 1) -> Tensor:
    """Check queries and gallery of a method that looks at the gallery. queries (q, d), gallery (m, d) -> (m, d)."""
    if gallery is None:
        raise ValueError(f"{who}: looks at the gallery; pass uncertainty(side, queries, gallery)")
    check_embeddings(queries, who, "queries")
    check_embeddings(gallery, who, "gallery", d=queries.shape[1])
    if len(gallery) < at_least:
        raise ValueError(f"{who}: needs a gallery of at least {at_least} items, got {len(gallery)}")
    return unit(gallery).to(unit(queries[:0]).dtype)


def fit_hit_logits(uncertainty: Tensor, hit: Tensor) -> tuple[float, float]:
    """Platt scaling of an uncertainty: the logits with which sigmoid(bias - scale * u) is the probability of a hit.

    The targets are (N+ + 1) / (N+ + 2) for hits and 1 / (N- + 2) for misses, as in Platt's paper, so that separable
    queries give finite logits. The order of the queries stays: AUROC does not change, calibration errors do. It holds
    for the gallery that it was fitted on. :func:`~sfumato.matching.match_probability` applies it.

    Paper: Platt, "Probabilistic outputs for support vector machines", 1999.

    uncertainty (q,), hit (q,).
    """
    label = hit.detach().double()
    if not ((label == 0) | (label == 1)).all():
        raise ValueError("fit_hit_logits: hit must hold 0 and 1")
    hits, misses = float(label.sum()), float((1 - label).sum())
    if not hits or not misses:
        raise ValueError(f"fit_hit_logits: needs hits and misses, got {hits:.0f} hits and {misses:.0f} misses")
    return fit_logits(uncertainty, torch.where(label > 0, (hits + 1) / (hits + 2), 1 / (misses + 2)))
