"""The metrics that every HTTP server of the cluster exports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, disable_created_metrics

from pd_http.gate import HttpGate

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from pd_http.held_bytes import HeldBytes
    from pd_http.limits import HttpLimits

EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpMetrics:
    """Connections of one server. `prefix`: of the metrics' names."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # of the process: they double the names, and nothing reads them
        self._refusals = Counter(
            f"{prefix}_http_refusals", "Connections that the server ended by itself.", ["reason"], registry=registry
        )
        self._connections = Gauge(f"{prefix}_http_connections", "Open connections of clients.", registry=registry)
        self._unfinished_bytes = Gauge(
            f"{prefix}_http_unfinished_bytes", "Memory of requests that have not arrived whole.", registry=registry
        )
        self._held_bytes = Gauge(
            f"{prefix}_http_held_bytes", "Memory of whole bodies and of answers above 64 KiB.", registry=registry
        )
        self._held_limit = Gauge(f"{prefix}_http_held_bytes_limit", "Most bytes that may be held.", registry=registry)

    def export_held(self, held: HeldBytes) -> None:
        self._held_bytes.set_function(lambda: held.num_come + held.num_planned)
        self._held_limit.set(2 * held.half)

    def make_gate(self, limits: HttpLimits, num_files: int, files_per_request: int) -> HttpGate:
        """The bounds of the server, exported here. `num_files`: open files that the process may have."""
        gate = HttpGate(limits, num_files, files_per_request, lambda word: self._refusals.labels(word).inc())
        self._connections.set_function(gate.__len__)
        self._unfinished_bytes.set_function(lambda: gate.unfinished_bytes)
        return gate
