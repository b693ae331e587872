"""What is an uncertainty worth? Every estimator against everything that it should foresee, with confidence intervals.

It knows embeddings and the truth about them, and nothing of the models, pictures and texts that they came from. Labels are used to
judge estimators and never reach one. What the figures mean is in :data:`FIGURES`; docs/concepts/uncertainty.md reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sfumato.evaluation.estimators import ESTIMATORS, NEAREST, Estimator, Matching, estimate_uncertainty
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.bootstrap import (
    Interval,
    Statistic,
    bootstrap,
    mean_statistic,
    percentile_interval,
    resampled_balanced_spearman,
)
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.metrics.selective import (
    aurc_statistic,
    auroc_statistic,
    decile_statistic,
    excess_aurc_statistic,
    rejection_ratio_statistic,
    risk_statistic,
    spearman_statistic,
)
from sfumato.metrics.uncertainty import average_ranks, balanced_spearman, recall_by_uncertainty, spearman
from sfumato.search.exact import rank_relevant

FIGURES: dict[str, str] = {
    "wrong_auroc": "AUROC of wrong against right best items: 0.5 chance, 1 perfect",
    "wrong_aurc": "area under the risk-coverage curve, smaller is better; chance is the error rate",
    "wrong_excess_aurc": "the same less that of a perfect order",
    "wrong_gain": "share of what a perfect order gains over chance: 0 chance, 1 perfect",
    "risk_at_half": "error rate of the more certain half of the queries",
    "deciles": "Pearson correlation of decile of uncertainty and recall@1; negative if uncertain queries fail",
    "multiplicity": "Spearman with the true number of matches",
    "multiplicity_balanced": "the same over sets balanced over powers of two",
    "caption_distance": "Spearman with the mean squared distance between the means of an image's own captions: a proxy of ambiguity",
    "caption_words": "Spearman with one minus the mean word overlap (Jaccard) of an image's own captions: a proxy that asks no model",
    "out_of_gallery": "AUROC of queries whose true matches were taken out of the gallery against the same queries with them",
}
"""What is measured of each estimator. The truth behind the figures is known to the benchmark alone."""


@dataclass(frozen=True, eq=False)
class Corrupted:
    """Some queries, embedded again from corrupted inputs.

    Attributes:
        name: of the corruption.
        index: (k,) positions of these queries.
        strengths: ascending, without the clean 0.
        embeddings: k for each strength.
    """

    name: str
    index: np.ndarray
    strengths: tuple[float, ...]
    embeddings: tuple[GaussianEmbedding, ...]


@dataclass(frozen=True)
class CorruptionTrust:
    """How estimators follow a corruption of the queries.

    Attributes:
        n: number of corrupted queries.
        strengths: from 0, the clean inputs.
        recall: recall@1 at each strength, to see that the queries do become harder.
        estimators: by name, "spearman" (of strength and uncertainty within a query, averaged over queries), "rises" (share of
            queries less certain at the greatest strength than clean; ties one half), "monotone" (share that never falls from one
            strength to the next, and rises) and "auroc" (greatest strength against clean).
        medians: by name, the median uncertainty at each strength.
        means: by name, the mean uncertainty at each strength; None where it is infinite.
    """

    n: int
    strengths: list[float]
    recall: list[float]
    estimators: dict[str, dict[str, Interval]]
    medians: dict[str, list[float]]
    means: dict[str, list[Interval]]


@dataclass(frozen=True)
class DirectionTrust:
    """The figures of one direction.

    Attributes:
        n_queries: queries with a true match; the others are left out.
        n_gallery: size of the gallery.
        recall: recall@1 of these queries.
        risk_best: area under the risk-coverage curve of a perfect order; that of chance is 1 - recall.
        right_pairs: AUROC of the match probability of a true pair against a random wrong one, each query with one of both.
        n_out_of_gallery: queries of the figure out_of_gallery.
        estimators: by name, the figures of :data:`FIGURES` that are defined here; none for an estimator that is constant.
        deciles: by name, recall@1 in ten bins from the most certain queries to the least.
        corruptions: by name.
    """

    n_queries: int
    n_gallery: int
    recall: Interval
    risk_best: Interval
    right_pairs: Interval
    n_out_of_gallery: int
    estimators: dict[str, dict[str, Interval]]
    deciles: dict[str, list[float]]
    corruptions: dict[str, CorruptionTrust]


@dataclass(frozen=True)
class TrustReport:
    """What the uncertainties of a model are worth on a split of some data.

    Attributes:
        split: name of the split.
        distance: the model's.
        calibrated: whether its match logits were fitted on held-out pairs.
        n_images, n_texts: sizes.
        n_resamples, level, seed: of the intervals.
        estimators: by name {"estimates", "kind", "cost"}.
        directions: "t2i" and "i2t", or one of them.
        notes: what was left out, and why.
    """

    split: str
    distance: str
    calibrated: bool
    n_images: int
    n_texts: int
    n_resamples: int
    level: float
    seed: int
    estimators: dict[str, dict[str, str]]
    directions: dict[str, DirectionTrust]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and dictionaries."""
        return asdict(self)


