"""Reads of adapters that are under way on all ranks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class AdapterReads:
    """Tells once that each rank has read an adapter. `take` may be called on any thread."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._lock = num_ranks, threading.Lock()
        self._reads: dict[str, tuple[Callable[[str, int], None], list[tuple[str, int]]]] = {}

    def expect(self, digest: str, done: Callable[[str, int], None]) -> None:
        """From now on `done` waits for all ranks: it gets the first error, or "" and the most bytes of a rank."""
        self._reads[digest] = (done, [])

    def take(self, digest: str, error: str, num_bytes: int) -> None:
        """What one rank tells."""
        with self._lock:
            done, answers = self._reads[digest]
            answers.append((error, num_bytes))
            if len(answers) < self._num_ranks:
                return
            del self._reads[digest]
        errors = [error for error, _ in answers if error]
        done(errors[0] if errors else "", max(num_bytes for _, num_bytes in answers))
