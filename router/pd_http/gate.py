"""Applies the bounds of one HTTP server: every connection reports to the gate, and the gate ends connections."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from typing import TYPE_CHECKING

from pd_http.connection_table import ConnectionTable
from pd_http.files import RESERVED_FILES, connections_for, has_files
from pd_http.freed_memory import FreedMemory
from pd_http.handshake import Handshake
from pd_http.handshake_turns import HandshakeTurns
from pd_http.protocol import BoundedProtocol
from pd_http.refusal import Refusal
from pd_http.unfinished_requests import UnfinishedRequests

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Callable

    from pd_http.limits import HttpLimits

log = logging.getLogger("pd_http")
Connection = BoundedProtocol | Handshake
# Bytes that the kernel may buffer before they are sent. Without this limit a client that reads nothing is noticed after
# 4 MB of answer on loopback (16,000 events of a stream), with it after about 0.1 MB.
UNSENT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
UNSENT_BYTES = 16 * 1024
LOG_EVERY_S = 10.0  # per kind of refusal
SHORT_EVERY_S = 1.0  # of a process without descriptors
MAX_LINGERING = 256  # refused connections that still send their answer; at most a quarter of all places
# Handshakes that OpenSSL has begun, of 54 to 90 kB each. Others wait for them
MAX_HANDSHAKES = 256
# When one ends for another: where none has ended well for so long, and in any case
SILENT_HANDSHAKE_S, SLOW_HANDSHAKE_S = 1.0, 5.0
UNREAD_S = 0.05  # what such a handshake's client has sent is read meanwhile
# Beyond the others, for connections that ask for `RESERVED_PATHS`: a node's probes, its Prometheus and its routers.
MAX_RESERVED = 64
RESERVED_PATHS = (b"/health", b"/metrics", b"/pd/feed")


class HttpGate:
    """Pass `protocol` to uvicorn.Config as `http`. One gate per server, used in its event loop only."""

    def __init__(
        self,
        limits: HttpLimits,
        num_files: int,
        files_per_connection: int,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_files`: open files that the process may have. `count`: called with the word of each refusal."""
        self.limits = limits
        self.clock = clock
        self._count = count
        self._max_file = num_files - RESERVED_FILES // 2
        reserved = min(MAX_RESERVED, max(2, num_files // 32))
        places = min(limits.max_connections, connections_for(num_files - reserved, files_per_connection))
        of_address = limits.max_connections_per_address
        self._table: ConnectionTable[Connection] = ConnectionTable(places, of_address)
        self._reserved: ConnectionTable[Connection] = ConnectionTable(reserved, of_address)
        self._unfinished: UnfinishedRequests[BoundedProtocol] = UnfinishedRequests(limits.max_unfinished_bytes)
        self._freed = FreedMemory()
        self._open: set[Connection] = set()  # including refused connections that linger
        self._handshakes: HandshakeTurns[Handshake] = HandshakeTurns(
            MAX_HANDSHAKES, SILENT_HANDSHAKE_S, SLOW_HANDSHAKE_S
        )
        self._held: set[BoundedProtocol] = set()  # reading is stopped to save memory
        self._ticks = False
        self._logged_s: dict[Refusal, float] = {}
        self._short_s = -SHORT_EVERY_S  # when descriptors were last seen to have run out
        self._unlogged: dict[Refusal, int] = {}
        self.joined_s = -math.inf  # when the last connection came
        self.linger_s: float | None = None  # once the server leaves: of an idle connection

    def __len__(self) -> int:
        """Number of connections that were not refused."""
        return len(self._table) + len(self._reserved)

    @property
    def may_linger(self) -> bool:
        return len(self._open) - len(self) <= min(MAX_LINGERING, self._table.max_connections // 4)

    @property
    def unfinished_bytes(self) -> int:
        return self._unfinished.num_bytes

    @property
    def protocol(self) -> type[BoundedProtocol]:
        """The class that uvicorn instantiates for each connection."""
        return self.protocol_of(BoundedProtocol)

    def protocol_of(self, kind: type[BoundedProtocol]) -> type[BoundedProtocol]:
        """A `kind` that reports here."""
        return type("GatedProtocol", (kind,), {"gate": self})

    def handshake_of(self, kind: type[BoundedProtocol], context: ssl.SSLContext) -> type[Handshake]:
        """As `protocol_of`, over TLS."""
        parts = {"gate": self, "context": context, "protocol": self.protocol_of(kind)}
        return type("GatedHandshake", (Handshake,), parts)

    def leave(self, linger_s: float) -> None:
        """Ask clients to close, as leaving.py describes it. An idle connection ends after `linger_s`."""
        self.linger_s = linger_s
        for connection in self._open:
            if not connection.is_shaking:
                connection.leave(linger_s)

    def cut(self) -> None:
        """Let no request begin: the app ends."""
        for connection in self._open:
            if not connection.is_shaking:
                connection.cut()

    # --- what connections report

    def joined(self, connection: Connection, transport: asyncio.Transport) -> Refusal | None:
        """Register a new connection, before its first byte. Returns the reason if it cannot stay."""
        self._open.add(connection)
        if not connection.is_shaking and connection.handshake is not None:
            self._handshakes.ended(self.clock())
            self.left(connection.handshake)  # its place is free for this one
        if not self._ticks:
            self._ticks = True
            connection.loop.call_later(self.limits.tick_s, self._tick, connection.loop)
        self.joined_s = self.clock()
        if self.linger_s is not None and not connection.is_shaking:
            connection.leave(self.linger_s)
        peer = transport.get_extra_info("socket")
        if peer.fileno() >= self._max_file:
            return Refusal.FILES
        if UNSENT is not None:
            with contextlib.suppress(OSError):  # the connection is closed already
                peer.setsockopt(socket.IPPROTO_TCP, UNSENT, UNSENT_BYTES)
        connection.no_place = self._join(self._table, connection)
        return None if connection.no_place is None else self._join(self._reserved, connection)

    def _join(self, table: ConnectionTable[Connection], connection: Connection) -> Refusal | None:
        host = connection.client[0] if connection.client else ""
        outcome = table.join(connection, host, is_shaking=connection.is_shaking)
        if isinstance(outcome, Refusal):
            return outcome
        connection.table = table
        if outcome is not None:
            outcome.give_way()
        return None

    def asks(self, connection: BoundedProtocol, target: bytes) -> Refusal | None:
        """Note that a connection in a reserved place has sent a head. Returns the reason if it is not served."""
        if target.partition(b"?")[0] in RESERVED_PATHS:
            return None
        self._reserved.leave(connection)
        connection.no_place = self._join(self._table, connection)
        return connection.no_place

    def shakes(self, connection: Handshake) -> None:
        """Let a handshake begin, which needs memory, when it has its turn."""
        self._handshakes.wait(connection, connection.client[0] if connection.client else "")
        self._begin_handshakes()

    def _begin_handshakes(self) -> None:
        for connection in self._handshakes.begin(self.clock()):
            connection.begin()

    def _end_handshakes(self, slow: list[Handshake]) -> None:
        for connection in slow:
            if connection in self._open:
                connection.give_way()

    def left(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._forget(connection)

    def moved(self, connection: BoundedProtocol) -> None:
        """Note that the headers of a request, or an answer, are complete."""
        if connection.limits.is_waiting:
            connection.table.waits(connection)
        if connection.limits.discards:  # the rest of the body is not kept
            self._hold_bytes(connection, 0)
            if connection in self._held:
                self._held.discard(connection)
                connection.go_on()

    def received(self, connection: BoundedProtocol) -> None:
        """Note that a connection has taken what arrived. Part of it may belong to an incomplete request."""
        if not connection.limits.is_waiting:
            connection.table.works(connection)
        was_crowded = self._unfinished.is_crowded
        self._hold_bytes(connection, connection.unfinished_bytes if connection in self._open else 0)
        if self._unfinished.is_crowded:
            for one in (connection,) if was_crowded else list(self._open):
                if one.is_shaking or not one.unfinished_bytes or one in self._held:
                    continue
                if not self._unfinished.may_read(one):
                    self._held.add(one)
                    one.hold()

    def refused(self, connection: Connection, refusal: Refusal, detail: str = "") -> None:
        """Free the place and the memory of a connection that ends. `detail`: a word for the metric."""
        self._forget(connection)
        self._count(f"{refusal.word}_{detail}" if detail else refusal.word)
        if not refusal.is_logged:
            return
        now_s = self.clock()
        self._unlogged[refusal] = self._unlogged.get(refusal, 0) + 1
        if now_s - self._logged_s.get(refusal, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_s[refusal] = now_s
            host = connection.client[0] if connection.client else "?"
            message = f"{refusal.message}: {detail}" if detail else refusal.message
            log.warning(
                "ended %d connections (%s), the last one from %s; %d are open",
                self._unlogged.pop(refusal), message, host, len(self),
            )  # fmt: skip

    # --- consequences

    def _forget(self, connection: Connection) -> None:
        self._table.leave(connection)
        self._reserved.leave(connection)
        if connection.is_shaking:
            self._handshakes.leave(connection)
            self._begin_handshakes()
            return
        self._held.discard(connection)
        self._hold_bytes(connection, 0)

    def _hold_bytes(self, connection: BoundedProtocol, num_bytes: int) -> None:
        before = self._unfinished.num_bytes
        self._unfinished.hold(connection, num_bytes)
        self._freed.note(max(0, before - self._unfinished.num_bytes))
        if self._unfinished.num_bytes > before:
            self._end_excess()
        elif self._held and self._unfinished.num_bytes < before:
            self._go_on()

    def _end_excess(self) -> None:
        while (excess := self._unfinished.excess(self.clock())) is not None:
            excess.end(Refusal.NO_MEMORY)

    def _go_on(self) -> None:
        for connection in self._unfinished.readers(self._held):
            self._held.discard(connection)
            connection.go_on()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        is_short = not has_files()  # an event loop tells of no connection that it could not accept
        self._ticks = is_short or bool(self._open)
        if self._ticks:  # first, so that an exception below does not end the ticks
            loop.call_later(self.limits.tick_s, self._tick, loop)
        now_s = self.clock()
        for connection in list(self._open):
            connection.check(now_s)
        if slow := self._handshakes.slow(now_s):
            loop.call_later(UNREAD_S, self._end_handshakes, slow)
        if is_short and now_s - self._short_s >= SHORT_EVERY_S:
            self._short_s = now_s
            self._count("no_files")
            log.error("no connection can be accepted: all file descriptors of this process are open")
        self._end_excess()
        self._go_on()
        self._freed.give_back()
