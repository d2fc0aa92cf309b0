"""Role orders to a node: what it tells, what its engine hears and when, and that it serves what was on its way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.errors import InvalidRequest, RoleMoved
from pd_cluster.protocol.messages import FinishReason, TicketOpened, ToEngine, Work
from pd_cluster.protocol.orders import SetRole
from pd_cluster.server.node.node_role import ROLES, NodeRole
from pd_connectors.protocol.feed import FeedDelta
from pd_connectors.protocol.messages import PROTOCOL_VERSION
from pd_connectors.protocol.ticket import NodeOrder, sign
from pd_http.endpoints import ROLE_PATH
from tests.deadlines import HANG_S
from tests.server.fake_engine import FAR, FakeEngine, Line, says
from tests.server.live_server import KEY, Node, running
from tests.server.test_feed import reading
from tests.server.test_prefill_endpoint import FOREIGN, STREAM
from tests.server.test_status_routes import call, order

if TYPE_CHECKING:
    from collections.abc import Sequence

BODY = {"model": "demo", "prompt": [5] * 40, "max_tokens": 1}
WAIT_S = HANG_S

STEPS = st.lists(st.one_of(st.sampled_from(["take", "drop"]), st.sampled_from(ROLES)), max_size=40)


@pytest.mark.long
@given(st.sampled_from(ROLES), STEPS)
def test_the_limit_for_streams_outlasts_the_streams_of_the_old_role(first: str, steps: Sequence[str]) -> None:
    told = [first]

    def send(message: ToEngine) -> None:
        assert isinstance(message, SetRole)
        told.append(message.role)

    role = NodeRole(first, send)
    held: list[int] = []
    for step in steps:
        if step == "take":
            held.append(role.take())
        elif step == "drop":
            if held:
                role.drop(held.pop(0))
        else:
            num_told, is_other = len(told), step != role.name
            role.change(step)
            assert role.name == step
            if is_other and step != "decode" and held:
                assert len(told) == num_told, "its streams are still protected"
        assert role.num_draining == sum(one != role.changes for one in held)
        if role.name == "decode" or not role.num_draining:
            assert told[-1] == role.name
    for one in held:
        role.drop(one)
    assert (role.num_draining, told[-1]) == (0, role.name)


def test_what_is_no_role_changes_nothing() -> None:
    role = NodeRole("mixed", lambda message: None)
    with pytest.raises(InvalidRequest, match="encode"):
        role.change("encode")
    assert role.report() == {"role": "mixed", "role_changes": 0, "num_draining": 0, "role_order": None}


def test_an_order_of_a_sender_that_saw_another_number_of_changes_changes_nothing() -> None:
    now_s = 5.0
    role = NodeRole("mixed", lambda message: None, lambda: now_s)
    role.change("decode", "balance", "streams wait", seen_changes=0)
    now_s = 7.0
    for sender in ("balance", ""):
        with pytest.raises(RoleMoved, match=r"changed 1 times, .* saw 0: it is decode now, by balance"):
            role.change("prefill", sender, "prompts wait", seen_changes=0)
    role.change("decode", "other", "the same, and late", seen_changes=0)
    kept = {"sender": "balance", "reason": "streams wait", "age_s": 2.0}
    assert role.report() == {"role": "decode", "role_changes": 1, "num_draining": 0, "role_order": kept}
    role.change("decode")  # an operator's, which names no number, and changes nothing: it counts as the last word
    assert role.report()["role_order"] == {"sender": "", "reason": "", "age_s": 0.0}
    role.change("prefill")
    assert (role.name, role.changes) == ("prefill", 2)


pytestmark = pytest.mark.anyio


async def test_a_late_order_is_refused_with_what_the_node_is_now() -> None:
    async with running(FakeEngine(says([5]))) as node:
        late = {"x-pd-order": sign(KEY, NodeOrder("role", "node", FAR, "prefill", sender="balance", seen_changes=3))}
        status, told = await call(node.session, "POST", node.url + ROLE_PATH, headers=late)
        assert (status, told["error"]["code"]) == (409, "role_moved")
        assert "it is mixed now, by its command line" in told["error"]["message"]
        assert heard(node) == []


def signed(role: str, **fields: Any) -> dict[str, str]:
    return {"x-pd-order": sign(KEY, NodeOrder("role", "node", FAR, role, **fields))}


async def change(node: Node, role: str, **fields: Any) -> tuple[int, Any]:
    return await call(node.session, "POST", node.url + ROLE_PATH, headers=signed(role, **fields))


def heard(node: Node) -> list[str]:
    """The roles that the engine has heard of."""
    return [message.role for message in node.engine.sent if isinstance(message, SetRole)]


async def test_what_an_order_says_stays_on_one_line() -> None:
    """It enters logs: a reason with a line break would look like a line of the node's own."""
    async with running(FakeEngine(says([5]))) as node:
        status, told = await change(node, "decode", sender="balance\nrole", reason="fine\r\nERROR: no \x1b[31m")
        assert status == 200
        assert (told["role_order"]["sender"], told["role_order"]["reason"]) == ("balance role", "fine  ERROR: no  [31m")


