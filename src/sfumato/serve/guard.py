"""The middleware before every route: keys and their rights, limits, timeouts, security headers and metrics.

It reads the bodies of requests within limits of size, time and memory, which requests share.
"""

import asyncio
import contextlib
import ctypes
import hmac
import logging
import re
import secrets
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sfumato.serve.monitoring import Metrics
from sfumato.serve.problems import Refusal, busy
from sfumato.serve.settings import Rights, Settings

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none';"
    " form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response that does not set them itself."""

REQUEST_ID = "X-Request-ID"
"""Header with the number of a request, which its lines in a log of JSON have too."""

RIGHTS = "sfumato.rights"
"""Key of the ASGI scope for what the caller may do."""

_OPEN = ("/", "/healthz", "/readyz")
_SAFE = ("GET", "HEAD", "OPTIONS")
_WITHOUT_BODY = ("GET", "HEAD", "DELETE", "OPTIONS")
_LOG = logging.getLogger("sfumato.serve")

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
        """Take some; a negative amount is given back."""
        if self.used and amount > 0 and self.used + amount > self.most:
            raise busy(f"Too many {self.what}; send the request again in a moment")
        self.used += amount

    @contextlib.contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Take some for a while."""
        self.take(amount)
        try:
            yield
        finally:
            self.take(-amount)


class Body:
    """A body in the parts in which it came. It keeps nothing of what was taken from it."""

    def __init__(self) -> None:
        self.parts = deque[bytes]()
        self.size = self.charged = 0

    def take(self) -> bytes:
        """The next piece."""
        taken, size = list[bytes](), 0
        while self.parts and size < PIECE:
            taken.append(self.parts.popleft())
            size += len(taken[-1])
        return b"".join(taken)


class Bodies:
    """Reads the bodies of requests within limits of size, time and memory."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bytes = Budget(int(settings.byte_budget_mb * 1_000_000), "large requests in memory")
        self._rest: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def arrived(self, announced: int, receive: Receive) -> AsyncIterator[Body | None]:
        """A body, which counts for the budget of bytes until the request is answered; None if the client has left."""
        body = Body()
        try:
            yield body if await self._read(body, announced, receive) else None
        finally:
            self.bytes.take(-body.charged)
            if body.charged and not self.bytes.used:
                if self._rest is not None:
                    self._rest.cancel()
                self._rest = asyncio.get_running_loop().call_later(_REST, self._give_memory_back)

    async def _read(self, body: Body, announced: int, receive: Receive) -> bool:
        """Read a body; False if the client has left. Up to twice the limit is read, so that the refusal arrives."""
        limit, seconds, more = self.settings.max_body_bytes, self.settings.timeout, True
        large = Refusal(413, f"The request has more than {limit} bytes")
        if announced > 2 * limit:
            raise large
        try:
            async with asyncio.timeout(seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part, more = message.get("body", b""), message.get("more_body", False)
                    body.size += len(part)
                    if body.size > 2 * limit:
                        raise large
                    if body.size <= limit:
                        charge = max(0, body.size - SMALL_BODY) - body.charged
                        self.bytes.take(charge)
                        body.charged += charge
                        body.parts.append(part)
        except TimeoutError:
            raise Refusal(408, f"The request did not arrive within {seconds:g} seconds") from None
        if body.size > limit:
            raise large
        return True

    def _give_memory_back(self) -> None:
        if not self.bytes.used:
            asyncio.get_running_loop().run_in_executor(None, trim_memory)


_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
"""Parameters of glibc's mallopt."""


def share_memory() -> None:
    """Have all threads share one pool of memory, where the C library is glibc; call it before threads start.

    Otherwise each of many pools keeps megabytes that :func:`trim_memory` cannot reach. The memory of a body is used
    again for the next one; to return and take it anew each time was tried, and fewer images were answered.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 512 << 20)):
            mallopt(parameter, value)


def trim_memory() -> None:
    """Give free memory back to the system; glibc alone keeps what large bodies and the start took."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@dataclass(eq=False)
class Guard:
    """The ASGI middleware; it is pure ASGI, so that it sees every byte."""

    app: ASGIApp
    settings: Settings
    metrics: Metrics
    route: Callable[[str, str], str]
    leaving: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.settings)
        self._slots = Budget(self.settings.max_requests, "simultaneous requests")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, started = _request_id(Headers(scope=scope).get(REQUEST_ID, "")), time.perf_counter()
        reply = _Reply(send, {REQUEST_ID: request_id}, bodyless=scope["method"] == "HEAD", leaving=self.leaving)
        try:
            await self._answer(scope, receive, reply)
        except Refusal as refusal:
            await reply.refuse(refusal, scope, receive)
        except _Gone:
            pass
        except Exception:
            number = secrets.token_hex(6)
            route = self.route(scope["method"], scope["path"])
            _LOG.exception("error %s: %s %s", number, scope["method"], route, extra={"request_id": request_id})
            detail = f"An error in the service. Its log has the cause under the number {number}"
            await reply.refuse(Refusal(500, detail), scope, receive)
        finally:
            seconds, route = time.perf_counter() - started, self.route(scope["method"], scope["path"])
            self.metrics.request(scope["method"], route, reply.status, seconds)
            said = {"method": scope["method"], "path": route, "status": reply.status, "milliseconds": 1000 * seconds}
            _LOG.debug("%s %s %d %.1f ms", *said.values(), extra={"request_id": request_id, **said})

    async def _answer(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        headers = Headers(scope=scope)
        self._check_names(scope["method"], headers)
        _check_query(scope["query_string"])
        method, path = scope["method"], scope["path"]
        if not (path in _OPEN or path.startswith("/page/")):
            scope[RIGHTS] = self._rights(headers)
            if scope[RIGHTS] == "read" and _writes(method, path):
                raise self._not_permitted()
        if method == "HEAD":  # Every path that takes GET takes HEAD; the reply has no body.
            scope = {**scope, "method": "GET"}
        announced = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        if announced and not (method == "POST" and path.startswith("/v1/")):
            reply.close = True  # The body is not awaited.
            if method in _WITHOUT_BODY:
                raise Refusal(413, f"{method} takes no body here; GET /docs lists the paths that do")
            await self.app(scope, _no_body, reply)  # There is no such route: 404 or 405.
            return
        reply.close = True  # Until the body is there.
        async with self.bodies.arrived(int(headers.get("content-length", 0)), receive) as body:
            reply.close = False
            if body is None:
                return
            with contextlib.ExitStack() as slot:
                if path.startswith("/v1/"):
                    slot.enter_context(self._slots.taken(1))
                reply.begins = slot.close  # Whoever reads slowly takes no place.
                await self._within_time(scope, body, receive, reply)

    async def _within_time(self, scope: Scope, body: Body, receive: Receive, reply: "_Reply") -> None:
        """Run the application until it has answered, or the client has left.

        The time limit is that of the beginning of the answer, and then of each part.
        """
        gone = asyncio.ensure_future(receive())

        async def replay() -> Message:
            if not body.parts:
                return await asyncio.shield(gone)
            return {"type": "http.request", "body": body.take(), "more_body": bool(body.parts)}

        answering = asyncio.ensure_future(self.app(scope, replay, reply))
        try:
            before = -1
            while not answering.done() and before != reply.sent and (reply.sent or not gone.done()):
                before, waited = reply.sent, {answering} if gone.done() else {answering, gone}
                await asyncio.wait(waited, timeout=self.settings.timeout, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            elif not gone.done():
                reason = f"No answer within {self.settings.timeout:g} seconds"
                raise Refusal(504, f"{reason}; it is not known whether a requested write was made")
        finally:
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    def _check_names(self, method: str, headers: Headers) -> None:
        """Refuse browser requests of other web sites: those with an unknown Host name, and cross-site forms."""
        host = headers.get("host", "")
        if self.settings.hosts and _name(host) not in self.settings.hosts:
            detail = f"This service does not accept the host name {host!r}; if it should, start it with --allowed-host"
            raise Refusal(400, detail, code="unknown-host")
        origin = headers.get("origin")
        if origin is not None and method not in _SAFE and _netloc(origin) != host.lower():
            raise Refusal(403, f"Pages of {origin!r} may not send requests to this service", code="other-site")

    def _rights(self, headers: Headers) -> Rights:
        """What the caller may do, by the key."""
        if self.settings.all_keys:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = (headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")).encode()
            # Compare with all keys, so that the time does not reveal which one matches.
            writes = sum(hmac.compare_digest(given, key.encode()) for key in self.settings.keys)
            reads = sum(hmac.compare_digest(given, key.encode()) for key in self.settings.reading_keys)
            if not writes + reads:
                detail = "This service needs a key: send the header Authorization: Bearer KEY, or X-API-Key: KEY"
                raise Refusal(401, detail, headers={"WWW-Authenticate": "Bearer"})
            if not writes:
                return "read"
        return "read" if self.settings.read_only else "write"

    def _not_permitted(self) -> Refusal:
        if self.settings.read_only:
            return Refusal(403, "This service takes no writes: it was started with --read-only", code="read-only")
        detail = "This key permits searching and reading alone; to write, send a key with the right to write"
        return Refusal(403, detail, code="no-right-to-write")


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


class _Gone(Exception):
    """The client has left."""


class _Reply:
    """Sends a response with the service's headers and records its status; without its body if that is wanted."""

    def __init__(self, send: Send, headers: Mapping[str, str], *, bodyless: bool, leaving: Callable[[], bool]) -> None:
        self._send, self.status, self.started, self.close = send, 499, False, False
        self.sent = 0  # Messages that were sent.
        self.begins: Callable[[], None] = lambda: None
        self._headers, self._bodyless, self._leaving = {**HEADERS, **headers}, bodyless, leaving

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            self.begins()
            headers = MutableHeaders(scope=message)
            for name, value in self._headers.items():
                headers.setdefault(name, value)
            if self.close or self._leaving():
                headers["Connection"] = "close"
        elif self._bodyless:
            message = {**message, "body": b""}
        try:
            await self._send(message)
            self.sent += 1
        except Exception as error:  # The connection is closed, or the request was not HTTP.
            self.status = 499
            raise _Gone from error

    async def refuse(self, refusal: Refusal, scope: Scope, receive: Receive) -> None:
        if not self.started:
            with contextlib.suppress(_Gone):
                await refusal.response()(scope, receive, self)


def _request_id(given: str) -> str:
    """The id that a proxy has given to a request, or a new one."""
    return given if re.fullmatch(r"[\w.-]{1,64}", given, re.ASCII) else secrets.token_hex(8)


def _writes(method: str, path: str) -> bool:
    """Whether a request would change something, also by a route that does not exist yet."""
    return method not in _SAFE and path.startswith("/v1/") and not path.startswith("/v1/search")


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    host = host.lower()
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


_LISTS = frozenset(("also", "without", "where"))
"""Parameters of an address that may stand there several times."""


def _check_query(query: bytes) -> None:
    """Refuse an address with letters that are not UTF-8, and with a parameter of which one would be lost."""
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, errors="strict", max_num_fields=1000)
    except ValueError as error:
        raise Refusal(400, f"The address is not percent-encoded UTF-8: {error}; ü is %C3%BC", code="encoding") from None
    names = Counter(name for name, _ in pairs if name not in _LISTS)
    if twice := sorted(name for name, n in names.items() if n > 1):
        raise Refusal(400, f"The address has {twice[0]!r} more than once; send it once", code="twice")
