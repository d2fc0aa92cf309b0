"""Raw connections to a router or node that is a real process, and what they cost it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import psutil

from tests.cluster import Launched, Launcher
from tests.deadlines import HANG_S
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, Script, running

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
MB = 1_000_000


class Connection:
    """One TCP connection, which sends what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError once the other side has closed."""
        self._writer.write(data)
        await self._writer.drain()

    async def end(self) -> bytes:
        """All that comes until the other side closes; b"" also when it resets the connection."""
        async with asyncio.timeout(HANG_S):
            try:
                return await self._reader.read()
            except ConnectionError:
                return b""

    def is_open(self) -> bool:
        return not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()


def deaf(url: str, request: bytes) -> socket.socket:
    """A connection that has sent `request` and from which nothing is ever read."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=HANG_S)
    connection.sendall(request)
    return connection


def post(**fields: Any) -> bytes:
    """A whole request for a completion."""
    body = orjson.dumps(fields)
    return POST + b"content-length: %d\r\n\r\n" % len(body) + body


@dataclass
class Target:
    """A server under attack, and the node behind it when it is a router."""

    process: Launched
    url: str
    node: FakeNode | None = None
    tls: ssl.SSLContext | None = None  # trusts a server that speaks TLS

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.partition("://")[2].partition(":")
        return host, int(port)

    async def connect(self) -> Connection:
        return Connection(*await asyncio.open_connection(*self.address, ssl=self.tls))

    async def ask(self, **fields: Any) -> int:
        """The status that an ordinary client gets. Raises TimeoutError after HANG_S."""
        body = io.BytesIO(orjson.dumps({"prompt": "hi", "max_tokens": 2, **fields}))
        async with (
            asyncio.timeout(HANG_S),
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/completions", data=body, ssl=self.tls or True) as answer,
        ):
            await answer.read()
            return answer.status

    async def count(self, sample: str) -> float:
        """A sample of /metrics; 0 when there is none."""
        async with (
            asyncio.timeout(HANG_S),
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/metrics", ssl=self.tls or True) as answer,
        ):
            found = re.search(rf"^{re.escape(sample)} (\S+)$", await answer.text(), re.MULTILINE)
            return float(found[1]) if found else 0.0

    async def refusals(self, reason: str) -> float:
        name = "pd_http_refusals_total" if self.node is None else "pd_router_http_refusals_total"
        return await self.count(f'{name}{{reason="{reason}"}}')

    def num_files(self) -> int:
        """Open files of the process that serves HTTP."""
        return int(psutil.Process(self.process.pid).num_fds())

    def resident_bytes(self) -> int:
        """Of the process that serves HTTP."""
        return int(psutil.Process(self.process.pid).memory_info().rss)


@contextlib.asynccontextmanager
async def router(
    *flags: str, script: Script = fakes.decode, num_files: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Target]:
    """A router process before one fake decode node. `num_files`: what it may open; 0 for what this process may."""
    node = FakeNode("decode", script)
    command = [sys.executable, "-m", "pd_router", "--port=0", *flags]
    if num_files:
        command = ["sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh", *command]
    async with running(node):
        with Launcher() as launcher:
            process = launcher.start("router", [*command, f"--decode={node.url}", "--drain-s=1"])
            line = await asyncio.to_thread(process.wait_line, "router ready on ")
            try:
                yield Target(process, line.split()[-1], node, tls)
            finally:
                await asyncio.to_thread(launcher.close)


def error_in(answer: bytes) -> tuple[int, str]:
    """(status, `error.code`) of a whole answer in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer
    error = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]
