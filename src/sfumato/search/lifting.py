r"""Distances between Gaussians as plain Euclidean distances between longer vectors, so that any vector engine can search them.

For a fixed query, csd ranks by ||mean_q - mean_g||^2 + u_g with u_g the total variance of the item:

    gallery [mean_g - c, sqrt(u_g)]    query [mean_q - c, 0]    squared L2 = csd - u_q

exactly, in d + 1 dimensions. wasserstein2 is squared L2 between [mean - c, std] (2 d dimensions), squared_l2 between the means
alone (d). The centre c is the same for both sides and changes no distance; engines expand ||q - g||^2 into a product, and about
the gallery's centre that keeps its precision when the means lie far from the origin. Only means are centred: a centre of sqrt(u)
would be ruled by the few largest variances and cost the certain items their precision.
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
    """(d,) float32 mean of the gallery's means, summed in float64; the origin if the gallery is empty."""
    if gallery.n == 0:
        return torch.zeros(gallery.d, device=gallery.device)
    return gallery.mean.double().mean(0).float()


def lifted_dim(d: int, distance: str = "csd") -> int:
    """e: dimensions of the lifted vectors of embeddings in d dimensions.

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
    return torch.cat([_centred(gallery, centre), _lift(distance).gallery(gallery)], dim=1)


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
    return torch.cat([_centred(queries, centre), _lift(distance).query(queries)], dim=1)


def query_constant(queries: GaussianEmbedding, distance: str = "csd") -> Tensor:
    """(n,) float32: what the squared L2 of lifted vectors leaves out, the query's total variance for csd and 0 for the others."""
    return _lift(distance).constant(queries)


@dataclass(frozen=True, eq=False)
class LiftedGallery:
    """A gallery made ready for exact search by many queries: a block of distances is one matrix product and a sum.

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
        """Lift a gallery of (m, d) embeddings.

        Raises:
            ValueError: the distance does not lift, or the centre is not (d,).
        """
        vectors = lift_gallery(gallery, distance, centre=centre)
        return cls(vectors, vectors.square().sum(1), distance, centre)

    def distance_blocks(self, queries: GaussianEmbedding, *, memory_mb: float = 256.0) -> Iterator[tuple[int, Tensor]]:
        """Distances of a few queries at a time to the whole gallery.

        Args:
            queries: (n, d) embeddings.
            memory_mb: size of a block of distances.

        Yields:
            (first query, (b, m) float32 distances), off by about 1e-6 of the largest squared distance to the centre.
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


def unlift(squared_l2: Tensor, queries: GaussianEmbedding, distance: str = "csd") -> Tensor:
    """(n, k) squared L2 of lifted vectors, as an engine reports them -> (n, k) distances."""
    return squared_l2 + query_constant(queries, distance).unsqueeze(1)


def lowered(vectors: Tensor, total_variance: Tensor, distance: str, centre: Tensor) -> GaussianEmbedding:
    """Embeddings that have the distances of the embeddings that were lifted.

    Args:
        vectors: (n, e) of :func:`lift_gallery`.
        total_variance: (n,) of what was lifted.
        distance: one of LIFTED_DISTANCES.
        centre: (d,) as given to lift_gallery.

    Returns:
        (n, d) with the means and total variances of the originals, and for wasserstein2 their variances; for the other two, which do
        not depend on it, the total variance is spread evenly over the dimensions.
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
            f"distance {distance!r} is not a Euclidean distance of lifted vectors (those are {', '.join(LIFTED_DISTANCES)});"
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
