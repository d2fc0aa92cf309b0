"""The router's metrics, in a registry of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_http.metrics import HttpMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_router.node_table import NodeTable

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RouterMetrics:
    """One per router process."""

    def __init__(self, table: NodeTable) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "pd_router_requests",
            "Requests by order, reason of the order, and outcome.",
            ["order", "reason", "outcome"],
            registry=registry,
        )
        self.in_flight = Gauge("pd_router_requests_in_flight", "Requests being served.", registry=registry)
        self.ticket_s = Histogram(
            "pd_router_ticket_seconds", "From arrival to P's ticket.", registry=registry, buckets=_SECONDS
        )
        self.first_byte_s = Histogram(
            "pd_router_first_byte_seconds",
            "From arrival to the first byte of the answer.",
            ["order"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.request_s = Histogram(
            "pd_router_request_seconds",
            "From arrival to the last byte.",
            ["order"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.leg_failures = Counter(
            "pd_router_leg_failures",
            "Legs that failed, by node and kind of failure.",
            ["leg", "node", "kind"],
            registry=registry,
        )
        self.waits = Counter(
            "pd_router_waits_expired", "Waits for a node that reached their deadline, by name.", ["wait", "node"],
            registry=registry,
        )  # fmt: skip
        self.moves = Counter(
            "pd_router_legs_moved",
            "Legs without a byte that left a node judged frozen or dead.",
            ["leg", "node", "kind"],
            registry=registry,
        )
        self.exhausted = Counter(
            "pd_router_tries_exhausted",
            "Requests for which every healthy node of a role, or as many as allowed, failed.",
            ["leg"],
            registry=registry,
        )
        self.node_killers = Counter(
            "pd_router_requests_nodes_died",
            "Requests that ended because too many nodes died while they served them.",
            registry=registry,
        )
        self.client_gone = Counter(
            "pd_router_client_disconnects", "Clients that left, by phase of the request.", ["phase"], registry=registry
        )
        self.releases = Counter(
            "pd_router_ticket_releases", "Tickets released because no D took them.", ["result"], registry=registry
        )
        self.http = HttpMetrics(registry, "pd_router")
        registry.register(_NodeCollector(table))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _NodeCollector(Collector):
    """Gauges read from the node table at each scrape."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        labels = ["node", "url", "role"]  # two nodes may carry one name, and samples must differ
        healthy = GaugeMetricFamily("pd_router_node_healthy", "1 when requests may go there.", labels=labels)
        sequences = GaugeMetricFamily("pd_router_node_outstanding_sequences", "Unfinished generations.", labels=labels)
        prompts = GaugeMetricFamily(
            "pd_router_node_outstanding_prefill_bytes", "Prompt bytes not prefilled.", labels=labels
        )
        speeds = GaugeMetricFamily(
            "pd_router_node_prefill_bytes_per_second", "Prompt bytes prefilled per second; only recently active nodes.",
            labels=labels,
        )  # fmt: skip
        now_s = self._table.clock()
        for node in self._table.nodes:
            names = [node.node_id, node.url, node.role.value]
            healthy.add_metric(names, float(node.is_healthy(now_s)))
            sequences.add_metric(names, node.decode_sequences)
            prompts.add_metric(names, node.prefill_bytes)
            if (speed := node.speed.at(now_s)) is not None:
                speeds.add_metric(names, speed)
        yield from (healthy, sequences, prompts, speeds)
