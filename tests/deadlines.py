"""How long a test waits for what must come, and the two functions that wait.

A deadline is there so that a broken product ends the test instead of hanging it. It is no claim about speed: it is so
long that no busy machine reaches it, and a test that waits for an event goes on as soon as the event is there.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HANG_S = 60.0  # of any wait for what takes a moment; pytest ends a test after 300 s
COMMAND_S = 280.0  # of a command that imports torch or starts nodes: 100 were too few where it had 8% of a core
SLOW_HANG_S = 1800.0  # of a slow test: one took more than 600 s beside some twenty busy processes on two cores
POLL_S = 0.02  # between two looks; a look at /metrics takes a node some milliseconds


def wait_until(condition: Callable[[], object], explain: Callable[[], object] = str, poll_s: float = POLL_S) -> None:
    """Look until `condition` is true. AssertionError with `explain` after `HANG_S`."""
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {HANG_S:g} s: {explain()}"
        time.sleep(poll_s)


async def until(
    condition: Callable[[], object | Awaitable[object]],
    explain: str | Callable[[], object] = "",
    *,
    deadline_s: float = HANG_S,
    poll_s: float = POLL_S,
) -> None:
    """Look until `condition`, or what it awaits, is true. AssertionError with `explain` after the deadline.

    `poll_s=0` looks after each turn of the event loop: for what happens in this process.
    """
    end_s = time.monotonic() + deadline_s
    while not await _now(condition()):
        told = explain if isinstance(explain, str) else explain()
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {told}"
        await asyncio.sleep(poll_s)


def wait_equal(read: Callable[[], object], wanted: object, poll_s: float = POLL_S) -> None:
    """Look until `read` gives `wanted`: a counter of another process settles a moment after the answer."""
    wait_until(lambda: read() == wanted, lambda: f"{read()!r} is not {wanted!r}", poll_s)


async def until_equal(
    read: Callable[[], object | Awaitable[object]], wanted: object, *, poll_s: float = POLL_S
) -> None:
    """As `wait_equal`."""
    found: list[object] = []

    async def is_equal() -> bool:
        found[:] = [await _now(read())]
        return found == [wanted]

    await until(is_equal, lambda: f"{found[0]!r} is not {wanted!r}", poll_s=poll_s)


async def _now(result: object | Awaitable[object]) -> object:
    return await result if inspect.isawaitable(result) else result
