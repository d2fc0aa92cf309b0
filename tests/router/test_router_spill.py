"""Requests with prompts that decode nodes read while the prefill nodes queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from pd_router.charge import Charge
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
P_SPEED = 100_000.0  # bytes per second
BUSY_BYTES = 1_000_000  # ten seconds of it


# --- requests


def make_busy(router: Router) -> Charge:
    """The first prefill node has read at its speed, and has a lot to read."""
    node, clock = router.services.table.nodes[0], router.services.table.clock
    node.speed.note(round(P_SPEED * 10), clock() - 10.0, clock())
    return Charge(node, clock, prefill_bytes=BUSY_BYTES)


async def post(
    router: Router, body: dict[str, Any], path: str = CHAT, order: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    headers = {"x-pd-route": order} if order else {}
    async with router.session.post(router.url + path, json=body, headers=headers) as answer:
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()


async def direct_only(node: FakeNode, request: Any, seen: fakes.Seen) -> Any:
    """Refuses a request without a ticket."""
    script = fakes.decode if "kv_transfer_params" in seen.body else fakes.refuse(int(node.node_id))
    return await script(node, request, seen)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["p-first", "d-first"])
async def test_a_request_goes_where_it_is_read_sooner(stream: bool, route: str) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto", route=route) as router:
        status, headers, _ = await post(router, BODY | {"stream": stream})
        assert (status, headers["x-pd-route"]) == (200, f"{route}; reason=default")
        with make_busy(router):
            status, headers, data = await post(router, BODY | {"stream": stream})
        assert (status, headers["x-pd-route"]) == (200, "direct; reason=prefill-busy")
        assert headers["x-pd-prefill"] == headers["x-pd-decode"] == "fake-decode"
        assert not stream or data == fakes.WHOLE_STREAM
        assert "kv_transfer_params" not in d.seen[1].body
        assert len(p.seen) == (route == "p-first")
        labels = {"order": "direct", "reason": "prefill-busy", "outcome": "ok"}
        assert router.count("pd_router_requests_total", **labels) == 1
        knows_d = router.services.table.nodes[1].speed.at(router.services.table.clock()) is not None
        assert knows_d == stream, "an answer that comes whole does not show when its prompt was read"
        await router.idle()


@pytest.mark.anyio
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
            status, headers, _ = await post(router, BODY, order=order)
        assert status == 200
        assert headers["x-pd-route"] == (f"{order}; reason=header" if order else "p-first; reason=default")
        assert "kv_transfer_params" in d.seen[0].body


@pytest.mark.anyio
async def test_several_prompts_go_there_too_unless_an_order_was_asked_for() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    body = {"model": "demo", "prompt": ["one", "two"]}
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        with make_busy(router):
            _, headers, _ = await post(router, body, COMPLETIONS)
            assert headers["x-pd-route"] == "direct; reason=prefill-busy"
            _, headers, _ = await post(router, body, COMPLETIONS, order="p-first")
            assert headers["x-pd-route"] == "d-first; reason=several-prompts"


@pytest.mark.anyio
async def test_prompts_with_log_probabilities_too() -> None:
    """The decode node computes all of it if P is busy, and else is offered a P that tells it the prompt's."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    body = {"model": "demo", "prompt": "one", "prompt_logprobs": 1}
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        with make_busy(router):
            _, headers, _ = await post(router, body, COMPLETIONS)
            assert headers["x-pd-route"] == "direct; reason=prefill-busy"
        _, headers, _ = await post(router, body, COMPLETIONS)
        assert headers["x-pd-route"] == "d-first; reason=prompt-logprobs"
    plain, offered = (seen.body for seen in d.seen)
    assert (plain, p.seen) == (body, [])
    assert offered == body | {"kv_transfer_params": offered["kv_transfer_params"]}
    assert set(offered["kv_transfer_params"]) == {"do_remote_prefill", "offer"}


@pytest.mark.anyio
@pytest.mark.parametrize(("status", "stream"), [(429, False), (500, True), (503, True), (504, False)])
async def test_a_decode_node_that_will_not_read_costs_no_request(status: int, stream: bool) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", direct_only, node_id=str(status))
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        with make_busy(router):
            got, headers, _ = await post(router, BODY | {"stream": stream})
        assert (got, headers["x-pd-route"]) == (200, "p-first; reason=default")
        assert [("kv_transfer_params" in leg.body) for leg in d.seen] == [False, True]
        assert len(p.seen) == 1
        assert router.count("pd_router_requests_total", order="p-first", reason="default", outcome="ok") == 1
        assert router.count("pd_router_leg_failures_total", leg="decode", node=str(status), kind="refused") == 1
        await router.idle()


@pytest.mark.anyio
async def test_a_broken_decode_node_is_followed_by_another_and_then_by_the_prefill_node() -> None:
    p, broken = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.hang_up, node_id="broken")
    good = FakeNode("decode", fakes.decode, node_id="good")
    async with running(p, broken, good), serving([p], [broken, good], prefill_on_decode="auto") as router:
        with make_busy(router):
            for _ in range(2):  # one of the two begins with the broken one
                status, headers, _ = await post(router, BODY | {"stream": True})
                assert (status, headers["x-pd-route"]) == (200, "direct; reason=prefill-busy")
                assert headers["x-pd-decode"] == "good"
            assert broken.seen
            table = router.services.table
            with Charge(table.nodes[2], table.clock, prefill_bytes=BUSY_BYTES):  # it would be no sooner than P
                for _ in range(2):
                    status, headers, _ = await post(router, BODY | {"stream": True})
                    assert (status, headers["x-pd-decode"]) == (200, "good")
                    assert headers["x-pd-route"] == "p-first; reason=default"
        await router.idle()


