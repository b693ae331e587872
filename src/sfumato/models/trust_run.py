"""The uncertainty benchmark of a model on a split: it embeds the required items and writes the figures.

The benchmark uses no labels at test time for its estimates. The fitted parts, the match logits and the learnt
estimator, use only the validation split.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, TypeVar, get_args

import numpy as np
import torch

from sfumato.data.images import ImageSource
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.data.splits import WORDINGS
from sfumato.data.transforms import IMAGE_CORRUPTIONS, TEXT_CORRUPTIONS, ImageCorruption, TextCorruption
from sfumato.distances import get_distance
from sfumato.encoders.dual import DualEncoder
from sfumato.encoders.feature_rows import features_read
from sfumato.errors import UserError
from sfumato.evaluation.estimators import FailurePredictor, Matching, usable_estimators
from sfumato.evaluation.hits import Fold, HitFigures, measure_cross_fitted, without_nearest
from sfumato.evaluation.trust import (
    Corrupted,
    DirectionTrust,
    TrustReport,
    caption_distance,
    caption_words,
    described,
    measure_trust,
)
from sfumato.files import write_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.models.calibrate import embed_reference
from sfumato.models.cross_fitting import cross_fitted
from sfumato.models.embed import embed_split, load_split
from sfumato.models.model import Model
from sfumato.models.run import Run
from sfumato.progress import progress_bar
from sfumato.search.exact import rank_relevant

Input = TypeVar("Input", str, bytes)

Queries = Literal["text", "image", "both"]

DIRECTIONS: dict[str, tuple[str, ...]] = {"text": ("t2i",), "image": ("i2t",), "both": ("t2i", "i2t")}
"""Directions by what the queries are."""

_LEVEL = 0.95

_HIT_IMAGES, _HIT_PAIRS = 5_000, 50_000_000
"""Largest number of images, and of pairs with all texts, in which the probabilities of hits are measured."""


def trust_model(
    retrieval_model: Model,
    data: DataConfig,
    split: str,
    *,
    queries: str = "both",
    n_resamples: int = 1000,
    n_corrupted: int = 200,
    seed: int = 0,
) -> TrustReport:
    """Measure the quality of a model's uncertainties on a split of any data."""
    _check_options(queries, n_resamples, n_corrupted, seed)
    prepared = load_split(retrieval_model.model, data, split)
    images, texts = embed_split(retrieval_model.model, prepared)
    relevance = prepared.data.relevance()
    predictors, notes = _failure_predictors(retrieval_model, data, split, DIRECTIONS[queries], seed)
    estimators = usable_estimators(images, texts)
    if len(estimators) < len(usable_estimators()):
        notes.append("estimators that need variances are left out: some embeddings are points")
    model = retrieval_model.model
    notes += _not_corrupted(model, DIRECTIONS[queries]) if n_corrupted else []
    many = _many_to_many(relevance)
    proxies = {} if many else _proxies(texts, prepared.data, relevance)
    directions: dict[str, DirectionTrust] = {}
    for name in DIRECTIONS[queries]:
        of_text = name == "t2i"
        ground_truth = relevance.transpose() if of_text else relevance
        own = estimators | ({"predicted_miss": predictors[name].estimator()} if name in predictors else {})
        values, groups = proxies, resampled_together(relevance, prepared.data.groups, of_text)
        if of_text and groups is not None:  # A caption has the proxies of its image, if it has an image.
            values = {k: np.append(v, np.full(texts.n, np.nan))[groups] for k, v in proxies.items()}
        directions[name] = measure_trust(
            *((texts, images) if of_text else (images, texts)),
            ground_truth,
            _matching(retrieval_model, of_text),
            estimators=own,
            multiplicity=many,
            proxies=values,
            corrupted=_corrupted(model, prepared.data, ground_truth, of_text, n_corrupted, seed),
            groups=groups,
            n_resamples=n_resamples,
            level=_LEVEL,
            seed=seed,
        )
    hits, unmeasured = _hits(retrieval_model, data, images, texts, prepared.data, split, DIRECTIONS[queries], seed)
    return TrustReport(
        split=split,
        distance=retrieval_model.distance,
        calibrated=retrieval_model.calibrated,
        n_images=images.n,
        n_texts=texts.n,
        n_resamples=n_resamples,
        level=_LEVEL,
        seed=seed,
        estimators=described(
            estimators | {predictor.estimator().name: predictor.estimator() for predictor in predictors.values()}
        ),
        directions=directions,
        notes=[*notes, *unmeasured],
        hits=hits,
    )


