"""Search by lifted vectors against exact csd and the mean-only index with re-ranking (Chun 2024, appendix C.5).

Every strategy answers the same seeded queries on the same synthetic gallery; all ratios are within one run. `recall` is
the share of the true csd top k (float64) that is found. At equal FAISS cost (same engine, same effort, K candidates):

    lifted   FAISS over [mean, sqrt(total variance)] brings K candidates, the first k by csd are the answer
    means    FAISS over the means brings K candidates, their variances are read by key, the first k by csd are
             the answer

    python benchmarks/search.py [--json PATH] [--items 20000] [--queries 200] [--d 64] [--tail 1.0] [--threads 1]
                                [--seed 0]

Exits with 1 if flat lifted search misses a single item of the truth.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.search.exact import closest_candidates, gallery_centre, lift_gallery, lift_queries, top_k
from sfumato.search.index import GaussianIndex

K = 10
LATENT = 16
CANDIDATES = (10, 20, 50, 100, 200)


def synthetic(n: int, d: int, tail: float, seed: int) -> GaussianEmbedding:
    """Unit means near a smooth surface; total variances log-normal about 0.4, their logarithm with deviation `tail`.

    No clusters: their size would decide at which K the means suffice, and they would fit the lists of ivf too well.
    """
    surface = torch.randn(LATENT, d, generator=torch.Generator().manual_seed(12345))
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, LATENT, generator=generator) @ surface + torch.randn(n, d, generator=generator)
    total = (0.4 * (tail * torch.randn(n, 1, generator=generator)).exp()).clamp(1e-6, 1e4)
    share = torch.softmax(torch.randn(n, d, generator=generator), dim=1)
    return GaussianEmbedding(torch.nn.functional.normalize(mean, dim=1), (total * share).log())


def true_top(queries: GaussianEmbedding, gallery: GaussianEmbedding) -> Tensor:
    """(n, K) positions by csd in float64."""
    return top_k(queries.to(torch.float64), gallery.to(torch.float64), K)[1]


def recall(found: Tensor, ground_truth: Tensor) -> float:
    """Share of the truth among what was found."""
    return float((ground_truth.unsqueeze(2) == found.unsqueeze(1)).any(2).float().mean())


def faiss_index(vectors: Tensor, engine: str) -> Any:
    """A graph, or lists of which a search reads an eighth. vectors (m, e)."""
    m, e = vectors.shape
    n_lists = max(1, min(round(m**0.5), m // 39))
    index: Any = faiss.index_factory(e, "HNSW32" if engine == "hnsw" else f"IVF{n_lists},Flat")
    if engine == "ivf":
        index.nprobe = max(8, n_lists // 8)
        index.train(vectors.numpy())
    index.add(vectors.numpy())
    return index


def search_and_rerank(
    index: Any, vectors: Tensor, queries: GaussianEmbedding, gallery: GaussianEmbedding, c: int
) -> Tensor:
    """Candidates from FAISS, then the closest of them by csd."""
    found = torch.from_numpy(index.search(vectors.numpy(), c)[1])
    return closest_candidates(queries, gallery, found)[1][:, :K]


def nearest(index: GaussianIndex, queries: GaussianEmbedding) -> Tensor:
    """Positions that an index finds."""
    return index.nearest(queries, K)[1]


def timed(function: Callable[[], Tensor], repeats: int = 3) -> tuple[Tensor, float]:
    """Result and the shortest of a few wall times in seconds, after one to warm up."""
    result, best = function(), float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return result, best


def run(items: int, n_queries: int, d: int, tail: float, seed: int) -> dict[str, Any]:
    """All measurements."""
    gallery, queries = synthetic(items, d, tail, seed), synthetic(n_queries, d, tail, seed + 1)
    ground_truth, ids = true_top(queries, gallery), [str(i) for i in range(items)]
    index = GaussianIndex.build(gallery, ids)
    found, exact_seconds = timed(partial(nearest, index, queries))
    engines: dict[str, Any] = {
        "exact": {
            "recall": recall(found, ground_truth),
            "ms_per_query": 1000 * exact_seconds / n_queries,
            "speed_up": 1.0,
        }
    }
    return {"engines": engines, "equal_cost": equal_cost(queries, gallery, ground_truth)}


def equal_cost(queries: GaussianEmbedding, gallery: GaussianEmbedding, ground_truth: Tensor) -> list[dict[str, Any]]:
    """Lifted against means and re-ranking: same engine, same effort, same number of candidates."""
    centre = gallery_centre(gallery)
    rows = []
    for engine in ("hnsw", "ivf"):
        stores = {
            name: faiss_index(lift_gallery(gallery, distance, centre=centre), engine)
            for name, distance in NAMES.items()
        }
        for c in CANDIDATES:
            row: dict[str, Any] = {"engine": engine, "candidates": c}
            for name, distance in NAMES.items():
                store = stores[name]
                if engine == "hnsw":
                    store.hnsw.efSearch = c
                vectors = lift_queries(queries, distance, centre=centre)
                found, seconds = timed(partial(search_and_rerank, store, vectors, queries, gallery, c))
                row[name] = {"recall": recall(found, ground_truth), "ms_per_query": 1000 * seconds / queries.n}
            row["recall_gain"] = row["lifted"]["recall"] - row["means"]["recall"]
            row["time_ratio"] = row["lifted"]["ms_per_query"] / row["means"]["ms_per_query"]
            rows.append(row)
    return rows


NAMES = {"lifted": "csd", "means": "squared_l2"}


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description="Lifted search against exact csd and against means with re-ranking.")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--d", type=int, default=64)
    parser.add_argument("--tail", type=float, default=1.0, help="spread of the logarithm of the total variance")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    faiss.omp_set_num_threads(arguments.threads)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    start = time.perf_counter()
    result = run(arguments.items, arguments.queries, arguments.d, arguments.tail, arguments.seed)
    result = {
        "settings": settings
        | {"k": K, "torch": torch.__version__, "faiss": faiss.__version__, "machine": platform.machine()},
        **result,
        "seconds": time.perf_counter() - start,
    }
    print(f"{'engine':8} {'recall@10':>9} {'ms/query':>9} {'speed-up':>9}")
    for name, row in result["engines"].items():
        print(f"{name:8} {row['recall']:9.4f} {row['ms_per_query']:9.3f} {row['speed_up']:9.2f}")
    print(f"\n{'engine':8} {'K':>5} {'lifted':>9} {'means':>9} {'gain':>9} {'time ratio':>10}")
    for row in result["equal_cost"]:
        print(
            f"{row['engine']:8} {row['candidates']:5} {row['lifted']['recall']:9.4f} {row['means']['recall']:9.4f}"
            f" {row['recall_gain']:9.4f} {row['time_ratio']:10.2f}"
        )
    print(f"\n{result['seconds']:.1f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if result["engines"]["exact"]["recall"] < 1:
        print("search: exact search missed items of the exact csd top 10", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
