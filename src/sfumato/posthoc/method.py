"""What a frozen model says of held-in pairs, and the interface of every method that adds an uncertainty to it.

The module knows shapes, checks and the state of a method; it has no formula of a method.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.gaussian import GaussianEmbedding, accumulation_dtype

Side = Literal["image", "text"]
"""The modality of an item."""


class TwoSides:
    """What a frozen model gives for images and texts, by side.

    Attributes:
        images: (n, d) raw embeddings.
        texts: (m, d) raw embeddings.
        image_hidden, text_hidden: (n, P), (m, P') inputs of the projection layers; None where they are not known.
    """

    images: Tensor
    texts: Tensor
    image_hidden: Tensor | None
    text_hidden: Tensor | None

    def embeddings(self, side: Side) -> Tensor:
        """The embeddings of one side.

        Args:
            side: "image" or "text".

        Returns:
            (n, d) embeddings.

        Raises:
            ValueError: there is no such side.
        """
        check_side(side)
        return self.images if side == "image" else self.texts

    def hidden(self, side: Side) -> Tensor | None:
        """The inputs of one side's projection layer.

        Args:
            side: "image" or "text".

        Returns:
            (n, P) features, or None.
        """
        return self.image_hidden if side == "image" else self.text_hidden


@dataclass(frozen=True, eq=False)
class FrozenPairs(TwoSides):
    """Embeddings of a frozen two-tower model for pairs that a method is fitted on.

    Only the first three are needed by every method. The hidden features, the inputs of the two projection layers, are
    needed by the Laplace method, together with the matrices of the layers.

    Attributes:
        images: (n, d) image embeddings as the model gives them, normalised or not.
        texts: (m, d) text embeddings, likewise.
        pairs: (p, 2) integers, rows (position of an image, position of a text). An item may occur in several pairs.
        logit_scale: factor of the cosine in the model's logit, the number itself and not its logarithm (100 for CLIP).
        logit_bias: constant of the model's logit (SigLIP); None for a model without one (CLIP).
        image_hidden, text_hidden: (n, P), (m, P') inputs of the projection layers; P may differ between the sides.
        image_projection, text_projection: (d, P), (d, P') matrices of the projection layers.
        image_projection_bias, text_projection_bias: (d,) biases of the projection layers, where they have one.

    Raises:
        ValueError: a shape does not fit, a value is not finite, an embedding is zero, or a pair names no item.

    Example:
        >>> pairs = FrozenPairs(torch.eye(3), 2 * torch.eye(3), torch.arange(3).repeat(2, 1).T)
        >>> pairs.d, len(pairs.pairs)
        (3, 3)
    """

    images: Tensor
    texts: Tensor
    pairs: Tensor
    logit_scale: float | None = None
    logit_bias: float | None = None
    image_hidden: Tensor | None = None
    text_hidden: Tensor | None = None
    image_projection: Tensor | None = None
    text_projection: Tensor | None = None
    image_projection_bias: Tensor | None = None
    text_projection_bias: Tensor | None = None

    def __post_init__(self) -> None:
        who = "FrozenPairs"
        check_embeddings(self.images, who, "images")
        check_embeddings(self.texts, who, "texts", d=self.images.shape[1])
        index = self.pairs
        if index.ndim != 2 or index.shape[1] != 2 or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(f"{who}: pairs must be (p, 2) integers, got {tuple(index.shape)} of {index.dtype}")
        for column, side in enumerate(get_args(Side)):
            positions, n = index[:, column], len(self.embeddings(side))
            if len(positions) and not (int(positions.min()) >= 0 and int(positions.max()) < n):
                raise ValueError(
                    f"{who}: pairs name {side} {int(positions.min())} .. {int(positions.max())}, but there are {n}"
                )
            self._check_hidden(side, n)
        if self.logit_scale is not None and not self.logit_scale > 0:
            raise ValueError(f"{who}: logit_scale must be positive, got {self.logit_scale}; give exp(log scale)")

    def _check_hidden(self, side: Side, n: int) -> None:
        hidden, matrix, bias = self.hidden(side), self.projection(side), self.projection_bias(side)
        if hidden is not None:
            check_rows(hidden, "FrozenPairs", f"{side}_hidden", n=n)
        width = None if hidden is None else hidden.shape[1]
        if matrix is not None and (matrix.ndim != 2 or matrix.shape != (self.d, width or matrix.shape[1])):
            raise ValueError(
                f"FrozenPairs: {side}_projection must be (d, P) = ({self.d}, {width or 'P'}), got {tuple(matrix.shape)}"
            )
        if bias is not None and bias.shape != (self.d,):
            raise ValueError(f"FrozenPairs: {side}_projection_bias must be ({self.d},), got {tuple(bias.shape)}")

    @property
    def d(self) -> int:
        """Number of dimensions of the embeddings."""
        return self.images.shape[1]

    def projection(self, side: Side) -> Tensor | None:
        """The matrix of one side's projection layer.

        Args:
            side: "image" or "text".

        Returns:
            (d, P) matrix, or None.
        """
        return self.image_projection if side == "image" else self.text_projection

    def projection_bias(self, side: Side) -> Tensor | None:
        """The bias of one side's projection layer.

        Args:
            side: "image" or "text".

        Returns:
            (d,) bias, or None.
        """
        return self.image_projection_bias if side == "image" else self.text_projection_bias

    def at_least(self, n_pairs: int, who: str) -> Self:
        """Refuse too few pairs.

        Args:
            n_pairs: smallest number of pairs.
            who: name of the method, for the message.

        Returns:
            The pairs.

        Raises:
            ValueError: there are fewer.
        """
        if len(self.pairs) < n_pairs:
            raise ValueError(f"{who}: needs at least {n_pairs} pairs to fit, got {len(self.pairs)}")
        return self


class PosthocMethod(ABC):
    """A method that adds an uncertainty to a frozen model, without a change of its ranking unless the method says so.

    :meth:`fit` makes one from pairs; :meth:`state` and :meth:`from_state` store it and build it again.

    Attributes:
        name: its key in METHODS.
        summary: its formula or idea in one line, with the unit of its uncertainty.
        per_item: whether :meth:`embed` gives a Gaussian for each item.
        needs_gallery: whether :meth:`uncertainty` looks at the gallery.
        needs_hidden: whether it needs the inputs of the projection layer (``hidden``).
        sides: modalities that have an uncertainty.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    per_item: ClassVar[bool] = False
    needs_gallery: ClassVar[bool] = False
    needs_hidden: ClassVar[bool] = False
    sides: ClassVar[tuple[Side, ...]] = ("image", "text")

    @classmethod
    @abstractmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0) -> Self:
        """Fit the method; a subclass has options of its own, all with defaults.

        Args:
            pairs: what the frozen model says of the held-in pairs.
            seed: of all random choices.

        Returns:
            The fitted method.
        """

    def embed(self, side: Side, x: Tensor, *, hidden: Tensor | None = None) -> GaussianEmbedding:
        """The Gaussian of every item.

        Args:
            side: "image" or "text".
            x: (n, d) raw embeddings of the frozen model.
            hidden: (n, P) inputs of the projection layer; only for a method with ``needs_hidden``.

        Returns:
            n Gaussians; the documentation of the method says their means and the unit of their variances.

        Raises:
            ValueError: the method has no distribution of an item (``per_item`` is False), or the input does not fit.
        """
        raise ValueError(
            f"{self.name}: has no distribution of an item, only uncertainty(); methods with per_item have one"
        )

    @abstractmethod
    def uncertainty(
        self, side: Side, queries: Tensor, gallery: Tensor | None = None, *, hidden: Tensor | None = None
    ) -> Tensor:
        """The uncertainty of every query.

        Args:
            side: modality of the queries, "image" or "text".
            queries: (q, d) raw embeddings of the frozen model.
            gallery: (m, d) raw embeddings of the other modality; only for a method with ``needs_gallery``.
            hidden: (q, P) inputs of the queries' projection layer; only for a method with ``needs_hidden``.

        Returns:
            (q,) numbers, larger is less certain.

        Raises:
            ValueError: the input does not fit, or what the method needs is missing.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything that was fitted.

        Returns:
            Tensors by name, for a safetensors file and :meth:`from_state`.
        """

    @classmethod
    @abstractmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """Build the method again.

        Args:
            state: of :meth:`state`.

        Returns:
            The same method.

        Raises:
            ValueError: a tensor is missing.
        """


# ---------------------------------------------------------------- checks and helpers of the methods
def check_side(side: str) -> None:
    """Refuse an unknown modality.

    Args:
        side: "image" or "text".

    Raises:
        ValueError: it is neither.
    """
    if side not in get_args(Side):
        raise ValueError(f"unknown side {side!r}; known: {', '.join(get_args(Side))}")


def check_rows(x: Tensor, who: str, what: str, *, n: int | None = None, d: int | None = None) -> None:
    """Refuse anything but a finite floating point matrix.

    Args:
        x: (n, d) values.
        who: name of the caller, for the message.
        what: name of the argument, for the message.
        n: number of rows; any if None.
        d: number of columns; any if None.

    Raises:
        ValueError: another shape, an integer matrix, NaN or infinity.
    """
    wanted = f"({'n' if n is None else n}, {'d' if d is None else d})"
    if x.ndim != 2 or x.shape != (x.shape[0] if n is None else n, x.shape[1] if d is None else d):
        raise ValueError(f"{who}: {what} must be {wanted}, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{who}: {what} must be floating point, got {x.dtype}")
    finite = torch.isfinite(x).all(1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(f"{who}: row {row} of {what} holds NaN or infinity; leave such items out")


def check_embeddings(x: Tensor, who: str, what: str, *, d: int | None = None) -> None:
    """Refuse embeddings without a direction, and what :func:`check_rows` refuses.

    Args:
        x: (n, d) embeddings.
        who: name of the caller, for the message.
        what: name of the argument, for the message.
        d: number of dimensions of the fit; any if None.

    Raises:
        ValueError: another shape, NaN, infinity or a zero row.
    """
    check_rows(x, who, what, d=d)
    zero = (x == 0).all(1)
    if zero.any():
        raise ValueError(f"{who}: row {int(zero.nonzero()[0])} of {what} is zero and has no cosine; leave it out")


def unit(x: Tensor) -> Tensor:
    """Embeddings scaled to unit length.

    Args:
        x: (n, d) embeddings, not zero.

    Returns:
        (n, d) unit vectors, float32 or better.
    """
    return functional.normalize(x.to(accumulation_dtype(x.dtype)), dim=-1, eps=0.0)


def point_variance(x: Tensor, var: Tensor) -> GaussianEmbedding:
    """Gaussians about the unit embeddings, so that the means rank exactly as the frozen model does.

    Args:
        x: (n, d) raw embeddings.
        var: (n, d) variances in squared units of the unit embeddings.

    Returns:
        Gaussians in the dtype of the variances.
    """
    return GaussianEmbedding(unit(x).to(var.dtype), var.log())


def pack_options(options: Mapping[str, Any]) -> Tensor:
    """Options as a tensor, for :meth:`PosthocMethod.state`.

    Args:
        options: JSON values by name.

    Returns:
        (b,) uint8, UTF-8 bytes of JSON.
    """
    return torch.frombuffer(bytearray(json.dumps(dict(options), sort_keys=True).encode()), dtype=torch.uint8)


def unpack_options(state: Mapping[str, Tensor], who: str) -> dict[str, Any]:
    """The options in a state.

    Args:
        state: with the tensor "options" of :func:`pack_options`.
        who: name of the method, for the message.

    Returns:
        The options by name.

    Raises:
        ValueError: they are missing or damaged.
    """
    try:
        found = json.loads(taken(state, "options", who).cpu().numpy().tobytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{who}: the options in the state are damaged; fit the method again") from error
    return dict(found)


def taken(state: Mapping[str, Tensor], key: str, who: str) -> Tensor:
    """A tensor of a state.

    Args:
        state: tensors by name.
        key: name of the tensor.
        who: name of the method, for the message.

    Returns:
        The tensor.

    Raises:
        ValueError: it is missing.
    """
    if key not in state:
        raise ValueError(f"{who}: the state has no {key!r}; it has {', '.join(sorted(state)) or 'nothing'}")
    return state[key]
