"""How many prompts the engine has of requests about prompts alone."""

from __future__ import annotations

import asyncio

# Two full steps: one runs while the next one is planned. The rest waits here, where HTTP requests take turns, because
# the engine's queue is for as many prompts as `max_waiting` says, and one request may bring 2,048
WINDOW_TOKENS = 4096


class ReadWindow:
    """Bounds the tokens of read prompts that the engine has at once, over all HTTP requests. They take turns."""

    def __init__(self, num_tokens: int = WINDOW_TOKENS) -> None:
        self._limit = num_tokens
        self._taken = 0
        self._turn = asyncio.Lock()  # its waiters are served in order
        self._freed = asyncio.Event()
        self.num_waiting = 0  # HTTP requests: each waits with one prompt

    async def take(self, num_tokens: int) -> None:
        """Wait for room. A prompt that is longer than the window enters alone."""
        self.num_waiting += 1
        try:
            async with self._turn:
                while self._taken and self._taken + num_tokens > self._limit:
                    self._freed.clear()
                    await self._freed.wait()
                self._taken += num_tokens
        finally:
            self.num_waiting -= 1

    def give(self, num_tokens: int) -> None:
        self._taken -= num_tokens
        self._freed.set()
