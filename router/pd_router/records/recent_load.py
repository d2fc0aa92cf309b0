"""The load of the last minute: requests that came, by model, and the lengths of those that ended. Pure: no IO."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_router.records.call_record import CallRecord

WINDOW_S = 60.0
MOST_ENDED = 2000  # of which a process keeps lengths: at a higher rate they cover less time, the rate is that of all


class LoadPart(msgspec.Struct):
    """What one worker tells, by model. `seen`: age of the arrival, prompt, cached and answer tokens."""

    arrived_per_s: dict[str, float]
    seen: dict[str, list[tuple[float, int, int, int]]]


class RecentLoad:
    """`clock`: monotonic seconds, as in the records."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._running: set[CallRecord] = set()
        self._ended: deque[CallRecord] = deque(maxlen=MOST_ENDED)

    def begin(self, record: CallRecord) -> None:
        self._running.add(record)

    def end(self, record: CallRecord) -> None:
        """Refused requests are none of the nodes' load; nor is one of lengths that no node has told."""
        self._running.discard(record)
        if record.report is not None and record.outcome == "ok":
            self._ended.append(record)

    def part(self) -> LoadPart:
        now_s = self._clock()
        oldest_s = self._ended[0].ended_s if len(self._ended) == MOST_ENDED else self._begun_s
        since_s = max(now_s - WINDOW_S, oldest_s)
        numbers, told = dict[str, int](), LoadPart({}, {})
        for record in self._ended:  # long answers began before the minute
            if (report := record.report) is not None and record.ended_s >= since_s:
                cached = min(report.num_cached_tokens, report.num_prompt_tokens)
                row = (record.arrived_s - now_s, report.num_prompt_tokens, cached, report.num_output_tokens)
                told.seen.setdefault(record.model, []).append(row)
        for record in (*self._ended, *self._running):
            if record.arrived_s >= since_s:
                numbers[record.model] = numbers.get(record.model, 0) + 1
        told.arrived_per_s = {model: number / max(1.0, now_s - since_s) for model, number in numbers.items()}
        return told


def total_load(parts: Iterable[LoadPart]) -> LoadPart:
    """Of all workers."""
    total = LoadPart({}, {})
    for part in parts:
        for model, per_s in part.arrived_per_s.items():
            total.arrived_per_s[model] = total.arrived_per_s.get(model, 0.0) + per_s
        for model, rows in part.seen.items():
            total.seen.setdefault(model, []).extend(rows)
    return total
