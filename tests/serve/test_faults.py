"""What goes wrong is told and harms nobody; what those who run the service rely on: draining, logs, health, metrics."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import io
import itertools
import json
import logging
import random
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import httpx
import numpy as np
import pytest
import uvicorn
from PIL import Image, PngImagePlugin
from support import serving
from support.photographs import halves, heic, saved
from support.raising import failing, raises
from support.scripts import benchmark
from support.serving import KEY, Process, in_base64, new_item, picture, ready, remove, search, served, until

from sfumato.data.images import POINTER, FolderImages, UploadedImages
from sfumato.errors import UserError
from sfumato.search.candidates import ItemCount
from sfumato.serve.app import create_app
from sfumato.serve.decoding import Unavailable, shown, stored
from sfumato.serve.embedding import Batcher
from sfumato.serve.monitoring import StoreHealth
from sfumato.serve.problems import Refusal
from sfumato.serve.server import Server, log_to_stderr
from sfumato.serve.service import Service
from sfumato.serve.settings import ServedGallery, Settings, Sources, open_sources
from sfumato.serve.writing import Writer


def test_pictures_that_are_none_and_limits(client, sources):
    for file, status, message in (
        (serving.bomb(), 413, "more pixels than the limit"),
        (serving.bomb(10_000, 5_000), 413, "10000 x 5000 are more pixels than the limit of 40000000"),
        (serving.picture()[:40], 422, "not an image"),
        (serving.picture(size=(200, 200), format="JPEG")[:500], 422, "cannot be decoded"),
        (serving.many_scans(5000), 422, "scans, more than the limit of 100"), (b"", 422, "the file is empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422, "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 422, "not an image"),
    ):  # fmt: skip
        asked = {"queries": [{"text": "fine"}, {"image": serving.in_base64(file)}]}
        told = serving.problem(client.post("/v1/search", json=asked), status)
        assert "body.queries.1.image" in told["detail"] and message in told["detail"]
    with serving.served(sources, max_upload_mb=0.02, max_pixels=1000, max_results=5, max_batch=2) as client:
        told = serving.problem(client.post("/v1/search", **serving.by_image(b"x" * 25_000)), 413)
        assert "25000 bytes are more than the limit of 20000" in told["detail"]
        for file in (b"x" * 100_000, b"x" * 5_000_000, serving.picture(size=(40, 40))):
            serving.problem(client.post("/v1/search", **serving.by_image(file)), 413)
        spaces, head = (b" " * 1000 for _ in range(110)), {"Content-Type": "application/json"}
        serving.problem(client.post("/v1/search", content=spaces, headers=head), 413)
        serving.problem(client.post("/v1/search", json={"queries": [{"text": "a"}] * 3}), 422)
        told = serving.problem(client.post("/v1/search", json={"queries": [{"text": "a"}], "max_results": 6}), 422)
        assert "more than the limit of 5" in told["detail"]
        assert len(client.get("/v1/search?q=a").json()["answers"][0]["hits"]) == 5  # The usual 10 are not asked for.


def test_pictures_that_are_stored_or_shown():
    place = Image.Exif()
    place[0x010E] = "where I live"
    place[0x0112] = 6
    file = picture("red", (30, 20), "JPEG", exif=place, comment=b"where I live")
    assert file.count(b"where I live") == 2 and shown(file, None)[1] == b""
    kept = stored(file)[1]
    copies = kept, shown(file, 16)[1], shown(file, None, copied=True)[1]
    assert all(copy and b"where I live" not in copy for copy in copies)
    assert Image.open(io.BytesIO(kept)).size == (20, 30)
    assert stored(serving.picture(format="WEBP"))[1].startswith(b"\x89PNG")
    told, copy = shown(serving.picture(format="BMP"), None)
    assert told == {"type": "image/png"} and copy.startswith(b"\x89PNG")
    assert shown(serving.picture(), None) == ({"type": "image/png"}, b"")  # As it is.
    raises(ValueError, "cannot be decoded", shown, serving.picture(size=(200, 200), format="JPEG")[:500], 16)
    photograph, clear = halves((120, 80)), Image.new("RGBA", (120, 80), (0, 0, 0, 0))
    scans = [saved("TIFF", photograph), saved("TIFF", Image.fromarray(np.full((80, 120), 40_000, np.uint16)))]
    if importlib.util.find_spec("pillow_heif"):
        scans.append(heic(photograph))
    for data in scans:
        for size in (None, 16):
            told, copy = shown(data, size)
            assert told == {"type": "image/jpeg"} and copy.startswith(b"\xff\xd8")
            assert max(Image.open(io.BytesIO(copy)).size) == (size or 120)
    left = Image.open(io.BytesIO(shown(scans[1], None)[1])).getpixel((5, 5))
    assert np.abs(np.array(left) - 40_000 / 257).max() < 3  # Not clipped to white.
    assert shown(saved("TIFF", clear), 16)[0] == {"type": "image/png"}
    avif = saved("AVIF", photograph)
    assert shown(avif, None) == ({"type": "image/avif"}, b"") and shown(avif, 16)[0] == {"type": "image/jpeg"}
    assert stored(avif)[1].startswith(b"\xff\xd8")


CLIMBS = (
    *("..%2fsecret.png", "%2e%2e/secret.png", "..%5csecret.png", "..\\secret.png", "%00", "000.png%00", "link.png"),
    *("inside/../000.png", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/etc/passwd", "%2fetc%2fpasswd", "linked/secret.png"),
    *("%ff", "a" * 600, "inside", "."),
)


def test_no_path_leads_out_of_the_service(client):
    climbs = itertools.product(("/v1/pictures/", "/v1/items/", "/page/"), CLIMBS, ("", "?original=true"))
    for route, path in ((route, path + asked) for route, path, asked in climbs):
        with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=10) as connection:
            connection.sendall(f"GET {route}{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))
        assert answer.split()[1] in (b"404", b"405", b"400") and b"root:" not in answer, (route, path, answer[:200])


def test_no_id_leads_out_of_the_folder_and_only_pictures_of_items_are_shown(tmp_path, sources):
    folder = tmp_path / "pictures"
    (folder / "inside").mkdir(parents=True)
    (folder / "000.png").write_bytes(serving.picture())
    (tmp_path / "secret.png").write_bytes(serving.picture("black"))
    for link, target in (("link.png", tmp_path / "secret.png"), ("linked", tmp_path), ("ring", folder / "ring")):
        (folder / link).symlink_to(target)
    pictures = FolderImages(folder)
    assert pictures.read("000.png", {}) == serving.picture()
    for id in (
        *("../secret.png", "link.png", "linked/secret.png", str(tmp_path / "secret.png"), "inside/../../secret.png"),
        *("ring", "", ".", "inside", "inside/../000.png", "000.png\0", "..\\secret.png", "a" * 5000),
        *("/000.png", "nothing.png"),
    ):
        assert pictures.read(id, {}) is None, id
    assert FolderImages(tmp_path / "nowhere").read("000.png", {}) is None
    (tmp_path / "link").symlink_to(tmp_path / "pictures")
    assert FolderImages(tmp_path / "link").read("000.png", {}) == serving.picture()
    uploaded = UploadedImages(tmp_path / "uploads")
    name = uploaded.write("../../x", serving.picture())
    assert uploaded.read("../../x", {POINTER: name}) == serving.picture() and uploaded.read("../../x", {}) is None
    for wrong in ("../../secret.png", "/etc/passwd", "", name + "/..", name.upper(), "\0"):
        assert uploaded.read("x", {POINTER: wrong}) is uploaded.path("x", {POINTER: wrong}) is None
    assert {p.parent.parent for p in tmp_path.rglob("*") if p.is_file() and len(p.name) == 32} == {tmp_path / "uploads"}
    gallery = sources.galleries["images"].gallery
    (folder / "not-an-item.png").write_bytes(serving.picture())
    small = replace(sources, galleries={"images": ServedGallery(gallery, FolderImages(folder))})
    private = PngImagePlugin.PngInfo()
    private.add_text("Description", "where I live")
    Image.new("RGB", (9, 9)).save(folder / "000.png", pnginfo=private)
    with serving.served(small, no_metadata=True) as client:
        for asked in ("", "?original=true"):
            assert b"where I live" not in client.get(f"/v1/pictures/000.png{asked}").content
    with serving.served(small) as client:
        assert client.get("/v1/pictures/000.png").content == (folder / "000.png").read_bytes()
        for asked in ("", "?original=true"):
            serving.problem(client.get(f"/v1/pictures/not-an-item.png{asked}"), 404)
            serving.problem(client.get(f"/v1/pictures/001.png{asked}"), 404)  # An item whose file has gone.
        whole = client.get("/v1/pictures/000.png?original=true")
        assert whole.content == (folder / "000.png").read_bytes() and whole.headers["content-type"] == "image/png"
        ask = lambda part, **more: client.get("/v1/pictures/000.png?original=true", headers={"Range": part, **more})
        for part, expected in (("bytes=3-9", whole.content[3:10]), ("bytes=-4", whole.content[-4:])):
            assert (ask(part).status_code, ask(part).content) == (206, expected)
        for wrong in ("bytes=999999-", "bytes=9-3", "bytes=-0", "bytes=x", "items=0-3", f"bytes={'9' * 5000}-"):
            assert serving.problem(ask(wrong), 416)["code"] == "no-such-part"
            assert ask(wrong).headers["content-range"] == f"bytes */{len(whole.content)}"
        assert ask("bytes=999999-", **{"If-Range": '"of before"'}).content == whole.content
        assert ask("bytes=0-3", **{"If-None-Match": whole.headers["etag"]}).status_code == 304


@pytest.mark.slow
def test_malformed_requests_never_make_it_stumble(client):
    pytest.importorskip("schemathesis")
    faults = benchmark("faults")
    counts, wrong, _ = faults.by_hand(client.base_url.port, 40, random.Random(7))
    assert not wrong and sum(counts.values()) == 40 and len(counts) > 5
    counts, wrong = faults.from_schema(str(client.base_url).rstrip("/"), 15, seed=7)
    assert not wrong and sum(counts.values()) > 10 and client.get("/v1/search?q=a+red+bar").status_code == 200


@pytest.fixture
def slowly(sources):
    return Sources(serving.SlowModel(sources.model), "slow", sources.galleries)


def test_too_many_requests_are_sent_away_and_those_who_leave_take_theirs_along(slowly):
    limits = {"batch_size": 1, "queue": 3, "max_batch": 3, "batch_window_ms": 0}
    with serving.served(slowly, **limits) as client, concurrent.futures.ThreadPoolExecutor(10) as pool:
        slowly.model.go.clear()
        asked = [pool.submit(client.get, "/v1/search?q=a") for _ in range(10)]
        serving.until(lambda: 'sfumato_waiting{kind="text"} 3.0' in client.get("/metrics").text)
        serving.until(lambda: sum(one.done() for one in asked) == 6)
        assert client.get("/healthz").status_code == 200
        slowly.model.go.set()
        answers = [one.result() for one in asked]
        for answer in (a for a in answers if a.status_code != 200):
            assert serving.problem(answer, 503) and answer.headers["retry-after"] == "1"
        assert [a.status_code for a in answers].count(200) == 4  # One at work and three that waited.
        assert client.get("/v1/search?q=a").status_code == 200
    with serving.served(slowly, max_requests=2) as client, concurrent.futures.ThreadPoolExecutor(2) as pool:
        slowly.model.go.clear()
        asked = [pool.submit(client.get, "/v1/search?q=a") for _ in range(2)]
        serving.until(lambda: serving.guard_of(client.app)._slots.used == 2)
        assert serving.problem(client.get("/v1/info"), 503) and client.get("/readyz").status_code == 200
        slowly.model.go.set()
        assert [one.result().status_code for one in asked] == [200, 200]
    with serving.served(slowly, batch_size=4) as client:
        slowly.model.go.clear()
        for _ in range(6):
            with socket.create_connection(("127.0.0.1", client.base_url.port)) as connection:
                connection.sendall(b"GET /v1/search?q=gone HTTP/1.1\r\nHost: a\r\n\r\n")
                serving.until(lambda: serving.guard_of(client.app)._slots.used)
            serving.until(lambda: not serving.guard_of(client.app)._slots.used)
        slowly.model.sizes.clear()
        slowly.model.go.set()
        assert client.get("/v1/search?q=here").status_code == 200
        assert sum(slowly.model.sizes) <= 2 + 4  # What was at work went on; of the rest nothing was computed.
        serving.until(lambda: 'route="/v1/search",status="499"} 6.0' in client.get("/metrics").text)


def test_what_takes_too_long_is_504_and_a_model_that_fails_500(slowly, caplog):
    with serving.served(slowly, timeout=0.5) as client:
        slowly.model.go.clear()
        told = serving.problem(client.get("/v1/search?q=a"), 504)
        assert "No answer within 0.5 seconds" in told["detail"]
        slowly.model.go.set()
        assert client.get("/v1/search?q=a").status_code == 200
        with serving.begun(client, "POST /v1/search", b"{", 50) as connection:  # And no more of the body.
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")
    with serving.served(slowly) as client:
        slowly.model.embed_texts = lambda texts: 1 / 0
        client.app.state.service.embedder.model = slowly.model
        told = serving.problem(client.get("/v1/search?q=a"), 500)
        assert "division" not in told["detail"]
        assert told["detail"].split()[-1] in caplog.text and "ZeroDivisionError" in caplog.text


def test_not_ready_before_and_after(slowly):
    slowly.model.go.clear()
    app = create_app(slowly)

    async def statuses():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
            async with app.router.lifespan_context(app):
                before = await client.get("/readyz")
                slowly.model.go.set()
                await app.state.service.warmed()
                while_it_runs = await client.get("/readyz")
            return before, while_it_runs, await client.get("/readyz")

    before, while_it_runs, after = asyncio.run(statuses())
    assert while_it_runs.status_code == 200
    assert serving.problem(before, 503)["code"] == serving.problem(after, 503)["code"] == "not-ready"


def test_a_store_that_fails_is_503(writable, monkeypatch, caplog):
    collection = writable.app.state.service.sources.galleries["images"].gallery
    fail = failing(UserError("the disk is full"))
    monkeypatch.setattr(collection.store, "upsert", fail)
    answer = serving.add(writable, "a")
    assert "the store failed" in serving.problem(answer, 503)["detail"].lower() and answer.headers["retry-after"]
    monkeypatch.setattr(collection.store, "search", fail)
    assert "log" in serving.problem(searched := writable.get("/v1/search?q=a"), 503)["detail"]
    assert "the disk is full" not in answer.text + searched.text  # Paths and hosts are for the log.
    assert caplog.text.count("the disk is full") == 2
    monkeypatch.undo()
    assert writable.get("/v1/search?q=a").status_code == 200
    serving.problem(writable.get("/v1/items/a"), 404)


def test_several_items_are_stored_or_none(writable, monkeypatch):
    def add(*items):
        new = [serving.new_item(id, colour, payload=payload) for id, colour, payload in items]
        return writable.post("/v1/items", json={"items": new})

    files = lambda: [p.name for p in (writable.folder / "pictures").rglob("*") if p.is_file()]
    assert add(("two", "red", {"by": "me"})).status_code == 201
    record, shown = writable.get("/v1/items/two"), writable.get("/v1/pictures/two")
    collection = writable.app.state.service.sources.galleries["images"].gallery
    upsert = collection.store.upsert

    def fail(records):
        if "two" in records.ids:
            raise UserError("the disk is full")
        upsert(records)

    monkeypatch.setattr(collection.store, "upsert", fail)
    both = ("one", "blue", {"by": "you", "at": "home"}), ("two", "blue", {})
    serving.problem(add(*both), 503)
    serving.problem(writable.get("/v1/items/one"), 404)
    assert writable.get("/v1/items/two").json() == record.json()
    assert writable.get("/v1/pictures/two").content == shown.content
    monkeypatch.undo()
    assert add(*both).status_code == 201 and len(files()) == 2
    assert writable.get("/v1/pictures/two").content == writable.get("/v1/pictures/one").content != shown.content
    assert writable.get("/v1/info").json()["galleries"]["images"]["fields"] == ["at", "by"]
    assert serving.remove(writable, "one").json()["deleted"] == 1 and len(files()) == 1
    assert writable.get("/v1/pictures/two").status_code == 200


def sent(client, id):
    body = json.dumps({"items": [serving.new_item(id)]}).encode()
    return serving.begun(client, "POST /v1/items", body, len(body))


def test_a_write_that_nobody_waits_for_does_not_begin(writable, monkeypatch):
    slow, go, queued, begin = threading.Event(), threading.Event(), threading.Semaphore(0), Writer._begin
    store = writable.app.state.service.sources.galleries["images"].gallery.store
    upsert = store.upsert
    monkeypatch.setattr(store, "upsert", lambda records: (slow.set(), go.wait(20), upsert(records)))
    monkeypatch.setattr(Writer, "_begin", lambda self, work: (begin(self, work), queued.release())[0])
    with sent(writable, "first"):
        assert slow.wait(20) and queued.acquire(timeout=20)
        with sent(writable, "second"):
            assert queued.acquire(timeout=20)
    gone = 'sfumato_requests_total{method="POST",route="/v1/items",status="499"} 2.0'
    serving.until(lambda: gone in writable.get("/metrics").text)
    go.set()
    assert serving.remove(writable, "000.png").status_code == 200  # After both.
    assert writable.get("/v1/items/first").status_code == writable.get("/v1/pictures/first").status_code == 200
    serving.problem(writable.get("/v1/items/second"), 404)


def test_batcher():
    sizes = []

    def double(items):
        sizes.append(len(items))
        if "bad" in items:
            raise RuntimeError("bad")
        return [ValueError("odd") if item == "odd" else 2 * item for item in items]

    async def go():
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            batcher = Batcher(double, pool, size=4, window=0.05, waiting=6)
            with pytest.raises(Unavailable, match="shutting down"):
                await batcher.submit(["a"])
            batcher.start()
            found = await batcher.submit(["a", "odd", "b"])
            assert found[0] == "aa" and isinstance(found[1], ValueError) and found[2] == "bb" and sizes == [3]
            assert await batcher.submit(list("abcdef")) == ["aa", "bb", "cc", "dd", "ee", "ff"] and sizes[1:] == [4, 2]
            found = await batcher.submit(["a", "bad", "b"])
            assert found[0] == "aa" and isinstance(found[1], RuntimeError) and found[2] == "bb"
            with pytest.raises(Unavailable, match="busy"):
                await batcher.submit(["x"] * 7)
            left = asyncio.ensure_future(batcher.submit(["left"]))
            await asyncio.sleep(0)
            left.cancel()
            sizes.clear()
            assert await batcher.submit(["c"]) == ["cc"] and sizes == [1]
            waiting = asyncio.ensure_future(batcher.submit(["d"]))
            await asyncio.sleep(0)
            await batcher.close()
            assert isinstance((await waiting)[0], Unavailable) and len(batcher) == 0

    asyncio.run(go())


def test_every_error_is_a_problem_that_can_be_said(client):
    serving.problem(client.get("/v1/search/"), 404)
    serving.problem(client.post("/v1/search", content=b"{}", headers={"Content-Type": "text/plain"}), 415)
    serving.problem(client.post("/v1/search", files={"image": ("a", serving.picture())}), 415)
    serving.problem(client.post("/v1/items", data={"id": "a"}), 415)
    for body, where in (
        (b"", "body"), (b"[" * 100_000, "body"), (b'{"queries":[{"text":"\xff"}]}', "body"),
        (b'{"queries":[{"text":"\\ud800"}]}', "body"),
        (b'{"queries":[{"text":"a"}],"max_results":' + b"9" * 5000 + b"}", "body"),
        (b'{"queries":[{"text":"a"}],"min_probability":NaN}', "body.min_probability"),
        (b'{"queries":[{"text":"a"}],"coverage":1e999}', "body.coverage"),
        (b'{"queries":[{"text":"a"}],"colour":1}', "body.colour"),
        (b'{"queries":[{"text":"a"}],"filter":{"wear":{}}}', "body.filter.wear"),
        (b'{"queries":[{"text":"  "}]}', "body.queries.0.text"),
        (b'{"queries":[{"text":"a\\u0000b"}]}', "body.queries.0.text"),
        (b'{"queries":[{"text":"a"}],"filter":{"where":{"a\\u0000":["b"]}}}', "body.filter.where.a\0.[key]"),
        (b'{"queries":[{"text":"a","id":"b"}]}', "body.queries.0"), (b'{"queries":[]}', "body.queries"),
        (b'{"queries":[{"image":"\xc3\xa9"}]}', "body.queries.0.image"), (b"null", "body"),
    ):  # fmt: skip
        head = {"Content-Type": "application/json"}
        told = serving.problem(client.post("/v1/search", content=body, headers=head), 422)
        assert told["errors"][0]["where"] == where, told
        message, in_words = told["errors"][0]["message"], b"u0000" in body or b'"  "' in body
        assert message and ("NUL" in message) == in_words and "pattern" not in told["detail"]
        if "unknown" in told["detail"]:
            assert f"{where}: unknown field '{where.rpartition('.')[2]}'" in told["detail"]
    for path in ("search", "search?q=", "search?q=a&where=nothing", "search?q=a&x=1", "items?limit=0"):
        assert serving.problem(client.get(f"/v1/{path}"), 422)["errors"][0]["where"].startswith("query"), path
    assert "expected FIELD=VALUE" in client.get("/v1/search?q=a&where=nothing").json()["detail"]
    serving.problem(client.post("/v1/search", json={"queries": [{"id": "nobody"}]}), 404)
    response = Refusal(422, "\ud800" * 2000, errors=[("body.\ud800", "x" * 5000)] * 100).response()
    assert len(response.body) < 20_000 and b"?" in response.body


def test_it_says_what_to_install(sfumato, monkeypatch, tmp_path):
    (tmp_path / "manifest.json").touch()
    monkeypatch.setitem(sys.modules, "sfumato.serve.app", None)
    assert 'pip install "sfumato[serve]"' in sfumato.refused("serve", tmp_path, "--port", 0)


@pytest.mark.slow
def test_sigterm_first_tells_the_proxy_and_goes_on_answering(collection):
    process = Process(collection, "--set", "drain=2")
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
    assert status == 0 and "Traceback" not in err and time.monotonic() - began > 1.9
    raises(httpx.ConnectError, None, httpx.get, f"{url}/healthz", trust_env=False)


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
    secret = "a purple walrus"
    with logged(), served(sources, keys=(KEY,)) as client:
        given = client.get("/v1/search", params={"q": secret}, headers={"X-Request-ID": "from-a-proxy.1"})
        made = client.post("/v1/search", json={"queries": [{"image": in_base64(picture()), "name": secret}]})
        odd = client.get(f"/v1/items/{secret}", headers={"X-Request-ID": 'no "id"'})
        client.app.state.service.item = None  # An error in the service.
        failed = client.get(f"/v1/items/{secret}")
    assert given.headers["x-request-id"] == "from-a-proxy.1"
    ids = [answer.headers["x-request-id"] for answer in (made, odd, failed)]
    assert len(set(ids)) == 3 and all(len(id) == 16 for id in ids)
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    assert secret not in text and KEY not in text
    by_id = {line["request_id"]: line for line in lines if line.get("status")}
    searched = by_id["from-a-proxy.1"]
    assert (searched["method"], searched["path"], searched["status"]) == ("GET", "/v1/search", 200)
    assert searched["milliseconds"] > 0 and searched["level"] == "debug" and searched["time"].endswith("+00:00")
    assert [by_id[id]["status"] for id in ids] == [200, 404, 500] and by_id[ids[1]]["path"] == "/v1/items/{id:path}"
    (error,) = [line for line in lines if line["level"] == "error"]
    assert error["request_id"] == ids[2] and "TypeError" in error["exception"]


class FickleStore:
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
    monkeypatch.setattr("sfumato.serve.service.StoreHealth", partial(StoreHealth, every=0.05, patience=0.3))
    sources = open_sources(collection)
    gallery = sources.galleries["images"].gallery
    gallery.store = store = FickleStore(gallery.store)
    gallery.items = ItemCount(lambda: store.count())
    with served(sources) as client:
        yield client, store
        store.go.set()


def metrics(client):
    lines = (line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}


def test_a_store_that_hangs_shows_and_darkens_nothing(fickle):
    client, store = fickle
    assert client.get("/readyz").status_code == 200 and metrics(client)['sfumato_store_up{gallery="images"}'] == 1
    store.go.clear()
    with ThreadPoolExecutor(6) as pool:
        searches = [pool.submit(client.get, "/v1/search?q=red") for _ in range(6)]
        until(lambda: not ready(client))
        assert "the store of the images has not answered for" in client.get("/readyz").json()["detail"]
        began, found = time.monotonic(), metrics(client)
        assert client.get("/healthz").status_code == 200 and time.monotonic() - began < 5
        assert found['sfumato_store_up{gallery="images"}'] == found["sfumato_ready"] == 0
        assert found['sfumato_items{gallery="images"}'] == 48
        store.go.set()
        assert [search.result().status_code for search in searches] == [200] * 6
    until(lambda: ready(client))
    assert metrics(client)["sfumato_ready"] == 1
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
    assert metrics(client)['sfumato_items{gallery="images"}'] == 49 and store.counting <= {"store of images"}
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


def test_first_hits_stand_beside_what_the_calibration_expects_and_abstentions_are_counted(sources):
    queries = [{"text": f"{number} {colour} bars"} for number in ("one", "two", "three") for colour in ("red", "blue")]
    with served(sources) as client:
        said = [answer["hits"][0]["match_probability"] for answer in search(client, *queries, max_results=1)]
        told = metrics(client)
        search(client, *queries, min_probability=0.01)  # Neither a cut nor a filter, nor another kind of query.
        search(client, *queries, filter={"max_total_variance": 1e9})
        search(client, {"image": in_base64(picture())})
        after, risks = metrics(client), client.get("/v1/info").json()["galleries"]["images"]["risks"]
        answers = [answer for risk in risks for answer in search(client, *queries, abstain=risk)]
        abstentions = metrics(client)
    name = 'sfumato_first_hit_probability_{}{{gallery="images",{}target="listed"}}'
    assert told[name.format("count", "")] == after[name.format("count", "")] == len(queries)
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
    assert len(answers) == len(risks) * len(queries) > 0
