"""Traces over OTLP, linked across services by the W3C traceparent that travels with each request.

Span and attribute names are OpenTelemetry's for generative models and, where it has none, vLLM's. No text, no token ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import Span

# Also how long a service that ends may wait for a collector that is away.
EXPORT_TIMEOUT_S = 1

Attributes = Mapping[str, str | int | float]


class Tracing:
    """Sends spans to ``endpoint`` (``http://host:4318/v1/traces``) from a thread of its own; what cannot be sent is
    dropped. Raises ValueError where OpenTelemetry is not installed."""

    def __init__(self, endpoint: str, service: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'kvern[otel]'"
            ) from None
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer("kvern")
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        traceparent: str,
        attributes: Attributes,
        start_ns: int | None = None,
        parent: Span | None = None,
    ) -> Span:
        """A span under ``parent``, else under ``traceparent``, else a trace's root. Its maker ends it."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        carrier = {"traceparent": traceparent} if traceparent else {}
        context = self._propagator.extract(carrier) if parent is None else set_span_in_context(parent)
        kind = SpanKind.SERVER if parent is None else SpanKind.INTERNAL
        return self._tracer.start_span(name, context, kind, dict(attributes), start_time=start_ns)

    def traceparent(self, span: Span) -> str:
        """For those who are to go on under it."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, Any] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return str(carrier.get("traceparent", ""))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span for each request there, OTLP over HTTP: http://host:4318/v1/traces",
    )


def from_flags(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, service: str
) -> Tracing | None:
    """What :func:`add_flags` got. Ends the process with 2 where it cannot be done."""
    endpoint = arguments.otlp_traces_endpoint
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        parser.error(f"--otlp-traces-endpoint {endpoint!r}: it must start with http:// or https://")
    try:
        return Tracing(endpoint, service)
    except ValueError as error:
        parser.error(str(error))
