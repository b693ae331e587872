"""Base of all losses: options, result, interface, blocks of pairs and the checks of inputs.

The module has no formula of a single loss, but the information bottleneck, which several losses use.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sfumato.arrays import Array, as_tensor
from sfumato.distances import get_distance
from sfumato.distances.distance import Distance, check_embedding
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.losses.tiles import MatchingLogits, canonical, dense_labels, label_rows, transposed

MAX_PAIRS = 2**22
"""Pairs whose distances, logits and labels a loss holds in memory at a time: about 200 MB in float32."""

FREE_SCALE = "learn the scale itself, as the released code; by its logarithm, 5 learns five times as fast"
"""Description of the option free_scale of the losses that have it."""

_T = TypeVar("_T")


_BOUNDS = {"gt": ("above", operator.gt), "ge": ("at least", operator.ge)}


def option(default: _T, description: str, *, gt: float | None = None, ge: float | None = None) -> _T:
    """A field of a :class:`LossOptions` class, with its default, its description and its range."""
    bounds = {name: bound for name, bound in (("gt", gt), ("ge", ge)) if bound is not None}
    return field(default=default, metadata={"description": description, **bounds})


@dataclass(frozen=True)
class LossOptions:
    """Base of the options of a loss: a frozen dataclass that the function, the module and the recipe share.

    Every field of a subclass is an :func:`option`. Values are checked against their bounds and choices.

    Attributes:
        distance: name of the distance by which images and texts are compared.

    Raises:
        ValueError: a value is out of its range, not finite, or not one of its choices.
    """

    distance: str = option("csd", "name of the distance; any differentiable one")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            value, who = getattr(self, item.name), f"{type(self).__name__}: {item.name}"
            if get_origin(hints[item.name]) is Literal and value not in get_args(hints[item.name]):
                raise ValueError(f"{who} must be one of {', '.join(get_args(hints[item.name]))}, got {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{who} must be finite, got {value}")
            for bound, (word, holds) in _BOUNDS.items():
                if bound in item.metadata and not holds(value, item.metadata[bound]):
                    raise ValueError(f"{who} must be {word} {item.metadata[bound]}, got {value}")


@dataclass(frozen=True)
class LossOutput:
    """A loss with its terms and statistics."""

    total: Tensor  # () the number to minimise
    terms: dict[str, Tensor]  # name -> () weighted term; they sum to total
    stats: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PairBlock:
    """A block of a batch's pairs: some images with all texts, and some texts with all images.

    The blocks of several processes, or blocks that fit into memory, sum to the batch. Every loss is a sum over images
    (rows) and over texts (columns), so that no loss needs all n * m pairs at once.
    """

    image: GaussianEmbedding
    text: GaussianEmbedding
    images: GaussianEmbedding
    texts: GaussianEmbedding
    match_i2t: Tensor  # (r, m) labels in [0, 1], dense or coalesced
    match_t2i: Tensor  # (c, n) labels in [0, 1], rows are texts; dense or coalesced
    first_image: int = 0
    first_text: int = 0
    max_pairs: int = MAX_PAIRS  # largest number of pairs that a loss that works in tiles holds in memory at a time

    @classmethod
    def whole(cls, image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, who: str) -> "PairBlock":
        """Make one block of a batch, with checked labels. image (n, d), text (m, d), match (n, m)."""
        match = check_match(image, text, match, who)
        return cls(image, text, image, text, match, transposed(match))

    @property
    def is_whole(self) -> bool:
        """Whether it has all pairs of the batch."""
        return self.image is self.images and self.text is self.texts

    def with_dense_labels(self) -> "PairBlock":
        """The same block with dense labels."""
        if not self.match_i2t.is_sparse:
            return self
        return replace(self, match_i2t=dense_labels(self.match_i2t), match_t2i=dense_labels(self.match_t2i))

    def rectangles(self) -> Iterator[tuple[GaussianEmbedding, GaussianEmbedding, Tensor, tuple[int, ...]]]:
        """The pairs of the block as images with texts: one rectangle for a whole batch, otherwise two."""
        if self.is_whole:
            yield self.image, self.text, self.match_i2t, (0, 1)
            return
        yield self.image, self.texts, self.match_i2t, (0,)
        yield self.images, self.text, transposed(self.match_t2i), (1,)

    def n_positives(self) -> Tensor:
        """Number of matching pairs of this block's images with all texts. Returns (1,)."""
        return (self.match_i2t >= 0.5).sum().double().unsqueeze(0)

    def distances(self, distance: Distance) -> tuple[Tensor, Tensor]:
        """Distances of this block's images to all texts, and of its texts to all images. Returns (r, m)."""
        i2t = distance.matrix(self.image, self.texts)
        return i2t, i2t.T if self.is_whole else distance.matrix(self.images, self.text).T

    def split(self, max_pairs: int) -> Iterator["PairBlock"]:
        """Smaller blocks that add up to this one."""
        pairs = max(self.match_i2t.numel(), self.match_t2i.numel(), 1)
        parts = min(math.ceil(pairs / max_pairs), max(self.image.n, self.text.n, 1))
        if parts == 1:
            yield self
            return
        for k in range(parts):
            rows = slice(k * self.image.n // parts, (k + 1) * self.image.n // parts)
            columns = slice(k * self.text.n // parts, (k + 1) * self.text.n // parts)
            yield replace(
                self, image=self.image[rows], text=self.text[columns], match_i2t=label_rows(self.match_i2t, rows),
                match_t2i=label_rows(self.match_t2i, columns), first_image=self.first_image + rows.start,
                first_text=self.first_text + columns.start,
            )  # fmt: skip


class MatchLoss(nn.Module, ABC):
    """The protocol of a loss of a batch of images and texts with its matrix of labels.

    A loss is a class derived from this one, with the class of its options. It takes only these, holds learnable logits
    if they have a logit_scale, and provides :meth:`counts` and :meth:`part`: the loss of a batch is the sum of the
    parts of its blocks. A loss whose counts do not simply add up also provides :meth:`combine`, one with a random
    generator :meth:`advance`.

    Raises:
        TypeError: the options are those of another loss.
    """

    Options: ClassVar[type[LossOptions]]  # its fields are the keys of the recipe's section ``[loss]``
    tiled: ClassVar[bool] = False  # whether :meth:`part` sums in tiles where the distance has vectors
    needs_whole: ClassVar[bool] = False  # whether :meth:`part` takes a whole batch alone, on every process

    def __init__(self, options: LossOptions | None = None) -> None:
        super().__init__()
        self.options = self.Options() if options is None else options
        if type(self.options) is not self.Options:
            raise TypeError(f"{type(self).__name__}: needs {self.Options.__name__}, got {type(self.options).__name__}")
        self.distance: Distance = get_distance(self.options.distance)
        given = vars(self.options)
        if "logit_scale" in given:
            free, largest = given.get("free_scale", False), given.get("largest_scale") or math.inf
            self.logits = MatchingLogits(given["logit_scale"], given.get("logit_bias", 0.0), free=free, largest=largest)

    def forward(
        self, image: GaussianEmbedding, text: GaussianEmbedding, match: Tensor, *, epoch: int | None = None
    ) -> LossOutput:
        """The loss of a batch. image (n, d), text (m, d), match (n, m)."""
        return loss_of_block(self, PairBlock.whole(image, text, match, type(self).__name__), epoch=epoch)

    @property
    def in_tiles(self) -> bool:
        """Whether :meth:`part` bounds its memory by block.max_pairs, for blocks of any size and sparse labels."""
        return self.tiled and self.distance.lift is not None

    def advance(self) -> None:
        """Advance to the next training step, after an update of the parameters, on all processes.

        Learnt logits are kept within their limits. A loss with random samples then uses new samples.
        """
        for module in self.modules():
            if isinstance(module, MatchingLogits):
                module.constrain()

    def match_logits(self) -> tuple[float, float] | None:
        """The logits that the loss has learnt, as a function of :attr:`distance`. Returns (logit_scale, logit_bias)."""
        logits = getattr(self, "logits", None)
        return None if logits is None else (logits.logit_scale.item(), logits.logit_bias.item())

    @abstractmethod
    def counts(self, block: PairBlock) -> Tensor:
        """The divisors of the loss. Returns (k,)."""

    def combine(self, counts: Tensor) -> Tensor:
        """The divisors of several blocks together. counts (b, k) -> (k,)."""
        return counts.sum(0)

    @abstractmethod
    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        """The contribution of a block to the batch's loss."""


LossFunction = Callable[[GaussianEmbedding, GaussianEmbedding, Tensor, Any], Tensor | Mapping[str, Tensor] | LossOutput]
"""A loss as a plain function: (images (n, d), texts (m, d), match (n, m), options) -> the terms, which sum to it."""


class FunctionLoss(MatchLoss):
    """A plain function as a loss: it sees a whole batch, on every process; learnt logits come as its options."""

    function: ClassVar[LossFunction]
    needs_whole = True

    def counts(self, block: PairBlock) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def part(self, block: PairBlock, counts: Tensor, *, epoch: int | None = None) -> LossOutput:
        options = copy(self.options)
        if "logit_scale" in vars(options):
            for name in ("logit_scale", "logit_bias"):
                object.__setattr__(options, name, getattr(self.logits, name))
        found = type(self).function(block.image, block.text, block.match_i2t.to(block.image.dtype), options)
        if isinstance(found, LossOutput):
            return found
        terms = dict(found) if isinstance(found, Mapping) else {"loss": found}
        if not terms:
            raise TypeError(f"{type(self).__name__}: the loss has returned no term")
        for name, term in terms.items():
            if not isinstance(term, Tensor) or term.ndim or not term.is_floating_point():
                came = f"{tuple(term.shape)} {term.dtype}" if isinstance(term, Tensor) else type(term).__name__
                raise TypeError(f"{type(self).__name__}: term {name!r} is {came}; expected a scalar tensor")
        return sum_of_terms(terms)


def loss_of_block(
    loss: MatchLoss,
    block: PairBlock,
    *,
    epoch: int | None = None,
    max_pairs: int = MAX_PAIRS,
    gather: Callable[[Tensor], Tensor] = lambda counts: counts.unsqueeze(0),
) -> LossOutput:
    """The contribution of a block to the batch's loss, in parts that the backward pass recomputes. gather (k,)."""
    if loss.in_tiles:
        block = replace(block, max_pairs=max_pairs)
        return loss.part(block, loss.combine(gather(loss.counts(block))), epoch=epoch)

    def part(small: PairBlock, counts: Tensor) -> LossOutput:
        return loss.part(small.with_dense_labels(), counts, epoch=epoch)

    blocks = [block] if loss.needs_whole else list(block.split(max_pairs))
    own = loss.combine(torch.stack([loss.counts(small.with_dense_labels()) for small in blocks]))
    counts = loss.combine(gather(own))
    if len(blocks) == 1:
        return part(block, counts)
    outputs = [checkpoint(part, small, counts, use_reentrant=False, preserve_rng_state=False) for small in blocks]
    return LossOutput(
        torch.stack([output.total for output in outputs]).sum(),
        {name: torch.stack([output.terms[name] for output in outputs]).sum() for name in outputs[0].terms},
        {name: torch.stack([output.stats[name] for output in outputs]).sum(0) for name in outputs[0].stats},
    )


def sum_of_terms(terms: dict[str, Tensor], stats: dict[str, Tensor] | None = None) -> LossOutput:
    """A loss whose total is the sum of its terms."""
    return LossOutput(torch.stack(list(terms.values())).sum(), terms, stats or {})


def whole_batch(
    options: LossOptions, image: GaussianEmbedding, text: GaussianEmbedding, match: Array, who: str
) -> tuple[Tensor, Tensor]:
    """((n, m) distances, (n, m) dense labels) of a whole batch, for the formulas that open each loss."""
    label = dense_labels(check_match(image, text, match, who))
    distance: Tensor = get_distance(options.distance).matrix(image, text)
    return distance, label.to(distance.dtype)


def or_start(given: Tensor | float | None, start: float) -> Tensor | float:
    """A number of the match logits, or where it starts if it is not given."""
    return start if given is None else given


def check_match(image: GaussianEmbedding, text: GaussianEmbedding, match: Array, who: str) -> Tensor:
    """Check the labels of a batch. image (n, d), text (m, d), match (n, m)."""
    check_embedding(image, who, "image")
    check_embedding(text, who, "text")
    match = as_tensor(match, "match", who)
    if match.shape != (image.n, text.n):
        raise ValueError(f"{who}: match must have shape (images, texts) = {(image.n, text.n)}, got {(*match.shape,)}")
    if image.n == 0 or text.n == 0:
        raise ValueError(f"{who}: got an empty batch of {image.n} images and {text.n} texts")
    match = canonical(match)
    values = match.values() if match.is_sparse else match
    low, high = values.aminmax() if values.numel() else (0, 1)
    if not (low >= 0 and high <= 1):
        found = f"match must lie in [0, 1], got values from {low:.4g} to {high:.4g}"
        raise ValueError(f"{who}: {found}; labels of -1 and 1 become (match + 1) / 2")
    return match.to(device=image.device)


def vib_loss(x: GaussianEmbedding) -> Tensor:
    r"""KL divergence to the standard normal, averaged over embeddings and dimensions.

        vib = -1/2 mean(1 + log_var - mean^2 - exp(log_var))

    The divergence KL(x || N(0, I)) sums over d; this divides it by d, as the published code does.

    Paper: Chun 2024, section 2.3 (Oh et al., "Modeling uncertainty with hedged instance embedding", 2019).

    x (n, d).
    """
    return vib_sums(x).mean() / x.d


def vib_sums(x: GaussianEmbedding) -> Tensor:
    """KL divergence of each embedding to the standard normal, summed over its dimensions. x (n, d) -> (n,)."""
    dtype = accumulation_dtype(x.dtype)
    mean, log_var = x.mean.to(dtype), x.log_var.to(dtype)
    return (mean.square() + log_var.expm1() - log_var).sum(-1) / 2


def vib_of_block(block: PairBlock) -> Tensor:
    """The contribution of a block to the sum of :func:`vib_loss` of the batch's images and texts."""
    image = vib_sums(block.image).sum() / (block.images.n * block.images.d)
    return image + vib_sums(block.text).sum() / (block.texts.n * block.texts.d)
