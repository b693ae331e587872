"""Two services on one PostgreSQL behind the nginx of deploy/: upgrades and kills lose nothing."""

import contextlib
import itertools
import re
import shutil
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serve.test_conventions import listed
from support.postgresql import postgresql
from support.scripts import benchmark
from support.serving import Process, add, collected, embedded, new_item, ready, served, until
from support.stores_contract import free_port

from sfumato.models.run import load_run
from sfumato.serve.settings import open_sources

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def store():
    pytest.importorskip("psycopg")
    with postgresql() as server:
        yield server


class Services:
    def __init__(self, folder):
        self.folder, self.ports = folder, [free_port(), free_port()]
        self.running = [self._begin(port) for port in self.ports]

    def _begin(self, port):
        return Process(self.folder, "--port", str(port), "--set", "drain=2.5", "--set", "timeout=10")

    def end(self, i, signal_number):
        process, self.running[i] = self.running[i], None
        return process.end(signal_number)

    def start(self, i):
        self.running[i] = self._begin(self.ports[i])
        until(lambda: ready(self.running[i].client))

    def asked(self, i):
        until(lambda: 'route="/v1/search",status="200"' in self.running[i].client.get("/metrics").text)


@pytest.fixture
def shared(store, run, data, tmp_path):
    loaded = load_run(run)
    return collected(loaded, embedded(loaded, data), tmp_path / "collection", store.url())


@pytest.fixture
def services(shared):
    both = Services(shared)
    yield both
    for i in range(2):
        if both.running[i] is not None:
            both.end(i, signal.SIGTERM)


@pytest.fixture
def proxy(services, tmp_path):
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    nginx = benchmark("proxy_server").ProxyServer(tmp_path, tuple(services.ports))
    nginx.start()
    yield nginx.url
    nginx.kill()


@contextlib.contextmanager
def load(url):
    done, acknowledged, failures, over = Counter(), [], [], threading.Event()
    both = {"queries": [{"text": "a blue bar"}, {"id": "000.png"}]}
    asks = {
        "get": lambda client, n: client.get("/v1/search", params={"q": f"red {n % 7}"}),
        "post": lambda client, n: client.post("/v1/search", json=both),
        "add": lambda client, n: client.post("/v1/items", json={"items": [new_item(f"new/{n}.png")]}),
    }

    def run(kind):
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            for n in itertools.takewhile(lambda _: not over.wait(0.01), itertools.count()):
                try:
                    answer = asks[kind](client, n)
                except httpx.HTTPError as error:
                    failures.append((kind, repr(error)))
                    continue
                if not answer.is_success:
                    failures.append((kind, answer.status_code, answer.text))
                    continue
                done[kind] += 1
                if kind == "add":
                    acknowledged.append(f"new/{n}.png")

    with ThreadPoolExecutor(3) as pool:
        for kind in asks:
            pool.submit(run, kind)
        try:
            yield done, acknowledged, failures
        finally:
            over.set()


def more(done):
    before = done.copy()
    until(lambda: all(done[kind] >= before[kind] + 15 for kind in ("get", "post", "add")))


def test_an_image_that_another_service_writes_anew_is_not_removed(shared):
    with served(open_sources(shared)) as a, served(open_sources(shared)) as b:
        assert add(a, "one").status_code == 201
        before = a.get("/v1/pictures/one").content
        uploads, written = a.app.state.service.sources.galleries["images"].uploads, threading.Event()
        remove = uploads.remove
        uploads.__dict__["remove"] = lambda name: (written.wait(1), remove(name))
        with ThreadPoolExecutor(1) as pool:
            replaced = pool.submit(a.post, "/v1/items", json={"items": [new_item("one", "blue")]})
            until(lambda: b.get("/v1/pictures/one").content != before)
            assert add(b, "one").status_code == 200
            written.set()
            assert replaced.result().status_code == 200
        assert a.get("/v1/pictures/one").content == before


def test_two_services_behind_a_proxy(services, proxy):
    with load(proxy) as (done, acknowledged, failures):
        more(done)
        for i in (0, 1):  # A rolling upgrade: one stops as soon as the other is ready.
            assert services.end(i, signal.SIGTERM)[0] == 0
            services.start(i)
        assert failures == []
        services.asked(1)
        assert services.end(0, signal.SIGKILL)[0] == -signal.SIGKILL
        more(done)
    assert failures == []
    with httpx.Client(base_url=proxy, timeout=30, trust_env=False) as client:
        found = listed(client, 1000)
        assert len(set(found)) == len(found) and len(acknowledged) > 20 and set(acknowledged) <= set(found)
        assert len(found) - 48 - len(acknowledged) <= 1  # An addition that was on its way when a service went.
        for id in acknowledged[::5]:
            assert client.get(f"/v1/pictures/{id}").status_code == 200
    assert re.search(r'"status":200,.*"statuses":"502, 200"', (services.folder.parent / "access.log").read_text())
