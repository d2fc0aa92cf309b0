"""The clock by which one process judges the silence of another."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
LOOK_S = 0.25  # between two looks at whether this process itself was held up


class PatientClock:
    """A monotonic clock that does not count the time during which the observing process itself did not run.

    After a stop (a debugger, SIGSTOP, a suspended machine) an observer cannot tell the silence of another process from
    its own. Without this clock every lease would expire and every deadline would fire at once when it goes on.
    `patience_s`: delays up to this count as time.
    """

    def __init__(self, clock: Callable[[], float], patience_s: float) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._lost_s = 0.0
        self._due = clock()

    def __call__(self) -> float:
        return self._clock() - self._lost_s

    def sleep(self, duration_s: float) -> None:
        """Note that the observer sleeps for `duration_s` from now on."""
        self._due = self._clock() + duration_s

    def resume(self) -> None:
        """Note that the observer runs again."""
        late_s = self._clock() - self._due
        if late_s > self._patience_s:
            self._lost_s += late_s


async def patiently(work: Coroutine[None, None, T], limit_s: float) -> T:
    """The result of `work`. Raises TimeoutError after `limit_s`, in which time that this process was held up is not
    counted: what has arrived meanwhile is read first."""
    clock = PatientClock(time.monotonic, patience_s=LOOK_S)
    ends_at = clock() + limit_s
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            left_s = ends_at - clock()
            if left_s <= 0:
                raise TimeoutError
            clock.sleep(min(left_s, LOOK_S))
            await asyncio.wait({task}, timeout=min(left_s, LOOK_S))
            clock.resume()
        return task.result()
    finally:
        task.cancel()