def described(estimators: Mapping[str, Estimator]) -> dict[str, dict[str, str]]:
    """What each estimator says of itself, for a report."""
    return {name: {"estimates": e.estimates, "kind": e.kind, "cost": e.cost} for name, e in estimators.items()}


def caption_distance(texts: GaussianEmbedding, relevance: Relevance) -> np.ndarray:
    """How far apart the captions of each image are: mean squared distance of their means over all pairs.

    A proxy of how much an image leaves to say, where nobody counted its true matches. It uses the truth (which captions are the
    image's) and the model's own texts, so it judges estimators and is none.

    Args:
        texts: (m, d) embeddings.
        relevance: image -> its texts.

    Returns:
        (n,) one for each image; NaN for an image with fewer than two texts.
    """
    mean = texts.mean.double().cpu().numpy()
    result = np.full(relevance.n_queries, np.nan)
    for i, count in enumerate(relevance.counts):
        if count > 1:
            own = mean[relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]]
            result[i] = 2 * count / (count - 1) * np.square(own - own.mean(0)).sum(1).mean()
    return result


def caption_words(texts: Sequence[str], relevance: Relevance) -> np.ndarray:
    """The same without any model: one minus the mean Jaccard overlap of the captions' sets of lower-case words.

    Args:
        texts: m captions.
        relevance: image -> its texts.

    Returns:
        (n,) in [0, 1]; NaN for an image with fewer than two texts.
    """
    words = [set(words_of(text)) for text in texts]
    result = np.full(relevance.n_queries, np.nan)
    for i, count in enumerate(relevance.counts):
        if count > 1:
            own = [words[t] for t in relevance.indices[relevance.indptr[i] : relevance.indptr[i + 1]]]
            overlaps = [len(a & b) / max(len(a | b), 1) for k, a in enumerate(own) for b in own[:k]]
            result[i] = 1 - sum(overlaps) / len(overlaps)
    return result


