"""/v1/messages and /v1/responses through the router: the ends of streams, and errors in the shape of their API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from pd_http.dialects import COUNT_TOKENS, MESSAGES, RESPONSES
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving
from tests.server.sse import parse_events

if TYPE_CHECKING:
    from tests.router.fake_nodes import Seen


async def collect(answer: aiohttp.ClientResponse, got: bytearray) -> None:
    while part := await answer.content.readany():
        got += part


pytestmark = pytest.mark.anyio
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    RESPONSES: {"model": "demo", "input": "hi", "max_output_tokens": 5},
}
LAST = {MESSAGES: "message_stop", RESPONSES: "response.completed"}


async def ask(router: Router, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
    async with router.session.post(router.url + path, json=BODIES[path] | more) as answer:
        return answer.status, orjson.loads(await answer.read())


def stream(*events: bytes) -> fakes.Script:
    """These bytes, without frames, as engines of others write them."""

    async def script(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await fakes._open_stream(request)
        for event in events:
            await response.write(event)
        await response.write_eof()
        return response

    return script


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_stream_passes_as_it_is(path: str) -> None:
    events = [b'event: a\ndata: {"n":1}\n\n', f"event: {LAST[path]}\ndata: {{}}\n\n".encode()]
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", stream(*events))
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.post(router.url + path, json=BODIES[path] | {"stream": True}) as answer:
            assert await answer.read() == b"".join(events)
        limit = "max_tokens" if path == MESSAGES else "max_output_tokens"
        assert (p.seen[0].body[limit], d.seen[0].body[limit]) == (1, 5)
        assert {seen.body["model"] for seen in (*p.seen, *d.seen)} == {"demo"}
        assert router.count("pd_router_requests_total", order="p-first", reason="default", outcome="ok") == 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_breaks_ends_with_the_error_of_its_api(path: str) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", stream(b'event: a\ndata: {"n":1}\n\n'))
    async with running(p, d), serving([p], [d]) as router:
        got = bytearray()
        async with router.session.post(router.url + path, json=BODIES[path] | {"stream": True}) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):  # the connection ends before the answer does
                await collect(answer, got)
        name, data = parse_events(got.decode())[-1]
        assert (name, data["type"], data["error"]["code"]) == ("error", "error", "stream_interrupted")
        assert router.count("pd_router_requests_total", order="p-first", reason="default", outcome="broken") == 1


async def test_a_full_queue_is_anthropic_s_overload_and_another_node_is_asked() -> None:
    p = FakeNode("prefill", fakes.prefill)
    full, free = FakeNode("decode", fakes.refuse(529), node_id="full"), FakeNode("decode", fakes.decode, node_id="free")
    async with running(p, full, free):
        async with serving([p], [full, free]) as router:
            assert [(await ask(router, MESSAGES))[0] for _ in range(2)] == [200, 200]
            assert len(full.seen) == 1
        async with serving([p], [full]) as router:
            assert (await ask(router, MESSAGES))[0] == 529


async def test_errors_of_the_router_have_the_shape_of_their_api() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        status, body = await ask(router, MESSAGES, model="other")
        assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
        status, body = await ask(router, RESPONSES, model="other")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        async with router.session.post(router.url + COUNT_TOKENS, data=b"[]") as answer:
            assert (answer.status, (await answer.json())["type"]) == (400, "error")
        async with router.session.get(router.url + MESSAGES) as answer:
            assert (answer.status, (await answer.json())["type"]) == (405, "error")
