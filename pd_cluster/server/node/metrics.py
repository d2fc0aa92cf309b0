"""The node's Prometheus metrics, in a registry of their own. All names begin with `pd_`; times are seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from pd_cluster.server.node.vllm_names import vllm_metrics
from pd_http.left_out import KINDS
from pd_http.metrics import HttpMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pd_cluster.protocol.messages import EngineStats, Timeline, Work
    from pd_http.left_out import Kind

# 1 ms to 2 minutes, denser where SLOs usually are
_LATENCY_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_PHASES = (
    ("queue", "Arrival to first scheduled, or to blocks reserved."),
    ("prefill", "First scheduled to first token sampled here."),
    ("transfer", "Blocks reserved, which is when the prefill node begins, to KV confirmed."),
    ("admit", "KV confirmed to scheduled in a decode step."),
    ("first_decode", "The first decode step after a handoff."),
    ("prefill_leg", "Received by a prefill node to its first token, as seen by the node that took over."),
    ("prefill_queue", "Of a prefill leg, until the prefill node first scheduled the prompt."),
)
# 20 us to 1 s: the parts of a handoff, from the announcement of the prompt's end
_STEPS = ("announce", "reserve", "post", "link", "confirm", "schedule")
_STEP_S = (
    0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05,
    0.1, 0.2, 0.5, 1.0,
)  # fmt: skip


class NodeMetrics:
    """The metrics of the API process. `add_engine` adds those of the engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"pd_{name}", help, labels, registry=self.registry)

        def histogram(name: str, help: str, *labels: str) -> Histogram:
            return Histogram(f"pd_{name}_seconds", help, labels, buckets=_LATENCY_S, registry=self.registry)

        self.requests = counter("requests", "Requests by endpoint and outcome.", "endpoint", "outcome")
        self.in_flight = Gauge("pd_requests_in_flight", "Requests being answered.", registry=self.registry)
        self.unknown_fields = counter("unknown_fields", "Fields of request bodies that are ignored.")
        left_out = counter("left_out", "Names in the header x-pd-ignored of answers, by kind.", "kind")
        self._left_out = {kind: left_out.labels(kind) for kind in KINDS}
        self.prompt_tokens = counter(
            "prompt_tokens",
            "Prompt tokens, by work: a prompt that is handed over counts as prefill and as take_over.",
            "work",
        )
        self.generation_tokens = counter("generation_tokens", "Tokens generated and given to clients.")
        self.cached_tokens = counter(
            "cached_tokens", "Prompt tokens of requests that were in this node's prefix cache, by work.", "work"
        )
        self.external_tokens = counter(
            "external_tokens", "Prompt tokens, and known ones of cut streams, with KV from another node."
        )
        self.handoffs = counter("handoffs", "Requests taken over, by the place of their prefill.", "prefill")
        self.fallbacks = counter("handoff_fallbacks", "Handoffs that did not go as requested, by reason.", "reason")
        self.waits = counter("waits_expired", "Waits that reached their deadline, by name.", "wait")
        self.ttft = histogram("time_to_first_token", "Request to first token.")
        self.second_token = histogram("time_to_second_token", "Request to second token.")
        self.itl = histogram(
            "inter_token_latency",
            "Of each token: time between two deliveries of a sequence's tokens, over the tokens of the later one.",
        )
        self.tpot = histogram("time_per_output_token", "(last token - first token) / (tokens - 1) of one request.")
        self.e2e = histogram("request_latency", "Request to last token.")
        self._phases = {name: histogram(name, help, "work") for name, help in _PHASES}
        steps = Histogram(
            "pd_handover_step_seconds",
            "Parts of a handoff, from the announcement of the prompt's end to the scheduler's queue.",
            ("step",),
            buckets=_STEP_S,
            registry=self.registry,
        )
        self._steps = {name: steps.labels(name) for name in _STEPS}
        self.http = HttpMetrics(self.registry, "pd")

    def add_engine(
        self,
        latest: Callable[[], EngineStats | None],
        info: Callable[[], dict[str, str] | None],
        num_freezes: Callable[[], int] = lambda: 0,
    ) -> None:
        """Export the engine's latest stats, its identity and how often it was judged frozen at each scrape."""
        self.registry.register(EngineCollector(latest, info, num_freezes))

    def count_left_out(self, kinds: Mapping[str, Kind]) -> None:
        """Count what the header of one answer names. `kinds`: by name, which clients choose and no label holds."""
        for kind in kinds.values():
            self._left_out[kind].inc()

    def count_prompt(self, work: Work, num_tokens: int, num_cached_tokens: int) -> None:
        """Count the tokens of one prompt."""
        self.prompt_tokens.labels(work.value).inc(num_tokens)
        self.cached_tokens.labels(work.value).inc(num_cached_tokens)

    def observe_timeline(self, work: Work, timeline: Timeline) -> None:
        """Record the seconds that one request spent in each phase."""
        for name, seconds in timeline.phases().items():
            if name in self._steps:
                self._steps[name].observe(seconds)
            else:
                self._phases[name].labels(work.value).observe(seconds)

    def render(self, vllm_model: str = "") -> bytes:
        """All metrics in Prometheus' text format. `vllm_model`: offer vLLM's names too, for a model of this name."""
        if not vllm_model:
            return generate_latest(self.registry)
        families = list(self.registry.collect())
        registry = CollectorRegistry()
        registry.register(_Collected([*families, *vllm_metrics(families, vllm_model)]))
        return generate_latest(registry)


