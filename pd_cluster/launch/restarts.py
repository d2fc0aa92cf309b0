"""When a dead process is started again, and when a cluster cannot go on. Pure: fed deaths, readiness and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
HEALTHY_S = 60.0  # a process that was ready for so long starts again with the first delay
MAX_FAILED_STARTS = 5  # in a row and never ready: what then keeps it down will not go away by itself


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again after `delay_s`. `number`: how often this process has been started again, this time included."""

    delay_s: float
    number: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The cluster cannot do its work any more."""

    reason: str


@dataclass(slots=True)
class _Record:
    ready_since_s: float | None = None  # None: not ready now
    delay_s: float = 0.0  # the last one; 0: none since it was last ready for HEALTHY_S
    failed_starts: int = 0  # in a row
    restarts: int = 0


class Restarts:
    """The policy. Times are monotonic seconds.

    abilities: what the cluster must be able to do -> the processes that can. A process that no ability names is
    started again for ever, since the cluster does without it.
    """

    def __init__(self, abilities: Mapping[str, Sequence[str]]) -> None:
        self._abilities = abilities
        self._records: dict[str, _Record] = {}

    def ready(self, name: str, now_s: float) -> None:
        """The process serves."""
        record = self._of(name)
        record.ready_since_s, record.failed_starts = now_s, 0

    def died(self, name: str, now_s: float) -> Again | GiveUp:
        """The process has ended, or could not be started.

        The delay doubles with each death in a row, from FIRST_DELAY_S to MAX_DELAY_S. GiveUp when of some ability no
        process is ready and each has failed to start MAX_FAILED_STARTS times in a row.
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
