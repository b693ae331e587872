r"""Lifting: vectors whose plain squared Euclidean distance ranks a gallery exactly as a distance between Gaussians does.

For csd the gallery item is [mean, sqrt(total variance)] and the query [mean, 0]: the squared distance is csd less the query's own
total variance, the same for every item. So any vector engine, approximate ones included, returns the exact csd order without
knowing of Gaussians. wasserstein2 is plain L2 on [mean, std]. Means are taken about a common centre, which changes no
distance and keeps float32's digits where the means lie far from the origin.
"""

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding

LIFTED = ("csd", "squared_l2", "wasserstein2")
"""Distances that have a lifting."""


def lift_gallery(gallery: GaussianEmbedding, distance: str = "csd", *, centre: Tensor | None = None) -> Tensor:
    """Vectors to store in an L2 engine.

    Args:
        gallery: (m, d) embeddings.
        distance: one of LIFTED.
        centre: (d,) subtracted from the means; the same for gallery and queries.

    Returns:
        (m, d + 1) float32 for csd, (m, d) for squared_l2, (m, 2 d) for wasserstein2.

    Raises:
        ValueError: the distance has no lifting.
    """
    mean = _centred(gallery, centre)
    if distance == "csd":
        return torch.cat([mean, gallery.total_variance.float().sqrt().unsqueeze(1)], dim=1)
    return _symmetric(gallery, mean, distance)


def lift_queries(queries: GaussianEmbedding, distance: str = "csd", *, centre: Tensor | None = None) -> Tensor:
    """Vectors to query an L2 engine with; see :func:`lift_gallery`."""
    mean = _centred(queries, centre)
    if distance == "csd":
        return torch.cat([mean, torch.zeros(queries.n, 1, device=mean.device)], dim=1)
    return _symmetric(queries, mean, distance)


def query_constant(queries: GaussianEmbedding, distance: str = "csd") -> Tensor:
    """(n,) what must be added to the squared L2 distances of a query to give the distance: its total variance for csd, else 0."""
    return queries.total_variance.float() if distance == "csd" else torch.zeros(queries.n, device=queries.device)


def _centred(embeddings: GaussianEmbedding, centre: Tensor | None) -> Tensor:
    mean = embeddings.mean if centre is None else embeddings.mean - centre.to(embeddings.mean)
    return mean.float()


def _symmetric(embeddings: GaussianEmbedding, mean: Tensor, distance: str) -> Tensor:
    if distance == "squared_l2":
        return mean
    if distance == "wasserstein2":
        return torch.cat([mean, (embeddings.log_var.float() / 2).exp()], dim=1)
    raise ValueError(f"distance {distance!r} has no lifting to L2; use one of {', '.join(LIFTED)}, or the engine 'exact'")
