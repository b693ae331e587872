"""The match loss, forward and backward, against the broadcast form and the bare matrix product: time and peak memory.

    python benchmarks/match_loss.py [--b 512] [--d 1024] [--repeats 5] [--json PATH]

Each form runs in a process of its own, so that peak memory is its own; times are medians, ratios are within this one
run. The broadcast form is left out where there is too little memory for it. Other work on the same cores spoils
multi-threaded times most: look at the load that is reported, or set OMP_NUM_THREADS=1.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses import PCMEPPOptions, pcmepp_loss

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


def step(form: str, b: int, d: int) -> Callable[[], Tensor]:
    """One forward and backward pass; returns the value."""
    m1, l1, m2, l2 = inputs(b, d)
    match = torch.eye(b)

    def value() -> Tensor:
        if form == "product":
            return (m1 @ m2.T).sum()
        if form == "broadcast":
            return broadcast_loss(m1, l1, m2, l2, match)
        alpha = 0.1 if form.endswith("pseudo-positives") else 0.0
        image, text = GaussianEmbedding(m1, l1), GaussianEmbedding(m2, l2)
        return pcmepp_loss(
            image, text, match, PCMEPPOptions(alpha=alpha, beta=0), logit_scale=5.0, logit_bias=5.0
        ).total

    def run() -> Tensor:
        for leaf in (m1, l1, m2, l2):
            leaf.grad = None
        result = value()
        result.backward()
        return result.detach()

    return run


def measure(form: str, b: int, d: int, repeats: int) -> dict[str, float]:
    """Median seconds, and peak memory above what was there before the first step."""
    run = step(form, b, d)
    step(form, 2, d)()
    before = peak_mb(reset=True)
    value = run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times), "extra_mb": peak_mb() - before, "value": float(value)}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--b", type=int, default=512)
    parser.add_argument("--d", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--form", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        print(json.dumps(measure(options.form, options.b, options.d, options.repeats)))
        return
    results: dict[str, dict[str, float]] = {}
    for form in FORMS:
        if form == "broadcast" and available_mb() < (needed := 5 * options.b**2 * options.d * 4 / 2**20):
            print(f"broadcast left out: needs about {needed:.0f} MB, {available_mb():.0f} MB are available")
            continue
        repeats = 2 if form == "broadcast" else 4 * options.repeats
        command = [
            sys.executable,
            __file__,
            "--form",
            form,
            "--b",
            str(options.b),
            "--d",
            str(options.d),
            "--repeats",
            str(repeats),
        ]
        results[form] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    base = results["product"]["seconds"]
    load = os.getloadavg()[0]
    print(f"b={options.b} d={options.d}, {torch.get_num_threads()} threads, load {load:.1f}")
    for form, result in results.items():
        ratio = result["seconds"] / base
        print(
            f"{form:<28}{result['seconds'] * 1000:10.1f} ms {ratio:8.1f} x product {result['extra_mb']:10.0f} MB extra"
        )
    speedup = results["broadcast"]["seconds"] / results["loss"]["seconds"] if "broadcast" in results else None
    if speedup is not None:
        print(f"broadcast / loss: {speedup:.0f} x")
    if options.json:
        about = {"b": options.b, "d": options.d, "threads": torch.get_num_threads(), "torch": torch.__version__}
        record = {**about, "load": load, "results": results, "speedup": speedup}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
