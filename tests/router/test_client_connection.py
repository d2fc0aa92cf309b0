"""The client's half of the token path: how requests come, what answers look like on the wire, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest

from pd_http.files import raise_file_limit
from pd_router.calls.client_call import ClientCall
from pd_router.calls.reply import CallReply
from pd_router.nodes.node_connection import NodeExchange
from pd_router.requests.legs import DecodeLeg, PrefillLeg
from pd_router.requests.routed_request import RoutedRequest
from pd_router.requests.splice import StreamSplice
from tests.http.answer import CHAT, HI
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import WAIT_S, FakeNode, running
from tests.router.router_process import Router, serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp
    from aiohttp import web

    from tests.router.fake_nodes import Seen

pytestmark = pytest.mark.anyio


def request(target: str = CHAT, *headers: str, version: str = "1.1", method: str = "POST", **fields: object) -> bytes:
    body = orjson.dumps(HI | fields)
    lines = [f"{method} {target} HTTP/{version}", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def calls() -> list[ClientCall]:
    """All that this process has, those that other tests have left, too."""
    return [one for one in gc.get_objects() if type(one) is ClientCall]


@contextlib.asynccontextmanager
async def connected(router: Router) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(WAIT_S):
            yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """The next answer on a connection, with the framing of its body removed."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    if "content-length" in headers:
        return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    if "transfer-encoding" not in headers:
        return int(lines[0].split()[1]), headers, await reader.read()
    pieces = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    assert await reader.readexactly(2) == b"\r\n"
    return int(lines[0].split()[1]), headers, b"".join(pieces)


