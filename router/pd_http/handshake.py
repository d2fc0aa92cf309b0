"""Connections of a TLS server from accept on: the gate counts and bounds them before and during their handshake.

uvicorn would have the event loop make the handshake, and the loop tells the protocol of a connection when it is over.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import uvloop.loop

from pd_http.refusal import Refusal

if TYPE_CHECKING:
    from pd_http.connection_table import ConnectionTable
    from pd_http.protocol import BoundedProtocol

HANDSHAKE_RECORD = 22  # a record's first byte
RECORD_HEAD_BYTES = 5
# Of a first record that is kept until it is whole. Clients send 0.3 to 2 KB; a longer one is passed on as it comes.
MAX_KEPT_BYTES = 4096
TURN_DEADLINE_S = 30.0  # of a client that has sent its first record, until its handshake begins


class Handshake(asyncio.Protocol):
    """A connection until its TLS handshake is over; then the `protocol` that it made has its place.

    What OpenSSL needs for a connection takes 54 kB: it is made when the client's first record is whole.
    """

    gate: ClassVar[Any]  # the HttpGate that made this class, as what follows
    context: ClassVar[ssl.SSLContext]
    protocol: ClassVar[type[BoundedProtocol]]
    is_shaking: Literal[True] = True
    table: ConnectionTable[Any]
    no_place: Refusal | None = None

    def __init__(self, **of_uvicorn: Any) -> None:
        self._of_uvicorn = of_uvicorn
        self._others = of_uvicorn["server_state"].connections
        self._deadline_s = self.gate.clock() + self.gate.limits.head_timeout_s
        self._first = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.loop = asyncio.get_running_loop()
        self.transport = transport
        self.client = transport.get_extra_info("peername")
        self._others.add(self)
        if (refusal := self.gate.joined(self, transport)) is not None:
            self.end(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.discard(self)
        self.gate.left(self)

    def data_received(self, data: bytes) -> None:
        self._first += data
        head = self._first[:RECORD_HEAD_BYTES]
        num_bytes = RECORD_HEAD_BYTES + int.from_bytes(head[3:])
        is_part = len(head) < RECORD_HEAD_BYTES or len(self._first) < num_bytes <= MAX_KEPT_BYTES
        if not (is_part and head[0] == HANDSHAKE_RECORD) and not self.transport.is_closing():
            self.transport.pause_reading()
            self._deadline_s = self.gate.clock() + TURN_DEADLINE_S
            self.gate.shakes(self)

    def begin(self) -> None:
        """Begin the handshake. Called by the gate."""
        inner = self.protocol(**self._of_uvicorn)
        inner.handshake = self
        kind = uvloop.loop.SSLProtocol if isinstance(self.loop, uvloop.Loop) else SSLProtocol
        timeout_s = 2 * self.gate.limits.head_timeout_s  # `check` is earlier
        # No name for the waiter: the frames of its exception know this one, and a cycle keeps 50 kB of OpenSSL
        tls = kind(
            self.loop, inner, self.context, self._waiter(inner), server_side=True, ssl_handshake_timeout=timeout_s
        )
        self._deadline_s = self.gate.clock() + self.gate.limits.head_timeout_s
        self.transport.set_protocol(tls)
        tls.connection_made(self.transport)
        tls.get_buffer(len(self._first))[: len(self._first)] = self._first
        tls.buffer_updated(len(self._first))
        self._first = b""
        self.transport.resume_reading()

    def _waiter(self, inner: BoundedProtocol) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = self.loop.create_future()
        waiter.add_done_callback(partial(self._ended, inner))
        return waiter

    def _ended(self, inner: BoundedProtocol, ended: asyncio.Future[None]) -> None:
        error = ended.exception()
        self.connection_lost(None)
        if isinstance(error, ssl.SSLError):
            self.gate.refused(self, Refusal.TLS, (error.reason or "other").lower())
        if error is not None:
            inner.parser = None  # type: ignore[assignment]  # uvicorn does so at `connection_lost`: it knows `inner`

    # --- called by the gate, and by uvicorn when it stops

    def check(self, now_s: float) -> None:
        if now_s >= self._deadline_s:
            self.end(Refusal.SLOW_HANDSHAKE)

    def give_way(self) -> None:
        self.end(Refusal.PLACE_NEEDED)

    def end(self, refusal: Refusal) -> None:
        self.gate.refused(self, refusal)
        self.transport.abort()

    def shutdown(self) -> None:
        if self.gate.linger_s is None:
            self.transport.abort()
