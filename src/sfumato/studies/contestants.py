"""The sources of uncertainty that the referee compares: the post-hoc methods, and baselines, with one interface.

A contestant is fitted on a frozen model, sees no test label, and answers for the queries of one side of a split.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.conditional import N_NEAREST
from sfumato.direction import DIRECTION_OF, OTHER_SIDE, Side
from sfumato.distances import squared_l2_matrix
from sfumato.evaluation.estimators import ESTIMATORS, NEAREST, Matching, estimate_uncertainty
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
from sfumato.models.calibrate import calibrate_split
from sfumato.posthoc import METHODS, PosthocMethod
from sfumato.studies.frozen_model import FrozenModel, FrozenSplit

_BLOCK = 512


class Contestant(ABC):
    """A source of uncertainty, fitted on a frozen model."""

    summary: str  # what its uncertainty is, in one line
    sides: Sequence[Side] = get_args(Side)  # sides whose queries have one
    needs_gallery: bool = True  # whether it depends on the gallery; otherwise it cannot know that a match is absent
    n_bytes: int = 0  # size of what is stored of the fit

    @abstractmethod
    def uncertainty(self, split: FrozenSplit, side: Side) -> np.ndarray:
        """The uncertainty of all queries of a side, with the whole other side as gallery. Returns (q,)."""

    def without_matches(self, split: FrozenSplit, side: Side, rows: np.ndarray) -> np.ndarray:
        """The uncertainty of some queries whose true matches are taken out of the gallery. rows (k,) -> (k,)."""
        chosen: np.ndarray = self.uncertainty(split, side)[rows]
        return chosen

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

    def uncertainty(self, split: FrozenSplit, side: Side) -> np.ndarray:
        """See :meth:`Contestant.uncertainty`."""
        gallery = split.embeddings(OTHER_SIDE[side]) if self.needs_gallery else None
        hidden = split.hidden(side) if self.method.needs_hidden else None
        return _array(self.method.uncertainty(side, split.embeddings(side), gallery, hidden=hidden))

    def without_matches(self, split: FrozenSplit, side: Side, rows: np.ndarray) -> np.ndarray:
        """See :meth:`Contestant.without_matches`; a gallery for each query."""
        if not self.needs_gallery:
            return super().without_matches(split, side, rows)
        queries, gallery = split.embeddings(side), split.embeddings(OTHER_SIDE[side])
        relevance, found = split.relevance(side), []
        for row in rows:
            kept = torch.ones(len(gallery), dtype=torch.bool)
            kept[torch.from_numpy(relevance.indices[relevance.indptr[row] : relevance.indptr[row + 1]])] = False
            found.append(self.method.uncertainty(side, queries[row : row + 1], gallery[kept]))
        return _array(torch.cat(found))

    def gaussians(self, split: FrozenSplit, side: Side) -> GaussianEmbedding | None:
        """See :meth:`Contestant.gaussians`."""
        if not self.method.per_item:
            return None
        hidden = split.hidden(side) if self.method.needs_hidden else None
        return self.method.embed(side, split.embeddings(side), hidden=hidden)


class Constant(Contestant):
    """The same uncertainty for all: what a method has to beat."""

    summary = "0 for every query; its probability is the hit rate on validation"
    needs_gallery = False

    def uncertainty(self, split: FrozenSplit, side: Side) -> np.ndarray:
        """See :meth:`Contestant.uncertainty`."""
        return np.zeros(len(split.embeddings(side)))


class MatchEntropy(Contestant):
    """The entropy of the softmax of the match logits over the gallery."""

    summary = "entropy of the softmax of calibrated match logits over the gallery, in nats"

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration

    def uncertainty(self, split: FrozenSplit, side: Side) -> np.ndarray:
        """See :meth:`Contestant.uncertainty`."""
        return self._entropy(split, side, split.points(side), None)

    def without_matches(self, split: FrozenSplit, side: Side, rows: np.ndarray) -> np.ndarray:
        """See :meth:`Contestant.without_matches`."""
        chosen = split.points(side)[torch.from_numpy(rows)]
        return self._entropy(split, side, chosen, split.relevance(side).select_queries(rows))

    def _entropy(
        self, split: FrozenSplit, side: Side, queries: GaussianEmbedding, without: Relevance | None
    ) -> np.ndarray:
        logits = self.calibration.logit_scale, self.calibration.logit_bias
        matching = Matching("squared_l2", *logits, DIRECTION_OF[side])
        chosen = {"match_entropy": ESTIMATORS["match_entropy"]}
        gallery = split.points(OTHER_SIDE[side])
        return estimate_uncertainty(queries, gallery, matching, estimators=chosen, without=without)["match_entropy"]


class HitProbability(Contestant):
    """The probability that sfumato's searches show beside the first hit: given the nearest items of the query."""

    summary = "1 - probability of the first hit given the nearest items, as sfumato's searches show it"

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.n_bytes = sum(x.numel() * x.element_size() for x in calibration.tensors().values())

    def uncertainty(self, split: FrozenSplit, side: Side) -> np.ndarray:
        """See :meth:`Contestant.uncertainty`; minus the logit."""
        return self._logits(split, side, np.arange(len(split.embeddings(side))), remove=False)

    def without_matches(self, split: FrozenSplit, side: Side, rows: np.ndarray) -> np.ndarray:
        """See :meth:`Contestant.without_matches`."""
        return self._logits(split, side, rows, remove=True)

    def probability(self, uncertainty: np.ndarray) -> np.ndarray:
        """See :meth:`Contestant.probability`."""
        return _array(torch.sigmoid(-torch.from_numpy(uncertainty)))

    def _logits(self, split: FrozenSplit, side: Side, rows: np.ndarray, *, remove: bool) -> np.ndarray:
        direction = DIRECTION_OF[side]
        reference = self.calibration.of(direction).reference
        queries, gallery = split.points(side)[torch.from_numpy(rows)], split.points(OTHER_SIDE[side])
        matches = split.relevance(side).select_queries(rows)
        hub = None if reference is None else reference.hub(gallery)
        isolation = None if reference is None else reference.isolation(queries)
        found = []
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            distance = squared_l2_matrix(queries[block], gallery)
            if remove:
                own = matches.select_queries(np.arange(len(rows))[block])
                distance[torch.from_numpy(own.query_of_item), torch.from_numpy(own.indices)] = torch.inf
            nearest, place = distance.topk(min(N_NEAREST, gallery.n), dim=1, largest=False)
            seen = None
            if hub is not None and isolation is not None:
                seen = torch.stack([hub[place[:, 0]], isolation[block]], dim=1)
            logit = self.calibration.of(direction).hit_logit(
                nearest[:, :1], nearest, n_gallery=gallery.n, reference=seen
            )
            found.append(-logit[:, 0])
        return _array(torch.cat(found))


BASELINES = ("constant", "match_entropy", "sfumato", "sfumato_no_reference")
"""What the methods are compared with: see :class:`Constant`, :class:`MatchEntropy`, :class:`HitProbability`."""

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
        return Constant()
    if name == "match_entropy":
        return MatchEntropy(calibration)
    if name in ("sfumato", "sfumato_no_reference"):
        return HitProbability(pair_calibration(model, reference=name == "sfumato"))
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
