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
    """Mean of the gallery's means.

    Args:
        gallery: (m, d) embeddings.

    Returns:
        (d,) float32, summed in float64; the origin if the gallery is empty.
    """
    if gallery.n == 0:
        return torch.zeros(gallery.d, device=gallery.device)
    return gallery.mean.double().mean(0).float()


def lifted_dim(d: int, distance: str = "csd") -> int:
    """Dimensions of lifted vectors.

    Args:
        d: dimensions of the embeddings.
        distance: one of LIFTED_DISTANCES.

    Returns:
        e: d + 1 for csd, 2 d for wasserstein2, d for squared_l2.

    Raises:
        ValueError: the distance does not lift.
    """
    one = GaussianEmbedding.point(torch.zeros(1, d))
    return d + _lift(distance).gallery(one).shape[1]


def lift_gallery(gallery: GaussianEmbedding, distance: str = "csd", *, centre: Tensor | None = None) -> Tensor:
    """Vectors to store in an engine.

    Args:
        gallery: (m, d) embeddings.
        distance: one of LIFTED_DISTANCES.
        centre: (d,) subtracted from the means; none if None.

    Returns:
        (m, e) float32, e = d + 1 for csd, 2 d for wasserstein2, d for squared_l2.

    Raises:
        ValueError: the distance does not lift, or the centre is not (d,).
    """
    return torch.cat([_centred(gallery, centre), _lift(distance).gallery(gallery).float()], dim=1)


def lift_queries(queries: GaussianEmbedding, distance: str = "csd", *, centre: Tensor | None = None) -> Tensor:
    """Vectors to search with; their squared L2 to :func:`lift_gallery` plus :func:`query_constant` is the distance.

    Args:
        queries: (n, d) embeddings.
        distance: one of LIFTED_DISTANCES.
        centre: (d,) as given to lift_gallery.

    Returns:
        (n, e) float32.

    Raises:
        ValueError: the distance does not lift, or the centre is not (d,).
    """
    return torch.cat([_centred(queries, centre), _lift(distance).query(queries).float()], dim=1)


def query_constant(queries: GaussianEmbedding, distance: str = "csd") -> Tensor:
    """The difference between the distance and the squared L2 of lifted vectors.

    Args:
        queries: (n, d) embeddings.
        distance: one of LIFTED_DISTANCES.

    Returns:
        (n,) float32: the query's total variance for csd, 0 for the others.

    Raises:
        ValueError: the distance does not lift.
    """
    return _lift(distance).constant(queries).float()


@dataclass(frozen=True, eq=False)
class LiftedGallery:
    """A lifted gallery for exact search by many queries: a block of distances is one matrix product and a sum.

    Attributes:
        vectors: (m, e) of :func:`lift_gallery`, about the centre.
        squares: (m,) their squared lengths.
        distance: one of LIFTED_DISTANCES.
        centre: (d,).
    """

    vectors: Tensor
    squares: Tensor
    distance: str
    centre: Tensor

    @classmethod
    def of(cls, gallery: GaussianEmbedding, distance: str, centre: Tensor) -> "LiftedGallery":
        """Lift a gallery.

        Args:
            gallery: (m, d) embeddings.
            distance: one of LIFTED_DISTANCES.
            centre: (d,) point that the vectors are relative to.

        Returns:
            The lifted gallery.

        Raises:
            ValueError: the distance does not lift, or the centre is not (d,).
        """
        vectors = lift_gallery(gallery, distance, centre=centre)
        return cls(vectors, vectors.square().sum(1), distance, centre)

    def distance_blocks(self, queries: GaussianEmbedding, *, memory_mb: float = 256.0) -> Iterator[tuple[int, Tensor]]:
        """Distances of blocks of queries to the whole gallery.

        Args:
            queries: (n, d) embeddings.
            memory_mb: size of a block of distances.

        Yields:
            (first query, (b, m) float32 distances), with an error of about 1e-6 of the largest squared distance to
            the centre.
        """
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

    Args:
        vectors: (n, e) of :func:`lift_gallery`.
        total_variance: (n,) total variances of the lifted embeddings.
        distance: one of LIFTED_DISTANCES.
        centre: (d,) as given to lift_gallery.

    Returns:
        (n, d) with the means and total variances of the originals, and for wasserstein2 their variances. The other two
        distances depend on the total variance only; there it is divided evenly over the dimensions.
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
