"""Two services on one PostgreSQL behind nginx, each killed 20 times under load: nothing acknowledged is lost.

    python benchmarks/kills.py [--kills 20] [--seed 0] [--json PATH]

The proxy is the nginx of deploy/, and the services are those of benchmarks/soak.py. Clients search by text (GET and
POST), add, replace and delete items with images, and read their own items, one request after the other with short
pauses. Meanwhile one of the services, PostgreSQL with all its processes, or nginx with its workers is killed with
SIGKILL, in random order, and started again. The next kill comes when both services answer searches again.

Every request is counted under the fault that it overlaps. Expected: none fails between faults; none fails while a
service is away; while the store is away requests succeed or answer 503 with Retry-After; while the proxy is away they
succeed or have no answer. A write without an acknowledgement may have been made or not: it is counted as unknown, and
both states are right. Items are compared all the while. At the end every item is compared with what was acknowledged
(id, version in the payload, pixels of the image), and each service lists every id once. Exits with 1 if something is
wrong.
"""

import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from measuring import command_parser, write_json
from proxy_server import ProxyServer
from service_world import WORDS
from soak import OWN, WAIT, Client, Ledger, Service, check_seeds, orphans, shows
from store_servers import PostgresServer, free_port

CLIENTS, PAUSE, ITEMS = 6, 0.03, 300
"""Clients, mean seconds between the requests of one, and items that nobody changes."""

KINDS = {"query": 20, "text": 20, "item": 20, "add": 25, "delete": 12}
"""Weights of the kinds of requests: search by GET and by POST, read, add or replace, delete."""

WRITES = ("add", "delete")
FAULTS, BETWEEN = ("service", "store", "proxy"), "between"
OK, AWAY = "ok", "503"


@dataclass
class Target:
    """The proxy's address; the clients end when it is not alive."""

    url: str
    port: int
    alive: bool = True


@dataclass(frozen=True)
class Sent:
    """A request, and what came of it: ok, a status, or the name of a connection error."""

    began: float
    ended: float
    kind: str
    outcome: str
    told: str


@dataclass
class Record(Ledger):
    """A ledger that keeps every request, and counts it at the end under the fault that it overlaps."""

    sent: list[Sent] = field(default_factory=list)
    compared: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def fault_of(self, one: Sent) -> str:
        """What was away while a request ran."""
        return next((what for what, since, until in self.outages if one.began < until and since < one.ended), BETWEEN)

    def by_fault(self) -> dict[str, Counter[str]]:
        """Outcomes under each fault; blames those that are not expected there."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for one in self.sent:
            fault = self.fault_of(one)
            found[fault][one.outcome] += 1
            if not expected(fault, one.outcome):
                self.blame(f"{fault}: {one.kind}: {one.outcome} {one.told}")
        return found

    def writes(self) -> dict[str, int]:
        """Requests that write: acknowledged, and unknown."""
        outcomes = Counter(one.outcome == OK for one in self.sent if one.kind in WRITES)
        return {"acknowledged": outcomes[True], "unknown": outcomes[False]}


def expected(fault: str, outcome: str) -> bool:
    """Whether a request may end so."""
    no_answer = not outcome[0].isdigit()  # Not a status, so the name of an error.
    more = {"store": outcome == AWAY, "proxy": no_answer}
    return outcome == OK or more.get(fault, False)


class Caller(Client):
    """A client that keeps every request."""

    def __init__(self, number: int, target: Target, record: Record, seed: int) -> None:
        super().__init__(number, target, record, seed)
        self._record = record

    def _send(
        self, kind: str, method: str, path: str, fine: tuple[int, ...] = (200,), **options: Any
    ) -> httpx.Response:
        began = time.monotonic()
        answer = self._answer(method, path, **options)
        outcome = OK if answer.status_code in fine else answer.headers.get("Error", str(answer.status_code))
        if outcome == AWAY and "Retry-After" not in answer.headers:
            outcome = "503 without Retry-After"
        self._record.sent.append(Sent(began, time.monotonic(), kind, outcome, answer.text[:300]))
        return answer

    def _query(self) -> None:
        words = " ".join(self._chance.choices(WORDS, k=self._chance.randint(1, 6)))
        self._send("query", "GET", "/v1/search", params={"q": words})

    def _item(self) -> None:
        """Compare an item, and its image if only one version is right."""
        id = self._chance.choice(self._ids)
        allowed = self._record.allowed.get(id, {None})
        answer = self._send("item", "GET", f"/v1/items/{id}", (200, 404))
        if answer.status_code not in (200, 404):
            return
        found = int(answer.json()["payload"]["version"]) if answer.status_code == 200 else None
        self._record.compared += 1
        if found not in allowed:
            self._record.blame(f"lost: {id} is {found}, expected one of {allowed}")
        elif found is not None and len(allowed) == 1:
            answer = self._send("item", "GET", f"/v1/pictures/{id}")
            if answer.status_code == 200 and not shows(answer, id, found):
                self._record.blame(f"lost: the image of {id}, version {found}")


class Setup:
    """The store, two services and the proxy, and how each is killed and started again."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.record, self.seconds = record, defaultdict[str, list[float]](list)
        self.store = PostgresServer(folder / "server")
        self.store.start()
        ports = free_port(), free_port()
        self.services = [Service(folder, self.store.url, ITEMS, port) for port in ports]
        self.proxy = ProxyServer(folder / "proxy", ports)
        self.proxy.start()

    def kill(self, what: str, chance: random.Random) -> None:
        """Kill one of them, start it again, and wait until searches are answered as before."""
        began = time.monotonic()
        with self.record.outage(what):
            {"service": self._kill_service, "store": self._kill_store, "proxy": self._kill_proxy}[what](chance)
        self.seconds[what].append(time.monotonic() - began)

    def _kill_service(self, chance: random.Random) -> None:
        service = chance.choice(self.services)
        workers = service.workers
        service.stop(signal.SIGKILL)
        time.sleep(chance.uniform(0.2, 1))
        service.start()
        if not until(lambda: 'route="/v1/search",status="200"' in got(f"{service.url}/metrics").text):
            self.record.blame("the proxy does not use a service that was started again")
        if left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
            self.record.blame(f"{len(left)} of {len(workers)} processes of a killed service still run")

    def _kill_store(self, chance: random.Random) -> None:
        self.store.kill()
        time.sleep(chance.uniform(0.3, 3))
        self.store.start()
        began, search = time.monotonic(), f"{self.proxy.url}/v1/search?q=red"
        searched = until(lambda: got(search).status_code == 200)
        self.seconds["from store to search"].append(time.monotonic() - began)
        ready = [f"{one.url}/readyz" for one in self.services]
        if not searched or not until(lambda: all(got(one).status_code == 200 for one in ready)):
            self.record.blame("the services do not connect to the store again")

    def _kill_proxy(self, chance: random.Random) -> None:
        self.proxy.kill()
        time.sleep(chance.uniform(0.2, 1))
        self.proxy.start()

    def end(self) -> None:
        """End all."""
        self.proxy.kill()
        for service in self.services:
            if service.alive:
                service.stop(signal.SIGKILL)
        self.store.kill()


