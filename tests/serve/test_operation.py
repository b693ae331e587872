"""What those who run the service rely on: drained before it ends, a log in JSON, health of its store, metrics."""

import contextlib
import json
import logging
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
import uvicorn
from support.serving import KEY, Process, in_base64, new_item, picture, ready, remove, search, served, until

from sfumato.errors import UserError
from sfumato.search.candidates import ItemCount
from sfumato.serve.monitoring import StoreHealth
from sfumato.serve.server import Server, log_to_stderr
from sfumato.serve.service import Service
from sfumato.serve.settings import Settings, open_sources

SECRET = "a purple walrus"


@pytest.mark.slow
def test_sigterm_first_tells_the_proxy_and_goes_on_answering(collection):
    process = Process(collection, "--set", "drain=2", "--set", "batch_window_ms=1500")
    url = process.client.base_url
    until(lambda: ready(process.client))
    assert "connection" not in process.client.get("/healthz").headers
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    until(lambda: not ready(process.client))
    told = process.client.get("/readyz")
    assert told.status_code == 503 and told.headers["connection"] == "close"
    process.client.close()
    while time.monotonic() < began + 1:  # Each on a new connection.
        assert httpx.get(f"{url}/healthz", trust_env=False, timeout=20).status_code == 200
    answer = httpx.get(f"{url}/v1/search?q=red", trust_env=False, timeout=20)
    assert answer.status_code == 200 and answer.json()["answers"][0]["hits"]
    status, err = process.finish()
    assert status == 0 and "Traceback" not in err and time.monotonic() - began > 2.4
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz", trust_env=False)


def test_a_second_signal_ends_the_draining(client):
    service = Service(client.app.state.service.sources, Settings(drain=60))
    service.ready.set()
    server = Server(uvicorn.Config(client.app), service)
    server.handle_exit(signal.SIGTERM, None)
    assert service.draining and not service.ready.is_set() and not server.should_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit


@contextlib.contextmanager
def logged():
    root, service = logging.getLogger(), logging.getLogger("sfumato.serve")
    before = root.handlers[:], root.level, service.level
    root.handlers[:] = []
    try:
        log_to_stderr("json", access_log=True)
        yield
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        service.setLevel(before[2])


def test_a_log_of_json_has_a_line_a_request_without_what_was_asked(sources, capsys):
    with logged(), served(sources, keys=(KEY,)) as client:
        given = client.get("/v1/search", params={"q": SECRET}, headers={"X-Request-ID": "from-a-proxy.1"})
        made = client.post("/v1/search", json={"queries": [{"image": in_base64(picture()), "name": SECRET}]})
        odd = client.get(f"/v1/items/{SECRET}", headers={"X-Request-ID": 'no "id"'})
        client.app.state.service.item = None  # An error in the service.
        failed = client.get(f"/v1/items/{SECRET}")
    assert given.headers["x-request-id"] == "from-a-proxy.1"
    ids = [answer.headers["x-request-id"] for answer in (made, odd, failed)]
    assert len(set(ids)) == 3 and all(len(id) == 16 for id in ids)
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    assert SECRET not in text and KEY not in text
    by_id = {line["request_id"]: line for line in lines if line.get("status")}
    searched = by_id["from-a-proxy.1"]
    assert (searched["method"], searched["path"], searched["status"]) == ("GET", "/v1/search", 200)
    assert searched["milliseconds"] > 0 and searched["level"] == "debug" and searched["time"].endswith("+00:00")
    assert [by_id[id]["status"] for id in ids] == [200, 404, 500] and by_id[ids[1]]["path"] == "/v1/items/{id:path}"
    (error,) = [line for line in lines if line["level"] == "error"]
    assert error["request_id"] == ids[2] and "TypeError" in error["exception"]


class FickleStore:
    """A store that answers, waits, or fails as it is told; it notes which threads count."""

    def __init__(self, store):
        self._store, self.go, self.error, self.counting = store, threading.Event(), "", set()
        self.slow = None
        self.go.set()

    def __getattr__(self, name):
        if name == "count":
            self.counting.add(threading.current_thread().name)
            if self.slow:
                self.slow.set()
                self.go.clear()
        if name in ("search", "get", "count", "scan", "upsert", "delete"):
            assert self.go.wait(30)
            if self.error:
                raise UserError(self.error)
        return getattr(self._store, name)


@pytest.fixture
def fickle(collection, monkeypatch):
    often = partial(StoreHealth, every=0.05, patience=0.3)
    monkeypatch.setattr("sfumato.serve.service.StoreHealth", often)
    sources = open_sources(collection)
    gallery = sources.galleries["images"].gallery
    gallery.store = store = FickleStore(gallery.store)
    gallery.items = ItemCount(lambda: store.count())
    with served(sources) as client:
        yield client, store
        store.go.set()


