"""Bodies of requests within limits of size, time and memory, and budgets that requests share."""

import asyncio
import contextlib
import ctypes
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field

from starlette.types import Receive

from sfumato.serve.problems import Refusal, busy
from sfumato.serve.settings import Settings

SMALL_BODY = 65_536
"""Bytes of a body that count for no budget: requests without images never wait for those with."""


PIECE = 1_000_000
"""Bytes of a body that are handled at a time: the event loop and the other threads wait for no longer copy."""


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


@dataclass
class _Arrival:
    """A body that arrives."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    charged: int = 0


class Bodies:
    """Reads the bodies of requests within limits of size, time and memory."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bytes = Budget(int(settings.byte_budget_mb * 1_000_000), "large requests in memory")
        self._rest: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def arrived(self, announced: str, receive: Receive) -> AsyncIterator["Body | None"]:
        """A body, which counts for the budget of bytes until the request is answered; None if the client has left."""
        arrival = _Arrival()
        try:
            try:
                whole = await self._read(arrival, announced, receive)
            except Refusal as refusal:
                refusal.headers = {**(refusal.headers or {}), "Connection": "close"}
                raise
            body, arrival.parts = Body(arrival.parts), []
            yield body if whole else None
        finally:
            self.bytes.give_back(arrival.charged)
            if arrival.charged and not self.bytes.used:
                if self._rest is not None:
                    self._rest.cancel()
                self._rest = asyncio.get_running_loop().call_later(_REST, self._give_memory_back)

    async def _read(self, arrival: _Arrival, announced: str, receive: Receive) -> bool:
        """Read a body; False if the client has left. Up to twice the limit is read, so that the refusal arrives."""
        limit, seconds, more = self.settings.max_body_bytes, self.settings.timeout, True
        large = Refusal(413, f"The request has more than {limit} bytes")
        if not (announced.isascii() and announced.isdecimal() and len(announced) < 20):
            raise Refusal(400, "Content-Length is not a number")
        if int(announced) > 2 * limit:
            raise large
        try:
            async with asyncio.timeout(seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part, more = message.get("body", b""), message.get("more_body", False)
                    arrival.size += len(part)
                    if arrival.size > 2 * limit:
                        raise large
                    if arrival.size <= limit:
                        charge = max(0, arrival.size - SMALL_BODY) - arrival.charged
                        self.bytes.take(charge)
                        arrival.charged += charge
                        arrival.parts.append(part)
        except TimeoutError:
            raise Refusal(408, f"The request did not arrive within {seconds:g} seconds") from None
        if arrival.size > limit:
            raise large
        return True

    def _give_memory_back(self) -> None:
        if not self.bytes.used:
            asyncio.get_running_loop().run_in_executor(None, _trim)


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
