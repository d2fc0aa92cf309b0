"""A rank's process for `python -m benchmarks ranks`. It computes nothing; its steps last a given time."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_cluster.worker.rank import RankProcess, main

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import Batch


@dataclass(slots=True)
class TimedStep:
    """Ends `step_s` after its launch. The thread that waits sleeps meanwhile, as beside a device."""

    launched_s: float
    step_s: float
    ends_s: list[float]  # receives the moment of the end
    is_launched: bool = True
    has_drafts: bool = False

    def wait(self) -> None:
        time.sleep(max(0.0, self.launched_s + self.step_s - time.monotonic()))
        self.ends_s.append(time.monotonic())

    def digest(self) -> int:
        return 0

    def result(self) -> None:
        return


@dataclass(slots=True)
class TimedExecutor:
    """The calls that a RankProcess makes. Times are those of the monotonic clock, which processes of a host share."""

    step_s: float
    launched_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    num_host_blocks: int = 0

    def follow(self, batch: Batch, graph: object, staged: object) -> TimedStep:
        self.launched_s.append(time.monotonic())
        return TimedStep(self.launched_s[-1], self.step_s, self.ends_s)

    def close(self) -> None:
        return

    use_device = close


class TimedRank(RankProcess):
    """Has two phases of its own: how long a step lasts, and what was noted since the phase before."""

    def _phase_describe(self) -> None:
        self._state = self._timed = TimedExecutor(0.0)

    def _phase_steps(self, step_s: float) -> None:
        self._timed.step_s = step_s

    def _phase_noted(self) -> tuple[list[float], list[float], float]:
        """When frames were decoded, when their steps ended, and the CPU seconds of this process so far."""
        launched_s, ends_s = self._timed.launched_s[:], self._timed.ends_s[:]
        self._timed.launched_s.clear()
        self._timed.ends_s.clear()
        return launched_s, ends_s, time.process_time()


if __name__ == "__main__":
    sys.exit(main(TimedRank))
