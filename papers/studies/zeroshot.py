"""Zero-shot classification by prompts, and the gain of keeping only the most certain ones.

Some images are used for the choice of the number of prompts, and others are reported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from papers.studies.labelled import Labelled, data_labelled, emoji_labelled, read_class_folder, read_class_names
from papers.studies.prompts import (
    PROMPT_POOLINGS,
    Classifier,
    LabelledEmbeddings,
    best_k,
    certain_prompts,
    embed_prompts,
    halves,
    mixture_weights,
    prompts_kept,
    read_templates,
    verdict,
)
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.distances import get_distance
from sfumato.errors import UserError, progress_bar
from sfumato.metrics.bootstrap import bootstrap, mean_statistic, none_if_nan, spearman
from sfumato.models.embed import embed_sources, file_endings
from sfumato.models.model import Model

FILTERS = ("none", "global", "per-class", "oracle")
"""No filter, one K for all classes, one K per class, and both chosen on the reported images themselves."""

_N_RANDOM = 5
"""Number of random choices of prompts that a filter is compared with."""


@dataclass(frozen=True)
class ZeroShotOptions:
    """The settings zeroshot.KEY=VALUE. Without images and emoji, the images are those of the split, whose only text is
    their class.
    """

    images: str = ""  # folder in the layout ROOT/CLASS/IMAGE
    emoji: str = ""  # the emoji set, with the classes of this level: group or subgroup
    style: str = "fluent3d"  # drawing style of the emoji
    classes: str = ""  # file of all classes: the folder (group, text), a tab, the name
    choose_on: str = ""  # folder like images, to choose the number of prompts on; by default half of each class
    templates: str = ""  # file of templates with one {} each; by default those of CLIP
    filter: str = "global,per-class"
    pooling: str = "mixture"
    distance: str = ""  # by default the model's own

    def __post_init__(self) -> None:
        if self.images and self.emoji:
            raise UserError("give one of zeroshot.images and zeroshot.emoji")
        if self.choose_on and self.images and Path(self.choose_on).resolve() == Path(self.images).resolve():
            raise UserError(
                "zeroshot.choose_on is also the folder that is evaluated; give another one, or zeroshot.filter=oracle"
            )

    @classmethod
    def read(cls, settings: Iterable[str]) -> "ZeroShotOptions":
        """From zeroshot.KEY=VALUE."""
        values, known = dict[str, str](), [f.name for f in fields(cls)]
        for setting in settings:
            key, _, value = setting.removeprefix("zeroshot.").partition("=")
            if key not in known or not value:
                raise UserError(f"{setting}: expected zeroshot.KEY=VALUE with one of {', '.join(known)}")
            values[key] = value
        return cls(**values)


def study_zeroshot(
    retrieval_model: Model, options: ZeroShotOptions, data: PairData | None, *, n_resamples: int, seed: int
) -> dict[str, Any]:
    """Classify the images that the options name, or those of a split; the settings and the report as JSON values."""
    names = read_class_names(Path(options.classes)) if options.classes else None
    endings, others = file_endings(retrieval_model.model), None
    if options.images:
        found = read_class_folder(Path(options.images), names, endings=endings)
    elif options.emoji:
        found = emoji_labelled(options.emoji, style=options.style, names=names)
    elif data is not None:
        found = data_labelled(data, names, where="the split")
    else:
        raise UserError("say what to classify: zeroshot.images=FOLDER, zeroshot.emoji=group or --data RECIPE")
    if options.choose_on:
        keys = dict(zip(found.keys, found.classes, strict=True))
        others = read_class_folder(Path(options.choose_on), keys, endings=endings)
    templates = read_templates(Path(options.templates) if options.templates else None)
    report = evaluate_zeroshot(
        retrieval_model, found, templates, filters=[options.filter], choose_on=others, pooling=options.pooling,
        distance=options.distance or None, n_resamples=n_resamples, seed=seed,
    )  # fmt: skip
    return {"settings": asdict(options), "report": report}


def evaluate_zeroshot(
    retrieval_model: Model,
    pictures: Labelled,
    templates: Sequence[str],
    *,
    filters: Iterable[str] = ("global", "per-class"),
    choose_on: Labelled | None = None,
    pooling: str = "mixture",
    distance: str | None = None,
    n_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Classify images with one prompt, all prompts, weighted, the most certain, and as many random prompts.

    The report as plain values. Of each method: K, None for weighted prompts; top-1 and, for more than five classes,
    top-5; and top-1 minus that of all prompts, of as many random prompts, and of a random order with its own K.
    """
    wanted, problems = {name.strip() for one in filters for name in one.split(",")}, Problems()
    if unknown := wanted - set(FILTERS):
        raise UserError(f"unknown filter {min(unknown)!r}; known: {', '.join(FILTERS)}")
    if pooling not in PROMPT_POOLINGS:
        raise UserError(f"unknown pooling {pooling!r}; known: {', '.join(PROMPT_POOLINGS)}")
    distance = get_distance(distance or retrieval_model.distance).name
    shown, held = _divide(retrieval_model, pictures, choose_on, wanted, problems, seed)
    c, p, n = len(pictures.classes), len(templates), len(shown.labels)
    prompts = embed_prompts(retrieval_model.model, pictures.classes, templates)
    classifier = Classifier(prompts, prompts.total_variance.view(c, p), distance, pooling)
    if wanted - {"none"} and not (classifier.order > 0).all():
        raise UserError("the model has no variances to filter prompts by; use only the filter none")
    ways, kept, best_alone = _simple_ways(templates, classifier, held, seed), [], None
    for title, kinds, some, of in (
        ("", wanted & {"global", "per-class"}, held, "others"),
        ("oracle, ", {"global", "per-class"} if "oracle" in wanted else set[str](), shown, "reported"),
    ):
        if kinds:
            more, counts = _filtered_ways(title, kinds, some, classifier, seed)
            ways += more
            kept.append(prompts_kept(counts, len(some.labels), of))
            best_alone = int(counts[0].max(axis=1).sum()) / n if some is shown else None
    methods = _measured(ways, shown, classifier, n_resamples, seed)
    alone = [float(classifier.right(shown, w.expand(c, p))[:, 0].mean()) for w in torch.eye(p)]
    chance = float(np.bincount(shown.labels).max() / n)
    return {
        "methods": methods,
        "best_alone": best_alone,  # fraction right at the best K of an image's own class
        "prompts_kept": kept,
        "classes": list(pictures.classes),
        "templates": list(templates),
        "total_variance": classifier.order.tolist(),  # of every prompt: a list for each class
        "template_top1": alone,
        "certain_is_right": none_if_nan(spearman(classifier.order.mean(0).numpy(), np.array(alone))),
        "chance": chance,  # fraction of the images in the most frequent class
        "n_images": n,
        "n_chosen_on": len(held.labels),  # none of them is reported
        "n_empty": c - len(np.unique(pictures.labels)),
        "left_out": [f"{one.location}: {one.reason}" for one in problems.items],
        "distance": distance,
        "pooling": pooling,
        "seed": seed,
        "verdict": verdict(methods, chance),
    }


