"""What one client, with a key or without, must not be able to do to the others."""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from data.test_transforms import turned
from PIL import Image
from support.pictures import encoded, noise
from support.raising import raises
from support.serving import KEY, begun, by_image, guard_of, in_base64, many_scans, picture, problem, served, until

from sfumato.data.image_decoding import REDUCED_FROM, decode_image
from sfumato.data.images import FolderImages
from sfumato.encoders.processors import PixelProcessor
from sfumato.errors import UserError
from sfumato.serve import decoding, guard
from sfumato.serve.decoding import HEADER, Decoders, Task, _Process, bytes_of
from sfumato.serve.embedding import input_task
from sfumato.serve.server import OnceASecond
from sfumato.serve.settings import Settings, parse_limits


def test_without_a_key_no_body_is_awaited_and_slow_ones_take_no_place(sources):
    with served(sources, keys=(KEY,), max_requests=2) as client, contextlib.ExitStack() as open_ones:
        for line, status in (
            *(("POST /", 405), ("POST /healthz", 405), ("POST /page/page.js", 405), ("PUT /page/nothing", 405)),
            *(("GET /readyz", 413), ("POST /v1/search", 401), ("POST /metrics", 401), ("GET /docs", 401)),
        ):
            answer = open_ones.enter_context(begun(client, line)).recv(10_000)
            assert int(answer.split()[1]) == status and b"application/problem+json" in answer, line
            assert status == 401 or b"connection: close" in answer.lower()
        assert client.get("/v1/search?q=a").status_code == client.get("/healthz").status_code == 200
        for line, status in (
            *(("GET /v1/info", b"413"), ("DELETE /v1/items/0", b"413"), ("POST /metrics", b"405")),
            ("POST /nothing", b"404"),
        ):
            with begun(client, line, headers=[f"X-API-Key: {KEY}"]) as connection:
                assert connection.recv(10_000).split()[1] == status
    with served(sources, max_requests=2) as client, contextlib.ExitStack() as open_ones:
        for _ in range(130):
            open_ones.enter_context(begun(client, "POST /v1/search", b"{", 10_000))
        for _ in range(3):
            assert client.get("/v1/search?q=a").status_code == 200
            assert client.post("/v1/search", json={"queries": [{"text": "a"}]}).status_code == 200


def test_a_file_may_take_longer_than_the_limit_and_whoever_reads_it_takes_no_place(sources, tmp_path):
    with (tmp_path / "000.png").open("wb") as file:
        file.truncate(24_000_000)
    read = replace(sources, galleries={"images": replace(sources.galleries["images"], images=FolderImages(tmp_path))})
    line, sizes = "GET /v1/pictures/000.png?original=true", []
    with served(read, timeout=0.7, max_requests=1) as client:
        for pauses in ([0.05] * 24, [2.0]):
            with begun(client, line, length=0, headers=["Connection: close"]) as connection:
                sizes.append(0)
                for pause in [*pauses, *[0] * 99]:
                    sizes[-1] += len(connection.recv(1_000_000, socket.MSG_WAITALL))
                    time.sleep(pause)
                    assert not pause or client.get("/v1/info").status_code == 200
    assert sizes[1] < 24_000_000 < sizes[0]  # Nothing was taken of the second for longer than the limit.


def test_half_a_request_is_hung_up_on_and_a_line_that_comes_again_is_logged_once_a_second(sources):
    with served(sources, timeout=1) as client, contextlib.ExitStack() as open_ones:
        client.get("/healthz")
        there = "127.0.0.1", client.base_url.port
        silent, half, second = (open_ones.enter_context(socket.create_connection(there, timeout=5)) for _ in "abc")
        half.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        second.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = second.recv(10_000)
        while not answer.endswith(b"}"):  # The head may come alone.
            answer += second.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 200")
        second.sendall(b"GET")
        began = time.monotonic()
        assert not silent.recv(1) and not half.recv(1) and not second.recv(1) and 0.5 < time.monotonic() - began < 4
        assert client.get("/healthz").status_code == 200
    once, line = OnceASecond(), logging.makeLogRecord({"msg": "socket.accept() out of system resource"})
    assert [once.filter(line) for _ in range(3)] == [True, False, False]
    assert once.filter(logging.makeLogRecord({"msg": "another"})) and once.filter(line)


