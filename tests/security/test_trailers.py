"""What follows a request's body decides nothing (RFC 9110, 6.5.1): proxies filter headers, and not trailers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING

import orjson
import pytest

from tests.deadlines import HANG_S
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode
from tests.router.fake_nodes import running as nodes
from tests.router.router_process import serving
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import running

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SECRET = "pd-a-secret"
TRAILERS = (
    "host: localhost", f"authorization: Bearer {SECRET}", "x-request-id: of-the-trailer", "x-pd-route: direct",
    "x-pd-frames: 1", "x-pd-ticket: stream", "expect: 100-continue", "cookie: a=b",
)  # fmt: skip


async def post(url: str, *headers: str, trailers: tuple[str, ...] = TRAILERS, host: str = "host: x") -> bytes:
    """The answer to a body in chunks with these trailers."""
    body = orjson.dumps({"model": "demo", "prompt": "hi", "max_tokens": 1})
    lines = ["POST /v1/completions HTTP/1.1", host, "transfer-encoding: chunked", "connection: close", *headers, "", ""]
    sent = "\r\n".join(lines).encode() + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    sent += "".join(f"{trailer}\r\n" for trailer in trailers).encode() + b"\r\n"
    address, _, port = url.removeprefix("http://").partition(":")
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection(address, int(port))
        writer.write(sent[:-20])
        writer.write(sent[-20:])
        try:
            return await reader.read()
        finally:
            writer.close()


@pytest.mark.parametrize("offer", [(), ("upgrade: h2c",)])
async def test_trailers_are_dropped_by_a_router(offer: tuple[str, ...], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"name": "one", "sha256": hashlib.sha256(SECRET.encode()).hexdigest()}))
    node = FakeNode("mixed", fakes.decode)
    offer = ("connection: upgrade, close", *offer) if offer else ()
    async with nodes(node), serving(mixed=[node]) as router:
        answer = await post(router.url, *offer)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert b"of-the-trailer" not in answer
        (seen,) = node.seen
        sent = {name.lower(): value for name, value in seen.headers.items()}
        assert sent["x-request-id"] != "of-the-trailer"
        assert not sent.keys() & {"authorization", "cookie", "expect"}
    async with nodes(node), serving(mixed=[node], api_keys=str(keys)) as router:
        assert (await post(router.url, *offer)).startswith(b"HTTP/1.1 401")
        assert (await post(router.url, *offer, f"authorization: Bearer {SECRET}")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("offer", [(), ("connection: upgrade, close", "upgrade: h2c")])
async def test_trailers_are_dropped_by_a_node(offer: tuple[str, ...]) -> None:
    async with running(FakeEngine(says([5]))) as node:
        answer = await post(node.url, *offer)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"of-the-trailer" not in head
        assert b"content-type: application/json" in head
        assert orjson.loads(body)["object"] == "text_completion"


@pytest.mark.parametrize(
    ("host", "coding", "status"),
    [
        ("x-no: host", "x: y", b"400"),
        ("host: x\r\nhost: y", "x: y", b"400"),
        ("host: x", "transfer-encoding: gzip, chunked", b"501"),
    ],
)
async def test_heads_that_are_refused_by_both(host: str, coding: str, status: bytes) -> None:
    node = FakeNode("mixed", fakes.decode)
    async with nodes(node), serving(mixed=[node]) as router, running(FakeEngine(says([5]))) as real:
        for url in (router.url, real.url):
            lines = ["POST /v1/completions HTTP/1.1", host, coding, "connection: close", "", ""]
            address, _, port = url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(address, int(port))
            writer.write("\r\n".join(lines).encode())
            async with asyncio.timeout(HANG_S):
                assert (await reader.read()).split()[1] == status
            writer.close()
        assert not node.seen
