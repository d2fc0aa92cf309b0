"""Threads on which the masks of grammars are computed while the device computes the step."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from threading import Condition
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

# One thread of Python computes all quick rows in one call of llguidance, which has threads of its own. Each thread of
# Python more takes the interpreter's lock from the step loop more often: with 64 rows on an H200 a step took 8.9 to
# 9.7 ms with four groups of rows, 8.8 with two, 8.1 with one, and 7.0 without masks
SUSPECTS = 8  # rows of a call, when the call for all rows was slow
NUM_SUSPECTS = 4  # calls at a time for such rows, and for new ones: the first mask of one must not hold that of another
SLOW_S = 0.002  # CPU time of one mask
# Of a call for several; it includes waits for cores and for the interpreter's lock. A call for 64 rows takes 1.3 ms at
# the median and 4.5 at p99; with 3 ms here rows were narrowed down that were not slow, and 1% of the draws were sat out
SLOW_GROUP_S = 0.006
MOST_SEARCHES = 16  # that wait for masks after drafts. Older ones are dropped: their rows have gone on
CALM = 16  # quick masks of a slow row until it joins the others: each slow one among them delays all


class Pace(Enum):
    """What is known of a row's last masks. Each pace has threads of its own, so that no row waits for a slower one."""

    QUICK = "computed with all others in one call, which ends with the slowest of them"
    SUSPECT = "new, or that call was slow: the next one is for a few rows, then for each of them if it is slow, too"
    SLOW = "slow when measured alone; the fastest of those that wait comes first"


class MaskTask(Protocol):
    """The next mask of one row. It is of no thread while `is_ready`."""

    pace: Pace
    is_ready: bool
    cost_s: float  # CPU time of the last mask that was measured alone
    num_calm: int  # quick masks since the last slow one
    is_lone: bool  # for a SUSPECT: its next call is for this row alone


Task = TypeVar("Task", bound=MaskTask)


