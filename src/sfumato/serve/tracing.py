"""Traces of the service by OpenTelemetry, where the user asks for them; nothing of it is imported otherwise.

The variables of OpenTelemetry say where traces go and how many: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER and the others. A trace holds the template of a route: no query, no id and no key.
"""

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from sfumato.errors import UserError
from sfumato.serve.app import route_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

_PACKAGES = {
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-instrumentation-fastapi": "opentelemetry.instrumentation.fastapi",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
}
_PLACES = {"http.target": "{}", "url.path": "{}", "http.url": "{}", "url.full": "{}", "url.query": "", "http.query": ""}
"""Attributes of a span that would hold the path or the query, and what they hold instead."""


def require_otel() -> None:
    """Check that the packages of the extra `otel` are installed, before a model is loaded."""
    if missing := [name for name, module in _PACKAGES.items() if not _there(module)]:
        raise UserError(
            f"--otel needs the extra otel, of which {' and '.join(missing)} is missing: pip install 'sfumato[otel]'"
        )


def trace(app: FastAPI, processor: "SpanProcessor | None" = None) -> FastAPI:
    """Trace the requests to an application, and return it; to the exporter of OTLP unless a processor is given."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource({SERVICE_NAME: "sfumato"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
    FastAPIInstrumentor.instrument_app(
        app,
        server_request_hook=partial(_without_queries, app),
        tracer_provider=provider,
        excluded_urls="/healthz,/readyz,/metrics",
        exclude_spans=["receive", "send"],
    )
    return app


def _without_queries(app: FastAPI, span: "Span", scope: dict[str, Any]) -> None:
    """Put the template of the route in the place of the path and the query."""
    route = route_of(app, scope["path"])
    given: Mapping[str, object] = getattr(span, "attributes", None) or {}
    for name, held in _PLACES.items():
        if name in given:
            span.set_attribute(name, held.format(route))


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # A package above it is missing.
        return False
