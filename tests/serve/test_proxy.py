"""Two services on one PostgreSQL behind the nginx of deploy/: upgrades and kills lose nothing."""

import re
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serve.test_conventions import listed
from support.postgresql import postgresql
from support.scripts import benchmark
from support.serving import Process, add, embedded, new_item, ready, served, until
from support.stores_contract import free_port

from sfumato.models.run import load_run
from sfumato.serve.settings import open_sources
from sfumato.workflows.index import create_collection

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def store():
    pytest.importorskip("psycopg")
    with postgresql() as server:
        yield server


class Services:
    """Two services of a collection, each on a port of its own, that can be started again."""

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
        """Wait until the proxy sends requests to a service."""
        until(lambda: 'route="/v1/search",status="200"' in self.running[i].client.get("/metrics").text)


@pytest.fixture
def shared(store, run, data, tmp_path):
    """A collection in PostgreSQL."""
    loaded = load_run(run)
    part = embedded(loaded, data)
    with create_collection(loaded, part, tmp_path / "collection", store.url()) as made:
        made.upsert(part.embeddings, part.ids, part.payload)
    return tmp_path / "collection"


@pytest.fixture
def services(shared):
    both = Services(shared)
    yield both
    for i in range(2):
        if both.running[i] is not None:
            both.end(i, signal.SIGTERM)


@pytest.fixture
def proxy(services, tmp_path):
    """The address of nginx with the file of deploy/."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    nginx = benchmark("proxy_server").ProxyServer(tmp_path, tuple(services.ports))
    nginx.start()
    yield nginx.url
    nginx.kill()


class Load:
    """Clients that search and add without a pause, and what they were answered."""

    def __init__(self, url):
        self.url, self.failures, self.acknowledged, self.answers = url, [], [], Counter()
        self._over = threading.Event()
        work = self._get, self._post, self._add
        self._threads = [threading.Thread(target=self._run, args=(one, i)) for i, one in enumerate(work)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, send, i):
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            n = 0
            while not self._over.is_set():
                try:
                    answer = send(client, n)
                except httpx.HTTPError as error:
                    self.failures.append((send.__name__, repr(error), ""))
                else:
                    self.answers[send.__name__, answer.status_code] += 1
                    if not answer.is_success:
                        self.failures.append((send.__name__, answer.status_code, answer.text))
                n += 1
                time.sleep(0.01)

    def _get(self, client, n):
        return client.get("/v1/search", params={"q": f"red {n % 7}"})

    def _post(self, client, n):
        return client.post("/v1/search", json={"queries": [{"text": "a blue bar"}, {"id": "000.png"}]})

    def _add(self, client, n):
        id = f"new/{n}.png"
        answer = client.post("/v1/items", json={"items": [new_item(id)]})
        if answer.is_success:
            self.acknowledged.append(id)
        return answer

    def more(self, n=15):
        """Wait for that many further additions and searches."""
        before = self.answers.copy()
        until(lambda: all(self.answers[kind] >= before[kind] + n for kind in (("_get", 200), ("_post", 200))))
        wanted = len(self.acknowledged) + n
        until(lambda: len(self.acknowledged) >= wanted)


def test_an_image_that_another_service_writes_anew_is_not_removed(shared):
    """A replaces x by y and is about to remove the file of x, when B writes x again."""
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
    with Load(proxy) as load:
        load.more()
        for i in (0, 1):  # A rolling upgrade: one stops as soon as the other is ready.
            assert services.end(i, signal.SIGTERM)[0] == 0
            services.start(i)
        assert load.failures == []
        services.asked(1)
        assert services.end(0, signal.SIGKILL)[0] == -signal.SIGKILL
        load.more()
    assert load.failures == []
    with httpx.Client(base_url=proxy, timeout=30, trust_env=False) as client:
        found = listed(client, 1000)
        assert len(set(found)) == len(found) and len(load.acknowledged) > 20
        assert set(load.acknowledged) <= set(found)
        assert len(found) - 48 - len(load.acknowledged) <= 1  # An addition that was on its way when a service went.
        for id in load.acknowledged[::5]:
            assert client.get(f"/v1/pictures/{id}").status_code == 200
    assert re.search(r'"status":200,.*"statuses":"502, 200"', (services.folder.parent / "access.log").read_text())
