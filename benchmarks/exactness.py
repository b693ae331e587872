"""How much of the true csd top 10 each store finds: lifted vectors, means alone, and means with re-ranking.

At equal cost, i.e. the same store, the same engine with the same effort, and K candidates:

    lifted   the store holds [mean, sqrt(total variance)]; of K candidates the closest ten by csd are the answer
    means    the store holds the means; K candidates are re-ranked by csd with their variances (Chun 2024, C.5);
             with K = 10 nothing is re-ranked in or out: that row is the mean-only index

The truth is csd in float64 over all items; of equally far ones any is right. Both ways answer the same queries in the
same run.

    python benchmarks/exactness.py --items 20000 --d 512 --variances small large heavy
        --stores file:?engine=flat file:?engine=hnsw
    python benchmarks/exactness.py --gallery images.safetensors --queries-from texts.safetensors --name emoji ...

A store's relative path starts in a scratch folder; NAME in a URL is replaced by a name for the table or collection.
"""

import argparse
import platform
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import command_parser, write_json
from torch import Tensor

from sfumato.errors import progress_bar
from sfumato.gaussian import load_embeddings
from sfumato.search.stores.protocol import Records, VectorStore, anchored, create_store

TOP = 10
WAYS = "lifted", "means"
CANDIDATES = (10, 20, 50, 100, 200, 500, 1000)
LATENT = 32
VARIANCES = {"small": (0.01, 0.5), "large": (4.0, 0.5), "heavy": (0.4, 2.0)}
"""Median of the total variances of means of length one, and the deviation of their logarithm."""


@dataclass(frozen=True, eq=False)
class Data:
    """(m, d) means and (m,) total variances of a gallery, (n, d) means of queries: all that csd orders by."""

    name: str
    mean: Tensor
    total_variance: Tensor
    queries: Tensor

    @property
    def centre(self) -> Tensor:
        return self.mean.mean(0)

    def limits(self) -> Tensor:
        """(n,) float64 csd, less the query's variance, of each query's item number TOP, block by block."""
        centre = self.centre.double()
        queries = self.queries.double() - centre
        best = queries.new_full((len(queries), TOP), torch.inf)
        for start in range(0, len(self.mean), 50_000):
            items = self.mean[start : start + 50_000].double() - centre
            u = self.total_variance[start : start + 50_000].double()
            distance = queries.square().sum(1, keepdim=True) - 2 * queries @ items.T + items.square().sum(1) + u
            best = torch.cat([best, distance], 1).topk(TOP, largest=False).values
        return best.amax(1)

    def recall(self, found: Tensor, limits: Tensor) -> float:
        """Fraction of the TOP places filled by (n, TOP) positions within the limits; equally far items are as good."""
        items = found.clamp_min(0)
        distance = (self.mean[items].double() - self.queries.double().unsqueeze(1)).square().sum(2)
        inside = distance + self.total_variance[items].double() <= limits.unsqueeze(1) * (1 + 1e-9) + 1e-9
        return float((inside & (found >= 0)).double().mean())


def synthetic(items: int, d: int, n_queries: int, variances: str, seed: int) -> Data:
    """Unit means near a smooth surface, no clusters; log-normal total variances."""
    surface = torch.randn(LATENT, d, generator=torch.Generator().manual_seed(12345))
    generator = torch.Generator().manual_seed(seed)

    def unit(n: int) -> Tensor:
        mean = torch.randn(n, LATENT, generator=generator) @ surface
        return torch.nn.functional.normalize(mean.add_(torch.randn(n, d, generator=generator)), dim=1)

    median, tail = VARIANCES[variances]
    total = median * (tail * torch.randn(items, generator=generator)).exp()
    return Data(f"{items:,} x {d}, {variances} variances", unit(items), total, unit(n_queries))


def real(name: str, gallery: Path, queries: Path, n_queries: int, seed: int) -> Data:
    """Embeddings of a model, see save_embeddings."""
    items, asked = load_embeddings(gallery)[0].tensors(), load_embeddings(queries)[0].tensors()
    chosen = torch.randperm(asked.n, generator=torch.Generator().manual_seed(seed))[:n_queries]
    label = f"{name}, {items.n:,} x {items.d}"
    return Data(label, items.mean.float(), items.total_variance.float(), asked.mean[chosen].float())


def fill(store: VectorStore, data: Data, *, lifted: bool) -> float:
    """Store a gallery and build the engine; seconds."""
    start, batch = time.perf_counter(), 10_000
    with progress_bar(f"storing in {store.url}", len(data.mean)) as advance:
        for first in range(0, len(data.mean), batch):
            mean, u = data.mean[first : first + batch] - data.centre, data.total_variance[first : first + batch]
            vectors = torch.cat([mean, u.sqrt().unsqueeze(1)], 1) if lifted else mean
            ids = tuple(str(i) for i in range(first, first + len(mean)))
            store.upsert(Records(ids, vectors.numpy(), u.numpy(), ({},) * len(mean)))
            advance(len(mean))
    store.optimise()
    return time.perf_counter() - start


def answers(store: VectorStore, vectors: Tensor, candidates: int, *, lifted: bool) -> Tensor:
    """(n, TOP) positions: the candidates of the store, ordered by csd; -1 where it brought fewer."""
    found = torch.full((len(vectors), TOP), -1)
    for i, records in enumerate(store.search(vectors.numpy(), candidates)):
        distance = ((records.vectors - vectors[i].numpy()) ** 2).sum(1) + (0 if lifted else records.uncertainty)
        chosen = distance.argsort(kind="stable")[:TOP].tolist()
        found[i, : len(chosen)] = torch.tensor([int(records.ids[j]) for j in chosen])
    return found


