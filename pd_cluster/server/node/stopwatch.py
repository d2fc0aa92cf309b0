"""Delivery times of a request's tokens, for the latency histograms."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from pd_cluster.server.node.metrics import NodeMetrics


class Stopwatch:
    """Delivery times of one request. `started_s` and all other times are of the monotonic clock."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._first_s: float | None = None
        self._second_s: float | None = None
        self._last_s = started_s
        self._gaps_s: list[float] = []

    @property
    def first_s(self) -> float:
        """Seconds from the start to the first output; 0: there was none."""
        return 0.0 if self._first_s is None else self._first_s - self._started_s

    def delivered(self, num_new: Collection[int], num_lead_tokens: int) -> None:
        """Note that the client got new output: `num_new` tokens of each of the sequences that have some.

        `num_lead_tokens`: of the first of the n sequences so far. Each token of the sequence with most new ones took a
        part of the time since the last output.
        """
        most = max(num_new, default=0)
        if not most and (not num_new or self._first_s is not None):
            return
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps_s += [(now_s - self._last_s) / most] * most
        if self._second_s is None and num_lead_tokens > 1:
            self._second_s = now_s
        self._last_s = now_s

    def observe(self, metrics: NodeMetrics, num_tokens: int, *, complete: bool) -> None:
        """Add to the histograms. `num_tokens`: of the longest sequence. `complete`: the client stayed to the end."""
        if self._first_s is None:
            return
        metrics.ttft.observe(self._first_s - self._started_s)
        if self._second_s is not None:
            metrics.second_token.observe(self._second_s - self._started_s)
        for gap_s in self._gaps_s:
            metrics.itl.observe(gap_s)
        if complete:
            metrics.e2e.observe(self._last_s - self._started_s)
            if num_tokens > 1:
                metrics.tpot.observe((self._last_s - self._first_s) / (num_tokens - 1))
