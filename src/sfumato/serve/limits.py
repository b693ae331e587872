"""What requests share: threads, amounts such as pixels and bytes, and the right to arrive slowly."""

import asyncio
import contextlib
import ctypes
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.types import Receive

from sfumato.serve.schemas import Refusal, busy
from sfumato.serve.settings import Settings

Done = TypeVar("Done")

SMALL_BODY = 65_536
"""Bytes of a body that count for no budget: requests without images never wait for those with."""

PIECE = 1_000_000
"""Bytes of a body that are handled at a time: the event loop and the other threads wait for no longer copy."""

_PROMPT, _GRACE = 1.0, 5.0
"""Seconds after which a body counts as slow, and after which it must have kept the least rate."""

_REST = 2.0
"""Seconds without large bodies after which their memory goes back to the system."""


class Budget:
    """An amount that requests share, such as pixels at work."""

    def __init__(self, most: int, what: str) -> None:
        self.most, self.what, self.used = most, what, 0

    def take(self, amount: int) -> None:
        """Take some."""
        if self.used and amount and self.used + amount > self.most:
            raise busy(f"Too many {self.what}; send the request again in a moment")
        self.used += amount

    def give_back(self, amount: int) -> None:
        """Give some back."""
        self.used -= amount

    @contextlib.contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Take some for a while."""
        self.take(amount)
        try:
            yield
        finally:
            self.give_back(amount)


class Threads:
    """A few threads. Work waits for one in the task of its caller: if he leaves, it is dropped."""

    def __init__(self, n: int, name: str, initializer: Callable[[], object] | None = None) -> None:
        self.pool = ThreadPoolExecutor(n, name, initializer)
        self._free = asyncio.Semaphore(n)

    async def run(self, work: Callable[..., Done], *arguments: object) -> Done:
        """Run work in a thread; work that has begun continues if the caller stops waiting."""
        await self._free.acquire()
        try:
            running = asyncio.wrap_future(self.pool.submit(work, *arguments))
        except RuntimeError:
            self._free.release()
            raise busy("The service is shutting down", 5) from None
        # The thread is free when the work is done, whether or not the caller still waits then.
        task = asyncio.ensure_future(self._until_free(running))
        task.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # By the shutdown, not by the caller.
                raise busy("The service is shutting down", 5) from None
            raise

    async def _until_free(self, running: "asyncio.Future[Done]") -> Done:
        try:
            return await running
        finally:
            self._free.release()


def _retrieve(task: "asyncio.Task[Done]") -> None:
    """Take the error of work whose caller has left; asyncio would write a traceback into the log."""
    if not task.cancelled():
        task.exception()


class Body:
    """A body that has arrived, in the parts in which it came. It keeps nothing of what was taken from it."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = deque(parts)

    def __bool__(self) -> bool:
        """Whether something is left."""
        return bool(self._parts)

    def take(self) -> bytes:
        """The next piece."""
        taken, size = list[bytes](), 0
        while self._parts and size < PIECE:
            taken.append(self._parts.popleft())
            size += len(taken[-1])
        return b"".join(taken)


@dataclass(eq=False)
class _Arrival:
    """A body that arrives."""

    started: float
    deadline: asyncio.Timeout
    size: int = 0
    charged: int = 0
    parts: list[bytes] = field(default_factory=list)
    refusal: Refusal | None = None
    check: asyncio.TimerHandle | None = None

    def stop(self, refusal: Refusal, now: float) -> None:
        self.refusal = refusal
        self.deadline.reschedule(now)