def _hits(
    retrieval_model: Model,
    data: DataConfig,
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    pairs: PairData,
    split: str,
    directions: Sequence[str],
    seed: int,
) -> tuple[dict[str, list[HitFigures]], list[str]]:
    """The probabilities beside hits, by what they are computed from, and notes on them.

    Queries that the calibration was fitted on have the probabilities of a fit on the other half of them.
    """
    calibration = retrieval_model.calibration
    if split == WORDINGS and isinstance(retrieval_model, Run) and retrieval_model.training_calibration is not None:
        calibration = retrieval_model.training_calibration
    if calibration is None:
        return {}, ["the probabilities of hits are left out: the model has no calibration"]
    n, m = images.n, texts.n
    chosen = _chosen(np.arange(n), min(_HIT_IMAGES, n, max(2, _HIT_PAIRS // m)), seed)
    own = calibration.metadata.get("split") == split
    match = torch.from_numpy(pairs.match(chosen, np.arange(m)))
    beside = match.bool().any(0) if own or len(chosen) < n else torch.ones(m, dtype=torch.bool)
    embedded = _rows(images, chosen), texts[beside]
    distance = get_distance(retrieval_model.distance).matrix(*embedded).cpu()
    match, notes = match[:, beside], list[str]()
    folds: Sequence[Fold] = [Fold(calibration, torch.arange(len(match)), torch.arange(match.shape[1]))]
    if own:
        reference = embed_reference(retrieval_model.model, data) if calibration.tensors() else None
        population = calibration.metadata.get("queries", "planted")
        try:
            folds = cross_fitted(
                embedded,
                pairs.keep_images(chosen),
                retrieval_model.distance,
                split=split,
                population=population,
                reference=reference,
                seed=seed,
            )
        except ValueError as error:
            return {}, [f"the probabilities of hits are left out: {error}"]
        notes.append(f"the calibration was fitted on {split}: each half has the probabilities of a fit on the other")
    alone = [replace(fold, calibration=without_nearest(fold.calibration)) for fold in folds]
    measured = {
        name: measure_cross_fitted(some, distance, match, embedded=embedded, seed=seed)
        for name, some in (("served", folds), ("distance", alone))
    }
    figures = {name: [f for f in found if f.direction in directions] for name, found in measured.items()}
    if len(chosen) < n:
        notes.append(f"the probabilities of hits are those among {len(chosen)} random images")
    return figures, notes


def _check_options(queries: str, n_resamples: int, n_corrupted: int, seed: int) -> None:
    if queries not in get_args(Queries):
        raise ValueError(f"queries must be one of {', '.join(get_args(Queries))}, got {queries!r}")
    if n_resamples < 0 or n_corrupted < 0 or seed < 0:
        raise ValueError(
            f"bootstrap, n_corrupted and seed must not be negative, got {n_resamples}, {n_corrupted} and {seed}"
        )


def _proxies(texts: GaussianEmbedding, data: PairData, relevance: Relevance) -> dict[str, np.ndarray]:
    """Ambiguity of an image by its captions, for data with one image for each text."""
    worded = not data.text_rows or data.texts != data.text_ids
    words = {"caption_words": caption_words(data.texts, relevance)} if worded else {}
    return {"caption_distance": caption_distance(texts, relevance)} | words


def _not_corrupted(model: DualEncoder, directions: Sequence[str]) -> list[str]:
    """Notes on the sides without corrupted queries: features cannot be corrupted."""
    sides = {"i2t": ("images", model.image), "t2i": ("texts", model.text)}
    return [
        f"{name} are not corrupted: the model reads {features}, which cannot be corrupted"
        for direction, (name, tower) in sides.items()
        if direction in directions and (features := features_read(tower))
    ]


def _corrupted(
    model: DualEncoder, data: PairData, ground_truth: Relevance, of_text: bool, n: int, seed: int
) -> list[Corrupted]:
    """Corrupted queries; none of features."""
    if features_read(model.text if of_text else model.image):
        return []
    corrupt = corrupted_texts if of_text else corrupted_images
    return corrupt(model, data, ground_truth.counts > 0, n, seed)


def resampled_together(relevance: Relevance, groups: np.ndarray, of_text: bool) -> np.ndarray | None:
    """The groups of dependent queries, which a bootstrap samples together.

    relevance (n images, m texts), groups (n,).
    """
    if not of_text:
        return groups
    if _many_to_many(relevance):
        return None
    ground_truth = relevance.transpose()
    together = ground_truth.n_gallery + np.arange(ground_truth.n_queries)
    together[ground_truth.query_of_item] = ground_truth.indices
    return together


def _many_to_many(relevance: Relevance) -> bool:
    """Whether more than a tenth of the texts match several images; a few equal captions do not make data such."""
    return float((relevance.transpose().counts > 1).mean()) > 0.1


def trust_run(
    run: Run, split: str, *, queries: str = "both", n_resamples: int = 1000, n_corrupted: int = 200, seed: int = 0
) -> tuple[TrustReport, Path]:
    """Measure a run on its own data, and write the figures into its folder."""
    report = trust_model(
        run,
        run.recipe.data,
        split,
        queries=queries,
        n_resamples=n_resamples,
        n_corrupted=n_corrupted,
        seed=seed,
    )
    path = run.folder / f"trust-{split}.json"
    write_json(path, report.to_json())
    return report, path


def _matching(retrieval_model: Model, of_text: bool) -> Matching:
    return Matching(
        retrieval_model.distance,
        retrieval_model.logit_scale,
        retrieval_model.logit_bias,
        direction="t2i" if of_text else "i2t",
    )


def _failure_predictors(
    retrieval_model: Model, data: DataConfig, split: str, directions: Sequence[str], seed: int
) -> tuple[dict[str, FailurePredictor], list[str]]:
    """Failure predictors by direction, fitted on the validation split, and notes on those left out."""
    if split in ("val", WORDINGS):
        of_split = "the split that is measured" if split == "val" else f"whose images {split} has"
        return {}, [f"predicted_miss is left out: it is fitted on val, {of_split}"]
    try:
        prepared = load_split(retrieval_model.model, data, "val")
    except UserError as error:
        return {}, [f"predicted_miss is left out: {error}"]
    images, texts = embed_split(retrieval_model.model, prepared)
    relevance, predictors, notes = prepared.data.relevance(), {}, []
    for name in directions:
        of_text = name == "t2i"
        queries, gallery = (texts, images) if of_text else (images, texts)
        ground_truth: Relevance = relevance.transpose() if of_text else relevance
        ranks = rank_relevant(
            queries,
            gallery,
            ground_truth,
            get_distance(retrieval_model.distance).for_direction("t2i" if of_text else "i2t"),
        )
        hit = per_query_metrics(ranks, ground_truth)["recall@1"]
        known = np.flatnonzero(~np.isnan(hit))
        try:
            predictors[name] = FailurePredictor.fit(_rows(queries, known), 1 - hit[known], seed=seed)
        except ValueError as error:
            notes.append(f"predicted_miss is left out of {name}: {error}")
    return predictors, notes


def _rows(embeddings: GaussianEmbedding, index: np.ndarray) -> GaussianEmbedding:
    return embeddings[torch.from_numpy(index)]


def _chosen(usable: np.ndarray, n: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng([seed, 2]).permutation(usable)[:n])


@dataclass(frozen=True, eq=False)
class CorruptedInputs(Generic[Input]):
    """Some queries that are corrupted in one way."""

    name: str  # of the corruption
    index: np.ndarray  # (k,) positions of these queries among all
    strengths: tuple[float, ...]  # ascending, without 0
    apply: Callable[[int, float], Input]  # (position, strength) -> the corrupted query

    def inputs(self) -> Iterator[list[Input]]:
        """The corrupted queries."""
        for strength in self.strengths:
            yield [self.apply(int(i), strength) for i in self.index]


def corrupt_texts(texts: Sequence[str], usable: np.ndarray, n: int, seed: int) -> list[CorruptedInputs[str]]:
    """Corrupt some texts in every way that suits them. usable (m,)."""
    found = []
    for c in TEXT_CORRUPTIONS.values():
        suited = np.flatnonzero(usable & np.array([c.suits(t) for t in texts], bool))

        def apply(i: int, strength: float, c: TextCorruption = c) -> str:
            return c.apply(texts[i], strength, (seed, i))

        found.append(CorruptedInputs(c.name, _chosen(suited, n, seed), c.strengths, apply))
    return [c for c in found if len(c.index)]


def corrupt_images(
    images: Sequence[ImageSource], usable: np.ndarray, n: int, seed: int
) -> list[CorruptedInputs[bytes]]:
    """Corrupt some images in every way: see :func:`corrupt_texts`."""
    index, found = _chosen(np.flatnonzero(usable), n, seed), []
    for c in IMAGE_CORRUPTIONS.values():

        def apply(i: int, strength: float, c: ImageCorruption = c) -> bytes:
            return c.apply(images[i].read_bytes(), strength, (seed, i))

        found.append(CorruptedInputs(c.name, index, c.strengths, apply))
    return found if len(index) else []


def corrupted_texts(model: DualEncoder, data: PairData, usable: np.ndarray, n: int, seed: int) -> list[Corrupted]:
    """Embed some texts of a split again, corrupted in every way that suits them. usable (m,)."""
    return [
        Corrupted(c.name, c.index, c.strengths, tuple(model.embed_texts(inputs) for inputs in c.inputs()))
        for c in corrupt_texts(data.texts, usable, n, seed)
    ]


def corrupted_images(model: DualEncoder, data: PairData, usable: np.ndarray, n: int, seed: int) -> list[Corrupted]:
    """Embed some images of a split again, corrupted in every way: see :func:`corrupted_texts`."""
    kinds, result = corrupt_images(data.images, usable, n, seed), []
    with progress_bar("corrupting images", sum(len(c.index) * len(c.strengths) for c in kinds)) as go:
        for c in kinds:
            embedded = []
            for inputs in c.inputs():
                embedded.append(model.embed_images(inputs))
                go(len(c.index))
            result.append(Corrupted(c.name, c.index, c.strengths, tuple(embedded)))
    return result
