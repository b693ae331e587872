"""The sources of uncertainty that the referee compares: the post-hoc methods, and baselines, with one interface.

A contestant is fitted on a frozen model, sees no test label, and answers for the queries of one side of a split.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from papers.posthoc import METHODS, PosthocMethod
from papers.posthoc.frozen_model import FrozenModel, FrozenSplit
from papers.uncertainty.estimators import MORE
from sfumato.arrays import Array, smallest
from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.logits import N_NEAREST
from sfumato.evaluation import estimators
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import DIRECTION_OF, OTHER_SIDE, Direction, Side
from sfumato.imports import HOW
from sfumato.models.calibrate import calibrate_split


def _nothing(*_: Any) -> None:
    return None


def _of_log_odds(u: np.ndarray) -> np.ndarray:
    """The probabilities whose log odds are -u."""
    return _array(torch.sigmoid(-torch.from_numpy(u)))


@dataclass(frozen=True, eq=False)
class Contestant:
    """A source of uncertainty, fitted on a frozen model."""

    summary: str  # what its uncertainty is, in one line
    uncertainty: Callable[[FrozenSplit, Side, np.ndarray | None], np.ndarray]  # see :func:`of_method`
    needs_gallery: bool  # whether it depends on the gallery; otherwise it cannot know that a match is absent
    sides: Sequence[Side] = get_args(Side)  # sides whose queries have one
    n_bytes: int = 0  # size of what is stored of the fit
    # The probability that the first hit is right from (q,) uncertainties, for a contestant with one of its own.
    probability: Callable[[np.ndarray], np.ndarray | None] = _nothing
    gaussians: Callable[[FrozenSplit, Side], GaussianEmbedding | None] = _nothing  # of every item of a side


def of_method(method: PosthocMethod) -> Contestant:
    """A post-hoc method of :data:`~papers.posthoc.METHODS`.

    Its uncertainty is of the (q,) queries of a side, with the whole other side as gallery; or of the queries at (k,)
    positions, each with a gallery of its own without its matches.
    """

    def hidden(split: FrozenSplit, side: Side) -> Tensor | None:
        return split.hidden(side) if method.needs_hidden else None

    def uncertainty(split: FrozenSplit, side: Side, absent: np.ndarray | None) -> np.ndarray:
        queries, gallery = split.embeddings(side), split.embeddings(OTHER_SIDE[side])
        if absent is None or not method.needs_gallery:
            seen = gallery if method.needs_gallery else None
            found = method.uncertainty(side, queries, seen, hidden=hidden(split, side))
            return _array(found if absent is None else found[torch.from_numpy(absent)])
        kept = torch.from_numpy(~split.relevance(side).select_queries(absent).to_dense())
        rows = zip(absent.tolist(), kept, strict=True)
        return _array(torch.cat([method.uncertainty(side, queries[i : i + 1], gallery[own]) for i, own in rows]))

    def gaussians(split: FrozenSplit, side: Side) -> GaussianEmbedding:
        return method.embed(side, split.embeddings(side), hidden=hidden(split, side))

    n_bytes = sum(x.numel() * x.element_size() for x in method.tensors())
    return Contestant(
        method.summary, uncertainty, method.needs_gallery, method.sides, n_bytes,
        probability=_of_log_odds if method.own_probability else _nothing,
        gaussians=gaussians if method.per_item else _nothing,
    )  # fmt: skip


def of_estimator(estimator: estimators.Estimator, calibration: Calibration, *, n_bytes: int = 0) -> Contestant:
    """An estimator of sfumato on the unit embeddings, with the calibrated match logits."""
    name, chosen = estimator.name, {estimator.name: estimator}
    logits = calibration.logit_scale, calibration.logit_bias

    def uncertainty(split: FrozenSplit, side: Side, absent: np.ndarray | None) -> np.ndarray:
        queries, gallery, without = split.points(side), split.points(OTHER_SIDE[side]), None
        if absent is not None:
            queries, without = queries[torch.from_numpy(absent)], split.relevance(side).select_queries(absent)
        matching = estimators.Matching("squared_l2", *logits, DIRECTION_OF[side])
        return estimators.estimate_uncertainty(queries, gallery, matching, estimators=chosen, without=without)[name]

    probability = _of_log_odds if name == "sfumato" else _nothing  # What its searches show beside the first hit.
    return Contestant(estimator.formula, uncertainty, estimator.needs_gallery, n_bytes=n_bytes, probability=probability)


CONSTANT = estimators.Estimator(
    "constant", "0 for every query; its probability is the hit rate on validation", "both", "0",
    lambda block: torch.zeros(block.queries.n), needs_gallery=False,
)  # fmt: skip
"""The same uncertainty for all: what a method has to beat."""

MATCH_ENTROPY = replace(
    estimators.ESTIMATORS["match_entropy"],
    formula="entropy of the softmax of calibrated match logits over the gallery, in nats",
)


def first_hit_estimator(calibration: Calibration) -> estimators.Estimator:
    """Minus the logit of the probability that searches show beside the first hit: given the nearest items."""

    @lru_cache(maxsize=1)
    def hub(direction: Direction, gallery: GaussianEmbedding) -> np.ndarray | None:
        reference = calibration.of(direction).reference
        return None if reference is None else reference.hub(gallery)

    def of_block(block: estimators.Block) -> Array:
        own, seen = calibration.of(block.matching.direction), None
        nearest, place = smallest(block.distance, N_NEAREST)
        of_items = hub(block.matching.direction, block.gallery)
        if own.reference is not None and of_items is not None:
            seen = np.stack([of_items[place[:, 0]], own.reference.isolation(block.queries)], axis=1)
        return -own.hit_logit(nearest[:, :1], nearest, n_gallery=block.gallery.n, reference=seen)[:, 0]

    formula = "1 - probability of the first hit given the nearest items, as sfumato's searches show it"
    return estimators.Estimator("sfumato", formula, "both", "n m", of_block)


BASELINES = ("constant", "match_entropy", "sfumato", "sfumato_no_reference")
"""What the methods are compared with: see CONSTANT, MATCH_ENTROPY and :func:`first_hit_estimator`, the last with
and without reference queries of the training."""


def is_own(name: str) -> bool:
    """Whether it was registered from outside of the package: its code may have changed since the last call."""
    if method := METHODS.get(name):
        return not method.__module__.startswith(("sfumato.", "papers."))
    return name not in (*BASELINES, *estimators.BUILT_IN, *MORE)


def contestants() -> tuple[str, ...]:
    """The names of all that is compared: baselines, post-hoc methods, and registered estimators without texts."""
    own = (name for name in estimators.usable_estimators() if name not in METHODS and is_own(name))
    return (*BASELINES, *METHODS, *own)


def pair_calibration(model: FrozenModel, *, reference: bool) -> Calibration:
    """sfumato's calibration of the frozen cosine on the validation split."""
    embedded = model.val.points("image"), model.val.points("text")
    training = (model.train.points("image"), model.train.points("text")) if reference else None
    return calibrate_split(embedded, model.val.data, "squared_l2", split="val", reference=training)


def fit_contestant(
    name: str, model: FrozenModel, calibration: Calibration, *, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Contestant:
    """Fit a contestant."""
    if estimator := {"constant": CONSTANT, "match_entropy": MATCH_ENTROPY}.get(name):
        return of_estimator(estimator, calibration)
    if name in ("sfumato", "sfumato_no_reference"):
        own = pair_calibration(model, reference=name == "sfumato")
        return of_estimator(first_hit_estimator(own), own, n_bytes=sum(x.nbytes for x in own.tensors().values()))
    if name not in METHODS and name in contestants():
        return of_estimator(estimators.ESTIMATORS[name], calibration)
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(contestants())}; {HOW}")
    pairs = model.training_pairs(2 * calibration.logit_scale)
    return of_method(METHODS[name].fit(pairs, seed=seed, **(options or {})))


def answerable_without(split: FrozenSplit, side: Side) -> np.ndarray:
    """Queries with a match, whose gallery keeps enough items without their matches. Returns (k,)."""
    counts = split.relevance(side).counts
    return np.flatnonzero((counts > 0) & (len(split.embeddings(OTHER_SIDE[side])) - counts >= estimators.NEAREST))


def _array(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()
