"""PCME's sampled loss, forward and backward, beside PCME++'s: seconds (median) and peak memory above the start.

python benchmarks/pcme_loss.py [--b 128] [--d 1024] [--samples 7] [--repeats 5]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from match_loss import inputs, peak_mb

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses import PCMELoss, PCMEOptions, PCMEPPLoss

FORMS = ("pcmepp", "pcme", "pcme with uniformity")


def step(form: str, b: int, d: int, samples: int) -> None:
    """One forward and backward pass."""
    m1, l1, m2, l2 = inputs(b, d)
    image, text, match = GaussianEmbedding(m1, l1), GaussianEmbedding(m2, l2), torch.eye(b)
    if form == "pcmepp":
        output = PCMEPPLoss().requires_grad_(False)(image, text, match)
    else:
        weight = 10.0 if form.endswith("uniformity") else 0.0
        loss = PCMELoss(PCMEOptions(n_samples=samples, uniformity_weight=weight)).requires_grad_(False)
        output = loss(image, text, match)
    output.total.backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--b", type=int, default=128)
    parser.add_argument("--d", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--form", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        step(options.form, 2, options.d, options.samples)
        before, times = peak_mb(reset=True), []
        for _ in range(options.repeats):
            start = time.perf_counter()
            step(options.form, options.b, options.d, options.samples)
            times.append(time.perf_counter() - start)
        print(json.dumps({"seconds": statistics.median(times), "mb": peak_mb() - before}))
        return
    print(
        f"b={options.b} d={options.d} s={options.samples}, {torch.get_num_threads()} threads,"
        f" load {os.getloadavg()[0]:.1f}"
    )
    for form in FORMS:
        command = [sys.executable, __file__, *sys.argv[1:], "--form", form]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{form:<24}{result['seconds']:8.3f} s {result['mb']:8.0f} MB extra")


if __name__ == "__main__":
    main()
