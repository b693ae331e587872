"""Named cases that have hurt the service, or could: each says what it saw, and what is wrong with it.

`python benchmarks/faults.py` runs them before its random requests: images that take long or much memory to decode,
and bodies that do not come, at the usual limits. tests/serve has the cases that need no size.

While images are decoded, a client searches by text. It must not wait for more than PATIENCE seconds.
"""

import concurrent.futures
import contextlib
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi import FastAPI
from service_world import in_base64, noise, picture, serving, small_sources

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.query_scores import QueryScores
from sfumato.distances import csd_matrix
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.serve.app import create_app
from sfumato.serve.settings import Settings
from sfumato.serve.sources import Sources

PATIENCE = 5.0
"""Seconds that a text search may take while others do their worst."""

Case = Callable[["World"], list[str]]


@dataclass
class World:
    """A service of a calibrated collection on a free port, in this process.

    Attributes:
        app: the application.
        port: of 127.0.0.1.
        notes: figures of the cases.
    """

    app: FastAPI
    port: int
    notes: dict[str, Any] = field(default_factory=dict)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request of a client of its own."""
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.request(method, url, trust_env=False, timeout=90, **options)

    def search(self, **options: Any) -> httpx.Response:
        """A search by one text."""
        return self.ask("POST", "/v1/search", json={"queries": [{"text": "red"}], **options})


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    """Serve in this process, with the usual limits."""
    app = create_app(calibrated_sources(folder), Settings())
    with serving(app) as port:
        yield World(app, port)


def calibrated_sources(folder: Path) -> Sources:
    """3,000 items, and a calibration by noise that can certify abstention and sets."""
    texts, near = noise(200, 16, 5), noise(200, 16, 6)
    images = GaussianEmbedding(torch.nn.functional.normalize(texts.mean + 0.4 * near.mean, dim=1), texts.log_var)
    distance, match = csd_matrix(texts, images), torch.eye(200)
    scores = QueryScores.fit(distance, match)
    return small_sources(folder, 3000, calibration=Calibration.fit(distance, match, t2i=scores, i2t=scores))


# ---------------------------------------------------------------- images


def scans(n: int = 3000, side: int = 1500) -> bytes:
    """A progressive JPEG whose last scan is repeated n times: each is decoded over the whole image."""
    file = picture("grey", (side, side), "JPEG", progressive=True)
    return file[:-2] + file[file.rindex(b"\xff\xda") : -2] * n + file[-2:]


def empty_webp() -> bytes:
    """Less than 2 KB that are 39.6 million pixels."""
    return picture("grey", (6000, 6600), "WEBP", lossless=True)


def empty_png() -> bytes:
    """About 116 KB that are 39.9 million pixels of three bytes."""
    return picture("grey", (6320, 6320), "PNG", compress_level=9)


def at_once(there: World, file: bytes, n: int, allowed: set[int]) -> list[str]:
    """Search by n copies of an image together, and by text meanwhile."""
    waited, done = list[float](), threading.Event()

    def texts() -> None:
        while not done.is_set():
            began = time.monotonic()
            status = there.search().status_code
            waited.append(time.monotonic() - began if status == 200 else float("inf"))

    def send(_: int) -> int:
        return there.ask("POST", "/v1/search", json={"queries": [{"image": in_base64(file)}]}).status_code

    watcher = threading.Thread(target=texts)
    watcher.start()
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        statuses = Counter(pool.map(send, range(n)))
    seconds = time.monotonic() - began
    done.set()
    watcher.join()
    there.notes[f"{len(file)} bytes, {n} times"] = {
        "seconds": round(seconds, 2),
        "longest text search": round(max(waited), 2),
        "statuses": dict(statuses),
    }
    wrong = []
    if max(waited) > PATIENCE:
        wrong.append(f"a text search took {max(waited):.1f} seconds")
    if not set(statuses) <= allowed:
        wrong.append(f"statuses {dict(statuses)}, expected {allowed}")
    return wrong


def progressive_jpeg_with_thousands_of_scans(there: World) -> list[str]:
    """Refused by its number of scans, before it is decoded."""
    return at_once(there, scans(), 4, {422})


def webps_of_forty_million_pixels(there: World) -> list[str]:
    """Three have their pixels in the budget and are decoded, if that takes no longer than it may; others come again."""
    return at_once(there, empty_webp(), 8, {200, 422, 503})


def png_bombs(there: World) -> list[str]:
    """Within the limit of pixels, so that they are decoded; but nobody waits for them."""
    return at_once(there, empty_png(), 8, {200, 422, 503})


# ---------------------------------------------------------------- bodies


def slow_bodies(there: World) -> list[str]:
    """130 clients that announce a body and send one byte of it take no place of others."""
    with contextlib.ExitStack() as held:
        for _ in range(130):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", there.port), timeout=30))
            lines = ["POST /v1/search HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
            connection.sendall(("\r\n".join([*lines, "Content-Length: 10000"]) + "\r\n\r\n{").encode())
        time.sleep(0.5)
        statuses = [there.search().status_code for _ in range(5)]
    return [] if statuses == [200] * 5 else [f"text searches beside 130 slow bodies: {statuses}"]


CASES: tuple[Case, ...] = (
    progressive_jpeg_with_thousands_of_scans,
    webps_of_forty_million_pixels,
    png_bombs,
    slow_bodies,
)


def run_cases(cases: tuple[Case, ...] = CASES) -> dict[str, dict[str, Any]]:
    """Run the cases against one service, in their order.

    Returns:
        By name, {"wrong": what is wrong, "seconds": time, and notes}.
    """
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name, world(Path(name)) as there:
        for case in cases:
            there.notes, began = {}, time.monotonic()
            try:
                wrong = case(there)
            except (httpx.HTTPError, OSError, UserError, KeyError, ValueError) as error:
                wrong = [repr(error)]
            seconds = round(time.monotonic() - began, 2)
            found[case.__name__] = {"wrong": wrong, "seconds": seconds, **there.notes}
    return found