def until(true: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return False


def got(url: str) -> httpx.Response:
    """An answer; an error counts as 599."""
    try:
        return httpx.get(url, timeout=WAIT, trust_env=False)
    except httpx.HTTPError as error:
        return httpx.Response(599, text=repr(error))


def listed(url: str) -> Counter[str]:
    """How often each id is in the list of all items."""
    found, cursor = Counter[str](), ""
    while True:
        more: dict[str, str] = {"cursor": cursor} if cursor else {}
        answer = httpx.get(f"{url}/v1/items", params={"limit": 200, **more}, timeout=WAIT, trust_env=False)
        page = answer.raise_for_status().json()
        found.update(item["id"] for item in page["items"])
        if not (cursor := page["next_cursor"] or ""):
            return found


def check(setup: Setup, callers: list[Caller], record: Record) -> dict[str, int]:
    """Compare all items with what was acknowledged; returns how many were lost, doubled or not expected."""
    before = len(record.wrong)
    for caller in callers:
        caller.check()
    wrong = Counter({"lost": 0, "doubled": 0, "not_expected": 0})
    wrong["lost"] = len(record.wrong) - before
    for service in setup.services:
        check_seeds(service, record, ITEMS)
        found = listed(service.url)
        may = {f"seed/{i}" for i in range(ITEMS)} | {id for id, all in record.allowed.items() if all != {None}}
        must = {f"seed/{i}" for i in range(ITEMS)} | {id for id, all in record.allowed.items() if None not in all}
        wrong["doubled"] += sum(n > 1 for n in found.values())
        wrong["lost"] += len(must - set(found))
        wrong["not_expected"] += len(set(found) - may)
    if any(wrong.values()):
        record.blame(f"at the end: {dict(wrong)}")
    return dict(wrong)


def run(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """The kills under load; returns the figures."""
    record, chance = Record(), random.Random(seed)
    order = [what for what in FAULTS for _ in range(kills)]
    chance.shuffle(order)
    setup = Setup(folder, record)
    target = Target(setup.proxy.url, setup.proxy.port)
    callers = [Caller(i, target, record, seed) for i in range(CLIENTS)]
    began, loads = time.monotonic(), [os.getloadavg()[0]]
    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(one.run, float("inf"), PAUSE, kinds=KINDS) for one in callers]
            try:
                for what in order:
                    time.sleep(chance.uniform(0.5, 1.5))
                    setup.kill(what, chance)
                    loads.append(os.getloadavg()[0])
                time.sleep(1)
            finally:
                target.alive = False
            for one in running:
                one.result()
        minutes = (time.monotonic() - began) / 60
        outcomes = record.by_fault()
        at_end = check(setup, callers, record)
        left = orphans(setup.services[0], ITEMS)
    finally:
        setup.end()
    return {
        "minutes": round(minutes, 1),
        "load_of_machine": [round(min(loads), 1), round(max(loads), 1)],
        "kills": dict(Counter(order)),
        "outcomes": {fault: dict(sorted(outcomes[fault].items())) for fault in (*FAULTS, BETWEEN)},
        "seconds_away": {what: [round(min(all), 1), round(max(all), 1)] for what, all in setup.seconds.items()},
        "writes": record.writes(),
        "compared_meanwhile": record.compared,
        "items": {
            "own": CLIENTS * OWN,
            "of_one_right_state": CLIENTS * OWN - sum(len(all) > 1 for all in record.allowed.values()),
            "unchanged": ITEMS,
            "images_without_item": left,
        },
        "at_the_end": at_end,
        "wrong": len(record.wrong),
        "first": record.wrong[:20],
    }


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each: services, store, proxy")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sfumato-kills-") as folder:
        Path(folder).chmod(0o755)  # PostgreSQL runs as nobody.
        figures = run(options.kills, options.seed, Path(folder))
        if figures["wrong"]:
            log = (Path(folder) / "service.log").read_text(encoding="utf-8").splitlines()
            figures["log"] = [line for line in log if "connection failed" not in line][-200:]
    found = {"benchmark": "kills", "python": platform.python_version(), "seed": options.seed, **figures}
    print(json.dumps(found, indent=2, ensure_ascii=False))
    write_json(options.json, found)
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
