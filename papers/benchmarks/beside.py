"""Does a probabilistic model complement a deterministic engine (PCME, 1)? A ranking by both, and who knows its errors.

    python -m papers.benchmarks.beside ENGINE OTHER [ENGINE OTHER]...

Runs on the same data; further pairs are further seeds. Both models' distances are standardised by query and added.
"""

import sys
from typing import get_args

import numpy as np

from sfumato.distances.distance import Distance
from sfumato.evaluation.protocols import EmbeddedSplit
from sfumato.ids import Direction
from sfumato.metrics.bootstrap import auroc
from sfumato.models.embed import embed_split, load_split
from sfumato.models.run import load_run
from sfumato.workflows.evaluation import over_seeds


def figures(engine: np.ndarray, other: np.ndarray, truth: np.ndarray, variance: np.ndarray) -> dict[str, float]:
    """Recall@1 in per cent, and AUROC of the engine's wrong first hits by the numbers that may tell them.

    engine, other, truth: (q, g) distances and matches; variance: (q,) of the queries by the other model.
    """
    a, b = ((x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) for x in (engine, other))
    row, first = np.arange(len(a)), a.argmin(1)
    ranked = {"engine": a, "other": b, "both": a + b}
    found = {f"recall@1, {name}": 100 * float(truth[row, x.argmin(1)].mean()) for name, x in ranked.items()}
    nearest, second = np.partition(engine, 1)[:, :2].T
    numbers = {"variance": variance, "other's distance": b[row, first], "engine's margin": nearest - second}
    return found | {f"AUROC, {name}": auroc(u, ~truth[row, first]) for name, u in numbers.items()}


def read(folder: str) -> tuple[Distance, EmbeddedSplit]:
    """How a run ranks, and its test split."""
    run = load_run(folder)
    split = load_split(run.model, run.recipe.data, "test")
    return run.ranking_distance(), EmbeddedSplit(*embed_split(run.model, split), split.data.relevance())


def main() -> None:
    rows: dict[Direction, list[dict[str, float]]] = {}
    for pair in zip(map(read, sys.argv[1::2]), map(read, sys.argv[2::2]), strict=True):
        for direction in get_args(Direction):
            both = [(by.for_direction(direction), side.query(direction)) for by, side in pair]
            engine, other = (by.matrix(q.queries, q.gallery).numpy() for by, q in both)
            truth, variance = both[0][1].relevance.to_dense(), both[1][1].queries.total_variance.numpy()
            rows.setdefault(direction, []).append(figures(engine, other, truth, variance))
    for direction, found in rows.items():
        print(direction, {name: str(value) for name, value in over_seeds(found).items()})


if __name__ == "__main__":
    main()
