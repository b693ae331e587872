r"""Methods that remember the training items; nothing is trained.

With a unit query q, remembered unit items x of its own modality and y of the other one, unit gallery vectors g and the
logit scale s of the model:

    memory_distance    1 - q . x_(k), x_(k) the k-th nearest of the x
    memory_entropy     entropy of softmax_j(s q . y_j) over all y, in nats
    memory_contrast    -log softmax_j(s z . g_j) at the item that is nearest to q, for the proxy z of the query

The proxy is the unit vector of sum_i w_i v_i with w = softmax_i(s q . x_i) over the k nearest x, where v_i is the mean
of the y that match x_i. The classes say which published methods they follow, and in what they differ.
"""

from collections.abc import Mapping
from typing import Self, get_args

import torch
from torch import Tensor
from torch.nn import functional

from papers.posthoc.closed_forms import GalleryMethod, in_blocks
from papers.posthoc.method import FrozenPairs, PosthocMethod, unit
from sfumato.ids import OTHER_SIDE, Side

NEIGHBOURS = 10
"""The rank of the neighbour of :class:`MemoryDistance`."""

PROXIES = 15
"""Neighbours of which :class:`MemoryContrast` makes a proxy; a comment of the published code calls 15 the best."""


class MemoryMethod(PosthocMethod):
    """Base of the methods that compare a query with remembered items of one modality."""

    def __init__(self, items: Mapping[Side, Tensor]) -> None:
        self.items = dict(items)  # (n, d) unit embeddings

    def tensors(self) -> list[Tensor]:
        """See :meth:`PosthocMethod.tensors`."""
        return [*self.items.values()]


def remembered(pairs: FrozenPairs, who: str) -> dict[Side, Tensor]:
    """The unit embeddings of all items, by modality."""
    pairs.at_least(1, who)
    return {side: unit(pairs.embeddings(side)) for side in get_args(Side)}


def scale_of(pairs: FrozenPairs, who: str) -> float:
    """The logit scale of the model."""
    if pairs.logit_scale is None:
        raise ValueError(f"{who}: the pairs have no logit_scale, the factor of the cosine in the model's logits")
    return pairs.logit_scale


class MemoryDistance(MemoryMethod):
    """The distance of a query to the k-th nearest training item of its own modality, or to the farthest of fewer.

    It rises as the density of the training items falls. The negative log density as an uncertainty is that of REPVLM
    (Ju et al., 2026, arXiv 2601.21662), which learns the density by a flow on the sphere; the k-th neighbour in its
    place is that of Sun et al., "Out-of-distribution detection with deep nearest neighbors", ICML 2022.
    """

    name = "memory_distance"
    summary = "1 - cosine with the 10th nearest training item of the same modality, in [0, 2]"

    def __init__(self, items: Mapping[Side, Tensor], *, k: int = NEIGHBOURS) -> None:
        super().__init__(items)
        self.k = k

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0, k: int = NEIGHBOURS) -> Self:
        """Remember the items of both modalities."""
        return cls(remembered(pairs, cls.name), k=k)

    def uncertainty(self, side: Side, x: Tensor, gallery: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`."""
        memory = self.items[side]
        k = min(self.k, len(memory))
        return in_blocks(unit(x).to(memory), lambda q: 1 - (q @ memory.T).topk(k, dim=1).values[:, -1])


class MemoryEntropy(MemoryMethod):
    """The entropy of the model's own choice among all training items of the other modality.

    GeoFlowVLM (Nautiyal et al., 2026, arXiv 2605.13352) calls the entropy of a search given the query its conditional
    retrieval entropy, and learns the distribution by a flow. This one takes the softmax of the model's logits.
    """

    name = "memory_entropy"
    summary = "entropy of the softmax of the model's logits over all training items of the other modality, in nats"

    def __init__(self, items: Mapping[Side, Tensor], logit_scale: float) -> None:
        super().__init__(items)
        self.logit_scale = logit_scale

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0) -> Self:
        """Remember the items of both modalities."""
        return cls(remembered(pairs, cls.name), scale_of(pairs, cls.name))

    def uncertainty(self, side: Side, x: Tensor, gallery: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """See :meth:`PosthocMethod.uncertainty`."""
        memory = self.items[OTHER_SIDE[side]]

        def entropy(q: Tensor) -> Tensor:
            log_p = (self.logit_scale * q @ memory.T).log_softmax(1)
            return -(log_p.exp() * log_p).sum(1)

        return in_blocks(unit(x).to(memory), entropy)


class MemoryContrast(GalleryMethod):
    """How unlikely the first hit is to a proxy of the query, made of the matches of its nearest training items.

    It follows MA-PaPSP (Sarkar et al., "Leveraging data to say no", ICLR 2026, arXiv 2601.22570): averages of retrieved
    neighbours in place of an embedding, then a softmax over other candidates. Here the candidates are the gallery, both
    temperatures are the model's, and the memory is the training data. The paper has millions of other pairs, generates
    candidates for captions, and other weights.
    """

    name = "memory_contrast"
    summary = "-log softmax of the first hit in the gallery, by the matches of the 15 nearest training items, in nats"

    def __init__(
        self, items: Mapping[Side, Tensor], matches: Mapping[Side, Tensor], logit_scale: float, *, k: int = PROXIES
    ) -> None:
        self.items, self.matches = dict(items), dict(matches)  # (n, d) unit embeddings, and means of their matches
        self.logit_scale, self.k = logit_scale, k

    @classmethod
    def fit(cls, pairs: FrozenPairs, *, seed: int = 0, k: int = PROXIES) -> Self:
        """Remember the items of both modalities that have a match, and the means of their matches."""
        every, scale = remembered(pairs, cls.name), scale_of(pairs, cls.name)
        items: dict[Side, Tensor] = {}
        matches: dict[Side, Tensor] = {}
        columns = dict(zip(get_args(Side), pairs.pairs.T, strict=True))
        for side, own in columns.items():
            of_match = every[OTHER_SIDE[side]][columns[OTHER_SIDE[side]]]
            count = torch.bincount(own, minlength=len(every[side]))
            total = torch.zeros_like(every[side]).index_add(0, own, of_match.to(every[side].dtype))
            kept = count > 0
            items[side], matches[side] = every[side][kept], total[kept] / count[kept].unsqueeze(1)
        return cls(items, matches, scale, k=k)

    def of_block(self, side: Side, queries: Tensor, gallery: Tensor) -> Tensor:
        """See :meth:`GalleryMethod.of_block`."""
        items, matches = self.items[side].to(queries), self.matches[side].to(queries)
        cosine, near = (queries @ items.T).topk(min(self.k, len(items)), dim=1)
        weight = (self.logit_scale * cosine).softmax(1)
        proxy = functional.normalize((weight.unsqueeze(1) @ matches[near]).squeeze(1), dim=1)
        first = (queries @ gallery.T).argmax(1, keepdim=True)
        return -(self.logit_scale * proxy @ gallery.T).log_softmax(1).gather(1, first).squeeze(1)

    def tensors(self) -> list[Tensor]:
        """See :meth:`PosthocMethod.tensors`."""
        return [*self.items.values(), *self.matches.values()]