class MaskThreads:
    """Has masks computed. A row that becomes slow holds the others once, and then no other row."""

    def __init__(self) -> None:
        threads = {Pace.QUICK: 1, Pace.SUSPECT: NUM_SUSPECTS, Pace.SLOW: 1}
        self._pools = {pace: ThreadPoolExecutor(count, f"{pace.name.lower()}-mask") for pace, count in threads.items()}
        self._following = ThreadPoolExecutor(1, "draft-mask")
        self._followed = list[Any]()  # calls for masks after drafts, in the order in which they end
        self._searches = deque["Callable[[], None]"](maxlen=MOST_SEARCHES)
        self._refused = set[ThreadPoolExecutor]()  # the system has refused a thread of these
        self._ended = Condition()  # masks are ready
        self._wake: Callable[[], None] | None = None
        # Rows with masks of 0.1 s come after one with a mask of 5 ms: 60 of them would keep it for 6 s
        self._slow: list[tuple[float, int, Any, Any]] = []  # a heap: cost, number, task, `compute`
        self._numbers = count()

    def close(self) -> None:
        """End the threads. Waits for the masks under way."""
        for pool in (*self._pools.values(), self._following):  # it last, because the others submit to it
            self._searches.clear()
            pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, tasks: Sequence[Task], compute: Callable[[Sequence[Task]], Sequence[Task]]) -> None:
        """Begin to compute the masks. May be called from any thread.

        `compute` is called with some of the tasks, on another thread. It returns those with a mask. The others are
        begun again, perhaps by now. It must not raise. Where the system refuses a thread, tasks wait until it does not.
        """
        paces = [task.pace for task in tasks]  # before a thread has one: it changes the pace, and is done with the task
        quick, suspects, slow = (
            [task for task, pace in zip(tasks, paces, strict=True) if pace is wanted] for wanted in Pace
        )
        groups: list[list[Task]] = [[task] for task in suspects if task.is_lone]
        others = [task for task in suspects if not task.is_lone]
        groups += [others[at : at + SUSPECTS] for at in range(0, len(others), SUSPECTS)]
        if quick:
            self._submit(self._pools[Pace.QUICK], self._run, quick, compute)
        for group in groups:
            self._submit(self._pools[Pace.SUSPECT], self._run, group, compute)
        for task in slow:
            with self._ended:
                heappush(self._slow, (task.cost_s, next(self._numbers), task, compute))
            self._submit(self._pools[Pace.SLOW], self._run_fastest)

    def _submit(self, pool: ThreadPoolExecutor, *call: Any) -> Future[None] | None:
        """Submit a call. None: the system refuses a thread. The pool keeps the call, and asks again at the next one."""
        try:
            return pool.submit(*call)
        except RuntimeError as error:
            if pool not in self._refused:
                logger.warning("a thread cannot start: rows may wait for masks, or drafts have none: %s", error)
            self._refused.add(pool)
            return None

    def follow(self, compute: Callable[[], None]) -> Future[None] | None:
        """Compute masks after drafts, on a thread of their own: no row needs them to go on. `compute` must not raise.

        None: the system has refused that thread, and is not asked again. May be called from any thread.
        """
        with self._ended:
            if self._following in self._refused or (future := self._submit(self._following, compute)) is None:
                return None
            self._followed.append(future)
        future.add_done_callback(self._end_followed)
        return future

    def seek(self, search: Callable[[], None]) -> None:
        """Call `search` on the thread of drafts when the next masks are ready and none after drafts is to be computed.

        It must not raise, and ends early where masks after drafts are `followed` by then: those are waited for, and
        it is not. Called while masks are computed.
        """
        self._searches.append(search)

    @property
    def followed(self) -> Future[None] | None:
        """What the thread of drafts computes now, or next. It may take long: a step waits for its own masks only."""
        return next((one for one in tuple(self._followed) if not one.done()), None)

    def wait(self, are_done: Callable[[], bool], deadline_s: float) -> None:
        """Wait until the tasks are done that `are_done` asks about, at most `deadline_s`."""
        with self._ended:
            self._ended.wait_for(are_done, deadline_s)

    def wake_once(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, when the next masks are ready or `ring` is called. Replaces the call before."""
        self._wake = wake

    def ring(self) -> None:
        """Make the call that `wake_once` has asked for, if it has. May be called from any thread."""
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def _run(self, tasks: Sequence[Task], compute: Callable[[Sequence[Task]], Sequence[Task]]) -> None:
        """Compute rows in one call. Of several only the time until all have ended is known."""
        if len(tasks) == 1:
            self._run_alone(tasks[0], compute)
            return
        started_s = time.perf_counter()
        ended = compute(tasks)
        is_slow = time.perf_counter() - started_s > SLOW_GROUP_S
        for task in ended:
            task.is_lone = is_slow and len(tasks) <= SUSPECTS
            task.pace = Pace.SUSPECT if is_slow else Pace.QUICK
        self._end(ended)

    def _run_fastest(self) -> None:
        """Compute the mask of the slow row with the shortest last mask. There are as many calls as waiting rows."""
        with self._ended:
            *_, task, compute = heappop(self._slow)
        self._run_alone(task, compute)

    def _run_alone(self, task: Task, compute: Callable[[Sequence[Task]], Sequence[Task]]) -> None:
        """Compute one row. The CPU time of this thread says how long it took."""
        started_s = time.thread_time()
        if not compute((task,)):
            return
        task.cost_s = time.thread_time() - started_s
        task.num_calm = 0 if task.cost_s > SLOW_S else task.num_calm + 1
        stays_slow = task.pace is Pace.SLOW and task.num_calm < CALM
        task.pace = Pace.SLOW if stays_slow or not task.num_calm else Pace.QUICK
        self._end((task,))

    def _end_followed(self, future: Future[None]) -> None:
        with self._ended:
            self._followed.remove(future)
        self._end(())

    def _end(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            task.is_ready = True
        with self._ended:
            self._ended.notify_all()
        self.ring()
        with self._ended:
            while self._searches and not self._followed and self._following not in self._refused:
                self._submit(self._following, self._searches.popleft())