async def test_requests_that_are_sent_ahead_are_answered_in_their_order() -> None:
    """Beside those that uvicorn serves, and however their bytes are cut."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    sent = b"".join(
        [request(stream=True), b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", request("/v1/completions"),
         request(model="nope"), b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n{",
         request(stream=True)]
    )  # fmt: skip
    async with running(p, d), serving([p], [d]) as router:
        for step in (len(sent), 100, 7):
            async with connected(router) as (reader, writer):

                async def send(writer: asyncio.StreamWriter, step: int) -> None:
                    for at in range(0, len(sent), step):
                        writer.write(sent[at : at + step])
                        await asyncio.sleep(0)

                sending = asyncio.create_task(send(writer, step))
                got = [await answer(reader) for _ in range(6)]
                await sending
            assert [status for status, _, _ in got] == [200, 200, 200, 404, 400, 200]
            assert got[0][2] == got[5][2] == fakes.WHOLE_STREAM
            assert orjson.loads(got[2][2])["object"] == "chat.completion"
        await router.idle()
        assert router.count("pd_router_requests_in_flight") == 0


async def test_a_client_that_has_sent_ahead_and_leaves_ends_the_request_under_way() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), serving([p], [d]) as router:
        async with connected(router) as (reader, writer):
            writer.write(request(stream=True) + request(stream=True))
            await reader.readuntil(b'"a"')
            writer.transport.abort()
            d.go_on.set()  # only a write shows that the client is gone: reading is paused behind a second request
            await until(lambda: router.count("pd_router_requests_in_flight") == 0)
        await router.idle()
        assert len(d.seen) == 1, "the second one is never begun"


@pytest.mark.parametrize(
    "target", [CHAT, "/v1/completions", CHAT + "?api-version=1", "/v1/chat/%63ompletions", "http://other" + CHAT]
)
async def test_every_spelling_of_the_path_is_served(target: str) -> None:
    d = FakeNode("mixed", fakes.decode)
    async with running(d), serving(mixed=[d]) as router, connected(router) as (reader, writer):
        writer.write(request(target))
        assert (await answer(reader))[0] == 200
        assert d.seen[0].path in (CHAT, "/v1/completions")
        for method, other, status in (("GET", target, 405), ("POST", target.replace("ompl", "omble"), 404)):
            writer.write(request(other, method=method))
            assert (await answer(reader))[0] == status


async def test_a_client_may_wait_until_its_body_is_wanted() -> None:
    d = FakeNode("mixed", fakes.decode)
    body = orjson.dumps(HI)
    async with running(d), serving(mixed=[d], max_body_mb=0.001) as router, connected(router) as (reader, writer):
        head = "POST {} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n"
        writer.write(head.format(CHAT, len(body)).encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body[:5])
        await writer.drain()
        writer.write(body[5:])
        assert (await answer(reader))[0] == 200
        assert d.seen[0].raw == body
        writer.write(head.format(CHAT, 5000).encode())
        assert (await answer(reader))[0] == 413, "it is not wanted"


async def test_a_body_in_chunks_is_read_within_its_bound() -> None:
    d, before = FakeNode("mixed", fakes.decode), calls()
    body = orjson.dumps(HI)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    async with running(d), serving(mixed=[d], max_body_mb=0.3) as router:
        async with connected(router) as (reader, writer):
            long = b'{"model": "demo", "prompt": "' + b"a" * 200_000 + b'"}'  # more than uvicorn buffers
            for sent in (body, long):
                pieces = [sent[at : at + 50_000] for at in range(0, len(sent), 50_000)]
                writer.write(head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")
                assert (await answer(reader))[0] == 200
            assert [seen.raw for seen in d.seen] == [body, long.replace(b": ", b":").replace(b", ", b",")]
        async with connected(router) as (reader, writer):
            writer.write(head + (b"c350\r\n" + b"a" * 50_000 + b"\r\n") * 7)
            status, _, body = await answer(reader)
            assert (status, orjson.loads(body)["error"]["code"]) == (413, "body_too_large")
            assert not any(one.body for one in calls() if one not in before), "its connection stays open"
        assert len(d.seen) == 2


@pytest.mark.parametrize(
    ("version", "header", "keeps"),
    [("1.1", "x: y", True), ("1.1", "connection: close", False), ("1.0", "connection: keep-alive", False)],
)
async def test_a_connection_is_kept_if_its_client_wants(version: str, header: str, keeps: bool) -> None:
    d = FakeNode("mixed", fakes.decode)
    async with running(d), serving(mixed=[d]) as router:
        for stream in (False, True):
            async with connected(router) as (reader, writer):
                writer.write(request(CHAT, header, version=version, stream=stream))
                status, headers, _ = await answer(reader)
                assert (status, headers.get("connection")) == (200, None if keeps else "close")
                assert "date" in headers
                if keeps:
                    writer.write(request())
                    assert (await answer(reader))[0] == 200
                else:
                    assert await reader.read() == b""


@pytest.mark.parametrize("allowed", [(), ("*",), ("https://page.example",), ("https://a.example", "https://b.example")])
async def test_pages_get_the_consent_that_every_other_endpoint_gives(allowed: tuple[str, ...]) -> None:
    d = FakeNode("mixed", fakes.decode)

    def consent(answer: aiohttp.ClientResponse) -> list[tuple[str, str]]:
        names = ("vary", "access-control-allow-origin", "access-control-expose-headers", "access-control-max-age")
        return sorted((name.lower(), value) for name, value in answer.headers.items() if name.lower() in names)

    async with running(d), serving(mixed=[d], allowed_origins=allowed) as router:
        for origin in (None, "https://page.example", "https://b.example"):
            headers = {} if origin is None else {"origin": origin}
            async with router.session.get(router.url + "/version", headers=headers) as answer:
                expected = consent(answer)
            assert bool(expected) == bool(allowed)
            for body in (HI, HI | {"stream": True}, {"model": "nope"}):
                async with router.session.post(router.url + CHAT, json=body, headers=headers) as answer:
                    await answer.read()
                    assert consent(answer) == expected


async def flood(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Chunks until the node's own buffers are full: `go_on` is set then. And the rest when they are read."""
    response = await fakes._open_stream(request)
    for index in range(NUM_CHUNKS):
        task = asyncio.ensure_future(response.write(fakes.chunk(str(index) + "x" * CHUNK)))
        await asyncio.wait({task}, timeout=None if node.go_on.is_set() else 0.1)
        if not task.done():
            node.go_on.set()
        await task
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


NUM_CHUNKS, CHUNK = 400, 1 << 16


@pytest.mark.long
async def test_a_slow_reader_slows_its_node_and_gets_every_byte() -> None:
    """What the router holds is bounded, the silence that follows is not the node's, and no other client waits."""
    d, before = FakeNode("mixed", flood), calls()
    async with running(d), serving(mixed=[d], idle_timeout_s=WAIT_S) as router, connected(router) as (reader, writer):
        transport = cast("Any", writer.transport)
        transport.pause_reading()
        writer.write(request(stream=True))
        await asyncio.wait_for(d.go_on.wait(), WAIT_S)  # every buffer on the way is full
        [call] = [one for one in calls() if one._task is not None and one not in before]
        assert call.transport.get_write_buffer_size() <= 1 << 20
        async with router.session.get(router.url + "/version") as other:
            assert other.status == 200
        transport.resume_reading()
        _, _, body = await answer(reader)
        expected = b"".join(fakes.chunk(str(index) + "x" * CHUNK) for index in range(NUM_CHUNKS))
        assert body == expected + b"data: [DONE]\n\n"
        assert router.count("pd_router_requests_total", order="direct", reason="no-prefill-node", outcome="ok") == 1


