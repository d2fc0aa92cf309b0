"""What HTTP lets a server ignore is ignored, and what it demands is done: at routers and nodes, on the wire.

The sections are those of RFC 9110 and 9112.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_http.refusal import Refusal
from pd_http.request_head import RequestHead, origin_form
from tests.deadlines import HANG_S
from tests.router.router_process import serving
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio
WAIT_S = HANG_S
CHAT = "/v1/chat/completions"
BODY = orjson.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
STREAM = orjson.dumps(orjson.loads(BODY) | {"stream": True})
H2C = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)
UPGRADES = {
    "java": H2C,
    "curl": ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA"),
    "two_headers": ("Connection: keep-alive", "Connection: upgrade", "Upgrade: h2c"),
    "websocket": ("Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    "tls": ("Connection: Upgrade", "Upgrade: TLS/1.0, HTTP/1.1"),
    "unknown": ("Connection: UPGRADE", "Upgrade: chat/7, x"),
    "no_connection_token": ("Upgrade: h2c",),
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["router", "node"])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The address of a node, and of a router before it."""
    async with running(FakeEngine(says([5]))) as node:
        if request.param == "node":
            yield node.url
            return
        async with serving(mixed=[node]) as router:
            yield router.url


@dataclass(frozen=True)
class Answer:
    version: str
    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """One connection of a client that writes its bytes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    def send(self, data: bytes, step: int = 0) -> None:
        step = step or len(data)
        for at in range(0, len(data), step):
            self._writer.write(data[at : at + step])

    async def head(self) -> tuple[str, int, dict[str, str]]:
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        version, status = first.split(" ")[:2]
        pairs = (line.partition(": ") for line in lines if line)
        return version, int(status), {name.lower(): value for name, _, value in pairs}

    async def answer(self, has_body: bool = True) -> Answer:
        version, status, headers = await self.head()
        if not has_body:
            return Answer(version, status, headers, b"")
        if "content-length" in headers:
            return Answer(version, status, headers, await self.reader.readexactly(int(headers["content-length"])))
        if "transfer-encoding" not in headers:
            return Answer(version, status, headers, await self.reader.read())
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return Answer(version, status, headers, body)

    async def has_ended(self) -> bool:
        return await self.reader.read() == b""


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Wire]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(WAIT_S):
            yield Wire(reader, writer)
    finally:
        writer.close()


def post(
    *headers: str, body: bytes = BODY, target: str = CHAT, version: str = "1.1", chunks: bool = False, host: str = "x"
) -> bytes:
    lines = [f"POST {target} HTTP/{version}", *([f"Host: {host}"] if host else []), "Content-Type: application/json"]
    lines += ["Transfer-Encoding: chunked" if chunks else f"Content-Length: {len(body)}", *headers, "", ""]
    sent = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:])) + b"0\r\n\r\n"
    return "\r\n".join(lines).encode() + (sent if chunks else body)


GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.long
@pytest.mark.parametrize("offer", UPGRADES.values(), ids=UPGRADES)
async def test_an_offer_to_upgrade_is_ignored(url: str, offer: tuple[str, ...]) -> None:
    """Section 7.8. Bodies of a length and in chunks, none, requests sent ahead, bytes cut anywhere."""
    bare = ("\r\n".join(["GET /v1/models HTTP/1.1", "Host: x", *offer]) + "\r\n\r\n").encode()
    sent = post(*offer) + bare + post(*offer, chunks=True) + post(*offer, body=STREAM) + GET + post(*offer) + post()
    for step in (len(sent), 11):
        async with connected(url) as wire:
            wire.send(sent, step)
            answers = [await wire.answer() for _ in range(7)]
        assert [(got.version, got.status) for got in answers] == [("HTTP/1.1", 200)] * 7
        assert [got.headers.get("connection") for got in answers] == [None] * 7
        assert [b'"chat.completion' in got.body for got in answers] == [True, False, True, True, False, True, True]


@pytest.mark.long
async def test_after_an_offer_only_requests_are_read(url: str) -> None:
    """The bytes after the body are those of the next request, in HTTP/1.1."""
    async with connected(url) as wire:
        wire.send(post(*H2C))
        assert (await wire.answer()).status == 200
        wire.send(b"PRI * HTTP/2.0\r\n\r\n")
        assert (await wire.answer()).status == 400
        assert await wire.has_ended()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_a_client_of_http_1_0_gets_no_chunks(url: str, version: str, body: bytes) -> None:
    """9112, 6.1 and 7: it could not read them. The default of nginx, and `ab`, speak 1.0 and name no host."""
    async with connected(url) as wire:
        wire.send(post(version=version, body=body, host="" if version == "1.0" else "x"))
        got = await wire.answer()
        assert got.status == 200
        assert b"chat.completion" in got.body
        assert ("transfer-encoding" in got.headers) == (version == "1.1" and body is STREAM)
        assert got.body.endswith(b"data: [DONE]\n\n") == (body is STREAM)
        if version == "1.0":
            assert got.headers["connection"] == "close"
            assert await wire.has_ended()


@pytest.mark.parametrize("target", ["/metrics", "/v1/models", "/nothing"])
async def test_a_get_of_http_1_0_ends_with_the_connection(url: str, target: str) -> None:
    async with connected(url) as wire:
        wire.send(f"GET {target} HTTP/1.0\r\n\r\n".encode())
        got = await wire.answer()
        assert got.status == (404 if target == "/nothing" else 200)
        assert "transfer-encoding" not in got.headers
        assert got.body


async def test_http_1_0_gets_no_interim_answer(url: str) -> None:
    """9110, 10.1.1."""
    async with connected(url) as wire:
        wire.send(post("Expect: 100-continue", version="1.0"))
        assert (await wire.answer()).status == 200


async def test_expectations(url: str) -> None:
    """9110, 10.1.1: one is met, others are refused."""
    async with connected(url) as wire:
        head, _, body = post("Expect: 100-Continue").partition(b"\r\n\r\n")
        wire.send(head + b"\r\n\r\n")
        assert (await wire.head())[1] == 100
        wire.send(body)
        assert (await wire.answer()).status == 200
        wire.send(post("Expect: a-miracle"))
        got = await wire.answer()
        assert (got.status, orjson.loads(got.body)["error"]["code"]) == (417, "expectation")


@pytest.mark.parametrize(
    ("coding", "status"), [("gzip, chunked", 501), ("x-zip,Chunked", 501), ("deflate", 400), ("chunked, gzip", 400)]
)
async def test_unknown_transfer_codings(url: str, coding: str, status: int) -> None:
    """9112, 6.1 and 6.3: without chunks at last the end of the body cannot be found."""
    async with connected(url) as wire:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: {coding}\r\n\r\n0\r\n\r\n"
        wire.send(head.encode())
        assert (await wire.answer()).status == status
        assert await wire.has_ended()


@pytest.mark.parametrize("target", [CHAT, "/tokenize", "/v1/messages"])
async def test_a_coded_body_is_415(url: str, target: str) -> None:
    """9110, 8.4 and 15.5.16. `identity` is no coding."""
    async with connected(url) as wire:
        wire.send(post("Content-Encoding: gzip", body=gzip.compress(BODY), target=target))
        got = await wire.answer()
        assert (got.status, got.headers["accept-encoding"]) == (415, "identity")
        assert b"gzip" in got.body
        wire.send(post("Content-Encoding: identity"))
        assert (await wire.answer()).status == 200


@pytest.mark.parametrize("kind", ["application/json; charset=UTF-8", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_is_json_whatever_its_type(url: str, kind: str) -> None:
    lines = [f"POST {CHAT} HTTP/1.1", "HOST: x", f"CONTENT-TYPE: {kind}", f"content-length: {len(BODY) + 3}"]
    async with connected(url) as wire:
        wire.send("\r\n".join(["", "", *lines, "Accept-Encoding: gzip, br", "", ""]).encode() + b"\xef\xbb\xbf" + BODY)
        got = await wire.answer()
        assert (got.status, got.headers.get("content-encoding")) == (200, None)


async def test_targets_in_absolute_form(url: str) -> None:
    """9112, 3.2.2."""
    async with connected(url) as wire:
        for target in (f"{url}{CHAT}", f"HTTP://any.name{CHAT}?x=1"):
            wire.send(post(target=target))
            assert (await wire.answer()).status == 200
        wire.send(b"GET http://any.name/v1/models HTTP/1.1\r\nHost: any.name\r\n\r\n")
        assert b'"demo"' in (await wire.answer()).body
        wire.send(b"GET http://any.name HTTP/1.1\r\nHost: any.name\r\n\r\n")
        assert (await wire.answer()).status in (404, 200, 307)


async def test_options_of_the_server(url: str) -> None:
    """9110, 9.3.7."""
    async with connected(url) as wire:
        wire.send(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
        got = await wire.answer()
        assert (got.status, got.headers["allow"], got.body) == (200, "GET, HEAD, POST, OPTIONS", b"")
        wire.send(GET)
        assert (await wire.answer()).status == 200


@pytest.mark.parametrize("target", ["/health", "/v1/models", "/metrics", "/version", "/nothing"])
async def test_head_is_a_get_without_its_body(url: str, target: str) -> None:
    """9110, 9.1 and 9.3.2: every server has GET and HEAD."""
    async with connected(url) as wire:
        wire.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        shown = await wire.answer()
        wire.send(f"HEAD {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + GET)
        told = await wire.answer(has_body=False)
        assert (told.status, told.headers.get("content-type")) == (shown.status, shown.headers.get("content-type"))
        assert (await wire.answer()).status == 200


@pytest.mark.parametrize("hosts", [(), ("a", "b")])
async def test_a_request_has_one_host(url: str, hosts: tuple[str, ...]) -> None:
    """9112, 3.2: 400 is demanded."""
    async with connected(url) as wire:
        wire.send(post(*(f"Host: {host}" for host in hosts), host=""))
        got = await wire.answer()
        assert (got.status, orjson.loads(got.body)["error"]["code"]) == (400, "host")


@pytest.mark.long
@given(st.text("abcxyz019.-", min_size=1), st.text("abc/%?=&*", max_size=12))
def test_the_absolute_form_is_the_origin_form_after_an_authority(host: str, rest: str) -> None:
    path = "/" + rest
    for scheme in ("http", "HTTPS"):
        assert origin_form(f"{scheme}://{host}{path}".encode()) == path.encode()
    assert origin_form(f"http://{host}".encode()) == b"/"
    assert origin_form(f"http://{host}?q".encode()) == b"/?q"
    assert origin_form(b"*") == b"*"


def test_heads() -> None:
    host = (b"host", b"x")
    assert RequestHead.of("1.1", [host, (b"content-length", b"7")]) == RequestHead(7)
    assert RequestHead.of("1.1", [host, (b"transfer-encoding", b" Chunked ")]) == RequestHead(None)
    assert RequestHead.of("1.0", [(b"expect", b"x")]) == RequestHead(0)
    assert RequestHead.of("0.9", [host]) is Refusal.BAD_REQUEST
    assert RequestHead.of(
        "1.1", [host, (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"\x0bchunked")]
    ) is (Refusal.BAD_REQUEST)
