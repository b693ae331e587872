"""Zero-shot classification by prompts: templates, pooling of prompts to one Gaussian per class, and their filtering.

The gain of filtering prompts by uncertainty is measured: some images are used for the choice of the number of prompts,
and others are reported. The formulas are in docs/concepts/prompts.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sfumato.arrays import Array, as_tensor
from sfumato.data.captioned import Labelled, data_labelled, emoji_labelled, read_class_folder, read_class_names
from sfumato.data.images import Problems
from sfumato.data.pairs import PairData
from sfumato.distances import get_distance
from sfumato.encoders.dual import DualEncoder
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.bootstrap import Interval, bootstrap, mean_statistic
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


def right_at(images: GaussianEmbedding, labels: np.ndarray, classes: GaussianEmbedding, distance: str) -> np.ndarray:
    """Classify images by the closest class; at equal distances the earlier class is closer.

    images (n, d), labels (n,), classes (c, d) -> (n, 2).
    """
    _, order = top_k(images, classes, 5, distance)
    same = order.numpy() == labels[:, None]
    return np.stack([same[:, 0], same.any(1)], axis=1).astype(float)


def right_by_k(
    images: GaussianEmbedding,
    labels: np.ndarray,
    prompts: GaussianEmbedding,
    uncertainty: Tensor,
    *,
    distance: str,
    pooling: str,
) -> np.ndarray:
    """Count right images for every number of prompts that all classes keep.

    images (n, d), labels (n,), prompts (c * p, d), uncertainty (c, p) -> (c, p).
    """
    c, p = uncertainty.shape
    counts = np.zeros((c, p), np.int64)
    with progress_bar("choosing K", p) as advance:
        for k in range(p):
            classes = pool_prompts(prompts, certain_prompts(uncertainty, k + 1), pooling=pooling)
            _, closest = top_k(images, classes, 1, distance)
            counts[:, k] = np.bincount(labels[closest[:, 0].numpy() == labels], minlength=c)
            advance(1)
    return counts


def best_k(counts: np.ndarray) -> int:
    """Choose one K for all classes. counts (c, p)."""
    return int(counts.shape[1] - counts.sum(0)[::-1].argmax())


def best_k_per_class(
    images: GaussianEmbedding,
    labels: np.ndarray,
    prompts: GaussianEmbedding,
    uncertainty: Tensor,
    start: np.ndarray,
    *,
    distance: str,
    pooling: str,
) -> np.ndarray:
    """Choose a K for each class, one class after the other.

    Each class takes the K for which the most images of all classes are correct. So a class has no advantage from
    attracting images of other classes. If no K is better than the initial one, a class keeps the initial one.

    images (n, d), labels (n,), prompts (c * p, d), uncertainty (c, p), start (c,) -> (c,).
    """
    (n_classes, p), best, own = uncertainty.shape, start.copy(), torch.from_numpy(labels)
    classes = pool_prompts(prompts, certain_prompts(uncertainty, torch.from_numpy(start)), pooling=pooling)
    now = _distances(images, classes, distance)  # (n, c)
    with progress_bar("choosing K per class", n_classes) as advance:
        for c in range(n_classes):
            repeated = GaussianEmbedding.cat([prompts[c * p : (c + 1) * p]] * p)
            kept = certain_prompts(uncertainty[c].expand(p, p), torch.arange(1, p + 1))
            tried = _distances(images, pool_prompts(repeated, kept, pooling=pooling), distance)  # (n, p)
            now[:, c] = torch.inf
            nearest, which = now.min(dim=1, keepdim=True)
            taken = (tried < nearest) | ((tried == nearest) & (which > c))
            counts = torch.where(taken, (own == c).unsqueeze(1), which == own.unsqueeze(1)).sum(0)
            if counts.max() > counts[start[c] - 1]:
                best[c] = p - int(counts.flip(0).argmax())
            now[:, c] = tried[:, best[c] - 1]
            advance(1)
    return best


def halves(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide images at random into halves, class by class.

    labels (n,) -> (positions for the choice, positions for the report).
    """
    random, chosen = np.random.default_rng(seed), np.zeros(len(labels), bool)
    for c in np.unique(labels):
        own = random.permutation(np.flatnonzero(labels == c))
        chosen[own[: len(own) // 2]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def _distances(images: GaussianEmbedding, classes: GaussianEmbedding, distance: str) -> Tensor:
    """(n, c) distances in one tensor: 100 MB for 25,000 images and 1,000 classes."""
    return torch.cat([block for _, block in distance_blocks(images, classes, distance)])


@dataclass(frozen=True)
class Method:
    """A method to make class embeddings, and its accuracy on the reported images."""

    name: str  # name of the method
    k: list[int] | None  # number of prompts kept for each class; None if prompts are weighted
    top1: Interval | None  # fraction of images whose closest class is their own
    top5: Interval | None  # fraction of images with their class among the five closest; None for five classes or fewer
    against_all: Interval | None  # top1 minus that of all prompts, on the same resamples of images
    against_random: Interval | None
    against_random_order: Interval | None


@dataclass(frozen=True)
class PromptsKept:
    """Accuracy by the number of prompts that every class keeps: figure C.2 of the PCME++ paper."""

    images: str  # "others", on which K was chosen, or "reported"
    top1: list[float]  # for K = 1, 2 ... p: fraction of images whose closest class is their own
    random_top1: list[float]  # the same with prompts in a random order, mean of five orders
    best_k: list[int | None]


def prompts_kept(counts: Sequence[np.ndarray], n_images: int, images: str) -> PromptsKept:
    """Accuracy by K from (c, p) counts of :func:`right_by_k`: by uncertainty, then in each random order."""
    own, *others = counts
    best = own.shape[1] - own[:, ::-1].argmax(axis=1)
    return PromptsKept(
        images=images,
        top1=(own.sum(axis=0) / n_images).tolist(),
        random_top1=(np.mean([other.sum(axis=0) for other in others], axis=0) / n_images).tolist(),
        best_k=[int(k) if right else None for k, right in zip(best, own.max(axis=1), strict=True)],
    )


@dataclass(frozen=True)
class ZeroShotReport:
    """The result of :func:`~sfumato.studies.zeroshot.evaluate_zeroshot`."""

    methods: list[Method]  # rows of the table
    best_alone: float | None
    prompts_kept: list[PromptsKept]
    classes: list[str]  # names in prompts
    templates: list[str]  # with one {} each
    total_variance: list[list[float]]  # of every prompt: a list for each class, in the order of the templates
    template_top1: list[float]  # fraction of the reported images that each template alone classifies correctly
    certain_is_right: float | None
    chance: float  # fraction of the images in the most frequent class, which a constant answer gets right
    n_images: int  # number of reported images
    n_chosen_on: int  # number of images on which K was chosen; none of them is reported
    n_empty: int  # number of classes without an image
    left_out: list[str]  # unusable images with their reasons
    distance: str  # name of the distance that finds the closest class
    pooling: str  # pooling of prompts
    seed: int  # seed of all random choices

    def beats_chance(self, method: Method) -> bool:
        """Whether the top-1 of a method is above that of a constant answer, beyond noise."""
        top1 = method.top1
        if top1 is None or top1.value is None:
            return False
        return (top1.value if top1.low is None else top1.low) > self.chance

    def verdict(self) -> str:
        """Judge for each filter whether it helps beyond noise."""
        filtered = [m for m in self.methods if m.against_random is not None]
        if not filtered:
            return "Nothing was filtered."
        if not any(self.beats_chance(m) for m in filtered):
            return (
                f"No filter is better than always answering the most frequent class ({100 * self.chance:.1f}% right),"
                " so whether filtering helps cannot be told. Take another model, other class names, or more images."
            )
        return "\n".join(
            f"{m.name}: {points(m.against_all)} points against all prompts, {_judged(m.against_all)};"
            f" {points(m.against_random_order)} against a random order with K chosen in the same way,"
            f" {_judged(m.against_random_order)}."
            if self.beats_chance(m)
            else f"{m.name}: not better than always answering the most frequent class."
            for m in filtered
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self) | {"verdict": self.verdict()}


def _judged(difference: Interval | None) -> str:
    if difference is None or difference.low is None or difference.high is None:
        return "not measured"
    return "which helps" if difference.low > 0 else "which hurts" if difference.high < 0 else "within noise"


def points(one: Interval | None) -> str:
    """A difference in percentage points, with its sign and interval."""
    if one is None or one.value is None:
        return "–"
    low, high = (None if end is None else f"{100 * end:+.1f}" for end in (one.low, one.high))
    return f"{100 * one.value:+.1f}" + (f" [{low}, {high}]" if low and high else "")


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
    return {"settings": asdict(options), "report": report.to_json()}


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
) -> ZeroShotReport:
    """Classify images with one prompt, all prompts, weighted, the most certain, and as many random prompts."""
    wanted, problems = {name.strip() for one in filters for name in one.split(",")}, Problems()
    if unknown := wanted - set(FILTERS):
        raise UserError(f"unknown filter {min(unknown)!r}; known: {', '.join(FILTERS)}")
    if pooling not in PROMPT_POOLINGS:
        raise UserError(f"unknown pooling {pooling!r}; known: {', '.join(PROMPT_POOLINGS)}")
    distance = get_distance(distance or retrieval_model.distance).name
    shown, held = _divide(retrieval_model, pictures, choose_on, wanted, problems, seed)
    classes, (c, p) = list(pictures.classes), (len(pictures.classes), len(templates))
    prompts = embed_prompts(retrieval_model.model, classes, templates)
    uncertainty = prompts.total_variance.view(c, p)
    if wanted - {"none"} and not (uncertainty > 0).all():
        raise UserError("the model has no variances to filter prompts by; use only the filter none")
    ways = _simple_ways(templates, uncertainty, prompts, held, seed)
    filtered, kept, best_alone = _filtered_ways(wanted, shown, held, prompts, uncertainty, (distance, pooling), seed)
    ways += filtered
    figures = _figures(ways, shown, prompts, (distance, pooling))
    alone_top1 = [_right(shown, prompts, w.expand(c, p), (distance, pooling))[:, 0].mean() for w in torch.eye(p)]
    correlation = none_if_nan(spearman(uncertainty.mean(0).numpy(), np.array(alone_top1)))
    intervals = bootstrap(
        {"/".join(key): mean_statistic(values) for key, values in figures.items() if c > 5 or key[1] != "top5"},
        len(shown.labels), n_resamples=n_resamples, seed=seed,
    )  # fmt: skip
    names = [f.name for f in fields(Method) if f.name not in ("name", "k")]
    return ZeroShotReport(
        methods=[
            Method(
                name=way.name,
                k=None if way.k is None else way.k.tolist(),
                **{name: intervals.get(f"{way.name}/{name}") for name in names},
            )
            for way in ways
        ],
        best_alone=best_alone,
        prompts_kept=kept,
        classes=classes,
        templates=list(templates),
        total_variance=uncertainty.tolist(),
        template_top1=[float(value) for value in alone_top1],
        certain_is_right=correlation,
        chance=float(np.bincount(shown.labels).max() / len(shown.labels)),
        n_images=len(shown.labels),
        n_chosen_on=len(held.labels),
        n_empty=c - len(np.unique(pictures.labels)),
        left_out=[f"{one.location}: {one.reason}" for one in problems.items],
        distance=distance,
        pooling=pooling,
        seed=seed,
    )


@dataclass(frozen=True, eq=False)
class _Embedded:
    """(n, d) embeddings and (n,) class numbers of images."""

    images: GaussianEmbedding
    labels: np.ndarray

    def select(self, index: np.ndarray) -> "_Embedded":
        return _Embedded(self.images[torch.from_numpy(index)], self.labels[index])


def _divide(
    retrieval_model: Model,
    pictures: Labelled,
    choose_on: Labelled | None,
    wanted: set[str],
    problems: Problems,
    seed: int,
) -> tuple[_Embedded, _Embedded]:
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


def _simple_ways(
    templates: Sequence[str], uncertainty: Tensor, prompts: GaussianEmbedding, held: _Embedded, seed: int
) -> list["_Way"]:
    """The methods without a choice of K: one prompt, all prompts, and weighted prompts."""
    c, p = uncertainty.shape
    ways = [
        _Way(f"one prompt: {templates[0]}", torch.eye(1, p).expand(c, p), torch.ones(c, dtype=torch.long)),
        _Way(f"all {p} prompts", torch.ones(c, p), torch.full((c,), p)),
    ]
    if (uncertainty > 0).all():
        ways.append(_Way("weighted by 1 / variance", 1 / uncertainty))
        if len(held.labels):
            fitted = mixture_weights(held.images, held.labels, prompts, c, seed=seed)
            ways.append(_Way("weights fitted on others", fitted))
    return ways


def _filtered_ways(
    wanted: set[str],
    shown: _Embedded,
    held: _Embedded,
    prompts: GaussianEmbedding,
    uncertainty: Tensor,
    how: tuple[str, str],
    seed: int,
) -> tuple[list["_Way"], list[PromptsKept], float | None]:
    """The methods with a chosen K, accuracy by K, and the fraction correct at the best K of an image's own class."""
    generator = torch.Generator().manual_seed(seed)
    orders = [uncertainty, *(torch.rand(*uncertainty.shape, generator=generator) for _ in range(_N_RANDOM))]
    ways: list[_Way] = []
    kept: list[PromptsKept] = []
    best_alone = None
    if kinds := wanted & {"global", "per-class"}:
        ways, counts = _choose("", kinds, held, prompts, orders, how)
        kept.append(prompts_kept(counts, len(held.labels), "others"))
    if "oracle" in wanted:
        more, counts = _choose("oracle, ", {"global", "per-class"}, shown, prompts, orders, how)
        kept.append(prompts_kept(counts, len(shown.labels), "reported"))
        ways, best_alone = ways + more, int(counts[0].max(axis=1).sum()) / len(shown.labels)
    return ways, kept, best_alone


def _right(shown: _Embedded, prompts: GaussianEmbedding, weights: Tensor, how: tuple[str, str]) -> np.ndarray:
    """(n, 2) of right_at, with the pooled prompts as classes; how = (distance, pooling)."""
    return right_at(shown.images, shown.labels, pool_prompts(prompts, weights, pooling=how[1]), how[0])


def _figures(
    ways: Sequence["_Way"], shown: _Embedded, prompts: GaussianEmbedding, how: tuple[str, str]
) -> dict[tuple[str, str], np.ndarray]:
    """(n,) values by name of the way and figure of :class:`Method`; the second way has all prompts."""
    top1: dict[str, np.ndarray] = {}
    figures: dict[tuple[str, str], np.ndarray] = {}
    with progress_bar("classifying", len(ways)) as advance:
        for way in ways:
            top1[way.name], figures[way.name, "top5"] = _right(shown, prompts, way.weights, how).T
            for figure, randoms in way.random.items():
                others = [_right(shown, prompts, weights, how)[:, 0] for weights in randoms]
                figures[way.name, figure] = top1[way.name] - np.mean(others, axis=0)
            advance(1)
    for name, right in top1.items():
        figures |= {(name, "top1"): right, (name, "against_all"): right - top1[ways[1].name]}
    return figures


@dataclass(frozen=True, eq=False)
class _Way:
    """(c, p) weights, the (c,) K that they keep, and by figure of :class:`Method` the random weights to compare."""

    name: str
    weights: Tensor
    k: Tensor | None = None
    random: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def _choose(
    title: str,
    kinds: set[str],
    chosen_on: _Embedded,
    prompts: GaussianEmbedding,
    orders: Sequence[Tensor],
    how: tuple[str, str],
) -> tuple[list[_Way], list[np.ndarray]]:
    """The methods whose K is chosen on these images, with prompts in the first order; the other orders are random.

    Also the counts of right_by_k in each order.
    """
    data, (distance, pooling) = (chosen_on.images, chosen_on.labels), how
    found: dict[str, list[Tensor]] = {kind: [] for kind in sorted(kinds)}
    every = []
    for order in orders:
        every.append(counts := right_by_k(*data, prompts, order, distance=distance, pooling=pooling))
        same = np.full(len(counts), best_k(counts))
        for kind, chosen in found.items():
            k = same
            if kind == "per-class":
                k = best_k_per_class(*data, prompts, order, same, distance=distance, pooling=pooling)
            chosen.append(torch.from_numpy(k))
    ways = []
    for kind, (own, *others) in found.items():
        random = {
            "against_random": [certain_prompts(order, own) for order in orders[1:]],
            "against_random_order": [certain_prompts(*both) for both in zip(orders[1:], others, strict=True)],
        }
        name = f"{title}K most certain" + (", per class" if kind == "per-class" else "")
        ways.append(_Way(name, certain_prompts(orders[0], own), own, random))
    return ways, every


def _embed(retrieval_model: Model, pictures: Labelled, problems: Problems) -> _Embedded:
    embeddings, ids, left_out = embed_sources(retrieval_model, pictures.sources, pictures.ids)
    problems.items += left_out.items
    label_of = dict(zip(pictures.ids, pictures.labels.tolist(), strict=True))
    return _Embedded(embeddings, np.array([label_of[i] for i in ids], np.int64))