def test_bodies_in_memory_have_a_budget_and_their_memory_goes_back(sources, monkeypatch):
    large = by_image(picture(size=(300, 300), format="BMP"))  # 360 KB in base64
    calls = []
    time.sleep(guard._REST + 0.2)  # What other services here have given back by then is not counted.
    monkeypatch.setattr(guard, "_REST", 0.1)
    monkeypatch.setattr(guard, "trim_memory", lambda: calls.append(0))
    with served(sources, timeout=60) as client:
        assert client.get("/v1/search?q=a").status_code == 200
        time.sleep(0.3)
        assert not calls and client.post("/v1/search", **large).status_code == 200
        until(lambda: calls == [0])
    monkeypatch.undo()
    with served(sources, byte_budget_mb=0.5, timeout=600) as client:
        assert client.post("/v1/search", **large).status_code == 200
        budget = guard_of(client.app).bodies.bytes
        until(lambda: budget.used == 0)  # The answer may be here before its body is forgotten.
        with begun(client, "POST /v1/search", b" " * 300_000, 500_000):
            until(lambda: budget.used == 300_000 - guard.SMALL_BODY)
            assert "Too many large requests in memory" in problem(client.post("/v1/search", **large), 503)["detail"]
            assert client.get("/v1/search?q=a").status_code == 200
            assert client.post("/v1/search", json={"queries": [{"text": "a"}]}).status_code == 200
        until(lambda: budget.used == 0)
        assert client.post("/v1/search", **large).status_code == 200


def test_responses_are_bounded_and_limits_checked(sources):
    with served(sources, max_records=60, max_results=40, max_response_bytes=140) as client:
        ask = {"queries": [{"text": "a"}] * 7, "max_results": 9}
        told = problem(client.post("/v1/search", json=ask), 422)
        assert "7 queries with 9 results each are more than the limit of 60 in all; send fewer" in told["detail"]
        ask = {"queries": [{"text": "a"}] * 5, "max_results": 4, "coverage": 0.999}
        for answer in client.post("/v1/search", json=ask).json()["answers"]:
            assert len(answer["conformal_set"]["hits"]) == 8 and not answer["conformal_set"]["complete"]
        (alone,) = client.post("/v1/search", json={**ask, "queries": ask["queries"][:1]}).json()["answers"]
        assert len(alone["conformal_set"]["hits"]) == 40
        texts = {"queries": [{"text": "a"}] * 3, "gallery": "texts"}  # 27 payloads of about 16 characters.
        told = problem(client.post("/v1/search", json=texts), 422)
        assert "the payloads of the response have more than 140 bytes" in told["detail"]
        told = problem(client.get("/v1/items?gallery=texts&limit=1000"), 422)
        assert told["errors"][0]["where"] == "limit" and "more than 140 bytes" in told["detail"]
    raises(UserError, "queue must be at least max_batch", Settings, queue=63)
    raises(UserError, "max_batch must be at most 1024", Settings, queue=5000, max_batch=1025)
    assert Settings(queue=63, max_batch=63).max_batch == 63
    assert parse_limits(["timeout=60", "max_batch=7"]) == {"timeout": 60.0, "max_batch": 7}
    raises(UserError, "did you mean max_batch.*known: max_upload_mb", parse_limits, ["max_bach=7"])
    raises(UserError, "expected a whole number, e.g. --set max_batch=64", parse_limits, ["max_batch=7.5"])
    raises(UserError, "no limit is called ''", parse_limits, ["=7"])


class SlowDecoders:
    def __init__(self, monkeypatch):
        self.go, self.begun, original = threading.Event(), 0, _Process.do

        def do(process, task, data):
            if task.name != "header":
                self.begun += 1
                self.go.wait(20)
            return original(process, task, data)

        monkeypatch.setattr(_Process, "do", do)


