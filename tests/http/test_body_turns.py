"""Large bodies are worked on one after the other, and leave the loop to others between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pd_http import body_turns
from pd_http.body_turns import LARGE_BODY_BYTES, BodyTurns
from pd_http.errors import BodiesWait

if TYPE_CHECKING:
    from collections.abc import Callable


async def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError


def test_others_run_between_two_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bodies that arrive at once would hold the loop for eight times as long."""
    told: list[str] = []

    async def body(turns: BodyTurns, name: str) -> None:
        await turns.take(LARGE_BODY_BYTES)
        told.append(name)

    async def main() -> None:
        turns, loop = BodyTurns(), asyncio.get_running_loop()

        def pause(seconds: float, callback: object, *given: object) -> None:
            told.append("others")
            loop.call_soon(callback, *given)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_later", pause)
        await asyncio.gather(*(body(turns, str(i)) for i in range(4)))
        await wait_until(lambda: not turns._is_taken)
        await body(turns, "free again")

    asyncio.run(main())
    assert told[:8] == ["0", "others", "1", "others", "2", "others", "3", "others"]
    assert told[8] == "free again"


def test_the_pause_is_as_long_as_the_turn_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(took_s: float) -> float:
        turns, loop, pauses = BodyTurns(), asyncio.get_running_loop(), []
        now_s = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now_s)
        monkeypatch.setattr(loop, "call_later", lambda seconds, *_: pauses.append(seconds))
        await turns.take(LARGE_BODY_BYTES)
        now_s += took_s
        await wait_until(lambda: bool(pauses))
        return float(pauses[0])

    assert asyncio.run(main(0.05)) == pytest.approx(0.05)
    assert asyncio.run(main(5.0)) < 1.0


def test_small_bodies_never_wait() -> None:
    async def main() -> None:
        turns = BodyTurns()
        await turns.take(LARGE_BODY_BYTES)
        waits = turns.take(LARGE_BODY_BYTES - 1)
        with pytest.raises(StopIteration):  # at its first step
            waits.send(None)

    asyncio.run(main())


def test_a_request_that_ends_while_it_waits_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        turns = BodyTurns()
        await turns.take(LARGE_BODY_BYTES)
        gone = [asyncio.create_task(turns.take(LARGE_BODY_BYTES)) for _ in range(3)]
        stays = asyncio.create_task(turns.take(LARGE_BODY_BYTES))
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await stays
        assert not turns._waiting
        monkeypatch.setattr(body_turns, "TURN_DEADLINE_S", 0.0)
        with pytest.raises(BodiesWait):
            await turns.take(LARGE_BODY_BYTES)

    asyncio.run(main())
