"""Tasks that outlive their request: reading a prefill leg to its end, releasing tickets."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Coroutine

log = logging.getLogger("pd_router")


class Background:
    """Owns its tasks until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def keep(self, future: asyncio.Future[None]) -> None:
        """Wait for `future` too. Its failure is handled elsewhere."""
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)

    async def close(self, deadline_s: float) -> None:
        """Wait up to `deadline_s` seconds for the tasks, then cancel the rest and wait for those."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
