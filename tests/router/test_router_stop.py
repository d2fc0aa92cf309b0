"""A router that is told to stop gives every request an end, also those that outlast `drain_s`."""

from __future__ import annotations

import asyncio
import signal

import aiohttp
import orjson
import pytest

from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import WAIT_S, FakeNode, running
from tests.router.test_router_cli import router_process

pytestmark = [pytest.mark.anyio, pytest.mark.integration]


@pytest.mark.parametrize("role", ["--mixed", "--decode"])
async def test_what_outlasts_the_drain_gets_a_503_or_a_last_event(role: str) -> None:
    """Straight to one node, or by way of a prefill node."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode(role.strip("-"), fakes.decode_until_told)
    async with (
        running(p, d),
        router_process(role, d.url, *(["--prefill", p.url] if role == "--decode" else []), "--drain-s", "1") as (
            process,
            url,
        ),
        aiohttp.ClientSession() as session,
    ):

        async def ask(path: str, stream: bool) -> tuple[int, str, bytes]:
            body = {"model": "demo", "prompt": "x", "stream": stream}
            async with session.post(url + path, json=body) as answer:
                return answer.status, answer.headers["content-type"], await answer.read()

        whole = [asyncio.create_task(ask("/v1/completions", False)) for _ in range(5)]
        if role == "--mixed":
            whole.append(asyncio.create_task(ask("/tokenize", False)))  # any node answers it, a prefill node first
        streamed = [asyncio.create_task(ask("/v1/completions", True)) for _ in range(5)]
        await d.wait_seen(len(whole) + len(streamed))
        process.send_signal(signal.SIGTERM)
        for task in whole:
            status, kind, body = await asyncio.wait_for(task, WAIT_S)
            assert (status, kind) == (503, "application/json")
            assert orjson.loads(body)["error"]["code"] == "router_stopping"
        for task in streamed:
            status, _, body = await asyncio.wait_for(task, WAIT_S)
            assert (status, body[: len(fakes.chunk("a"))]) == (200, fakes.chunk("a"))
            error, done = body.decode().strip().split("\n\n")[-2:]
            assert orjson.loads(error.removeprefix("data: "))["error"]["code"] == "router_stopping"
            assert done == "data: [DONE]"
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
