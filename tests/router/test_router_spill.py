"""Requests with prompts that decode nodes read while the prefill nodes queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from pd_router.policy.cost_policy import FREE
from tests.http.answer import CHAT, COMPLETIONS, HI, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.leg_case import make_busy
from tests.router.router_process import serving, until

pytestmark = pytest.mark.anyio
P_FIRST, BUSY = "p-first; reason=default", "direct; reason=prefill-busy"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["p-first", "d-first"])
async def test_a_request_goes_where_it_is_read_sooner(stream: bool, route: str) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto", route=route) as router:
        got = await post(router, CHAT, HI, stream=stream)
        assert (got.status, got.route) == (200, f"{route}; reason=default")
        with make_busy(router):
            got = await post(router, CHAT, HI, stream=stream)
        assert (got.status, got.route) == (200, BUSY)
        assert got.prefilled_by == got.decoded_by == "fake-decode"
        assert not stream or got.body == fakes.WHOLE_STREAM
        assert "kv_transfer_params" not in d.seen[1].body
        assert len(p.seen) == (route == "p-first")
        labels = {"order": "direct", "reason": "prefill-busy", "outcome": "ok"}
        assert router.count("pd_router_requests_total", **labels) == 1
        knows_d = router.services.table.nodes[1].speed.at(router.services.table.clock()) is not None
        assert knows_d == stream, "an answer that comes whole does not show when its prompt was read"
        await router.idle()


@pytest.mark.parametrize(
    ("order", "settings"),
    [
        ("p-first", {}), ("d-first", {}), (None, {"prefill_on_decode": "never"}),
        (None, {"on_prefill_failure": "fail"}),
    ],
)  # fmt: skip
async def test_an_order_that_is_asked_for_or_demanded_is_kept(order: str | None, settings: dict[str, str]) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], **{"prefill_on_decode": "auto", **settings}) as router:  # type: ignore[arg-type]
        with make_busy(router):
            got = await post(router, CHAT, HI, {"x-pd-route": order} if order else {})
        assert (got.status, got.route) == (200, f"{order}; reason=header" if order else P_FIRST)
        assert "kv_transfer_params" in d.seen[0].body


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_stream_that_no_prefill_node_keeps_goes_where_it_had_gone(is_busy: bool) -> None:
    """To the decode node while it is sooner there; else to both."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        policy: Any = router.services.policy
        with make_busy(router) as charge:

            def choose(*facts: Any) -> Any:
                route: Any = type(policy).choose(policy, *facts)
                assert (route.text, route.otherwise.text) == (BUSY, P_FIRST)
                if not is_busy:
                    charge.release()
                return replace(route, reason=FREE, decodes=tuple(router.services.table.nodes[:1]), otherwise=route)

            policy.choose = choose
            got = await post(router, CHAT, HI)
        assert (got.status, got.route) == (200, BUSY if is_busy else P_FIRST)
        assert len(p.seen) == (not is_busy)
        await router.idle()


async def test_several_prompts_go_there_too_unless_an_order_was_asked_for() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    body = {"model": "demo", "prompt": ["one", "two"]}
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        with make_busy(router):
            assert (await post(router, COMPLETIONS, body)).route == BUSY
            got = await post(router, COMPLETIONS, body, {"x-pd-route": "p-first"})
            assert got.route == "d-first; reason=several-prompts"


