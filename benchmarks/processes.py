"""The loss of one large batch over several processes and in blocks of memory: time and extra memory of each process.

    python benchmarks/processes.py [--b 4096] [--d 1024] [--processes 1 2 4] [--max-pairs 4194304 ...] [--json PATH]

Each process holds its part of the embeddings, gathers all of them, and computes its rows and columns of the pairs,
forward and backward, PCME++ with pseudo-positives and bottleneck. One thread for each process; with more processes than
cores times say nothing, memory does. Memory is counted above what was there before the step, after a step of a tiny
batch.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from match_loss import inputs, peak_mb

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses import PairBlock, PCMEPPLoss, loss_of_block
from sfumato.models.process_group import ProcessGroup, join_process_group


def step(process_group: ProcessGroup, b: int, d: int, max_pairs: int) -> float:
    """One forward and backward pass of this process's share; its part of the loss."""
    parts = inputs(b, d)
    own = torch.from_numpy(process_group.part(b))
    counts = process_group.counts(len(own))
    mine = [GaussianEmbedding(m[own].detach(), v[own].detach()) for m, v in (parts[:2], parts[2:])]
    del parts
    image, text = (process_group.gather_embeddings(x, counts) for x in mine)
    leaves = [value.requires_grad_() for x in (image, text) for value in (x.mean, x.log_var)]
    rows = slice(int(own[0]), int(own[-1]) + 1)
    match = torch.zeros(len(own), b)
    match[torch.arange(len(own)), own] = 1
    alone = process_group.size == 1
    share = PairBlock(image if alone else image[rows], text if alone else text[rows], image, text, match, match)
    loss = PCMEPPLoss()
    output = loss_of_block(loss, share, max_pairs=max_pairs, gather=process_group.gather_row)
    output.total.backward()
    for leaf in leaves:
        assert leaf.grad is not None
        process_group.total(leaf.grad)
    return float(process_group.total(output.total))


def work(b: int, d: int, max_pairs: int, repeats: int) -> dict[str, Any]:
    """Median seconds and extra memory of this process."""
    torch.set_num_threads(1)
    with join_process_group(lambda _: torch.device("cpu"), 5) as process_group:
        step(process_group, 8, d, max_pairs)
        before = peak_mb(reset=True)
        value = step(process_group, b, d, max_pairs)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            step(process_group, b, d, max_pairs)
            times.append(time.perf_counter() - start)
        return {"seconds": sorted(times)[len(times) // 2], "extra_mb": peak_mb() - before, "value": value}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--b", type=int, default=4096)
    parser.add_argument("--d", type=int, default=1024)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--max-pairs", type=int, nargs="+", default=[2**62, 2**22, 2**20])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.b, options.d, options.max_pairs[0], options.repeats)))
        return
    records = []
    for size in options.processes:
        for max_pairs in options.max_pairs:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            shared["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # What is freed goes back at once and is not counted.
            command = [sys.executable, __file__, "--work", "--b", str(options.b), "--d", str(options.d)]
            command += ["--max-pairs", str(max_pairs), "--repeats", str(options.repeats)]
            running = [
                subprocess.Popen(
                    command,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(size)
            ]
            results = [json.loads(process.communicate()[0]) for process in running]
            extra = max(result["extra_mb"] for result in results)
            seconds = max(result["seconds"] for result in results)
            records.append({"processes": size, "max_pairs": max_pairs, "seconds": seconds, "extra_mb": extra})
            blocks = "whole" if max_pairs >= options.b**2 else f"{max_pairs / 2**20:g} Mi pairs a block"
            print(
                f"b={options.b} d={options.d}, {size} processes, {blocks}: {seconds:.2f} s,"
                f" {extra:.0f} MB extra in each, loss {results[0]['value']:.6f}, load {os.getloadavg()[0]:.1f}"
            )
    if options.json:
        options.json.write_text(json.dumps({"b": options.b, "d": options.d, "records": records}, indent=2) + "\n")


if __name__ == "__main__":
    main()
