"""The quality of uncertainties: every estimator against the quantities that it should predict, with intervals.

The inputs are embeddings of any model and their ground truth. Labels are used to measure the estimators, and are never
an input of an estimator.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sfumato.arrays import as_numpy
from sfumato.evaluation.estimators import NEAREST, Estimator, Matching, estimate_uncertainty, usable_estimators
from sfumato.evaluation.hits import HitFigures
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics import bootstrap
from sfumato.metrics.bootstrap import Interval, Statistic
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.reliability import RecallByUncertainty
from sfumato.metrics.retrieval import beats_chance, chance_metrics, per_query_metrics
from sfumato.search.exact import rank_relevant


def caption_distance(texts: GaussianEmbedding, relevance: Relevance) -> np.ndarray:
    """Mean squared distance between the means of an image's captions, over all pairs of captions.

    It is a proxy of an image's ambiguity for data without counts of the true matches. It uses the ground truth, namely
    the captions of the image. So it can be used to measure estimators, but is not an estimator.

    texts (m, d) -> (n,).
    """
    mean = as_numpy(texts.mean).astype(np.float64)
    return _of_captions(relevance, lambda own: float(2 * mean[own].var(0, ddof=1).sum()))


def caption_words(texts: Sequence[str], relevance: Relevance) -> np.ndarray:
    """One minus the mean Jaccard overlap of the word sets of an image's captions, over all pairs of captions.

    It is a proxy of ambiguity like :func:`caption_distance`, but needs no model.

    Returns (n,).
    """
    words = [set(words_of(text)) for text in texts]

    def spread(own: np.ndarray) -> float:
        pairs = itertools.combinations([words[t] for t in own], 2)
        return 1 - float(np.mean([len(a & b) / max(len(a | b), 1) for a, b in pairs]))

    return _of_captions(relevance, spread)


def _of_captions(relevance: Relevance, spread: Callable[[np.ndarray], float]) -> np.ndarray:
    """(n,) a number of the positions of each image's captions; NaN where there are fewer than two."""
    parts = (relevance.indices[start:stop] for start, stop in itertools.pairwise(relevance.indptr))
    return np.array([spread(own) if len(own) > 1 else np.nan for own in parts])


def words_of(text: str) -> list[str]:
    """Split a text into lower-case words, which are runs of letters and digits."""
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


FIGURES: dict[str, str] = {
    "wrong_auroc": "AUROC of wrong against right best items: 0.5 chance, 1 perfect",
    "wrong_aurc": "area under the risk-coverage curve, smaller is better; chance is the error rate",
    "wrong_excess_aurc": "excess AURC (E-AURC): wrong_aurc minus that of a perfect order",
    "wrong_gain": "prediction rejection ratio (PRR): fraction of a perfect order's gain, 0 chance, 1 perfect",
    "misses": f"Spearman with the fraction of the {NEAREST} best items that do not match",
    "risk_at_half": "error rate of the more certain half of the queries",
    "deciles": "Pearson correlation of decile of uncertainty and recall@1; negative if uncertain queries fail",
    "multiplicity": "Spearman with the true number of matches",
    "multiplicity_balanced": "as multiplicity, over sets of queries balanced over powers of two of this number",
    "caption_distance": "Spearman with the mean squared distance between an image's own captions, a proxy of ambiguity",
    "caption_words": "Spearman with 1 - mean word overlap (Jaccard) of an image's own captions; needs no model",
    "out_of_gallery": "AUROC of unanswerable queries, their true matches removed, against the same queries with them",
}
"""The figures that are measured of each estimator. Only the benchmark knows the ground truth behind them."""