def test_texts_do_not_wait_for_pictures(sources, monkeypatch):
    encoder, go, embedding = type(sources.model.image.encoder), threading.Event(), threading.Event()
    forward = encoder.forward
    with served(sources, timeout=8) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        slow = SlowDecoders(monkeypatch)
        waits = lambda self, inputs: (embedding.set(), go.wait(20), forward(self, inputs))[-1]
        monkeypatch.setattr(encoder, "forward", waits)
        asked = [pool.submit(client.post, "/v1/search", **by_image(picture())) for _ in range(4)]
        until(lambda: slow.begun >= 2)
        assert client.get("/v1/search?q=a").status_code == 200
        slow.go.set()
        assert embedding.wait(20) and client.get("/v1/search?q=a").status_code == 200
        go.set()
        assert [one.result().status_code for one in asked] == [200] * 4


def test_what_nobody_waits_for_is_not_decoded(sources, monkeypatch):
    with served(sources, workers=1, timeout=1) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        slow, body = SlowDecoders(monkeypatch), {"queries": [{"image": in_base64(picture())}] * 5}
        asked = [pool.submit(client.post, "/v1/search", json=body) for _ in range(4)]
        assert [one.result().status_code for one in asked] == [504] * 4
        assert slow.begun == 1  # Of 20.
        embedder = client.app.state.service.embedder
        assert embedder.decoders._threads.pool._work_queue.qsize() == 0  # No bodies wait for a thread.
        slow.go.set()
        assert client.post("/v1/search", **by_image(picture())).status_code == 200
        assert slow.begun == 2 and embedder.decoding == 0 and client.app.state.service.embedder.pixels.used == 0


def test_lists_and_json_are_bounded_and_a_large_image_arrives_whole(client, monkeypatch):
    for path, body, where in (
        ("/v1/search", {"queries": [{"text": "a"}] * 1025}, "body.queries"),
        ("/v1/items", {"items": [{"id": "a", "text": "a"}] * 1025}, "body.items"),
        ("/v1/items/delete", {"ids": ["a"] * 1025}, "body.ids"),
    ):
        told = problem(client.post(path, json=body), 422)
        assert told["errors"][0]["where"] == where and "at most 1024" in told["errors"][0]["message"]
    send = lambda body, path="/v1/search": client.post(path, content=body, headers={"Content-Type": "application/json"})
    told = problem(send(b'{"queries":[' + b",".join([b'{"text":"a"}'] * 90_000) + b"]}"), 413)
    assert "beside its images, more than the limit of 1000000" in told["detail"]
    problem(send(b'{"queries":[' + b",".join([b'{"image":""}'] * 350_000) + b"]}"), 413)
    problem(send(b'{"ids":[' + b",".join([b'"a"'] * 300_000) + b"]}", "/v1/items/delete"), 413)
    told = problem(send(b'{"queries":[{"text":"a"}],' + b",".join(b'"%d":1' % i for i in range(2000)) + b"}"), 422)
    assert "it has 2000 errors" in told["detail"]
    large = in_base64(picture(size=(800, 600), format="BMP"))  # 1.9 MB in base64
    assert send(b'{"queries":[{"image": "' + large.encode() + b'"}]}').status_code == 200
    file, pieces, take = encoded(noise(900, 1000), "BMP"), [], guard.Body.take

    def noted(body):
        pieces.append(len(piece := take(body)))
        return piece

    monkeypatch.setattr(guard.Body, "take", noted)
    answer = client.post("/v1/search", **by_image(file)).json()["answers"][0]
    limits = client.app.state.service.settings
    assert len(pieces) == 4 and max(pieces) < 2 * guard.PIECE < limits.max_body_bytes and answer["hits"]


def photo(size, format="JPEG", mode="RGB", **options):
    blurred = Image.fromarray(noise(12, 9)).resize(size, Image.Resampling.BICUBIC)
    return encoded(blurred.convert(mode), format, **options)


