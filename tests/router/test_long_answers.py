"""Answers that are not streamed and too long to be read whole: passed on piece by piece, never with a false end."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from pd_http.held_bytes import HeldBytes
from pd_http.node_report import REPORT_HEADER, NodeReport, encode_report
from pd_http.reply import PIECE_BYTES
from pd_router.nodes.node_connection import NodeExchange
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import WAIT_S, FakeNode, Seen, running
from tests.router.router_process import serving, until

if TYPE_CHECKING:
    from tests.router.router_process import Router

pytestmark = pytest.mark.anyio
PATHS = ("/v1/completions", "/v1/embeddings")
PART = b" " * (1 << 16)
PARTS = 8 * PIECE_BYTES // len(PART)
WHOLE = PIECE_BYTES // len(PART) - 1  # are read whole
REPORT = encode_report(NodeReport("demo", 11, 0, 5, 0.0, {}, "")).decode("latin-1")


class Long:
    """A node's script: `num_parts` of a JSON answer, then its end, or what `end` says."""

    def __init__(self, num_parts: int = PARTS, end: str = "", has_length: bool = False) -> None:
        self.num_parts = num_parts
        self.num_written = 0
        self.end = end
        self.has_length = has_length

    async def __call__(self, node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.body.get("kv_transfer_params", {}).get("do_remote_decode"):
            return await fakes.prefill(node, request, seen)
        response = web.StreamResponse(headers={"content-type": "application/json", REPORT_HEADER: REPORT})
        if self.has_length:
            response.content_length = len(PART) * self.num_parts + 2
        await response.prepare(request)
        await response.write(b"[")
        for _ in range(self.num_parts):
            await response.write(PART)
            self.num_written += 1
        if self.end:
            await node.go_on.wait()
            return await fakes.hang_up(node, request, seen)
        await response.write(b"]")
        await response.write_eof()
        return response


def cluster(*scripts: Long) -> list[FakeNode]:
    return [FakeNode("mixed", script, node_id=f"n{i}") for i, script in enumerate(scripts)]


async def read(router: Router, path: str) -> tuple[aiohttp.ClientResponse, bytes]:
    async with asyncio.timeout(3 * WAIT_S):
        async with router.session.post(router.url + path, json={"model": "demo", "prompt": "hi"}) as answer:
            return answer, await answer.read()


@pytest.mark.slow_cases
@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("has_length", [False, True])
async def test_a_long_answer_is_passed_on_and_counted(path: str, has_length: bool) -> None:
    nodes = cluster(Long(has_length=has_length))
    async with running(*nodes), serving(mixed=nodes, start_empty=True) as router:
        answer, body = await read(router, path)
        assert (answer.status, orjson.loads(body), len(body)) == (200, [], len(PART) * PARTS + 2)
        assert ("content-length" in answer.headers) == has_length
        assert answer.headers["content-type"] == "application/json"
        assert "x-pd-prefill" in answer.headers
        await router.idle()
        assert router.count("pd_router_prompt_tokens_total", model="demo") == 11, "the node's report"
        assert nodes[0].seen[0].finished


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_does_not_read_stops_the_node(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router reads no more, so the node holds the rest: a part is made when those before are taken."""
    script, pauses = Long(num_parts=20 * PARTS), list[int]()
    nodes = cluster(script)
    pause = NodeExchange.pause

    def paused(self: NodeExchange) -> None:
        pauses.append(script.num_written)
        pause(self)

    monkeypatch.setattr(NodeExchange, "pause", paused)
    async with running(*nodes), serving(mixed=nodes, start_empty=True) as router:
        async with router.session.post(router.url + path, json={"model": "demo", "prompt": "hi"}) as answer:
            assert answer.status == 200
            await until(lambda: len(pauses) > 1 and pauses[-1] > PIECE_BYTES // len(PART))
            assert pauses[-1] < script.num_parts // 4
            body = await answer.read()
        assert len(body) == len(PART) * script.num_parts + 2


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("has_length", [False, True])
async def test_a_node_that_dies_in_the_middle_gives_no_end(path: str, has_length: bool) -> None:
    nodes = cluster(Long(end="dies", has_length=has_length), Long(end="dies", has_length=has_length))
    async with running(*nodes), serving(mixed=nodes, start_empty=True) as router:
        async with router.session.post(router.url + path, json={"model": "demo", "prompt": "hi"}) as answer:
            assert answer.status == 200
            await answer.content.readexactly(PIECE_BYTES)
            for node in nodes:
                node.go_on.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await router.idle()
        assert sum(len(node.seen) for node in nodes) == 1, "no other node can go on with it"
        failures = router.services.metrics.legs.failures.collect()
        assert [one.value for metric in failures for one in metric.samples if one.name.endswith("_total")] == [1]


@pytest.mark.parametrize("path", PATHS)
async def test_a_node_that_dies_before_the_first_byte_is_replaced(path: str) -> None:
    """Up to PIECE_BYTES the client has nothing yet."""
    short = PIECE_BYTES // len(PART) // 2
    nodes = cluster(Long(short, end="dies"), Long(short))
    nodes[0].go_on.set()
    async with running(*nodes), serving(mixed=nodes, start_empty=True) as router:
        for _ in range(2):  # they take turns
            answer, body = await read(router, path)
            assert (answer.status, orjson.loads(body)) == (200, [])
            assert "content-length" in answer.headers
        assert nodes[0].seen


async def test_a_client_that_leaves_ends_the_work() -> None:
    nodes = cluster(Long(num_parts=40 * PARTS))
    async with running(*nodes), serving(mixed=nodes, start_empty=True) as router:
        async with router.session.post(router.url + PATHS[0], json={"model": "demo", "prompt": "hi"}) as answer:
            await answer.content.readexactly(PIECE_BYTES)
            answer.close()
        async with asyncio.timeout(WAIT_S):
            await nodes[0].seen[0].gone.wait()
        await router.idle()


async def not_reading(router: Router, path: str) -> socket.socket:
    """A client that has sent a request and reads nothing."""
    host, port = router.url.removeprefix("http://").split(":")
    client, content = socket.socket(), b'{"model":"demo","prompt":"hi"}'
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    client.send(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(content), content))
    return client


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("path", "num_parts"),
    [(PATHS[0], WHOLE), (PATHS[1], WHOLE), ("/tokenize", WHOLE), (PATHS[0], PARTS), (PATHS[1], PARTS)],
)
async def test_answers_that_clients_do_not_read_are_counted(path: str, num_parts: int) -> None:
    nodes = cluster(Long(num_parts))
    async with running(*nodes), serving(mixed=nodes, start_empty=True, max_held_mb=3.5) as router:
        held = router.services.held
        with await not_reading(router, path):
            await until(lambda: held.num_come > PIECE_BYTES * 7 // 8)
            answer, body = await read(router, path)
            assert (answer.status, orjson.loads(body)["error"]["code"]) == (503, "no_memory")
            if num_parts == WHOLE and path in PATHS:
                await router.idle()  # nothing but memory is kept for the client
        await until(lambda: held.num_come == 0)
        assert (await read(router, path))[0].status == 200


@pytest.mark.long
async def test_bodies_count_until_the_head_of_the_answer() -> None:
    node = FakeNode("mixed", fakes.decode_until_told)
    async with running(node), serving(mixed=[node], start_empty=True) as router:
        held = HeldBytes(1_000_000)
        object.__setattr__(router.services, "held", held)
        body: dict[str, Any] = {"model": "demo", "messages": [], "user": "x" * 300_000}
        url = router.url + "/v1/chat/completions"
        waiting = asyncio.create_task(router.session.post(url, json=body))
        await node.wait_seen(1)
        assert 300_000 < held.num_come < 301_000
        async with router.session.post(url, json=body) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "no_memory")
            assert int(answer.headers["retry-after"]) > 0
        small = asyncio.create_task(router.session.post(url, json=body | {"user": "x"}))
        await node.wait_seen(2)
        node.go_on.set()
        for one in (small, waiting):
            async with await one as answer:
                assert answer.status == 200
        await until(lambda: held.num_come == 0)
        node.go_on.clear()
        async with router.session.post(url, json=body | {"stream": True}) as answer:
            assert (answer.status, held.num_come) == (200, 0), "the answer has begun"
            node.go_on.set()
            await answer.read()
        node.script = fakes.refuse(400)
        async with router.session.post(url, json=body) as answer:
            assert answer.status == 400
        await until(lambda: held.num_come == 0)
