"""The memory of whole bodies and of answers over all requests of a process: one sum with a bound."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pd_http.errors import InvalidRequest, NoRoom
from pd_http.freed_memory import FreedMemory
from pd_http.unfinished_requests import SMALL_BYTES

if TYPE_CHECKING:
    from types import TracebackType

TURN_S = 60.0  # until an answer has room
MAX_WAITING = 64  # answers that wait for room: each keeps its body and its prompts meanwhile
RETURN_BYTES = 4 << 20  # of a share, so that its memory goes back to the system
RETURN_S = 1.0  # and when: its objects are freed by then


class HeldBytes:
    """One per process. No request may have more than half of it.

    One half is for answers of which the size is known before the work begins. They wait for room in the order in which
    they came: small ones do not starve a large one. The other half is for what has come, bodies and answers that grow:
    it is refused, because a wait would not free it.
    """

    def __init__(self, max_bytes: int, max_waiting: int = MAX_WAITING, turn_s: float = TURN_S) -> None:
        self.half = max_bytes // 2
        self.num_come = self.num_planned = self.num_waiting = 0
        self._max_waiting, self._turn_s = max_waiting, turn_s
        self._turn = asyncio.Lock()  # its waiters are served in order
        self._freed = asyncio.Event()
        self._memory = FreedMemory()

    async def plan(self, num_bytes: int) -> None:
        """Wait for room. Raises NoRoom if too many wait, or after the deadline."""
        if self.num_waiting >= self._max_waiting:
            raise NoRoom(f"{self.num_waiting} requests wait for memory")
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._turn_s), self._turn:
                while self.num_planned + num_bytes > self.half:
                    self._freed.clear()
                    await self._freed.wait()
                self.num_planned += num_bytes
        except TimeoutError as error:
            raise NoRoom(f"there was no memory for the answer within {self._turn_s:g} s") from error
        finally:
            self.num_waiting -= 1

    def free(self, num_come: int, num_planned: int) -> None:
        self.num_come -= num_come
        self.num_planned -= num_planned
        self._freed.set()
        if num_come + num_planned > RETURN_BYTES:
            self._memory.note(num_come + num_planned)
            asyncio.get_running_loop().call_later(RETURN_S, self._memory.give_back)


class Share:
    """What one request holds. `close` gives it back, as the end of a `with` block does; then it may begin anew.

    Both ways to take raise NoRoom, and InvalidRequest for more than one request may have.
    """

    __slots__ = ("_come", "_counted", "_held", "_planned")

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._come = self._counted = self._planned = 0

    @property
    def num_come(self) -> int:
        return self._come

    def grow(self, num_bytes: int) -> None:
        """Count what has come, in steps of SMALL_BYTES: less is not counted."""
        self._come += num_bytes
        more, held = self._come - self._counted, self._held
        if more > SMALL_BYTES:
            self._check(self._come, None)
            if held.num_come + more > held.half:
                raise NoRoom(f"other requests hold the memory of this process, {held.num_come} of {held.half} bytes")
            held.num_come += more
            self._counted = self._come

    async def plan(self, num_bytes: int, param: str) -> None:
        """Take what the answer will have before the work begins, in turn."""
        if num_bytes > SMALL_BYTES:
            self._check(num_bytes, param)
            await self._held.plan(num_bytes)
            self._planned += num_bytes

    def _check(self, num_bytes: int, param: str | None) -> None:
        if num_bytes > self._held.half:
            allowed = f"{self._held.half} are allowed (half of --max-held-mb)"
            raise InvalidRequest(f"the request needs {num_bytes} bytes of memory; {allowed}", param, "too_much_memory")

    def close(self) -> None:
        if self._counted or self._planned:
            self._held.free(self._counted, self._planned)
        self._come = self._counted = self._planned = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()