async def test_an_order_changes_what_the_node_tells() -> None:
    async with running(FakeEngine(says([5]))) as node:
        for _ in range(2):
            status, told = await change(node, "decode")
            assert told.pop("role_order")["age_s"] >= 0
            assert (status, told) == (200, {"role": "decode", "role_changes": 1, "num_draining": 0})
        assert heard(node) == ["decode"]
        _, health = await call(node.session, "GET", node.url + "/health")
        assert (health["role"], health["role_changes"], health["node_id"]) == ("decode", 1, "node")
        assert (health["fingerprint"], health["kv_protocol"]) == ("fingerprint", PROTOCOL_VERSION)
        assert (await call(node.session, "GET", node.url + "/server_info"))[1]["role"] == "decode"
        async with node.session.get(node.url + "/metrics") as answer:
            assert 'role="decode"' in await answer.text()


async def test_bad_orders_and_orders_at_a_bad_time() -> None:
    async with running(FakeEngine(says([5]))) as node:
        for headers, status in (
            ({}, 401), (order("role", key=b"x" * 32), 401), (order("role", lives_s=-1), 401),
            (order("role", "other"), 400), (order("feed"), 400), (signed(""), 400), (signed("encode"), 400),
        ):  # fmt: skip
            assert (await call(node.session, "POST", node.url + ROLE_PATH, headers=headers))[0] == status
        node.state.draining = True
        assert (await change(node, "decode"))[0] == 503
        node.state.draining, node.engine.is_alive = False, False
        assert (await change(node, "decode"))[0] == 503
        assert (heard(node), node.state.role.name) == ([], "mixed")


async def test_the_feed_tells_a_change_at_once() -> None:
    async with running(FakeEngine(says([5]))) as node, reading(node) as reader:
        await change(node, "prefill")
        message = await reader.next()
        assert isinstance(message, FeedDelta)
        assert (message.role, message.role_changes) == ("prefill", 1)


async def test_requests_of_the_old_role_are_finished_and_those_on_their_way_are_served() -> None:
    """From decode to prefill while a stream runs; a request to decode and a prefill leg come after it."""

    async def script(line: Line) -> None:
        if line.request.work is Work.PREFILL:
            line.push(TicketOpened(line.request.request_id, line.ticket()))
        elif len(line.engine.requests) == 1:
            await line.engine.released.wait()
        line.tokens([5], finish=FinishReason.LENGTH)

    async with running(FakeEngine(script)) as node:
        await change(node, "decode")
        stream = asyncio.create_task(call(node.session, "POST", node.url + "/v1/completions", json=BODY))
        async with asyncio.timeout(WAIT_S):
            while not node.engine.requests:  # noqa: ASYNC110 (the request is on its way)
                await asyncio.sleep(0)
        status, told = await change(node, "prefill")
        assert (status, told["role"], told["role_changes"], told["num_draining"]) == (200, "prefill", 2, 1)
        assert heard(node) == ["decode"]
        assert (await call(node.session, "POST", node.url + "/v1/completions", json=BODY))[0] == 200
        leg = BODY | {"kv_transfer_params": FOREIGN}
        async with node.session.post(node.url + "/v1/completions", json=leg, headers=STREAM) as answer:
            assert b"event: done" in await answer.read()
        assert heard(node) == ["decode"]
        node.engine.released.set()
        assert (await stream)[0] == 200
        assert heard(node) == ["decode", "prefill"]
        assert node.state.role.num_draining == 0