def go(work, n=1, seconds=20.0, memory_bytes=1_000_000_000):
    async def run():
        decoders = Decoders(n, seconds=seconds, memory_bytes=memory_bytes)
        with contextlib.closing(decoders):
            return await work(decoders)

    return asyncio.run(run())


def test_the_pixels_are_those_of_this_process_and_very_large_files_decoded_at_a_part_of_their_size():
    files = {
        "png": photo((300, 200), "PNG"), "transparent": photo((200, 300), "PNG", "RGBA"),
        "palette": photo((120, 90), "GIF", "P"), "jpeg": photo((640, 480)), "cmyk": photo((100, 80), "JPEG", "CMYK"),
        "turned": photo((90, 60), exif=turned()), "webp": photo((64, 65), "WEBP"), "tiff": photo((31, 77), "TIFF"),
    }  # fmt: skip
    fits = "squash", "crop", "crop-nearest", "crop-margin"

    async def work(decoders):
        towers = [type("Tower", (), {"processor": PixelProcessor(24, fit=fit)})() for fit in fits]
        tasks = [*(input_task(one, lambda data: None) for one in towers), Task("rgb", {"side": 64}, bytes_of)]
        return [await decoders.all(task, list(files.values())) for task in tasks]

    *squares, whole = go(work, n=2)
    for fit, found in zip(fits, squares, strict=True):
        for name, pixels in zip(files, found, strict=True):
            np.testing.assert_array_equal(pixels, decode_image(files[name], 24, fit=fit), err_msg=f"{name} {fit}")
    for name, file in zip(files, whole, strict=True):
        assert file.startswith(b"BM")
        if min(decode_image(files[name], None).shape[1:]) < 128:
            np.testing.assert_array_equal(decode_image(file, None), decode_image(files[name], None), err_msg=name)
        else:  # Reduced by a whole number, or decoded at a part of its size.
            assert 64 <= min(decode_image(file, None).shape[1:]) < 128, name
    small, large = photo((2400, 1600)), photo((2592, 1600))
    assert 2400 * 1600 < REDUCED_FROM < 2592 * 1600
    np.testing.assert_array_equal(decode_image(small, 64, reduced=True), decode_image(small, 64))
    whole, part = decode_image(large, 64).astype(float), decode_image(large, 64, reduced=True).astype(float)
    assert 0 < np.abs(whole - part).max() < 8 and np.sqrt(np.square(whole - part).mean()) < 1
    # Four times 448 pixels are more than its shorter side has.
    np.testing.assert_array_equal(decode_image(large, 448, reduced=True), decode_image(large, 448))


SQUARE = Task("square", {"size": 16, "fit": "squash"}, bytes_of)


@pytest.mark.parametrize(("own_time", "told"), [(True, "0.2 seconds of the processor to"), (False, "0.2 seconds to")])
def test_what_takes_too_long_is_stopped_and_the_next_is_decoded(monkeypatch, own_time, told):
    if own_time and not decoding.KNOWS_ITS_TIME:
        pytest.skip("this system has no such limit")
    slow = many_scans(90, (2400, 2400))
    # Without a limit of its own time the process is stopped by the clock: it gets one that it does not reach.
    monkeypatch.setattr(decoding, "KNOWS_ITS_TIME", own_time)
    monkeypatch.setattr(decoding, "PATIENCE", 100.0)

    async def work(decoders):
        (process,) = decoders._processes
        await decoders.run(HEADER, picture())  # The process has started.
        process.seconds = 0.2
        send = decoding.send
        if not own_time:
            without = lambda pipe, message: send(pipe, ({**message[0], "seconds": 0}, message[1]))
            monkeypatch.setattr(decoding, "send", without)
        with pytest.raises(ValueError, match=rf"takes more than {told} decode; send a smaller copy"):
            await decoders.run(SQUARE, slow)
        process.seconds = 20
        return await decoders.run(SQUARE, picture())

    assert len(go(work)) == 3 * 16 * 16


