"""What a distance declares beside its formula: its properties, how it lifts, and on which side its queries are."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from sfumato.direction import Direction
from sfumato.gaussian import GaussianEmbedding


@dataclass(frozen=True)
class Lift:
    """How a distance becomes a squared L2 distance between longer vectors, plus a number of the query alone.

        distance(q, g) = ||[mean_q, query(q)] - [mean_g, gallery(g)]||^2 + constant(q)

    The constant does not change the order of a query's results, so that any vector engine can search by the distance.

    Attributes:
        gallery: (m, d) embeddings -> (m, c) float32 columns behind the means of items.
        query: (n, d) embeddings -> (n, c) float32 columns behind the means of queries.
        constant: (n, d) embeddings -> (n,) float32.
    """

    gallery: Callable[[GaussianEmbedding], Tensor]
    query: Callable[[GaussianEmbedding], Tensor]
    constant: Callable[[GaussianEmbedding], Tensor]


@dataclass(frozen=True)
class Distance:
    """The protocol of a distance: its row form, its matrix form, and what it needs and allows.

    Everything that losses, search and evaluation ask about a distance is an attribute here; none of them asks for its
    name.

    Attributes:
        name: key in DISTANCES and in recipes.
        row: (n, d), (n, d) -> (n,) distances of corresponding rows.
        matrix: (n, d), (m, d) -> (n, m) distances between all pairs.
        symmetric: distance(x, y) = distance(y, x); if not, images come first.
        needs_variance: points (variance 0) are refused.
        sampled: random; row and matrix take n_samples and generator.
        embeddings: number K of embeddings of equal size that an item's mean consists of; 1 except for ``nearest_of_K``.
        lift: how it becomes a squared L2 distance that any vector engine can search; None if it does not.
        direction: side of the first argument: "i2t" for images as queries, "t2i" for texts; see :meth:`for_direction`.
    """

    name: str
    row: Callable[..., Tensor]
    matrix: Callable[..., Tensor]
    symmetric: bool = True
    needs_variance: bool = False
    sampled: bool = False
    embeddings: int = 1
    lift: Lift | None = None
    direction: Direction = "i2t"

    def for_direction(self, direction: Direction) -> "Distance":
        """The same distance with queries first: row and matrix take (queries, gallery) of this direction of retrieval.

        It always compares images with texts, so that only an asymmetric distance, such as kl, computes something else.

        Args:
            direction: "i2t" if images are the queries, "t2i" if texts are.

        Returns:
            A distance whose first argument are the queries.

        Example:
            >>> from sfumato.distances import get_distance
            >>> get_distance("kl").for_direction("t2i").direction
            't2i'
        """
        if direction == self.direction:
            return self
        if self.symmetric:
            return replace(self, direction=direction)
        row, matrix = self.row, self.matrix
        return replace(
            self,
            direction=direction,
            row=lambda queries, items: row(items, queries),
            matrix=lambda queries, gallery: matrix(gallery, queries).T,
        )
