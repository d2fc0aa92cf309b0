"""A client that leaves, in every phase, as the nodes see it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from pd_router.node_table import Role
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import WAIT_S, FakeNode, running
from tests.router.router_process import Router, serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


@contextlib.asynccontextmanager
async def client(router: Router, *, stream: bool, order: str = "p-first") -> AsyncIterator[asyncio.StreamReader]:
    """A request on a bare connection; leaving the block closes it."""
    host, port = router.url.removeprefix("http://").split(":")
    body = orjson.dumps(BODY | {"stream": stream})
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-pd-route: {order}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        yield reader
    finally:
        writer.close()


async def settled(router: Router, phase: str) -> None:
    """Until the router has counted the disconnect; nothing may be left of the request."""
    await until(lambda: router.count("pd_router_client_disconnects_total", phase=phase))
    await router.idle()
    assert router.count("pd_router_requests_in_flight") == 0


async def gone(node: FakeNode) -> None:
    await asyncio.wait_for(node.seen[0].gone.wait(), WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
async def test_during_prefill_before_the_ticket(stream: bool) -> None:
    p, d = FakeNode("prefill", fakes.silent), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        async with client(router, stream=stream):
            await p.wait_seen(1)
        await gone(p)
        await settled(router, "prefill")
        assert d.seen == []
        assert p.released == []  # nothing was handed out


@pytest.mark.parametrize("stream", [False, True])
async def test_before_d_answers_both_legs_close_and_the_ticket_goes_back_once(stream: bool) -> None:
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.silent)
    async with running(p, d), serving([p], [d]) as router:
        async with client(router, stream=stream):
            await d.wait_seen(1)
        await gone(p)
        await gone(d)
        await settled(router, "decode")
        assert p.released == ["ticket-1"]


async def test_in_the_middle_of_a_stream() -> None:
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), serving([p], [d]) as router:
        async with client(router, stream=True) as reader:
            await asyncio.wait_for(reader.readuntil(b'"a"'), WAIT_S)
        await gone(p)
        await gone(d)
        await settled(router, "stream")
        assert p.released == []  # D had it


async def test_a_client_that_stops_reading_holds_a_node_no_longer_than_the_idle_timeout() -> None:
    d = FakeNode("decode", fakes.decode_floods)
    async with running(d), serving(None, [d], idle_timeout_s=0.3, eject_after=1) as router:
        async with client(router, stream=True) as reader:
            await asyncio.wait_for(reader.readuntil(b"xx"), WAIT_S)
            await gone(d)
        await settled(router, "stream")
        assert router.services.table.nodes[0].failures_in_row == 0  # not the node's fault
        assert router.services.table.healthy((Role.DECODE,), None)


async def test_while_an_unstreamed_answer_is_made() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), serving([p], [d]) as router:
        async with client(router, stream=False):
            await d.wait_seen(1)
        await gone(d)
        await settled(router, "decode")


@pytest.mark.parametrize("stream", [False, True])
async def test_d_first(stream: bool) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.silent)
    async with running(p, d), serving([p], [d]) as router:
        async with client(router, stream=stream, order="d-first"):
            await d.wait_seen(1)
        await gone(d)
        await settled(router, "decode")
        assert p.seen == []


async def test_while_the_body_is_sent() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        host, port = router.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"model"')
        await writer.drain()
        await until(lambda: router.count("pd_router_requests_in_flight"))
        writer.close()
        await settled(router, "request")
        assert p.seen == d.seen == []


async def test_a_connection_serves_the_next_request_after_each_answer() -> None:
    """The watch for a disconnect must not take the end of an answer for one."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        for i in range(20):
            body = BODY | {"stream": bool(i % 2)}
            async with router.session.post(router.url + "/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
                await answer.read()
        assert router.count("pd_router_requests_total", order="p-first", reason="default", outcome="ok") == 20
        assert router.session.connector is not None
        assert sum(len(c) for c in router.session.connector._conns.values()) == 1
