"""How many prompts the engine has of requests about prompts alone."""

from __future__ import annotations

import asyncio

# Two full steps: one runs while the next one is planned. The rest waits here, where HTTP requests take turns: one may
# bring 2,048 prompts, more than the engine's queue holds
WINDOW_TOKENS = 4096


class ReadWindow:
    """Bounds the read prompts that the engine has at once, over all HTTP requests, which take turns."""

    def __init__(self, max_prompts: int, max_tokens: int = WINDOW_TOKENS) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self.num_prompts = 0
        self.num_tokens = 0
        self._turn = asyncio.Lock()  # its waiters are served in order
        self._freed = asyncio.Event()
        self.num_waiting = 0  # HTTP requests: each waits with one prompt

    async def take(self, num_tokens: int) -> None:
        """Wait for room. A prompt that is longer than the window enters alone."""
        self.num_waiting += 1
        try:
            async with self._turn:
                while not self._has_room(num_tokens):
                    self._freed.clear()
                    await self._freed.wait()
                self.num_prompts += 1
                self.num_tokens += num_tokens
        finally:
            self.num_waiting -= 1

    def _has_room(self, num_tokens: int) -> bool:
        if not self.num_prompts:
            return True
        return self.num_prompts < self._max_prompts and self.num_tokens + num_tokens <= self._max_tokens

    def give(self, num_tokens: int) -> None:
        """Note that a prompt is read, or is not to be read any more."""
        self.num_prompts -= 1
        self.num_tokens -= num_tokens
        self._freed.set()
