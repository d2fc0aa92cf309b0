"""A virtual clock and what happens at which time."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class EventQueue:
    """Calls in the order of their times; of equal times in the order of their posting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, call)

    def run(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left to happen, or `is_done`."""
        while self._heap and not is_done():
            self.now_s, _, call = heapq.heappop(self._heap)
            call()
