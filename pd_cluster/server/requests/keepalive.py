"""P's keep-alive to a caller that waits for a ticket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pd_http.reply import ErrorEvent, Reply

BEAT_S = 1.0
COMMENT = b": waiting\n\n"


class KeepAlive:
    """While entered, and until `stop`: begins the answer after `BEAT_S` and writes a comment into it every `BEAT_S`.

    A caller that receives nothing concludes that this process is frozen. The status of such an answer is 200: a later
    failure is an event that carries its status (`on_error`).
    """

    def __init__(self, reply: Reply, headers: dict[str, str], on_error: ErrorEvent) -> None:
        self._reply = reply
        self._headers = headers
        self._on_error = on_error
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="keep-alive")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Write no more comments. Idempotent."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait({task})

    async def start_events(self) -> None:
        """Begin the answer, unless it has begun."""
        await self.stop()
        if not self._reply.started:
            await self._reply.start_events(self._headers, self._on_error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if not self._reply.started:
                await self._reply.start_events(self._headers, self._on_error)
            await self._reply.write(COMMENT)
