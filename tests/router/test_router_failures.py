"""Nodes that refuse, break or are not there, over several requests. Single requests: test_leg_failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pd_router.nodes.connection_pool import NoConnection
from tests.http.answer import CHAT, HI, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving, until

if TYPE_CHECKING:
    from aiohttp import web

    from tests.router.fake_nodes import Seen

pytestmark = pytest.mark.anyio
DEFAULT, NO_P = "p-first; reason=default", "direct; reason=no-prefill-node"


async def test_a_dead_p_is_left_out_until_its_health_is_good_again() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        await p.stop()
        assert (await post(router, CHAT, HI)).route == "direct; reason=prefill-failed"
        assert (await post(router, CHAT, HI)).route == NO_P
        await p.start()
        assert (await post(router, CHAT, HI)).route == NO_P
        await router.poll()
        assert (await post(router, CHAT, HI)).route == DEFAULT


async def test_the_log_says_once_why_a_node_is_not_healthy(caplog: pytest.LogCaptureFixture) -> None:
    """Also of a node that never was: its address or its certificate may be wrong."""
    caplog.set_level("INFO", "pd_router")
    d, never = FakeNode("decode", fakes.decode, node_id="d"), FakeNode("decode", fakes.decode)
    async with running(d, never):
        await never.vanish()
        async with serving([], [d, never]) as router:
            for _ in range(2):
                await router.poll()
            for ill in (True, True, False, True):
                d.is_up = not ill
                await router.poll()

    def said(about: str) -> list[str]:
        return [line for line in caplog.messages if about in line and ("gets no" in line or "is healthy" in line)]

    [line] = said(never.url)
    place = never.url.removeprefix("http://")
    assert line.startswith(f"node {place} ({never.url}) gets no requests: {place}: connect: ")
    assert ["gets no" in line for line in said(d.url)] == [False, True, False, True]


async def test_a_ticket_that_d_does_not_use_is_released_while_d_answers() -> None:
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.prefill_and_decode_until_told)
    async with running(p, d), serving([p], [d]) as router:
        answer = asyncio.create_task(post(router, CHAT, HI, stream=True))
        await p.wait_released(1)
        await until(p.seen[0].gone.is_set)
        assert not answer.done()
        d.go_on.set()
        got = await answer
        assert (got.status, got.prefilled_by) == (200, d.node_id)
        await router.idle()
        assert p.released == ["ticket-1"]


async def test_a_d_that_is_known_to_be_gone_is_not_asked() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        await d.stop()
        assert (await post(router, CHAT, HI, stream=True)).status == 502
        got = await post(router, CHAT, HI)
        assert (got.status, got.headers["retry-after"], len(p.seen)) == (503, "1", 1)
        async with router.session.get(router.url + "/health") as answer:
            assert answer.status == 503


async def test_the_client_is_told_how_the_node_failed() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_dies)
    d.go_on.set()
    async with running(p, d), serving([p], [d]) as router:
        got = await post(router, CHAT, HI)
        assert (got.status, got.error["code"]) == (502, "node_failed")
        assert "broken" in got.error["message"]


async def test_three_failures_in_a_row_put_a_node_out_for_a_while() -> None:
    p, d = FakeNode("prefill", fakes.hang_up), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], eject_after=3, eject_s=3600.0) as router:
        routes = [(await post(router, CHAT, HI)).route for _ in range(4)]
        assert routes == ["direct; reason=prefill-failed"] * 3 + [NO_P]
        await router.poll()  # /health alone does not bring it back
        assert (await post(router, CHAT, HI)).route == NO_P


async def test_a_kept_connection_that_the_node_has_closed_costs_no_request() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        assert (await post(router, CHAT, HI)).status == 200
        for node in (p, d):  # the same addresses, new processes as it were: every kept connection is stale
            await node.stop()
            await node.start()
        got = await post(router, CHAT, HI)
        assert (got.status, got.route) == (200, DEFAULT)


@pytest.mark.parametrize("text", ["", "<h1>no healthy upstream</h1>"])
async def test_a_node_behind_a_proxy_that_does_not_reach_it_has_died(text: str) -> None:
    """Else a request that kills nodes would reach all of them."""

    async def dies(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        node.stand_in = text
        return await fakes.hang_up(node, request, seen)

    nodes = [FakeNode("mixed", dies, node_id=f"n{number}") for number in range(4)]
    async with running(*nodes), serving(mixed=nodes) as router:
        assert (await post(router, CHAT, HI)).status == 500
        assert sum(len(node.seen) for node in nodes) == 2


async def test_a_node_without_a_place_for_a_connection_has_not_died() -> None:
    """Nodes without a place for a connection break it, and answer /health as any other request: with 503."""

    async def full(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        node.is_full = True
        return await fakes.hang_up(node, request, seen)

    bad = [FakeNode("mixed", full, node_id=f"bad {number}") for number in range(3)]
    good = FakeNode("mixed", fakes.decode, node_id="good")
    async with running(*bad, good), serving(mixed=[*bad, good]) as router:
        for _ in range(4):  # each may begin with another one
            assert (await post(router, CHAT, HI)).status == 200
        assert sum(len(node.seen) for node in bad) >= 2
        for node in router.services.table.nodes:
            labels = {"leg": "decode", "node": node.node_id, "kind": "died"}
            assert not router.count("pd_router_leg_failures_total", **labels)
        await router.poll()
        assert [node.epoch for node in router.services.table.nodes] == [7] * 4
        await router.idle()


async def test_a_router_that_cannot_connect_judges_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own descriptors have run out: that ends the request, and no node is down or ejected."""
    d = FakeNode("decode", fakes.decode)
    async with running(d), serving([], [d]) as router:
        failure = NoConnection("too many open files")
        failure.is_own = True

        async def fail(*_: object) -> None:
            raise failure

        pool = router.services.upstream.connections
        with monkeypatch.context() as patched:
            patched.setattr(pool, "_take", lambda _: None)
            patched.setattr(pool, "_connect", fail)
            await router.poll()
            assert (await post(router, CHAT, HI)).status == 503
        node = router.services.table.nodes[0]
        assert node.reachable
        assert not node.failures_in_row
        assert router.count("pd_router_leg_failures_total", leg="decode", node=node.node_id, kind="own") == 1
        assert (await post(router, CHAT, HI)).status == 200
