"""Strategies of retrieval side by side, as in table C.7 of PCME++: exact rankings, FAISS over means with and without re-ranking, lifted FAISS.

A strategy that searches an index lists only the first items of a gallery. Recall@K, R-Precision and mAP@R are defined by the first K
or R of them, so a strategy asks the index for as many as the longest of these; the median and mean rank need whole rankings and are
reported for exact strategies alone. Nothing is ever counted on a list that is too short.

It also knows the two similarities that are no distances of Gaussians: cosine, and the plain dot product of the means.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sfumato.distances import DISTANCES, Distance, get_distance
from sfumato.evaluation.benchmarks import benchmark_metrics, rank_ground_truths, rank_ground_truths_by_scores
from sfumato.evaluation.ground_truth import GroundTruth
from sfumato.evaluation.rank_plan import BenchmarkRanks
from sfumato.gaussian import GaussianEmbedding, accumulation_dtype
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import RANK_METRICS, UNLISTED, Better, ranks_from_lists
from sfumato.search.exact import closest_candidates
from sfumato.search.index import ENGINES, GaussianIndex
from sfumato.search.stores.faiss import FaissOptions

Similarity = Literal["cosine", "dot"]

SCORES = (*DISTANCES, *get_args(Similarity))
"""What can be ranked by: the distances, and two similarities of the means."""

LISTED_AT_LEAST = 10
"""Items that a list has at least, where the gallery has as many."""


@dataclass(frozen=True)
class Strategy:
    """A way to retrieve.

    Attributes:
        name: key in STRATEGIES.
        label: what it does, in the words of table C.7 where it stands there.
        distance: what its results are finally ordered by.
        indexed: distance that FAISS searches by; None ranks the whole gallery exactly.
        reranks: whether only the first `candidates` that FAISS brings are ordered by distance.
    """

    name: str
    label: str
    distance: str
    indexed: str | None = None
    reranks: bool = False


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("mean", "Mean only", "squared_l2"),
        Strategy("wasserstein2", "2-Wasserstein", "wasserstein2"),
        Strategy("csd", "CSD", "csd"),
        Strategy("faiss_mean", "FAISS (mean only)", "squared_l2", "squared_l2"),
        Strategy("faiss_rerank", "FAISS (mean) + csd re-ranking", "csd", "squared_l2", True),
        Strategy("faiss_lifted", "FAISS (lifted csd)", "csd", "csd"),
    )
}
"""The five of table C.7 (Chun 2024, C.5), and lifted search (search/lifting.py)."""


@dataclass(frozen=True)
class FaissRanker:
    """Ranks by lists from FAISS; a :class:`~sfumato.evaluation.protocols.Ranker` that builds an index of each gallery it is given.

    Attributes:
        strategy: one with an index.
        engine: "ivf" and "hnsw" are approximate, "flat" and "exact" find everything. The lists of ivf are seeded; hnsw's graph depends
            on the number of threads.
        candidates: K, how many FAISS brings to be re-ranked.
        at_least: length of a list at least; longer where a query has more relevant items, whole where the gallery is smaller.
        options: of the engine. A query for which it finds fewer items than a list needs, is answered exactly, as GaussianIndex does.

    Raises:
        ValueError: the strategy has no index, the engine is unknown, or a number is below 1.
    """

    strategy: Strategy
    engine: str = "ivf"
    candidates: int = 100
    at_least: int = LISTED_AT_LEAST
    options: FaissOptions | None = None

    def __post_init__(self) -> None:
        if self.strategy.indexed is None:
            raise ValueError(f"FaissRanker: {self.strategy.name} ranks exactly and has no index; use rank_relevant")
        if self.engine not in ENGINES:
            raise ValueError(f"FaissRanker: unknown engine {self.engine!r}; known: {', '.join(ENGINES)}")
        for name in ("candidates", "at_least"):
            if getattr(self, name) < 1:
                raise ValueError(f"FaissRanker: {name} must be at least 1, got {getattr(self, name)}")

    def lists(self, queries: GaussianEmbedding, gallery: GaussianEmbedding, k: int) -> Tensor:
        """(n, min(k, m)) gallery positions of the first k items of each query.

        Of a strategy that re-ranks, the first `candidates` of FAISS ordered by distance; those behind them stay as FAISS brought them.
        """
        index = GaussianIndex.build(
            gallery,
            [str(i) for i in range(gallery.n)],
            distance=self.strategy.indexed or "",
            engine=self.engine,
            options=self.options,
        )
        if not self.strategy.reranks:
            return index.nearest(queries, k)[1]
        found = index.nearest(queries, max(k, self.candidates))[1]
        first, rest = found[:, : self.candidates], found[:, self.candidates :]
        first = closest_candidates(queries, gallery, first.to(queries.device), self.strategy.distance)[1]
        return torch.cat([first.cpu(), rest], dim=1)[:, :k]

    def __call__(
        self,
        queries: GaussianEmbedding,
        gallery: GaussianEmbedding,
        relevance: Relevance,
        distance: str | Distance,
    ) -> np.ndarray:
        """(p,) ranks from 0 of all relevant items; UNLISTED for what is not among the first.

        Args:
            queries, gallery, relevance: see Ranker.
            distance: must be the strategy's.

        Raises:
            ValueError: another distance is asked for.
        """
        if get_distance(distance).name != self.strategy.distance:
            raise ValueError(
                f"{self.strategy.name}: its lists are in the order of {self.strategy.distance}, not of {get_distance(distance).name!r}"
            )
        if queries.n == 0:
            return np.full(len(relevance.indices), UNLISTED)
        k = max(self.at_least, int(relevance.totals.max(initial=0)))
        found = self.lists(queries, gallery, k)
        return ranks_from_lists(list(found.numpy()), relevance)[0]


@dataclass(frozen=True, eq=False)
class SimilarityMatrix:
    """The similarities of all images and texts, computed as they are asked for: a ScoreMatrix that is never whole in memory.

    Attributes:
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        kind: "dot", the product of the means as they are, or "cosine", that of means scaled to length 1.

    Raises:
        ValueError: the kind is unknown, or d differs.
    """

    images: GaussianEmbedding
    texts: GaussianEmbedding
    kind: Similarity

    def __post_init__(self) -> None:
        if self.kind not in get_args(Similarity):
            raise ValueError(f"SimilarityMatrix: unknown kind {self.kind!r}; known: {', '.join(get_args(Similarity))}")
        if self.images.d != self.texts.d:
            raise ValueError(
                f"SimilarityMatrix: images have {self.images.d} dimensions, texts {self.texts.d}; they must have as many"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.images.n, self.texts.n

    def __getitem__(self, index: Any) -> Tensor:
        """A block of rows, or of rows and columns, by slices; in float32 or the means' own higher precision."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        dtype = torch.promote_types(*(accumulation_dtype(e.dtype) for e in (self.images, self.texts)))
        a, b = self.images.mean[rows].to(dtype), self.texts.mean[columns].to(dtype)
        if self.kind == "cosine":
            a, b = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1)
        return a @ b.T


