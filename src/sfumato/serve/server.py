"""Running the service: one uvicorn process that prints its address once it is ready and shuts down gracefully.

Its log goes to standard error: lines for people, or one JSON object a line for programs.
"""

import asyncio
import ipaddress
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import HANDLED_SIGNALS

from sfumato.errors import UserError, counted
from sfumato.serve.guard import share_memory, trim_memory
from sfumato.serve.service import Service
from sfumato.serve.settings import Settings

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine for itself."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_of(host: str, more: Sequence[str]) -> tuple[str, ...]:
    """Names that the service accepts in the Host header."""
    given = tuple(name.lower() for name in more)
    own = f"[{host}]" if ":" in host else host.lower()
    return tuple(dict.fromkeys((*LOOPBACK, own, *given))) if is_loopback(host) or given else ()


def check_host(host: str, settings: Settings, no_key: bool) -> None:
    """Refuse to listen to a network without a key, unless the user asks for it; then clients must know its name.

    Else a web site could point a name of its own at this address and send requests through the browsers of its
    visitors.
    """
    if is_loopback(host) or settings.all_keys:
        return
    if not no_key:
        ways = "give --api-key-file FILE (or SFUMATO_API_KEY), or --no-key if a proxy in front of it controls access"
        raise UserError(f"--host {host}: others could use the service without a key; {ways}")
    if not settings.hosts:
        found = "any web site could use the service through a visitor's browser"
        ways = "give its own name with --allowed-host NAME (may be repeated), or give --api-key-file FILE"
        raise UserError(f"--host {host} --no-key: {found}; {ways}")


_FIELDS = ("request_id", "method", "path", "status", "milliseconds")


class JsonFormatter(logging.Formatter):
    """One object a line: time in UTC, level, logger and message, and of a request its id, route, status and time.

    The path is the template of the route. So a line holds no id, no query and no key.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if isinstance(took := line.get("milliseconds"), float):
            line["milliseconds"] = round(took, 1)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class OnceASecond(logging.Filter):
    """Lets a line that comes again and again pass once a second: asyncio writes thousands without descriptors."""

    _last = "", -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        """See :meth:`logging.Filter.filter`."""
        line, now = record.getMessage(), time.monotonic()
        if line == self._last[0] and now < self._last[1] + 1:
            return False
        self._last = line, now
        return True


LogFormat = Literal["text", "json"]


def log_to_stderr(form: LogFormat, *, access_log: bool) -> None:
    """Log to standard error unless logging is set up already; with a line for every request if that is wanted."""
    handler, text = logging.StreamHandler(), logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(OnceASecond())
    logging.getLogger("sfumato.serve").setLevel(logging.DEBUG if access_log else logging.INFO)


class Connection(H11Protocol):
    """Closes if the headers of a request do not come within `timeout` seconds; uvicorn waits for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See :meth:`asyncio.Protocol.connection_made`."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See :meth:`asyncio.Protocol.data_received`."""
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        app: Any = self.config.app
        answers = self.cycle is not None and not self.cycle.response_complete
        if answers and self._late is not None:
            self._late.cancel()
            self._late = None
        elif not answers and self._late is None:
            self._late = self.loop.call_later(app.state.service.settings.timeout, self.transport.close)


class Server(uvicorn.Server):
    """Prints its address when it is ready, ends if warming up fails, and is not ready once it is asked to stop.

    After SIGTERM it goes on answering for `drain` seconds, so that a proxy that asks for /readyz can leave it in time.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service, self._ends = service, math.inf

    async def startup(self, sockets: list | None = None) -> None:  # type: ignore[type-arg]
        """See :meth:`uvicorn.Server.startup`."""
        await super().startup(sockets)
        if self.started:
            self._announcing = asyncio.get_running_loop().create_task(self._announce())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See :meth:`uvicorn.Server.handle_exit`."""
        service, drain = self._service, self._service.settings.drain
        if sig == signal.SIGTERM and drain and service.ready.is_set():
            service.draining, self._ends = True, time.monotonic() + drain
        else:
            super().handle_exit(sig, frame)
        service.ready.clear()

    async def on_tick(self, counter: int) -> bool:
        """See :meth:`uvicorn.Server.on_tick`."""
        self.should_exit = self.should_exit or time.monotonic() >= self._ends
        return await super().on_tick(counter)

    async def _announce(self) -> None:
        await self._service.warmed()
        if not self._service.ready.is_set():
            self.should_exit = True
            return
        trim_memory()
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        galleries = self._service.sources.galleries.items()
        held = ", ".join(counted(served.gallery.size, name.removesuffix("s")) for name, served in galleries)
        print(f"serving {held}: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


IDLE = 75
"""Seconds for which a connection may be idle. Clients and proxies give idle connections up earlier, often after 60 s.
The side that closes first must be theirs, or a request that is on its way finds a closed connection."""


def run_app(app: FastAPI, *, host: str, port: int, access_log: bool = False, log_format: LogFormat = "text") -> None:
    """Serve until SIGTERM or SIGINT.

    After SIGTERM the service answers for `drain` seconds of its settings more, or until a second signal. Running
    requests then have `grace` seconds.
    """
    service: Service = app.state.service
    share_memory()
    log_to_stderr(log_format, access_log=access_log)
    config = uvicorn.Config(
        app, host=host, port=port, http=Connection, lifespan="on", ws="none", log_config=None, log_level="warning",
        access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=service.settings.grace,
    )  # fmt: skip
    # uvicorn raises the signal again at its end, so a normal shutdown would have the status of a killed process.
    before = {sig: signal.signal(sig, lambda *_: None) for sig in HANDLED_SIGNALS}  # On Windows also Ctrl-Break.
    try:
        Server(config, service).run()
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
    if service.failed:
        print(f"the service cannot answer: {service.failed}", file=sys.stderr)
        raise SystemExit(1)