def _divide(
    retrieval_model: Model,
    pictures: Labelled,
    choose_on: Labelled | None,
    wanted: set[str],
    problems: Problems,
    seed: int,
) -> tuple[LabelledEmbeddings, LabelledEmbeddings]:
    """Divide the images into those for the report and those for the choice of K, which may be none."""
    shown = _embed(retrieval_model, pictures, problems)
    if choose_on is not None:
        return shown, _embed(retrieval_model, choose_on, problems)
    if not wanted & {"global", "per-class"}:
        return shown, shown.select(np.empty(0, np.int64))
    first, second = halves(shown.labels, seed)
    if not len(first):
        raise UserError("no class has two images, so no image can be set aside to choose K; give images to choose K on")
    return shown.select(second), shown.select(first)


def _embed(retrieval_model: Model, pictures: Labelled, problems: Problems) -> LabelledEmbeddings:
    embeddings, ids, left_out = embed_sources(retrieval_model, pictures.sources, pictures.ids)
    problems.items += left_out.items
    label_of = dict(zip(pictures.ids, pictures.labels.tolist(), strict=True))
    return LabelledEmbeddings(embeddings, np.array([label_of[i] for i in ids], np.int64))


@dataclass(frozen=True, eq=False)
class _Way:
    """(c, p) weights, the (c,) K that they keep, and by figure of a method the random weights to compare."""

    name: str
    weights: Tensor
    k: Tensor | None = None
    random: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def _simple_ways(templates: Sequence[str], classifier: Classifier, held: LabelledEmbeddings, seed: int) -> list[_Way]:
    """The methods without a choice of K: one prompt, all prompts, and weighted prompts."""
    c, p = classifier.order.shape
    ways = [
        _Way(f"one prompt: {templates[0]}", torch.eye(1, p).expand(c, p), torch.ones(c, dtype=torch.long)),
        _Way(f"all {p} prompts", torch.ones(c, p), torch.full((c,), p)),
    ]
    if (classifier.order > 0).all():
        ways.append(_Way("weighted by 1 / variance", 1 / classifier.order))
        if len(held.labels):
            fitted = mixture_weights(held.images, held.labels, classifier.prompts, c, seed=seed)
            ways.append(_Way("weights fitted on others", fitted))
    return ways