@torch.no_grad()
def rank_ground_truths_by(
    score: str,
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
) -> BenchmarkRanks:
    """:func:`~sfumato.evaluation.benchmarks.rank_ground_truths` by any of SCORES.

    Args:
        score: a name in DISTANCES, "cosine" or "dot".
        images, texts, image_ids, text_ids, truths: see there.

    Raises:
        ValueError: the score is unknown, and as there.
    """
    if score in get_args(Similarity):
        matrix = SimilarityMatrix(images, texts, "cosine" if score == "cosine" else "dot")
        better: Better = "larger"
        return rank_ground_truths_by_scores(matrix, image_ids, text_ids, ground_truths, better=better)
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}; known: {', '.join(SCORES)}")
    return rank_ground_truths(images, texts, image_ids, text_ids, ground_truths, distance=get_distance(score).name)


@dataclass(frozen=True, eq=False)
class StrategyResult:
    """What a strategy reached.

    Attributes:
        strategy: which.
        ranks: by truth and direction.
        figures: of :func:`~sfumato.evaluation.benchmarks.evaluate_benchmarks`.
        seconds: of ranking both directions of all truths, building of indexes included.
    """

    strategy: Strategy
    ranks: BenchmarkRanks
    figures: dict[str, dict[str, Any]]
    seconds: float


def choose_strategies(names: str) -> list[Strategy]:
    """Strategies from "all" or names with commas between them.

    Raises:
        ValueError: a name is unknown or occurs twice, or there is none.

    Example:
        >>> [s.name for s in choose_strategies("csd,mean")]
        ['csd', 'mean']
    """
    wanted = list(STRATEGIES) if names.strip() == "all" else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in STRATEGIES:
            raise ValueError(f"unknown strategy {name!r}; known: all, {', '.join(STRATEGIES)}")
    if not wanted or len(set(wanted)) != len(wanted):
        raise ValueError(f"strategies {names!r}: name at least one, each once; known: all, {', '.join(STRATEGIES)}")
    return [STRATEGIES[name] for name in wanted]


def evaluate_strategies(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    strategies: Iterable[Strategy] = tuple(STRATEGIES.values()),
    *,
    engine: str = "ivf",
    candidates: int = 100,
    options: FaissOptions | None = None,
) -> dict[str, StrategyResult]:
    """Evaluate several strategies on the same embeddings.

    Args:
        images, texts, image_ids, text_ids, truths: see :func:`~sfumato.evaluation.benchmarks.evaluate_benchmarks`.
        strategies: of STRATEGIES.
        engine, candidates, options: of the strategies with FAISS, see :class:`FaissRanker`.

    Returns:
        By name. FAISS strategies have no median and mean rank; a truth that reports nothing else is refused.

    Raises:
        ValueError: as there, or an engine or number does not fit.
        UserError: FAISS is not installed.
    """
    chosen, results = list(ground_truths), {}
    ids = (image_ids, text_ids)
    for strategy in strategies:
        start = time.perf_counter()
        if strategy.indexed is None:
            ranks = rank_ground_truths(images, texts, *ids, chosen, distance=strategy.distance)
        else:
            listed = [_without_rank_metrics(ground_truth) for ground_truth in chosen]
            at_least = max(LISTED_AT_LEAST, *(_needed(ground_truth) for ground_truth in listed))
            ranker = FaissRanker(strategy, engine, candidates, at_least, options)
            ranks = rank_ground_truths(images, texts, *ids, listed, distance=strategy.distance, rank=ranker)
        seconds = time.perf_counter() - start
        results[strategy.name] = StrategyResult(strategy, ranks, benchmark_metrics(ranks), seconds)
    return results


def _without_rank_metrics(ground_truth: GroundTruth) -> GroundTruth:
    kept = [name for name in ground_truth.metrics if name not in RANK_METRICS]
    if not kept:
        raise ValueError(
            f"{ground_truth.name} reports {', '.join(ground_truth.metrics)} alone, which lists of FAISS do not determine; add recall@K"
        )
    return ground_truth.with_metrics(*kept)


def _needed(ground_truth: GroundTruth) -> int:
    """How many items of a list any figure of the truth looks at: those it reports, and R-Precision and mAP@R of single queries."""
    ks = [int(name.removeprefix("recall@")) for name in ground_truth.metrics if name.startswith("recall@")]
    return max(*ks, *(int(side.totals.max(initial=1)) for side in (ground_truth.i2t, ground_truth.t2i)))
