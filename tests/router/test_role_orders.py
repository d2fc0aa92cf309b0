"""Role orders through routers: what a node is told, which word counts, and what happens to words that cross."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from pd_connectors.protocol.feed import FeedDelta, FeedSnapshot, NodeLoad
from pd_connectors.protocol.ticket import NOT_SEEN, NodeOrder, verify
from pd_http.endpoints import ROLE_PATH
from pd_router.config import RouterConfig
from pd_router.nodes.node import NodeSpec, Role
from pd_router.nodes.node_table import FLAGS, NodeTable
from tests.http.answer import COMPLETIONS, PROMPT
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, Seen, running
from tests.router.router_process import KEY, Router, serving, signed, until
from tests.router.test_feed_follower import FakeFeed
from tests.router.test_pairing import poll
from tests.router.test_sources_posted import call

DECODE = {"d-1": "decode", "d-2": "decode"}


def obeying(otherwise: fakes.Script) -> fakes.Script:
    """A node that takes role orders."""

    async def script(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.path != ROLE_PATH:
            return await otherwise(node, request, seen)
        order = verify(KEY, seen.headers["x-pd-order"], NodeOrder, time.time())
        assert (order.action, order.node) == ("role", node.node_id)
        changes = node.facts.get("role_changes", 0)
        if order.seen_changes not in (NOT_SEEN, changes):
            return web.json_response({"error": {"message": "it has changed"}}, status=409)
        node.facts["role_changes"] = changes + (order.role != node.role)
        node.facts["role_order"] = {"sender": order.sender, "reason": order.reason, "age_s": 0.0}
        node.role = order.role
        return web.json_response({"role": node.role} | node.facts)

    return script


def a_node(role: str, node_id: str, script: fakes.Script = fakes.decode) -> FakeNode:
    return FakeNode(role, obeying(script), node_id=node_id)


async def change(router: Router, node: str, role: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    return await call(router, "POST", f"/nodes/{node}/role", signed("role", node, role, **fields))


def roles(router: Router) -> dict[str, str]:
    return {node.node_id: node.role.value for node in router.services.table.nodes}


async def route(router: Router) -> str:
    async with router.session.post(router.url + COMPLETIONS, json=PROMPT | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        return answer.headers["x-pd-route"]


# --- the table


def a_table(*specs: NodeSpec) -> NodeTable:
    made = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    made.apply(FLAGS, specs)
    return made


def test_a_nodes_own_word_wins_and_an_older_one_is_ignored() -> None:
    table = a_table(NodeSpec("http://a:1", Role.PREFILL))
    (node,) = table.nodes
    for role, changes, then in (
        ("decode", 0, Role.DECODE),
        ("mixed", 2, Role.MIXED),
        ("prefill", 1, Role.MIXED),  # on its way since before
        ("encode", 3, Role.MIXED),
        (None, 3, Role.MIXED),
        ("decode", "4", Role.MIXED),
        ("decode", 3, Role.DECODE),
    ):
        node.receive_role(role, changes)
        assert node.role is then, (role, changes)
    node.decode_sequences = 1
    table.apply(FLAGS, [NodeSpec("http://a:1", Role.MIXED)])  # the source does not agree: the same node, its own word
    assert (table.nodes, node.gone, node.role) == ((node,), False, Role.DECODE)
    table.apply(FLAGS, [])
    table.apply(FLAGS, [NodeSpec("http://a:1", Role.MIXED)])
    assert [one.role for one in table.nodes] == [Role.MIXED], "the address may be another node's meanwhile"


def test_another_role_is_another_node_if_it_tells_none_itself() -> None:
    table = a_table(NodeSpec("http://a:1", Role.PREFILL))
    (before,) = table.nodes
    table.apply(FLAGS, [NodeSpec("http://a:1", Role.MIXED)])
    (after,) = table.nodes
    assert (before.gone, before.role, after.role) == (True, Role.PREFILL, Role.MIXED)


def test_what_a_sender_saw_is_more_than_a_sum() -> None:
    """One node starts again, another one changes its role, is drained, comes or goes: each is another state."""
    specs = [NodeSpec(f"http://{name}:1", Role.DECODE) for name in "abc"]
    table = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    table.apply(FLAGS, specs[:2])
    first, second = table.nodes
    first.epoch, second.epoch = 1, 1
    first.receive_role("decode", 2)
    seen = [table.role_state]
    first.epoch, first.role_changes = 2, 0
    second.receive_role("decode", 2)
    seen.append(table.role_state)
    second.draining = True
    seen.append(table.role_state)
    table.apply(FLAGS, specs)
    seen.append(table.role_state)
    table.apply(FLAGS, specs[1:])
    seen.append(table.role_state)
    assert len(set(seen)) == len(seen)
    assert table.role_state == seen[-1]


# --- orders

pytestmark = pytest.mark.anyio


async def test_a_role_changes_at_once_and_back() -> None:
    d1, d2 = a_node("decode", "d-1"), a_node("decode", "d-2")
    async with running(d1, d2), serving(decode=[d1, d2]) as router:
        assert await route(router) == "direct; reason=no-prefill-node"
        d1.script = obeying(fakes.prefill)
        status, told = await change(router, "d-1", "prefill")
        assert (status, told["role"], told["state"]) == (200, "prefill", "active")
        assert await route(router) == "p-first; reason=default"
        (node, _) = router.services.table.nodes
        assert router.count("pd_router_node_healthy", node="d-1", url=d1.url, role="prefill") == 1
        assert router.count("pd_router_node_healthy", node="d-1", url=d1.url, role="decode") == 0
        assert node.role_changes == 1
        assert (await change(router, "d-1", "prefill"))[0] == 200, "the order may come twice"
        assert (node.role_changes, d1.facts["role_changes"]) == (1, 1)
        assert (await change(router, "d-1", "mixed"))[1]["role"] == "mixed"
        await poll(router)
        assert roles(router) == {"d-1": "mixed", "d-2": "decode"}


async def test_of_two_orders_that_saw_the_same_one_acts() -> None:
    """Two balancers, of which each chose another node; then one for a node that an operator has changed meanwhile."""
    nodes = [a_node("decode", f"d-{number}") for number in range(4)]
    async with running(*nodes), serving(decode=nodes) as router:
        table = router.services.table
        await until(lambda: all(node.epoch is not None for node in table.nodes))
        seen = {"sender": "balance", "reason": "prompts wait", "seen_changes": 0, "seen_state": table.role_state}
        answers = await asyncio.gather(*(change(router, name, "prefill", **seen) for name in ("d-0", "d-1")))
        assert sorted(status for status, _ in answers) == [200, 409]
        (refusal,) = (told["error"]["message"] for status, told in answers if status == 409)
        assert "roles have changed since the sender of the order saw them" in refusal
        (told,) = (told for status, told in answers if status == 200)
        assert (told["role_order"]["sender"], told["role_order"]["reason"]) == ("balance", "prompts wait")
        assert (await change(router, "d-2", "mixed"))[1]["role_order"]["sender"] == ""
        await poll(router)
        assert [node.tells_orders for node in table.nodes].count(True) == 2, "the others are of an earlier release"
        status, told = await change(router, "d-2", "prefill", **seen | {"seen_state": table.role_state})
        assert (status, "it has changed" in told["error"]["message"]) == (409, True)
        assert sorted(roles(router).values()) == ["decode", "decode", "mixed", "prefill"]


async def test_the_last_node_that_decodes_stays_unless_forced() -> None:
    d1, d2 = a_node("decode", "d-1"), a_node("mixed", "d-2")
    async with running(d1, d2), serving(decode=[d1], mixed=[d2]) as router:
        answers = await asyncio.gather(*(change(router, name, "prefill") for name in ("d-1", "d-2")))
        assert sorted(status for status, _ in answers) == [200, 409], "one at a time: each counts on the other"
        (refusal,) = (told["error"]["message"] for status, told in answers if status == 409)
        assert "no other node that decodes is healthy for demo" in refusal
        assert "--force" in refusal
        name = next(name for name, role in roles(router).items() if role != "prefill")
        assert (await change(router, name, "decode"))[0] == 200
        assert (await change(router, name, "prefill", is_forced=True))[0] == 200
        assert set(roles(router).values()) == {"prefill"}
        assert (await change(router, name, "prefill"))[0] == 200, "it is one already"


async def test_a_node_of_another_model_does_not_count() -> None:
    d1, other = a_node("decode", "d-1"), FakeNode("decode", fakes.decode, models=("other",), node_id="d-2")
    async with running(d1, other), serving(decode=[d1, other]) as router:
        assert (await change(router, "d-1", "prefill"))[0] == 409
        assert (await change(router, "d-1", "mixed"))[0] == 200


@pytest.mark.parametrize(
    ("script", "status", "hint"),
    [
        (fakes.refuse(404), 409, "status 404"),
        (fakes.decode, 409, "takes no role orders"),
        (fakes.refuse(503), 502, "can be repeated"),
        (fakes.hang_up, 502, "can be repeated"),
    ],
)
async def test_a_node_that_does_not_obey_keeps_its_role(script: fakes.Script, status: int, hint: str) -> None:
    d1, d2 = FakeNode("decode", script, node_id="d-1"), a_node("decode", "d-2")
    async with running(d1, d2), serving(decode=[d1, d2]) as router:
        answered, told = await change(router, "d-1", "prefill")
        assert (answered, hint in told["error"]["message"]) == (status, True), told
        assert roles(router) == DECODE


async def test_bad_orders_reach_no_node() -> None:
    d1, d2 = a_node("decode", "d-1"), a_node("decode", "d-2")
    async with running(d1, d2), serving(decode=[d1, d2]) as router:
        for headers, path, status in (
            ({}, "/nodes/d-1/role", 401),
            (signed("role", "d-1", "prefill", key=b"x" * 32), "/nodes/d-1/role", 401),
            (signed("role", "d-1", "prefill", lives_s=-1), "/nodes/d-1/role", 401),
            (signed("drain", "d-1"), "/nodes/d-1/role", 400),
            (signed("role", "d-1", "encode"), "/nodes/d-1/role", 400),
            (signed("role", "d-2", "prefill"), "/nodes/d-1/role", 400),
            (signed("role", "d-3", "prefill"), "/nodes/d-3/role", 404),
        ):
            assert (await call(router, "POST", path, headers))[0] == status, path
        assert (d1.seen, d2.seen, roles(router)) == ([], [], DECODE)


async def test_a_drained_node_changes_and_stays_drained_but_a_leaving_one_does_not() -> None:
    d1, d2 = a_node("decode", "d-1", fakes.decode_until_told), a_node("decode", "d-2")
    async with running(d1, d2), serving(decode=[d2], start_empty=True) as router:
        assert (await call(router, "POST", "/nodes", signed("add", d1.url, "decode")))[0] == 201
        await until(lambda: all(node.reachable for node in router.services.table.nodes))
        await call(router, "POST", "/nodes/d-1/drain", signed("drain", "d-1"))
        status, told = await change(router, "d-1", "mixed")
        assert (status, told["role"], told["state"]) == (200, "mixed", "draining")
        await call(router, "DELETE", "/nodes/d-1/drain", signed("resume", "d-1"))
        await call(router, "POST", "/nodes/d-2/drain", signed("drain", "d-2"))
        async with router.session.post(router.url + COMPLETIONS, json=PROMPT | {"stream": True}) as answer:
            assert await answer.content.readany() == fakes.chunk("a")
            assert (await call(router, "DELETE", "/nodes/d-1", signed("remove", "d-1")))[1]["state"] == "leaving"
            status, told = await change(router, "d-1", "prefill")
            assert (status, "is leaving" in told["error"]["message"]) == (409, True)
            d1.go_on.set()
            await answer.read()


async def test_a_posted_node_keeps_its_own_word() -> None:
    d1, d2 = a_node("decode", "d-1"), a_node("decode", "d-2")
    async with running(d1, d2), serving(decode=[d2], start_empty=True) as router:
        await call(router, "POST", "/nodes", signed("add", d1.url, "decode"))
        await until(lambda: router.services.table.nodes[1].reachable)
        await change(router, "d-1", "prefill")
        status, told = await call(router, "POST", "/nodes", signed("add", d1.url, "decode"))  # a supervisor repeats it
        assert (status, told["role"]) == (200, "prefill")


# --- several routers, and words that cross


async def test_another_router_hears_of_it_from_the_node() -> None:
    """Also what holds where the router died between order and answer."""
    d1, d2 = a_node("decode", "d-1"), a_node("decode", "d-2")
    async with running(d1, d2), serving(decode=[d1, d2]) as one, serving(decode=[d1, d2]) as other:
        await change(one, "d-1", "prefill")
        assert (roles(one)["d-1"], roles(other)["d-1"]) == ("prefill", "decode")
        assert (await change(other, "d-1", "prefill"))[0] == 200
        await change(other, "d-1", "mixed")
        await poll(one)
        assert roles(one) == roles(other) == {"d-1": "mixed", "d-2": "decode"}
        d1.role, d1.epoch = "decode", d1.epoch + 1
        d1.facts.clear()  # started again, by its command line
        await poll(one)
        assert roles(one)["d-1"] == "decode"


@pytest.mark.long
async def test_the_feed_tells_the_role_and_late_words_do_not_undo_it() -> None:
    d1, d2 = a_node("decode", "d-1"), a_node("decode", "d-2")
    feed = d1.feed = FakeFeed(FeedSnapshot(7, 1, NodeLoad(), role="decode", role_changes=0))
    async with running(d1, d2), serving(decode=[d1, d2]) as router:
        node = router.services.table.nodes[0]
        await until(lambda: node.view.load is not None)
        await change(router, "d-1", "prefill")
        feed.say(FeedDelta(2, NodeLoad(queued_tokens=2), role="decode", role_changes=0))  # written before the change
        await until(lambda: node.view.load is not None and node.view.load.queued_tokens == 2)
        assert node.role is Role.PREFILL
        feed.say(FeedDelta(3, NodeLoad(), role="mixed", role_changes=2))
        await until(lambda: node.role is Role.MIXED)
        feed.opening = FeedSnapshot(
            8, 1, NodeLoad(), role="decode", role_changes=9
        )  # of a boot that /health has not told
        feed.say(b"")
        await until(lambda: len(feed.orders) == 2 and node.view.load is not None)
        assert roles(router) == {"d-1": "mixed", "d-2": "decode"}