class Bodies:
    """Reads the bodies of requests within limits of size, time, rate, number and memory.

    A body that has not arrived after a second is slow. If there are too many slow ones, the slowest is refused. So they
    shut out nobody but each other.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bytes = Budget(settings.byte_budget, "large requests in memory")
        self._slow: set[_Arrival] = set()
        self._rest: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def arrived(self, announced: str, receive: Receive) -> AsyncIterator["Body | None"]:
        """A body, which counts for the budget of bytes until the request has been answered."""
        if not (announced.isascii() and announced.isdecimal() and len(announced) < 20):
            raise Refusal(400, "Content-Length is not a number", headers={"Connection": "close"})
        if int(announced) > 2 * self.settings.max_body_bytes:
            raise self._large()
        arrival = _Arrival(asyncio.get_running_loop().time(), asyncio.timeout(self.settings.timeout))
        try:
            if not await self._read(arrival, receive):
                yield None
                return
            body, arrival.parts = Body(arrival.parts), []
            if arrival.size > self.settings.max_body_bytes:
                raise self._large()
            yield body
        finally:
            self.bytes.give_back(arrival.charged)
            if arrival.charged and not self.bytes.used:
                if self._rest is not None:
                    self._rest.cancel()
                self._rest = asyncio.get_running_loop().call_later(_REST, self._give_memory_back)

    async def _read(self, arrival: _Arrival, receive: Receive) -> bool:
        """Read a body; False if the client has left."""
        loop, limit, more = asyncio.get_running_loop(), self.settings.max_body_bytes, True
        try:
            async with arrival.deadline:
                arrival.check = loop.call_later(_PROMPT, self._check, arrival)
                try:
                    while more:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            return False
                        part, more = message.get("body", b""), message.get("more_body", False)
                        arrival.size += len(part)
                        if arrival.size > 2 * limit:
                            raise self._large()
                        if arrival.size <= limit:
                            charge = max(0, arrival.size - SMALL_BODY) - arrival.charged
                            self.bytes.take(charge)
                            arrival.charged += charge
                            arrival.parts.append(part)
                finally:
                    arrival.check.cancel()
                    self._slow.discard(arrival)
        except TimeoutError:
            slow = f"The request did not arrive within {self.settings.timeout:g} seconds"
            raise arrival.refusal or Refusal(408, slow, headers={"Connection": "close"}) from None
        except Refusal as refusal:
            refusal.headers = {**(refusal.headers or {}), "Connection": "close"}
            raise
        return True

    def _check(self, arrival: _Arrival) -> None:
        """Look at a body that has not arrived in time, every second."""
        loop, least = asyncio.get_running_loop(), self.settings.min_rate
        now = loop.time()
        self._slow.add(arrival)
        if now - arrival.started >= _GRACE and arrival.size < least * (now - arrival.started):
            reason = f"The request arrives at fewer than {least} bytes a second"
            arrival.stop(Refusal(408, reason, headers={"Connection": "close"}), now)
            return
        if len(self._slow) > self.settings.max_slow:
            slowest = min(self._slow, key=lambda one: one.size / (now - one.started))
            self._slow.discard(slowest)
            refusal = busy("Too many requests arrive slowly, and this one is the slowest; send it again in a moment", 5)
            refusal.headers = {**(refusal.headers or {}), "Connection": "close"}
            slowest.stop(refusal, now)
            if slowest is arrival:
                return
        arrival.check = loop.call_later(_PROMPT, self._check, arrival)

    def _give_memory_back(self) -> None:
        if not self.bytes.used:
            asyncio.get_running_loop().run_in_executor(None, _trim)

    def _large(self) -> Refusal:
        reason = f"The request has more than {self.settings.max_body_bytes} bytes"
        return Refusal(413, reason, headers={"Connection": "close"})


_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
"""Parameters of glibc's mallopt."""


def share_memory() -> None:
    """Have all threads share one pool of memory, where the C library is glibc; call it before threads start.

    Otherwise each of many pools keeps megabytes that :func:`_trim` cannot reach. In the pool the memory of a body is
    used again for the next one; to return and take it anew each time was tried, and fewer images were answered.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 512 << 20)):
            mallopt(parameter, value)


def _trim() -> None:
    """Give free memory back to the system; glibc alone keeps what large bodies took."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
