"""What filtering prompts by uncertainty is worth: the figures, a table of them, and their files."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.data.labelled import Labelled, data_labelled
from sfumato.data.problems import Problems
from sfumato.data.sources import DataConfig
from sfumato.distances import get_distance
from sfumato.errors import UserError
from sfumato.files import write_atomically, write_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.bootstrap import Interval, bootstrap, mean_statistic
from sfumato.metrics.uncertainty import spearman
from sfumato.models.embed import RetrievalModel, embed_sources
from sfumato.models.splits import load_splits
from sfumato.progress import progress_bar, say
from sfumato.studies.prompts import (
    PROMPT_POOLINGS,
    best_k,
    best_k_per_class,
    certain_prompts,
    embed_prompts,
    halves,
    mixture_weights,
    pool_prompts,
    right_at,
    right_by_k,
)


@dataclass(frozen=True)
class Method:
    """A way to make class embeddings, and how often it is right on the reported pictures.

    Attributes:
        name: of the way.
        k: how many prompts of each class it keeps; None where they are weighted.
        top1: share of pictures whose closest class is theirs.
        top5: share with theirs among the five closest; None of five classes or fewer.
        against_all: top1 less that of all prompts, on the same resamples of pictures.
        against_random: top1 less that of as many prompts of each class drawn at random, mean over draws; None where nothing is filtered.
        against_random_order: top1 less that of prompts in a random order, of which K is chosen in the same way, mean over draws: is it the
            uncertainty that helps, or only that something was chosen on labelled pictures?
    """

    name: str
    k: list[int] | None
    top1: Interval | None
    top5: Interval | None
    against_all: Interval | None
    against_random: Interval | None
    against_random_order: Interval | None


@dataclass(frozen=True)
class ZeroShotReport:
    """What :func:`~sfumato.studies.zeroshot.evaluate_zeroshot` found.

    Attributes:
        methods: the rows of the table.
        best_alone: share of pictures that are right at the K that is best for their own class while every class has that K: no
            classifier, as it needs the class to choose; None without the oracle.
        classes: what they are called in prompts.
        templates: with one {}.
        total_variance: of every prompt: a list for each class, in the order of the templates.
        template_top1: share of the reported pictures that each template alone gets right.
        certain_is_right: Spearman over templates of the mean total variance and template_top1; negative where certain templates are the better
            ones, None where either is constant.
        n_images: pictures that are reported on.
        n_chosen_on: pictures that K was chosen on; none of them is reported on.
        n_empty: classes without a picture, which can only be mistaken for others.
        left_out: unusable pictures, each with its reason.
        distance, pooling, seed: how it was done.
    """

    methods: list[Method]
    best_alone: float | None
    classes: list[str]
    templates: list[str]
    total_variance: list[list[float]]
    template_top1: list[float]
    certain_is_right: float | None
    n_images: int
    n_chosen_on: int
    n_empty: int
    left_out: list[str]
    distance: str
    pooling: str
    seed: int

    def verdict(self) -> str:
        """Does each filter help beyond noise, against all prompts and against as many random ones?"""
        said = [
            f"{m.name}: {_points(m.against_all)} points against all prompts, {_judged(m.against_all)};"
            f" {_points(m.against_random_order)} against a random order with K chosen alike, {_judged(m.against_random_order)}."
            for m in self.methods
            if m.against_random is not None
        ]
        return "\n".join(said) or "Nothing was filtered."

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self) | {"verdict": self.verdict()}

    def table(self) -> str:
        """For a person to read; per cent, and points of it, with 95 % intervals."""
        width = max(len(m.name) for m in self.methods)
        chosen = f", K chosen on {self.n_chosen_on} others" if self.n_chosen_on else ""
        lines = [
            f"{self.n_images} pictures of {len(self.classes)} classes{chosen}; by {self.distance}, pooling {self.pooling}",
            f"{'method':<{width}}  {'K':>10}  {'top-1':>17}  {'top-5':>17}  {'against all':>19}"
            f"  {'against random':>19}  {'random order':>19}",
        ]
        for m in self.methods:
            k = "-" if m.k is None else f"{m.k[0]}" if len(set(m.k)) == 1 else f"{min(m.k)} to {max(m.k)}"
            lines.append(
                f"{m.name:<{width}}  {k:>10}  {_share(m.top1):>17}  {_share(m.top5):>17}"
                f"  {_points(m.against_all):>19}  {_points(m.against_random):>19}  {_points(m.against_random_order):>19}"
            )
        if self.best_alone is not None:
            lines.append(
                f"each picture at the K that is best for its own class, which no classifier can: {100 * self.best_alone:.1f}"
            )
        if self.certain_is_right is not None:
            lines.append(
                f"templates: Spearman of mean total variance and top-1 of each alone {self.certain_is_right:+.2f}"
            )
        if self.n_empty:
            lines.append(f"classes without a picture, which others can only be mistaken for: {self.n_empty}")
        if self.left_out:
            lines.append("\n  ".join([f"{len(self.left_out)} left out:", *self.left_out[:10]]))
        return "\n".join([*lines, self.verdict()])

    def write(self, folder: Path) -> None:
        """Write zeroshot.json, and prompts.csv with the total variance of every prompt."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "zeroshot.json", self.to_json())
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["class", "template", "total_variance"])
        for name, row in zip(self.classes, self.total_variance, strict=True):
            writer.writerows([name, template, value] for template, value in zip(self.templates, row, strict=True))
        write_atomically(folder / "prompts.csv", text.getvalue())


