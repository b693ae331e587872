"""The studies on a model and a split of data: embeds what they ask for once, and lets each do its work.

What a study measures is in the module of its name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sfumato.analysis.corruption import corruption_curves
from sfumato.analysis.maps import map_items
from sfumato.analysis.sets import (
    ERASED,
    ERASED_FIGURES,
    FIGURES,
    MADE,
    PictureSets,
    choose_pairs,
    draw_pair,
    measure_sets,
    read_pictures,
    square_picture,
)
from sfumato.analysis.words import words_by_uncertainty
from sfumato.data.pairs import MemoryImage, PairData
from sfumato.encoders.regions import reads_regions
from sfumato.errors import UserError
from sfumato.evaluation.analyses import FORMAT
from sfumato.evaluation.drawing import clipped
from sfumato.evaluation.estimators import ESTIMATORS, Estimator, Matching
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.relevance import Relevance
from sfumato.progress import progress_bar, say
from sfumato.training.config import DataConfig
from sfumato.training.inference import Matcher
from sfumato.training.loop import embed_split, load_split
from sfumato.training.reporting import thumbnail, weights_digest
from sfumato.training.trust import corrupted_images, corrupted_texts, resampled_together

LEVEL = 0.95
"""Coverage of all intervals."""

SHOWN_PAIRS = 4
"""Pairs of pictures that are drawn; the figures are of all of them."""

LEAST_PAIRS = 3
"""Fewer pairs have no figures."""

_TOGETHER = 16
"""Pairs whose pictures are in memory at once."""

_WORDS_OF_AN_ITEM = 120


@dataclass(frozen=True)
class AnalysisOptions:
    """How large the studies are, and what they look at.

    Attributes:
        uncertainty: a name of ESTIMATORS, for corruption and words; sets and map are about variances.
        n_corrupted: items of either side that are corrupted in each way.
        n_pairs: pairs of pictures.
        n_bins: bins of uncertainty.
        top_words: words of each bin.
        corpus: of the words' weights, see :func:`~sfumato.analysis.words.words_by_uncertainty`.
        n_mapped: images on the map, and texts, at most.
        method: of the map, "pca" or "tsne".
        n_resamples: of the intervals.
        seed: of everything random.

    Raises:
        ValueError: a number is out of range, or there is no such uncertainty.
    """

    uncertainty: str = "total_variance"
    n_corrupted: int = 200
    n_pairs: int = 100
    n_bins: int = 10
    top_words: int = 12
    corpus: str = "bin"
    n_mapped: int = 200
    method: str = "pca"
    n_resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.uncertainty not in ESTIMATORS:
            raise ValueError(f"unknown uncertainty {self.uncertainty!r}; known: {', '.join(ESTIMATORS)}")
        for name in ("n_corrupted", "n_pairs", "n_bins", "top_words", "n_mapped"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_resamples < 0 or self.seed < 0:
            raise ValueError(f"n_resamples and seed must not be negative, got {self.n_resamples} and {self.seed}")


@dataclass(frozen=True, eq=False)
class Analyses:
    """What the studies found.

    Attributes:
        about: model, split, sizes and options.
        studies: by name, plain values.
        pictures: small pictures that a study names, as WebP files.
        notes: what was left out, and why.
    """

    about: dict[str, Any]
    studies: dict[str, dict[str, Any]]
    pictures: dict[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self, name: str | None = None) -> dict[str, Any]:
        """Plain values of one study, or of all."""
        if name is None:
            return self.about | self.studies | {"notes": list(self.notes)}
        return self.about | {"study": name} | self.studies[name]


@dataclass(frozen=True, eq=False)
class _Split:
    """What a study sees."""

    matcher: Matcher
    data: PairData
    images: GaussianEmbedding
    texts: GaussianEmbedding
    relevance: Relevance
    options: AnalysisOptions
    notes: list[str] = field(default_factory=list)

    def sides(self) -> dict[str, tuple[GaussianEmbedding, GaussianEmbedding, Relevance, Matching]]:
        """(queries, gallery, truth, matching) of images and texts as queries."""
        m = self.matcher
        return {
            "image": (self.images, self.texts, self.relevance, self._matching(m, True)),
            "text": (self.texts, self.images, self.relevance.transpose(), self._matching(m, False)),
        }

    def estimator(self) -> Estimator:
        """The chosen one, if these embeddings have it."""
        chosen = ESTIMATORS[self.options.uncertainty]
        if self.points and (chosen.needs_variance or not chosen.needs_gallery):
            others = [e.name for e in ESTIMATORS.values() if e.needs_gallery and not e.needs_variance]
            raise UserError(
                f"this model's embeddings are points, without variances: {chosen.name} says nothing of them;"
                f" take an --uncertainty that looks at the gallery: {', '.join(others)}"
            )
        return chosen

    @cached_property
    def breadth(self) -> np.ndarray:
        """(m,) number of images that each text is true of."""
        return np.bincount(self.relevance.indices, minlength=self.relevance.n_gallery)

    @property
    def points(self) -> bool:
        """Whether some embeddings have no variance."""
        return any(bool(torch.isneginf(e.log_var).any()) for e in (self.images, self.texts))

    @staticmethod
    def _matching(matcher: Matcher, queries_first: bool) -> Matching:
        return Matching(matcher.distance, matcher.logit_scale, matcher.logit_bias, queries_first=queries_first)


def analyse_model(
    matcher: Matcher,
    data: DataConfig,
    split: str,
    *,
    studies: Sequence[str] | None = None,
    options: AnalysisOptions | None = None,
    name: str = "",
) -> Analyses:
    """Do studies of any model on a split of any data.

    Args:
        matcher: the model.
        data: where the split comes from.
        split: its name.
        studies: some of STUDIES; None for all that this model and data allow, with a note of the others.
        options: sizes and choices.
        name: of the model, for titles.

    Returns:
        What they found.

    Raises:
        UserError: the data has no such split, or a study that was asked for needs what this model or data has not.
        ValueError: an option is out of range, or there are too few items.
    """
    options = options or AnalysisOptions()
    chosen = tuple(STUDIES) if studies is None else tuple(dict.fromkeys(studies))
    if unknown := [s for s in chosen if s not in STUDIES]:
        raise ValueError(f"unknown study {unknown[0]!r}; known: {', '.join(STUDIES)}")
    prepared = load_split(matcher.model, data, split)
    images, texts = embed_split(matcher.model, prepared)
    scene = _Split(matcher, prepared.data, images, texts, prepared.data.relevance(), options)
    found: dict[str, dict[str, Any]] = {}
    pictures: dict[str, bytes] = {}
    for study in chosen:
        try:
            found[study], own = STUDIES[study](scene)
            pictures |= own
        except UserError as error:
            if studies is not None:
                raise
            scene.notes.append(f"{study} is left out: {error}")
    if not found:
        raise UserError("; ".join(scene.notes))
    for note in scene.notes:
        say(note)
    about = {
        "format": FORMAT,
        "model": name,
        "weights": weights_digest(matcher.model),
        "split": split,
        "distance": matcher.distance,
        "n_images": images.n,
        "n_texts": texts.n,
        "level": LEVEL,
        "options": asdict(options),
    }
    return Analyses(about, found, pictures, tuple(scene.notes))


def _corruption(scene: _Split) -> tuple[dict[str, Any], dict[str, bytes]]:
    options, model, result = scene.options, scene.matcher.model, {}
    estimator = scene.estimator()
    for side, (queries, gallery, truth, matching) in scene.sides().items():
        corrupt = corrupted_images if side == "image" else corrupted_texts
        if side == "image" and reads_regions(model):
            scene.notes.append("corrupted pictures are left out: the images are region features")
            continue
        corrupted = corrupt(model, scene.data, truth.counts > 0, options.n_corrupted, options.seed)
        curves = corruption_curves(
            queries, gallery, truth, matching, corrupted,
            estimator=estimator, groups=resampled_together(scene.relevance, scene.data.groups, side == "text"),
            n_resamples=options.n_resamples, level=LEVEL, seed=options.seed,
        )  # fmt: skip
        result[side] = {name: curve.to_json() for name, curve in curves.items()}
    return {"uncertainty": estimator.name, "sides": result}, {}


def _sets(scene: _Split) -> tuple[dict[str, Any], dict[str, bytes]]:
    if scene.points:
        raise UserError("this model's embeddings are points: set algebra needs variances")
    if reads_regions(scene.matcher.model):
        raise UserError("set algebra needs pictures; the images of this model are region features")
    options, data = scene.options, scene.data
    rows = choose_pairs(data.groups, options.n_pairs, options.seed)
    if len(rows) < LEAST_PAIRS:
        raise UserError(
            f"{len(rows)} pairs of pictures are too few for set algebra: {len(data.images)} pictures, three for each pair, and at least"
            f" {LEAST_PAIRS} pairs"
        )
    names = (*MADE, "other")
    parts: dict[str, list[GaussianEmbedding]] = {name: [] for name in names}
    with progress_bar("mixing and erasing pictures", len(rows)) as advance:
        for start in range(0, len(rows), _TOGETHER):
            few = rows[start : start + _TOGETHER]
            made = [
                read_pictures(data.images, row, options.seed)
                | {"other": square_picture(data.images[row[2]].read_bytes())}
                for row in few.tolist()
            ]
            embedded = scene.matcher.model.embed_images([one[name] for name in names for one in made])
            for k, name in enumerate(names):
                parts[name].append(embedded[k * len(few) : (k + 1) * len(few)])
            advance(len(few))
    whole = {name: GaussianEmbedding.cat(es) for name, es in parts.items()}
    sets = PictureSets(rows[:, :2], {name: whole[name] for name in MADE}, whole["other"])
    figures = measure_sets(sets, n_resamples=options.n_resamples, level=LEVEL, seed=options.seed)
    shown, pictures = [], {}
    for k, row in enumerate(rows[:SHOWN_PAIRS].tolist()):
        drawn = draw_pair(sets, k)
        for name, content in read_pictures(data.images, row, options.seed).items():
            small = thumbnail(MemoryImage(name, content))
            if small is not None:
                pictures[f"sets-{k}-{name}.webp"] = small
        for item in drawn["items"]:
            item["picture"] = f"sets-{k}-{item['name']}.webp"
        shown.append(
            drawn | {"ids": [data.image_ids[i] for i in row[:2]], "captions": [_caption(scene, i) for i in row[:2]]}
        )
    return {
        "erased_share": ERASED,
        **figures.to_json(),
        "definitions": {"mixes": FIGURES, "erased": ERASED_FIGURES},
        "shown": shown,
    }, pictures


def _words(scene: _Split) -> tuple[dict[str, Any], dict[str, bytes]]:
    options, data = scene.options, scene.data
    estimator, result = scene.estimator(), {}
    for side, (queries, gallery, truth, matching) in scene.sides().items():
        usable = np.flatnonzero(truth.counts > 0) if side == "image" else np.arange(queries.n)
        if len(usable) < options.n_bins:
            raise UserError(
                f"{len(usable)} {side}s are too few for {options.n_bins} bins of uncertainty; ask for fewer with --bins"
            )
        uncertainty = estimator(queries, gallery, matching)[usable]
        if side == "text":
            captions: list[list[str]] = [[text] for text in data.texts]
        else:
            own = np.split(truth.indices, truth.indptr[1:-1])
            captions = [[data.texts[t] for t in own[i]] for i in usable]
        bins = words_by_uncertainty(
            uncertainty, captions, n_bins=options.n_bins, top=options.top_words, corpus=options.corpus
        )
        result[side] = [one.to_json() for one in bins]
    return {"uncertainty": estimator.name, "corpus": options.corpus, "sides": result}, {}


def _map(scene: _Split) -> tuple[dict[str, Any], dict[str, bytes]]:
    options, data = scene.options, scene.data
    if options.method == "tsne":
        say("placing images and texts by t-SNE: seconds for hundreds, a minute for thousands")
    drawn = map_items(
        scene.images, scene.texts, scene.relevance, n=options.n_mapped, method=options.method, seed=options.seed
    ).to_json()
    for item in drawn["items"]:
        i = item["index"]
        item["id"] = (data.image_ids if item["side"] == "image" else data.text_ids)[i]
        item["label"] = _caption(scene, i) if item["side"] == "image" else clipped(data.texts[i], _WORDS_OF_AN_ITEM)
    return drawn, {}


def _caption(scene: _Split, image: int) -> str:
    """The narrowest true caption of an image, that of the fewest images, and the first of such; or its id."""
    own = scene.relevance.indices[slice(*scene.relevance.indptr[image : image + 2])]
    if not len(own):
        return scene.data.image_ids[image]
    return clipped(scene.data.texts[own[scene.breadth[own].argmin()]], _WORDS_OF_AN_ITEM)


STUDIES: Mapping[str, Callable[[_Split], tuple[dict[str, Any], dict[str, bytes]]]] = {
    "corruption": _corruption,
    "sets": _sets,
    "words": _words,
    "map": _map,
}
"""The studies by name."""
