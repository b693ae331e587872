"""What the referee of post-hoc methods sees of a model: raw embeddings of its splits, and the last linear layers.

The module knows no method and no measure.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from papers.posthoc import FrozenPairs
from papers.posthoc.method import TwoSides
from papers.uncertainty.corruption import CorruptedInputs, corrupted_inputs, not_corrupted
from sfumato.data.images import FileImage
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import Item, Store
from sfumato.encoders.heads import AveragePool, GaussianHead, TokenFeatures
from sfumato.errors import UserError
from sfumato.evaluation.protocols import Query
from sfumato.evaluation.trust import resampled_together
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import DIRECTION_OF, OTHER_SIDE, Side
from sfumato.metrics.relevance import Relevance
from sfumato.models.build import Tower
from sfumato.models.embed import PreparedSplit, load_split
from sfumato.models.model import Model


@dataclass(frozen=True, eq=False)
class FrozenSplit(TwoSides):
    """A split, embedded by a frozen model."""

    images: Tensor  # (n, d) raw embeddings
    texts: Tensor  # (m, d) raw embeddings
    pairs: np.ndarray  # (p, 2) int64, the matches, rows (position of an image, position of a text)
    groups: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    image_hidden: Tensor | None = None
    text_hidden: Tensor | None = None
    image_ids: tuple[str, ...] = ()  # n distinct ids, or none
    text_ids: tuple[str, ...] = ()  # m distinct ids, or none

    def __post_init__(self) -> None:
        FrozenPairs(self.images, self.texts, torch.from_numpy(self.pairs))
        for side in get_args(Side):
            ids, n = self.ids(side), len(self.embeddings(side))
            if ids and not len(ids) == len(set(ids)) == n:
                raise ValueError(
                    f"FrozenSplit: {side}_ids has {len(ids)} ids, {len(set(ids))} of them distinct, for {n} {side}s;"
                    " give one distinct id for each, or none"
                )
        if not len(self.groups):
            object.__setattr__(self, "groups", np.arange(len(self.images)))

    def ids(self, side: Side) -> tuple[str, ...]:
        """The ids of one side as the data name them; none where the split was made without."""
        return self.image_ids if side == "image" else self.text_ids

    def points(self, side: Side) -> GaussianEmbedding:
        """The unit embeddings as points: their squared distance is 2 - 2 cosine. Returns (n, d)."""
        return GaussianEmbedding.point(torch.nn.functional.normalize(self.embeddings(side).float(), dim=1))

    def relevance(self, side: Side) -> Relevance:
        """The matches of the queries of a side."""
        of_images = Relevance.from_pairs(
            self.pairs[:, 0], self.pairs[:, 1], n_queries=len(self.images), n_gallery=len(self.texts)
        )
        return of_images if side == "image" else of_images.transpose()

    def query(self, side: Side) -> Query:
        """The queries of a side in the whole other side, as points."""
        return Query(DIRECTION_OF[side], self.points(side), self.points(OTHER_SIDE[side]), self.relevance(side))

    def resampled_together(self, side: Side) -> np.ndarray | None:
        """The groups of queries that a bootstrap takes together."""
        return resampled_together(self.relevance("image"), self.groups, side == "text")

    def select_images(self, index: np.ndarray) -> "FrozenSplit":
        """Some of the images, and the texts that match one of them. index (k,)."""
        kept = self.pairs[np.isin(self.pairs[:, 0], index)]
        texts = np.unique(kept[:, 1])
        pairs = np.stack([np.searchsorted(index, kept[:, 0]), np.searchsorted(texts, kept[:, 1])], axis=1)
        inputs = (self.image_hidden, index), (self.text_hidden, texts)
        own, other = (None if x is None else x[torch.from_numpy(i)] for x, i in inputs)
        images, chosen = self.images[torch.from_numpy(index)], self.texts[torch.from_numpy(texts)]
        ids = _taken(self.image_ids, index), _taken(self.text_ids, texts)
        return FrozenSplit(images, chosen, pairs, self.groups[index], own, other, *ids)

    def with_queries(self, side: Side, index: np.ndarray, x: Tensor, hidden: Tensor | None = None) -> "FrozenSplit":
        """Other embeddings of some queries, with the whole other side as gallery.

        index (k,), x (k, d), hidden (k, P).
        """
        column = get_args(Side).index(side)
        pairs = self.pairs[np.isin(self.pairs[:, column], index)].copy()
        pairs[:, column] = np.searchsorted(index, pairs[:, column])
        if side == "image":
            ids, groups = _taken(self.image_ids, index), self.groups[index]
            return replace(self, images=x, image_hidden=hidden, image_ids=ids, pairs=pairs, groups=groups)
        return replace(self, texts=x, text_hidden=hidden, text_ids=_taken(self.text_ids, index), pairs=pairs)

    def galleries(self, n_images: int, *, seed: int = 0) -> list["FrozenSplit"]:
        """The split dealt at random into parts of about equal size."""
        n = len(self.images)
        n_parts = max(1, round(n / n_images))
        if n_parts == 1:
            return [self]
        order = np.random.default_rng(seed).permutation(n)
        return [self.select_images(np.sort(part)) for part in np.array_split(order, n_parts)]

    @cached_property
    def data(self) -> PairData:
        """The pairs alone; its images and texts are numbers that nothing reads."""
        ids = [tuple(map(str, range(len(x)))) for x in (self.images, self.texts)]
        sources = tuple(FileImage(Path(name)) for name in ids[0])
        return PairData(ids[0], sources, ids[1], ids[1], ("caption",) * len(ids[1]), self.pairs, self.groups)


def _taken(ids: tuple[str, ...], index: np.ndarray) -> tuple[str, ...]:
    return tuple(ids[i] for i in index) if ids else ()


@dataclass(frozen=True, eq=False)
class FrozenCorruption:
    """Some queries of a split, embedded again from inputs that are corrupted more and more."""

    name: str  # of the corruption
    side: Side  # of the queries
    strengths: tuple[float, ...]  # ascending from 0, the clean inputs
    splits: tuple[FrozenSplit, ...]

    @classmethod
    def of(
        cls,
        split: FrozenSplit,
        side: Side,
        corrupted: CorruptedInputs,
        embed: Callable[[Sequence[Any]], tuple[Tensor, Tensor | None]],
    ) -> "FrozenCorruption":
        """Embed corrupted queries."""
        rows, hidden = torch.from_numpy(corrupted.index), split.hidden(side)
        clean = split.embeddings(side)[rows], None if hidden is None else hidden[rows]
        steps = [clean, *(embed(inputs) for inputs in corrupted.inputs())]
        splits = tuple(split.with_queries(side, corrupted.index, *step) for step in steps)
        return cls(corrupted.name, side, (0.0, *corrupted.strengths), splits)


@dataclass(frozen=True, eq=False)
class FrozenModel:
    """A frozen two-tower model on its data."""

    name: str  # of the model, for files and tables
    train: FrozenSplit  # what methods are fitted on
    val: FrozenSplit  # what probabilities are fitted on
    tests: Mapping[str, FrozenSplit]  # what is measured, by the name of the split
    projections: Mapping[Side, tuple[Tensor, Tensor]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader of the figures has to know
    corruptions: tuple[FrozenCorruption, ...] = ()  # corrupted queries of a test split

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all embeddings and pairs: figures of other embeddings are not those of this model."""
        found = hashlib.sha256()
        corrupted = {
            f"{c.side} {c.name} {strength}": split
            for c in self.corruptions
            for strength, split in zip(c.strengths, c.splits, strict=True)
        }
        for name, split in {"train": self.train, "val": self.val, **self.tests, **corrupted}.items():
            found.update(name.encode())
            for f in fields(split):
                value = getattr(split, f.name)
                if isinstance(value, tuple):  # No figure depends on ids.
                    continue
                array = value.contiguous().numpy() if isinstance(value, Tensor) else value
                found.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    def training_pairs(self, logit_scale: float | None = None) -> FrozenPairs:
        """What post-hoc methods are fitted on."""
        train, index = self.train, torch.from_numpy(self.train.pairs)
        hidden = train.image_hidden, train.text_hidden
        return FrozenPairs(train.images, train.texts, index, logit_scale, *hidden, self.projections)


