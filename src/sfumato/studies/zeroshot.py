"""Zero-shot classification by prompts: templates, pooling of prompts to one Gaussian per class, and their filtering.

The gain of filtering prompts by uncertainty is measured: some images are used for the choice of the number of prompts,
and others are reported. The formulas are in docs/concepts/prompts.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sfumato.data.captioned import Labelled, data_labelled, emoji_labelled, read_class_folder, read_class_names
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.distances import get_distance
from sfumato.encoders.dual import DualEncoder
from sfumato.errors import UserError
from sfumato.gaussian import Array, GaussianEmbedding, as_tensor
from sfumato.metrics.bootstrap import bootstrap, mean_statistic
from sfumato.metrics.uncertainty import none_if_nan, spearman
from sfumato.models.embed import embed_sources, file_endings, read_lines
from sfumato.models.model import Model
from sfumato.progress import progress_bar
from sfumato.search.exact import distance_blocks, top_k

PROMPT_POOLINGS = ("mixture", "unit")
"""The ways to pool prompts into one Gaussian, see :func:`pool_prompts`."""

CLIP_TEMPLATES = Path(__file__).with_name("clip_templates.txt")
"""The 80 templates of CLIP, as the PCME++ paper lists them (C.6)."""

_CLASSES = 64
"""Number of classes that are embedded or pooled at once."""


def read_templates(path: Path | None = None) -> list[str]:
    """Read prompt templates."""
    templates, numbers, _ = read_lines(path or CLIP_TEMPLATES)
    for template, number in zip(templates, numbers, strict=True):
        if template.count("{}") != 1:
            raise UserError(
                f"{path}:{number}: expected one {{}} for the class, as in 'a photo of a {{}}.', got {template!r}"
            )
    if twice := next((t for i, t in enumerate(templates) if t in templates[:i]), None):
        raise UserError(f"{path}: the template {twice!r} occurs twice; leave one out")
    return templates


def embed_prompts(model: DualEncoder, classes: Sequence[str], templates: Sequence[str]) -> GaussianEmbedding:
    """Embed every class in every template. Returns (c * p, d)."""
    parts = []
    with progress_bar("embedding prompts", len(classes) * len(templates)) as advance:
        for start in range(0, len(classes), _CLASSES):
            texts = [t.replace("{}", name) for name in classes[start : start + _CLASSES] for t in templates]
            parts.append(model.embed_texts(texts))
            advance(len(texts))
    return GaussianEmbedding.cat(parts)


def pool_prompts(prompts: GaussianEmbedding, weights: Array, *, pooling: str = "mixture") -> GaussianEmbedding:
    r"""Pool the prompts of each class into one Gaussian.

        mean = sum_p w_p mean_p        var = sum_p w_p (var_p + (mean_p - mean)^2)

    These are the moments of the mixture of the prompts, so csd to the result is the weighted mean of csd to each
    prompt. With "unit", as in CLIP and in ProLIP's code, the mean is scaled to unit length, and var = sum_p w_p var_p.

    Args:
        prompts: (c * p, d) embeddings, class by class.
        weights: (c, p) weights >= 0, a tensor or an array; the weights of a class are divided by their sum.
        pooling: "mixture" or "unit".

    Returns:
        (c, d) embeddings.

    Raises:
        ValueError: sizes do not fit, the pooling is unknown, a weight is negative, or a class has no positive weight.
    """
    weights = as_tensor(weights, "weights", "pool_prompts")
    c, p = weights.shape
    if prompts.n != c * p or pooling not in PROMPT_POOLINGS:
        raise ValueError(
            f"pool_prompts: got {prompts.n} prompts, weights {c} x {p} and pooling {pooling!r};"
            f" expected {c * p} prompts, and {' or '.join(PROMPT_POOLINGS)}"
        )
    if (weights < 0).any() or not (weights.sum(1) > 0).all():
        raise ValueError("pool_prompts: weights must not be negative, and every class needs a positive one")
    weights = (weights.double() / weights.double().sum(1, keepdim=True)).to(prompts.dtype)
    parts = []
    for start in range(0, c, _CLASSES):
        w = weights[start : start + _CLASSES].unsqueeze(2)  # (b, p, 1)
        own = prompts[start * p : (start + len(w)) * p]
        means, var = own.mean.view(len(w), p, -1), own.var.view(len(w), p, -1)
        mean = (w * means).sum(1)
        if pooling == "mixture":
            var = var + (means - mean.unsqueeze(1)).square()
        else:
            mean = functional.normalize(mean, dim=-1)
        parts.append(GaussianEmbedding(mean, (w * var).sum(1).log()))
    return GaussianEmbedding.cat(parts)


def certain_prompts(uncertainty: Tensor, k: int | Tensor) -> Tensor:
    """Choose the k most certain prompts of each class; ties are decided by order. uncertainty (c, p) -> (c, p)."""
    c, p = uncertainty.shape
    kept = torch.arange(p) < torch.as_tensor(k).expand(c).unsqueeze(1)
    return torch.zeros(c, p).scatter_(1, uncertainty.argsort(dim=1, stable=True), kept.float())


def mixture_weights(
    images: GaussianEmbedding, labels: np.ndarray, prompts: GaussianEmbedding, n_classes: int, *, seed: int = 0
) -> Tensor:
    """Fit the weights of the prompts in a mixture to a few labelled images of each class, by expectation maximisation.

    This is the rule of ProLIP's code: 20 samples of each of five images, variances of prompts + 0.02, a Dirichlet prior
    with concentration 2, and initial weights proportional to 1 / variance. A class without images keeps its initial
    weights.

    Source: https://github.com/naver-ai/prolip, "bprw"; Chun et al., ICLR 2025, arXiv 2410.18857.

    images (n, d), labels (n,), prompts (c * p, d) -> (c, p).
    """
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / prompts.total_variance.double().view(n_classes, -1)
    weights = weights / weights.sum(1, keepdim=True)
    p = weights.shape[1]
    for c in range(n_classes):
        few = torch.from_numpy(np.flatnonzero(labels == c)[:5])
        if not len(few):
            continue
        x = images[few].sample(20, generator=generator).flatten(0, 1).double()  # (100, d)
        own = prompts[c * p : (c + 1) * p]
        mean, var = own.mean.double(), own.var.double() + 0.02
        squares = x.square() @ (1 / var).T - 2 * x @ (mean / var).T + (mean.square() / var).sum(1)
        log_density = -(squares + var.log().sum(1)) / 2  # (100, p), up to a constant
        for _ in range(1000):
            new = (log_density + weights[c].log()).softmax(dim=1).sum(0) + 1
            step, weights[c] = (new / new.sum() - weights[c]).norm(), new / new.sum()
            if step < 1e-12:
                break
    return weights


@dataclass(frozen=True, eq=False)
class LabelledEmbeddings:
    """(n, d) embeddings and (n,) class numbers of images."""

    images: GaussianEmbedding
    labels: np.ndarray

    def select(self, index: np.ndarray) -> "LabelledEmbeddings":
        """Some of the images. index (k,)."""
        return LabelledEmbeddings(self.images[torch.from_numpy(index)], self.labels[index])


@dataclass(frozen=True, eq=False)
class Classifier:
    """The prompts of c classes in p templates, their order in a class, and how images find the closest class."""

    prompts: GaussianEmbedding  # (c * p, d), class by class
    order: Tensor  # (c, p) numbers; the smallest are kept first: their uncertainties, or random ones
    distance: str
    pooling: str = "mixture"

    def right(self, shown: LabelledEmbeddings, weights: Tensor) -> np.ndarray:
        """Whether the closest class is right, and one of the five closest; ties go to the earlier class.

        weights (c, p) -> (n, 2).
        """
        _, order = top_k(shown.images, pool_prompts(self.prompts, weights, pooling=self.pooling), 5, self.distance)
        same = order.numpy() == shown.labels[:, None]
        return np.stack([same[:, 0], same.any(1)], axis=1).astype(float)

    def right_by_k(self, shown: LabelledEmbeddings) -> np.ndarray:
        """Count right images of each class for every number of prompts that all classes keep. Returns (c, p)."""
        c, p = self.order.shape
        counts = np.zeros((c, p), np.int64)
        with progress_bar("choosing K", p) as advance:
            for k in range(p):
                found = self.right(shown, certain_prompts(self.order, k + 1))[:, 0] > 0
                counts[:, k] = np.bincount(shown.labels[found], minlength=c)
                advance(1)
        return counts

    def k_per_class(self, shown: LabelledEmbeddings, start: np.ndarray) -> np.ndarray:
        """Choose a K for each class, one class after the other.

        Each class takes the K for which the most images of all classes are correct. So a class has no advantage from
        attracting images of other classes. If no K is better than the initial one, a class keeps the initial one.

        start (c,) -> (c,).
        """
        (n_classes, p), best, own = self.order.shape, start.copy(), torch.from_numpy(shown.labels)
        now = self._distances(shown, self.prompts, certain_prompts(self.order, torch.from_numpy(start)))  # (n, c)
        with progress_bar("choosing K per class", n_classes) as advance:
            for c in range(n_classes):
                repeated = GaussianEmbedding.cat([self.prompts[c * p : (c + 1) * p]] * p)
                kept = certain_prompts(self.order[c].expand(p, p), torch.arange(1, p + 1))
                tried = self._distances(shown, repeated, kept)  # (n, p)
                now[:, c] = torch.inf
                nearest, which = now.min(dim=1, keepdim=True)
                taken = (tried < nearest) | ((tried == nearest) & (which > c))
                counts = torch.where(taken, (own == c).unsqueeze(1), which == own.unsqueeze(1)).sum(0)
                if counts.max() > counts[start[c] - 1]:
                    best[c] = p - int(counts.flip(0).argmax())
                now[:, c] = tried[:, best[c] - 1]
                advance(1)
        return best

    def _distances(self, shown: LabelledEmbeddings, prompts: GaussianEmbedding, weights: Tensor) -> Tensor:
        """Distances to the pooled prompts in one tensor: 100 MB for 25,000 images and 1,000 classes."""
        classes = pool_prompts(prompts, weights, pooling=self.pooling)
        return torch.cat([block for _, block in distance_blocks(shown.images, classes, self.distance)])


def best_k(counts: np.ndarray) -> int:
    """Choose one K for all classes. counts (c, p)."""
    return int(counts.shape[1] - counts.sum(0)[::-1].argmax())


def halves(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide images at random into halves, class by class.

    labels (n,) -> (positions for the choice, positions for the report).
    """
    random, chosen = np.random.default_rng(seed), np.zeros(len(labels), bool)
    for c in np.unique(labels):
        own = random.permutation(np.flatnonzero(labels == c))
        chosen[own[: len(own) // 2]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def prompts_kept(counts: Sequence[np.ndarray], n_images: int, images: str) -> dict[str, Any]:
    """Accuracy by the number of prompts that every class keeps: figure C.2 of the PCME++ paper.

    counts are (c, p) of :meth:`Classifier.right_by_k`: by uncertainty, then in each random order, of which top-1 is the
    mean. images: "others", on which K was chosen, or "reported". best_k is None for a class without a right image.
    """
    own, *others = counts
    best = own.shape[1] - own[:, ::-1].argmax(axis=1)
    return {
        "images": images,
        "top1": (own.sum(axis=0) / n_images).tolist(),
        "random_top1": (np.mean([other.sum(axis=0) for other in others], axis=0) / n_images).tolist(),
        "best_k": [int(k) if right else None for k, right in zip(best, own.max(axis=1), strict=True)],
    }


def verdict(methods: Sequence[Mapping[str, Any]], chance: float) -> str:
    """Judge for each filter whether it helps beyond noise."""
    filtered = [m for m in methods if m["against_random"] is not None]
    if not filtered:
        return "Nothing was filtered."
    beating = [_low(m["top1"]) > chance for m in filtered]
    if not any(beating):
        return (
            f"No filter is better than always answering the most frequent class ({100 * chance:.1f}% right), so"
            " whether filtering helps cannot be told. Take another model, other class names, or more images."
        )
    return "\n".join(
        f"{m['name']}: {points(m['against_all'])} points against all prompts, {_judged(m['against_all'])};"
        f" {points(m['against_random_order'])} against a random order with K chosen in the same way,"
        f" {_judged(m['against_random_order'])}."
        if beats
        else f"{m['name']}: not better than always answering the most frequent class."
        for m, beats in zip(filtered, beating, strict=True)
    )


def _low(top1: Mapping[str, float]) -> float:
    return top1["value"] if top1["low"] is None else top1["low"]


def _judged(difference: Mapping[str, Any]) -> str:
    if difference["low"] is None:
        return "not measured"
    return "which helps" if difference["low"] > 0 else "which hurts" if difference["high"] < 0 else "within noise"


def points(one: Mapping[str, Any] | None) -> str:
    """A difference in percentage points, with its sign and interval."""
    if one is None:
        return "–"
    value, low, high = (one[key] if one[key] is None else f"{100 * one[key]:+.1f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]" if low else str(value)


FILTERS = ("none", "global", "per-class", "oracle")
"""No filter, one K for all classes, one K per class, and both chosen on the reported images themselves."""

_N_RANDOM = 5
"""Number of random choices of prompts that a filter is compared with."""


@dataclass(frozen=True)
class ZeroShotOptions:
    """The settings of the study: what `sfumato analyse MODEL zeroshot.KEY=VALUE` changes. Without images and emoji, the
    images are those of the split, whose only text is their class.
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
