"""Waits that have shown no byte: they leave a node that is judged down, and only such a node."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from pd_http.errors import NodesDied
from pd_http.node_answers import FailureKind
from pd_router.casualties import Casualties
from pd_router.liveness import Down
from pd_router.liveness_guard import LivenessGuard
from pd_router.node_table import Node, Role
from pd_router.upstream import LegFailed
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving, until

if TYPE_CHECKING:
    from aiohttp import web

pytestmark = [pytest.mark.anyio, pytest.mark.long]
BODY: dict[str, Any] = {"model": "demo", "prompt": "x"}
QUICK: dict[str, Any] = {"health_interval_s": 0.05, "health_timeout_s": 0.5, "probe_timeout_s": 0.5}


async def post(router: Router, *, stream: bool = False) -> tuple[int, str, bytes]:
    """(status, the decode node, body)"""
    async with (
        asyncio.timeout(fakes.WAIT_S),
        router.session.post(router.url + "/v1/completions", json=BODY | {"stream": stream}) as answer,
    ):
        return answer.status, answer.headers.get("x-pd-decode", ""), await answer.read()


def moved(router: Router, leg: str, node: FakeNode, kind: str = "frozen") -> float:
    return router.count("pd_router_legs_moved_total", leg=leg, node=node.node_id, kind=kind)


def decodes(*scripts: fakes.Script) -> list[FakeNode]:
    return [FakeNode("decode", script, node_id=f"d{i}") for i, script in enumerate(scripts)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("illness", ["silent", "engine"])
async def test_another_d_takes_what_waits_for_a_frozen_one(illness: str, stream: bool) -> None:
    frozen, well = nodes = decodes(fakes.silent, fakes.decode)
    async with running(*nodes), serving(decode=nodes, **QUICK) as router:
        request = asyncio.ensure_future(post(router, stream=stream))
        await frozen.wait_seen(1)
        frozen.is_silent, frozen.is_frozen = illness == "silent", illness == "engine"
        status, decoded_by, _ = await request
        assert (status, decoded_by) == (200, "d1")
        assert moved(router, "decode", frozen) == 1
        await asyncio.wait_for(frozen.seen[0].gone.wait(), fakes.WAIT_S)
        told = router.services.table.report()
        assert [node["healthy"] for node in told] == [False, True]
        assert ("no progress" if illness == "engine" else "did not answer") in str(told[0]["down"])
        await router.idle()
        assert len(well.seen) == 1


async def test_another_p_is_asked_for_a_ticket_when_one_is_frozen() -> None:
    frozen, well = FakeNode("prefill", fakes.silent, node_id="p0"), FakeNode("prefill", fakes.prefill, node_id="p1")
    d = FakeNode("decode", fakes.decode)
    async with running(frozen, well, d), serving([frozen, well], [d], **QUICK) as router:
        request = asyncio.ensure_future(post(router))
        await frozen.wait_seen(1)
        frozen.is_silent = True
        assert (await request)[0] == 200
        assert moved(router, "prefill", frozen) == 1
        assert len(well.seen) == 1


async def test_slowness_alone_moves_nothing() -> None:
    """However long it takes: the node answers its health checks."""
    slow, idle = nodes = decodes(fakes.decode_until_told, fakes.decode)
    async with running(*nodes), serving(decode=nodes, **QUICK) as router:
        request = asyncio.ensure_future(post(router))
        await slow.wait_seen(1)
        checks = slow.num_checks
        await until(lambda: slow.num_checks > checks + 20)
        assert not request.done()
        slow.go_on.set()
        assert (await request)[1] == "d0"
        assert not idle.seen


async def test_with_no_other_node_the_wait_goes_on() -> None:
    """A node that stood still for a moment serves what it has; one that comes meanwhile takes it over."""
    slow, other = nodes = decodes(fakes.decode_until_told, fakes.decode)
    async with running(*nodes), serving(decode=nodes, **QUICK) as router:
        other.is_up = False
        await until(lambda: not router.services.table.nodes[1].reachable)
        for recovers in (True, False):
            request = asyncio.ensure_future(post(router))
            await slow.wait_seen(1 if recovers else 2)
            other.is_up = False
            await until(lambda: not router.services.table.nodes[1].reachable)
            slow.is_silent = True
            await until(lambda: router.services.table.nodes[0].liveness.down)
            if recovers:
                slow.is_silent = False
                slow.go_on.set()
            else:
                other.is_up = True
            assert (await request)[:2] == (200, "d0" if recovers else "d1")
            slow.go_on.clear()
            slow.is_silent = False
            await until(lambda: router.services.table.nodes[0].reachable)


async def killer(node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
    """A planted request that ends each node that it comes to: its connection breaks, and no process listens."""
    await node.vanish()
    return await fakes.hang_up(node, request, seen)


async def restarter(node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
    """The same, with a supervisor that has started the node again before the router looks."""
    node.epoch += 1
    return await fakes.hang_up(node, request, seen)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [killer, restarter])
async def test_a_request_that_kills_nodes_stops_at_the_second(script: fakes.Script, stream: bool) -> None:
    nodes = decodes(*[script] * 4)
    async with running(*nodes), serving(decode=nodes, probe_timeout_s=0.5) as router:
        status, _, body = await post(router, stream=stream)
        error = orjson.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (500, "nodes_died", "server_error")
        assert sum(len(node.seen) for node in nodes) == 2
        assert router.count("pd_router_requests_nodes_died_total") == 1
        assert router.count("pd_router_requests_total", order="direct", reason="no-prefill-node", outcome="failed") == 1
        await router.idle()


async def test_a_p_and_a_d_that_die_of_one_request_are_two() -> None:
    p, nodes = FakeNode("prefill", fakes.prefill_until_told), decodes(killer, fakes.decode)

    async def kills_both(node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
        await p.vanish()
        return await killer(node, request, seen)

    nodes[0].script = kills_both
    async with running(p, *nodes), serving([p], nodes, probe_timeout_s=0.5) as router:
        status, _, body = await post(router)
        assert (status, orjson.loads(body)["error"]["code"]) == (500, "nodes_died")
        assert not nodes[1].seen


async def test_what_a_node_says_of_dead_peers_is_final() -> None:
    async def says_so(node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
        return fakes.error(500, "nodes_died")

    nodes = decodes(*[says_so] * 3)
    async with running(*nodes), serving(decode=nodes) as router:
        status, _, body = await post(router)
        assert (status, orjson.loads(body)["error"]["code"]) == (500, "nodes_died")
        assert sum(len(node.seen) for node in nodes) == 1


async def test_a_node_that_was_gone_before_the_request_is_no_casualty() -> None:
    async def engine_died(node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
        return fakes.error(503, "engine_died")

    nodes = decodes(fakes.decode, engine_died, fakes.decode)
    async with running(*nodes), serving(decode=nodes, **QUICK | {"health_interval_s": 60.0}) as router:
        await nodes[0].stop()  # the router has not looked since: it is refused the connection
        status, decoded_by, _ = await post(router)
        assert (status, decoded_by) == (200, "d2")
        assert router.count("pd_router_requests_nodes_died_total") == 0
        assert len(nodes[1].seen) == 1


async def test_an_engine_that_died_counts_and_a_refusal_does_not() -> None:
    async def engine_died(node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
        return fakes.error(503, "engine_died")

    nodes = decodes(fakes.refuse(503), engine_died, fakes.refuse(503), fakes.hang_up, fakes.decode)
    async with running(*nodes), serving(decode=nodes, eject_after=99) as router:
        assert (await post(router))[:2] == (200, "d4")  # the one that hung up lives
        assert [len(node.seen) for node in nodes] == [1, 1, 1, 2, 1]


async def test_nodes_that_were_down_before_are_no_casualties() -> None:
    nodes = decodes(*[fakes.decode] * 4)
    async with running(*nodes), serving(decode=nodes) as router:
        for node in nodes[:3]:
            await node.stop()
        assert (await post(router))[:2] == (200, "d3")


@pytest.mark.parametrize(("limit", "num_tried"), [(0, 4), (1, 1), (3, 3)])
async def test_as_many_nodes_are_tried_as_live_or_are_allowed(limit: int, num_tried: int) -> None:
    nodes = decodes(*[fakes.refuse(503)] * 4)
    async with running(*nodes), serving(decode=nodes, max_decode_tries=limit) as router:
        assert (await post(router))[0] == 503
        assert sum(len(node.seen) for node in nodes) == num_tried
        assert router.count("pd_router_tries_exhausted_total", leg="decode") == 1


def test_casualties_are_counted_once_each() -> None:
    first, second = (Node(url=name, role=Role.DECODE, node_id=name, epoch=1) for name in ("a", "b"))
    dead = Casualties(2)
    for node in (first, second):
        dead.meet(node)
    first.epoch = 2
    assert dead.suspects == [(first, 1), (second, 1)]
    for _ in range(2):
        dead.add(first)
        dead.check()
    assert dead.suspects == [(second, 1)]
    dead.meet(first)  # started again
    assert dead.suspects == [(first, 2), (second, 1)]
    dead.add(second)
    with pytest.raises(NodesDied, match="a, b"):
        dead.check()


async def test_a_scope_that_ends_before_it_waits_leaves_no_cancellation() -> None:
    node = Node(url="a", role=Role.DECODE, node_id="a")
    node.liveness.judge(Down(FailureKind.FROZEN, "no progress"))
    with pytest.raises(LegFailed, match="its own"), LivenessGuard(node, lambda: True):
        raise LegFailed(node, FailureKind.BROKEN, "its own")
    with LivenessGuard(node, lambda: True):
        pass
    await asyncio.sleep(0)
    with pytest.raises(LegFailed, match="no progress"), LivenessGuard(node, lambda: True):
        await asyncio.Event().wait()
    with LivenessGuard(node, lambda: False):
        await asyncio.sleep(0)
