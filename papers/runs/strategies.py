"""Comparison of retrieval strategies: exact by any distance, and FAISS with re-ranking or lifting.

The papers compare them in table C.7 of PCME++ and in table E.1 of PCME.

A strategy that searches an index lists only the first items of a gallery. Recall@K, R-Precision and mAP@R need the
first K or R items, so a strategy asks the index for the largest of these numbers. The median and mean rank need whole
rankings, so they are reported for exact strategies alone. No metric is ever computed on a list that is too short.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.distances.distance import Distance
from sfumato.evaluation.benchmarks import figures, rank
from sfumato.evaluation.ground_truth import GroundTruth
from sfumato.evaluation.protocols import EmbeddedSet, Embeddings, EvaluationOptions, distance_of_score
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import MATCH_PROBABILITY
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import RANK_METRICS, UNLISTED, ranks_from_lists
from sfumato.search.candidates import with_margin
from sfumato.search.exact import closest_candidates, gallery_centre, lift_gallery, lift_queries
from sfumato.search.index import GaussianIndex
from sfumato.search.stores.local_files import require_faiss

ENGINES = ("exact", "ivf", "hnsw")
"""Engines of the strategies with an index: exact search, and two of FAISS."""

LISTED_AT_LEAST = 10
"""Least number of items in a list, if the gallery has as many."""


@dataclass(frozen=True)
class Strategy:
    """A retrieval strategy."""

    name: str  # key in STRATEGIES
    label: str  # its name in a table; the name of table C.7 if it is listed there
    distance: str  # the distance that orders the final results: a name in DISTANCES, or "match_probability"
    indexed: str | None = None  # the distance of the FAISS index; None ranks the whole gallery exactly
    reranks: bool = False  # whether the first `candidates` that FAISS finds are ordered by distance


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("mean", "Mean only", "squared_l2"),
        Strategy("wasserstein2", "2-Wasserstein", "wasserstein2"),
        Strategy("csd", "CSD", "csd"),
        Strategy("faiss_mean", "FAISS (mean only)", "squared_l2", "squared_l2"),
        Strategy("faiss_rerank", "FAISS (mean) + csd re-ranking", "csd", "squared_l2", True),
        Strategy("faiss_lifted", "FAISS (lifted csd)", "csd", "csd"),
        Strategy("kl", "KL-divergence", "kl"),
        Strategy("js", "JS-divergence", "js"),
        Strategy("elk", "ELK", "elk"),
        Strategy("bhattacharyya", "Bhattacharyya", "bhattacharyya"),
        Strategy("average_l2", "Average L2", "average_l2"),
        Strategy("match_probability", "Match prob", MATCH_PROBABILITY),
    )
}
"""The five strategies of table C.7 (Chun 2024, C.5), lifted search (search/exact.py), and the other distances that
table E.1 of Chun et al., CVPR 2021, compares."""

STRATEGY_SETS: dict[str, tuple[str, ...]] = {
    "all": tuple(list(STRATEGIES)[:6]),
    "pcme": ("mean", "kl", "js", "elk", "bhattacharyya", "wasserstein2", "average_l2", "match_probability"),
}
"""Strategies by name of a set: "all" that scale to large galleries, and "pcme", those of its table E.1."""

_SCALING = tuple(STRATEGIES[name] for name in STRATEGY_SETS["all"])


@dataclass(frozen=True)
class FaissRanker:
    """A :class:`Ranker` that builds a FAISS index of each gallery and ranks by its lists."""

    strategy: Strategy  # one with an index
    engine: str = "ivf"
    candidates: int = 100  # number K of items that FAISS finds for re-ranking
    at_least: int = LISTED_AT_LEAST

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"FaissRanker: unknown engine {self.engine!r}; known: {', '.join(ENGINES)}")

    def lists(self, queries: GaussianEmbedding, gallery: GaussianEmbedding, k: int) -> Tensor:
        """The first items of each query: `candidates` by distance if the strategy re-ranks, then those of FAISS."""
        if not self.strategy.reranks:
            return self._nearest(queries, gallery, k)
        found = self._nearest(queries, gallery, max(k, self.candidates))
        first, rest = found[:, : self.candidates], found[:, self.candidates :]
        first = closest_candidates(queries, gallery, first.to(queries.device), self.strategy.distance)[1]
        return torch.cat([first.cpu(), rest], dim=1)[:, :k]

    def _nearest(self, queries: GaussianEmbedding, gallery: GaussianEmbedding, k: int) -> Tensor:
        """(n, k) positions that the engine finds, in the order of their exact distances."""
        indexed, k = self.strategy.indexed or "", min(k, gallery.n)
        if self.engine == "exact":
            names = [str(i) for i in range(gallery.n)]
            return torch.as_tensor(GaussianIndex.build(gallery, names, distance=indexed).nearest(queries, k)[1])
        queries, gallery = (each.numpy().to("float32") for each in (queries, gallery))
        centre, c = gallery_centre(gallery), min(with_margin(k), gallery.n)
        index = _faiss_index(lift_gallery(gallery, indexed, centre=centre), self.engine, c)
        wanted = lift_queries(queries, indexed, centre=centre)
        found = index.search(wanted, c)[1]
        if (found < 0).any():  # Its lists have too few items.
            index.nprobe = index.nlist
            found = index.search(wanted, c)[1]
        return torch.from_numpy(closest_candidates(queries, gallery, found, indexed)[1][:, :k])

    def __call__(
        self, queries: GaussianEmbedding, gallery: GaussianEmbedding, relevance: Relevance, distance: str | Distance
    ) -> np.ndarray:
        """See :class:`~sfumato.evaluation.protocols.Ranker`."""
        if queries.n == 0:
            return np.full(len(relevance.indices), UNLISTED)
        k = max(self.at_least, int(relevance.totals.max(initial=0)))
        found = self.lists(queries, gallery, k)
        return ranks_from_lists(list(found.numpy()), relevance)[0]


def _faiss_index(vectors: np.ndarray, engine: str, k: int) -> Any:
    """Lists by a seeded k-means, of which a search reads an eighth and at least 8, or a graph. vectors (m, e)."""
    faiss, (m, e) = require_faiss(), vectors.shape
    if engine == "ivf":
        n_lists = max(1, min(round(math.sqrt(m)), m // 39))
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(e), e, n_lists)
        index.cp.seed, index.nprobe = 0, min(n_lists, max(8, math.ceil(n_lists / 8)))
        index.train(vectors)
    else:
        index = faiss.IndexHNSWFlat(e, 32)
        index.hnsw.efConstruction, index.hnsw.efSearch = 200, max(64, k)
    index.add(vectors)
    return index


@dataclass(frozen=True, eq=False)
class StrategyResult:
    """The result of one strategy."""

    strategy: Strategy  # the strategy
    figures: dict[str, dict[str, Any]]  # of :func:`~sfumato.evaluation.benchmarks.figures`
    seconds: float  # time to rank both directions of all ground truths, in seconds, including the time to build indexes

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {"label": self.strategy.label, "seconds": self.seconds, "truths": self.figures}


def choose_strategies(names: str) -> list[Strategy]:
    """Choose strategies by name."""
    known = ", ".join((*STRATEGY_SETS, *STRATEGIES))
    wanted = STRATEGY_SETS.get(names.strip()) or [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in STRATEGIES:
            raise ValueError(f"unknown strategy {name!r}; known: {known}")
    if not wanted or len(set(wanted)) != len(wanted):
        raise ValueError(f"strategies {names!r}: name at least one, each once; known: {known}")
    return [STRATEGIES[name] for name in wanted]


def evaluate_strategies(
    embedded: EmbeddedSet,
    strategies: Iterable[Strategy] = _SCALING,
    *,
    match_probability: Distance | None = None,
    engine: str = "ivf",
    candidates: int = 100,
    evaluation: EvaluationOptions | None = None,
) -> dict[str, StrategyResult]:
    """Evaluate several strategies on the same embeddings; those with FAISS have no median and mean rank.

    match_probability: of :func:`~sfumato.matching.match_probability_distance`, for the strategy of this name.
    """
    results = {}
    for strategy in strategies:
        start = time.perf_counter()
        ground_truths, ranker = list(embedded.ground_truths), None
        by = match_probability if strategy.distance == MATCH_PROBABILITY else None
        distance = distance_of_score(by or strategy.distance)
        assert distance is not None
        if strategy.indexed is None:
            distance = (evaluation or EvaluationOptions()).sampled(distance)
        else:
            ground_truths = [t.with_metrics(*(n for n in t.metrics if n not in RANK_METRICS)) for t in ground_truths]
            at_least = max(LISTED_AT_LEAST, *(_needed(ground_truth) for ground_truth in ground_truths))
            ranker = FaissRanker(strategy, engine, candidates, at_least)
        source = Embeddings(embedded.images, embedded.texts, distance, ranker)
        ranks = rank(source, embedded.image_ids, embedded.text_ids, ground_truths)
        seconds = time.perf_counter() - start
        results[strategy.name] = StrategyResult(strategy, figures(ranks), seconds)
    return results


def _needed(ground_truth: GroundTruth) -> int:
    """The required length of the lists for the reported recalls, and for R-Precision and mAP@R of single queries."""
    ks = [int(name.removeprefix("recall@")) for name in ground_truth.metrics if name.startswith("recall@")]
    return max(*ks, *(int(side.totals.max(initial=1)) for side in (ground_truth.i2t, ground_truth.t2i)))