def words_of(text: str) -> list[str]:
    """The lower-case words of a text, in its order: runs of letters and digits."""
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def measure_trust(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    relevance: Relevance,
    matching: Matching,
    *,
    estimators: Mapping[str, Estimator] = ESTIMATORS,
    multiplicity: bool = False,
    proxies: Mapping[str, np.ndarray] | None = None,
    corrupted: Sequence[Corrupted] = (),
    groups: np.ndarray | None = None,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> DirectionTrust:
    """Measure estimators on the queries of one direction.

    Args:
        queries: (n, d) embeddings.
        gallery: (m, d) embeddings.
        relevance: query -> its true items.
        matching: distance and match logits.
        estimators: by name.
        multiplicity: whether the number of true items of a query is its ambiguity, as where every true pair is listed; not so
            where each image merely has five captions of its own.
        proxies: by name in FIGURES, (n,) stand-ins for ambiguity; NaN leaves a query out.
        corrupted: some queries embedded from corrupted inputs.
        groups: (n,) queries that are resampled together; see :func:`~sfumato.metrics.bootstrap.bootstrap`.
        n_resamples, level, seed: of the intervals; the seed also draws the wrong pairs.

    Returns:
        All figures.

    Raises:
        ValueError: sizes do not fit, or no query has a true item.
    """
    ranks = rank_relevant(queries, gallery, relevance, matching.oriented_distance)
    hit = per_query_metrics(ranks, relevance)["recall@1"]
    kept = np.flatnonzero(~np.isnan(hit))
    if not len(kept):
        raise ValueError("measure_trust: no query has a true item; check that ids of images and texts fit together")
    own, ground_truth, hit = queries[torch.from_numpy(kept)], relevance.select_queries(kept), hit[kept]
    resample = partial(bootstrap, n_resamples=n_resamples, level=level, seed=seed)
    within = None if groups is None else groups[kept]
    estimate = partial(estimate_uncertainty, gallery=gallery, matching=matching, estimators=estimators)
    scores = estimate(own)
    told = {name: u for name, u in scores.items() if np.any(u != u[0])}

    statistics = {"recall": mean_statistic(hit), "best": aurc_statistic(1 - hit, 1 - hit)}
    for name, u in told.items():
        statistics |= {f"{name}/{figure}": s for figure, s in _of_errors(u, 1 - hit).items()}
        if multiplicity:
            statistics[f"{name}/multiplicity"] = spearman_statistic(u, ground_truth.counts)
    found = resample(statistics, len(kept), groups=within)
    if multiplicity:
        drawn = resampled_balanced_spearman(told, ground_truth.counts, n_resamples=n_resamples, seed=seed)
        for name, u in told.items():
            value = balanced_spearman(u, ground_truth.counts)
            found[f"{name}/multiplicity_balanced"] = percentile_interval(value, drawn[name], level)
    for proxy, values in (proxies or {}).items():
        known = np.flatnonzero(~np.isnan(values[kept]))
        statistics = {f"{name}/{proxy}": spearman_statistic(u[known], values[kept][known]) for name, u in told.items()}
        found |= resample(statistics, len(known), groups=None if within is None else within[known])

    # Without their true items: only queries that keep enough of a gallery.
    enough = np.flatnonzero(gallery.n - ground_truth.counts >= NEAREST)
    absent = estimate(own[torch.from_numpy(enough)], without=ground_truth.select_queries(enough)) if len(enough) else {}
    statistics = {
        f"{name}/out_of_gallery": _paired(told[name][enough], values)
        for name, values in absent.items()
        if name in told and estimators[name].needs_gallery
    }
    found |= resample(statistics, len(enough), groups=None if within is None else within[enough])

    place = np.full(queries.n, -1)
    place[kept] = np.arange(len(kept))
    corruptions = {}
    for c in corrupted:
        chosen = place[c.index]
        if (chosen < 0).any():
            raise ValueError(f"measure_trust: a query of the corruption {c.name!r} has no true item; corrupt others")
        corruptions[c.name] = follow_corruption(
            c,
            {name: u[chosen] for name, u in told.items()},
            gallery,
            ground_truth.select_queries(chosen),
            matching,
            estimators={name: estimators[name] for name in told},
            recall=float(hit[chosen].mean()),
            resample=partial(resample, groups=None if within is None else within[chosen]),
        )

    statistics = {}
    pairs = _random_pairs(ground_truth, np.random.default_rng(seed))
    if len(pairs):
        distance = matching.oriented_distance
        # A sampled distance draws anew for each call: the same seed for both.
        gaps = []
        for column in (1, 2):
            sides = own[torch.from_numpy(pairs[:, 0])], gallery[torch.from_numpy(pairs[:, column])]
            seeded = {"generator": torch.Generator().manual_seed(0)} if distance.sampled else {}
            gaps.append(distance.row(*sides, **seeded).double().cpu().numpy())
        statistics = {"right_pairs": _paired(*gaps)}
    right = resample(statistics, len(pairs), groups=None if within is None else within[pairs[:, 0]])
    figures = {n: {f: found[f"{n}/{f}"] for f in FIGURES if f"{n}/{f}" in found} for n in scores}
    return DirectionTrust(
        n_queries=len(kept),
        n_gallery=gallery.n,
        recall=found["recall"],
        risk_best=found["best"],
        right_pairs=right.get("right_pairs", Interval(None, None, None)),
        n_out_of_gallery=len(enough),
        estimators={n: {f: i for f, i in values.items() if i.value is not None} for n, values in figures.items()},
        deciles={
            n: [b["recall"] for b in recall_by_uncertainty(average_ranks(u), hit)["bins"]] for n, u in told.items()
        },
        corruptions=corruptions,
    )


def _of_errors(u: np.ndarray, error: np.ndarray) -> dict[str, Statistic]:
    return {
        "wrong_auroc": auroc_statistic(u, error),
        "wrong_aurc": aurc_statistic(u, error),
        "wrong_excess_aurc": excess_aurc_statistic(u, error),
        "wrong_gain": rejection_ratio_statistic(u, error),
        "risk_at_half": risk_statistic(u, error, 0.5),
        "deciles": decile_statistic(u, 1 - error),
    }


def _paired(low: np.ndarray, high: np.ndarray) -> Statistic:
    """AUROC of the second of two scores of each query against the first; a resampled query brings both."""
    statistic = auroc_statistic(np.concatenate([low, high]), np.repeat([0, 1], len(low)))
    return lambda counts: statistic(np.tile(counts, 2))


def follow_corruption(
    corrupted: Corrupted,
    clean: Mapping[str, np.ndarray],
    gallery: GaussianEmbedding,
    relevance: Relevance,
    matching: Matching,
    *,
    estimators: Mapping[str, Estimator],
    recall: float,
    resample: Callable[..., dict[str, Interval]],
) -> CorruptionTrust:
    """How estimators follow one corruption of k queries.

    Args:
        corrupted: the queries' embeddings at s strengths.
        clean: by name, (k,) uncertainties of the same queries as they are.
        gallery: (m, d) embeddings.
        relevance: query -> its true items, of the k queries.
        matching: distance and match logits.
        estimators: by name, as in clean.
        recall: recall@1 of the k queries as they are.
        resample: (statistics by name, k) -> intervals.
    """
    steps = [clean, *(estimate_uncertainty(e, gallery, matching, estimators=estimators) for e in corrupted.embeddings)]
    recalls = [recall]
    for e in corrupted.embeddings:
        ranks = rank_relevant(e, gallery, relevance, matching.oriented_distance)
        recalls.append(float(per_query_metrics(ranks, relevance)["recall@1"].mean()))
    scores = {name: np.stack([step[name] for step in steps]) for name in clean}  # (s + 1, k) each
    statistics: dict[str, Statistic] = {}
    strengths = [0.0, *corrupted.strengths]
    for name, u in scores.items():
        each = [spearman(np.array(strengths), values) for values in u.T]
        # np.diff of two infinities is NaN: compare instead.
        falls, rises = (u[1:] < u[:-1]).any(0), u[-1] > u[0]
        statistics[f"{name}/spearman"] = mean_statistic(np.nan_to_num(np.array(each)))
        statistics[f"{name}/rises"] = mean_statistic(rises + 0.5 * (u[-1] == u[0]))
        statistics[f"{name}/monotone"] = mean_statistic(rises & ~falls)
        statistics[f"{name}/auroc"] = _paired(u[0], u[-1])
        statistics |= {f"{name}/{s}": mean_statistic(values) for s, values in enumerate(u) if np.isfinite(values).all()}
    found = resample(statistics, len(corrupted.index))
    undefined = Interval(None, None, None)
    return CorruptionTrust(
        n=len(corrupted.index),
        strengths=strengths,
        recall=recalls,
        estimators={
            name: {f: found[f"{name}/{f}"] for f in ("spearman", "rises", "monotone", "auroc")} for name in scores
        },
        medians={name: np.median(u, axis=1).tolist() for name, u in scores.items()},
        means={name: [found.get(f"{name}/{s}", undefined) for s in range(len(u))] for name, u in scores.items()},
    )


def _random_pairs(ground_truth: Relevance, random: np.random.Generator) -> np.ndarray:
    """(p, 3): each query that has wrong items, one of its true items, and one of its wrong ones, at random."""
    m, counts = ground_truth.n_gallery, ground_truth.counts
    usable = np.flatnonzero(counts < m)
    right = ground_truth.indices[
        ground_truth.indptr[usable] + (random.random(len(usable)) * counts[usable]).astype(np.int64)
    ]
    keys = ground_truth.query_of_item * m + ground_truth.indices
    wrong = random.integers(m, size=len(usable))
    while (again := np.isin(usable * m + wrong, keys)).any():
        wrong[again] = random.integers(m, size=int(again.sum()))
    return np.stack([usable, right, wrong], axis=1)
