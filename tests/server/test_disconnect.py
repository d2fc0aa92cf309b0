"""A client that leaves frees its engine request, streamed or not, and a stopping node says so."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from pd_cluster.protocol.messages import Abort, TicketOpened
from tests.server.fake_engine import WAIT_S, FakeEngine, Line
from tests.server.live_server import running
from tests.server.sse import next_event

pytestmark = pytest.mark.anyio


async def aborted(engine: FakeEngine) -> Abort:
    async with asyncio.timeout(WAIT_S):
        return await engine.aborts.get()


async def test_leaving_a_stream_aborts_it() -> None:
    async def script(line: Line) -> None:
        line.tokens([5])

    async with running(FakeEngine(script)) as node:
        async with node.session.post(f"{node.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
            await next_event(response, bytearray())
            response.close()
        assert await aborted(node.engine) == Abort(node.engine.requests[0].request_id)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*node.http_tasks())
        assert node.metric('pd_requests_total{endpoint="completions",outcome="disconnected"}') == 1
        assert node.state.num_in_flight == 0
        assert node.metric("pd_generation_tokens_total") == 1
        assert node.metric("pd_request_latency_seconds_count") == 0, "a broken off request has no end-to-end time"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"prompt": "a"}, {}),
        ({"prompt": ["a", "b"]}, {}),
        ({"prompt": "a", "stream": True}, {}),
        ({"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}, {}),
        ({"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}, {"x-pd-ticket": "stream"}),
    ],
)
async def test_leaving_before_any_answer_aborts_every_prompt(body: dict[str, Any], headers: dict[str, str]) -> None:
    admitted = asyncio.Queue[str]()

    async def script(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        admitted.put_nowait(line.request.request_id)

    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    async with running(FakeEngine(script)) as node:
        post = asyncio.create_task(
            node.session.post(f"{node.url}/v1/completions", json=body, headers=headers).__aenter__()
        )
        async with asyncio.timeout(WAIT_S):
            ids = {await admitted.get() for _ in prompts}
        if headers:  # P's stream has begun with its ticket
            (await post).close()
        else:
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)
        assert {(await aborted(node.engine)).request_id for _ in prompts} == ids


async def test_cancelled_by_a_stopping_node_ends_the_stream_with_an_error() -> None:
    async def script(line: Line) -> None:
        line.tokens([5])

    async with running(FakeEngine(script)) as node:
        buffer = bytearray()
        async with node.session.post(f"{node.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
            await next_event(response, buffer)
            for task in node.http_tasks():
                task.cancel()
            _, data = await next_event(response, buffer)
        assert data["error"]["code"] == "engine_unavailable"
        assert (await aborted(node.engine)).request_id == node.engine.requests[0].request_id


async def test_draining_node_refuses_new_requests() -> None:
    async def script(line: Line) -> None:
        line.tokens([5])

    async with running(FakeEngine(script)) as node:
        node.state.draining = True
        async with node.session.post(f"{node.url}/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 503
        async with node.session.get(f"{node.url}/health") as response:
            assert (response.status, (await response.json())["status"]) == (503, "draining")
        assert node.engine.requests == []


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_leaving_within_the_own_body_is_no_bug(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running(FakeEngine(silent)) as node:
        host, port = node.url.removeprefix("http://").split(":")
        with caplog.at_level(logging.WARNING):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
            await writer.drain()
            async with asyncio.timeout(WAIT_S):
                while not node.http_tasks():  # noqa: ASYNC110
                    await asyncio.sleep(0)
                tasks = node.http_tasks()
                writer.transport.abort()
                await asyncio.gather(*tasks)
        assert caplog.records == []


async def silent(_: Line) -> None:
    """An engine that is never asked."""
