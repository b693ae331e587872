"""A service that follows a symbolic link from one collection to another, such as a copy by a new model.

The new collection is opened and warmed up while the old one answers. Then requests go to the new one. The old one
finishes those that it has begun, and is closed. A write that waited meanwhile is made in the new one.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

_LOG = logging.getLogger("sfumato.serve")

_LONGEST_PAUSE = 30.0
"""Longest time between two trials to serve a folder, in seconds."""

_PATIENCE = 600
"""Tenths of a second that requests of the old collection may take to finish."""


class Following:
    """An ASGI application that hands each request to the service of the folder that a link points to."""

    def __init__(self, link: Path, make: Callable[[Path], FastAPI], *, every: float = 1.0) -> None:
        self._link, self._make, self._every = link, make, every
        self._lives: dict[FastAPI, contextlib.AsyncExitStack] = {}
        self._running = Counter[FastAPI]()
        self._folder = link.resolve()
        self._app = self._made(self._folder)

    @property
    def state(self) -> State:
        """The state of the application that new requests go to."""
        return self._app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        app = self._app
        self._running[app] += 1
        try:
            await app(scope, receive, send)
        finally:
            self._running[app] -= 1

    def _made(self, folder: Path) -> FastAPI:
        app = self._make(folder)
        app.state.service.moved = lambda: self._link.resolve() != folder
        return app

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._start(self._app)
        following = asyncio.create_task(self._follow())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        following.cancel()
        await asyncio.wait([following])
        for app in list(self._lives):
            await self._stop(app)
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self, app: FastAPI) -> None:
        self._lives[app] = contextlib.AsyncExitStack()
        await self._lives[app].enter_async_context(app.router.lifespan_context(app))

    async def _stop(self, app: FastAPI) -> None:
        """Close a service; one whose closing was interrupted is closed again."""
        await asyncio.shield(asyncio.ensure_future(self._lives[app].aclose()))
        del self._lives[app]

    async def _follow(self) -> None:
        """Look at the link now and then; a folder that cannot be served is tried again, less and less often."""
        failed, pause = self._folder, self._every
        while True:
            await asyncio.sleep(pause)
            folder = await asyncio.to_thread(self._link.resolve)
            if folder == self._folder:
                failed, pause = folder, self._every
                continue
            try:
                await self._switch(folder)
                pause = self._every
            except Exception as error:
                if folder != failed:
                    _LOG.exception("%s points to %s, which cannot be served: %s", self._link, folder, error)
                failed, pause = folder, min(2 * pause, _LONGEST_PAUSE)

    async def _switch(self, folder: Path) -> None:
        """Serve another folder, then close the service of the old one."""
        new = await self._ready(folder)
        old, self._app, self._folder = self._app, new, folder
        old.state.writer.succeeded_by(new.state.writer)
        _LOG.info("serving %s, which %s points to now", folder, self._link)
        for _ in range(_PATIENCE):
            if not self._running[old]:
                break
            await asyncio.sleep(0.1)
        await self._stop(old)

    async def _ready(self, folder: Path) -> FastAPI:
        """The service of a folder, warmed up."""
        app = await asyncio.to_thread(self._made, folder)
        await self._start(app)
        await app.state.service.warmed()
        if (failed := app.state.service.failed) is not None:
            await self._stop(app)
            raise RuntimeError(failed)
        return app
