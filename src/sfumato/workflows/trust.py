"""The uncertainty benchmark of a model on a split: it embeds the required items and writes the figures.

The benchmark uses no labels at test time for its estimates: the match logits are fitted on the validation split.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from sfumato.calibration.calibrator import Calibration
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.data.splits import WORDINGS, images_of_part
from sfumato.distances import get_distance
from sfumato.evaluation import trust
from sfumato.evaluation.estimators import Matching, usable_estimators
from sfumato.evaluation.hits import Fold, HitFigures, measure_hits, without_nearest
from sfumato.evaluation.protocols import EmbeddedSplit
from sfumato.gaussian import GaussianEmbedding, Sides
from sfumato.ids import DIRECTION_OF, Side
from sfumato.metrics.relevance import Relevance
from sfumato.models.calibrate import calibrate_split, embed_reference, queries_of
from sfumato.models.embed import embed_split, load_split
from sfumato.models.model import Model
from sfumato.models.run import Run

_SIDES: tuple[Side, ...] = ("text", "image")
"""Sides of the queries."""

_LEVEL = 0.95

_HIT_IMAGES, _HIT_PAIRS = 5_000, 50_000_000
"""Largest number of images, and of pairs with all texts, in which the probabilities of hits are measured."""


def trust_model(
    retrieval_model: Model, data: DataConfig, split: str, *, n_resamples: int = 1000, seed: int = 0
) -> trust.TrustReport:
    """Measure the quality of a model's uncertainties on a split of any data."""
    model = retrieval_model.model
    prepared = load_split(model, data, split)
    embedded = EmbeddedSplit(*embed_split(model, prepared), prepared.data.relevance())
    estimators = usable_estimators(embedded.images, embedded.texts)
    left_out = len(estimators) < len(usable_estimators())
    notes = ["estimators that need variances are left out: some embeddings are points"] if left_out else []
    many = trust.many_to_many(embedded.relevance)
    proxies = {} if many else _proxies(embedded.texts, prepared.data, embedded.relevance)
    logits = retrieval_model.distance, retrieval_model.logit_scale, retrieval_model.logit_bias
    directions: dict[str, trust.DirectionTrust] = {}
    for side in _SIDES:
        query = embedded.query(DIRECTION_OF[side])
        values, groups = proxies, trust.resampled_together(embedded.relevance, prepared.data.groups, side == "text")
        if side == "text" and groups is not None:  # A caption has the proxies of its image, if it has an image.
            lacking = np.full(embedded.texts.n, np.nan)
            values = {k: np.append(v, lacking)[groups] for k, v in proxies.items()}
        directions[query.direction] = trust.measure_trust(
            query.queries,
            query.gallery,
            query.relevance,
            Matching(*logits, query.direction),
            estimators=estimators, multiplicity=many, proxies=values, groups=groups,
            n_resamples=n_resamples, level=_LEVEL, seed=seed,
        )  # fmt: skip
    hits, unmeasured = _hits(retrieval_model, data, embedded, prepared.data, split, seed)
    return trust.TrustReport(
        split=split,
        distance=retrieval_model.distance,
        calibrated=retrieval_model.calibrated,
        n_images=embedded.images.n,
        n_texts=embedded.texts.n,
        n_resamples=n_resamples,
        level=_LEVEL,
        seed=seed,
        estimators=trust.described(estimators),
        directions=directions,
        notes=[*notes, *unmeasured],
        hits=hits,
    )


def _hits(
    retrieval_model: Model, data: DataConfig, split_embeddings: EmbeddedSplit, pairs: PairData, split: str, seed: int
) -> tuple[dict[str, list[HitFigures]], list[str]]:
    """The probabilities beside hits, by what they are computed from, and notes on them.

    Queries that the calibration was fitted on have the probabilities of a fit on the other half of them.
    """
    calibration = retrieval_model.calibration
    if split == WORDINGS and isinstance(retrieval_model, Run) and retrieval_model.training_calibration is not None:
        calibration = retrieval_model.training_calibration
    if calibration is None:
        return {}, ["the probabilities of hits are left out: the model has no calibration"]
    images, texts = split_embeddings.images, split_embeddings.texts
    n, m = images.n, texts.n
    some = np.random.default_rng([seed, 2]).permutation(n)
    chosen = np.sort(some[: min(_HIT_IMAGES, n, max(2, _HIT_PAIRS // m))])
    own = calibration.metadata.get("split") == split
    match = pairs.match(chosen, np.arange(m))
    beside = match.astype(bool).any(0) if own or len(chosen) < n else np.ones(m, bool)
    embedded = images[chosen].numpy(), texts[beside].numpy()
    name = retrieval_model.distance
    distance = get_distance(name).matrix(*embedded)
    match, notes = match[:, beside], list[str]()
    folds: Sequence[Fold] = [Fold(calibration, *(np.arange(size) for size in match.shape))]
    if own:
        reference = embed_reference(retrieval_model.model, data) if calibration.tensors() else None
        population = calibration.metadata.get("queries", "planted")
        fit = partial(calibrate_split, split=split, population=population, reference=reference)
        try:
            folds = cross_fitted(embedded, pairs.keep_images(chosen), name, fit, seed)
        except ValueError as error:
            return {}, [f"the probabilities of hits are left out: {error}"]
        notes.append(f"the calibration was fitted on {split}: each half has the probabilities of a fit on the other")
    alone = [replace(fold, calibration=without_nearest(fold.calibration)) for fold in folds]
    both = {"served": folds, "distance": alone}
    measured = {kind: measure_hits(own, distance, match, embedded=embedded, seed=seed) for kind, own in both.items()}
    if len(chosen) < n:
        notes.append(f"the probabilities of hits are those among {len(chosen)} random images")
    return measured, notes


def _proxies(texts: GaussianEmbedding, data: PairData, relevance: Relevance) -> dict[str, np.ndarray]:
    """Ambiguity of an image by its captions, for data with one image for each text."""
    worded = not data.text_rows or data.texts != data.text_ids
    words = {"caption_words": trust.caption_words(data.texts, relevance)} if worded else {}
    return {"caption_distance": trust.caption_distance(texts, relevance)} | words


def cross_fitted(sides: Sides, data: PairData, distance: str, fit: Callable[..., Calibration], seed: int) -> list[Fold]:
    """Calibrate on the queries of each half of the images of a split, in the gallery of all.

    Groups of images are not divided. A text with images in both halves is in neither. fit is :func:`calibrate_split`.
    """
    halves = [images_of_part(data, part, 2, seed=seed) for part in (0, 1)]
    queries = [queries_of(data, half) for half in halves]
    if not all(len(texts) for _, texts in queries):
        raise ValueError("the split cannot be halved: all texts of one half have images in the other too")
    fitted = (fit(sides, data, distance, of_images=half, seed=seed) for half in halves)
    return [Fold(calibration, *other) for calibration, other in zip(fitted, reversed(queries), strict=True)]
