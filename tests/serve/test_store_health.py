"""A store that hangs or fails shows in /readyz and /metrics, which answer all the same; no request counts items."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support.serving import new_item, ready, remove, served, until

from sfumato.errors import UserError
from sfumato.search.candidates import ItemCount
from sfumato.serve.monitoring import StoreHealth
from sfumato.serve.settings import open_sources


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
    """(client, store) of a service that looks at its store often."""
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
