r"""Methods without a network: the distance and the margins of the best item, and the whitened norm.

The distance of the best item is the floor that every other uncertainty has to beat. A margin says how far a query is
from having another best item. With unit gallery vectors g, a unit query q, c_j = q . g_j and item 1 the best, the
shortest change of q with another best item crosses the nearest of the planes between item 1 and the others:

    shortest change = min over j of q . (g_1 - g_j) / ||g_1 - g_j||

No two unit vectors are further apart than 2, so an item with (c_1 - c_j) / 2 above the best change found cannot be
nearer, and items are visited by falling cosine.

The whitened norm of W-CLIP is the squared Mahalanobis distance of an embedding from the mean of its modality:

    w = S^(-1/2) V^T (f - m),    covariance = V S V^T    (divided by N - 1),    uncertainty = ||w||^2

The covariance is decomposed by ``eigh`` in float64. The released code uses a general complex decomposition, which gives
identical columns for nearly singular covariances.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from papers.posthoc.method import FrozenPairs, PosthocMethod, unit
from sfumato.calibration.logits import fit_logits
from sfumato.errors import need
from sfumato.gaussian import accumulation_dtype
from sfumato.ids import Side

SHRINKAGE = 0.01
"""Shrinkage of a covariance: a nearly empty direction counts with a hundredth of the mean variance."""

_BLOCK, _FIRST, _NEAREST = 256, 32, 100
"""Queries in memory at a time, items that a query of :func:`shortest_change` visits first, and nearest items that
:class:`BayesianBM25` reads."""


# ---------------------------------------------------------------- distances and margins
class GalleryMethod(PosthocMethod):
    """Base of the methods that look at query and gallery alone; nothing is fitted."""

    needs_gallery = True

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0) -> Self:
        """See :meth:`PosthocMethod.fit`: there is nothing to fit."""
        return cls()

    @abstractmethod
    def of_block(self, side: Side, queries: Tensor, gallery: Tensor) -> Tensor:
        """(b,) uncertainties of unit queries (b, d) in a unit gallery (m, d)."""

    def uncertainty(self, side: Side, x: Tensor, gallery: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`."""
        assert gallery is not None
        q = unit(x)
        items = unit(gallery).to(q.dtype)
        return in_blocks(q, lambda rows: self.of_block(side, rows, items))


def in_blocks(queries: Tensor, of_block: Callable[[Tensor], Tensor]) -> Tensor:
    """(q,) numbers of queries (q, d), of which a few at a time are compared with all items."""
    return torch.cat([queries.new_zeros(0), *(of_block(rows) for rows in queries.split(_BLOCK) if len(rows))])


class Top1Distance(GalleryMethod):
    """1 - the largest cosine of the query with the gallery.

    Source: top1similarity of the uCLIP repository; the "deterministic" baseline of GroVE.
    """

    name = "top1"
    summary = "1 - the largest cosine with the gallery, in [0, 2]"

    def of_block(self, side: Side, queries: Tensor, gallery: Tensor) -> Tensor:
        """See :meth:`GalleryMethod.of_block`."""
        return 1 - (queries @ gallery.T).amax(1)


class CosineMargin(GalleryMethod):
    """The second best cosine minus the best."""

    name = "margin"
    summary = "second best cosine minus the best, in [-2, 0]"

    def of_block(self, side: Side, queries: Tensor, gallery: Tensor) -> Tensor:
        """See :meth:`GalleryMethod.of_block`."""
        best = (queries @ gallery.T).topk(2, dim=1).values
        return best[:, 1] - best[:, 0]


class AdversarialMargin(GalleryMethod):
    """Minus the length of the shortest change of a unit query that gives it another best item.

    Source: adversarial of the uCLIP repository, which searches it by steps; the exact form is ours.
    """

    name = "adversarial_margin"
    summary = "minus the length of the shortest change of the unit query that changes its best item, in [-1, 0]"

    def of_block(self, side: Side, queries: Tensor, gallery: Tensor) -> Tensor:
        """See :meth:`GalleryMethod.of_block`."""
        return -shortest_change(queries, gallery)


class BayesianBM25(GalleryMethod):
    """Minus the log odds of the first hit by the package bayesian-bm25, which needs no labels.

    The background is the Gaussian of the query's distances to the whole gallery, as in the package's own benchmark. The
    density of relevant items is estimated from the distances of the nearest ones. Their ratio gives the odds, with the
    package's neutral base rate of one half and its own choice between a kernel density and a mixture. All queries see
    distances 1 - cosine.

    Source: VectorProbabilityTransform of bayesian-bm25 0.11.0.
    """

    name = "bayesian_bm25"
    summary = "1 - probability of the first hit by bayesian-bm25's ratio of densities of distances, without labels"
    own_probability = True

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0) -> Self:
        """See :meth:`PosthocMethod.fit`: there is nothing to fit, but the package has to be there."""
        _vector_probability()
        return cls()

    def of_block(self, side: Side, queries: Tensor, gallery: Tensor) -> Tensor:
        """See :meth:`GalleryMethod.of_block`."""
        transform, found = _vector_probability(), []
        for distance in (1 - queries @ gallery.T).double().sort(dim=1).values.cpu().numpy():
            probability = transform.fit_background(distance).calibrate(distance[:_NEAREST])
            found.append(float(probability[0]))
        return -torch.tensor(found, dtype=torch.float64, device=queries.device).logit().to(queries.dtype)


