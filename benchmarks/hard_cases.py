"""Named cases that have hurt the service, or could: each says what it saw, and what is wrong with it.

`python benchmarks/faults.py` runs them before its random requests: images that take long or much memory to decode,
bodies that do not come, responses without a bound, guarantees that a filter takes away, misspelt fields, stores that
hang, second writers, leftovers of killed writes, ids of several lines.

While images are decoded, a client searches by text. It must not wait for more than PATIENCE seconds.
"""

import concurrent.futures
import contextlib
import os
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
from sfumato.data.images import UploadedImages
from sfumato.distances import csd_matrix
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.collection import UPLOADED_IMAGES, GaussianCollection
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
        folder: of the collection.
        app: the application.
        port: of 127.0.0.1.
        notes: figures of the cases.
    """

    folder: Path
    app: FastAPI
    port: int
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def collection(self) -> GaussianCollection:
        """The collection that is served."""
        gallery = self.app.state.service.sources.galleries["images"].gallery
        assert isinstance(gallery, GaussianCollection)
        return gallery

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request of a client of its own."""
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.request(method, url, trust_env=False, timeout=90, **options)

    def search(self, **options: Any) -> httpx.Response:
        """A search by one text."""
        return self.ask("POST", "/v1/search", json={"queries": [{"text": "red"}], **options})


@contextlib.contextmanager
def world(folder: Path, sources: Sources | None = None) -> Iterator[World]:
    """Serve in this process, with the usual limits."""
    app = create_app(sources or calibrated_sources(folder), Settings())
    with serving(app) as port:
        yield World(folder, app, port)


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


# ---------------------------------------------------------------- bodies and responses


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


def bounded_responses(there: World) -> list[str]:
    """64 queries with 1,000 results each are refused; with 10 and their conformal sets the answer has a limit."""
    queries = [{"text": f"red {i}"} for i in range(64)]
    began = time.monotonic()
    refused = there.ask("POST", "/v1/search", json={"queries": queries, "max_results": 1000, "coverage": 0.9})
    seconds = time.monotonic() - began
    wrong = [] if refused.status_code == 422 else [f"64 x 1,000 results: {refused.status_code} after {seconds:.1f} s"]
    answer = there.ask("POST", "/v1/search", json={"queries": queries, "max_results": 10, "coverage": 0.9999})
    there.notes["64 queries with sets"] = {"status": answer.status_code, "bytes": len(answer.content)}
    if answer.status_code == 200:
        records = sum(len(one["hits"]) + len(one["conformal_set"]["hits"]) for one in answer.json()["answers"])
        if records > 20_000:
            wrong.append(f"a response with {records} records")
    return wrong if answer.status_code in (200, 422) else [*wrong, f"64 sets: {answer.status_code}"]


def guarantees_with_a_filter(there: World) -> list[str]:
    """abstain and coverage are refused beside a filter, and work without one."""
    wrong = []
    for guarantee in ({"abstain": 0.5}, {"coverage": 0.9}):
        if (status := there.search(**guarantee).status_code) != 200:
            wrong.append(f"{guarantee} alone: {status}")
        for filter in ({"where": {"first": ["yes"]}}, {"max_total_variance": 0.1}):
            if (status := there.search(**guarantee, filter=filter).status_code) != 422:
                wrong.append(f"{guarantee} with {filter}: {status}")
    return wrong


def unknown_fields(there: World) -> list[str]:
    """A misspelt field is named."""
    wrong = []
    for sent, name in (
        ({"max_result": 3}, "max_result"),
        ({"filter": {"wheer": {}}}, "wheer"),
        ({"queries": [{"text": "red", "weight": 2}]}, "weight"),
    ):
        answer = there.search(**sent)
        if answer.status_code != 422 or f"unknown field {name!r}" not in answer.text:
            wrong.append(f"{sent}: {answer.status_code} {answer.text[:200]}")
    return wrong


