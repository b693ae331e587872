"""Mixed load on a service over HTTP for a long time: no 500, nothing acknowledged lost, memory flat, p99 by kind.

    python benchmarks/soak.py store milvus:store.db postgresql milvus --minutes 30 [--json PATH]

For each store URL a collection of noise and a service of a small model that was never trained, in a process of its own
on loopback. Paths start at the folder of the collection. `postgresql` and `milvus` alone start a server, which
is killed and restarted, and once stopped for a while, during the load. Eight clients search by text, picture, vector
and item, look at items and metrics, add, replace and delete pictures, and send malformed requests
(benchmarks/faults.py). Where the service has worker processes, one of them is killed from time to time. At the end the
service itself is killed with SIGKILL during writes and started again.

Checked: statuses (a 500 is always wrong; 503 and 504 are wrong unless a store or a worker was just killed or stopped,
and 503 without Retry-After), problem documents, /readyz and /metrics while the store hangs,
every item and picture whose write was acknowledged, also after the last restart, the items of the beginning,
and that the restarted service puts away the pictures that no item names. For that last check the picture files get a
time of modification two hours ago, since younger ones are left alone. Memory is the resident memory of the service with
its workers: medians of its first and last tenth after warming up, and the slope of a line through all samples. Exits
with 1 if something is wrong.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import random
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import torch
from faults import exchange, raw_request, wrong_with
from measuring import command_parser, write_json
from PIL import Image
from service_world import WORDS, ServiceProcess, in_base64, noise, picture, random_model
from store_servers import SERVERS, LocalServer

from sfumato.calibration.calibrator import Calibration
from sfumato.calibration.query_scores import QueryScores
from sfumato.data.images import UploadedImages
from sfumato.distances import csd_matrix
from sfumato.gaussian import GaussianEmbedding
from sfumato.search.collection import UPLOADED_IMAGES, GaussianCollection
from sfumato.serve.app import create_app
from sfumato.serve.server import run_app
from sfumato.serve.settings import ServedGallery, Settings, Sources

D, CLIENTS, OWN = 64, 8, 40
WAIT, SLACK = 40.0, 20.0
"""Seconds that a client waits for an answer, and seconds after an outage in which 503 is no surprise."""

KINDS = {"text": 30, "picture": 8, "vector": 12, "item": 14, "list": 4, "add": 12, "delete": 6, "bad": 12, "state": 2}
"""Weights of the kinds of requests."""

Options = dict[str, Any]


def calibration(n: int, d: int) -> Calibration:
    """Of noise, so that abstention and coverage have something to go by; n as in the gallery."""
    texts, near = noise(n, d, 5), noise(n, d, 6)
    images = GaussianEmbedding(torch.nn.functional.normalize(texts.mean + 0.4 * near.mean, dim=1), texts.log_var)
    distance, match = csd_matrix(texts, images), torch.eye(n)
    scores = QueryScores.fit(distance, match)
    return Calibration.fit(distance, match, t2i=scores, i2t=scores)


def serve(folder: Path, store: str, items: int, port: int = 0) -> None:
    """Serve the collection in a folder; make it first if there is none."""
    if not (folder / "collection").exists():
        made = GaussianCollection.create(folder / "collection", store, d=D, calibration=calibration(items, D))
        ids, halves = [f"seed/{i}" for i in range(items)], ["yes" if i % 2 else "no" for i in range(items)]
        made.upsert(noise(items, D), ids, {"first": halves})
        made.close()
        os.execv(sys.executable, [sys.executable, *sys.argv])  # Without the memory that the calibration took.
    collection = GaussianCollection.open(folder / "collection")
    pictures = UploadedImages(folder / "collection" / UPLOADED_IMAGES)
    sources = Sources(random_model(D, 32, variance=False), "random", {"images": ServedGallery(collection, pictures)})
    settings = Settings(max_upload_mb=0.4, max_pixels=2_000_000, optimise_after=2000, drain=0, grace=10)
    run_app(create_app(sources, settings), host="127.0.0.1", port=port)


class Service(ServiceProcess):
    """The service of a folder; on any free port if the port is 0."""

    def __init__(self, folder: Path, store: str, items: int, port: int = 0) -> None:
        self.folder = folder
        of_it = "--serve", str(folder), "--items", str(items), "--port", str(port)
        super().__init__([sys.executable, __file__, store, *of_it], folder / "service.log")


class Ledger:
    """What the clients were told, and what is wrong with it."""

    def __init__(self) -> None:
        self.statuses: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self.seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        self.wrong: list[str] = []
        self.outages: list[tuple[str, float, float]] = []
        self.allowed: dict[str, set[int | None]] = {}
        """By id, the versions that it may have; None for no item."""
        self._lock = threading.Lock()

    def add(self, kind: str, status: str, began: float, ended: float) -> None:
        """Count an answer."""
        with self._lock:
            self.statuses[kind][status] += 1
            self.seconds[kind].append((began, ended - began))

    def blame(self, told: str) -> None:
        """Note that something is wrong."""
        with self._lock:
            self.wrong.append(told[:600])

    @contextlib.contextmanager
    def outage(self, what: str) -> Iterator[None]:
        """Something is taken away while the block runs."""
        with self._lock:
            self.outages.append((what, time.monotonic(), float("inf")))
        try:
            yield
        finally:
            with self._lock:
                self.outages[-1] = (*self.outages[-1][:2], time.monotonic())

    def excused(self, began: float, ended: float, *, by: str = "") -> bool:
        """Whether something, or the thing that `by` names, was taken away at about that time."""
        with self._lock:
            found = [(since, until) for what, since, until in self.outages if by in what]
        return any(began < until + SLACK and since < ended for since, until in found)

    def figures(self) -> dict[str, dict[str, Any]]:
        """Requests by kind: statuses, and times in ms without those about an outage."""
        found = {}
        for kind, all_times in self.seconds.items():
            quiet = [1000 * took for began, took in all_times if not self.excused(began, began + took)]
            times = np.percentile(quiet, (50, 99)) if quiet else (0.0, 0.0)
            of_all = np.percentile([1000 * took for _, took in all_times] or [0.0], 99)
            found[kind] = {
                "statuses": dict(sorted(self.statuses[kind].items())),
                "p50_ms": round(float(times[0]), 1),
                "p99_ms": round(float(times[1]), 1),
                "p99_with_outages_ms": round(float(of_all), 1),
            }
        return found


class Address(Protocol):
    """Where clients send requests, as long as it is alive."""

    @property
    def url(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def alive(self) -> bool: ...


class Client:
    """Sends requests one after the other; its items are its own, so it knows what each must be."""

    def __init__(self, number: int, service: Address, ledger: Ledger, seed: int) -> None:
        self._chance = random.Random(f"{seed}-{number}")
        self._service, self._ledger = service, ledger
        self._ids = [f"soak/{number}/{i} ü.png" for i in range(OWN)]
        self._version = 0
        self._http = httpx.Client(timeout=WAIT, trust_env=False)

    def run(self, until: float, pause: float, *, kinds: dict[str, int] = KINDS) -> None:
        """Send until a time of the monotonic clock, with pauses of this length on average."""
        names, weights = list(kinds), list(kinds.values())
        while time.monotonic() < until and self._service.alive:
            kind = self._chance.choices(names, weights)[0]
            getattr(self, f"_{kind}")()
            time.sleep(self._chance.expovariate(1 / pause) if pause else 0.0)

    def check(self) -> None:
        """Compare the items of this client with what was acknowledged."""
        for id in self._ids:
            allowed = self._ledger.allowed.get(id, {None})
            answer = self._http.get(f"{self._service.url}/v1/items/{id}")
            found = int(answer.json()["payload"]["version"]) if answer.status_code == 200 else None
            if answer.status_code not in (200, 404) or found not in allowed:
                self._ledger.blame(f"lost: {id} is {found} ({answer.status_code}), expected one of {allowed}")
            elif found is not None:
                self._look(id, found)

    def _look(self, id: str, version: int) -> None:
        answer = self._http.get(f"{self._service.url}/v1/pictures/{id}")
        if shows(answer, id, version):
            return
        self._ledger.blame(f"lost: the picture of {id}, version {version}: {answer.status_code} {answer.text[:100]!r}")

    def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer; where there is none, one of status 599 with the name of the error."""
        try:
            return self._http.request(method, self._service.url + path, **options)
        except httpx.HTTPError as error:
            return httpx.Response(599, text=repr(error), headers={"Error": type(error).__name__})

    def _send(
        self, kind: str, method: str, path: str, fine: tuple[int, ...] = (200,), **options: Any
    ) -> httpx.Response:
        """A request; its answer is noted."""
        began = time.monotonic()
        answer = self._answer(method, path, **options)
        ended, status = time.monotonic(), answer.status_code
        self._ledger.add(kind, str(status), began, ended)
        excused = status in (503, 504) and self._ledger.excused(began, ended)
        excused |= status == 599 and self._ledger.excused(began, ended, by="service")
        if status == 503 and "Retry-After" not in answer.headers:
            self._ledger.blame(f"{kind}: {method} {path}: 503 without Retry-After: {answer.text}")
        if status not in fine and not excused:
            self._ledger.blame(f"{kind}: {method} {path}: {status} {answer.text}")
        return answer

    def _text(self) -> None:
        words = " ".join(self._chance.choices(WORDS, k=self._chance.randint(1, 6)))
        more: list[Options] = [{}, {"coverage": 0.8}, {"abstain": 0.5}, {"order": "distance"}]
        more += [{"filter": {"where": {"first": ["yes"]}}}, {"min_probability": 0.1}]
        body = {
            "queries": [{"text": words}],
            "max_results": self._chance.choice((1, 10, 50)),
            **self._chance.choice(more),
        }
        self._send("text", "POST", "/v1/search", json=body)

    def _picture(self) -> None:
        kind, side = self._chance.choice(("PNG", "JPEG", "WEBP")), self._chance.randint(20, 600)
        file = picture(self._chance.choice(("red", "blue", "olive")), (side, side), kind)
        self._send("picture", "POST", "/v1/search", json={"queries": [{"image": in_base64(file)}], "max_results": 5})

    def _vector(self) -> None:
        vectors = [[round(self._chance.gauss(0, 1), 5) for _ in range(D)] for _ in range(self._chance.choice((1, 4)))]
        self._send("vector", "POST", "/v1/search", json={"queries": [{"vector": one} for one in vectors]})

    def _item(self) -> None:
        id = self._chance.choice(self._ids)
        body = {"queries": [{"id": f"seed/{self._chance.randrange(100)}"}], "max_results": 5}
        self._send("item", "POST", "/v1/search", json=body)
        allowed = self._ledger.allowed.get(id, {None})
        answer = self._send("item", "GET", f"/v1/items/{id}", (200, 404))
        if answer.status_code in (200, 404):
            found = int(answer.json()["payload"]["version"]) if answer.status_code == 200 else None
            if found not in allowed:
                self._ledger.blame(f"lost: {id} is {found}, expected one of {allowed}")

    def _list(self) -> None:
        path = self._chance.choice(("/v1/info", "/v1/items?limit=50", "/", "/openapi.json"))
        self._send("list", "GET", path)

    def _add(self) -> None:
        chosen = self._chance.sample(self._ids, self._chance.choice((1, 1, 3)))
        self._version += 1
        items = []
        for id in chosen:
            file = io.BytesIO()
            image_of(id, self._version).save(file, "PNG")
            items.append({"id": id, "image": in_base64(file.getvalue()), "payload": {"version": str(self._version)}})
        self._write("add", chosen, self._version, "/v1/items", {"items": items})

    def _delete(self) -> None:
        chosen = self._chance.sample(self._ids, self._chance.choice((1, 2)))
        self._write("delete", chosen, None, "/v1/items/delete", {"ids": chosen})

    def _write(self, kind: str, ids: list[str], version: int | None, path: str, body: Options) -> None:
        allowed = self._ledger.allowed
        for id in ids:
            allowed[id] = allowed.get(id, {None}) | {version}
        if self._send(kind, "POST", path, (200, 201), json=body).is_success:
            for id in ids:
                allowed[id] = {version}

    def _bad(self) -> None:
        request, began = raw_request(self._chance), time.monotonic()
        if b"/v1/items/delete" in request[:60] or b'"seed' in request:
            return
        try:
            answer = exchange(self._service.port, request, WAIT)
        except (TimeoutError, OSError) as error:
            if not self._ledger.excused(began, time.monotonic()):
                self._ledger.blame(f"bad: {error!r}: {request[:300]!r}")
            return
        self._ledger.add("bad", str(answer[0] or "closed"), began, time.monotonic())
        if told := wrong_with(*answer):
            self._ledger.blame(f"bad: {told}: {request[:200]!r} -> {answer[2][:200]!r}")

    def _state(self) -> None:
        self._send("state", "GET", "/metrics")
        self._send("state", "GET", "/healthz")
        self._send("state", "GET", "/readyz")


