"""Bodies in pieces, and memory that goes back."""

import io
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from PIL import Image
from support.serving import in_base64, served

from sfumato.serve.answering import Asked, without_bytes
from sfumato.serve.guard import PIECE, Body


def test_a_body_is_taken_in_pieces_and_leaves_nothing():
    parts = [bytes([i]) * 65_536 for i in range(100)]
    body, taken = Body(parts), []
    while body:
        taken.append(body.take())
    assert b"".join(taken) == b"".join(parts) and len(taken) == 7
    assert all(PIECE <= len(one) < PIECE + 65_536 for one in taken[:-1]) and taken[-1]
    assert body.take() == b"" and Body([b""])  # An empty body is a message, too.


def test_a_large_image_arrives_whole(sources, monkeypatch):
    file, pieces = io.BytesIO(), []
    noise = np.random.default_rng(0).integers(0, 256, (1000, 900, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "BMP")
    take = Body.take

    def noted(body):
        pieces.append(len(piece := take(body)))
        return piece

    monkeypatch.setattr(Body, "take", noted)
    with served(sources) as client:
        form = client.post("/v1/search/image", files={"image": ("a", file.getvalue())}).json()
        of_form, pieces[:] = list(pieces), []
        plain = client.post("/v1/search", json={"queries": [{"image": in_base64(file.getvalue())}]}).json()
        limits = client.app.state.service.settings
    assert len(of_form) == 3 and len(pieces) == 4 and max(of_form) < 2 * PIECE < limits.max_body_bytes
    assert form["answers"][0]["hits"] == plain["answers"][0]["hits"]


def test_a_query_keeps_a_digest_only_where_the_monitor_needs_it(sources):
    images, texts = sources.galleries["images"], sources.galleries["texts"]
    photo, words = Asked("image", "a", "", image=b"file"), Asked("text", "b", "", text="red")
    watched = {"images": images.drift is not None, "texts": texts.drift is not None}
    assert watched == {"images": True, "texts": True}
    assert without_bytes(photo, images).image == b""  # Its monitor looks at texts.
    other = Asked("image", "a", "", image=b"another")
    first, again, second = (without_bytes(one, texts).image for one in (photo, photo, other))
    assert len(first) == 16 and first == again != second
    assert without_bytes(words, images) == words


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps memory")
def test_threads_keep_no_memory_of_large_bodies():
    program = """
        import sys, threading
        from sfumato.serve import guard

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

        def work():
            together.wait()  # Each thread has a pool of memory of its own.
            large, small = bytes(8_000_000), [bytes(200_000) for _ in range(60)]
            del large, small
            parts = [bytes(range(256)) * 800 for _ in range(40)]
            del parts
            together.wait()
            together.wait()

        if sys.argv[1] == "now":
            guard.share_memory()
        together, before = threading.Barrier(7), resident()
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        together.wait()
        together.wait()
        guard._trim()
        print(resident() - before)
        together.wait()
    """

    def kept(how):
        command = [sys.executable, "-c", textwrap.dedent(program), how]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    before, now = kept("before"), kept("now")
    assert now < 3 and now < before / 5, (before, now)
