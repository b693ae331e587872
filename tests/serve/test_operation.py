"""What those who run the service rely on: it is drained before it ends, and its log is JSON if wanted."""

import contextlib
import json
import logging
import signal
import time

import httpx
import pytest
import uvicorn
from support.serving import KEY, Process, in_base64, picture, ready, served, until

from sfumato.serve.server import Server, log_to_stderr
from sfumato.serve.service import Service
from sfumato.serve.settings import Settings

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
    """The log of the service in JSON on standard error, without the handlers of pytest."""
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
