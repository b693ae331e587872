"""Running the service: one uvicorn process that says where it is once it is ready, and ends in good order."""

import asyncio
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from sfumato.errors import UserError
from sfumato.serve.service import Service
from sfumato.serve.settings import Settings

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine for itself."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts_of(host: str, more: Sequence[str]) -> tuple[str, ...]:
    """Names that the service may be called by; any if it listens to a network and is not told, which :func:`run_app` lets pass with a
    key alone."""
    told = tuple(name.lower() for name in more)
    own = f"[{host}]" if ":" in host else host.lower()
    return tuple(dict.fromkeys((*LOOPBACK, own, *told))) if is_loopback(host) or told else ()


def check_host(host: str, keys: tuple[str, ...], no_key: bool) -> None:
    """Refuse to be open to a network without a key, unless that is what is wanted.

    Raises:
        UserError: there is no key.
    """
    if not is_loopback(host) and not keys and not no_key:
        raise UserError(
            f"--host {host}: others would reach the service without a key; give --api-key-file FILE (or SFUMATO_API_KEY), or --no-key if"
            " something in front of it decides who may"
        )


def check_names(host: str, settings: Settings) -> None:
    """Refuse to answer a network under any name without a key: a web site could give this address a name of its own, and ask through
    the browser of whoever visits it.

    Raises:
        UserError: there is neither a key nor a name.
    """
    if not is_loopback(host) and not settings.keys and not settings.hosts:
        raise UserError(
            f"--host {host} --no-key: any web site could ask the service through a visitor's browser; say with --allowed-host NAME what"
            " it is called by (several times for several), or give --api-key-file FILE"
        )


def check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be had, before a model is loaded for it.

    Raises:
        UserError: it is taken, or not this machine's.
    """
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise UserError(f"cannot serve at {host}:{port} ({error.strerror}); choose another --host or --port") from error


class Server(uvicorn.Server):
    """Says when it is ready, ends if it cannot become so, and says that it no longer is as soon as it is asked to stop."""

    async def startup(self, sockets: list | None = None) -> None:  # type: ignore[type-arg]
        """See uvicorn."""
        await super().startup(sockets)
        if self.started:
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        self._service.ready.clear()
        super().handle_exit(sig, frame)

    @property
    def _service(self) -> Service:
        app = self.config.app
        assert isinstance(app, FastAPI)
        service = app.state.service
        assert isinstance(service, Service)
        return service

    async def _tell(self) -> None:
        await self._service.warmed()
        if not self._service.ready.is_set():
            self.should_exit = True
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        held = ", ".join(f"{len(served.gallery)} {name}" for name, served in self._service.sources.galleries.items())
        print(f"serving {held}: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


def run_app(app: FastAPI, *, host: str, port: int, grace: int = 30, access_log: bool = False) -> None:
    """Serve until SIGTERM or SIGINT; requests at work are then finished, for at most `grace` seconds. A second signal ends it at once.

    Args:
        app: of :func:`~sfumato.serve.app.create_app`.
        host, port: where; port 0 takes a free one.
        grace: seconds.
        access_log: a line for every request, with its route and status, without what was asked.

    Raises:
        SystemExit: with 1 and a line on stderr, if no text or image can be embedded or searched.
        UserError: the address cannot be had, or others would reach the service under any name and without a key.
    """
    check_names(host, app.state.service.settings)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("sfumato.serve").setLevel(logging.DEBUG if access_log else logging.INFO)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        lifespan="on",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=grace,
    )
    # uvicorn raises the signal again when it is done, which would end a good end with the status of a killed process.
    before = {sig: signal.signal(sig, lambda *_: None) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        Server(config).run()
    except SystemExit as error:
        raise UserError(f"cannot serve at {host}:{port}; is something else there? Choose another --port") from error
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
    if failed := app.state.service.failed:
        print(f"the service cannot answer: {failed}", file=sys.stderr)
        raise SystemExit(1)
