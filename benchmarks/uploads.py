"""Large images from many clients at once: what text searches notice of them, and whether the memory comes back.

    python benchmarks/uploads.py [--clients 8] [--megabytes 64] [--seconds 60] [--json PATH]

A service in a process of its own on loopback: a collection of noise, small encoders that were never trained, the usual
limits. The clients send photographs of noise, as large together as `--megabytes`, without a pause: every second client
searches by its image, the others store theirs. A client that is sent away (503) waits as Retry-After says. Beside them
one client searches by text, 20 times a second: before the load, during it, and after it. Figures: p50, p99 and the
largest time of the text searches, statuses, and the resident memory of the service with its workers: before the load
(after four images of the same size, two at a time, so that the workers are there), its peak, and a minute after it.

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
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from service_world import WORDS, small_sources
from store_servers import family

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
    run_app(create_app(small_sources(folder, n=2000, d=64), Settings()), host="127.0.0.1", port=0)


class Watched:
    """The service in a process of its own, and its memory."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, "--serve", str(folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "http://" not in line:
            raise RuntimeError(f"the service does not start: {line}")
        self.url, self.peak = line.strip().partition(": ")[2], 0.0

    @property
    def memory(self) -> float:
        """Resident MB of the service with its workers."""
        pages = 0
        for pid in family(self._process.pid):
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        self.peak = max(self.peak, found)
        return found

    def end(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(60)


def search_texts(service: Watched, seconds: float) -> dict[str, Any]:
    """Search by text for a while; returns times in milliseconds and statuses."""
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
    p50, p99 = np.percentile(times, [50, 99])
    return {"n": i, "p50_ms": p50, "p99_ms": p99, "largest_ms": max(times), "statuses": dict(statuses)}


def send(http: httpx.Client, service: Watched, image: bytes, id: str | None) -> httpx.Response:
    """Search by an image, or store it."""
    files = {"image": ("photograph.jpg", image)}
    if id is None:
        return http.post(f"{service.url}/v1/search/image", files=files)
    return http.post(f"{service.url}/v1/items/image", files=files, data={"id": id})


@contextlib.contextmanager
def uploads(service: Watched, clients: int, image: bytes) -> Iterator[dict[str, Counter[str]]]:
    """Clients that send an image without a pause; yields their statuses by kind, which are complete at the end."""
    stop, statuses = threading.Event(), {"search": Counter[str](), "add": Counter[str]()}

    def client(number: int) -> None:
        kind = "search" if number % 2 else "add"
        with httpx.Client(trust_env=False, timeout=90) as http:
            while not stop.is_set():
                try:
                    answer = send(http, service, image, f"photograph/{number}" if kind == "add" else None)
                except httpx.HTTPError as error:
                    statuses[kind][type(error).__name__] += 1
                    continue
                statuses[kind][str(answer.status_code)] += 1
                stop.wait(float(answer.headers.get("retry-after", 0)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measured(service: Watched, clients: int, image: bytes, seconds: float) -> dict[str, Any]:
    """Quiet, load, and after the load."""
    with httpx.Client(trust_env=False, timeout=90) as http, ThreadPoolExecutor(2) as pool:
        for answer in pool.map(partial(send, http, service, image), (None, "photograph/first") * 2):
            answer.raise_for_status()
    search_texts(service, 5)
    load = [os.getloadavg()[0]]
    quiet, before, service.peak = search_texts(service, seconds), service.memory, 0.0
    with uploads(service, clients, image) as statuses:
        busy = search_texts(service, seconds)
        load.append(os.getloadavg()[0])
    peak = service.peak
    time.sleep(60)
    after = service.memory
    quiet_again = search_texts(service, seconds / 2)
    return {
        "quiet": quiet, "load": busy, "after": quiet_again, "p99_ratio": busy["p99_ms"] / quiet["p99_ms"],
        "p50_ratio": busy["p50_ms"] / quiet["p50_ms"],
        "uploads": {kind: dict(counts) for kind, counts in statuses.items()},
        "memory_mb": {"before": before, "peak": peak, "after": after, "ratio": after / before}, "load_average": load,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="large images from many clients")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=64, help="of the images of all clients together")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return 0
    image = photograph(arguments.megabytes / arguments.clients)
    with tempfile.TemporaryDirectory() as folder:
        service = Watched(Path(folder))
        try:
            figures = measured(service, arguments.clients, image, arguments.seconds)
        finally:
            service.end()
    result = {
        "benchmark": "uploads", "python": platform.python_version(), "cores": os.cpu_count(), "image_bytes": len(image),
        "clients": arguments.clients, "seconds": arguments.seconds, **figures,
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    refused = {**figures["quiet"]["statuses"], **figures["load"]["statuses"]}.keys() - {"200"}
    return 1 if figures["p99_ratio"] > 3 or figures["memory_mb"]["ratio"] > 1.1 or refused else 0


if __name__ == "__main__":
    sys.exit(main())
