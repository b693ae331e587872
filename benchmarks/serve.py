"""The service under load on 127.0.0.1: latency and throughput of text queries, micro-batching on and off.

The server is a process of its own with an exact index of noise and a small text encoder that was never trained; the
clients, threads of this process with a connection each, ask one text after the other (POST /v1/search, 10 hits). With
batching off every text is embedded alone (batch size 1, no window); all else is the same. Both are measured one after
the other at each number of clients, so that what else the machine does falls on both; the ratio is of the throughputs.

    python benchmarks/serve.py [--json PATH] [--items 10000] [--d 256] [--width 256] [--clients 64] [--seconds 3]
                               [--threads 1] [--small]

`--small` takes the text encoder of the model small. `bare` is that encoder alone in this process, 32 texts at a time,
between the measurements: what the service could answer if it did nothing else.

Server and clients share the machine: the figures are those of the service together with its clients.
"""

import argparse
import http.client
import json
import os
import platform
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import command_parser, write_json
from service_world import WORDS, ServiceProcess, large_sources

from sfumato.encoders.encoder_protocol import TwoTowers
from sfumato.models.run import load_model
from sfumato.serve.app import create_app
from sfumato.serve.server import run_app
from sfumato.serve.settings import Settings, Sources

BATCH, WINDOW = 32, 0.002


def start(arguments: argparse.Namespace, *, batching: bool) -> ServiceProcess:
    """A server process."""
    command = [sys.executable, __file__, "--serve", "on" if batching else "off", *["--small"] * arguments.small]
    for name in ("items", "d", "width", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    return ServiceProcess(command, Path(os.devnull))


def serve(arguments: argparse.Namespace) -> None:
    """What the server process does."""
    batching = arguments.serve == "on"
    settings = Settings(
        drain=0,
        batch_size=BATCH if batching else 1,
        batch_window_ms=1000 * WINDOW if batching else 0.0,
        threads=arguments.threads,
        max_requests=1000,
    )
    run_app(create_app(sources(arguments), settings), host="127.0.0.1", port=0)


def sources(arguments: argparse.Namespace) -> Sources:
    """The gallery with its model."""
    found = large_sources(arguments.items, arguments.d, arguments.width)
    return replace(found, model=load_model("small").model) if arguments.small else found


def bare(model: TwoTowers, seconds: float, threads: int) -> float:
    """Texts a second that a text encoder embeds, BATCH at a time."""
    source, before, n = random.Random(0), torch.get_num_threads(), 0
    torch.set_num_threads(threads)
    model.embed_texts(["warm"])
    begin = time.perf_counter()
    while (now := time.perf_counter()) < begin + seconds:
        model.embed_texts([" ".join(source.choices(WORDS, k=8)) for _ in range(BATCH)])
        n += BATCH
    torch.set_num_threads(before)
    return n / (now - begin)


def load(port: int, clients: int, seconds: float, warm: float = 0.3) -> dict[str, Any]:
    """Ask for a while; returns figures of the requests that began after the warming up."""
    latencies: list[list[float]] = [[] for _ in range(clients)]
    failures = [0] * clients
    begin = time.perf_counter() + warm
    end = begin + seconds

    def ask(number: int) -> None:
        source = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while (now := time.perf_counter()) < end:
            text = " ".join(source.choices(WORDS, k=8))
            body = json.dumps({"queries": [{"text": text}], "max_results": 10})
            connection.request("POST", "/v1/search", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                failures[number] += 1
            elif now >= begin:
                latencies[number].append(time.perf_counter() - now)
        connection.close()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    all_of_them = np.array([latency for one in latencies for latency in one])
    p50, p95, p99 = (float(v) for v in np.percentile(all_of_them, (50, 95, 99)) * 1000)
    return {
        "requests": len(all_of_them), "failures": sum(failures),
        "per_second": len(all_of_them) / (time.perf_counter() - begin), "p50_ms": p50, "p95_ms": p95, "p99_ms": p99,
    }  # fmt: skip


def mean_batch(port: int) -> float:
    """Mean size of the batches of texts so far."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    values = dict(
        line.rsplit(" ", 1) for line in connection.getresponse().read().decode().splitlines() if line[0] != "#"
    )
    return float(values['sfumato_batch_size_sum{kind="text"}']) / float(values['sfumato_batch_size_count{kind="text"}'])


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--d", type=int, default=256)
    parser.add_argument("--width", type=int, default=256, help="of the text encoder")
    parser.add_argument("--clients", type=int, default=64, help="at most; 1, 2, 4 ... before")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="the text encoder of the model small")
    parser.add_argument("--serve", choices=("on", "off"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return 0
    servers = {name: start(arguments, batching=name == "on") for name in ("on", "off")}
    rows, encoder = [], sources(arguments).model
    try:
        clients = 1
        while clients <= arguments.clients:
            measured = {name: load(server.port, clients, arguments.seconds) for name, server in servers.items()}
            ratio = measured["on"]["per_second"] / measured["off"]["per_second"]
            alone = bare(encoder, arguments.seconds, arguments.threads)
            rows.append({"clients": clients, **measured, "ratio": ratio, "bare_per_second": alone})
            print(
                f"{clients:>3} clients  "
                + "  ".join(
                    f"batching {name}: {m['per_second']:6.1f}/s p50 {m['p50_ms']:6.1f}"
                    f" p95 {m['p95_ms']:6.1f} p99 {m['p99_ms']:6.1f} ms"
                    for name, m in measured.items()
                )
                + f"  ratio {ratio:.2f}  bare encoder {alone:.0f}/s, batching on is"
                + f" {measured['on']['per_second'] / alone:.2f} of it",
                flush=True,
            )
            clients *= 2
        batches = {name: mean_batch(server.port) for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()
    result = {
        "benchmark": "serve", "python": platform.python_version(), "torch": torch.__version__,
        "processor": platform.machine(),
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("json", "serve")}, "mean_batch": batches,
        "rows": rows,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 1 if any(row[name]["failures"] for row in rows for name in ("on", "off")) else 0


if __name__ == "__main__":
    sys.exit(main())
