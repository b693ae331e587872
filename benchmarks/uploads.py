"""Large images from many clients at once: what text searches notice of them, and whether the memory comes back.

    python benchmarks/uploads.py [--clients 8] [--megabytes 64] [--seconds 60] [--json PATH]

A service in a process of its own on loopback: a collection of noise, small encoders that were never trained, the usual
limits. In a third process, clients send photographs of noise, as large together as `--megabytes`, without a pause:
every second client searches by its image, the others store theirs. A client that is sent away (503) waits as
Retry-After says. Beside them one client searches by text, 20 times a second: before the load, during it, and after it.
Figures: p50, p99 and the largest time of the text searches, statuses, and the resident memory of the service with its
workers: before the load (after four images of the same size, two at a time, so that the workers are there), its peak,
and a minute after it.

Exits with 1 if p99 under load is more than three times the quiet one, if the memory afterwards is more than 10 % above
the one before, or if a text search is refused.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from measuring import command_parser, write_json
from PIL import Image
from service_world import WORDS, ServiceProcess, in_base64, small_sources

from sfumato.serve.app import create_app
from sfumato.serve.server import run_app
from sfumato.serve.settings import Settings

PAUSE = 0.05
"""Seconds between two text searches."""


def photograph(megabytes: float) -> bytes:
    """A JPEG file of noise of about this size."""
    side, generator = 500, np.random.default_rng(0)
    while True:
        pixels = generator.normal(128, 40, (side, side * 4 // 3, 3)).clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=90)
        if (size := len(file.getvalue()) / 1e6) >= 0.95 * megabytes:
            return file.getvalue()
        side = int(side * (megabytes / size) ** 0.5) + 1


def serve(folder: Path) -> None:
    """Serve a small collection until SIGTERM."""
    run_app(create_app(small_sources(folder, n=2000, d=64), Settings(drain=0)), host="127.0.0.1", port=0)


class Watched(ServiceProcess):
    """The service, and the peak of its memory."""

    peak = 0.0

    @property
    def memory(self) -> float:
        """Resident MB of the service with its workers."""
        found = super().memory
        self.peak = max(self.peak, found)
        return found


def search_texts(service: Watched, seconds: float) -> tuple[list[float], Counter[str]]:
    """Search by text for a while; returns (times in milliseconds, statuses)."""
    times, statuses, until, i = list[float](), Counter[str](), time.monotonic() + seconds, 0
    with httpx.Client(trust_env=False, timeout=60) as http:
        while time.monotonic() < until:
            query = f"{WORDS[i % len(WORDS)]} {WORDS[i // 7 % len(WORDS)]} {i}"
            began = time.monotonic()
            answer = http.get(f"{service.url}/v1/search", params={"q": query})
            times.append(1000 * (time.monotonic() - began))
            statuses[str(answer.status_code)] += 1
            i += 1
            if i % 20 == 0:
                _ = service.memory
            time.sleep(PAUSE)
    return times, statuses


def of(*phases: tuple[list[float], Counter[str]]) -> dict[str, Any]:
    """Figures of the text searches of one phase, or of several together."""
    times, statuses = [time for found, _ in phases for time in found], sum((found for _, found in phases), Counter())
    p50, p99 = np.percentile(times, [50, 99])
    return {"n": len(times), "p50_ms": p50, "p99_ms": p99, "largest_ms": max(times), "statuses": dict(statuses)}


def send(url: str, image: bytes, id: str | None) -> tuple[str, float]:
    """Search by an image, or store it; returns (status, seconds to wait before the next request)."""
    one = {"image": in_base64(image)} | ({} if id is None else {"id": id})
    body = json.dumps({"queries" if id is None else "items": [one]})
    connection = HTTPConnection(url.removeprefix("http://"), timeout=90)
    try:
        path = "/v1/search" if id is None else "/v1/items"
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return str(answer.status), float(answer.headers.get("Retry-After", 0))
    except (OSError, HTTPException) as error:
        return type(error).__name__, 0.0
    finally:
        connection.close()


def send_until_told(url: str, clients: int, megabytes: float) -> None:
    """Send images without a pause until standard input ends; then print statuses by kind."""
    image, stop = photograph(megabytes / clients), threading.Event()
    statuses = {"search": Counter[str](), "add": Counter[str]()}

    def client(number: int) -> None:
        kind = "search" if number % 2 else "add"
        while not stop.is_set():
            status, pause = send(url, image, f"photograph/{number}" if kind == "add" else None)
            statuses[kind][status] += 1
            stop.wait(pause)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    print("sending", flush=True)
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps(statuses))


@contextlib.contextmanager
def uploads(service: Watched, clients: int, megabytes: float) -> Iterator[dict[str, Any]]:
    """The clients, in a process of their own; yields their statuses by kind, which are there at the end."""
    command = [
        sys.executable,
        __file__,
        "--send",
        service.url,
        "--clients",
        str(clients),
        "--megabytes",
        str(megabytes),
    ]
    statuses: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        try:
            yield statuses
        finally:
            process.stdin.close()
            statuses |= json.loads(process.stdout.read())


def measured(service: Watched, clients: int, megabytes: float, seconds: float) -> dict[str, Any]:
    """Quiet, load, and after the load."""
    image = photograph(megabytes / clients)
    with ThreadPoolExecutor(2) as pool:
        first = [status for status, _ in pool.map(partial(send, service.url, image), (None, "photograph/0") * 2)]
    if not {"200", "201"} & set(first):
        raise RuntimeError(f"the first images: {first}")
    search_texts(service, 5)
    load = [os.getloadavg()[0]]
    earlier, before, service.peak = search_texts(service, seconds), service.memory, 0.0
    with uploads(service, clients, megabytes) as statuses:
        beside = search_texts(service, seconds)
        load.append(os.getloadavg()[0])
    peak = service.peak
    time.sleep(60)
    after = service.memory
    later = search_texts(service, seconds)
    quiet, busy = of(earlier, later), of(beside)
    return {
        "quiet": quiet, "earlier": of(earlier), "later": of(later), "load": busy, "image_bytes": len(image),
        "p50_ratio": busy["p50_ms"] / quiet["p50_ms"], "p99_ratio": busy["p99_ms"] / quiet["p99_ms"],
        "uploads": statuses,
        "memory_mb": {"before": before, "peak": peak, "after": after, "ratio": after / before}, "load_average": load,
    }  # fmt: skip


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=64, help="of the images of all clients together")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return 0
    if arguments.send is not None:
        send_until_told(arguments.send, arguments.clients, arguments.megabytes)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        service = Watched([sys.executable, __file__, "--serve", folder], Path(folder) / "log")
        try:
            figures = measured(service, arguments.clients, arguments.megabytes, arguments.seconds)
        finally:
            service.stop()
    result = {
        "benchmark": "uploads", "python": platform.python_version(), "cores": os.cpu_count(),
        "clients": arguments.clients, "seconds": arguments.seconds, **figures,
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    write_json(arguments.json, result)
    refused = {**figures["quiet"]["statuses"], **figures["load"]["statuses"]}.keys() - {"200"}
    return 1 if figures["p99_ratio"] > 3 or figures["memory_mb"]["ratio"] > 1.1 or refused else 0


if __name__ == "__main__":
    sys.exit(main())
