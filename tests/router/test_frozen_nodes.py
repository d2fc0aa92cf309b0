"""Waits that have shown no byte: they leave a node that is judged down, and only such a node."""

from __future__ import annotations

import asyncio

import pytest

from pd_http.errors import NodesDied
from pd_http.node_answers import FailureKind
from pd_router.nodes.liveness import Down
from pd_router.nodes.node import Node, Role
from pd_router.nodes.upstream import LegFailed
from pd_router.requests.liveness_guard import LivenessGuard
from pd_router.requests.node_deaths import NodeDeaths
from tests.http.answer import COMPLETIONS, PROMPT, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.leg_case import SOON_S
from tests.router.router_process import serving

pytestmark = pytest.mark.anyio


def decodes(*scripts: fakes.Script) -> list[FakeNode]:
    return [FakeNode("decode", script, node_id=f"d{i}") for i, script in enumerate(scripts)]


async def test_slowness_alone_moves_nothing() -> None:
    """However long it takes: the node answers its health checks."""
    slow, idle = nodes = decodes(fakes.decode_until_told, fakes.decode)
    async with running(*nodes), serving(decode=nodes) as router:
        request = asyncio.ensure_future(post(router, COMPLETIONS, PROMPT))
        await slow.wait_seen(1)
        for _ in range(20):
            await router.poll()
        assert not request.done()
        slow.go_on.set()
        assert (await request).decoded_by == "d0"
        assert not idle.seen


@pytest.mark.parametrize("recovers", [False, True])
async def test_with_no_other_node_the_wait_goes_on(*, recovers: bool) -> None:
    """A node that stood still for a moment serves what it has; one that comes meanwhile takes it over."""
    slow, other = nodes = decodes(fakes.decode_until_told, fakes.decode)
    other.is_up = False
    async with running(*nodes), serving(decode=nodes) as router:
        request = asyncio.ensure_future(post(router, COMPLETIONS, PROMPT))
        await slow.wait_seen(1)
        slow.is_silent = True
        await router.poll(slow, limit_s=SOON_S)
        assert router.services.table.nodes[0].liveness.down
        if recovers:
            slow.is_silent = False
            slow.go_on.set()
        else:
            other.is_up = True
            await router.poll(other)
            await router.poll(slow, limit_s=SOON_S)
        got = await request
        assert (got.status, got.decoded_by) == (200, "d0" if recovers else "d1")


def test_node_deaths_are_counted_once_each() -> None:
    first, second = (Node(url=name, role=Role.DECODE, node_id=name, epoch=1) for name in ("a", "b"))
    dead = NodeDeaths(2)
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
