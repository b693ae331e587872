"""Runs the studies on a model and a split of data, which is embedded once for all of them.

The modules of the studies' names define what a study measures.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, get_args

import numpy as np
import torch

from papers.studies import usual
from papers.studies.zeroshot import ZeroShotOptions, study_zeroshot
from papers.uncertainty.corruption import corrupted_queries, follow_corruption, not_corrupted
from papers.uncertainty.estimators import ESTIMATORS
from sfumato.data.images import MemoryImage, thumbnail
from sfumato.data.pairs import PairData
from sfumato.data.sources import DataConfig
from sfumato.errors import UserError, counted, progress_bar, say
from sfumato.evaluation.estimators import Estimator, Matching, usable_estimators
from sfumato.evaluation.protocols import EmbeddedSplit, evaluate_retrieval
from sfumato.evaluation.trust import resampled_together
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import DIRECTION_OF, Side
from sfumato.metrics.relevance import Relevance
from sfumato.models.embed import PreparedSplit, embed_split, load_split
from sfumato.models.model import Model, model_digest

FORMAT = "sfumato-analysis-1"
"""Format of every file of a study."""

USUAL = ("corruption", "sets", "words", "map")
"""Names of the studies of any model and data."""

NAMES = (*USUAL, "zeroshot")
"""Names of all studies."""

LEVEL = 0.95
"""Coverage of all intervals."""

SHOWN_PAIRS = 4
"""Number of pairs of images that are shown; the figures use all pairs."""

LEAST_PAIRS = 3
"""Least number of pairs for figures."""

AT_CHANCE = (
    "the model does not rank these pairs better than chance, so nothing here says what its uncertainty measures; train"
    " it further, or check that images and texts belong together"
)
"""Note on a model from which no conclusion can be drawn."""

_TOGETHER = 16
"""Number of pairs whose images are in memory at once."""

_LABEL_LENGTH = 120
"""Longest label of an item, in characters."""


@dataclass(frozen=True)
class AnalysisOptions:
    """Sizes and choices of the studies."""

    uncertainty: str = "total_variance"  # name in ESTIMATORS, for corruption and words; sets and map use variances
    n_corrupted: int = 200  # images, and texts, that are corrupted in each way
    n_pairs: int = 100  # pairs of images
    n_bins: int = 10  # bins of uncertainty
    top_words: int = 12  # words per bin
    corpus: str = "bin"  # of the words' weights, see :func:`~papers.studies.usual.words_by_uncertainty`
    n_mapped: int = 200  # largest number of images on the map, and of texts
    method: str = "pca"  # of the map, or "tsne"
    n_resamples: int = 1000  # bootstrap resamples of the intervals
    seed: int = 0  # of all random choices
    zeroshot: ZeroShotOptions = field(default_factory=ZeroShotOptions)

    def __post_init__(self) -> None:
        if self.uncertainty not in (names := usable_estimators()):
            raise ValueError(f"--uncertainty {self.uncertainty}: unknown; known: {', '.join(names)}")
        for option, value, known in (("corpus", self.corpus, usual.Corpus), ("method", self.method, usual.Method)):
            if value not in get_args(known):
                raise ValueError(f"--{option} {value}: unknown; known: {', '.join(get_args(known))}")


@dataclass(frozen=True, eq=False)
class Analyses:
    """The results of the studies."""

    metadata: dict[str, Any]  # model, split, sizes and options
    studies: dict[str, dict[str, Any]]  # plain values by name of the study
    images: dict[str, bytes] = field(default_factory=dict)  # thumbnails that a study refers to, WebP files by name
    notes: tuple[str, ...] = ()  # omitted studies and items, with reasons

    def to_json(self, name: str | None = None) -> dict[str, Any]:
        """Convert to JSON values."""
        if name is None:
            return self.metadata | self.studies | {"notes": list(self.notes)}
        return self.metadata | {"study": name} | self.studies[name]


@dataclass(frozen=True, eq=False)
class _Split:
    """The data of a study."""

    retrieval_model: Model
    prepared: PreparedSplit
    relevance: Relevance
    options: AnalysisOptions
    notes: list[str] = field(default_factory=list)

    def impossible(self, study: str) -> str | None:
        """The reason why a study cannot be done on this data with any embeddings; None if it can."""
        options, data = self.options, self.data
        if study == "sets":
            if features := self.retrieval_model.model.image.processor.reads:
                return f"set algebra needs image files, but this model reads {features}"
            n_pairs = len(usual.choose_pairs(data.groups, options.n_pairs, options.seed))
            if n_pairs < LEAST_PAIRS:
                return (
                    f"{n_pairs} pairs of images are too few for set algebra, which needs {LEAST_PAIRS} pairs with three"
                    f" images each, got {len(data.images)} images"
                )
        if study == "words":
            sides = {"image": int((self.relevance.counts > 0).sum()), "text": len(data.texts)}
            for side, n in sides.items():
                if n < options.n_bins:
                    return (
                        f"{n} {side}s are too few for {options.n_bins} bins of uncertainty; ask for fewer with --bins"
                    )
        if study == "map":
            n = sum(min(options.n_mapped, len(some)) for some in (data.images, data.texts))
            if n < usual.LEAST_ITEMS:
                have = f"{counted(n, 'item')} {'is' if n == 1 else 'are'}"
                return f"{have} too few for a map, which needs {usual.LEAST_ITEMS}; --items is {options.n_mapped}"
        return None

    def sides(self) -> dict[Side, tuple[GaussianEmbedding, GaussianEmbedding, Relevance, Matching]]:
        """(queries, gallery, ground truth, matching) of images and texts as queries."""
        m = self.retrieval_model
        return {
            side: (q.queries, q.gallery, q.relevance, Matching(m.distance, m.logit_scale, m.logit_bias, q.direction))
            for side, direction in DIRECTION_OF.items()
            for q in [self.embedded.query(direction)]
        }

    def estimator(self) -> Estimator:
        """The chosen estimator, if it is defined for these embeddings."""
        chosen = ESTIMATORS[self.options.uncertainty]
        if self.points and (chosen.needs_variance or not chosen.needs_gallery):
            others = [e.name for e in usable_estimators().values() if e.needs_gallery and not e.needs_variance]
            raise UserError(
                f"this model's embeddings are points, without variances, so {chosen.name} is undefined;"
                f" choose an --uncertainty that looks at the gallery: {', '.join(others)}"
            )
        return chosen

    @property
    def data(self) -> PairData:
        """Ids, images and texts."""
        return self.prepared.data

    @cached_property
    def embedded(self) -> EmbeddedSplit:
        """Images (n, d), texts (m, d) and which of them match."""
        return EmbeddedSplit(*embed_split(self.retrieval_model.model, self.prepared), self.relevance)

    @cached_property
    def breadth(self) -> np.ndarray:
        """(m,) number of images that each text matches."""
        return np.bincount(self.relevance.indices, minlength=self.relevance.n_gallery)

    @property
    def points(self) -> bool:
        """Whether some embeddings have no variance."""
        return any(bool(torch.isneginf(e.log_var).any()) for e in (self.embedded.images, self.embedded.texts))

    def above_chance(self) -> bool:
        """Whether the model ranks the pairs of the split better than a random order."""
        e, distance = self.embedded, self.retrieval_model.distance
        return evaluate_retrieval(e.images, e.texts, e.relevance, distance=distance).above_chance


def known_studies(names: Sequence[str]) -> tuple[str, ...]:
    """Check names of studies."""
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"unknown study {unknown[0]!r}; known: {', '.join(NAMES)}")
    return tuple(dict.fromkeys(names))


def analyse_model(
    retrieval_model: Model,
    data: DataConfig | None,
    split: str,
    *,
    studies: Sequence[str] | None = None,
    options: AnalysisOptions | None = None,
    name: str = "",
) -> Analyses:
    """Run studies of any model on a split of any data."""
    options = options or AnalysisOptions()
    chosen = USUAL if studies is None else known_studies(studies)
    prepared = None if data is None else load_split(retrieval_model.model, data, split)
    metadata = {
        "format": FORMAT,
        "model": name,
        "weights": model_digest(retrieval_model.model),
        "split": split,
        "distance": retrieval_model.distance,
        "n_images": 0 if prepared is None else len(prepared.data.images),
        "n_texts": 0 if prepared is None else len(prepared.data.texts),
        "level": LEVEL,
        "options": asdict(options),
    }
    found: dict[str, dict[str, Any]] = {}
    if "zeroshot" in chosen:
        pairs, chosen = None if prepared is None else prepared.data, tuple(name for name in chosen if name in USUAL)
        found["zeroshot"] = study_zeroshot(
            retrieval_model, options.zeroshot, pairs, n_resamples=options.n_resamples, seed=options.seed
        )
    if prepared is None:
        return Analyses(metadata, found)
    scene = _Split(retrieval_model, prepared, prepared.data.relevance(), options)
    reasons = {study: reason for study in chosen if (reason := scene.impossible(study))}
    if reasons and studies is not None:
        raise UserError("; ".join(reasons.values()))
    if set(chosen) - set(reasons):
        metadata["above_chance"] = scene.above_chance()
        if not metadata["above_chance"]:
            scene.notes.append(AT_CHANCE)
    images: dict[str, bytes] = {}
    for study in chosen:
        try:
            if study in reasons:
                raise UserError(reasons[study])
            found[study], own = STUDIES[study](scene)
            images |= own
        except UserError as error:
            if studies is not None:
                raise
            scene.notes.append(f"{study} is left out: {error}")
    if not found:
        raise UserError("; ".join(scene.notes))
    for note in scene.notes:
        say(note)
    return Analyses(metadata, found, images, tuple(scene.notes))


def same_model_and_data(study: Mapping[str, Any] | None, metadata: Mapping[str, Any]) -> bool:
    """Whether a study has the same weights, distance, split and number of items; its options may differ."""
    same = ("format", "weights", "split", "distance", "n_images", "n_texts")
    return study is not None and all(study.get(key) == metadata[key] for key in same)


def _corruption(scene: _Split) -> tuple[dict[str, Any], dict[str, bytes]]:
    options, model, result = scene.options, scene.retrieval_model.model, dict[str, Any]()
    estimator = scene.estimator()
    for side, (queries, gallery, ground_truth, matching) in scene.sides().items():
        if reason := not_corrupted(model, side):
            scene.notes.append(reason)
            continue
        usable, groups = ground_truth.counts > 0, resampled_together(scene.relevance, scene.data.groups, side == "text")
        result[side] = {}
        for c in corrupted_queries(model, side, scene.data, usable, options.n_corrupted, options.seed):
            result[side][c.name] = follow_corruption(
                c, queries, gallery, ground_truth, matching, estimator,
                groups=groups, n_resamples=options.n_resamples, seed=options.seed,
            )  # fmt: skip
    return {"uncertainty": estimator.name, "sides": result}, {}


def _sets(scene: _Split) -> tuple[dict[str, Any], dict[str, bytes]]:
    if scene.points:
        raise UserError("this model's embeddings are points, but set algebra needs variances")
    options, data = scene.options, scene.data
    rows = usual.choose_pairs(data.groups, options.n_pairs, options.seed)
    names = (*usual.MADE, "other")
    parts: dict[str, list[GaussianEmbedding]] = {name: [] for name in names}
    with progress_bar("mixing and erasing images", len(rows)) as advance:
        for start in range(0, len(rows), _TOGETHER):
            few = rows[start : start + _TOGETHER]
            made = [
                usual.read_mixed_images(data.images, row, options.seed)
                | {"other": usual.square_image(data.images[row[2]].read_bytes())}
                for row in few.tolist()
            ]
            embedded = scene.retrieval_model.model.embed_images([one[name] for name in names for one in made])
            for k, name in enumerate(names):
                parts[name].append(embedded[k * len(few) : (k + 1) * len(few)])
            advance(len(few))
    made_of = {name: GaussianEmbedding.cat(es) for name, es in parts.items()}
    figures = usual.measure_sets(made_of, n_resamples=options.n_resamples, level=LEVEL, seed=options.seed)
    shown, pictures = [], {}
    for k, row in enumerate(rows[:SHOWN_PAIRS].tolist()):
        drawn = usual.draw_pair(made_of, k)
        for name, content in usual.read_mixed_images(data.images, row, options.seed).items():
            small = thumbnail(MemoryImage(name, content))
            if small is not None:
                pictures[f"sets-{k}-{name}.webp"] = small
        for item in drawn["items"]:
            item["picture"] = f"sets-{k}-{item['name']}.webp"
        ids, captions = [data.image_ids[i] for i in row[:2]], [_caption(scene, i) for i in row[:2]]
        shown.append(drawn | {"ids": ids, "captions": captions})
    return {
        "erased_share": usual.ERASED,
        **figures,
        "definitions": {"mixes": usual.FIGURES, "erased": usual.ERASED_FIGURES},
        "shown": shown,
    }, pictures


def _words(scene: _Split) -> tuple[dict[str, Any], dict[str, bytes]]:
    options, data = scene.options, scene.data
    estimator, result = scene.estimator(), {}
    for side, (queries, gallery, ground_truth, matching) in scene.sides().items():
        usable = np.flatnonzero(ground_truth.counts > 0) if side == "image" else np.arange(queries.n)
        uncertainty = estimator(queries, gallery, matching)[usable]
        if side == "text":
            captions: list[list[str]] = [[text] for text in data.texts]
        else:
            own = np.split(ground_truth.indices, ground_truth.indptr[1:-1])
            captions = [[data.texts[t] for t in own[i]] for i in usable]
        result[side] = usual.words_by_uncertainty(
            uncertainty, captions, n_bins=options.n_bins, top=options.top_words, corpus=options.corpus
        )
    return {"uncertainty": estimator.name, "corpus": options.corpus, "sides": result}, {}


def _map(scene: _Split) -> tuple[dict[str, Any], dict[str, bytes]]:
    options, data, e = scene.options, scene.data, scene.embedded
    if options.method == "tsne":
        say("placing images and texts by t-SNE: seconds for hundreds, a minute for thousands")
    drawn = usual.map_items(
        e.images, e.texts, e.relevance, n=options.n_mapped, method=options.method, seed=options.seed
    )
    for item in drawn["items"]:
        image, i = item["side"] == "image", item["index"]
        item["id"] = (data.image_ids if image else data.text_ids)[i]
        item["label"] = _caption(scene, i) if image else _label(data.texts[i])
    return drawn, {}


def _label(text: str) -> str:
    return textwrap.shorten(text, _LABEL_LENGTH, placeholder="…")


def _caption(scene: _Split, image: int) -> str:
    """The caption of an image that matches the fewest images (the first of ties); the image's id without a caption."""
    own = scene.relevance.indices[slice(*scene.relevance.indptr[image : image + 2])]
    if not len(own):
        return scene.data.image_ids[image]
    return _label(scene.data.texts[own[scene.breadth[own].argmin()]])


STUDIES: Mapping[str, Callable[[_Split], tuple[dict[str, Any], dict[str, bytes]]]] = {
    "corruption": _corruption,
    "sets": _sets,
    "words": _words,
    "map": _map,
}
"""The functions of the usual studies, by name."""
