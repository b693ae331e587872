"""The response of uncertainties to corrupted queries: images erased or blurred, words dropped or replaced.

`python -m papers analyse` follows an estimator, and the referee the methods for frozen models.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from papers.uncertainty.damage import IMAGE_CORRUPTIONS, TEXT_CORRUPTIONS, Corruption
from sfumato.data.images import ImageSource
from sfumato.data.pairs import PairData
from sfumato.encoders.encoder_protocol import TwoTowers
from sfumato.errors import progress_bar
from sfumato.evaluation.estimators import Estimator, Matching, estimate_uncertainty
from sfumato.gaussian import GaussianEmbedding
from sfumato.ids import Side
from sfumato.metrics.bootstrap import Interval, Statistic, bootstrap, mean_statistic, paired_auroc, spearman
from sfumato.metrics.relevance import Relevance
from sfumato.metrics.retrieval import per_query_metrics
from sfumato.search.exact import rank_relevant


@dataclass(frozen=True, eq=False)
class CorruptedInputs:
    """Some queries that are corrupted in one way."""

    name: str  # of the corruption
    index: np.ndarray  # (k,) positions of these queries among all
    strengths: tuple[float, ...]  # ascending, without 0
    apply: Callable[[int, float], Any]  # (position, strength) -> the corrupted text, or bytes of the image

    def inputs(self) -> Iterator[list[Any]]:
        """The corrupted queries of each strength."""
        for strength in self.strengths:
            yield [self.apply(int(i), strength) for i in self.index]


@dataclass(frozen=True, eq=False)
class Corrupted:
    """Some queries, embedded again from corrupted inputs."""

    name: str  # of the corruption
    index: np.ndarray  # (k,) positions of these queries among all
    strengths: tuple[float, ...]  # ascending, without 0, which is the clean input
    embeddings: tuple[GaussianEmbedding, ...]  # (k, d) embeddings for each strength


def not_corrupted(model: TwoTowers, side: Side) -> str | None:
    """Why a side has no corrupted queries: features cannot be corrupted."""
    features = (model.image if side == "image" else model.text).processor.reads
    return features and f"{side}s are not corrupted: the model reads {features}, which cannot be corrupted"


def corrupted_inputs(
    side: Side, items: Sequence[ImageSource] | Sequence[str], usable: np.ndarray, n: int, seed: int
) -> list[CorruptedInputs]:
    """Some queries of a side, corrupted in every way that suits them. usable (q,)."""
    found = []
    for name, c in (IMAGE_CORRUPTIONS if side == "image" else TEXT_CORRUPTIONS).items():
        suited = usable & np.array([c.suits(item) for item in items], bool)
        index = np.sort(np.random.default_rng([seed, 2]).permutation(np.flatnonzero(suited))[:n])

        def apply(i: int, strength: float, c: Corruption = c) -> Any:
            item = items[i]
            return c.apply(item if isinstance(item, str) else item.read_bytes(), strength, (seed, i))

        found.append(CorruptedInputs(name, index, c.strengths, apply))
    return [c for c in found if len(c.index)]


def corrupted_queries(
    model: TwoTowers, side: Side, data: PairData, usable: np.ndarray, n: int, seed: int
) -> list[Corrupted]:
    """Embed some queries of a split again, see :func:`corrupted_inputs`."""
    kinds, result = corrupted_inputs(side, data.images if side == "image" else data.texts, usable, n, seed), []
    embed = model.embed_images if side == "image" else model.embed_texts
    with progress_bar(f"corrupting {side}s", sum(len(c.index) * len(c.strengths) for c in kinds)) as go:
        for c in kinds:
            embedded = []
            for inputs in c.inputs():
                embedded.append(embed(inputs))
                go(len(c.index))
            result.append(Corrupted(c.name, c.index, c.strengths, tuple(embedded)))
    return result


def follow_corruption(
    corrupted: Corrupted,
    queries: GaussianEmbedding,
    gallery: GaussianEmbedding,
    relevance: Relevance,
    matching: Matching,
    estimator: Estimator,
    *,
    groups: np.ndarray | None = None,
    n_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """The response of an estimator to one corruption of k queries with a match, as plain values.

    Strengths ascend from 0, the clean inputs. At each stand recall@1, which shows whether the queries become harder,
    and the mean uncertainty, None where it is infinite. queries (n, d), gallery (m, d).
    """
    index, chosen = corrupted.index, {estimator.name: estimator}
    ground_truth = relevance.select_queries(index)
    steps, recalls = [], []
    for e in (queries[torch.from_numpy(index)], *corrupted.embeddings):
        steps.append(estimate_uncertainty(e, gallery, matching, estimators=chosen, seed=seed)[estimator.name])
        ranks = rank_relevant(e, gallery, ground_truth, matching.oriented_distance)
        recalls.append(float(per_query_metrics(ranks, ground_truth)["recall@1"].mean()))
    u, strengths = np.stack(steps), [0.0, *corrupted.strengths]
    figures = corruption_statistics(u, strengths)
    means = {str(s): mean_statistic(values) for s, values in enumerate(u) if np.isfinite(values).all()}
    together = None if groups is None else groups[index]
    found = bootstrap(figures | means, len(index), n_resamples=n_resamples, seed=seed, groups=together)
    mean = [asdict(found.get(str(s), Interval(None, None, None))) for s in range(len(u))]
    response = {name: asdict(found[name]) for name in figures}
    return {"n": len(index), "strengths": strengths, "recall": recalls, "mean": mean} | response


def corruption_statistics(u: np.ndarray, strengths: Sequence[float]) -> dict[str, Statistic]:
    """The figures of one uncertainty of k queries that are corrupted more and more. u (s, k)."""
    correlations = [spearman(np.array(strengths), values) for values in u.T]
    # np.diff of two infinities is NaN, so compare instead.
    falls, rises = (u[1:] < u[:-1]).any(0), u[-1] > u[0]
    return {
        "spearman": mean_statistic(np.nan_to_num(np.array(correlations))),
        "rises": mean_statistic(rises + 0.5 * (u[-1] == u[0])),
        "monotone": mean_statistic(rises & ~falls),
        "auroc": paired_auroc(u[0], u[-1]),
    }
