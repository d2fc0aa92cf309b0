"""Prefill nodes that queue, fall silent or die while D, or a router, waits for their ticket."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from pd_cluster.protocol.messages import NeedsPrefill, RequestFailed, TicketOpened, UseTicket
from pd_cluster.server.requests import keepalive
from tests.deadlines import until
from tests.server.fake_engine import WAIT_S, FakeEngine, Line, Script, says
from tests.server.live_server import running
from tests.server.prefill_patience import impatient
from tests.server.test_decode_leg import TEXT, complete, decode_node, engine_of_p, fallbacks, make_offer
from tests.server.test_prefill_endpoint import FOREIGN, STREAM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.live_server import Node

pytestmark = [pytest.mark.anyio, pytest.mark.long]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that wait for signs of life."""
    monkeypatch.setattr(keepalive, "BEAT_S", 0.01)


async def queueing(line: Line) -> None:
    """The ticket comes when the test says so."""
    await line.engine.released.wait()
    await says([5])(line)


@pytest.mark.usefixtures("quick")
async def test_a_ticket_that_is_late_is_announced_by_signs_of_life() -> None:
    async with running(FakeEngine(queueing)) as node:
        body = {"prompt": "a", "kv_transfer_params": FOREIGN}
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=STREAM) as response:
            first = await asyncio.wait_for(response.content.readany(), WAIT_S)
            assert (response.status, first[: len(keepalive.COMMENT)]) == (200, keepalive.COMMENT)
            node.engine.released.set()
            rest = await asyncio.wait_for(response.content.read(), WAIT_S)
        names = [line for line in (first + rest).split(b"\n") if line.startswith(b"event: ")]
        assert names == [b"event: ticket", b"event: done"]
        ticket_at = (first + rest).index(b"event: ticket")
        assert keepalive.COMMENT not in (first + rest)[ticket_at:]


@pytest.mark.usefixtures("quick")
async def test_a_grammar_that_waits_for_its_check_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(FakeEngine(says([5]))) as node:

        async def late(grammar: str, *_: object) -> None:
            await node.engine.released.wait()

        monkeypatch.setattr(node.state.grammar_checks, "check", late)
        params = FOREIGN | {"sampling": {"max_tokens": 4, "grammar": 'start: "a"'}}
        body = {"prompt": "a", "kv_transfer_params": params}
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=STREAM) as response:
            first = await asyncio.wait_for(response.content.readany(), WAIT_S)
            assert (response.status, first[: len(keepalive.COMMENT)]) == (200, keepalive.COMMENT)
            assert not node.engine.requests
            node.engine.released.set()
            assert b"event: ticket" in await asyncio.wait_for(response.content.read(), WAIT_S)


@pytest.mark.usefixtures("quick")
async def test_a_failure_after_signs_of_life_is_an_event_with_its_status() -> None:
    async def refuses(line: Line) -> None:
        await line.engine.released.wait()
        line.push(RequestFailed(line.request.request_id, "InvalidRequest", "too long", "prompt"))

    async with running(FakeEngine(refuses)) as node:
        body = {"prompt": "a", "kv_transfer_params": FOREIGN}
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=STREAM) as response:
            assert response.status == 200  # it begins with the first sign of life
            node.engine.released.set()
            text = await response.text()
    event = text[text.index("event: ") :].split("\n")
    told = json.loads(event[1].removeprefix("data: "))
    assert (event[0], told["status"], told["error"]["param"]) == ("event: error", 400, "prompt")


@pytest.mark.usefixtures("quick")
async def test_d_waits_for_a_node_that_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a silent one would be waited for: each sign of life ends a wait and begins another one."""
    waits = impatient(monkeypatch, lambda _: False)
    async with running(FakeEngine(queueing, engine_id="engine-of-p"), node_id="p") as p, decode_node() as d:
        answer = asyncio.create_task(complete(d, {"offer": make_offer(p.url)}))
        await until(lambda: len(waits) > 10)
        p.engine.released.set()
        status, _, headers = await answer
        assert (status, headers["x-pd-prefill"]) == (200, "engine-of-p")


async def raw_node(answer: Any) -> web.AppRunner:
    """A fake P: each request gets `answer(request)`; the probe of its health does too."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


def url_of(runner: web.AppRunner) -> str:
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def silent_url() -> AsyncIterator[str]:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    runner = await raw_node(never)
    yield url_of(runner)
    await runner.cleanup()


