"""What can be seen of a service: counters and histograms for Prometheus, and whether the stores answer."""

import logging
import threading
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sfumato.errors import first_line
from sfumato.search.collection import GaussianCollection

_LOG = logging.getLogger("sfumato.serve")

TEXT = "text/plain; version=0.0.4; charset=utf-8"

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_LATENCIES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

_TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

_GAUGES = {
    "waiting": ("Texts or images that wait for the model, and searches.", "kind"),
    "items": ("Items of a gallery.", "gallery"),
    "store_up": ("1 if the store of a collection answers.", "gallery"),
    "calibrated_probability": ("Mean probability of the first hits of the calibration's queries.", "gallery"),
}
"""What is measured when the metrics are read: (description, label)."""


class Metrics:
    """Counters and histograms for Prometheus."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        labels, whole = ("method", "route", "status"), "From the first byte of a request to the last of its response."
        together = "Texts or images embedded, or queries searched, together."
        abstained = "Answers to queries with abstain."
        self._requests = Counter("sfumato_requests", "Requests answered.", labels, registry=own)
        self._seconds = Histogram("sfumato_request_seconds", whole, ("route",), buckets=_LATENCIES, registry=own)
        self.batch = Histogram("sfumato_batch_size", together, ("kind",), buckets=_SIZES, registry=own)
        self.abstentions = Counter("sfumato_abstentions", abstained, ("gallery", "abstained"), registry=own)
        said, judged = "Probability of first hits.", ("target", "drawn")
        targets = "gallery", "target"
        self.first_hits = Histogram("sfumato_first_hit_probability", said, targets, buckets=_TENTHS, registry=own)
        self._judged = {
            name: Counter(f"sfumato_judged_{name}", f"{text} that people judged.", judged, registry=own)
            for name, text in (("hits", "Hits"), ("right", "Right hits"), ("probability", "Probabilities of the hits"))
        }
        self._gauges = {
            name: Gauge(f"sfumato_{name}", text, (label,), registry=own) for name, (text, label) in _GAUGES.items()
        }
        self._ready = Gauge("sfumato_ready", "1 if the service answers searches.", registry=own)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def judged(self, target: str, drawn: bool, right: bool, probability: float) -> None:
        """Count a verdict on a hit with a probability; drawn by the service, or chosen by the judge."""
        for name, value in (("hits", 1.0), ("right", float(right)), ("probability", probability)):
            self._judged[name].labels(target, "yes" if drawn else "no").inc(value)

    def text(self, measured: Mapping[str, Mapping[str, float | None]], ready: bool) -> bytes:
        """All metrics, for GET /metrics. measured: name -> label -> value."""
        for name, gauge in self._gauges.items():
            for label, value in measured.get(name, {}).items():
                if value is not None:
                    gauge.labels(label).set(value)
        self._ready.set(ready)
        return generate_latest(self.registry)


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
            next(self._collection.store.scan(1), None)
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
