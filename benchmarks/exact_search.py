"""Engine exact against the bare matrix product and FAISS flat, and its recall where float32 products lose the order.

The gallery has unit means and varying total variances. In each round every contender answers the same queries once, in
turn; the table has the shortest time of each and ratios of these. The contenders:

    product   q @ g.T or g @ q.T in float32 alone, the faster of the two orders: no result, the limit of float32
    faiss     IndexFlatL2 over lifted vectors
    exact     GaussianIndex, engine exact

    python benchmarks/exact_search.py [--json PATH] [--items 200000] [--d 512] [--threads 1] [--rounds 8]
                                      [--batches 1 20 256] [--recall]

`--recall` prints recall@10 against float64 on hard galleries, beside that of distances by one float32 product whose top
k are computed again in float32 ("product"), and skips the rest. Exits with 1 if a recall of engine exact is below 1.
"""

# mypy: disable-error-code="misc"
# Lambdas that hold their loop variables as defaults have no type that mypy infers.

import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from measuring import command_parser, in_turns, write_json
from torch import Tensor

from sfumato.arrays import Array, as_numpy
from sfumato.distances import get_distance
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.blocks import product_dtype
from sfumato.search.candidates import with_margin
from sfumato.search.exact import LiftedGallery, closest_candidates, closest_in_blocks, lift_gallery, lift_queries
from sfumato.search.index import GaussianIndex

K = 10


def unit(n: int, d: int, surface: int, generator: torch.Generator) -> GaussianEmbedding:
    """Unit means, in all directions alike or near a surface of few dimensions; total variances over a decade."""
    mean = torch.randn(n, d, generator=generator)
    if surface:
        plane = torch.randn(surface, d, generator=torch.Generator().manual_seed(5)) / surface**0.5
        mean = torch.randn(n, surface, generator=generator) @ plane + 0.5 * mean
    log_var = (torch.randn(n, 1, generator=generator) - 7).expand(n, d)
    return GaussianEmbedding(torch.nn.functional.normalize(mean, dim=1), log_var)


def by_product(lifted: LiftedGallery, queries: GaussianEmbedding, gallery: GaussianEmbedding) -> Array:
    """(n, K) positions by one float32 product, with a margin that is rescored in float32."""
    k = min(with_margin(K), gallery.n)
    blocks = ((start, as_numpy(block)) for start, block in lifted.distance_blocks(queries))
    near = closest_in_blocks(blocks, k, queries.n, gallery.n)[1]
    return closest_candidates(queries, gallery, near, lifted.distance)[1][:, :K]


def speed(items: int, d: int, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Times and ratios for each batch."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    generator, rows = torch.Generator().manual_seed(0), []
    gallery = unit(items, d, 0, generator)
    index = GaussianIndex.build(gallery, [str(i) for i in range(items)])
    start = time.perf_counter()
    index.nearest(gallery[:1], K)
    first = time.perf_counter() - start
    flat = faiss.IndexFlatL2(d + 1)
    flat.add(lift_gallery(index.embeddings, "csd", centre=index.centre))
    for batch in batches:
        queries = unit(batch, d, 0, generator)
        q, g, vectors = queries.mean, gallery.mean, lift_queries(queries, "csd", centre=index.centre).numpy()
        contenders = {
            "q @ g.T": lambda q=q, g=g: q @ g.T,
            "g @ q.T": lambda q=q, g=g: g @ q.T,
            "faiss": lambda v=vectors: flat.search(v, K),
            "exact": lambda q=queries: index.nearest(q, K),
        }
        times = {name: 1000 * min(seconds) for name, seconds in in_turns(contenders, rounds).items()}
        product = min(times["q @ g.T"], times["g @ q.T"])
        rows.append(
            {
                "items": items, "batch": batch, **times, "first_search_seconds": first,
                "of_product": times["exact"] / product, "of_faiss": times["exact"] / times["faiss"],
            }
        )  # fmt: skip
        print(
            f"{items:9,} {batch:4} product {product:8.1f}  faiss {times['faiss']:8.1f}  exact {times['exact']:8.1f} ms;"
            f" exact is {rows[-1]['of_product']:.2f} of product, {rows[-1]['of_faiss']:.2f} of faiss",
            flush=True,
        )
    return rows


def hard(name: str, n: int, d: int, generator: torch.Generator) -> GaussianEmbedding:
    """A gallery, or queries of the same kind, where float32 products lose the order."""
    noise = torch.randn(n, d, generator=generator)
    log_var = 0.1 * torch.randn(n, d, generator=generator) - 20
    if name == "two clusters 100 apart":
        side = torch.where(torch.arange(n) % 2 == 0, 100.0, 0.0).unsqueeze(1)
        return GaussianEmbedding(side + 0.01 * noise, log_var)
    if name.startswith("near-duplicates"):
        base = torch.randn(100, d, generator=torch.Generator().manual_seed(3))
        base = torch.nn.functional.normalize(base, dim=1)[torch.randint(100, (n,), generator=generator)]
        return GaussianEmbedding(
            torch.nn.functional.normalize(base + float(name[16:]) * noise / d**0.5, dim=1), log_var
        )
    decades = 6 * torch.rand(n, 1, generator=generator) - 3
    return GaussianEmbedding(torch.nn.functional.normalize(noise, dim=1), log_var + 14 + 2.302585 * decades)


HARD = ("two clusters 100 apart", "near-duplicates .003", "near-duplicates .001", "variances of six decades")


def recalls(items: int, d: int) -> list[dict[str, Any]]:
    """recall@10 of csd against float64."""
    rows, ids = [], [str(i) for i in range(items)]
    for name in HARD:
        generator = torch.Generator().manual_seed(0)
        gallery, queries = hard(name, items, d, generator), hard(name, 50, d, generator)
        index, truth = GaussianIndex.build(gallery, ids), list[Tensor]()
        wide, row = gallery.to(torch.float64), get_distance("csd").row
        for i in range(queries.n):
            query = queries[torch.full((items,), i)].to(torch.float64)
            truth.append(row(query, wide).sort(stable=True).indices[:K])
        lifted = LiftedGallery.of(lift_gallery(gallery, "csd", centre=index.centre), "csd", index.centre)
        found = {"product": by_product(lifted, queries, gallery), "exact": index.nearest(queries, K)[1]}
        wanted = torch.stack(truth)
        result = {
            n: float((wanted.unsqueeze(2) == torch.as_tensor(f).unsqueeze(1)).any(2).double().mean())
            for n, f in found.items()
        }
        rows.append({"gallery": name, "items": items, **result})
        print(f"{name:26} product {result['product']:.3f}  exact {result['exact']:.3f}", flush=True)
    return rows


def main() -> int:
    """Measure, print, write JSON."""
    parser = command_parser(__doc__)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 20, 256])
    parser.add_argument("--recall", action="store_true", help="measure recall on hard galleries instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"products in {product_dtype()}, {arguments.threads} threads")
    if arguments.recall:
        rows = recalls(arguments.items, arguments.d)
    else:
        rows = speed(arguments.items, arguments.d, arguments.batches, arguments.rounds)
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        about = {"torch": torch.__version__, "faiss": version("faiss-cpu")}
        write_json(arguments.json, {"settings": settings | about, "rows": rows})
    return int(any(row.get("exact", 1) < 1 for row in rows if "gallery" in row))


if __name__ == "__main__":
    sys.exit(main())
