"""The sources of uncertainty that the referee compares: the post-hoc methods, and baselines, with one interface.

A contestant is fitted on a frozen model, sees no test label, and answers for the queries of one side of a split.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.conditional import N_NEAREST
from sfumato.evaluation.estimators import ESTIMATORS, NEAREST, Block, Estimator, Matching, estimate_uncertainty
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import DIRECTION_OF, OTHER_SIDE, Direction, Side
from sfumato.models.calibrate import calibrate_split
from sfumato.posthoc import METHODS, PosthocMethod
from sfumato.studies.frozen_model import FrozenModel, FrozenSplit


class Contestant(ABC):
    """A source of uncertainty, fitted on a frozen model."""

    summary: str  # what its uncertainty is, in one line
    sides: Sequence[Side] = get_args(Side)  # sides whose queries have one
    needs_gallery: bool = True  # whether it depends on the gallery; otherwise it cannot know that a match is absent
    n_bytes: int = 0  # size of what is stored of the fit

    @abstractmethod
    def uncertainty(self, split: FrozenSplit, side: Side, absent: np.ndarray | None = None) -> np.ndarray:
        """The uncertainty of queries, with the whole other side as gallery. absent (k,) -> (q,)."""

    def probability(self, uncertainty: np.ndarray) -> np.ndarray | None:
        """The probability that the first hit is right, for a contestant with one of its own.

        uncertainty (q,) -> (q,).
        """
        return None

    def gaussians(self, split: FrozenSplit, side: Side) -> GaussianEmbedding | None:
        """The Gaussian of every item of a side."""
        return None


class PosthocContestant(Contestant):
    """A post-hoc method of :data:`~sfumato.posthoc.METHODS`."""

    def __init__(self, method: PosthocMethod) -> None:
        self.method = method
        self.summary, self.sides, self.needs_gallery = method.summary, method.sides, method.needs_gallery
        self.n_bytes = sum(x.numel() * x.element_size() for x in method.tensors())

    def uncertainty(self, split: FrozenSplit, side: Side, absent: np.ndarray | None = None) -> np.ndarray:
        """See :meth:`Contestant.uncertainty`; a gallery for each query without its matches."""
        queries, gallery = split.embeddings(side), split.embeddings(OTHER_SIDE[side])
        if absent is None or not self.needs_gallery:
            hidden = split.hidden(side) if self.method.needs_hidden else None
            found = self.method.uncertainty(side, queries, gallery if self.needs_gallery else None, hidden=hidden)
            return _array(found if absent is None else found[torch.from_numpy(absent)])
        kept, parts = torch.from_numpy(~split.relevance(side).select_queries(absent).to_dense()), []
        for row, own in zip(absent.tolist(), kept, strict=True):
            parts.append(self.method.uncertainty(side, queries[row : row + 1], gallery[own]))
        return _array(torch.cat(parts))

    def gaussians(self, split: FrozenSplit, side: Side) -> GaussianEmbedding | None:
        """See :meth:`Contestant.gaussians`."""
        if not self.method.per_item:
            return None
        hidden = split.hidden(side) if self.method.needs_hidden else None
        return self.method.embed(side, split.embeddings(side), hidden=hidden)


class EstimatorContestant(Contestant):
    """An estimator of sfumato on the unit embeddings, with the calibrated match logits."""

    def __init__(self, estimator: Estimator, calibration: Calibration, *, n_bytes: int = 0) -> None:
        self.estimator, self.n_bytes, self.is_logit = estimator, n_bytes, estimator.name == "sfumato"
        self.summary, self.needs_gallery = estimator.formula, estimator.needs_gallery
        self.logits = calibration.logit_scale, calibration.logit_bias

    def uncertainty(self, split: FrozenSplit, side: Side, absent: np.ndarray | None = None) -> np.ndarray:
        """See :meth:`Contestant.uncertainty`."""
        queries, without = split.points(side), None
        if absent is not None:
            queries, without = queries[torch.from_numpy(absent)], split.relevance(side).select_queries(absent)
        matching, name = Matching("squared_l2", *self.logits, DIRECTION_OF[side]), self.estimator.name
        gallery = split.points(OTHER_SIDE[side])
        return estimate_uncertainty(
            queries, gallery, matching, estimators={name: self.estimator}, without=without
        )[name]  # fmt: skip

    def probability(self, uncertainty: np.ndarray) -> np.ndarray | None:
        """See :meth:`Contestant.probability`: what sfumato's searches show beside the first hit."""
        return _array(torch.sigmoid(-torch.from_numpy(uncertainty))) if self.is_logit else None


