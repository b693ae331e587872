"""Images decoded in processes: the same pixels as here, and files and processes that fail."""

import asyncio
import contextlib
import io
import os
import signal
import sys
import time

import numpy as np
import pytest
from PIL import Image
from support.serving import by_image, in_base64, many_scans, picture, problem, served

from sfumato.data.image_decoding import REDUCED_FROM, decode_image
from sfumato.encoders.processors import PixelProcessor
from sfumato.serve import decoding
from sfumato.serve.decoding import HEADER, Decoders, Task, bytes_of
from sfumato.serve.embedding import input_task

PHOTO = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
"""Blurred when it is enlarged; no two pixels alike."""


def photo(size, format="JPEG", mode="RGB", **options):
    file = io.BytesIO()
    Image.fromarray(PHOTO).resize(size, Image.Resampling.BICUBIC).convert(mode).save(file, format, **options)
    return file.getvalue()


def turned(size):
    exif = Image.Exif()
    exif[0x0112] = 6
    return photo(size, exif=exif)


def go(work, n=1, seconds=20.0, memory_bytes=1_000_000_000):
    """The result of work(decoders)."""

    async def run():
        decoders = Decoders(n, seconds=seconds, memory_bytes=memory_bytes)
        with contextlib.closing(decoders):
            return await work(decoders)

    return asyncio.run(run())


FILES = {
    "png": photo((300, 200), "PNG"), "transparent": photo((200, 300), "PNG", "RGBA"),
    "palette": photo((120, 90), "GIF", "P"), "jpeg": photo((640, 480)), "cmyk": photo((100, 80), "JPEG", "CMYK"),
    "turned": turned((90, 60)), "webp": photo((64, 65), "WEBP"), "tiff": photo((31, 77), "TIFF"),
}  # fmt: skip


def test_the_pixels_are_those_of_this_process_and_very_large_files_decoded_at_a_part_of_their_size():
    fits = "squash", "crop", "crop-nearest", "crop-margin"

    async def work(decoders):
        towers = [type("Tower", (), {"processor": PixelProcessor(24, fit=fit)})() for fit in fits]
        tasks = [*(input_task(one, lambda data: None) for one in towers), Task("rgb", {"side": 64}, bytes_of)]
        return [await decoders.all(task, list(FILES.values())) for task in tasks]

    *squares, whole = go(work, n=2)
    for fit, found in zip(fits, squares, strict=True):
        for name, pixels in zip(FILES, found, strict=True):
            np.testing.assert_array_equal(pixels, decode_image(FILES[name], 24, fit=fit), err_msg=f"{name} {fit}")
    for name, file in zip(FILES, whole, strict=True):
        assert file.startswith(b"BM")
        if min(decode_image(FILES[name], None).shape[1:]) < 128:
            np.testing.assert_array_equal(decode_image(file, None), decode_image(FILES[name], None), err_msg=name)
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


def stopped(process):
    """Stop a process of the decoders: time goes by, but not its own."""
    os.kill(process.child.pid, signal.SIGSTOP)


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
        stopped(process)
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
