"""The least that a router in Python can cost: two legs over the same sockets, and nothing is understood.

It waits for the end of each message as cheaply as the fake nodes allow, passes P's answer to D and D's to the client.
What a router takes beyond this is its own doing; what this takes is the kernel's and the event loop's.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import uvloop

LAST_CHUNK = b"0\r\n\r\n"
_HEALTH = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
_P_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\nx-pd-ticket: stream\r\ncontent-length: %d\r\n\r\n"
_D_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: d\r\ncontent-length: %d\r\n\r\n"


class FloorLeg(asyncio.Protocol):
    """A connection to a node. Everything that arrives goes to `heard`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.received(data)

    def received(self, data: bytes) -> None:
        """Set by the connection of a client."""


class FloorConnection(asyncio.Protocol):
    """A client's connection, with a leg to P and one to D of its own."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._urls = (prefill, decode)
        self._legs: list[FloorLeg] = []
        self._asked = self._given = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        for leg in self._legs:
            leg.transport.close()

    def data_received(self, data: bytes) -> None:
        self._asked += data
        head, end, body = self._asked.partition(b"\r\n\r\n")
        if not end or (head.startswith(b"POST") and len(body) < int(head.rpartition(b":")[2])):
            return
        self._asked = b""
        if head.startswith(b"GET"):
            self._transport.write(_HEALTH)
        elif self._legs:
            self._begin(body)
        else:
            self._task = asyncio.ensure_future(self._connect(body))

    async def _connect(self, body: bytes) -> None:
        for url in self._urls:
            parts = urlsplit(url)
            _, leg = await asyncio.get_running_loop().create_connection(
                FloorLeg, parts.hostname or "", parts.port or 80
            )
            self._legs.append(leg)
        self._legs[0].received = self._prefilled  # type: ignore[method-assign]
        self._legs[1].received = self._decoded  # type: ignore[method-assign]
        self._begin(body)

    def _begin(self, body: bytes) -> None:
        self._body, self._given = body, b""
        self._legs[0].transport.write(_P_HEAD % len(body) + body)

    def _prefilled(self, data: bytes) -> None:
        self._given += data
        if self._given.endswith(LAST_CHUNK):
            body = self._body + self._given
            self._legs[1].transport.write(_D_HEAD % len(body) + body)

    def _decoded(self, data: bytes) -> None:
        self._transport.write(data)


async def serve(prefill: str, decode: str, port: int) -> None:
    """Serve until cancelled."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(FloorConnection, prefill, decode), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    gc.freeze()
    uvloop.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[4])))
