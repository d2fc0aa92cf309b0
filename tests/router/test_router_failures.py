"""What happens when a node refuses, breaks, keeps silent or is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from pd_router.connection_pool import NoConnection
from pd_router.health import HealthPoller
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


async def post(router: Router, *, stream: bool = False, order: str | None = None) -> tuple[int, dict[str, str], bytes]:
    headers = {"x-pd-route": order} if order else {}
    async with router.session.post(router.url + CHAT, json=BODY | {"stream": stream}, headers=headers) as answer:
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()


async def test_a_refusal_of_p_reaches_the_client_as_it_is() -> None:
    p, d = FakeNode("prefill", fakes.refuse(400)), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        status, headers, body = await post(router)
        assert status == 400
        assert orjson.loads(body)["error"]["message"] == "no (fake-prefill)"
        assert headers["x-pd-route"] == "p-first; reason=default"
        assert d.seen == []
        assert router.services.table.nodes[0].failures_in_row == 0
        await router.idle()


@pytest.mark.parametrize(
    "script", [fakes.refuse(503), fakes.refuse(500), fakes.hang_up, fakes.prefill_error_first, fakes.decode]
)
async def test_another_p_is_tried(script: fakes.Script) -> None:
    bad, good = FakeNode("prefill", script, node_id="bad"), FakeNode("prefill", fakes.prefill, node_id="good")
    d = FakeNode("decode", fakes.decode)
    async with running(bad, good, d), serving([bad, good], [d]) as router:
        for _ in range(2):  # one of the two begins with the bad one
            status, headers, _body = await post(router)
            assert (status, headers["x-pd-route"]) == (200, "p-first; reason=default")
            assert headers["x-pd-prefill"] == "good"
        assert len(bad.seen) >= 1
        await router.idle()


async def test_without_any_answering_p_the_decode_node_prefills() -> None:
    p, d = FakeNode("prefill", fakes.refuse(503)), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        status, headers, _ = await post(router)
        assert (status, headers["x-pd-route"]) == (200, "direct; reason=prefill-failed")
        assert headers["x-pd-prefill"] == headers["x-pd-decode"] == "fake-decode"
        assert "kv_transfer_params" not in d.seen[0].body
        assert router.count("pd_router_requests_total", order="direct", reason="prefill-failed", outcome="ok") == 1
        assert router.count("pd_router_leg_failures_total", leg="prefill", node="fake-prefill", kind="refused") == 1
        await router.idle()


async def test_local_prefill_can_be_forbidden() -> None:
    p, d = FakeNode("prefill", fakes.refuse(503)), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], on_prefill_failure="fail") as router:
        status, _, body = await post(router)
        assert status == 502
        assert orjson.loads(body)["error"]["code"] == "node_failed"
        assert d.seen == []
        await router.idle()


async def test_a_silent_p_is_given_up_and_its_leg_closed() -> None:
    p, d = FakeNode("prefill", fakes.silent), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], ticket_timeout_s=0.2) as router:
        status, headers, _ = await post(router)
        assert (status, headers["x-pd-route"]) == (200, "direct; reason=prefill-failed")
        await asyncio.wait_for(p.seen[0].gone.wait(), fakes.WAIT_S)
        assert router.count("pd_router_leg_failures_total", leg="prefill", node="fake-prefill", kind="timeout") == 1


async def test_a_dead_p_is_left_out_until_its_health_is_good_again() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        await p.stop()
        _, headers, _ = await post(router)
        assert headers["x-pd-route"] == "direct; reason=prefill-failed"
        _, headers, _ = await post(router)
        assert headers["x-pd-route"] == "direct; reason=no-prefill-node"
        await p.start()
        _, headers, _ = await post(router)
        assert headers["x-pd-route"] == "direct; reason=no-prefill-node"
        await poll(router)
        _, headers, _ = await post(router)
        assert headers["x-pd-route"] == "p-first; reason=default"


async def collect(answer: aiohttp.ClientResponse, into: bytearray) -> None:
    while piece := await answer.content.readany():
        into += piece


async def poll(router: Router) -> None:
    services = router.services
    await HealthPoller(services.config, services.table, services.upstream).poll_all()


async def test_the_log_says_once_why_a_node_is_not_healthy(caplog: pytest.LogCaptureFixture) -> None:
    """Also of a node that never was: its address or its certificate may be wrong."""
    caplog.set_level("INFO", "pd_router")
    d, never = FakeNode("decode", fakes.decode, node_id="d"), FakeNode("decode", fakes.decode)
    async with running(d, never):
        await never.vanish()
        async with serving([], [d, never]) as router:
            for _ in range(2):
                await poll(router)
            for ill in (True, True, False, True):
                d.is_up = not ill
                await poll(router)

    def said(about: str) -> list[str]:
        return [line for line in caplog.messages if about in line and ("gets no" in line or "is healthy" in line)]

    [line] = said(never.url)
    place = never.url.removeprefix("http://")
    assert line.startswith(f"node {place} ({never.url}) gets no requests: {place}: connect: ")
    assert ["gets no" in line for line in said(d.url)] == [False, True, False, True]


async def test_an_error_of_p_after_the_ticket_is_counted_and_d_goes_on() -> None:
    p, d = FakeNode("prefill", fakes.prefill_error_after_ticket), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        status, _, body = await post(router, stream=True)
        assert (status, body) == (200, fakes.WHOLE_STREAM)
        await router.idle()
        name = "pd_router_leg_failures_total"
        assert router.count(name, leg="prefill_after_ticket", node="fake-prefill", kind="refused") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [fakes.refuse(503), fakes.refuse(500), fakes.hang_up])
async def test_another_d_takes_over_with_the_same_ticket(script: fakes.Script, stream: bool) -> None:
    p = FakeNode("prefill", fakes.prefill)
    bad, good = FakeNode("decode", script, node_id="bad"), FakeNode("decode", fakes.decode, node_id="good")
    async with running(p, bad, good), serving([p], [bad, good]) as router:
        for _ in range(2):
            status, headers, _ = await post(router, stream=stream)
            assert (status, headers["x-pd-decode"]) == (200, "good")
        assert len(p.seen) == 2
        assert bad.seen
        given = {leg.body["kv_transfer_params"]["ticket"] for leg in good.seen}
        assert given == {"ticket-1", "ticket-2"}
        assert {leg.body["kv_transfer_params"]["ticket"] for leg in bad.seen} <= given
        await router.idle()
        assert p.released == []


@pytest.mark.parametrize(("answer", "status"), [(503, 503), (500, 502), (504, 504), (429, 429), (404, 404)])
async def test_a_ticket_that_no_d_takes_is_released_once(answer: int, status: int) -> None:
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.refuse(answer))
    async with running(p, d), serving([p], [d]) as router:
        got, _, body = await post(router)
        assert got == status
        assert orjson.loads(body)["error"]["message"] == "no (fake-decode)"
        await router.idle()
        assert p.released == ["ticket-1"]
        await asyncio.wait_for(p.seen[0].gone.wait(), fakes.WAIT_S)
        assert router.count("pd_router_ticket_releases_total", result="ok") == 1


async def test_a_ticket_that_d_does_not_use_is_released_while_d_answers() -> None:
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.prefill_and_decode_until_told)
    async with running(p, d), serving([p], [d]) as router:
        answer = asyncio.create_task(post(router, stream=True))
        await p.wait_released(1)
        await asyncio.wait_for(p.seen[0].gone.wait(), fakes.WAIT_S)
        assert not answer.done()
        d.go_on.set()
        status, headers, _ = await answer
        assert (status, headers["x-pd-prefill"]) == (200, d.node_id)
        await router.idle()
        assert p.released == ["ticket-1"]


async def test_d_gone_between_the_legs_gives_502_and_releases() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        await d.stop()
        status, headers, body = await post(router, stream=True)
        assert status == 502
        assert orjson.loads(body)["error"]["code"] == "node_failed"
        await router.idle()
        assert p.released == ["ticket-1"]
        assert headers["x-pd-route"] == "p-first; reason=default"
        status, headers, body = await post(router)  # D is known to be down now
        assert status == 503
        assert headers["retry-after"] == "1"
        async with router.session.get(router.url + "/health") as answer:
            assert answer.status == 503


async def test_a_failed_release_is_counted() -> None:
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.refuse(503))
    async with running(p, d), serving([p], [d]) as router:
        d.script = _stop_then_refuse(p)
        status, _, _ = await post(router)
        assert status == 503
        await router.idle()
        assert router.count("pd_router_ticket_releases_total", result="failed") == 1


def _stop_then_refuse(p: FakeNode) -> fakes.Script:
    async def script(node: FakeNode, request: Any, seen: fakes.Seen) -> Any:
        await p.stop()
        return await fakes.refuse(503)(node, request, seen)

    return script


@pytest.mark.parametrize("order", ["p-first", "d-first"])
async def test_a_stream_that_breaks_ends_visibly_broken(order: str) -> None:
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.decode_dies)
    other = FakeNode("decode", fakes.decode, node_id="other")
    async with running(p, d, other), serving([p], [d]) as router:
        got = bytearray()
        headers = {"x-pd-route": order}
        async with router.session.post(router.url + CHAT, json=BODY | {"stream": True}, headers=headers) as answer:
            got += await answer.content.readany()
            d.go_on.set()
            with pytest.raises(aiohttp.ClientPayloadError):  # the connection ends before the answer does
                await collect(answer, got)
        events = got.split(b"\n\n")
        assert events[0] + b"\n\n" == fakes.chunk("a")
        assert events[1] == b'data: {"choi'
        assert orjson.loads(events[2].removeprefix(b"data: "))["error"]["code"] == "stream_interrupted"
        assert b"[DONE]" not in got
        if order == "p-first":
            await asyncio.wait_for(p.seen[0].gone.wait(), fakes.WAIT_S)
        await router.idle()
        outcome = {"order": order, "reason": "header", "outcome": "broken"}
        assert router.count("pd_router_requests_total", **outcome) == 1


async def test_a_json_answer_that_breaks_is_a_502() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_dies)
    d.go_on.set()
    async with running(p, d), serving([p], [d]) as router:
        status, _, body = await post(router)
        assert status == 502
        assert "broken" in orjson.loads(body)["error"]["message"]
        await router.idle()
        assert p.released == ["ticket-1"]


async def test_a_json_answer_that_breaks_is_made_again_by_another_d() -> None:
    p, bad = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_dies, node_id="bad")
    good = FakeNode("decode", fakes.decode, node_id="good")
    bad.go_on.set()
    async with running(p, bad, good), serving([p], [bad, good]) as router:
        answers = [await post(router) for _ in range(2)]
        assert [(status, headers["x-pd-decode"]) for status, headers, _ in answers] == [(200, "good")] * 2
        assert len(bad.seen) == 1


async def test_a_stream_without_done_is_not_taken_for_a_whole_one() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_forgets_done)
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.post(router.url + CHAT, json=BODY | {"stream": True}) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        assert router.count("pd_router_requests_total", order="p-first", reason="default", outcome="broken") == 1


async def test_a_nodes_own_error_event_passes_without_a_second_one() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_tells_error)
    async with running(p, d), serving([p], [d]) as router:
        _, _, body = await post(router, stream=True)
        assert body.count(b"error") == 1


async def test_a_stream_that_stands_still_is_ended() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), serving([p], [d], idle_timeout_s=0.2) as router:
        async with router.session.post(router.url + CHAT, json=BODY | {"stream": True}) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await asyncio.wait_for(d.seen[0].gone.wait(), fakes.WAIT_S)
        assert router.count("pd_router_leg_failures_total", leg="stream", node="fake-decode", kind="timeout") == 1


async def test_d_that_never_begins_is_given_up() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.silent)
    async with running(p, d), serving([p], [d], first_byte_timeout_s=0.2) as router:
        status, _, body = await post(router, stream=True)
        assert (status, orjson.loads(body)["error"]["code"]) == (502, "node_failed")
        await asyncio.wait_for(d.seen[0].gone.wait(), fakes.WAIT_S)


async def test_three_failures_in_a_row_put_a_node_out_for_a_while() -> None:
    p, d = FakeNode("prefill", fakes.hang_up), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], eject_after=3, eject_s=3600.0) as router:
        routes = [(await post(router))[1]["x-pd-route"] for _ in range(4)]
        assert routes == ["direct; reason=prefill-failed"] * 3 + ["direct; reason=no-prefill-node"]
        await poll(router)  # /health alone does not bring it back
        assert (await post(router))[1]["x-pd-route"] == "direct; reason=no-prefill-node"


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("order", ["p-first", "d-first"])
async def test_a_node_that_answers_is_not_ill(order: str, status: int) -> None:
    p, d = FakeNode("prefill", fakes.refuse(status)), FakeNode("decode", fakes.refuse(status))
    async with running(p, d), serving([p], [d], eject_after=1) as router:
        answers = [await post(router, order=order) for _ in range(3)]
        assert {answer[0] for answer in answers} == {502 if status in (500, 502) else status}
        for _, headers, body in answers:
            assert orjson.loads(body)["error"]["message"] == "no (fake-decode)"
            assert headers["x-pd-route"].startswith("direct" if order == "p-first" else "d-first")
        assert all(node["healthy"] for node in router.services.table.report())
        await router.idle()


async def test_slow_is_not_ill() -> None:
    p, d = FakeNode("prefill", fakes.silent), FakeNode("decode", fakes.silent)
    settings: dict[str, Any] = {"ticket_timeout_s": 0.1, "first_byte_timeout_s": 0.1, "eject_after": 1}
    async with running(p, d), serving([p], [d], **settings) as router:
        for _ in range(2):
            status, headers, _ = await post(router, stream=True)
            assert (status, headers["x-pd-route"]) == (502, "direct; reason=prefill-failed")
        assert all(node["healthy"] for node in router.services.table.report())


async def test_a_kept_connection_that_the_node_has_closed_costs_no_request() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        assert (await post(router))[0] == 200
        for node in (p, d):  # the same addresses, new processes as it were: every kept connection is stale
            await node.stop()
            await node.start()
        status, headers, _ = await post(router)
        assert (status, headers["x-pd-route"]) == (200, "p-first; reason=default")


@pytest.mark.parametrize("text", ["", "<h1>no healthy upstream</h1>"])
async def test_a_node_behind_a_proxy_that_does_not_reach_it_has_died(text: str) -> None:
    """Else a request that kills nodes would reach all of them."""

    async def dies(node: FakeNode, request: aiohttp.web.Request, seen: Any) -> aiohttp.web.StreamResponse:
        node.stand_in = text
        return await fakes.hang_up(node, request, seen)

    nodes = [FakeNode("mixed", dies, node_id=f"n{number}") for number in range(4)]
    async with running(*nodes), serving(mixed=nodes) as router:
        assert (await post(router))[0] == 500
        assert sum(len(node.seen) for node in nodes) == 2


async def test_a_node_without_a_place_for_a_connection_has_not_died() -> None:
    """Nodes without a place for a connection break it, and answer /health as any other request: with 503."""

    async def full(node: FakeNode, request: aiohttp.web.Request, seen: Any) -> aiohttp.web.StreamResponse:
        node.is_full = True
        return await fakes.hang_up(node, request, seen)

    bad = [FakeNode("mixed", full, node_id=f"bad {number}") for number in range(3)]
    good = FakeNode("mixed", fakes.decode, node_id="good")
    async with running(*bad, good), serving(mixed=[*bad, good]) as router:
        for _ in range(4):  # each may begin with another one
            assert (await post(router))[0] == 200
        assert sum(len(node.seen) for node in bad) >= 2
        for node in router.services.table.nodes:
            labels = {"leg": "decode", "node": node.node_id, "kind": "died"}
            assert not router.count("pd_router_leg_failures_total", **labels)
        await poll(router)
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
            await poll(router)
            assert (await post(router))[0] == 503
        node = router.services.table.nodes[0]
        assert node.reachable
        assert not node.failures_in_row
        assert router.count("pd_router_leg_failures_total", leg="decode", node=node.node_id, kind="own") == 1
        assert (await post(router))[0] == 200
