"""What a stranger sends, holds or leaves unread over HTTP has bounds, and the others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from typing import TYPE_CHECKING

import pytest

from tests.deadlines import HANG_S, until, until_equal
from tests.router import fake_nodes as fakes
from tests.security.stranger import MB, POST, Connection, Target, deaf, error_in, post, router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

SOON = ("--head-timeout-s=1", "--body-timeout-s=1", "--client-keepalive-s=1")
NUM_STRANGERS = 12


@contextlib.asynccontextmanager
async def unharmed(target: Target, max_growth: int = 64 * MB) -> AsyncIterator[None]:
    """Watches the process's memory, which must not grow by more bytes than that, nor keep half of them."""
    assert await target.ask() == 200
    before = most = target.resident_bytes()

    async def watch() -> None:
        nonlocal most
        while not is_over.is_set():
            most = max(most, target.resident_bytes())
            await asyncio.sleep(0.01)

    is_over = asyncio.Event()
    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        is_over.set()
        await watching
    assert await target.ask() == 200
    assert most - before <= max_growth
    await until(lambda: target.resident_bytes() - before <= max_growth / 2)


async def test_requests_that_never_end() -> None:
    async with router() as target, unharmed(target):
        await endless_header_lines(target)
        await endless_header_line(target)
        await endless_trailers(target)
        await no_http(target)
        await too_long_a_body(target)


async def test_requests_that_are_slow() -> None:
    async with router(*SOON) as target, unharmed(target):
        await asyncio.gather(
            a_byte_now_and_then(target, POST + b"x-slow: ", (408, "slow_head")),
            a_byte_now_and_then(target, POST + b"content-length: 1000\r\n\r\n", (408, "slow_body")),
            a_byte_now_and_then(target, POST + b"transfer-encoding: chunked\r\n\r\n3E8\r\n", (408, "slow_body")),
            silence(target),
        )