CONSTANT = Estimator(
    "constant", "0 for every query; its probability is the hit rate on validation", "both", "0",
    lambda block: torch.zeros(block.queries.n), needs_gallery=False,
)  # fmt: skip
"""The same uncertainty for all: what a method has to beat."""

MATCH_ENTROPY = replace(
    ESTIMATORS["match_entropy"],
    formula="entropy of the softmax of calibrated match logits over the gallery, in nats",
)


def first_hit_estimator(calibration: Calibration) -> Estimator:
    """Minus the logit of the probability that searches show beside the first hit: given the nearest items."""

    @lru_cache(maxsize=1)
    def hub(direction: Direction, gallery: GaussianEmbedding) -> Tensor | None:
        reference = calibration.of(direction).reference
        return None if reference is None else reference.hub(gallery)

    def of_block(block: Block) -> Tensor:
        own, seen = calibration.of(block.matching.direction), None
        nearest, place = block.distance.topk(min(N_NEAREST, block.gallery.n), dim=1, largest=False)
        of_items = hub(block.matching.direction, block.gallery)
        if own.reference is not None and of_items is not None:
            seen = torch.stack([of_items[place[:, 0]], own.reference.isolation(block.queries)], dim=1)
        return -own.hit_logit(nearest[:, :1], nearest, n_gallery=block.gallery.n, reference=seen)[:, 0]

    formula = "1 - probability of the first hit given the nearest items, as sfumato's searches show it"
    return Estimator("sfumato", formula, "both", "n m", of_block)


BASELINES = ("constant", "match_entropy", "sfumato", "sfumato_no_reference")
"""What the methods are compared with: see CONSTANT, MATCH_ENTROPY and :func:`first_hit_estimator`, the last with
and without reference queries of the training."""

CONTESTANTS = (*BASELINES, *METHODS)
"""Everything that is compared."""


def pair_calibration(model: FrozenModel, *, reference: bool) -> Calibration:
    """sfumato's calibration of the frozen cosine on the validation split."""
    embedded = model.val.points("image"), model.val.points("text")
    training = (model.train.points("image"), model.train.points("text")) if reference else None
    return calibrate_split(embedded, model.val.data, "squared_l2", split="val", reference=training)


def fit_contestant(
    name: str, model: FrozenModel, calibration: Calibration, *, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Contestant:
    """Fit a contestant."""
    if name == "constant":
        return EstimatorContestant(CONSTANT, calibration)
    if name == "match_entropy":
        return EstimatorContestant(MATCH_ENTROPY, calibration)
    if name in ("sfumato", "sfumato_no_reference"):
        own = pair_calibration(model, reference=name == "sfumato")
        n_bytes = sum(x.numel() * x.element_size() for x in own.tensors().values())
        return EstimatorContestant(first_hit_estimator(own), own, n_bytes=n_bytes)
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(CONTESTANTS)}")
    pairs = model.training_pairs(2 * calibration.logit_scale)
    return PosthocContestant(METHODS[name].fit(pairs, seed=seed, **(options or {})))


def answerable_without(split: FrozenSplit, side: Side) -> np.ndarray:
    """Queries with a match, whose gallery keeps enough items without their matches. Returns (k,)."""
    counts = split.relevance(side).counts
    return np.flatnonzero((counts > 0) & (len(split.embeddings(OTHER_SIDE[side])) - counts >= NEAREST))


def _array(x: Tensor) -> np.ndarray:
    found: np.ndarray = x.detach().double().cpu().numpy()
    return found
