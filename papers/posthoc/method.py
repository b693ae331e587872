"""What a frozen model says of held-in pairs, and the interface of every method that adds an uncertainty to it.

The module knows shapes and checks; it has no formula of a method.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self, get_args

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.ids import Side


class TwoSides:
    """What a frozen model gives for images and texts, by side."""

    images: Tensor  # (n, d) raw embeddings
    texts: Tensor  # (m, d) raw embeddings
    image_hidden: Tensor | None  # (n, P) inputs of the projection layer
    text_hidden: Tensor | None

    def embeddings(self, side: Side) -> Tensor:
        """(n, d) embeddings of one side."""
        return self.images if side == "image" else self.texts

    def hidden(self, side: Side) -> Tensor | None:
        """(n, P) inputs of one side's projection layer."""
        return self.image_hidden if side == "image" else self.text_hidden


@dataclass(frozen=True, eq=False)
class FrozenPairs(TwoSides):
    """Embeddings of a frozen two-tower model for pairs that a method is fitted on.

    Only the first three are needed by every method; the Laplace method needs the rest.
    """

    images: Tensor  # (n, d) image embeddings as the model gives them, normalised or not
    texts: Tensor  # (m, d) text embeddings, likewise
    pairs: Tensor  # (p, 2) positions of matching images and texts
    logit_scale: float | None = None
    image_hidden: Tensor | None = None
    text_hidden: Tensor | None = None
    projections: Mapping[Side, tuple[Tensor, Tensor | None]] = field(default_factory=dict)  # (d, P) matrix, (d,) bias
    logit_bias: float | None = None  # constant of the model's logit (SigLIP); None for a model without one (CLIP)

    def __post_init__(self) -> None:
        check_embeddings(self.images, "images")
        check_embeddings(self.texts, "texts", d=self.images.shape[1])
        index = self.pairs
        if index.ndim != 2 or index.shape[1] != 2 or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(f"FrozenPairs: pairs must be (p, 2) integers, got {tuple(index.shape)} of {index.dtype}")
        for column, side in enumerate(get_args(Side)):
            positions, n = index[:, column], len(self.embeddings(side))
            if len(positions) and not (int(positions.min()) >= 0 and int(positions.max()) < n):
                raise ValueError(
                    f"FrozenPairs: pairs name {side} {int(positions.min())} .. {int(positions.max())},"
                    f" but there are {n}"
                )
            if (hidden := self.hidden(side)) is not None:
                check_rows(hidden, f"{side}_hidden", n=n)

    @property
    def d(self) -> int:
        """Number of dimensions of the embeddings."""
        return self.images.shape[1]

    def at_least(self, n_pairs: int, who: str) -> Self:
        """Refuse too few pairs."""
        if len(self.pairs) < n_pairs:
            raise ValueError(f"{who}: needs at least {n_pairs} pairs to fit, got {len(self.pairs)}")
        return self


class PosthocMethod(ABC):
    """A method that adds an uncertainty to a frozen model, without a change of its ranking.

    The attributes say what it looks at. Embeddings were checked by :class:`FrozenPairs` or FrozenSplit.
    """

    name: ClassVar[str]  # its key in METHODS
    summary: ClassVar[str]  # its formula or idea in one line, with the unit of its uncertainty
    per_item: ClassVar[bool] = False  # whether :meth:`embed` gives a Gaussian for each item
    needs_gallery: ClassVar[bool] = False  # whether :meth:`uncertainty` looks at the gallery
    needs_hidden: ClassVar[bool] = False  # whether it needs the inputs of the projection layer (``hidden``)
    own_probability: ClassVar[bool] = False  # whether sigmoid(-uncertainty) is its probability of a right first hit
    sides: ClassVar[tuple[Side, ...]] = get_args(Side)  # modalities that have an uncertainty

    @classmethod
    @abstractmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0) -> Self:
        """Fit the method; a subclass has options of its own, all with defaults."""

    @abstractmethod
    def uncertainty(self, side: Side, x: Tensor, gallery: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """The uncertainty of every query, which must not depend on the other queries.

        x (q, d) queries, gallery (m, d), hidden (q, P) -> (q,).
        """

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """The Gaussian of every item, for methods with ``per_item``. x (n, d), hidden (n, P)."""
        raise NotImplementedError(self.name)

    def tensors(self) -> list[Tensor]:
        """Everything that was fitted."""
        return []


# ---------------------------------------------------------------- checks and helpers of the methods
def check_rows(x: Tensor, what: str, *, n: int | None = None, d: int | None = None) -> None:
    """Refuse anything but a finite floating point matrix. x (n, d)."""
    wanted = f"({'n' if n is None else n}, {'d' if d is None else d})"
    if x.ndim != 2 or x.shape != (x.shape[0] if n is None else n, x.shape[1] if d is None else d):
        raise ValueError(f"FrozenPairs: {what} must be {wanted}, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"FrozenPairs: {what} must be floating point, got {x.dtype}")
    infinite = ~torch.isfinite(x).all(1)
    if infinite.any():
        row = int(infinite.nonzero()[0])
        raise ValueError(f"FrozenPairs: row {row} of {what} holds NaN or infinity; leave such items out")


def check_embeddings(x: Tensor, what: str, *, d: int | None = None) -> None:
    """Refuse embeddings without a direction, and what :func:`check_rows` refuses. x (n, d)."""
    check_rows(x, what, d=d)
    zero = (x == 0).all(1)
    if zero.any():
        row = int(zero.nonzero()[0])
        raise ValueError(f"FrozenPairs: row {row} of {what} is zero and has no cosine; leave it out")


def unit(x: Tensor) -> Tensor:
    """Embeddings scaled to unit length. x (n, d) -> (n, d)."""
    return functional.normalize(x.to(accumulation_dtype(x.dtype)), dim=-1, eps=0.0)