def freeze(
    retrieval_model: Model, data: DataConfig, tests: tuple[str, ...], *, name: str, n_corrupted: int = 0, seed: int = 0
) -> FrozenModel:
    """The embeddings of a model that searches by the cosine of its means, as an outsider would see them."""
    _check_cosine(retrieval_model)
    if {"train", "val"} & set(tests):
        raise UserError(f"methods are fitted on train and val; measure another split than {', '.join(tests)}")
    towers: tuple[Any, Any] = (retrieval_model.model.image, retrieval_model.model.text)
    prepared = {split: load_split(retrieval_model.model, data, split) for split in ("train", "val", *tests)}
    image, text = map(last_layer, towers)
    projections: dict[Side, tuple[Tensor, Tensor]] = {}
    if image is not None and text is not None:
        projections = {"image": image, "text": text}
    splits = {split: _frozen(towers, found, projections) for split, found in prepared.items()}
    for split, found in splits.items():
        if not projections and not (_unit_length(found.images) and _unit_length(found.texts)):
            raise UserError(
                f"the means of split {split} are not of unit length, so the model does not search by their cosine;"
                " the referee compares methods for models that do"
            )
    variances = any(isinstance(t.head, GaussianHead) and t.head.log_var is not None for t in towers)
    notes = ["its variances are left out: methods see the means"] if variances else []
    corruptions: list[FrozenCorruption] = []
    for side, tower in zip(get_args(Side), towers, strict=True):
        if n_corrupted and (reason := not_corrupted(retrieval_model.model, side)):
            notes.append(reason)
        elif n_corrupted:
            corruptions += _corrupted(
                tower, side, splits[tests[0]], prepared[tests[0]].data, projections.get(side), n_corrupted, seed
            )
    tested = {t: splits[t] for t in tests}
    return FrozenModel(name, splits["train"], splits["val"], tested, projections, tuple(notes), tuple(corruptions))


