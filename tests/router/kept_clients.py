"""Clients that keep their connections and send without a pause, and a balancer that spreads these over routers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import orjson
import requests

from tests.router.fake_nodes import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 2}
CHUNK_BYTES = 1 << 16


class Balancer:
    """As a Service of Kubernetes: a new connection goes to a target that is listed; an open one stays where it is.

    `pick`: for clients that connect to the target themselves, as behind kube-proxy. `url`: of a relay for the others.
    """

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.url = ""
        self._turns = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    def pick(self) -> tuple[str, int]:
        host, _, port = self.targets[next(self._turns) % len(self.targets)].removeprefix("http://").partition(":")
        return host, int(port)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Balancer]:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0, backlog=512)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.pick())
            await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))
        except OSError:
            reset(writer)
        finally:
            self._tasks.discard(task)
            for one in (writer, far_writer):
                if one is not None:
                    one.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection as a target does that resets its own."""
    with contextlib.suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()


@dataclass
class Tally:
    """What clients saw."""

    num_right: int = 0
    num_told: int = 0  # answers that said `connection: close`
    failures: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def repeat(self, name: str, ask: Callable[[], Awaitable[str]]) -> None:
        """One request after the other. `ask` returns the answer's Connection header."""
        while not self.stop.is_set():
            try:
                async with asyncio.timeout(WAIT_S):
                    told = await ask()
                self.num_right += 1
                self.num_told += told == "close"
            except Exception as error:
                self.failures.append(f"{name}: {error!r}")


class RawClient:
    """One connection after the other, each as long as its server lets it. Whatever goes wrong is seen as it is."""

    def __init__(self, balancer: Balancer, path: str = PATH, body: dict[str, Any] = BODY) -> None:
        self._balancer = balancer
        content = orjson.dumps(body)
        self.request = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __call__(self) -> str:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._balancer.pick())
        assert self._reader is not None
        try:
            self._writer.write(self.request)
            _, headers, _ = await read_answer(self._reader)
            told = headers.get("connection", "")
            if told == "close":
                assert await self._reader.read() == b"", "and no reset"
                self.close()
        except BaseException:
            self.close()
            raise
        return told

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer with status 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    line, *lines = head.strip().split("\r\n")
    headers = dict(one.lower().split(": ", 1) for one in lines)
    status = int(line.split()[1])
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        assert await reader.readexactly(2) == b"\r\n"
    assert status == 200, (status, body)
    return status, headers, body


@contextlib.asynccontextmanager
async def sending(balancer: Balancer, each: int) -> AsyncIterator[Tally]:
    """`each` connections by each of four clients: bare sockets, aiohttp, httpx and requests, in a thread each."""
    tally, tasks = Tally(), []
    url = balancer.url + PATH
    limits = httpx.Limits(max_connections=each, max_keepalive_connections=each)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=each)) as session,
        httpx.AsyncClient(limits=limits, trust_env=False) as client,
    ):

        async def by_aiohttp() -> str:
            async with session.post(url, json=BODY) as answer:
                answer.raise_for_status()
                await answer.read()
                return answer.headers.get("connection", "")

        async def by_httpx() -> str:
            answer = (await client.post(url, json=BODY)).raise_for_status()
            return str(answer.headers.get("connection", ""))

        raw = [RawClient(balancer) for _ in range(each)]
        blocking = [requests.Session() for _ in range(min(each, 4))]
        asks: list[tuple[str, Any]] = [("raw", one) for one in raw]
        asks += [("requests", _in_thread(one, url)) for one in blocking]
        for _ in range(each):
            asks += [("aiohttp", by_aiohttp), ("httpx", by_httpx)]
        tasks = [asyncio.create_task(tally.repeat(name, ask)) for name, ask in asks]
        try:
            yield tally
        finally:
            tally.stop.set()
            await asyncio.gather(*tasks)
            for one in raw:
                one.close()
            for another in blocking:
                another.close()


def _in_thread(session: requests.Session, url: str) -> Callable[[], Awaitable[str]]:
    session.trust_env = False

    def ask() -> str:
        answer = session.post(url, json=BODY, timeout=WAIT_S)
        answer.raise_for_status()
        return answer.headers.get("connection", "")

    return lambda: asyncio.to_thread(ask)
