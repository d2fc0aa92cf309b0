"""Metrics of a node's adapters. Names are labels, of which an operator may load 1,000, so few are exported."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pd_connectors.protocol.adapters import LEVELS, ON_DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.server.node.node_adapters import NodeAdapters

MAX_LABELS = 100  # adapters with series of their own, those that were loaded last
REQUESTS_LABELS = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]  # of vLLM


class AdapterCollector(Collector):
    """Reads them at each scrape."""

    def __init__(self, adapters: NodeAdapters) -> None:
        self._adapters = adapters

    def collect(self) -> Iterator[GaugeMetricFamily]:
        loaded = GaugeMetricFamily("pd_lora_adapter_loaded", "1 for each adapter.", labels=["lora_name", "level"])
        states = sorted(self._adapters.states(), key=lambda one: (not one.record.is_live, -one.record.stamp))
        for state in states[: min(MAX_LABELS, len(self._adapters.live))]:
            loaded.add_metric([state.record.name, LEVELS[state.tier]], 1)
        info = GaugeMetricFamily("pd_lora_requests_info", "Unix time; labels name adapters.", None, REQUESTS_LABELS)
        used, on_device = self._adapters.in_use, {one.record.name for one in states if one.tier == ON_DEVICE}
        parts = ([name for name in used if (name in on_device) is is_on][:MAX_LABELS] for is_on in (True, False))
        info.add_metric([*map(",".join, parts), str(self._adapters.num_slots)], time.time())
        yield from (loaded, info)
