"""Turns for the work on large bodies, so that other requests come to their place between two of them.

A body of 8 MB takes an event loop up to 0.1 s. A thread would not help: a decoder holds the interpreter's lock. So one
body is decoded at a time, and the loop is then left to others for as long as it was taken.
"""

from __future__ import annotations

import asyncio
from collections import deque

from pd_http.errors import BodiesWait

LARGE_BODY_BYTES = 256 << 10  # smaller ones take up to 20 ms, and never wait
TURN_DEADLINE_S = 30.0
_LONGEST_PAUSE_S = 0.2


class BodyTurns:
    """Gives turns in the order in which they are asked for. A turn ends by itself, at the next `await` of its task."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # by a turn, or by the pause after it

    async def take(self, num_bytes: int) -> None:
        """Wait until the loop may be taken for a body of so many bytes. Raises BodiesWait."""
        if num_bytes < LARGE_BODY_BYTES:
            return
        if not self._is_taken:
            self._begin()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(TURN_DEADLINE_S):
                await turn
        except TimeoutError as error:
            raise BodiesWait(f"other large requests were read for {TURN_DEADLINE_S:g} s; try again") from error

    def _begin(self) -> None:
        self._is_taken = True
        loop = asyncio.get_running_loop()
        loop.call_soon(self._end, loop.time())  # after the task that has the turn

    def _end(self, began_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(min(loop.time() - began_s, _LONGEST_PAUSE_S), self._next)

    def _next(self) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            turn = self._waiting.popleft()
            if not turn.done():  # its request has ended
                turn.set_result(None)
                self._begin()