class BayesianBM25Platt(BayesianBM25):
    """The same log odds as an uncertainty like any other: the probability of the first hit is fitted on labels."""

    name = "bayesian_bm25_platt"
    summary = "minus the log odds of bayesian_bm25, of which the probability of the first hit is fitted like others"
    own_probability = False


def _vector_probability() -> Any:
    with need("referee", "bayesian_bm25 is the package bayesian-bm25, which is not installed"):
        from bayesian_bm25 import VectorProbabilityTransform
    return VectorProbabilityTransform


@torch.no_grad()
def shortest_change(queries: Tensor, gallery: Tensor) -> Tensor:
    r"""Length of the shortest change of each query that makes another item the best, exactly.

    A duplicate of the best item gives 0. Each query visits items by falling cosine until no other can be nearer, at
    most the whole gallery: O(m d) for a query.

    queries (q, d), gallery (m, d) -> (q,).
    """
    dtype = accumulation_dtype(queries.dtype)
    queries, gallery = queries.to(dtype), gallery.to(dtype)
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


def fit_hit_logits(uncertainty: Tensor, hit: Tensor) -> tuple[float, float]:
    """Platt scaling of an uncertainty: the logits with which sigmoid(bias - scale * u) is the probability of a hit.

    The targets are (N+ + 1) / (N+ + 2) for hits and 1 / (N- + 2) for misses, as in Platt's paper, so that separable
    queries give finite logits. The order of the queries stays: AUROC does not change, calibration errors do. It holds
    for the gallery that it was fitted on. :func:`~sfumato.matching.match_probability` applies it.

    Paper: Platt, "Probabilistic outputs for support vector machines", 1999.

    uncertainty (q,), hit (q,).
    """
    label = hit.detach().double()
    hits, misses = float(label.sum()), float((1 - label).sum())
    if not hits or not misses:
        raise ValueError(f"fit_hit_logits: needs hits and misses, got {hits:.0f} hits and {misses:.0f} misses")
    return fit_logits(uncertainty, torch.where(label > 0, (hits + 1) / (hits + 2), 1 / (misses + 2)))


# ---------------------------------------------------------------- the whitened norm
@dataclass(frozen=True, eq=False)
class Whitening:
    """The Gaussian of one modality."""

    mean: Tensor  # (d,) float64
    vectors: Tensor  # (d, d) eigenvectors of the covariance in columns, float64
    values: Tensor  # (d,) eigenvalues after shrinkage, ascending, all positive

    @classmethod
    def fit(cls, x: Tensor, *, shrinkage: float = SHRINKAGE) -> "Whitening":
        """Mean and covariance of raw embeddings, (1 - shrinkage) covariance + shrinkage * its mean eigenvalue * I.

        x (n, d).
        """
        x = x.double()
        mean = x.mean(0)
        centred = x - mean
        values, vectors = torch.linalg.eigh(centred.T @ centred / (len(x) - 1))
        values = (1 - shrinkage) * values.clamp_min(0) + shrinkage * values.clamp_min(0).mean()
        if not values[0] > len(values) * torch.finfo(values.dtype).eps * values[-1]:
            raise ValueError(
                f"the covariance of {len(x)} items in {x.shape[1]} dimensions is singular; give more different items"
            )
        return cls(mean, vectors.contiguous(), values)

    def whitened(self, x: Tensor) -> Tensor:
        """Whitened embeddings. x (n, d) -> (n, d)."""
        return (x.double() - self.mean.to(x.device)) @ self.vectors.to(x.device) / self.values.to(x.device).sqrt()


class WhitenedNorm(PosthocMethod):
    """The squared Mahalanobis distance of an item from its modality: large for items unlike those of the fit.

    It is one number for an item and no variance of its embedding, so it must not enter a ranking.

    Paper: Betser et al., "Whitened CLIP as a likelihood surrogate of images and captions", ICML 2025 (W_CLIP).
    """

    name = "whitened_norm"
    summary = "squared Mahalanobis distance of the raw embedding from its modality, about d on the fit"

    def __init__(self, whitenings: Mapping[Side, Whitening]) -> None:
        self.whitenings = dict(whitenings)

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0) -> Self:
        """Means and covariances of the raw embeddings of each modality, each item once."""
        return cls({side: Whitening.fit(pairs.embeddings(side)) for side in cls.sides})

    def uncertainty(self, side: Side, x: Tensor, gallery: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`."""
        return self.whitenings[side].whitened(x).square().sum(1)

    def tensors(self) -> list[Tensor]:
        """See :meth:`PosthocMethod.tensors`."""
        return [x for own in self.whitenings.values() for x in (own.mean, own.vectors, own.values)]