@pytest.mark.parametrize("prefill_on_decode", ["auto", "never"])
@pytest.mark.parametrize("route", [None, "p-first", "d-first"])
async def test_prompts_with_log_probabilities_always_do(prefill_on_decode: str, route: str | None) -> None:
    """Busy or not, and whatever order is asked for: the KV of a prefill node has no log-probabilities."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    body = {"model": "demo", "prompt": "one", "prompt_logprobs": 1}
    async with running(p, d), serving([p], [d], prefill_on_decode=prefill_on_decode) as router:
        got = await post(router, COMPLETIONS, body, {"x-pd-route": route} if route else {})
        assert got.route == "direct; reason=prompt-logprobs"
        await router.idle()
    assert ([seen.body for seen in d.seen], p.seen) == ([body], [])


async def test_a_whole_answer_holds_the_charge_of_its_prompt_no_longer_than_expected() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        with make_busy(router):
            request = asyncio.ensure_future(post(router, CHAT, HI))
            await d.wait_seen(1)
            await until(lambda: router.outstanding()[1] == (0, 1))
            assert not request.done()
            d.go_on.set()
            assert (await request).status == 200
        await router.idle()


async def test_d_first_too_a_whole_answer_keeps_no_prefill_node_busy() -> None:
    """Else prompts would be kept from prefill nodes that have nothing to do."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto", route="d-first") as router:
        make_busy(router).release()  # its speed is known
        requests = [asyncio.ensure_future(post(router, CHAT, HI)) for _ in range(2)]
        await d.wait_seen(2)
        await until(lambda: router.outstanding() == [(0, 0), (0, 2)])
        d.go_on.set()
        assert {(await request).route for request in requests} == {"d-first; reason=default"}
        await router.idle()


@pytest.mark.parametrize("is_busy", [False, True])
async def test_the_first_of_several_prompts_tells_no_speed(is_busy: bool) -> None:
    """The answer begins when one of them has been read: by P, at D's request, or by D."""

    async def script(node: FakeNode, request: Any, seen: fakes.Seen) -> Any:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-pd-prefill": p.node_id})
        await response.prepare(request)
        await response.write(fakes.WHOLE_STREAM)
        return response

    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", script)
    body = {"model": "demo", "prompt": ["one", "two"], "stream": True}
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        clock, (p_node, d_node) = router.services.table.clock, router.services.table.nodes
        charge = make_busy(router)
        if not is_busy:
            charge.release()
        known = p_node.speed.at(clock())
        got = await post(router, COMPLETIONS, body)
        assert got.route == (BUSY if is_busy else "d-first; reason=several-prompts")
        assert p_node.speed.at(clock()) == pytest.approx(known)
        assert d_node.speed.at(clock()) is None
        charge.release()
        await router.idle()


async def test_prefill_nodes_that_go_down_meanwhile_fail_no_request() -> None:
    """D-first, when the decode node that was to read has refused: no node is left to be offered."""

    async def script(node: FakeNode, request: Any, seen: fakes.Seen) -> Any:
        router.services.table.nodes[0].reachable = False
        return await (fakes.refuse(503) if len(node.seen) == 1 else fakes.decode)(node, request, seen)

    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", script)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto", route="d-first") as router:
        with make_busy(router):
            got = await post(router, CHAT, HI, stream=True)
        assert (got.status, got.route) == (200, "direct; reason=prefill-failed")
        await router.idle()


async def test_a_decode_node_tells_its_room_and_reads_nothing_when_it_is_taken() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    full = FakeNode("decode", fakes.decode, node_id="full")
    full.kv_in_use = 0.95
    d.num_slots = 1
    async with running(p, d, full), serving([p], [full, d], prefill_on_decode="auto") as router:
        with make_busy(router):
            request = asyncio.ensure_future(post(router, CHAT, HI, stream=True))
            await d.wait_seen(1)
            got = await post(router, CHAT, HI, stream=True)
            assert (got.route, got.decoded_by) == (P_FIRST, "full")
            d.go_on.set()
            assert (await request).route == BUSY
        await router.idle()


@pytest.mark.long
async def test_prompts_that_queue_at_p_teach_its_speed_and_then_spill() -> None:
    """Nothing is set by hand: the first prompt is read, two more queue, and the next one finds D sooner."""
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.decode)
    p.prompt_ids = list(range(50_000))
    body = {"model": "demo", "prompt": "x" * 200_000, "stream": True}
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        clock, node = router.services.table.clock, router.services.table.nodes[0]
        begun_s = clock()
        await post(router, COMPLETIONS, body)
        await until(lambda: clock() - begun_s > 0.1)
        p.go_on.set()
        await until(lambda: not node.prefill_bytes)
        speed = node.speed.at(clock())
        assert speed is not None
        assert 0 < speed < 4_000_000
        p.go_on.clear()
        routes = [(await post(router, COMPLETIONS, body)).route for _ in range(3)]
        assert routes == [P_FIRST] * 2 + [BUSY], "D is thought half as fast"
        p.go_on.set()
        await router.idle()
