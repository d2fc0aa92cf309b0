"""A client that leaves or stops to read, as the nodes see it. In the phases of a request: test_leg_failures."""

from __future__ import annotations

import asyncio

import pytest

from pd_router.nodes.node import Role
from tests.http.answer import CHAT, HI, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving, until

pytestmark = pytest.mark.anyio


async def settled(router: Router, phase: str) -> None:
    """Until the router has counted the disconnect; nothing may be left of the request."""
    await until(lambda: router.count("pd_router_client_disconnects_total", phase=phase))
    await router.idle()
    assert router.count("pd_router_requests_in_flight") == 0


@pytest.mark.long
async def test_a_client_that_stops_reading_holds_a_node_no_longer_than_the_idle_timeout() -> None:
    d = FakeNode("decode", fakes.decode_floods)
    async with running(d), serving(None, [d], idle_timeout_s=0.3, eject_after=1) as router:
        async with router.session.post(router.url + CHAT, json=HI | {"stream": True}) as answer:
            await answer.content.readany()
            await until(lambda: d.seen[0].gone.is_set())
        await settled(router, "stream")
        assert router.services.table.nodes[0].failures_in_row == 0  # not the node's fault
        assert router.services.table.healthy((Role.DECODE,), None)


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


@pytest.mark.long
async def test_a_connection_serves_the_next_request_after_each_answer() -> None:
    """The watch for a disconnect must not take the end of an answer for one."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        for i in range(20):
            assert (await post(router, CHAT, HI, stream=bool(i % 2))).status == 200
        assert router.count("pd_router_requests_total", order="p-first", reason="default", outcome="ok") == 20
        assert router.session.connector is not None
        assert sum(len(c) for c in router.session.connector._conns.values()) == 1
