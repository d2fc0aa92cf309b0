"""The client of `python -m benchmarks router_cost`: a closed loop of connections, or one after the other."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import httptools
import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

BODY = {"model": "fake", "prompt": "word " * 400, "max_tokens": 64, "temperature": 0}
DEADLINE_S = 120.0  # of one round


@dataclass(slots=True)
class Round:
    """What one round saw. Times in seconds."""

    latencies_s: list[float] = field(default_factory=list)  # of whole answers
    first_s: list[float] = field(default_factory=list)  # to the first bytes of a body
    num_failed: int = 0  # answers of another status, or incomplete


class LoadConnection(asyncio.Protocol):
    """One connection of the client: sends the next request when the answer to the one before is complete."""

    def __init__(self, request: bytes, wants_stream: bool, take: list[int], seen: Round) -> None:
        """`take`: a list of one number, the requests that are left for all connections."""
        self._request = request
        self._wants_stream = wants_stream
        self._take = take
        self._seen = seen
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next()

    def _next(self) -> None:
        if not self._take[0]:
            self._transport.close()
            self.done.set_result(None)
            return
        self._take[0] -= 1
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b""
        self._begun_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._tail:
            self._seen.first_s.append(time.perf_counter() - self._begun_s)
        self._tail = (self._tail + body)[-32:]

    def on_message_complete(self) -> None:
        self._seen.latencies_s.append(time.perf_counter() - self._begun_s)
        is_whole = self._tail.rstrip().endswith(b"[DONE]" if self._wants_stream else b"}")
        self._seen.num_failed += self._parser.get_status_code() != 200 or not is_whole
        asyncio.get_running_loop().call_soon(self._next)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._seen.num_failed += 1
            self.done.set_result(None)


async def run_round(
    url: str,
    num_requests: int,
    concurrency: int,
    *,
    wants_stream: bool,
    fields: Mapping[str, object] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Round:
    """Send so many requests over `concurrency` connections. `fields`: more of the body.

    Raises TimeoutError after `deadline_s`.
    """
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    body = orjson.dumps({**BODY, "stream": wants_stream, **(fields or {})})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    seen, take = Round(), [num_requests]
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(deadline_s):
        made = [
            await loop.create_connection(lambda: LoadConnection(request, wants_stream, take, seen), host, port)
            for _ in range(min(concurrency, num_requests))
        ]
        await asyncio.gather(*(connection.done for _, connection in made))
    return seen


async def hold_connections(url: str, count: int) -> list[asyncio.Transport]:
    """So many connections that ask for nothing, of two addresses: one may hold three quarters of a router's places.

    Raises OSError if one is refused.
    """
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    loop = asyncio.get_running_loop()
    transports = []
    for at in range(count):
        address = (f"127.0.0.{1 + at % 2}", 0)
        transport, _ = await loop.create_connection(asyncio.Protocol, host, port, local_addr=address)
        transports.append(transport)
        if at % 100 == 0:
            await asyncio.sleep(0)
    return transports
