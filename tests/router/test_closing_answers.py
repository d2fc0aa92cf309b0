"""Routers that get SIGTERM while clients keep connections to them and send without a pause."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from tests.deadlines import HANG_S
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.kept_clients import BODY, PATH, Balancer, sending
from tests.router.test_router_cli import router_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.router.fake_nodes import Seen
    from tests.router.kept_clients import Tally

pytestmark = [pytest.mark.anyio, pytest.mark.integration]
DEADLINE_S = HANG_S
NUM_BEFORE = 80  # answers before the signal, so that every connection is in use
STREAM = {**BODY, "stream": True}
END = b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def two_routers(*flags: str) -> AsyncIterator[tuple[list[Any], Balancer, FakeNode]]:
    """[(process, url)], the balancer before them, and the decode node behind them."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), contextlib.AsyncExitStack() as stack:
        nodes = ("--prefill", p.url, "--decode", d.url)
        routers = [await stack.enter_async_context(router_process(*nodes, *flags)) for _ in range(2)]
        balancer = await stack.enter_async_context(Balancer().running())
        balancer.targets = [url for _, url in routers]
        yield routers, balancer, d
        for process, _ in routers:
            if process.returncode is None:  # its workers would keep its output open
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0


async def until_right(tally: Tally, count: int) -> None:
    """Until so many more answers were right."""
    wanted = tally.num_right + count
    async with asyncio.timeout(DEADLINE_S):
        while tally.num_right < wanted:  # noqa: ASYNC110  # counted by many tasks
            await asyncio.sleep(0.01)


async def stop_one(routers: list[Any], balancer: Balancer, each: int) -> Tally:
    """`each` connections of each client, while the first router gets SIGTERM. The service has left it out before."""
    [(process, _), (_, other)] = routers
    async with sending(balancer, each) as tally:
        await until_right(tally, NUM_BEFORE)
        balancer.targets = [other]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
        await until_right(tally, NUM_BEFORE)
    return tally


@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one process", "workers"])
async def test_kept_connections_lose_nothing(flags: tuple[str, ...]) -> None:
    async with two_routers(*flags) as (routers, balancer, _):
        tally = await stop_one(routers, balancer, 4)
    assert tally.failures == []
    assert tally.num_told, "no connection was in use"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one process", "workers"])
async def test_ten_times_and_sixteen_connections_each(flags: tuple[str, ...]) -> None:
    for _ in range(10):
        async with two_routers(*flags) as (routers, balancer, _):
            assert (await stop_one(routers, balancer, 16)).failures == []


@pytest.mark.slow
async def test_streams_of_twenty_seconds_end_right() -> None:
    parts = [*(fakes.chunk(str(number)) for number in range(200)), END]

    async def paced(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.1)
        await response.write_eof()
        return response

    async with two_routers("--drain-s", "60") as (routers, _, d), aiohttp.ClientSession() as session:
        d.script = paced
        [(process, url), _] = routers

        async def stream() -> bytes:
            async with session.post(url + PATH, json=STREAM) as answer:
                return await answer.read()

        streams = [asyncio.create_task(stream()) for _ in range(16)]
        await d.wait_seen(len(streams))
        process.send_signal(signal.SIGTERM)
        assert set(await asyncio.gather(*streams)) == {b"".join(parts)}
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0


async def test_a_stream_ends_right_and_the_router_is_served_until_then() -> None:
    """/health turns balancers away, and those that have not asked yet are still answered."""
    async with two_routers() as (routers, _, d), aiohttp.ClientSession() as session:
        d.script = fakes.decode_until_told
        [(process, url), _] = routers
        async with session.post(url + PATH, json=STREAM) as held:
            assert await held.content.readany() == fakes.chunk("a")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    async with session.get(url + "/health") as answer:
                        told = (answer.status, (await answer.json())["status"], answer.headers.get("connection"))
                    if told[0] == 503:
                        break
            assert told == (503, "draining", "close")
            d.go_on.set()
            async with session.post(url + PATH, json=BODY) as answer:
                assert (answer.status, answer.headers["connection"]) == (200, "close")
                await answer.read()
            assert await held.read() == fakes.chunk("b") + END
        async with session.post(url + PATH, json=BODY) as answer:  # on the connection of the stream
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            await answer.read()
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
