"""Whether the store of a collection answers."""

import logging
import threading
import time

from sfumato.errors import first_line
from sfumato.search.collection import GaussianCollection

_LOG = logging.getLogger("sfumato.serve")


class StoreHealth:
    """Reads a record of the store every few seconds, and counts the items."""

    def __init__(self, name: str, collection: GaussianCollection, *, every: float = 5.0, patience: float = 5.0) -> None:
        self._name, self._collection, self._every, self._patience = name, collection, every, patience
        self._asked_at: float | None = None
        self._next_count = 0.0
        self._error = self._count_error = ""
        self._counter = threading.Thread()
        self._stopping = threading.Event()

    @property
    def problem(self) -> str:
        """Why the store cannot be used now; "" if it answers."""
        asked_at = self._asked_at
        if asked_at is not None and (waited := time.monotonic() - asked_at) > self._patience:
            return f"the store of the {self._name} has not answered for {waited:.0f} seconds"
        return f"the store of the {self._name} cannot be read" if self._error else ""

    def start(self) -> None:
        """Count the items, then go on in the background."""
        self._collection.items.recount()
        self._collection.items.counts_itself = False
        threading.Thread(target=self._watch, name=f"store of {self._name}", daemon=True).start()

    def stop(self) -> None:
        """End the thread, at once or as soon as the store answers."""
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.wait(self._every):
            error = self._look()
            if not self._stopping.is_set() and bool(error) != bool(self._error):
                if error:
                    _LOG.error("the store of the %s cannot be read: %s", self._name, error)
                else:
                    _LOG.info("the store of the %s answers again", self._name)
            self._error = error

    def _look(self) -> str:
        """Read a record; returns what went wrong, "" if nothing did. Another thread counts: a count may take long."""
        try:
            self._asked_at = time.monotonic()
            next(self._collection.scan(1), None)
        except Exception as error:
            return first_line(error)
        finally:
            self._asked_at = None
        if not self._counter.is_alive() and time.monotonic() >= self._next_count:
            self._counter = threading.Thread(target=self._count, name=threading.current_thread().name, daemon=True)
            self._counter.start()
        return self._count_error

    def _count(self) -> None:
        began = time.monotonic()
        try:
            self._collection.items.recount()
            self._count_error = ""
        except Exception as error:
            self._count_error = first_line(error)
        ended = time.monotonic()
        self._next_count = ended + 20 * (ended - began)