@pytest.mark.long
class StreamingNode(asyncio.Protocol):
    """A node that speaks just enough HTTP: the head and a first chunk for each request, which names itself."""

    def __init__(self, open_streams: list[StreamingNode]) -> None:
        self._open_streams = open_streams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET"):
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return
        self.name = data.partition(b'"prompt":"')[2].partition(b'"')[0]
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.send()
        self._open_streams.append(self)

    def send(self, end: bytes = b"") -> None:
        event = b"data: " + self.name + b"\n\n" + end
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event) + (b"0\r\n\r\n" if end else b""))


class StreamingClient(asyncio.Protocol):
    """Asks for a stream that has its number, and keeps what comes."""

    def __init__(self, number: int) -> None:
        self.body = b'{"stream":true,"prompt":"n%d"}' % number
        self.got = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("Any", transport)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(self.body) + self.body)

    def data_received(self, data: bytes) -> None:
        self.got += data
        if self.got.endswith(b"\r\n0\r\n\r\n") and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the router closed it"))


@pytest.mark.long
async def test_two_thousand_streams_at_once_in_one_process() -> None:
    """Each has its place and its own bytes; then none is left."""
    num_streams, num_chunks = 2000, 3
    num_files = raise_file_limit()
    if num_files < 4 * num_streams + 500:
        pytest.skip(f"this process may open {num_files} files")
    open_streams: list[StreamingNode] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: StreamingNode(open_streams), "127.0.0.1", 0, backlog=4096)
    node = FakeNode("mixed", fakes.decode)
    node.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with serving(mixed=[node], num_files=num_files, max_connections_per_address=4096) as router:
        host, port = router.url.removeprefix("http://").split(":")
        clients = []
        async with asyncio.timeout(6 * WAIT_S):
            for number in range(num_streams):
                _, client = await loop.create_connection(partial(StreamingClient, number), host, int(port))
                clients.append(client)
            await until(lambda: len(open_streams) == num_streams)
            await until(lambda: router.outstanding() == [(0, num_streams)])
            for step in range(num_chunks - 1):
                for stream in open_streams:
                    stream.send(b"data: [DONE]\n\n" if step == num_chunks - 2 else b"")
                await asyncio.sleep(0)
            await asyncio.gather(*(client.done for client in clients))
            for number, client in enumerate(clients):
                assert client.got.count(b"data: n%d\n\n" % number) == client.got.count(b"data: n") == num_chunks
            await router.idle()
            assert router.count("pd_router_requests_in_flight") == 0
            for client in clients:
                client.transport.close()
    server.close()
    for stream in open_streams:
        stream.transport.abort()


OF_REQUESTS = (ClientCall, CallReply, RoutedRequest, PrefillLeg, DecodeLeg, NodeExchange, StreamSplice, asyncio.Task)


@pytest.mark.long
async def test_a_request_leaves_nothing_to_search_for() -> None:
    """No cycles of references: the router searches for garbage seldom (YOUNG_OBJECTS)."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)

    def count() -> dict[str, int]:
        objects = gc.get_objects()
        return {kind.__name__: sum(type(one) is kind for one in objects) for kind in OF_REQUESTS}

    async with running(p, d), serving([p], [d]) as router, connected(router) as (reader, writer):

        async def ask(times: int) -> None:
            for _ in range(times):
                for fields in ({}, {"stream": True}, {"model": "nope"}, {"n": "x" * 100_000}):
                    writer.write(request(**fields))
                    await answer(reader)
                await router.idle()

        await ask(2)
        gc.collect()
        gc.disable()
        try:
            before = count()
            await ask(25)
            left = {name: number - before[name] for name, number in count().items()}
            assert max(left.values()) <= 2, "of a hundred requests: the last one may be held, by a log or its task"
        finally:
            gc.enable()
        services = router.services
        assert len(services.upstream.connections) <= 4


@pytest.mark.parametrize("decode", [fakes.refuse(503), fakes.decode_dies])
async def test_a_failure_leaves_nothing_to_search_for(decode: fakes.Script, caplog: pytest.LogCaptureFixture) -> None:
    """An exception that is kept refers by its traceback to the frames that keep it."""
    caplog.set_level("CRITICAL", logger="pd_router")  # records keep exceptions
    d = FakeNode("mixed", decode)
    d.go_on.set()

    def count() -> list[int]:
        objects = gc.get_objects()
        return [sum(type(one) is kind for one in objects) for kind in OF_REQUESTS[2:-1]]

    async with running(d), serving(mixed=[d]) as router:
        gc.collect()
        gc.disable()
        try:
            before = count()
            for _ in range(4):
                async with connected(router) as (reader, writer):
                    writer.write(request(CHAT, "connection: close", stream=True))
                    await reader.read()
                await router.idle()
            assert all(number <= old + 1 for old, number in zip(before, count(), strict=True))
        finally:
            gc.enable()
