"""The sum of what a process holds: what it counts, refuses and lets wait."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_http.errors import InvalidRequest, NoRoom
from pd_http.held_bytes import HeldBytes, Share
from pd_http.unfinished_requests import SMALL_BYTES
from tests.deadlines import HANG_S

pytestmark = pytest.mark.anyio
HALF = 10 * SMALL_BYTES


def made(max_waiting: int = 64, turn_s: float = 60.0) -> HeldBytes:
    return HeldBytes(2 * HALF, max_waiting, turn_s)


async def turns() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def test_what_is_small_is_not_counted() -> None:
    held = made()
    share = Share(held)
    for _ in range(SMALL_BYTES):
        share.grow(1)
    assert held.num_come == 0
    share.grow(1)
    assert held.num_come == SMALL_BYTES + 1


async def test_what_was_given_back_does_not_count_again() -> None:
    """A stream that is read has little at a time, however long it is."""
    held = made()
    share = Share(held)
    for _ in range(100):
        share.grow(SMALL_BYTES * 2 // 3)
        share.close()
        share.grow(SMALL_BYTES * 2)
        assert held.num_come == SMALL_BYTES * 2
        share.close()
        assert held.num_come == 0


async def test_what_has_come_is_refused_where_there_is_no_room_and_given_back_once() -> None:
    held = made()
    with Share(held) as first, Share(held) as second:
        first.grow(HALF - SMALL_BYTES)
        with pytest.raises(NoRoom) as caught:
            second.grow(2 * SMALL_BYTES)
        assert (caught.value.status, caught.value.retry_after_s > 0) == (503, True)
        with pytest.raises(InvalidRequest, match="--max-held-mb"):
            Share(held).grow(HALF + 1)
        assert held.num_come == HALF - SMALL_BYTES
        first.close()
        first.close()
        assert held.num_come == 0
        second.grow(2 * SMALL_BYTES)
    assert (held.num_come, held.num_planned) == (0, 0)


async def test_no_answer_may_have_more_than_half_and_only_so_many_wait() -> None:
    held = made(max_waiting=2)
    with pytest.raises(InvalidRequest, match=f"needs {HALF + 1} bytes of memory; {HALF} are allowed") as caught:
        await Share(held).plan(HALF + 1, "logprobs")
    assert caught.value.param == "logprobs"
    first = Share(held)
    await first.plan(HALF, "logprobs")
    waiting = [asyncio.create_task(Share(held).plan(HALF, "logprobs")) for _ in range(2)]
    await turns()
    with pytest.raises(NoRoom, match="2 requests wait"):
        await Share(held).plan(HALF, "logprobs")
    assert (held.num_planned, held.num_waiting) == (HALF, 2)
    first.close()
    await waiting[0]
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (held.num_planned, held.num_waiting) == (HALF, 0)


async def test_a_turn_that_does_not_come_is_a_refusal_and_the_next_one_comes() -> None:
    held = made(turn_s=0.0)
    first = Share(held)
    await first.plan(HALF, "")
    with pytest.raises(NoRoom, match="no memory for the answer within 0 s"):
        await Share(held).plan(HALF, "")
    first.close()
    assert (held.num_planned, held.num_waiting) == (0, 0)


async def test_small_answers_do_not_starve_a_large_one() -> None:
    held, order = made(), list[str]()

    async def one(name: str, num_bytes: int) -> None:
        with Share(held) as share:
            await share.plan(num_bytes, "")
            order.append(name)
            await turns()

    async with asyncio.TaskGroup() as group:
        group.create_task(one("first", HALF // 2))
        await asyncio.sleep(0)
        group.create_task(one("large", HALF))
        for _ in range(50):
            group.create_task(one("small", HALF // 4))
    assert order == ["first", "large", *["small"] * 50]


@pytest.mark.long
@given(
    st.lists(st.tuples(st.integers(SMALL_BYTES + 1, HALF), st.sampled_from(["end", "cancel", "fail"])), max_size=25),
    st.integers(0, 1 << 32),
)
def test_nothing_is_lost_whatever_ends_when(asked: list[tuple[int, str]], seed: int) -> None:
    """Conservation, the bound, order, and no wait that never ends: over any order of ends and cancellations."""
    rng, held, begun = random.Random(seed), made(), list[int]()

    async def work(number: int, num_bytes: int, end: str) -> None:
        with Share(held) as share:
            await share.plan(num_bytes, "")
            begun.append(number)
            share.grow(SMALL_BYTES // 2)
            assert held.num_planned <= HALF
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if end == "fail":
                raise RuntimeError

    async def run() -> None:
        tasks = []
        for number, (num_bytes, end) in enumerate(asked):
            tasks.append(asyncio.create_task(work(number, num_bytes, end)))
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            doomed = [one for one, (_, how) in zip(tasks, asked, strict=False) if how == "cancel" and not one.done()]
            if doomed and rng.random() < 0.5:
                rng.choice(doomed).cancel()
        async with asyncio.timeout(HANG_S):  # a wake-up that is lost ends here
            await asyncio.gather(*tasks, return_exceptions=True)
        assert (held.num_come, held.num_planned, held.num_waiting) == (0, 0, 0)
        assert all(before < after for before, after in pairwise(begun))
        assert {number for number, (_, end) in enumerate(asked) if end != "cancel"} <= set(begun)

    asyncio.run(run())