class _Collected(Collector):
    """Families that were collected."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class EngineCollector:
    """Turns the engine's stats into metrics. A counter's key may carry labels: `name|label=value,label=value`."""

    def __init__(
        self,
        latest: Callable[[], EngineStats | None],
        info: Callable[[], dict[str, str] | None],
        num_freezes: Callable[[], int],
    ) -> None:
        self._latest = latest
        self._info = info
        self._num_freezes = num_freezes

    def describe(self) -> Iterable[Metric]:
        """Returns no metrics: their names are not known before the engine's first stats."""
        return ()

    def collect(self) -> Iterator[Metric]:
        info = self._info()
        if info is not None:
            yield _one(
                GaugeMetricFamily("pd_node_info", "Identity of this node.", labels=list(info)), list(info.values()), 1
            )
        yield CounterMetricFamily(
            "pd_engine_freezes", "How often the engine was judged frozen.", value=self._num_freezes()
        )
        stats = self._latest()
        if stats is None:
            return
        kv = stats.kv
        yield GaugeMetricFamily(
            "pd_kv_num_blocks", "KV blocks in the cache; with several KV groups, units.", value=kv.num_blocks
        )
        blocks = GaugeMetricFamily(
            "pd_kv_blocks", "KV blocks by state; leased and quarantined are part of in_use.", labels=["state"]
        )
        groups = GaugeMetricFamily(
            "pd_kv_group_blocks",
            "Blocks of each KV group, in the memory that it has now.",
            labels=["group", "kind", "state"],
        )
        for state in ("free", "cached", "in_use", "leased", "quarantined"):
            blocks.add_metric([state], getattr(kv, state))
            for number, group in enumerate(kv.groups):
                groups.add_metric([str(number), group.kind, state], getattr(group, state))
        yield blocks
        yield groups
        for name in ("num_running", "num_waiting", "num_waiting_for_remote_kv"):
            yield GaugeMetricFamily(f"pd_{name}", "Sequences of the engine in this state.", value=getattr(stats, name))
        yield from _families(stats.counters, CounterMetricFamily)
        yield from _families(stats.gauges, GaugeMetricFamily)


def _families(
    values: dict[str, float], kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for key, value in values.items():
        name, _, text = key.partition("|")
        labels = dict(pair.split("=", 1) for pair in text.replace("|", ",").split(",") if "=" in pair)
        if name not in families:
            families[name] = kind(f"pd_{name}", "From the engine.", labels=list(labels))
        families[name].add_metric(list(labels.values()), value)
    return families.values()


def _one(family: GaugeMetricFamily, labels: list[str], value: float) -> GaugeMetricFamily:
    family.add_metric(labels, value)
    return family
