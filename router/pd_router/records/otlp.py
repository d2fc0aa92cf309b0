"""Sends spans to a collector by OTLP over HTTP. Needs the extra `otel`, which is imported only with --otlp-url."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pd_http.errors import StartupError
from pd_http.near_hosts import is_near
from pd_router.records.spans import Span, spans_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_router.records.call_record import CallRecord

EXPORT_TIMEOUT_S = 5.0  # for one batch, retries included


def check_exporter() -> None:
    """Raises StartupError if the extra is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("opentelemetry", "requests")):
        raise StartupError("--otlp-url needs OpenTelemetry: pip install 'pd-cluster[otel]'")


def make_exporter(url: str) -> Callable[[Sequence[CallRecord]], None]:
    """A function that sends the spans of records and raises ConnectionError if the collector did not take them.

    `url`: of the collector, such as http://collector:4318; /v1/traces is added. OTEL_EXPORTER_OTLP_HEADERS and other
    variables of the exporter count too, and the environment's proxies for a collector outside of this network.
    """
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    session = requests.Session()
    session.trust_env = not is_near(urlsplit(url).hostname or "")
    exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S, session=session)
    read = _reader()

    def export(records: Sequence[CallRecord]) -> None:
        spans = [read(span) for record in records for span in spans_of(record)]
        if exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise ConnectionError(f"the collector at {url} does not take the spans")

    return export


def _reader() -> Callable[[Span], Any]:
    """Makes the SDK's span of ours. Spans are made when all is over, so no tracer and no global state is needed."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    scope = InstrumentationScope("pd_router")
    flags = TraceFlags(TraceFlags.SAMPLED)

    def context(span: Span, span_id: str) -> SpanContext:
        return SpanContext(int(span.trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=flags)

    def read(span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context(span, span.span_id),
            context(span, span.parent_id) if span.parent_id else None,
            Resource({"service.name": span.service, "service.instance.id": span.instance}),
            span.attributes,
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=round(span.start_s * 1e9),
            end_time=round(span.end_s * 1e9),
            instrumentation_scope=scope,
        )

    return read
