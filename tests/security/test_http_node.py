"""A node's HTTP side: readers that never read free what they hold, and strangers learn nothing of its inside."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import aiohttp
import pytest

from pd_http.limits import HttpLimits
from tests.cluster import Launcher
from tests.deadlines import HANG_S, until, until_equal
from tests.security.stranger import MB, Connection, Target, deaf, error_in, post
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.live_server import MODEL_DIR, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

SLOW_S = 1000.0  # sixteen slots generate for four turns of readers; beside ten processes that takes more than 300 s


async def connect(url: str) -> Connection:
    host, _, port = url.removeprefix("http://").partition(":")
    return Connection(*await asyncio.open_connection(host, int(port)))


async def test_a_client_that_never_reads_is_aborted() -> None:
    async def script(line: Line) -> None:
        while line.from_api.empty():  # until it is aborted: how much a kernel takes in for a client varies
            line.tokens([5] * 20)
            await asyncio.sleep(0.002)

    async with running(FakeEngine(script), limits=HttpLimits(write_timeout_s=0.5)) as node:
        strangers = [deaf(node.url, post(prompt="x", stream=True, max_tokens=4000)) for _ in range(5)]
        async with asyncio.timeout(HANG_S):
            aborted = {(await node.engine.aborts.get()).request_id for _ in strangers}
        assert aborted == {request.request_id for request in node.engine.requests}
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*node.http_tasks())
        assert node.state.num_in_flight == 0
        await until_equal(lambda: node.metric('pd_http_refusals_total{reason="reads_nothing"}'), 5)
        for stranger in strangers:
            stranger.close()


async def test_a_node_has_the_same_bounds_as_a_router() -> None:
    async with running(FakeEngine(says([5]))) as node:
        large = await connect(node.url)
        await large.send(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await large.send(b"x: " + b"a" * 1000 + b"\r\n")
        assert error_in(await large.end()) == (431, "large_head")
        large.close()
    async with running(FakeEngine(says([5])), limits=HttpLimits(head_timeout_s=0.5)) as node:
        slow = await connect(node.url)
        await slow.send(b"GET /health HTTP/1.1\r\n")
        assert error_in(await slow.end()) == (408, "slow_head")
        assert node.metric('pd_http_refusals_total{reason="slow_head"}') == 1
        slow.close()


async def test_strangers_learn_nothing_of_the_inside() -> None:
    async with running(FakeEngine(says([5]))) as node:
        for path in ("/docs", "/redoc"):
            async with node.session.get(node.url + path) as answer:
                assert answer.status == 404, path
        for path in ("/v1/models", "/v1/models/demo", "/health", "/kv", "/metrics", "/openapi.json"):
            async with node.session.get(node.url + path) as answer:
                text = await answer.text()
                assert answer.status == 200
                assert str(MODEL_DIR) not in text, path


@pytest.fixture
async def real_node() -> AsyncIterator[Target]:
    with Launcher() as launcher:
        flags = ("--max-num-seqs=16", "--write-timeout-s=1")
        node = await asyncio.to_thread(launcher.node, "mixed", *flags, real=True)
        yield Target(node, node.url)
        await asyncio.to_thread(launcher.close)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_sixty_readers_that_never_read_free_their_slots(real_node: Target) -> None:
    """Each asks for 1 MB or more of events and is refused as one that reads nothing: then no request is in flight, the
    node answers another one, and has given back all memory but 64 MB."""
    assert await real_node.ask() == 200
    before = real_node.resident_bytes()
    request = post(prompt="x", stream=True, max_tokens=1000, ignore_eos=True, logprobs=20)
    strangers = [deaf(real_node.url, request) for _ in range(60)]

    async def is_over() -> bool:
        return await real_node.refusals("reads_nothing") == len(strangers)

    async def in_flight() -> int:
        async with session.get(f"{real_node.url}/health") as answer:
            return int((await answer.json())["num_in_flight"])

    await until(is_over, deadline_s=SLOW_S, poll_s=0.1)
    async with aiohttp.ClientSession() as session:
        await until_equal(in_flight, 0)
    assert await real_node.ask() == 200
    await until(lambda: real_node.resident_bytes() - before < 64 * MB)
    for stranger in strangers:
        stranger.close()
