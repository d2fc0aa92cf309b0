"""The time between two pieces of a stream as clients see it: a histogram that costs a fraction of a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

BOUNDS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)


class Gaps:
    """Gaps of the streams of one model. prometheus_client's histogram takes a lock for each of them: 1.5 us."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # by the first bound that is not below; the last: above all
        self.total_s = 0.0

    def note(self, gap_s: float) -> None:
        """Call it on the event loop only."""
        self.counts[bisect_left(BOUNDS_S, gap_s)] += 1
        self.total_s += gap_s


class GapMetrics(Collector):
    """`pd_router_inter_token_latency_seconds` by model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._by_model: dict[str, Gaps] = {}
        registry.register(self)

    def of(self, model: str) -> Gaps:
        return self._by_model.setdefault(model, Gaps())

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "pd_router_inter_token_latency_seconds",
            "Gap between two pieces of a stream, as they go to the client.",
            labels=["model"],
        )
        bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
        for model, gaps in self._by_model.items():
            family.add_metric([model], list(zip(bounds, accumulate(gaps.counts), strict=True)), gaps.total_s)
        yield family
