r"""Distances between Gaussians as Euclidean distances between longer vectors, so that any vector engine can search
them.

For a fixed query, csd ranks by ||mean_q - mean_g||^2 + u_g with u_g the total variance of the item:

    gallery [mean_g - c, sqrt(u_g)]    query [mean_q - c, 0]    squared L2 = csd - u_q

exactly, in d + 1 dimensions. wasserstein2 is squared L2 between [mean - c, std] (2 d dimensions), squared_l2 between
the means alone (d). The centre c is the same on both sides and changes no distance. Engines expand ||q - g||^2 into a
product, which loses precision when the means lie far from the origin; relative to the gallery's centre the product is
precise. Only means are centred: the centre of sqrt(u) would depend mostly on the few largest variances, and items with
low variance would lose precision.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.distances import DISTANCES, Lift, get_distance
from sfumato.gaussian import GaussianEmbedding

LIFTED_DISTANCES = tuple(name for name, distance in DISTANCES.items() if distance.lift)
"""The distances that lift; the others need engine "exact"."""


def gallery_centre(gallery: GaussianEmbedding) -> Tensor:
    """Mean of the gallery's means. gallery (m, d) -> (d,)."""
    if gallery.n == 0:
        return torch.zeros(gallery.d, device=gallery.device)
    return gallery.mean.double().mean(0).float()


def lifted_dim(d: int, distance: str = "csd") -> int:
    """Dimensions of lifted vectors."""
    one = GaussianEmbedding.point(torch.zeros(1, d))
    return d + _lift(distance).gallery(one).shape[1]


def lift_gallery(gallery: GaussianEmbedding, distance: str = "csd", *, centre: Tensor | None = None) -> Tensor:
    """Vectors to store in an engine. gallery (m, d), centre (d,) -> (m, e)."""
    return torch.cat([_centred(gallery, centre), _lift(distance).gallery(gallery).float()], dim=1)


def lift_queries(queries: GaussianEmbedding, distance: str = "csd", *, centre: Tensor | None = None) -> Tensor:
    """Vectors to search with; their squared L2 to :func:`lift_gallery` plus :func:`query_constant` is the distance.

    queries (n, d), centre (d,) -> (n, e).
    """
    return torch.cat([_centred(queries, centre), _lift(distance).query(queries).float()], dim=1)


def query_constant(queries: GaussianEmbedding, distance: str = "csd") -> Tensor:
    """The difference between the distance and the squared L2 of lifted vectors. queries (n, d) -> (n,)."""
    return _lift(distance).constant(queries).float()


@dataclass(frozen=True, eq=False)
class LiftedGallery:
    """A lifted gallery for exact search by many queries: a block of distances is one matrix product and a sum."""

    vectors: Tensor  # (m, e) of :func:`lift_gallery`, about the centre
    squares: Tensor  # (m,) their squared lengths
    distance: str  # one of LIFTED_DISTANCES
    centre: Tensor  # (d,)

    @classmethod
    def of(cls, gallery: GaussianEmbedding, distance: str, centre: Tensor) -> "LiftedGallery":
        """Lift a gallery. gallery (m, d), centre (d,)."""
        return cls.of_vectors(lift_gallery(gallery, distance, centre=centre), distance, centre)

    @classmethod
    def of_vectors(cls, vectors: Tensor, distance: str, centre: Tensor) -> "LiftedGallery":
        """A gallery that is lifted already. vectors (m, e), centre (d,)."""
        return cls(vectors, vectors.square().sum(1), distance, centre)

    def distance_blocks(self, queries: GaussianEmbedding, *, memory_mb: float = 256.0) -> Iterator[tuple[int, Tensor]]:
        """Distances of blocks of queries to the whole gallery. queries (n, d)."""
        rows = max(1, int(memory_mb * 2**20 / 4 / max(len(self.vectors), 1)))
        vectors, constant = (
            lift_queries(queries, self.distance, centre=self.centre),
            query_constant(queries, self.distance),
        )
        for start in range(0, queries.n, rows):
            part = vectors[start : start + rows]
            squared = torch.addmm(self.squares, part, self.vectors.T, alpha=-2)
            squared += part.square().sum(1, keepdim=True)
            yield start, squared.clamp_min_(0).add_(constant[start : start + rows].unsqueeze(1))


def lowered(vectors: Tensor, total_variance: Tensor, distance: str, centre: Tensor) -> GaussianEmbedding:
    """Embeddings that have the same distances as the original embeddings before lifting.

    vectors (n, e), total_variance (n,), centre (d,) -> (n, d).
    """
    _lift(distance)
    d = len(centre)
    mean = vectors[:, :d] + centre
    if distance == "wasserstein2":
        return GaussianEmbedding(mean, 2 * vectors[:, d:].log())
    return GaussianEmbedding(mean, (total_variance / d).log().unsqueeze(1).expand(-1, d).contiguous())


def _lift(distance: str) -> Lift:
    lift = get_distance(distance).lift
    if lift is None:
        raise ValueError(
            f"distance {distance!r} is not a Euclidean distance of lifted vectors (those are"
            f" {', '.join(LIFTED_DISTANCES)});"
            ' search it with engine="exact"'
        )
    return lift


def _centred(embeddings: GaussianEmbedding, centre: Tensor | None) -> Tensor:
    if centre is None:
        return embeddings.mean.float()
    if centre.shape != (embeddings.d,):
        raise ValueError(f"lifting: centre must have shape ({embeddings.d},), got {tuple(centre.shape)}")
    return (
        (embeddings.mean - centre.to(embeddings.mean)).float()
        if embeddings.dtype == torch.float64
        else embeddings.mean.float() - centre
    )