@pytest.mark.anyio
async def test_a_wrong_request_is_refused_once() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.refuse(400))
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        with make_busy(router):
            status, headers, _ = await post(router, BODY)
        assert (status, headers["x-pd-route"]) == (400, "direct; reason=prefill-busy")
        assert (len(p.seen), len(d.seen)) == (0, 1)
        await router.idle()


@pytest.mark.anyio
async def test_a_whole_answer_holds_the_charge_of_its_prompt_no_longer_than_expected() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        with make_busy(router):
            request = asyncio.ensure_future(post(router, BODY))
            await d.wait_seen(1)
            await until(lambda: router.outstanding()[1] == (0, 1))
            assert not request.done()
            d.go_on.set()
            assert (await request)[0] == 200
        await router.idle()


@pytest.mark.anyio
async def test_d_first_too_a_whole_answer_keeps_no_prefill_node_busy() -> None:
    """Else prompts would be kept from prefill nodes that have nothing to do."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto", route="d-first") as router:
        make_busy(router).release()  # its speed is known
        requests = [asyncio.ensure_future(post(router, BODY)) for _ in range(2)]
        await d.wait_seen(2)
        await until(lambda: router.outstanding() == [(0, 0), (0, 2)])
        d.go_on.set()
        assert {(await request)[1]["x-pd-route"] for request in requests} == {"d-first; reason=default"}
        await router.idle()


@pytest.mark.anyio
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
        _, headers, _ = await post(router, body, COMPLETIONS)
        order = "direct; reason=prefill-busy" if is_busy else "d-first; reason=several-prompts"
        assert headers["x-pd-route"] == order
        assert p_node.speed.at(clock()) == pytest.approx(known)
        assert d_node.speed.at(clock()) is None
        charge.release()
        await router.idle()


@pytest.mark.anyio
async def test_prefill_nodes_that_go_down_meanwhile_fail_no_request() -> None:
    """D-first, when the decode node that was to read has refused: no node is left to be offered."""

    async def script(node: FakeNode, request: Any, seen: fakes.Seen) -> Any:
        router.services.table.nodes[0].reachable = False
        return await (fakes.refuse(503) if len(node.seen) == 1 else fakes.decode)(node, request, seen)

    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", script)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto", route="d-first") as router:
        with make_busy(router):
            status, headers, _ = await post(router, BODY | {"stream": True})
        assert (status, headers["x-pd-route"]) == (200, "direct; reason=prefill-failed")
        await router.idle()


@pytest.mark.anyio
async def test_a_decode_node_tells_its_room_and_reads_nothing_when_it_is_taken() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    full = FakeNode("decode", fakes.decode, node_id="full")
    full.kv_in_use = 0.95
    d.num_slots = 1
    async with running(p, d, full), serving([p], [full, d], prefill_on_decode="auto") as router:
        with make_busy(router):
            request = asyncio.ensure_future(post(router, BODY | {"stream": True}))
            await d.wait_seen(1)
            _, headers, _ = await post(router, BODY | {"stream": True})
            assert (headers["x-pd-route"], headers["x-pd-decode"]) == ("p-first; reason=default", "full")
            d.go_on.set()
            assert (await request)[1]["x-pd-route"] == "direct; reason=prefill-busy"
        await router.idle()


@pytest.mark.anyio
async def test_a_client_that_leaves_a_decode_node_reading_leaves_nothing_behind() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.silent)
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        with make_busy(router):
            request = asyncio.ensure_future(post(router, BODY | {"stream": True}))
            seen = await d.wait_seen(1)
            assert router.outstanding()[1][0] > 0
            request.cancel()
            await asyncio.wait_for(seen.gone.wait(), fakes.WAIT_S)
            await until(lambda: router.outstanding()[1] == (0, 0))
        assert p.seen == []
        labels = {"order": "direct", "reason": "prefill-busy", "outcome": "client_gone"}
        await until(lambda: router.count("pd_router_requests_total", **labels) == 1)


@pytest.mark.anyio
async def test_prompts_that_queue_at_p_teach_its_speed_and_then_spill() -> None:
    """Nothing is set by hand: the first prompt is read, two more queue, and the next one finds D sooner."""
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.decode)
    p.prompt_ids = list(range(50_000))
    body = {"model": "demo", "prompt": "x" * 200_000, "stream": True}
    async with running(p, d), serving([p], [d], prefill_on_decode="auto") as router:
        clock, node = router.services.table.clock, router.services.table.nodes[0]
        begun_s = clock()
        await post(router, body, COMPLETIONS)
        await until(lambda: clock() - begun_s > 0.1)
        p.go_on.set()
        await until(lambda: not node.prefill_bytes)
        speed = node.speed.at(clock())
        assert speed is not None
        assert 0 < speed < 4_000_000
        p.go_on.clear()
        routes = [(await post(router, body, COMPLETIONS))[1]["x-pd-route"] for _ in range(3)]
        assert routes == ["p-first; reason=default"] * 2 + ["direct; reason=prefill-busy"], "D is thought half as fast"
        p.go_on.set()
        await router.idle()
