"""Connections to PostgreSQL that are given up when the server does not answer."""

import contextlib
import functools
import os
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import Empty, LifoQueue
from typing import Any
from urllib.parse import urlsplit

from sfumato.errors import UserError, first_line
from sfumato.search.stores.protocol import redacted

_SILENCE = 10
"""Seconds after statement_timeout until a server that has not even cancelled the statement is given up."""


class Connections:
    """A pool of free connections. If one is lost, the others are closed too, or when they are found to be."""

    def __init__(self, psycopg: Any, url: str, extra: Mapping[str, str]) -> None:
        self.url = redacted(url)
        self._psycopg = psycopg
        self._free: LifoQueue[Any] = LifoQueue()
        parts = urlsplit(url)
        try:
            self._arguments = psycopg.conninfo.conninfo_to_dict(parts._replace(query="", fragment="").geturl())
        except psycopg.Error:
            # The driver's message repeats the URL, with its password.
            way = "write / ? # @ : in a password as %2F %3F %23 %40 %3A"
            raise UserError(f"store {self.url}: expected postgresql://user@host:port/database; {way}") from None
        self._arguments |= extra
        self._statement_timeout = int(self._arguments.pop("statement_timeout"))
        self._patience = self._statement_timeout + _SILENCE if self._statement_timeout else None
        self._arguments["tcp_user_timeout"] = str(1000 * int(self._arguments["tcp_user_timeout"]))

    @contextmanager
    def borrow(self, *, limited: bool = True) -> Iterator[Any]:
        """A connection for one transaction: committed if all went well, else undone."""
        connection = None
        try:
            connection = self._take()
            connection.seconds = self._patience if limited else None
            try:
                with connection.transaction():
                    yield connection
            finally:
                if connection.closed or connection.info.transaction_status != self._psycopg.pq.TransactionStatus.IDLE:
                    connection.close()
                    self.close()
                else:
                    self._free.put(connection)
        except self._psycopg.Error as error:
            message = first_line(error)
            if isinstance(error, self._psycopg.errors.QueryCanceled):
                message += f"; the limit is {self._statement_timeout} seconds, ?statement_timeout=SECONDS changes it"
            elif connection is not None and connection.late:
                message = f"the server has not answered for {self._patience} seconds; check that it runs"
            if secret := self._arguments.get("password"):
                message = message.replace(secret, "***")
            raise UserError(f"store {self.url}: {message}") from None

    def close(self) -> None:
        """Close the free connections."""
        while True:
            try:
                self._free.get_nowait().close()
            except Empty:
                return

    def _take(self) -> Any:
        try:
            while _is_stale(connection := self._free.get_nowait()):
                connection.close()
            return connection
        except Empty:
            # Never prepared, because a plan for any filter and any k often does not use the index.
            connect = _connection_type(self._psycopg).connect
            connection = connect(**self._arguments, autocommit=True, prepare_threshold=None)
            connection.seconds = self._patience
            connection.execute(f"SET statement_timeout = '{self._statement_timeout}s'")
            return connection


def _is_stale(connection: Any) -> bool:
    """Whether an idle connection has something to read: its end, or why the server closes it."""
    if connection.closed:
        return True
    with selectors.DefaultSelector() as waiting:
        waiting.register(connection.fileno(), selectors.EVENT_READ)
        return bool(waiting.select(0))


@functools.cache
def _connection_type(psycopg: Any) -> Any:
    class Connection(psycopg.Connection):  # type: ignore[misc]
        """A connection that is given up if the server does not answer: libpq has no time limit for reading."""

        seconds: float | None = None  # until it is given up; None for never
        late = False

        def wait(self, *arguments: Any, **options: Any) -> Any:
            if self.seconds is None:
                return super().wait(*arguments, **options)
            # A duplicate, so that a late timer cannot end another connection under the same number.
            with socket.socket(fileno=os.dup(self.pgconn.socket)) as watched:
                timer = threading.Timer(self.seconds, self._give_up, [watched])
                timer.daemon = True
                timer.start()
                try:
                    return super().wait(*arguments, **options)
                finally:
                    timer.cancel()

        def _give_up(self, watched: socket.socket) -> None:
            self.late = True
            with contextlib.suppress(OSError):
                watched.shutdown(socket.SHUT_RDWR)

    return Connection
