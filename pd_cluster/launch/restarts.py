"""Decides when to restart a dead process, and when a cluster cannot go on. Pure: its inputs are events and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
HEALTHY_S = 60.0  # after so long ready, the next delay is the first one again
MAX_FAILED_STARTS = 5  # in a row without being ready: the cause is then taken for permanent


@dataclass(frozen=True, slots=True)
class Again:
    """Restart the process after `delay_s`. `number`: its restarts so far, including this one."""

    delay_s: float
    number: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the cluster, because it can no longer do its work. `reason`: the cause, in words."""

    reason: str


@dataclass(slots=True)
class _Record:
    ready_since_s: float | None = None  # None: not ready now
    delay_s: float = 0.0  # of the last restart; 0: none since the process was last ready for HEALTHY_S
    failed_starts: int = 0  # in a row
    restarts: int = 0


class Restarts:
    """The restart policy. Times are seconds of a monotonic clock.

    abilities: name of a task -> the processes that can do it. The cluster needs one of them for each task. A process
    without a task is restarted without limit, since the cluster works without it.
    """

    def __init__(self, abilities: Mapping[str, Sequence[str]]) -> None:
        self._abilities = abilities
        self._records: dict[str, _Record] = {}

    def ready(self, name: str, now_s: float) -> None:
        """Note that the process is ready."""
        record = self._of(name)
        record.ready_since_s, record.failed_starts = now_s, 0

    def died(self, name: str, now_s: float) -> Again | GiveUp:
        """Note that the process has ended or could not be started. Returns what to do.

        The delay doubles with each death in a row, from FIRST_DELAY_S to MAX_DELAY_S. GiveUp when a task has no ready
        process and each of its processes has failed to start MAX_FAILED_STARTS times in a row.
        """
        record = self._of(name)
        if record.ready_since_s is None:
            record.failed_starts += 1
        elif now_s - record.ready_since_s >= HEALTHY_S:
            record.delay_s = 0.0
        record.ready_since_s = None
        for ability, able in self._abilities.items():
            if name in able and all(self._is_hopeless(other) for other in able):
                others = f", and no other process can {ability}" if len(able) > 1 else ""
                return GiveUp(f"{name} has failed to start {record.failed_starts} times in a row{others}")
        record.delay_s = min(2 * record.delay_s or FIRST_DELAY_S, MAX_DELAY_S)
        record.restarts += 1
        return Again(record.delay_s, record.restarts)

    def _is_hopeless(self, name: str) -> bool:
        record = self._of(name)
        return record.ready_since_s is None and record.failed_starts >= MAX_FAILED_STARTS

    def _of(self, name: str) -> _Record:
        return self._records.setdefault(name, _Record())