def _filtered_ways(
    title: str, kinds: set[str], some: LabelledEmbeddings, classifier: Classifier, seed: int
) -> tuple[list[_Way], list[np.ndarray]]:
    """The methods whose K is chosen on some images; the counts of right_by_k by uncertainty and in random orders."""
    generator = torch.Generator().manual_seed(seed)
    random = [torch.rand(*classifier.order.shape, generator=generator) for _ in range(_N_RANDOM)]
    found: dict[str, list[Tensor]] = {kind: [] for kind in sorted(kinds)}
    every = []
    for ordered in (classifier, *(replace(classifier, order=order) for order in random)):
        every.append(counts := ordered.right_by_k(some))
        same = np.full(len(counts), best_k(counts))
        for kind, chosen in found.items():
            chosen.append(torch.from_numpy(ordered.k_per_class(some, same) if kind == "per-class" else same))
    ways = []
    for kind, (own, *others) in found.items():
        compared = {
            "against_random": [certain_prompts(order, own) for order in random],
            "against_random_order": [certain_prompts(*both) for both in zip(random, others, strict=True)],
        }
        name = f"{title}K most certain" + (", per class" if kind == "per-class" else "")
        ways.append(_Way(name, certain_prompts(classifier.order, own), own, compared))
    return ways, every


def _measured(
    ways: Sequence[_Way], shown: LabelledEmbeddings, classifier: Classifier, n_resamples: int, seed: int
) -> list[dict[str, Any]]:
    """The figures of each way with intervals on the same resamples of images; the second way has all prompts."""
    values: dict[str, np.ndarray] = {}
    with progress_bar("classifying", len(ways)) as advance:
        for k, way in enumerate(ways):
            values[f"{k}/top1"], values[f"{k}/top5"] = classifier.right(shown, way.weights).T
            for figure, randoms in way.random.items():
                others = [classifier.right(shown, weights)[:, 0] for weights in randoms]
                values[f"{k}/{figure}"] = values[f"{k}/top1"] - np.mean(others, axis=0)
            advance(1)
    values |= {f"{k}/against_all": values[f"{k}/top1"] - values["1/top1"] for k in range(len(ways))}
    kept = [name for name in values if len(classifier.order) > 5 or not name.endswith("top5")]
    statistics = {name: mean_statistic(values[name]) for name in kept}
    found = bootstrap(statistics, len(shown.labels), n_resamples=n_resamples, seed=seed)
    names = ("top1", "top5", "against_all", "against_random", "against_random_order")
    return [
        {"name": way.name, "k": None if way.k is None else way.k.tolist()}
        | {name: asdict(found[f"{k}/{name}"]) if f"{k}/{name}" in found else None for name in names}
        for k, way in enumerate(ways)
    ]