def _judged(difference: Interval | None) -> str:
    if difference is None or difference.low is None or difference.high is None:
        return "not measured"
    return "which helps" if difference.low > 0 else "which hurts" if difference.high < 0 else "within noise"


def _share(one: Interval | None, sign: str = "") -> str:
    if one is None or one.value is None:
        return "-"
    low, high = (None if end is None else f"{100 * end:{sign}.1f}" for end in (one.low, one.high))
    return f"{100 * one.value:{sign}.1f}" + (f" [{low}, {high}]" if low and high else "")


def _points(one: Interval | None) -> str:
    return _share(one, "+")


FILTERS = ("none", "global", "per-class", "oracle")
"""Whether one K for all classes is chosen, a K for each class, and whether both are also chosen on the reported pictures."""

_DRAWS = 5


def evaluate_zeroshot(
    retrieval_model: RetrievalModel,
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
    """Classify pictures by one prompt, by all, by weighted ones, by the most certain ones, and by as many at random.

    Args:
        matcher: the model.
        pictures: what to report on. If K is to be chosen and there is no choose_on, half of each class is taken away for that.
        templates: with one {} each; the first is the single prompt.
        filters: some of FILTERS.
        choose_on: pictures of the same classes, to choose K on, and to fit weights on.
        pooling: see :func:`~sfumato.studies.prompts.pool_prompts`.
        distance: by which the closest class is found, ties in the order of the classes; the model's own if None.
        n_resamples: of the pictures, for the 95 % intervals; they know nothing of other models or other halves.
        seed: of the halves, the random prompts, the fitted weights and the resamples.

    Raises:
        UserError: a filter or the pooling is unknown, no picture is left to report on or to choose on, or the model has no variances to filter by.
    """
    if unknown := [f for f in filters if f not in FILTERS]:
        raise UserError(f"unknown filter {unknown[0]!r}; known: {', '.join(FILTERS)}")
    if pooling not in PROMPT_POOLINGS:
        raise UserError(f"unknown pooling {pooling!r}; known: {', '.join(PROMPT_POOLINGS)}")
    wanted, problems = set(filters), Problems()
    distance = get_distance(distance or retrieval_model.distance).name
    images, labels = _embed(retrieval_model, pictures, problems)
    held, held_labels = images[:0], labels[:0]
    if choose_on is not None:
        held, held_labels = _embed(retrieval_model, choose_on, problems)
    elif wanted & {"global", "per-class"}:
        first, second = halves(labels, seed)
        held, held_labels = images[torch.from_numpy(first)], labels[first]
        images, labels = images[torch.from_numpy(second)], labels[second]
        if not len(first):
            raise UserError(
                "no class has two pictures, so none can be set aside to choose K on; give pictures for that"
            )
    c, p = len(pictures.classes), len(templates)
    prompts = embed_prompts(retrieval_model.model, pictures.classes, templates)
    uncertainty = prompts.total_variance.view(c, p)
    if wanted - {"none"} and not (uncertainty > 0).all():
        raise UserError("the model has no variances, so there is nothing to filter by; leave only the filter none")

    how = {"distance": distance, "pooling": pooling}
    ways = [
        _Way(f"one prompt: {templates[0]}", torch.eye(1, p).expand(c, p), torch.ones(c, dtype=torch.long)),
        _Way(f"all {p} prompts", torch.ones(c, p), torch.full((c,), p)),
    ]
    certain = bool((uncertainty > 0).all())
    if certain:
        ways.append(_Way("weighted by 1 / variance", 1 / uncertainty))
    if certain and len(held_labels):
        ways.append(_Way("weights fitted on others", mixture_weights(held, held_labels, prompts, c, seed=seed)))
    generator, best_alone = torch.Generator().manual_seed(seed), None
    orders = [uncertainty, *(torch.rand(c, p, generator=generator) for _ in range(_DRAWS))]
    if kinds := wanted & {"global", "per-class"}:
        ways += _choose("", kinds, held, held_labels, prompts, orders, how)[0]
    if "oracle" in wanted:
        more, alone = _choose("oracle, ", {"global", "per-class"}, images, labels, prompts, orders, how)
        ways, best_alone = ways + more, alone / len(labels)

    def right(weights: Tensor) -> np.ndarray:
        return right_at(images, labels, pool_prompts(prompts, weights, pooling=pooling), distance)

    top1, figures = {}, {}
    with progress_bar("classifying", len(ways)) as advance:
        for way in ways:
            top1[way.name], figures[way.name, "top5"] = right(way.weights).T
            for figure, drawn in way.random.items():
                figures[way.name, figure] = top1[way.name] - np.mean([right(w)[:, 0] for w in drawn], axis=0)
            advance(1)
    alone_top1 = [float(right(column.expand(c, p))[:, 0].mean()) for column in torch.eye(p)]
    correlation = spearman(uncertainty.mean(0).numpy(), np.array(alone_top1))
    for way in ways:
        figures[way.name, "top1"] = top1[way.name]
        figures[way.name, "against_all"] = top1[way.name] - top1[ways[1].name]
    intervals = bootstrap(
        {"/".join(key): mean_statistic(values) for key, values in figures.items() if c > 5 or key[1] != "top5"},
        len(labels), n_resamples=n_resamples, seed=seed,
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
        classes=list(pictures.classes),
        templates=list(templates),
        total_variance=uncertainty.tolist(),
        template_top1=alone_top1,
        certain_is_right=None if np.isnan(correlation) else correlation,
        n_images=len(labels),
        n_chosen_on=len(held_labels),
        n_empty=c - len(np.unique(pictures.labels)),
        left_out=[f"{one.location}: {one.reason}" for one in problems.items],
        distance=distance,
        pooling=pooling,
        seed=seed,
    )


@dataclass(frozen=True, eq=False)
class _Way:
    """(c, p) weights, the (c,) K that they keep, and by figure of :class:`Method` the random weights that they are held against."""

    name: str
    weights: Tensor
    k: Tensor | None = None
    random: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def _choose(
    title: str, kinds: set[str], images: GaussianEmbedding, labels: np.ndarray, prompts: GaussianEmbedding,
    orders: Sequence[Tensor], how: Mapping[str, str],
) -> tuple[list[_Way], int]:  # fmt: skip
    """Ways whose K is chosen on these pictures, of prompts kept in the first order; the others are the random ones.

    Also the number of pictures that are right at the K that is best for their own class.
    """
    found: dict[str, list[Tensor]] = {kind: [] for kind in sorted(kinds)}
    right = []
    for order in orders:
        counts = right_by_k(images, labels, prompts, order, **how)
        right.append(int(counts.max(axis=1).sum()))
        same = np.full(len(counts), best_k(counts))
        for kind, chosen in found.items():
            k = same if kind == "global" else best_k_per_class(images, labels, prompts, order, same, **how)
            chosen.append(torch.from_numpy(k))
    ways = []
    for kind, (own, *others) in found.items():
        random = {
            "against_random": [certain_prompts(order, own) for order in orders[1:]],
            "against_random_order": [certain_prompts(*both) for both in zip(orders[1:], others, strict=True)],
        }
        name = f"{title}K most certain" + (", per class" if kind == "per-class" else "")
        ways.append(_Way(name, certain_prompts(orders[0], own), own, random))
    return ways, right[0]


def labelled_split(data: DataConfig, split: str, names: Mapping[str, str] | None = None) -> Labelled:
    """A split of a recipe's data, whose only text of a picture is its class; unusable items are told on standard error.

    Raises:
        UserError: there is no such split; see also :func:`~sfumato.data.labelled.data_labelled`.
    """
    problems = Problems()
    splits = load_splits(data, problems)
    if split not in splits:
        raise UserError(f"the data ({data.source}) has no split {split!r}; it has {', '.join(splits)}")
    if len(problems):
        say(f"{len(problems)} items left out:\n{problems.summary()}")
    return data_labelled(splits[split], names, where=data.path)


def _embed(
    retrieval_model: RetrievalModel, pictures: Labelled, problems: Problems
) -> tuple[GaussianEmbedding, np.ndarray]:
    embeddings, ids, left_out = embed_sources(retrieval_model, pictures.sources, pictures.ids)
    problems.items += left_out.items
    label_of = dict(zip(pictures.ids, pictures.labels.tolist(), strict=True))
    return embeddings, np.array([label_of[i] for i in ids], np.int64)
