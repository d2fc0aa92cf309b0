"""Threads on which the masks of grammars are computed while the device computes the step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from threading import Condition
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Threads of Python, which wait for the threads of llguidance. With 16 that took a row each, a step of 64 rows took
# 22 ms on an H200 for 6 without masks: the step loop did not get the interpreter's lock back
NUM_GROUPS = 4
LEAST_GROUP = 8  # rows
SLOW_S = 0.002  # of one mask, or of a group's


class Pace(Enum):
    """What is known of a row's last mask. Each pace has threads of its own, so that no row waits for a slower one."""

    QUICK = "computed with a group in one call, which ends with the slowest of them"
    SUSPECT = "its group was slow; the next one is measured alone"
    SLOW = "slow when measured alone; the fastest of those that wait comes first"


class MaskTask(Protocol):
    """The next mask of one row. It is of no thread while `is_ready`."""

    pace: Pace
    is_ready: bool
    cost_s: float  # CPU time of the last mask that was measured alone


Task = TypeVar("Task", bound=MaskTask)


class MaskThreads:
    """Has masks computed, by groups of rows. A row that becomes slow holds its group once, and then no other row."""

    def __init__(self) -> None:
        threads = {Pace.QUICK: NUM_GROUPS, Pace.SUSPECT: 1, Pace.SLOW: 1}
        self._pools = {pace: ThreadPoolExecutor(count, f"{pace.name.lower()}-mask") for pace, count in threads.items()}
        self._ended = Condition()  # masks are ready
        # Rows with masks of 0.1 s come behind one with a mask of 5 ms: 60 of them would keep it for 6 s
        self._slow: list[tuple[float, int, Any, Any]] = []  # a heap: cost, number, task, `compute`
        self._numbers = count()

    def close(self) -> None:
        """End the threads. Waits for the masks under way."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, tasks: Sequence[Task], compute: Callable[[Sequence[Task]], None]) -> None:
        """Begin to compute the masks. May be called from any thread.

        `compute` is called with a group of the tasks, on another thread. It must not raise.
        """
        quick = [task for task in tasks if task.pace is Pace.QUICK]
        num_groups = min(NUM_GROUPS, -(-len(quick) // LEAST_GROUP))
        for at in range(num_groups):
            self._pools[Pace.QUICK].submit(self._run, quick[at::num_groups], compute)
        if suspects := [task for task in tasks if task.pace is Pace.SUSPECT]:
            self._pools[Pace.SUSPECT].submit(self._run_each, suspects, compute)
        for task in [task for task in tasks if task.pace is Pace.SLOW]:
            with self._ended:
                heappush(self._slow, (task.cost_s, next(self._numbers), task, compute))
            self._pools[Pace.SLOW].submit(self._run_fastest)

    def wait(self, are_done: Callable[[], bool], deadline_s: float) -> None:
        """Wait until the tasks are done that `are_done` asks about, at most `deadline_s`."""
        with self._ended:
            self._ended.wait_for(are_done, deadline_s)

    def _run(self, tasks: Sequence[Task], compute: Callable[[Sequence[Task]], None]) -> None:
        """Compute a group. Of it only the time until it has ended is known."""
        if len(tasks) == 1:
            self._run_each(tasks, compute)
            return
        started_s = time.perf_counter()
        compute(tasks)
        if time.perf_counter() - started_s > SLOW_S:
            for task in tasks:
                task.pace = Pace.SUSPECT
        self._end(tasks)

    def _run_fastest(self) -> None:
        """Compute the mask of the slow row with the shortest last mask. There are as many calls as waiting rows."""
        with self._ended:
            *_, task, compute = heappop(self._slow)
        self._run_each((task,), compute)

    def _run_each(self, tasks: Sequence[Task], compute: Callable[[Sequence[Task]], None]) -> None:
        """Compute rows one after the other. The CPU time of this thread says what each took."""
        for task in tasks:
            started_s = time.thread_time()
            compute((task,))
            task.cost_s = time.thread_time() - started_s
            task.pace = Pace.SLOW if task.cost_s > SLOW_S else Pace.QUICK
            self._end((task,))

    def _end(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            task.is_ready = True
        with self._ended:
            self._ended.notify_all()
