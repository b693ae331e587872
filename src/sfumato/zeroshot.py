"""Zero-shot classification, and what filtering prompts by their uncertainty is worth.

K, the number of most certain prompts of a class that are kept, is chosen on pictures that are not reported on. The papers' way, on the very pictures that are, is
called oracle. Prompts and their pooling are in prompts.py, pictures and their classes in data/labelled.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from sfumato.data.labelled import Labelled, data_labelled
from sfumato.data.problems import Problems
from sfumato.distances import get_distance
from sfumato.errors import UserError
from sfumato.evaluation.filtering import Method, ZeroShotReport
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.selective import bootstrap, mean_statistic
from sfumato.metrics.uncertainty import spearman
from sfumato.progress import progress_bar, say
from sfumato.prompts import (
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
from sfumato.training.build import load_splits
from sfumato.training.config import DataConfig
from sfumato.training.inference import Matcher, embed_sources

FILTERS = ("none", "global", "per-class", "oracle")
"""Whether one K for all classes is chosen, a K for each class, and whether both are also chosen on the reported pictures."""

_DRAWS = 5


def evaluate_zeroshot(
    matcher: Matcher,
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
        pooling: see :func:`~sfumato.prompts.pool_prompts`.
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
    distance = get_distance(distance or matcher.distance).name
    images, labels = _embed(matcher, pictures, problems)
    held, held_labels = images[:0], labels[:0]
    if choose_on is not None:
        held, held_labels = _embed(matcher, choose_on, problems)
    elif wanted & {"global", "per-class"}:
        first, second = halves(labels, seed)
        held, held_labels = images[torch.from_numpy(first)], labels[first]
        images, labels = images[torch.from_numpy(second)], labels[second]
        if not len(first):
            raise UserError(
                "no class has two pictures, so none can be set aside to choose K on; give pictures for that"
            )
    c, p = len(pictures.classes), len(templates)
    prompts = embed_prompts(matcher.model, pictures.classes, templates)
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
        left_out=[f"{one.place}: {one.reason}" for one in problems.items],
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


def _embed(matcher: Matcher, pictures: Labelled, problems: Problems) -> tuple[GaussianEmbedding, np.ndarray]:
    embeddings, ids, left_out = embed_sources(matcher, pictures.sources, pictures.ids)
    problems.items += left_out.items
    label_of = dict(zip(pictures.ids, pictures.labels.tolist(), strict=True))
    return embeddings, np.array([label_of[i] for i in ids], np.int64)
