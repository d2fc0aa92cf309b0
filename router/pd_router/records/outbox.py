"""A bounded queue of what a thread writes, so that neither a slow disk nor a slow collector delays a request."""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
log = logging.getLogger("pd_router")
MAX_WAITING = 4096  # records; more are dropped and counted
MAX_BATCH = 256
CLOSE_S = 2.0  # what is left when the router stops is written for so long


class Outbox(Generic[T]):
    """`put` never waits. A thread of its own, begun by the first `put`, gives batches to `write`, in order.

    `write` may raise or take long. `on_lost` counts items, with the reason: "full" or "failed".
    """

    def __init__(self, name: str, write: Callable[[Sequence[T]], None], on_lost: Callable[[str, int], None]) -> None:
        self._write = write
        self._on_lost = on_lost
        self._items: SimpleQueue[T | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, item: T) -> None:
        if self._items.qsize() >= MAX_WAITING:
            self._on_lost("full", 1)
            return
        if self._thread.ident is None:
            self._thread.start()
        self._items.put(item)

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Write what waits, for at most `deadline_s`. The rest is lost and counted."""
        if self._thread.ident is None:
            return
        self._items.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._on_lost("full", self._items.qsize())

    def _run(self) -> None:
        is_open, warned_s = True, 0.0
        while is_open:
            batch = [self._items.get()]
            while len(batch) < MAX_BATCH and not self._items.empty():
                batch.append(self._items.get())
            items = [item for item in batch if item is not None]
            is_open = len(items) == len(batch)
            try:
                if items:
                    self._write(items)
            except Exception as error:
                self._on_lost("failed", len(items))
                if time.monotonic() - warned_s > 60:  # seconds: a collector that is down fails every batch
                    warned_s = time.monotonic()
                    log.warning("%s: %d records are lost: %r", self._thread.name, len(items), error)