@pytest.fixture
async def dying_urls() -> AsyncIterator[list[str]]:
    """Three nodes that break every connection off, that of the probe too."""

    async def breaks(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    runners = [await raw_node(breaks) for _ in range(3)]
    yield [url_of(runner) for runner in runners]
    for runner in runners:
        await runner.cleanup()


async def test_d_leaves_a_silent_node_for_the_next_one(silent_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch, lambda url: url.startswith(silent_url))
    async with running(engine_of_p(), node_id="p") as p, decode_node() as d:
        status, _, headers = await complete(d, {"offer": make_offer(silent_url, p.url)})
        assert (status, headers["x-pd-prefill"]) == (200, "engine-of-p")
        assert fallbacks(d, "peer_frozen") == 1


@pytest.mark.parametrize("has_ticket", [False, True])
async def test_d_asks_no_third_prefill_node_when_two_stood_still(
    has_ticket: bool, silent_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a ticket, or after it, while their KV is read. D computes, because behind a cut network they look so."""
    impatient(monkeypatch, lambda url: url.startswith(silent_url))
    async with (
        running(FakeEngine(opens_only, engine_id="one"), node_id="one") as one,
        running(FakeEngine(opens_only, engine_id="two"), node_id="two") as two,
        running(engine_of_p(), node_id="p") as p,
        decode_node(loses_each_load("peer_frozen: no progress")) as d,
    ):
        frozen = [one.url, two.url] if has_ticket else [silent_url, silent_url]
        status, _, headers = await complete(d, {"offer": make_offer(*frozen, p.url)})
        assert (status, headers["x-pd-prefill"]) == (200, "d")
        assert fallbacks(d, "peer_frozen") == 2


async def test_d_stops_when_two_prefill_nodes_died_of_a_request(dying_urls: list[str]) -> None:
    async with decode_node() as d:
        status, answer, _ = await complete(d, {"offer": make_offer(*dying_urls)})
        assert (status, answer["error"]["code"]) == (500, "nodes_died")
        assert (fallbacks(d, "peer_died"), fallbacks(d, "nodes_died")) == (2, 1)


def loses_each_load(reason: str) -> Script:
    """D's engine: each load fails like this. When it is to prefill by itself, it does."""

    async def script(line: Line) -> None:
        said = ""
        while True:
            line.push(NeedsPrefill(line.request.request_id, 0, said))
            if not isinstance(await line.heard(), UseTicket):
                await says([5])(line)
                return
            said = reason

    return script


async def opens_only(line: Line) -> None:
    line.push(TicketOpened(line.request.request_id, line.ticket()))
    await asyncio.Event().wait()


async def test_prefill_nodes_that_live_and_cannot_be_reached_for_kv_have_not_died() -> None:
    """The ports for KV are closed, to all nodes and for all requests: D prefills by itself."""
    lost = loses_each_load("unreachable: no data connection")
    async with (
        running(FakeEngine(opens_only, engine_id="one"), node_id="one") as one,
        running(FakeEngine(opens_only, engine_id="two"), node_id="two") as two,
        decode_node(lost, max_node_deaths=1) as d,
    ):
        status, _, headers = await complete(d, {"offer": make_offer(one.url, two.url)})
        assert (status, headers["x-pd-prefill"]) == (200, "d")
        assert (fallbacks(d, "unreachable"), fallbacks(d, "nodes_died")) == (2, 0)


async def test_a_prefill_node_that_has_given_up_by_its_own_word_has_not_died() -> None:
    """It drains, tells so and is gone: its KV cannot be reached, and its /health is that of its next boot."""
    runners = []

    async def drains(request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.json_response({"status": "starting"})
        async with p.session.post(p.url + request.path, data=await request.read(), headers=STREAM) as one:
            ticket = await one.content.readuntil(b"\n\n")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ticket + b'event: error\ndata: {"error": {"code": "engine_unavailable"}}\n\n')
        return response

    lost = loses_each_load("unreachable: no data connection")
    async with (
        running(FakeEngine(opens_only, engine_id="one"), node_id="one") as p,
        decode_node(lost, max_node_deaths=1) as d,
    ):
        runners = [await raw_node(drains) for _ in range(2)]
        status, _, headers = await complete(d, {"offer": make_offer(*map(url_of, runners))})
        assert (status, headers["x-pd-prefill"]) == (200, "d")
        assert (fallbacks(d, "unreachable"), fallbacks(d, "nodes_died")) == (2, 0)
        for runner in runners:
            await runner.cleanup()


async def test_loads_of_a_prefill_node_that_died_count_too() -> None:
    nodes: list[Node]
    async with (
        running(FakeEngine(opens_only, engine_id="one"), node_id="one") as one,
        running(FakeEngine(opens_only, engine_id="two"), node_id="two") as two,
        decode_node(loses_each_load("peer_restarted: another epoch lives there now")) as d,
    ):
        nodes = [one, two]
        params = {"offer": make_offer(*(node.url for node in nodes))}
        status, answer, _ = await complete(d, params, prompt=TEXT)
        assert (status, answer["error"]["code"]) == (500, "nodes_died")
        for node in nodes:
            await asyncio.wait_for(node.engine.aborts.get(), WAIT_S)
