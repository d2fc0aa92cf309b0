"""An OpenTelemetry collector for tests: takes traces by OTLP over HTTP, and keeps their spans."""

from __future__ import annotations

import gzip
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    service: str
    instance: str
    is_error: bool
    attributes: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Collector:
    """`spans` grows; `status` is what it answers."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.status = 200
        self.go_on = threading.Event()  # an answer waits for it
        self.go_on.set()
        self.changed = threading.Condition()
        self.url = ""

    def wait_for(self, trace_id: str, count: int = 1, deadline_s: float = HANG_S) -> list[ReceivedSpan]:
        """The spans of a trace, once there are so many. AssertionError after the deadline."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of(trace_id)) >= count, deadline_s), self.spans
            return self.of(trace_id)

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.changed:
            for resource in request.resource_spans:
                told = _values(resource.resource.attributes)
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        one = ReceivedSpan(
                            span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                            span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9,
                            told["service.name"], told["service.instance.id"], span.status.code == 2,
                            _values(span.attributes),
                        )  # fmt: skip
                        self.spans.append(one)
            self.changed.notify_all()


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    kind = pair.value.WhichOneof("value")
    return "" if kind is None else getattr(pair.value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            collector.go_on.wait(60)
            if collector.status == 200:
                collector.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            collector.go_on.set()
            server.shutdown()
            thread.join()
