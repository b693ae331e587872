"""One step ahead: an iterator that runs in a thread while its consumer works. It knows nothing of what it carries."""

import queue
import sys
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")


def prefetch(source: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Run an iterator in a background thread, at most ``depth`` items ahead of whoever takes them.

    The thread starts with the first item that is asked for. It ends with the source, with the source's exception, or when the
    consumer closes the generator (a loop that is left does that): then the item that is being made is finished, the source is
    closed in its own thread, and only after that does ``close`` return.

    Args:
        source: makes the items; from then on used in the thread alone.
        depth: items that wait or are being made while the consumer works on one; at least 1.

    Yields:
        The items in their order.

    Raises:
        ValueError: depth is less than 1.
        BaseException: what the source raises, after the items before it.
    """
    if depth < 1:
        raise ValueError(f"prefetch: depth must be at least 1, got {depth}")
    return _prefetched(source, depth)


def _prefetched(source: Iterable[T], depth: int) -> Generator[T, None, None]:
    made: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
    room = threading.Semaphore(depth)
    stop = threading.Event()

    def make() -> None:
        end: BaseException | None = None
        try:
            items = iter(source)
            try:
                while room.acquire() and not stop.is_set():
                    made.put((next(items),))
            finally:
                if isinstance(items, Generator):
                    items.close()
        except StopIteration:
            pass
        except BaseException as error:
            end = error
        made.put(end)

    thread = threading.Thread(target=make, name="prefetch", daemon=True)
    thread.start()
    try:
        while isinstance(item := made.get(), tuple):
            room.release()
            yield item[0]
            del item  # Or it would be kept alive until the next one is there.
        if item is not None:
            raise item
    finally:
        stop.set()
        room.release()
        # An interpreter that is going down may have stopped the thread where it stood.
        if not sys.is_finalizing():
            thread.join()