def ids_of_several_lines(there: World) -> list[str]:
    """Line breaks and other control characters in ids are refused."""
    wrong = []
    for id in ("a\nb", "a\rb", "a\u2028b", "\x1b[2J", ".."):
        one = {"id": id, "image": in_base64(picture())}
        answer = there.ask("POST", "/v1/items", json={"items": [one]})
        wrong += [f"the id {id!r}: {answer.status_code}"] if answer.status_code != 422 else []
    return wrong


# ---------------------------------------------------------------- stores and leftovers


def a_store_that_hangs(there: World) -> list[str]:
    """Readiness and metrics say so, and answer at once; both recover."""
    store, go = there.collection.store, threading.Event()
    kept = {name: getattr(store, name) for name in ("scan", "count", "search")}

    def hanging(name: str) -> Callable[..., Any]:
        return lambda *values, **options: (go.wait(60), kept[name](*values, **options))[1]

    for name in kept:
        setattr(store, name, hanging(name))
    try:
        told = there.ask("GET", "/readyz")
        until = time.monotonic() + 25
        while told.status_code == 200 and time.monotonic() < until:
            time.sleep(0.2)
            told = there.ask("GET", "/readyz")
        began = time.monotonic()
        metrics = there.ask("GET", "/metrics")
        seconds = time.monotonic() - began
    finally:
        go.set()
        for name in kept:
            delattr(store, name)
    wrong = [] if told.status_code == 503 else ["readiness does not tell of a store that hangs"]
    if metrics.status_code != 200 or seconds > PATIENCE or 'sfumato_store_up{gallery="images"} 0.0' not in metrics.text:
        wrong.append(f"/metrics while the store hangs: {metrics.status_code} after {seconds:.1f} s")
    until = time.monotonic() + 25
    while (status := there.ask("GET", "/readyz").status_code) != 200 and time.monotonic() < until:
        time.sleep(0.2)
    return wrong if status == 200 else [*wrong, "readiness does not recover"]


def a_second_writer(there: World) -> list[str]:
    """Of two services of one collection the second is told that another one writes."""
    new = {"items": [{"id": "of the first", "image": in_base64(picture())}]}
    first = there.ask("POST", "/v1/items", json=new)
    pictures = UploadedImages(there.folder / "collection" / UPLOADED_IMAGES)
    served = there.app.state.service.sources.galleries["images"]
    other = type(served)(GaussianCollection.open(there.folder / "collection"), pictures)
    with world(there.folder, Sources(there.app.state.service.sources.model, "second", {"images": other})) as second:
        answer = second.ask("POST", "/v1/items", json=new)
    told = answer.status_code == 409 and "Another process writes" in answer.text
    return [] if first.is_success and told else [f"writers: {first.status_code}, {answer.status_code} {answer.text}"]


def leftovers_are_swept(there: World) -> list[str]:
    """A new service of a collection removes old images that no item names, and old temporary files."""
    with tempfile.TemporaryDirectory() as name:
        sources = calibrated_sources(Path(name))
        uploads = UploadedImages(Path(name) / "collection" / UPLOADED_IMAGES)
        others = set(uploads.folder.rglob("*"))
        uploads.write("nobody", picture("blue"))
        (orphan,) = (path for path in set(uploads.folder.rglob("*")) - others if path.is_file())
        os.utime(orphan, (0, 0))
        with world(Path(name), sources):
            until = time.monotonic() + 20
            while orphan.exists() and time.monotonic() < until:
                time.sleep(0.1)
        return ["an image that no item names stays"] if orphan.exists() else []


CASES: tuple[Case, ...] = (
    progressive_jpeg_with_thousands_of_scans,
    webps_of_forty_million_pixels,
    png_bombs,
    slow_bodies,
    bounded_responses,
    guarantees_with_a_filter,
    unknown_fields,
    ids_of_several_lines,
    a_store_that_hangs,
    a_second_writer,
    leftovers_are_swept,
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
