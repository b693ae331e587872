"""A post-hoc method without parameters: how unlike the gallery's mean a query is."""

from torch import Tensor

from papers.posthoc.closed_forms import GalleryMethod
from sfumato.ids import Side


class Mine(GalleryMethod):
    """1 - cos(query, mean of the gallery)."""

    name = "mine"
    summary = "1 - cosine of the query and the mean of the gallery"

    def of_block(self, side: Side, queries: Tensor, gallery: Tensor) -> Tensor:
        """See :class:`GalleryMethod`."""
        mean = gallery.mean(0)
        return 1 - queries @ (mean / mean.norm())
