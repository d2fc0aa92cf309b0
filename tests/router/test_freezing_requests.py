"""Requests that freeze nodes stop at the second one; requests that only meet frozen nodes, and streams, go on."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from pd_connectors.protocol.ticket import Offer, verify
from pd_http.errors import NodesDied, NodesFrozen
from pd_http.node_answers import FailureKind
from pd_router.nodes.liveness import Down
from pd_router.nodes.node import Node, Role
from pd_router.requests.node_deaths import NodeDeaths
from tests.http.answer import COMPLETIONS, PROMPT, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, Seen, running
from tests.router.framed_nodes import End, FramedScript, framed_nodes
from tests.router.framed_streams import make_stream
from tests.router.router_process import KEY, Router, serving, until

if TYPE_CHECKING:
    from aiohttp import web

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.usefixtures("sure_checks")]
QUICK: dict[str, Any] = {"health_interval_s": 0.02}
STREAM = make_stream(5)


async def freeze(node: FakeNode, *, is_silent: bool = False) -> None:
    """The node, or its engine, stands still after a check of /health that the router began after what it had sent."""
    checks = node.num_checks
    await until(lambda: node.num_checks > checks + 1)
    node.is_silent, node.is_frozen = is_silent, not is_silent


async def freezer(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """A planted request that freezes each node that it comes to."""
    await freeze(node, is_silent=bool(seen.body.get("stream")))
    return await fakes.silent(node, request, seen)


def decodes(*scripts: fakes.Script) -> list[FakeNode]:
    return [FakeNode("decode", script, node_id=f"d{i}") for i, script in enumerate(scripts)]


async def ask(router: Router, *, stream: bool = False, order: str = "") -> tuple[int, str, str]:
    """(status, the decode node or the error's code, `x-should-retry`)"""
    got = await post(router, COMPLETIONS, PROMPT, {"x-pd-route": order} if order else {}, stream=stream)
    told = got.decoded_by if got.status == 200 else got.error["code"]
    return got.status, told, got.headers.get("x-should-retry", "")


def num_ended(router: Router, by: str = "frozen") -> float:
    return router.count(f"pd_router_requests_nodes_{by}_total")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_freezes_nodes_stops_at_the_second(stream: bool) -> None:
    nodes = decodes(*[freezer] * 4)
    async with running(*nodes), serving(decode=nodes, **QUICK) as router:
        assert await ask(router, stream=stream) == (500, "nodes_frozen", "false")
        assert sum(len(node.seen) for node in nodes) == 2
        assert (num_ended(router), num_ended(router, "died")) == (1, 0)
        await router.idle()


async def test_two_prefill_nodes_that_freeze_are_not_followed_by_a_decode_node() -> None:
    prefills = [FakeNode("prefill", freezer, node_id=f"p{i}") for i in range(3)]
    d = FakeNode("decode", fakes.decode)
    async with running(*prefills, d), serving(prefills, [d], **QUICK) as router:
        assert await ask(router, order="p-first") == (500, "nodes_frozen", "false")
        assert sum(len(node.seen) for node in prefills) == 2
        assert not d.seen


@pytest.mark.parametrize("is_p_frozen", [False, True])
async def test_a_prefill_node_that_had_the_request_from_a_decode_node_counts(is_p_frozen: bool) -> None:
    p = FakeNode("prefill", fakes.prefill, node_id="p")

    async def passes_on(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        assert verify(KEY, seen.body["kv_transfer_params"]["offer"], Offer, time.time()).prefill_urls == (p.url,)
        if is_p_frozen:
            await freeze(p)
            await until(lambda: router.services.table.nodes[0].liveness.down)
        return await freezer(node, request, seen)

    nodes = decodes(passes_on, fakes.decode)
    async with running(p, *nodes), serving([p], nodes, **QUICK) as router:
        answer = await ask(router, order="d-first")
        assert answer == ((500, "nodes_frozen", "false") if is_p_frozen else (200, "d1", ""))
        assert len(nodes[1].seen) == (not is_p_frozen)


async def test_a_node_that_stood_still_before_the_request_came_does_not_count() -> None:
    """The request was sent while a check of /health waited for its answer."""
    nodes = decodes(fakes.silent, freezer, fakes.decode)
    async with running(*nodes), serving(decode=nodes, **QUICK) as router:
        nodes[0].holds_checks = True
        checks = nodes[0].num_checks
        await until(lambda: nodes[0].num_checks > checks)
        request = asyncio.ensure_future(ask(router))
        await nodes[0].wait_seen(1)
        nodes[0].is_silent = True
        assert (await request)[:2] == (200, "d2")
        assert [len(node.seen) for node in nodes] == [1, 1, 1]
        assert num_ended(router) == 0


@pytest.mark.parametrize("has_tokens", [True, False])
async def test_a_stream_goes_on_from_nodes_that_wrote_it_and_ends_by_those_that_did_not(has_tokens: bool) -> None:
    """It ran on d0. Three further nodes freeze: each after a frame of its own, or before one."""
    sizes = [len(message) for message in STREAM.messages()[1:]]
    script = FramedScript(STREAM, [(sizes[0], End.STANDS), *((size * has_tokens, End.STANDS) for size in sizes[1:4])])

    async def stands(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        freezing = asyncio.ensure_future(freeze(node))
        try:
            return await script(node, request, seen)
        finally:
            await freezing

    nodes = framed_nodes(script, 5)
    for node in nodes[:4]:
        node.script = stands
    async with running(*nodes), serving(decode=nodes, **QUICK, continue_wait_s=0.0) as router:
        body = (await post(router, COMPLETIONS, PROMPT, stream=True)).body
        assert [len(node.seen) for node in nodes] == ([1] * 5 if has_tokens else [1, 1, 1, 0, 0])
        assert (body == STREAM.text, b"nodes_frozen" in body) == (has_tokens, not has_tokens)
        assert num_ended(router) == (not has_tokens)


def node(name: str) -> Node:
    return Node(url=name, role=Role.DECODE, node_id=name, epoch=1)


def freezes(one: Node) -> None:
    one.liveness.num_polls += 1
    one.liveness.judge(Down(FailureKind.FROZEN, "no answer"))


def test_a_freeze_counts_once_and_beside_deaths() -> None:
    first, second, third = nodes = [node(name) for name in ("a", "b", "c")]
    found = NodeDeaths(2)
    found.meet(first)
    freezes(first)
    for _ in range(2):  # it is asked again
        found.freeze(first)
        found.spare(first)
        found.check()
        found.meet(first)
    found.meet(second)
    freezes(second)
    found.freeze(second)
    with pytest.raises(NodesFrozen, match=r"a, b|b, a"):
        found.check()
    found.ran()
    found.check()
    for one in nodes[:2]:
        found.freeze(one)  # the request is their victim
    found.check()
    found.meet(third)
    freezes(third)
    found.freeze(third)
    found.add(second)
    with pytest.raises(NodesDied, match="b, c") as raised:
        found.check()
    assert raised.value.code == "nodes_died"


def test_a_freeze_begins_with_the_first_check_that_finds_it() -> None:
    """A wait that cannot move at first hears the judgement at each check."""
    one, late, early = node("a"), NodeDeaths(1), NodeDeaths(1)
    early.meet(one)
    one.liveness.num_polls += 1  # begun, and not answered
    late.meet(one)
    one.liveness.judge(Down(FailureKind.FROZEN, "no answer"))
    freezes(one)
    late.freeze(one)
    late.check()
    early.freeze(one)
    with pytest.raises(NodesFrozen):
        early.check()
    one.liveness.judge(None)
    freezes(one)  # again, while it has the request
    late.freeze(one)
    with pytest.raises(NodesFrozen):
        late.check()
