"""The router's metrics, in a registry of their own."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_http.metrics import HttpMetrics
from pd_router.nodes.node_view import FeedState
from pd_router.records.leg_metrics import LegMetrics
from pd_router.records.model_metrics import ModelMetrics
from pd_router.records.prediction_metrics import PredictionMetrics
from pd_router.records.slo import NO_SLO, Slo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pd_router.nodes.node_table import NodeTable
    from pd_router.records.call_record import CallRecord
    from pd_router.sources.discovery import FollowedSource

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RouterMetrics:
    """One per router process."""

    def __init__(self, table: NodeTable, slo: Slo = NO_SLO) -> None:
        self._slo = slo
        self._clock = table.clock
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"pd_router_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, *labels: str) -> Histogram:
            return Histogram(f"pd_router_{name}_seconds", help, labels, buckets=_SECONDS, registry=registry)

        self.requests = counter(
            "requests", "Requests by order, reason of the order, and outcome.", "order", "reason", "outcome"
        )
        self.num_in_flight = 0
        in_flight = Gauge("pd_router_requests_in_flight", "Requests being served.", registry=registry)
        in_flight.set_function(lambda: self.num_in_flight)
        self.ticket_s = histogram("ticket", "From arrival to P's ticket.")
        self.ttft_s = histogram(
            "time_to_first_token", "Streams: from arrival until the first piece goes to the client.", "model", "order"
        )
        self.predictions = PredictionMetrics(registry)
        self.longest_gap_s = histogram(
            "longest_gap", "Of each stream: the longest time between two pieces with tokens, however many.", "model"
        )
        self.models = ModelMetrics(registry)
        self.goodput = counter(
            "slo_requests", "Requests by the targets of --slo-ttft-ms, --slo-tpot-ms: met, or the first one missed.",
            "model", "result",
        )  # fmt: skip
        self._lost = counter(
            "records_lost", "Lines and traces of requests that were lost, by reason.", "kind", "reason"
        )
        self.request_s = histogram("request", "From arrival to the last byte.", "order")
        self.legs = LegMetrics(counter)
        self.client_gone = counter("client_disconnects", "Clients that left, by phase of the request.", "phase")
        self.releases = counter("ticket_releases", "Tickets released because no D took them.", "result")
        self.unchained = counter("long_prompts", "Requests that go by load alone: their text is too long for a chain.")
        self.feed_losses = counter("feed_losses", "Feeds of nodes that ended or could not be read.", "node")
        self.refusals = counter("refusals", "Requests that were not let in, by the name of their key.", "key", "reason")
        self.reports_clamped = counter(
            "reports_clamped",
            "Nodes' reports of more tokens than the request's body allows, or of fewer than none.",
            "node",
        )
        self.balance_decisions = counter("balance_decisions", "Decisions of a balance that differ, by kind.", "kind")
        self.role_orders = counter("role_orders", "Role orders to nodes, by sender and result.", "sender", "result")
        self.key_files = counter("key_file_changes", "Changes of the file with API keys that were seen.", "result")
        self.num_queued = Gauge("pd_router_requests_queued", "Requests that wait at the router.", registry=registry)
        self.queue_s = histogram("queue", "Waited at the router: for the nodes, or for another request of the key.")
        self._doubted = Gauge(
            "pd_router_source_doubted", "1 while nodes stay in use that the source no longer names.", ["source"],
            registry=registry,
        )  # fmt: skip
        self._source_age_s = Gauge(
            "pd_router_source_age_seconds", "Seconds since the source was last read.", ["source"], registry=registry
        )
        self.frozen_workers = counter("frozen_workers", "Processes before this worker that were killed as frozen.")
        self.http = HttpMetrics(registry, "pd_router")
        registry.register(_NodeCollector(table))

        self._children: dict[tuple[Any, ...], Any] = {}  # finding one costs more than counting

    def observe(self, record: CallRecord) -> None:
        """Count a request that has ended."""
        self._child(self.requests, record.order, record.reason, record.outcome).inc()
        self._child(self.request_s, record.order).observe(record.ended_s - record.arrived_s)
        if (report := record.report) is not None:
            self.models.of(record.model).count(report)
        if (ttft_s := record.ttft_s) is not None:
            self.predictions.count(record, ttft_s)
        if record.num_gaps:
            self._child(self.longest_gap_s, record.model).observe(record.longest_gap_s)
        if self._slo.is_set and (result := self._slo.result(record)):
            self._child(self.goodput, record.model, result).inc()

    def first_token_took(self, model: str, order: str, seconds: float) -> None:
        self._child(self.ttft_s, model, order).observe(seconds)

    def lost(self, kind: str) -> Callable[[str, int], None]:
        """Counts records of the outbox `kind` that were lost, by reason."""
        return lambda reason, count: self._lost.labels(kind, reason).inc(count)

    def export_sources(self, sources: Iterable[FollowedSource]) -> None:
        for one in sources:
            self._doubted.labels(one.source.name).set_function(partial(getattr, one.membership, "is_doubted"))
            age_s = partial(lambda one: self._clock() - one.received_s, one)
            self._source_age_s.labels(one.source.name).set_function(age_s)

    def _child(self, metric: Counter | Histogram, *labels: str) -> Any:
        child = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = metric.labels(*labels)
        return child

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
        feeds = GaugeMetricFamily("pd_router_node_feed_live", "1 while the node's feed is read.", labels=labels)
        queued = GaugeMetricFamily(
            "pd_router_node_queued_tokens", "Prompt tokens to compute, by the feed and own charges.", labels=labels
        )
        running = GaugeMetricFamily(
            "pd_router_node_sequences", "Generations that run or wait, by the feed and own charges.", labels=labels
        )
        free = GaugeMetricFamily(
            "pd_router_node_free_tokens", "Room in the KV cache; only nodes with a feed.", labels=labels
        )
        now_s = self._table.clock()
        for node in self._table.nodes:
            names = [node.node_id, node.url, node.role.value]
            healthy.add_metric(names, float(node.is_healthy(now_s)))
            sequences.add_metric(names, node.decode_sequences)
            prompts.add_metric(names, node.prefill_bytes)
            if (speed := node.speed.at(now_s)) is not None:
                speeds.add_metric(names, speed)
            feeds.add_metric(names, float(node.view.feed is FeedState.LIVE))
            queued.add_metric(names, node.view.queued_tokens)
            running.add_metric(names, node.view.num_sequences)
            if (free_tokens := node.view.ledger.total.free_tokens) < inf:
                free.add_metric(names, free_tokens)
        yield from (healthy, sequences, prompts, speeds, feeds, queued, running, free)
