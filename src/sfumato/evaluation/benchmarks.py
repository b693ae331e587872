"""Evaluation of embeddings, a score matrix or ranked lists against several ground truths at once.

Distances are computed once per direction, a block of queries at a time. The ranks that any ground truth needs are
counted while the block is in memory, and ranks that several ground truths share are counted once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from sfumato.distances import get_distance
from sfumato.evaluation.ground_truth import RECALLS, GroundTruth
from sfumato.evaluation.protocols import Ranker
from sfumato.evaluation.rank_plan import BenchmarkRanks, ListRanker, RankedLists, plan_ranks
from sfumato.gaussian import GaussianEmbedding
from sfumato.metrics.retrieval import Better, ScoreMatrix, score_blocks
from sfumato.search.exact import distance_blocks


def evaluate_benchmarks(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    distance: str = "csd",
    rank: Ranker | None = None,
    progress: Callable[[int], None] | None = None,
    memory_mb: float = 64.0,
) -> dict[str, dict[str, Any]]:
    """Evaluate embeddings against several ground truths.

    Args:
        images: (n, d) embeddings.
        texts: (m, d) embeddings.
        image_ids: n distinct ids. An item that is not in a ground truth is left out of its queries and gallery. COCO's
            file names are read as its image numbers.
        text_ids: m distinct ids.
        ground_truths: with distinct names.
        distance: name in DISTANCES to rank by.
        rank: the ranking function, such as a search over several processes; it is called for every gallery. None ranks
            in this process, by distances that are computed once per direction.
        progress: called with the number of queries just ranked, n + m in all; not called if rank is given.
        memory_mb: size of a block of distances, in MiB.

    Returns:
        {name of the ground truth: {"i2t": metrics, "t2i": metrics, "rsum": number}}. The rsum is recall@1 + recall@5 +
        recall@10 of both directions, at most 6; it is missing where a ground truth does not report these. Ground truths
        with averaged_as also stand under that name as their average.

    Raises:
        ValueError: sizes do not fit, names or ids repeat, or an id of a ground truth is missing.

    Example:
        >>> from sfumato.evaluation.ground_truth import ground_truth_from_pairs
        >>> embeddings = GaussianEmbedding.point(torch.eye(2))
        >>> pairs = [("a", "x"), ("b", "y")]
        >>> mine = ground_truth_from_pairs("mine", ["a", "b"], ["x", "y"], pairs, metrics=["recall@1"])
        >>> evaluate_benchmarks(embeddings, embeddings, ["a", "b"], ["x", "y"], [mine])["mine"]["i2t"]["recall@1"]
        1.0
    """
    ranks = rank_ground_truths(
        images, texts, image_ids, text_ids, ground_truths,
        distance=distance, rank=rank, progress=progress, memory_mb=memory_mb,
    )  # fmt: skip
    return benchmark_metrics(ranks)


def evaluate_score_matrix(
    scores: ScoreMatrix,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    better: Better,
    memory_mb: float = 64.0,
) -> dict[str, dict[str, Any]]:
    """Evaluate a matrix of scores against several ground truths.

    Args:
        scores: (n, m) images by texts: an array, a memory map or a tensor. Ties go to the earlier gallery item.
        image_ids: n distinct ids, see :func:`evaluate_benchmarks`.
        text_ids: m distinct ids.
        ground_truths: with distinct names.
        better: "larger" for similarities, "smaller" for distances.
        memory_mb: size of a block of scores, in MiB.

    Returns:
        As :func:`evaluate_benchmarks`.

    Raises:
        ValueError: as :func:`evaluate_benchmarks`, or a score is NaN.
    """
    ranks = rank_ground_truths_by_scores(
        scores, image_ids, text_ids, ground_truths, better=better, memory_mb=memory_mb
    )  # fmt: skip
    return benchmark_metrics(ranks)


def evaluate_ranked_lists(
    i2t: RankedLists,
    t2i: RankedLists,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    batch_size: int = 256,
) -> dict[str, dict[str, Any]]:
    """Evaluate ranked lists against several ground truths.

    Args:
        i2t: lists of texts for images, complete or only their beginnings.
        t2i: lists of images for texts.
        image_ids: n distinct ids of the images that were searched, see :func:`evaluate_benchmarks`.
        text_ids: m distinct ids of the texts that were searched.
        ground_truths: with distinct names.
        batch_size: number of queries whose lists are read at once.

    Returns:
        As :func:`evaluate_benchmarks`.

    Raises:
        ValueError: as :func:`evaluate_benchmarks`, or a query has no list, or a list repeats an item, holds an unknown
            one, or is too short for a metric: recall@K needs K items of the fold, R-Precision and mAP@R as many as are
            relevant.
    """
    ranks = rank_ground_truths_by_lists(i2t, t2i, image_ids, text_ids, ground_truths, batch_size=batch_size)
    return benchmark_metrics(ranks)


def benchmark_metrics(ranks: BenchmarkRanks) -> dict[str, dict[str, Any]]:
    """Compute the metrics of :func:`evaluate_benchmarks` from ranks.

    Args:
        ranks: output of :func:`rank_ground_truths` and similar functions.

    Returns:
        As :func:`evaluate_benchmarks`.

    Raises:
        ValueError: a list is too short for a metric, no query has a relevant item, or an average has the name of a
            ground truth.
    """
    result: dict[str, dict[str, Any]] = {}
    averages: dict[str, list[dict[str, Any]]] = {}
    for name, both in ranks.items():
        found: dict[str, Any] = {direction: of.metrics() for direction, of in both.items()}
        if all(set(RECALLS) <= set(found[direction]) for direction in both):
            found["rsum"] = sum(found[direction][recall] for direction in both for recall in RECALLS)
        result[name] = found
        if (average := next(iter(both.values())).ground_truth.averaged_as) is not None:
            averages.setdefault(average, []).append(found)
    for name, members in averages.items():
        if name in result:
            raise ValueError(f"benchmark_metrics: {name!r} is the name of a ground truth and of an average; rename one")
        result[name] = {}
        for key, value in members[0].items():
            if isinstance(value, dict):
                result[name][key] = {inner: float(np.mean([m[key][inner] for m in members])) for inner in value}
            else:
                result[name][key] = float(np.mean([m[key] for m in members]))
    return result


@torch.no_grad()
def rank_ground_truths(
    images: GaussianEmbedding,
    texts: GaussianEmbedding,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    distance: str = "csd",
    rank: Ranker | None = None,
    progress: Callable[[int], None] | None = None,
    memory_mb: float = 64.0,
) -> BenchmarkRanks:
    """Rank embeddings for several ground truths; see :func:`evaluate_benchmarks` for arguments and errors.

    Returns:
        The ranks from which :func:`benchmark_metrics` and the figures of single queries are computed.
    """
    ground_truths = list(ground_truths)
    result: BenchmarkRanks = {ground_truth.name: {} for ground_truth in ground_truths}
    for plan in plan_ranks(ground_truths, image_ids, text_ids, (images.n, texts.n)):
        queries, gallery = (images, texts) if plan.direction == "i2t" else (texts, images)
        oriented = get_distance(distance).for_direction(plan.direction)
        if rank is not None:
            for group in plan.groups:
                some, others = (
                    e[torch.from_numpy(index).to(e.device)]
                    for e, index in ((queries, group.rows), (gallery, group.gallery))
                )
                group.ranks = rank(some, others, group.relevance, oriented)
        else:
            blocks = distance_blocks(queries, gallery, oriented, memory_mb=memory_mb)
            for start, block in blocks:
                plan.count(start, block)
                if progress:
                    progress(len(block))
        plan.collect(result)
    return result


def rank_ground_truths_by_scores(
    scores: ScoreMatrix,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    better: Better,
    memory_mb: float = 64.0,
) -> BenchmarkRanks:
    """Rank by a score matrix for several ground truths; see :func:`evaluate_score_matrix` for arguments and errors.

    Returns:
        As :func:`rank_ground_truths`.
    """
    ground_truths = list(ground_truths)
    result: BenchmarkRanks = {ground_truth.name: {} for ground_truth in ground_truths}
    for plan in plan_ranks(ground_truths, image_ids, text_ids, tuple(int(size) for size in scores.shape)):
        side: Literal["rows", "columns"] = "rows" if plan.direction == "i2t" else "columns"
        for start, block in score_blocks(scores, better=better, queries=side, memory_mb=memory_mb):
            plan.count(start, block)
        plan.collect(result)
    return result


def rank_ground_truths_by_lists(
    i2t: RankedLists,
    t2i: RankedLists,
    image_ids: Sequence[str],
    text_ids: Sequence[str],
    ground_truths: Iterable[GroundTruth],
    *,
    batch_size: int = 256,
) -> BenchmarkRanks:
    """Rank by ranked lists for several ground truths; see :func:`evaluate_ranked_lists` for arguments and errors.

    Returns:
        As :func:`rank_ground_truths`.
    """
    ground_truths = list(ground_truths)
    result: BenchmarkRanks = {ground_truth.name: {} for ground_truth in ground_truths}
    for plan in plan_ranks(ground_truths, image_ids, text_ids, (len(image_ids), len(text_ids))):
        lists, queries, gallery = (i2t, image_ids, text_ids) if plan.direction == "i2t" else (t2i, text_ids, image_ids)
        ListRanker(lists, queries, gallery, plan.direction).rank(plan, batch_size=batch_size)
        plan.collect(result)
    return result