def measure(data: Data, url: str, folder: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each number of candidates."""
    limits, d = data.limits(), data.mean.shape[1]
    stores, built = {}, {}
    for name in ("lifted", "means"):
        place = anchored(url.replace("NAME", f"exactness_{name}").replace("file:?", "file:store?"), folder / name)
        stores[name] = create_store(place, d + (name == "lifted"), f"benchmark {name}")
        built[name] = fill(stores[name], data, lifted=name == "lifted")
    queries = data.queries - data.centre
    vectors = {"lifted": torch.cat([queries, torch.zeros(len(queries), 1)], 1), "means": queries}
    for c in CANDIDATES:
        if c > len(data.mean):
            break
        row: dict[str, Any] = {"data": data.name, "store": url, "candidates": c}
        for name, store in stores.items():

            def once(store: VectorStore = store, name: str = name, c: int = c) -> Tensor:
                return answers(store, vectors[name], c, lifted=name == "lifted")

            found, seconds = timed(once, repeats)
            row[name] = {
                "recall": data.recall(found, limits),
                "ms_per_query": 1000 * seconds / len(queries),
                "build_seconds": built[name],
            }
        yield row
    for store in stores.values():
        store.close()


def timed(function: Callable[[], Tensor], repeats: int) -> tuple[Tensor, float]:
    """Result and the shortest of a few wall times in seconds, after one to warm up."""
    result, best = function(), float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return result, best


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: for each gallery and store, recall by candidates, lifted / means re-ranked."""
    shown = (10, 20, 50, 100, 200, 1000)
    lines = [
        "| gallery | store | " + " | ".join(f"K = {c}" for c in shown) + " | ms a query, K = 100 |",
        "| --- | --- | " + " | ".join("---" for _ in shown) + " | --- |",
    ]
    before = ""
    for data, store in dict.fromkeys((row["data"], row["store"]) for row in rows):
        own = {row["candidates"]: row for row in rows if (row["data"], row["store"]) == (data, store)}
        pairs = [tuple(own[c][name]["recall"] for name in WAYS) if c in own else None for c in shown]
        cells = ["" if pair is None else " / ".join(_short(value) for value in pair) for pair in pairs]
        ms = " / ".join(f"{own[100][name]['ms_per_query']:.1f}" for name in WAYS) if 100 in own else ""
        lines.append(f"| {data if data != before else ''} | `{_named(store)}` | {' | '.join(cells)} | {ms} |")
        before = data
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def _named(store: str) -> str:
    """A store's URL without its host, table and folder."""
    return re.sub(r"table=[^&]*&|(?<=:)store(\.db)?|//[^?]*", "", store)


def not_better(rows: list[dict[str, Any]]) -> list[str]:
    """Where lifting does not find strictly more at equal cost, though there was more to find."""
    return [
        f"{row['data']}, {row['store']}, K = {row['candidates']}: lifted {row['lifted']['recall']:.4f},"
        f" means {row['means']['recall']:.4f}"
        for row in rows
        if row["lifted"]["recall"] <= row["means"]["recall"] and row["means"]["recall"] < 1
    ]


def main() -> int:
    """Measure, print, write."""
    parser = command_parser(__doc__)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--variances", nargs="*", choices=VARIANCES, default=list(VARIANCES))
    parser.add_argument("--gallery", type=Path, help="embeddings of a gallery instead of a synthetic one")
    parser.add_argument("--queries-from", type=Path, help="embeddings of its queries")
    parser.add_argument("--name", default="real", help="of that gallery")
    parser.add_argument("--stores", nargs="+", default=[f"file:?engine={e}" for e in ("flat", "hnsw")])
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    n, seed = arguments.queries, arguments.seed
    if arguments.gallery:
        galleries = [real(arguments.name, arguments.gallery, arguments.queries_from, n, seed)]
    else:
        galleries = [synthetic(arguments.items, arguments.d, n, v, seed) for v in arguments.variances]
    rows = run(arguments, galleries)
    print(table(rows))
    print("\nnot strictly better:", *(not_better(rows) or ["nowhere"]), sep="\n  ")
    return 0


def run(arguments: argparse.Namespace, galleries: Any) -> list[dict[str, Any]]:
    """All stores over all galleries, written after each."""
    import faiss

    faiss.omp_set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for data in galleries:
        for url in arguments.stores:
            with tempfile.TemporaryDirectory() as folder:
                for row in measure(data, url, Path(folder), arguments.repeats):
                    rows.append(row)
                    print(
                        f"{row['data']}  {url}  K {row['candidates']:5}  lifted {row['lifted']['recall']:.4f}"
                        f" {row['lifted']['ms_per_query']:.2f} ms  means {row['means']['recall']:.4f}"
                        f" {row['means']['ms_per_query']:.2f} ms",
                        file=sys.stderr,
                        flush=True,
                    )
            about = {
                "settings": {k: str(v) for k, v in vars(arguments).items()},
                "machine": platform.machine(),
                "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "rows": rows,
            }
            write_json(arguments.json, about)
    return rows


if __name__ == "__main__":
    sys.exit(main())
