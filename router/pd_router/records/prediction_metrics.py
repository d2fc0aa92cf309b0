"""How long first tokens took beside what was predicted, by order."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from pd_router.records.call_record import CallRecord

RATIOS = (0.1, 0.25, 0.5, 0.67, 0.75, 0.9, 1.0, 1.1, 1.2, 1.33, 1.5, 2.0, 3.0, 5.0, 10.0)


class PredictionTotals:
    """Of one order. Used on the event loop only, as `ModelTotals`."""

    __slots__ = ("num_retried", "num_unknown", "ratio_sum", "ratios")

    def __init__(self) -> None:
        self.ratios = [0] * (len(RATIOS) + 1)  # by the first bound that is not below; the last: above all
        self.ratio_sum = 0.0
        self.num_retried = self.num_unknown = 0


class PredictionMetrics(Collector):
    """The totals of each order, exported."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._totals: dict[str, PredictionTotals] = {}
        registry.register(self)

    def count(self, record: CallRecord, ttft_s: float) -> None:
        """Count the first token of a request that has ended."""
        totals = self._totals.get(record.order)
        if totals is None:
            totals = self._totals[record.order] = PredictionTotals()
        if record.is_retried:
            totals.num_retried += 1
        elif not record.predicted_s:
            totals.num_unknown += 1
        else:
            ratio = ttft_s / record.predicted_s
            totals.ratios[bisect_left(RATIOS, ratio)] += 1
            totals.ratio_sum += ratio

    def collect(self) -> Iterator[Metric]:
        ratios = HistogramMetricFamily(
            "pd_router_time_to_first_token_ratio",
            "Of each answer: time to the first token, by what the router predicted when it chose.",
            labels=["order"],
        )
        missing = CounterMetricFamily(
            "pd_router_unpredicted_requests",
            "Answers without such a ratio: no figures of the nodes yet, or a leg failed before it (retried).",
            labels=["order", "reason"],
        )
        bounds = [*(str(bound) for bound in RATIOS), "+Inf"]
        for order, totals in self._totals.items():
            ratios.add_metric([order], list(zip(bounds, accumulate(totals.ratios), strict=True)), totals.ratio_sum)
            for reason, num in (("no-figures", totals.num_unknown), ("retried", totals.num_retried)):
                missing.add_metric([order, reason], num)
        yield ratios
        yield missing