def metrics(client):
    return dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")


def test_a_store_that_hangs_shows_and_darkens_nothing(fickle):
    client, store = fickle
    assert client.get("/readyz").status_code == 200 and metrics(client)['sfumato_store_up{gallery="images"}'] == "1.0"
    store.go.clear()
    with ThreadPoolExecutor(6) as pool:
        searches = [pool.submit(client.get, "/v1/search?q=red") for _ in range(6)]
        until(lambda: not ready(client))
        assert "the store of the images has not answered for" in client.get("/readyz").json()["detail"]
        began, found = time.monotonic(), metrics(client)
        assert client.get("/healthz").status_code == 200 and time.monotonic() - began < 5
        assert found['sfumato_store_up{gallery="images"}'] == found["sfumato_ready"] == "0.0"
        assert found['sfumato_items{gallery="images"}'] == "48.0"
        store.go.set()
        assert [search.result().status_code for search in searches] == [200] * 6
    until(lambda: ready(client))
    assert metrics(client)["sfumato_ready"] == "1.0"
    store.slow = threading.Event()  # Now it hangs while it counts.
    until(store.slow.is_set)
    until(lambda: not ready(client))
    store.go.set()
    store.slow = None
    until(lambda: ready(client))


def test_no_request_counts_and_a_store_that_fails_shows_and_is_logged_once(fickle, caplog):
    client, store = fickle
    store.counting.clear()
    new = {"items": [new_item(id) for id in ("a", "b", "000.png")]}
    assert client.post("/v1/items", json=new).json()["n"] == 50 and client.post("/v1/items", json=new).json()["n"] == 50
    assert remove(client, "a").json()["n"] == 49 and client.get("/v1/info").json()["galleries"]["images"]["n"] == 49
    for path in ("/v1/search?q=red", "/metrics", "/readyz"):
        assert client.get(path).status_code == 200
    assert metrics(client)['sfumato_items{gallery="images"}'] == "49.0" and store.counting <= {"store of images"}
    store._store.delete(["000.png", "001.png"])
    until(lambda: client.get("/v1/info").json()["galleries"]["images"]["n"] == 47)
    caplog.set_level("INFO", logger="sfumato.serve")
    store.error = "the server has gone"
    until(lambda: not ready(client))
    assert "the store of the images cannot be read" in client.get("/readyz").json()["detail"]
    time.sleep(0.3)
    assert caplog.text.count("the store of the images cannot be read: the server has gone") == 1
    store.error = ""
    until(lambda: ready(client))
    assert caplog.text.count("the store of the images answers again") == 1


QUERIES = [{"text": f"{number} {colour} bars"} for number in ("one", "two", "three") for colour in ("red", "blue")]


def values(client):
    lines = (line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}


def test_first_hits_stand_beside_what_the_calibration_expects_and_abstentions_are_counted(sources):
    with served(sources) as client:
        said = [answer["hits"][0]["match_probability"] for answer in search(client, *QUERIES, max_results=1)]
        told = values(client)
        search(client, *QUERIES, min_probability=0.01)  # Neither a cut nor a filter, nor another kind of query.
        search(client, *QUERIES, filter={"max_total_variance": 1e9})
        search(client, {"image": in_base64(picture())})
        after, risks = values(client), client.get("/v1/info").json()["galleries"]["images"]["risks"]
        answers = [answer for risk in risks for answer in search(client, *QUERIES, abstain=risk)]
        abstentions = values(client)
    name = 'sfumato_first_hit_probability_{}{{gallery="images",{}target="listed"}}'
    assert told[name.format("count", "")] == after[name.format("count", "")] == len(QUERIES)
    assert told[name.format("sum", "")] == pytest.approx(sum(said), rel=1e-4)
    limit = sorted(said)[2]
    bucket = next(k / 10 for k in range(1, 11) if k / 10 >= limit)
    assert told[name.format("bucket", f'le="{bucket}",')] == sum(p <= bucket for p in said)
    fit = sources.galleries["images"].gallery.scorer.of_hits
    expected = float(fit.probability(fit.scores.nearest, n_gallery=48).mean())
    assert told['sfumato_calibrated_probability{gallery="images"}'] == pytest.approx(expected, rel=1e-5)
    # Calibrated on galleries of 48: there are nine texts.
    assert 'sfumato_calibrated_probability{gallery="texts"}' not in told
    for abstained, word in ((True, "yes"), (False, "no")):
        n = sum(answer["abstained"] is abstained for answer in answers)
        assert abstentions.get(f'sfumato_abstentions_total{{abstained="{word}",gallery="images"}}', 0) == n
    assert len(answers) == len(risks) * len(QUERIES) > 0
