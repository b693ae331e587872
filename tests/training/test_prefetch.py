"""The background iterator: the same items, never too far ahead, errors passed on, and no thread left behind."""

import inspect
import itertools
import subprocess
import sys
import threading
import time

import pytest

from sfumato.training.batches import prefetch


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """But those of an event loop that an earlier test of the process has left."""
    own = lambda: {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")}
    before = own()
    yield
    assert own() == before


def test_items_are_made_in_a_thread_while_the_consumer_works():
    made = []

    def source():
        for i in range(5):
            made.append((i, threading.current_thread()))
            yield i

    items = prefetch(source(), 2)
    assert made == []
    assert next(items) == 0
    wait_until(lambda: len(made) == 3)
    time.sleep(0.05)
    # 0 is with the consumer; 1 and 2 wait; 3 is not begun.
    assert [i for i, _ in made] == [0, 1, 2] and threading.current_thread() not in {t for _, t in made}
    assert list(items) == [1, 2, 3, 4]


def test_an_exception_comes_after_the_items_before_it_and_a_consumer_that_stops_early_closes_the_source():
    def source():
        yield 1
        yield 2
        raise KeyError("the third")

    seen = []
    with pytest.raises(KeyError, match="the third") as caught:
        for item in prefetch(source(), 5):
            seen.append(item)
    assert seen == [1, 2]
    assert "source" in {entry.name for entry in caught.traceback}
    closed = []
    items = prefetch(endless(closed), 2)
    assert next(items) == 0
    thread = next(t for t in threading.enumerate() if t.name.startswith("prefetch"))
    start = time.monotonic()
    items.close()
    assert time.monotonic() - start < 1 and not thread.is_alive() and len(closed) == 1
    for item in prefetch(endless(closed)):
        if item == 3:
            break
    with pytest.raises(ZeroDivisionError):
        for item in prefetch(endless(closed)):
            1 / (3 - item)
    assert len(closed) == 3
    code = "import itertools\nfrom typing import *\nfrom collections import deque\nfrom collections.abc import *\n"
    code += "from concurrent.futures import ThreadPoolExecutor\n"
    code += f"T = TypeVar('T')\n{inspect.getsource(prefetch)}\nitems = prefetch(itertools.count())\nnext(items)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def endless(closed):
    try:
        yield from itertools.count()
    finally:
        closed.append(threading.current_thread())


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