def shows(answer: httpx.Response, id: str, version: int) -> bool:
    """Whether an answer is the image of a version of an item."""
    with contextlib.suppress(OSError):
        if answer.status_code == 200:
            found, expected = Image.open(io.BytesIO(answer.content)).convert("RGB"), image_of(id, version)
            return (found.size, found.tobytes()) == (expected.size, expected.tobytes())
    return False


def image_of(id: str, version: int) -> Image.Image:
    """An image for each version of each item."""
    key = zlib.crc32(f"{id} {version}".encode())
    image = Image.new("RGB", (8 + key % 83, 30), (key >> 8 & 255, key >> 16 & 255, key >> 24))
    image.putpixel((1, 1), (version % 256, version // 256 % 256, version >> 16))
    return image


def disturb(service: Service, server: LocalServer | None, ledger: Ledger, until: float, every: float) -> None:
    """Kill a worker, and kill or stop the store's server, in turns."""
    chance, turn = random.Random(3), 0
    while time.monotonic() + every < until:
        time.sleep(every)
        turn += 1
        if workers := service.workers:
            with ledger.outage("worker killed"), contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(workers), signal.SIGKILL)
        if server is not None and turn % 3 == 2:
            with ledger.outage("store stopped"):
                server.hang()
                time.sleep(12)
                _look_while_it_hangs(service, ledger)
                time.sleep(8)
                server.go_on()
        elif server is not None:
            with ledger.outage("store killed"):
                server.kill()
                time.sleep(chance.uniform(1, 8))
                server.start()


def _look_while_it_hangs(service: Service, ledger: Ledger) -> None:
    found: int | str
    for path, status in (("/metrics", 200), ("/healthz", 200), ("/readyz", 503)):
        began = time.monotonic()
        try:
            found = httpx.get(service.url + path, timeout=5, trust_env=False).status_code
        except httpx.HTTPError as error:
            found = repr(error)
        if found != status:
            ledger.blame(
                f"while the store hangs, {path} is {found} after {time.monotonic() - began:.1f} s, not {status}"
            )


def watch_memory(service: Service, until: float) -> list[tuple[float, float]]:
    """(seconds, MB) every few seconds."""
    began, samples = time.monotonic(), []
    while time.monotonic() < until and service.alive:
        samples.append((time.monotonic() - began, service.memory))
        time.sleep(2)
    return samples


def of_memory(samples: list[tuple[float, float]]) -> dict[str, float]:
    """Figures of the samples after the first fifth, in which caches fill."""
    kept = np.array(samples[len(samples) // 5 :])
    tenth = max(1, len(kept) // 10)
    start, end = np.median(kept[:tenth, 1]), np.median(kept[-tenth:, 1])
    slope = np.polyfit(kept[:, 0] / 60, kept[:, 1], 1)[0]
    largest = max(memory for _, memory in samples)
    return {"start_mb": start, "end_mb": end, "mb_per_minute": slope, "largest_mb": largest, "ratio": end / start}


def orphans(service: Service, seeds: int) -> int:
    """How many more picture files there are than items that were added; some by requests that are bad but valid."""
    info = httpx.get(f"{service.url}/v1/info", timeout=WAIT, trust_env=False).json()
    files = list((service.folder / "collection" / UPLOADED_IMAGES).glob("[0-9a-f][0-9a-f]/*"))
    return len(files) - (int(info["galleries"]["images"]["n"]) - seeds)


def check_seeds(service: Service, ledger: Ledger, n: int) -> None:
    """Look for the items of the beginning, which nobody deletes."""
    with httpx.Client(timeout=WAIT, trust_env=False) as http:
        for i in range(n):
            if (status := http.get(f"{service.url}/v1/items/seed/{i}").status_code) != 200:
                ledger.blame(f"lost: seed/{i}: {status}")


def soak(store: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The load on one store; returns its figures."""
    server = SERVERS[store](folder / "server") if store in SERVERS else None
    if server is not None:
        server.start()
    service, ledger = Service(folder, server.url if server else store, options.items), Ledger()
    clients = [Client(i, service, ledger, options.seed) for i in range(CLIENTS)]
    until, loads = time.monotonic() + 60 * options.minutes, [os.getloadavg()[1]]
    try:
        with ThreadPoolExecutor(CLIENTS + 2) as pool:
            memory = pool.submit(watch_memory, service, until)
            pool.submit(disturb, service, server, ledger, until, options.disturb)
            for running in [pool.submit(one.run, until, CLIENTS / options.rate) for one in clients]:
                running.result()
        alive = service.alive
        time.sleep(SLACK / 4)
        loads.append(os.getloadavg()[1])
        figures: dict[str, Any] = {
            "load_of_machine": loads,
            "requests": ledger.figures(),
            "memory": of_memory(memory.result()),
            "served_to_the_end": alive,
        }
        if alive:
            figures["orphans"] = orphans(service, options.items)
            for one in clients:
                one.check()
            check_seeds(service, ledger, options.items)
        figures["items_checked"] = len(ledger.allowed) + options.items
        _restart(service, clients, ledger)
        writes = [ledger.statuses[kind][s] for kind in ("add", "delete") for s in ("200", "201")]
        figures["acknowledged_writes"] = sum(writes)
        figures["exit_status"] = service.stop()
    finally:
        with contextlib.suppress(Exception):
            service.stop(signal.SIGKILL)
        if server is not None:
            server.kill()
    if figures["memory"]["ratio"] > 1.1:
        ledger.blame(f"memory is not flat: {figures['memory']}")
    outages = Counter(what for what, _, _ in ledger.outages)
    figures |= {"outages": dict(outages), "wrong": len(ledger.wrong), "first": ledger.wrong[:20]}
    if ledger.wrong:
        figures["log"] = (folder / "service.log").read_text(encoding="utf-8").splitlines()[-60:]
    return {"store": store, **figures}


def _restart(service: Service, clients: list[Client], ledger: Ledger) -> None:
    """Kill the service while it writes, start it again, and look for what was acknowledged."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        for one in clients:
            pool.submit(one.run, time.monotonic() + 10, 0.0, kinds={"add": 2, "delete": 1})
        time.sleep(3)
        with ledger.outage("service killed"):
            service.stop(signal.SIGKILL)
    service.start()
    for one in clients:
        one.check()


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("stores", nargs="+", metavar="STORE_URL", help="store URL, postgresql, or milvus")
    parser.add_argument("--minutes", type=float, default=30.0, help="of load on each store")
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second at most, of all clients together")
    parser.add_argument("--disturb", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--items", type=int, default=2000, help="items that are there at first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.stores[0], options.items, options.port)
        return 0
    results = []
    for store in options.stores:
        with tempfile.TemporaryDirectory(prefix="sfumato-soak-") as folder:
            Path(folder).chmod(0o755)  # PostgreSQL runs as nobody.
            results.append(soak(store, options, Path(folder)))
        print(json.dumps(results[-1], indent=2), flush=True)
        about = {"benchmark": "soak", "python": platform.python_version(), "minutes": options.minutes}
        write_json(options.json, {**about, "rate": options.rate, "seed": options.seed, "results": results})
    return 1 if any(one["wrong"] for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