async def flood(target: Target, first: bytes, piece: bytes, num_bytes: int) -> bytes:
    """The answer to `first` and then `piece` again and again, until it comes.

    It is read meanwhile: a server waits 2 s for a client that goes on sending, and one on a busy machine took longer.
    """
    stranger = await target.connect()
    answer = asyncio.create_task(stranger.end())
    pieces = piece * (8192 // len(piece))
    with contextlib.suppress(ConnectionError):
        await stranger.send(first)
        for _ in range(num_bytes // len(pieces)):
            if answer.done():
                break
            await stranger.send(pieces)
            await asyncio.sleep(0)  # the answer is read
    try:
        return await answer
    finally:
        stranger.close()


async def endless_header_lines(target: Target) -> None:
    assert error_in(await flood(target, POST, b"x-more: 1\r\n", MB)) == (431, "large_head")


async def endless_header_line(target: Target) -> None:
    assert error_in(await flood(target, POST + b"x-long: ", b"a" * 8192, 4 * MB)) == (431, "large_head")


async def endless_trailers(target: Target) -> None:
    head = POST + b"transfer-encoding: chunked\r\n\r\n0\r\n"
    assert error_in(await flood(target, head, b"x-more: 1\r\n", MB)) == (431, "large_head")


async def a_byte_now_and_then(target: Target, begin: bytes, expected: tuple[int, str]) -> None:
    stranger = await target.connect()
    await stranger.send(begin)

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            while stranger.is_open():
                await stranger.send(b"a")
                await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    try:
        assert error_in(await stranger.end()) == expected
    finally:
        dripping.cancel()
        stranger.close()


async def silence(target: Target) -> None:
    stranger = await target.connect()
    assert await stranger.end() == b""
    stranger.close()


async def no_http(target: Target) -> None:
    assert error_in(await flood(target, b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"x", 0)) == (400, "bad_request")


async def too_long_a_body(target: Target) -> None:
    """It is refused for what its headers say."""
    stranger = await target.connect()
    await stranger.send(POST + b"connection: close\r\ncontent-length: 60000000\r\n\r\n")
    assert error_in(await stranger.end()) == (413, "body_too_large")
    stranger.close()


LENGTH, CHUNKS = b"content-length: %d\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("framing", "size_mb", "flags"),
    [
        (CHUNKS, 9, ("--max-unfinished-mb=16",)),
        pytest.param(LENGTH, 60, ("--max-body-mb=61",), marks=pytest.mark.slow),
        pytest.param(CHUNKS, 60, (), marks=pytest.mark.slow),
    ],
)
async def test_unfinished_bodies_share_their_memory(framing: bytes, size_mb: int, flags: tuple[str, ...]) -> None:
    """12 of them, which hold back their last megabyte, at a router that does not know its nodes' longest body."""
    piece = b"%x\r\n" % MB + b"a" * MB + b"\r\n" if framing is CHUNKS else b"a" * MB
    head = POST + (framing if framing is CHUNKS else framing % (size_mb * MB))
    bound = 64 * MB if size_mb == 60 else 32 * MB

    async with router("--body-timeout-s=1", *flags) as target, unharmed(target, bound):
        # from here on only the oldest is read: what follows of it exceeds the memory
        crowded_bytes = 0.75 * (16e6 if "--max-unfinished-mb=16" in flags else 48e6)
        num_first = math.ceil(crowded_bytes / NUM_STRANGERS / MB)
        strangers = await crowd(target, head + piece * num_first, crowded_bytes)
        num_rest = size_mb - 1 - num_first
        sending = [asyncio.create_task(send_rest(stranger, piece, num_rest)) for stranger in strangers]
        assert [await target.ask(prompt="x" * 200_000) for _ in range(10)] == [200] * 10
        answers = [answer for answer in await asyncio.gather(*sending) if answer]
        assert answers
        assert {error_in(answer)[0] for answer in answers} <= {503, 408, 413}
        assert await target.refusals("unfinished_memory") > 0


async def crowd(target: Target, begin: bytes, num_bytes: float) -> list[Connection]:
    """NUM_STRANGERS that have begun a request, of which the router holds so many bytes.

    On a busy machine the first ones may have been ended for a slow body by then: others take their places.
    """
    strangers: list[Connection] = []

    async def is_held() -> bool:
        strangers[:] = [stranger for stranger in strangers if stranger.is_open()]
        fresh = [await target.connect() for _ in range(NUM_STRANGERS - len(strangers))]
        await asyncio.gather(*(stranger.send(begin) for stranger in fresh), return_exceptions=True)
        strangers.extend(fresh)
        return await target.count("pd_router_http_unfinished_bytes") >= num_bytes

    await until(is_held)
    return strangers


async def send_rest(stranger: Connection, piece: bytes, count: int) -> bytes:
    """The answer to what was sent so far and `piece` so often."""
    with contextlib.suppress(ConnectionError):
        for _ in range(count):
            await stranger.send(piece)
    try:
        return await stranger.end()
    finally:
        stranger.close()


async def test_a_burst_of_long_prompts_is_served_within_that_memory() -> None:
    """32 of 1 MB arrive at once, with room for 16: each waits for its turn, none is refused."""
    async with router("--max-unfinished-mb=16") as target:
        assert await asyncio.gather(*(target.ask(prompt="x" * MB) for _ in range(32))) == [200] * 32


@pytest.mark.parametrize("begin", [b"", POST, POST + b"content-length: 10\r\n\r\n{"])
async def test_held_connections_do_not_lock_others_out(begin: bytes) -> None:
    """400 of them at a router that may open 256 files."""
    async with router(num_files=256) as target, unharmed(target):
        strangers = []
        for _ in range(400):
            strangers.append(await target.connect())
            if begin:
                await strangers[-1].send(begin)
        assert [await target.ask() for _ in range(10)] == [200] * 10
        assert await target.refusals("place_needed") + await target.refusals("connections") > 0
        await until(lambda: re.search("new connection needed the place|too many conn", target.process.output))
        for stranger in strangers:
            stranger.close()


async def test_when_every_place_works_the_next_is_told_so() -> None:
    async with router("--max-connections=4", script=fakes.decode_until_told) as target:
        assert target.node is not None
        asking = [asyncio.create_task(target.ask()) for _ in range(3)]
        await target.node.wait_seen(3)
        stranger = await target.connect()
        await stranger.send(post(prompt="x"))
        assert error_in(await stranger.end()) == (503, "connections_of_address")
        stranger.close()
        target.node.go_on.set()
        assert await asyncio.gather(*asking) == [200] * 3
        assert await target.ask() == 200


async def test_requests_after_one_that_takes_long_are_not_hoarded() -> None:
    """20 MB of them: reading stops until the answer is there."""
    async with router(script=fakes.decode_until_told) as target:
        assert target.node is not None
        before = target.resident_bytes()
        stranger = await target.connect()
        more = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3000
        await stranger.send(post(prompt="x") + more)
        await target.node.wait_seen(1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):  # for as much of it as is taken
                for _ in range(200):
                    await stranger.send(more)
        assert target.resident_bytes() - before < 8 * MB
        target.node.go_on.set()
        assert await target.ask() == 200
        stranger.close()


async def test_a_client_that_never_reads_is_left() -> None:
    async with router("--write-timeout-s=0.5", script=fakes.decode_floods) as target:
        assert target.node is not None
        strangers = [deaf(target.url, post(prompt="x", stream=True)) for _ in range(20)]
        for number in range(len(strangers)):
            seen = await target.node.wait_seen(number + 1)
            await asyncio.wait_for(seen.gone.wait(), HANG_S)
        await until_equal(lambda: target.refusals("reads_nothing"), len(strangers))
        await until_equal(lambda: target.count("pd_router_requests_in_flight"), 0)
        for stranger in strangers:
            stranger.close()