@dataclass(frozen=True)
class DirectionTrust:
    """The figures of one direction."""

    n_queries: int  # number of queries with a true match; the others are left out
    n_gallery: int  # size of the gallery
    recall: Interval  # recall@1 of these queries
    chance: float  # recall@1 of a random order
    above_chance: bool  # whether the model ranks better than a random order; if not, no other figure means anything
    risk_best: Interval  # area under the risk-coverage curve of a perfect order; a random order has 1 - recall
    right_pairs: Interval
    precision: dict[str, Interval]  # at 10: "true", by "chance", of a "perfect" order, "predicted" by expected_misses
    n_out_of_gallery: int  # number of queries in the figure out_of_gallery
    estimators: dict[str, dict[str, Interval]]
    deciles: dict[str, list[float]]  # by name, recall@1 in ten bins from the most certain queries to the least


@dataclass(frozen=True)
class TrustReport:
    """The quality of a model's uncertainties on a split."""

    split: str  # name of the split
    distance: str  # name of the model's distance
    calibrated: bool  # whether the match logits were fitted on held-out pairs
    n_images: int  # number of images
    n_texts: int  # number of texts
    n_resamples: int  # number of bootstrap resamples of the intervals
    level: float  # coverage of the intervals
    seed: int  # seed of all random choices
    estimators: dict[str, dict[str, str]]  # by name {"estimates": formula, "kind", "cost"}
    directions: dict[str, DirectionTrust]  # figures by "t2i" and "i2t", or by one of them
    notes: list[str]  # omitted parts, with reasons
    hits: dict[str, list[HitFigures]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)


def described(estimators: Mapping[str, Estimator]) -> dict[str, dict[str, str]]:
    """Describe estimators for a report."""
    return {name: {"estimates": e.formula, "kind": e.kind, "cost": e.cost} for name, e in estimators.items()}


