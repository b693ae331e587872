"""The match loss, forward and backward, against the broadcast form and the bare matrix product: time and peak memory.

    python benchmarks/match_loss.py [--b 512] [--d 1024] [--repeats 20] [--rounds 3] [--json PATH]
    python benchmarks/match_loss.py --large [--b 65536] [--d 512]

Each form runs in processes of its own, so that peak memory is its own, and in turn with the others; times are medians.
Ratios are of processor time, which other work on the same cores spoils less than it spoils time on the clock; look at
the load that is reported, and set OMP_NUM_THREADS=1. "product" sums the product, so its gradient is a matrix of ones.
The broadcast form is left out where there is too little memory for it.

--large takes the match loss with pseudo-positives once, with matches as a sparse matrix: the matrix of the distances
alone would take 17 GB.
"""

import argparse
import json
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import command_parser, of_process, write_json
from torch import Tensor

from sfumato.arrays import Array
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions

FORMS = ("product", "loss", "loss with pseudo-positives", "broadcast")


def inputs(b: int, d: int) -> tuple[Tensor, ...]:
    """Means and log variances of both sides, as leaves."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(b, d, generator=generator) for _ in range(4)]
    tensors = [torch.nn.functional.normalize(t, dim=1) if i % 2 == 0 else t - 7 for i, t in enumerate(tensors)]
    return tuple(t.requires_grad_() for t in tensors)


def broadcast_loss(m1: Tensor, l1: Tensor, m2: Tensor, l2: Tensor, match: Tensor) -> Tensor:
    """The same match loss through an (n, m, d) cube, twice: once for the means and once for the variances."""
    mean_part = ((m1.unsqueeze(1) - m2.unsqueeze(0)) ** 2).sum(-1)
    variance_part = (l1.exp().unsqueeze(1) + l2.exp().unsqueeze(0)).sum(-1)
    return 2 * torch.nn.functional.binary_cross_entropy_with_logits(5 - 5 * (mean_part + variance_part), match)


def step(form: str, b: int, d: int) -> Callable[[], Array]:
    """One forward and backward pass; returns the value."""
    m1, l1, m2, l2 = inputs(b, d)
    match = torch.sparse_coo_tensor(torch.arange(b).expand(2, -1), torch.ones(b), (b, b), check_invariants=True)
    if form != "large":
        match = match.to_dense()

    def value() -> Array:
        if form == "product":
            return (m1 @ m2.T).sum()
        if form == "broadcast":
            return broadcast_loss(m1, l1, m2, l2, match)
        image, text = GaussianEmbedding(m1, l1), GaussianEmbedding(m2, l2)
        options = PCMEPPOptions(alpha=0.0 if form == "loss" else 0.1, beta=0)
        return PCMEPPLoss(options).requires_grad_(False)(image, text, match).total

    def run() -> Array:
        for leaf in (m1, l1, m2, l2):
            leaf.grad = None
        result = value()
        result.backward()
        return result.detach().sum()

    return run


def measure(form: str, b: int, d: int, repeats: int) -> dict[str, float]:
    """Median seconds, on the clock and of the processor, and peak memory above what was there before the first step."""
    run = step(form, b, d)
    step(form, 2, d)()
    before = peak_mb(reset=True)
    if repeats > 1:
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        value = run()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    clock, processor = (statistics.median(column) for column in zip(*times, strict=True))
    return {"seconds": clock, "cpu_seconds": processor, "extra_mb": peak_mb() - before, "value": float(value)}


def peak_mb(*, reset: bool = False) -> float:
    """Largest resident memory so far; reset forgets the past, which only Linux can do."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1024  # type: ignore[index]


def available_mb() -> float:
    """Memory that could be had without swapping, where the system says so."""
    memory = Path("/proc/meminfo")
    if not memory.exists():
        return float("inf")
    return int(re.search(r"MemAvailable:\s+(\d+)", memory.read_text())[1]) / 1024  # type: ignore[index]


def apart(form: str, b: int, d: int, repeats: int) -> dict[str, float]:
    """:func:`measure` in a process of its own."""
    numbers = ["--b", str(b), "--d", str(d), "--repeats", str(repeats)]
    return dict(of_process([sys.executable, __file__, "--form", form, *numbers]))


def compare(b: int, d: int, repeats: int, rounds: int) -> dict[str, dict[str, float]]:
    """All forms in turn, and the medians of the rounds; the broadcast form once."""
    forms = list(FORMS)
    if available_mb() < (needed := 5 * b**2 * d * 4 / 2**20):
        print(f"broadcast left out: needs about {needed:.0f} MB, {available_mb():.0f} MB are available")
        forms.remove("broadcast")
    found: dict[str, list[dict[str, float]]] = {form: [] for form in forms}
    for k in range(rounds):
        for form in forms:
            if form != "broadcast" or k == 0:
                found[form].append(apart(form, b, d, 2 if form == "broadcast" else repeats))
    return {
        form: {name: statistics.median(one[name] for one in several) for name in several[0]}
        for form, several in found.items()
    }


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--large", action="store_true", help="one large batch, in tiles")
    parser.add_argument("--b", type=int, help="512; 65536 with --large")
    parser.add_argument("--d", type=int, help="1024; 512 with --large")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--form", help=argparse.SUPPRESS)
    options = parser.parse_args()
    b, d = options.b or (65536 if options.large else 512), options.d or (512 if options.large else 1024)
    if options.form:
        print(json.dumps(measure(options.form, b, d, options.repeats)))
        return
    if options.large:
        results = {"large": apart("large", b, d, 1)}
    else:
        results = compare(b, d, options.repeats, options.rounds)
    load = os.getloadavg()[0]
    print(f"b={b} d={d}, {torch.get_num_threads()} threads, load {load:.1f}")
    base = results.get("product")
    for form, result in results.items():
        ratio = f"{result['cpu_seconds'] / base['cpu_seconds']:8.2f} x product" if base else ""
        clock, processor = result["seconds"] * 1000, result["cpu_seconds"] * 1000
        print(f"{form:<28}{clock:10.1f} ms {processor:10.1f} ms cpu {ratio} {result['extra_mb']:10.0f} MB extra")
    if "broadcast" in results:
        print(f"broadcast / loss: {results['broadcast']['cpu_seconds'] / results['loss']['cpu_seconds']:.0f} x")
    about = {"b": b, "d": d, "threads": torch.get_num_threads(), "torch": torch.__version__}
    write_json(options.json, {**about, "load": load, "results": results})


if __name__ == "__main__":
    main()