def _corrupted(
    tower: Tower, side: Side, split: FrozenSplit, data: PairData, layer: tuple[Tensor, Tensor] | None, n: int, seed: int
) -> list[FrozenCorruption]:
    """Some queries of a side in every corruption."""

    def embed(inputs: Sequence[str | bytes]) -> tuple[Tensor, Tensor | None]:
        store, _ = tower.processor.read([_constant(value) for value in inputs])
        return _raw(tower, store, layer)

    usable = split.relevance(side).counts > 0
    found = corrupted_inputs(side, data.images if side == "image" else data.texts, usable, n, seed)
    return [FrozenCorruption.of(split, side, corrupted, embed) for corrupted in found]


def _constant(value: bytes | str) -> Item:
    return lambda: value


def _check_cosine(retrieval_model: Model) -> None:
    distance = get_distance(retrieval_model.distance)
    if distance.sampled or distance.embeddings > 1 or distance.lift is None:
        raise UserError(
            f"the model searches by {retrieval_model.distance}, and not by the cosine of one mean an item; the referee"
            " compares methods for frozen models that do (distances squared_l2, csd and wasserstein2)"
        )


def _unit_length(x: Tensor) -> bool:
    return bool((x.norm(dim=1) - 1).abs().max() < 1e-3) if len(x) else True


def last_layer(tower: Tower) -> tuple[Tensor, Tensor] | None:
    """The last linear layer of a tower: its mean is matrix @ inputs + bias, scaled to unit length.

    A hidden network beside a linear map is one layer of the two inputs side by side.
    """
    head = tower.head
    if not isinstance(head, GaussianHead) or head.offset is not None or head.local is not None or not head.normalize:
        return None
    branch: Any = head.mean
    if not isinstance(getattr(branch, "pool", None), AveragePool) or branch.mlp is not None:
        return None
    layers = [branch.linear, *([] if head.hidden is None else [head.hidden[-1]])]
    matrix = torch.cat([layer.weight for layer in layers], dim=1)
    bias = torch.stack([layer.bias for layer in layers]).sum(0)
    return matrix.detach().float().cpu(), bias.detach().float().cpu()


@torch.no_grad()
def layer_inputs(tower: Tower, store: Store) -> Tensor:
    """The inputs of :func:`last_layer`. Returns (n, P)."""
    found: list[Tensor] = []
    head = tower.head

    def keep(_: torch.nn.Module, given: tuple[TokenFeatures]) -> None:
        pooled = AveragePool()(given[0].mean, given[0].mask)
        hidden = [] if head.hidden is None else [head.hidden[:-1](pooled)]
        found.append(torch.cat([pooled, *hidden], dim=1).float().cpu())

    handle = head.register_forward_pre_hook(keep)
    try:
        tower.embed(store)
    finally:
        handle.remove()
    return torch.cat(found)


def _frozen(
    towers: tuple[Tower, Tower], split: PreparedSplit, projections: Mapping[Side, tuple[Tensor, Tensor]]
) -> FrozenSplit:
    """The raw embeddings: before the scaling to unit length where the last layers are known."""
    (image, image_hidden), (text, text_hidden) = (
        _raw(tower, store, projections.get(side))
        for side, tower, store in zip(get_args(Side), towers, (split.images, split.texts), strict=True)
    )
    data = split.data
    return FrozenSplit(image, text, data.pairs, data.groups, image_hidden, text_hidden, data.image_ids, data.text_ids)


def _raw(tower: Tower, store: Store, layer: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """((n, d) raw embeddings, (n, P) inputs of the last layer) of a side; None where the layer is not known."""
    if layer is None:
        return tower.embed(store).mean.float().cpu(), None
    hidden, (matrix, bias) = layer_inputs(tower, store), layer
    return hidden @ matrix.T + bias, hidden
