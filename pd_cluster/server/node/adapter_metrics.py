"""Metrics of a node's adapters. Their names are labels, of which an operator may load 1,000: so few are exported."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pd_connectors.protocol.adapters import LEVELS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.server.node.node_adapters import NodeAdapters

MAX_LABELS = 100  # adapters with series of their own, those that were loaded last


class AdapterCollector(Collector):
    """Names and meanings are those of vLLM."""

    def __init__(self, adapters: NodeAdapters) -> None:
        self._adapters = adapters

    def collect(self) -> Iterator[GaugeMetricFamily]:
        loaded = GaugeMetricFamily("pd_lora_adapter_loaded", "1 for each adapter.", labels=["lora_name", "level"])
        states = [one for one in self._adapters.states() if one.record.is_live]
        for state in sorted(states, key=lambda one: -one.record.stamp)[:MAX_LABELS]:
            loaded.add_metric([state.record.name, LEVELS[state.tier]], 1)
        yield loaded
        labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
        info = GaugeMetricFamily(
            "pd_lora_requests_info", "Unix time; its labels name the adapters of requests under way.", labels=labels
        )
        names = sorted(name for name, count in self._adapters.in_use.items() if count)[:MAX_LABELS]
        info.add_metric([",".join(names), "", str(self._adapters.num_slots)], time.time())
        yield info
