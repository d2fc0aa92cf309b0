"""What clients sent and got, by model: tokens, and the time between two tokens of a stream."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from pd_http.node_report import NodeReport
    from pd_router.records.call_record import CallRecord

BOUNDS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)


class ModelTotals:
    """Of one model. Used on the event loop only, so without the locks of prometheus_client, which cost 1 us each."""

    __slots__ = ("cached_tokens", "gaps", "gaps_s", "generation_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.gaps = [0] * (len(BOUNDS_S) + 1)  # by the first bound that is not below; the last: above all
        self.gaps_s = 0.0
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0

    def piece(self, record: CallRecord, now_s: float, num_tokens: int = 1) -> None:
        """Note a piece of the stream that is not its first one: each of its tokens took a part of the time before it.

        `num_tokens`: 1 of a node without frames: it is not known.
        """
        gap_s = now_s - record.last_s
        record.last_s = now_s
        record.num_gaps += num_tokens
        if gap_s > record.longest_gap_s:
            record.longest_gap_s = gap_s
        self.gaps[bisect_left(BOUNDS_S, gap_s / num_tokens)] += num_tokens
        self.gaps_s += gap_s

    def count(self, report: NodeReport) -> None:
        self.prompt_tokens += report.num_prompt_tokens
        self.cached_tokens += report.num_cached_tokens
        self.generation_tokens += report.num_output_tokens


class ModelMetrics(Collector):
    """The totals of each model, exported."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._totals: dict[str, ModelTotals] = {}
        registry.register(self)

    def of(self, model: str) -> ModelTotals:
        totals = self._totals.get(model)
        if totals is None:
            totals = self._totals[model] = ModelTotals()
        return totals

    def collect(self) -> Iterator[Metric]:
        gaps = HistogramMetricFamily(
            "pd_router_inter_token_latency_seconds",
            "Of each token: time between two pieces of a stream for the client, over the tokens of the later piece.",
            labels=["model"],
        )
        bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
        for model, totals in self._totals.items():
            gaps.add_metric([model], list(zip(bounds, accumulate(totals.gaps), strict=True)), totals.gaps_s)
        yield gaps
        for name, text in (
            ("prompt_tokens", "Prompt tokens of answered requests."),
            ("cached_tokens", "Of them, those that a prefix cache had."),
            ("generation_tokens", "Output tokens of answered requests."),
        ):
            family = CounterMetricFamily(f"pd_router_{name}", text, labels=["model"])
            for model, totals in self._totals.items():
                family.add_metric([model], getattr(totals, name))
            yield family
