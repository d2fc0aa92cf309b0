"""Where the record of an ended request goes: to the metrics, to its line in the log, to its spans."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import orjson

from pd_router.records.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_router.config import RouterConfig
    from pd_router.records.call_record import CallRecord
    from pd_router.records.metrics import RouterMetrics

WRITTEN = {"off": 0, "errors": 1, "slow": 2, "all": 3}  # each level has those before it


class RequestSinks:
    """Takes each record once. `export`: None without a collector of traces."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        export: Callable[[Sequence[CallRecord]], None] | None = None,
        write: Callable[[Sequence[CallRecord]], None] | None = None,
    ) -> None:
        self._level = WRITTEN[config.request_log]
        self._slow_s = config.slow_ttft_ms / 1e3
        self._metrics = metrics
        self._lines = Outbox("request-log", write or write_lines, metrics.lost("log")) if self._level else None
        self._spans = Outbox("trace-export", export, metrics.lost("trace")) if export is not None else None

    def take(self, record: CallRecord) -> None:
        self._metrics.observe(record)
        rank = 1 if record.has_failed else 2 if self._is_slow(record) else 3
        if self._lines is not None and rank <= self._level:
            self._lines.put(record)
        if self._spans is not None and (record.trace.is_sampled or rank < 3):
            self._spans.put(record)

    def _is_slow(self, record: CallRecord) -> bool:
        waited_s = record.ttft_s
        if waited_s is None:  # no node reported it; of an answer that is not streamed this includes the generation
            waited_s = record.ended_s - record.arrived_s
        return waited_s > self._slow_s

    def close(self) -> None:
        """Write what waits. It may take `CLOSE_S` for each of the two."""
        for outbox in (self._lines, self._spans):
            if outbox is not None:
                outbox.close()


def write_lines(records: Sequence[CallRecord]) -> None:
    """One JSON object a line, to standard error, as the rest of the log."""
    sys.stderr.write("".join(orjson.dumps(record.line()).decode() + "\n" for record in records))
    sys.stderr.flush()
