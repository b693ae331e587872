"""What the service tells Prometheus; every application has a registry of its own."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_LATENCIES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Counters and histograms."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "sfumato_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "sfumato_request_seconds", "From the first byte of a request to the last of its answer.", ("route",),
            buckets=_LATENCIES, registry=self.registry,
        )  # fmt: skip
        self._batch = Histogram(
            "sfumato_batch_size",
            "Texts or pictures embedded, or queries searched, together.",
            ("kind",),
            buckets=_SIZES,
            registry=self.registry,
        )
        self._waiting = Gauge(
            "sfumato_waiting",
            "Texts or pictures that wait for the model, and searches.",
            ("kind",),
            registry=self.registry,
        )
        self._items = Gauge("sfumato_items", "Items of a gallery.", ("gallery",), registry=self.registry)
        self._ready = Gauge("sfumato_ready", "1 if searches are answered.", registry=self.registry)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One more was answered; a client that had gone counts as 499."""
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def batch(self, kind: str) -> Callable[[int], None]:
        """Called with the size of a batch of this kind."""
        return self._batch.labels(kind).observe

    def text(self, waiting: dict[str, int], items: dict[str, int], ready: bool) -> bytes:
        """All of it, for GET /metrics."""
        for kind, n in waiting.items():
            self._waiting.labels(kind).set(n)
        for gallery, n in items.items():
            self._items.labels(gallery).set(n)
        self._ready.set(ready)
        return generate_latest(self.registry)
