"""Every distance matrix against the bare matrix product of the same size, without gradients.

    python benchmarks/distances.py [--n 1000] [--m 5000] [--d 512] [--repeats 3] [--json PATH]

Times are medians; ratios are within this one run. Other work on the same cores spoils multi-threaded times most: look
at the load that is reported, or set OMP_NUM_THREADS=1.
"""

import os
import statistics
from collections.abc import Callable

import torch
from measuring import command_parser, in_turns, write_json

from sfumato.distances import DISTANCES
from sfumato.gaussian import GaussianEmbedding


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """After one call that does not count."""
    return statistics.median(in_turns({"run": run}, repeats)["run"])


@torch.inference_mode()
def main() -> None:
    parser = command_parser(__doc__)
    for name, default in (("n", 1000), ("m", 5000), ("d", 512), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    x, y = (
        GaussianEmbedding(
            torch.randn(k, options.d, generator=generator), torch.randn(k, options.d, generator=generator) - 5
        )
        for k in (options.n, options.m)
    )
    base = median_seconds(lambda: x.mean @ y.mean.T, 5 * options.repeats)
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    print(f"{options.n} x {options.m} x {options.d}, {threads} threads, load {load:.1f}; product {base * 1000:.1f} ms")
    results = {}
    for name, distance in DISTANCES.items():
        quick = distance.name not in {"elk", "bhattacharyya", "average_l2"}
        seconds = median_seconds(lambda matrix=distance.matrix: matrix(x, y), options.repeats if quick else 1)  # type: ignore[misc]
        results[name] = {"seconds": seconds, "ratio": seconds / base}
        print(f"{name:<22}{seconds * 1000:10.1f} ms {seconds / base:8.1f} x product")
    about = {name: getattr(options, name) for name in ("n", "m", "d")}
    about |= {"threads": threads, "load": load, "product_seconds": base}
    write_json(options.json, {**about, "results": results})


if __name__ == "__main__":
    main()
