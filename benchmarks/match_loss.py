"""The match loss, forward and backward, against the broadcast form and the bare matrix product: time and peak memory.

    python benchmarks/match_loss.py [--b 512] [--d 1024] [--repeats 5] [--json PATH]

Each form runs in a process of its own, so that peak memory is its own; times are medians, ratios are within this one run.
"""

import argparse
import json
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
from sfumato.losses import pcmepp_loss

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
        return pcmepp_loss(image, text, match, logit_scale=5.0, logit_bias=5.0, alpha=alpha, beta=0).total

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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    value = run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": statistics.median(times), "extra_mb": (after - before) / 1024, "value": float(value)}


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
    results = {}
    for form in FORMS:
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
    print(f"b={options.b} d={options.d}, {torch.get_num_threads()} threads")
    for form, result in results.items():
        ratio = result["seconds"] / base
        print(
            f"{form:<28}{result['seconds'] * 1000:10.1f} ms {ratio:8.1f} x product {result['extra_mb']:10.0f} MB extra"
        )
    speedup = results["broadcast"]["seconds"] / results["loss"]["seconds"]
    print(f"broadcast / loss: {speedup:.0f} x")
    if options.json:
        about = {"b": options.b, "d": options.d, "threads": torch.get_num_threads(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**about, "results": results, "speedup": speedup}, indent=2) + "\n")


if __name__ == "__main__":
    main()