def measure_trust(
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    relevance: Relevance,
    matching: Matching,
    *,
    estimators: Mapping[str, Estimator] | None = None,
    texts: Sequence[str] | None = None,
    multiplicity: bool = False,
    proxies: Mapping[str, np.ndarray] | None = None,
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
        matching: the distance and the match logits.
        estimators: by name; by default all of ESTIMATORS that are defined for these queries and this gallery.
        texts: the n texts of the queries, if they are texts.
        multiplicity: whether a query's number of true items measures its ambiguity. Set it for data that lists every
            true pair, not for data in which each image only has its own five captions.
        proxies: by name in FIGURES, (n,) proxies of ambiguity; NaN leaves a query out.
        groups: (n,) numbers; queries with the same number are resampled together, see
            :func:`~sfumato.metrics.bootstrap.bootstrap`.
        n_resamples: number of bootstrap resamples of the intervals.
        level: coverage of the intervals.
        seed: of the resamples, the wrong pairs and all samples.

    Returns:
        All figures.

    Raises:
        ValueError: sizes do not fit, or no query has a true item.
    """
    if texts is not None and len(texts) != queries.n:
        raise ValueError(f"measure_trust: {len(texts)} texts for {queries.n} queries; give one for each")
    ranks = rank_relevant(queries, gallery, relevance, matching.oriented_distance)
    found_by = per_query_metrics(ranks, relevance)
    hit = found_by["recall@1"]
    kept = np.flatnonzero(~np.isnan(hit))
    if not len(kept):
        raise ValueError("measure_trust: no query has a true item; check that ids of images and texts fit together")
    chosen = usable_estimators(queries, gallery, texts=texts) if estimators is None else estimators
    scene = _Scene(
        queries=queries[kept], gallery=gallery, relevance=relevance.select_queries(kept), matching=matching,
        estimators=chosen, texts=None if texts is None else [texts[i] for i in kept.tolist()], hit=hit[kept],
        groups=None if groups is None else groups[kept], n_resamples=n_resamples, level=level, seed=seed,
    )  # fmt: skip
    by_chance = chance_metrics(relevance)
    recalls = {name: float(np.nanmean(found_by[name])) for name in by_chance.keys() & found_by}
    scores = estimate_uncertainty(scene.queries, gallery, matching, estimators=chosen, texts=scene.texts, seed=seed)
    # An estimator that is the same for all queries has no figures.
    informative = {name: u for name, u in scores.items() if np.any(u != u[0])}
    found = _of_errors(scene, informative) | (_of_multiplicity(scene, informative) if multiplicity else {})
    for proxy, values in (proxies or {}).items():
        found |= _of_proxy(scene, informative, proxy, values[kept])
    precision = dict[str, Interval]()
    if gallery.n >= NEAREST:
        n_right = np.bincount(relevance.query_of_item, weights=ranks < NEAREST, minlength=queries.n)[kept]
        found |= _of_proxy(scene, informative, "misses", NEAREST - n_right)
        counts = scene.relevance.counts
        numbers = {"true": n_right, "perfect": np.minimum(counts, NEAREST), "chance": NEAREST / gallery.n * counts}
        if "expected_misses" in scores:
            numbers["predicted"] = NEAREST * (1 - scores["expected_misses"])
        precision = scene.intervals({n: bootstrap.mean_statistic(each / NEAREST) for n, each in numbers.items()})
    n_removed, removed = _of_removed_items(scene, informative)
    found |= removed
    figures = {n: {f: i for f in FIGURES if (i := found.get(f"{n}/{f}")) and i.value is not None} for n in scores}
    bins = {n: RecallByUncertainty.of(bootstrap.average_ranks(u), scene.hit).bins for n, u in informative.items()}
    return DirectionTrust(
        n_queries=len(kept), n_gallery=gallery.n, recall=found["recall"], chance=by_chance["recall@1"],
        above_chance=beats_chance(recalls, by_chance, min(len(kept), gallery.n)), risk_best=found["best"],
        right_pairs=_right_pairs(scene), n_out_of_gallery=n_removed, precision=precision,
        estimators=figures, deciles={n: [b["recall"] for b in of] for n, of in bins.items()},
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Scene:
    """The queries that have a true item, and the data of their measurement."""

    queries: GaussianEmbedding
    gallery: GaussianEmbedding
    relevance: Relevance
    matching: Matching
    estimators: Mapping[str, Estimator]
    texts: Sequence[str] | None
    hit: np.ndarray
    groups: np.ndarray | None
    n_resamples: int
    level: float
    seed: int

    def intervals(self, statistics: Mapping[str, Statistic], index: np.ndarray | None = None) -> dict[str, Interval]:
        """Intervals of statistics of all queries, or of those at these positions."""
        groups = self.groups if self.groups is None or index is None else self.groups[index]
        return bootstrap.bootstrap(
            statistics, len(self.hit) if index is None else len(index), groups=groups,
            n_resamples=self.n_resamples, level=self.level, seed=self.seed,
        )  # fmt: skip


def error_statistics(u: np.ndarray, error: np.ndarray, best: Statistic | None = None) -> dict[str, Statistic]:
    """The figures of wrong best items, see FIGURES. u (n,), error (n,) 1 where the best item is wrong."""
    found = bootstrap.risk_coverage_statistics(u, error, best)
    own = {"wrong_aurc": found["aurc"], "wrong_excess_aurc": found["e_aurc"], "wrong_gain": found["prr"]}
    return {"wrong_auroc": bootstrap.auroc_statistic(u, error), **own}


def _of_errors(scene: _Scene, scores: Mapping[str, np.ndarray]) -> dict[str, Interval]:
    """The recall, the best risk, and the figures of wrong best items by "NAME/FIGURE"."""
    error = 1 - scene.hit
    best = bootstrap.remembered(bootstrap.aurc_statistic(error, error))
    statistics = {"recall": bootstrap.mean_statistic(scene.hit), "best": best}
    for name, u in scores.items():
        own = error_statistics(u, error, best) | {"risk_at_half": bootstrap.risk_statistic(u, error, 0.5)}
        own["deciles"] = bootstrap.decile_statistic(u, scene.hit)
        statistics |= {f"{name}/{figure}": statistic for figure, statistic in own.items()}
    return scene.intervals(statistics)


def _of_multiplicity(scene: _Scene, scores: Mapping[str, np.ndarray]) -> dict[str, Interval]:
    """Correlations with the number of true items."""
    counts, options = scene.relevance.counts, {"n_resamples": scene.n_resamples, "seed": scene.seed}
    found = _of_proxy(scene, scores, "multiplicity", counts)
    resampled = bootstrap.resampled_balanced_spearman(scores, counts, **options)
    for name, u in scores.items():
        value = bootstrap.balanced_spearman(u, counts)
        found[f"{name}/multiplicity_balanced"] = bootstrap.percentile_interval(value, resampled[name], scene.level)
    return found


def _of_proxy(scene: _Scene, scores: Mapping[str, np.ndarray], proxy: str, values: np.ndarray) -> dict[str, Interval]:
    """Correlations with a proxy of ambiguity, over the queries that have it."""
    known = np.flatnonzero(~np.isnan(values))
    found = {f"{name}/{proxy}": bootstrap.spearman_statistic(u[known], values[known]) for name, u in scores.items()}
    return scene.intervals(found, known)


def _of_removed_items(scene: _Scene, scores: Mapping[str, np.ndarray]) -> tuple[int, dict[str, Interval]]:
    """The number of queries with enough gallery after removal of their true items, and the figures of this removal."""
    enough = np.flatnonzero(scene.gallery.n - scene.relevance.counts >= NEAREST)
    if not len(enough):
        return 0, {}
    removed = estimate_uncertainty(
        scene.queries[enough], scene.gallery, scene.matching, without=scene.relevance.select_queries(enough),
        estimators={name: e for name, e in scene.estimators.items() if name in scores and e.needs_gallery},
        texts=None if scene.texts is None else [scene.texts[i] for i in enough.tolist()], seed=scene.seed,
    )  # fmt: skip
    statistics = {f"{n}/out_of_gallery": bootstrap.paired_auroc(scores[n][enough], u) for n, u in removed.items()}
    return len(enough), scene.intervals(statistics, enough)


def _right_pairs(scene: _Scene) -> Interval:
    """AUROC of distances of true pairs against wrong pairs."""
    pairs = random_pairs(scene.relevance, np.random.default_rng(scene.seed))
    if not len(pairs):
        return Interval(None, None, None)
    distance, gaps = scene.matching.oriented_distance, []
    for column in (1, 2):
        sides = scene.queries[pairs[:, 0]], scene.gallery[pairs[:, column]]
        # A sampled distance uses the same noise for true and wrong pairs.
        seeded = {}
        if distance.sampled:
            import torch

            seeded["generator"] = torch.Generator().manual_seed(scene.seed)
        gaps.append(as_numpy(distance.row(*sides, **seeded)).astype(np.float64))
    return scene.intervals({"right_pairs": bootstrap.paired_auroc(*gaps)}, pairs[:, 0])["right_pairs"]


def random_pairs(ground_truth: Relevance, random: np.random.Generator) -> np.ndarray:
    """Choose a true and a wrong item of each query at random. Returns (p, 3)."""
    m, counts = ground_truth.n_gallery, ground_truth.counts
    usable = np.flatnonzero(counts < m)
    nth = (random.random(len(usable)) * counts[usable]).astype(np.int64)
    right = ground_truth.indices[ground_truth.indptr[usable] + nth]
    keys = ground_truth.query_of_item * m + ground_truth.indices
    wrong = random.integers(m, size=len(usable))
    while (again := np.isin(usable * m + wrong, keys)).any():
        wrong[again] = random.integers(m, size=int(again.sum()))
    return np.stack([usable, right, wrong], axis=1)


def resampled_together(relevance: Relevance, groups: np.ndarray, of_text: bool) -> np.ndarray | None:
    """The groups of dependent queries, which a bootstrap samples together.

    relevance (n images, m texts), groups (n,).
    """
    if not of_text:
        return groups
    if many_to_many(relevance):
        return None
    ground_truth = relevance.transpose()
    together = ground_truth.n_gallery + np.arange(ground_truth.n_queries)
    together[ground_truth.query_of_item] = ground_truth.indices
    return together


def many_to_many(relevance: Relevance) -> bool:
    """Whether more than a tenth of the texts match several images; a few equal captions do not make data such."""
    return float((relevance.transpose().counts > 1).mean()) > 0.1