own_time = pytest.mark.skipif(not decoding.KNOWS_ITS_TIME, reason="this system has no limit of processor time")


@own_time
def test_the_limit_is_that_of_each_image(monkeypatch):
    monkeypatch.setattr(decoding, "PATIENCE", 100.0)
    file, began = many_scans(30, (1000, 1000)), time.process_time()
    decoding.done("square", SQUARE.options, file)
    one = time.process_time() - began

    async def work(decoders):
        (process,) = decoders._processes
        await decoders.run(SQUARE, file)
        first, process.seconds = process.child.pid, 5 * one
        for _ in range(10):  # Together twice as long as one may take.
            await decoders.run(SQUARE, file)
        return first == process.child.pid

    assert one > 0.02 and go(work)


@own_time
def test_a_search_by_image_on_a_busy_computer_is_sent_again(sources):
    file = by_image(picture())
    with served(sources, workers=1) as client:
        assert client.post("/v1/search", **file).status_code == 200
        (process,) = client.app.state.service.embedder.decoders._processes
        process.seconds = 0.2
        os.kill(process.child.pid, signal.SIGSTOP)
        began, told = time.monotonic(), problem(busy := client.post("/v1/search", **file), 503)
        assert 0.25 <= time.monotonic() - began < 15  # By the clock it may take longer than of the processor.
        assert "too busy to decode" in told["detail"] and busy.headers["retry-after"] == "5"
        process.seconds = 20
        assert client.post("/v1/search", **file).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
def test_what_takes_too_much_memory_is_refused():
    large = picture(size=(5000, 5000))

    async def work(decoders):
        found = await decoders.all(SQUARE, [large, picture(), picture(size=(5000, 5000), format="WEBP")])
        return [found[0], len(found[1]), found[2]]

    first, second, third = go(work, memory_bytes=170_000_000)
    assert "takes too much memory to decode" in str(first) and second == 3 * 16 * 16 and isinstance(third, ValueError)


def test_a_process_that_ends_is_replaced(monkeypatch):
    async def work(decoders):
        (process,) = decoders._processes
        await decoders.run(HEADER, picture())
        first, kill = process.child.pid, getattr(signal, "SIGKILL", signal.SIGTERM)
        os.kill(first, kill)
        assert len(await decoders.run(SQUARE, picture())) == 3 * 16 * 16 and process.child.pid != first
        monkeypatch.setattr(process, "memory_bytes", "no number")  # Every new one ends at once.
        os.kill(process.child.pid, kill)
        with pytest.raises(ValueError, match="it stops the program that decodes images"):
            await decoders.run(SQUARE, picture())
        monkeypatch.undo()
        assert len(await decoders.run(SQUARE, picture())) == 3 * 16 * 16

    go(work)


def test_the_images_of_a_request_and_all_requests_share_a_budget_of_pixels(sources):
    file = by_image(picture(size=(30, 30)))
    with served(sources, max_pixels=2000, pixel_budget=1000) as client:
        pixels = client.app.state.service.embedder.pixels
        assert client.post("/v1/search", **file).status_code == 200 and pixels.used == 0
        pixels.take(200)  # Another request.
        told = problem(busy := client.post("/v1/search", **file), 503)
        assert "Too many images to decode" in told["detail"] and busy.headers["retry-after"] == "1"
        assert client.get("/v1/search?q=a").status_code == 200
        pixels.take(-200)
        large = by_image(picture(size=(40, 40)))
        assert client.post("/v1/search", **large).status_code == 200  # Alone, whatever its size.
        queries = [{"image": in_base64(picture(size=(30, 30)))}] * 3
        assert client.post("/v1/search", json={"queries": queries[:2]}).status_code == 200
        told = problem(client.post("/v1/search", json={"queries": queries}), 413)
        assert "body.queries.2.image" in told["detail"] and "2700 pixels, more than the limit of 2000" in told["detail"]
