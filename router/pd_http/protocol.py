"""uvicorn's HTTP protocol within the bounds of pd_http: what a connection may send, hold and leave unread."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pd_http.answer_forms import app_for
from pd_http.connection_limits import ConnectionLimits
from pd_http.refusal import Refusal
from pd_http.request_head import RequestHead, origin_form
from pd_http.upgrade_offer import parser_after

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn import Config
    from uvicorn.server import ServerState

    from pd_http.connection_table import ConnectionTable
    from pd_http.limits import HttpLimits

LINGER_S = 2.0  # a client may go on sending for so long: closing at once would destroy the answer under way


class HeldFlow(FlowControl):
    """Flow control that does not resume reading while `held`."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class ConnectionGate(Protocol):
    """The server's gate as one connection sees it."""

    limits: HttpLimits
    clock: Callable[[], float]
    linger_s: float | None  # once the server leaves

    @property
    def may_linger(self) -> bool:
        """Whether a connection that was refused may stay open until its client has read the answer."""

    def joined(self, connection: BoundedProtocol, transport: asyncio.Transport) -> Refusal | None: ...

    def left(self, connection: BoundedProtocol) -> None: ...

    def moved(self, connection: BoundedProtocol) -> None: ...

    def received(self, connection: BoundedProtocol) -> None: ...

    def refused(self, connection: BoundedProtocol, refusal: Refusal) -> None: ...

    def asks(self, connection: BoundedProtocol, target: bytes) -> Refusal | None: ...


class _HangsUp:
    """The transport of the last request of a connection: it is closed in good order."""

    def __init__(self, connection: BoundedProtocol) -> None:
        self._transport = connection.transport
        self.close = connection.hang_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. It reports to the gate; the gate ends it when a deadline has passed or a bound is exceeded."""

    gate: ClassVar[ConnectionGate]  # set by the subclass that HttpGate.protocol_of makes
    flow: HeldFlow
    is_shaking: Literal[False] = False
    handshake: Any = None  # the Handshake that this connection comes from
    table: ConnectionTable[Any]  # where it has its place
    no_place: Refusal | None = None  # why it has a reserved one

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._clock = self.gate.clock
        self.limits = ConnectionLimits(self.gate.limits, self._clock())
        self._backlog = b""  # received after a request that waits for the answer before it
        self._has_head = False  # the parser has seen the end of a head
        self._head: RequestHead | None = None  # of the last request; None: its parser took none
        self._refusal = Refusal.BAD_REQUEST  # why the parser stops
        self._abort_at_s: float | None = None  # set when the connection is over: until then its last bytes may be sent
        self.serving: Any = None  # the cycle of the last request that was begun; `cycle` may be one that waits for it
        self._hung_up = False
        self._last: Any = None  # the cycle that the leaving server has made the last one

    # --- called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = HeldFlow(transport)
        if (refusal := self.gate.joined(self, transport)) is not None:
            self.end(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gate.left(self)
        self._disconnect()
        self._unset_keepalive_if_required()  # uvicorn leaves it after a reset, with 55 kB of TLS for 75 s
        super().connection_lost(exc)
        self.pipeline.clear()  # requests know this object: such cycles wait for a collection, each with as much
        self.cycle = self.serving = self._last = None  # type: ignore[assignment]

    def eof_received(self) -> None:
        if self._abort_at_s is not None:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.limits.write_paused(self._clock())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.limits.write_resumed()

    def data_received(self, data: bytes) -> None:
        if self._abort_at_s is not None:
            return
        if self._backlog:
            data, self._backlog = self._backlog + data, b""
        self._unset_keepalive_if_required()
        now_s = self._clock()
        at = 0
        while at < len(data):
            if self.pipeline:  # one request ahead is enough: keep the rest as bytes and pause reading
                self._backlog = data[at:]
                self.flow.pause_reading()  # again, because the application resumes it to learn of a disconnect
                break
            taken = self.limits.take(data, at, now_s)
            if isinstance(taken, Refusal):
                self.end(taken)
                break
            end, head_ends = taken
            if not self._parse(data[at:end] if end - at < len(data) else data, head_ends):
                break
            at = end
        if self._abort_at_s is None:
            self.gate.received(self)

    def _parse(self, piece: bytes, head_ends: bool) -> bool:
        """False if nothing more can be taken."""
        self._has_head = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            if head_ends and self._head is not None and offer.args[0] == len(piece):
                self.parser = parser_after(self._head.num_body, self)
            else:  # parser and framing found different ends of the head
                self.end(Refusal.BAD_REQUEST)
        except httptools.HttpParserError:
            self.end(self._refusal)
        else:
            if head_ends and not self._has_head:  # as above
                self.end(Refusal.BAD_REQUEST)
        return self._abort_at_s is None and not self.transport.is_closing()

    @property
    def unfinished_bytes(self) -> int:
        """Bytes kept of incomplete requests."""
        return len(self._backlog) + (0 if self.limits.discards else self.limits.unfinished_bytes)

    # --- called by the parser and the application

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        head = RequestHead.of(version, self.headers)
        if self.no_place is not None and not isinstance(head, Refusal):
            head = self.gate.asks(self, self.url) or head
        if isinstance(head, Refusal):
            self._refusal = head
            raise httptools.HttpParserError(head.message)  # an exception of a callback ends parsing
        self._head = head
        self.expect_100_continue &= version != "1.0"
        if not self.url.startswith(b"/"):
            self.url = origin_form(self.url)
        self.begin_cycle()
        if self._last is not None:
            self._choose_last()
        self.headers = []  # trailers go there: what follows the body decides nothing (RFC 9110, 6.5.1)
        self._has_head = True
        self.limits.head_ended(head.num_body, self._clock())
        self.gate.moved(self)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else the body follows, although this parser does not see it
            super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return False

    def begin_cycle(self) -> None:
        """Make the request's cycle and start it, or queue it if another one is under way."""
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.serving = cycle
        if self.gate.linger_s is not None:
            self._choose_last()
        super()._start_asgi_task(cycle, app_for(cycle, app) if isinstance(cycle, RequestResponseCycle) else app)

    def _disconnect(self) -> None:
        """Tell the request under way that its client is gone: uvicorn tells only the newest one."""
        if self.serving is not None and not self.serving.response_complete:
            self.serving.disconnected = True
            self.serving.message_event.set()

    def on_response_complete(self) -> None:
        self.limits.answered(self._clock())
        super().on_response_complete()
        self.gate.moved(self)
        if self._backlog and not self.pipeline and not self.transport.is_closing():
            self.data_received(b"")

    def _choose_last(self) -> None:
        """While the server leaves: let the answer that is next say `connection: close`, if no request waits after it.

        An answer that has begun says nothing more.
        """
        cycle, waits = self.serving, bool(self.pipeline or self._backlog)
        if cycle is None or cycle.response_started:
            return
        if waits and cycle is self._last:
            cycle.keep_alive, self._last = True, None
        elif cycle.keep_alive and not waits:
            cycle.keep_alive, self._last = False, cycle
            cycle.transport = _HangsUp(self)

    def hang_up(self) -> None:
        """End the connection after what was sent. What still comes is read, or the client would get a reset."""
        if self._abort_at_s is not None or self.transport.is_closing():
            return
        self._backlog = b""
        self.pipeline.clear()
        self.flow.held = False
        if self.gate.linger_s and self.transport.can_write_eof():
            self._hung_up, self._abort_at_s = True, self._clock() + LINGER_S
            self.flow.resume_reading()
            self.transport.write_eof()
        else:  # TLS says so in its own words, waits for the client's, and has a deadline for them. 0: no wait is wanted
            self._abort_at_s = inf
            self.transport.close()

    # --- called by the gate, and by uvicorn when it stops

    def leave(self, linger_s: float) -> None:
        """End the connection with its next answer, or when no request has come for `linger_s`."""
        self.limits.leave(linger_s, self._clock())
        self._choose_last()

    def cut(self) -> None:
        """Take no further request. The one under way may still be answered."""
        if self.serving is None or self.serving.response_complete:
            self.hang_up()
        else:
            self._backlog, self._abort_at_s = b"", inf
            self.pipeline.clear()

    def shutdown(self) -> None:
        if self.gate.linger_s is None:
            super().shutdown()
        else:
            self.check(self._clock())

    def hold(self) -> None:
        """Stop reading until `go_on`."""
        self.flow.pause_reading()
        self.flow.held = True
        self.limits.hold()

    def go_on(self) -> None:
        self.flow.held = False
        self.flow.resume_reading()
        self.limits.go_on(self._clock())

    def check(self, now_s: float) -> None:
        """Check the deadlines."""
        due = self.limits.due(now_s) if now_s >= self.limits.deadline_s else None
        if self._hung_up and self.transport.get_write_buffer_size() and due is not Refusal.READS_NOTHING:
            self._abort_at_s = now_s + LINGER_S  # the client reads slowly, but it reads
        elif self._abort_at_s is not None:
            if now_s >= self._abort_at_s:
                self.transport.abort()
        elif due is Refusal.IDLE and self.gate.linger_s is not None:
            self.hang_up()
        elif due is not None:
            self.end(due)

    def give_way(self) -> None:
        """End the connection: another one has its place."""
        self.end(self.no_place or (Refusal.CONNECTIONS if self.limits.in_body else Refusal.PLACE_NEEDED))

    def end(self, refusal: Refusal) -> None:
        """End the connection, with an answer if one can still be given. Its running request sees a disconnect."""
        if self._abort_at_s is not None:
            return
        self._abort_at_s = self._clock() + LINGER_S
        self._backlog = b""
        self.flow.held = False
        self.gate.refused(self, refusal)
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        # not in the middle of an answer, and not after one: the client expects no second answer
        can_answer = refusal.status and not (is_answering and (cycle.response_started or self.pipeline))
        can_answer = can_answer and not self.limits.discards
        self._disconnect()
        if not can_answer or self.transport.is_closing():
            self._close_unanswered(refusal)
            return
        self.transport.write(self._answer(refusal))
        if not self.gate.may_linger or refusal is Refusal.FILES:
            self.transport.close()
            return
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not over TLS: there the client goes by the length of the answer
            self.transport.write_eof()

    def _close_unanswered(self, refusal: Refusal) -> None:
        if refusal is Refusal.READS_NOTHING or self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _answer(self, refusal: Refusal) -> bytes:
        body = refusal.body
        retry = b"retry-after: 1\r\n" if refusal.status == 503 else b""
        defaults = b"".join(name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers)
        return (
            STATUS_LINE[refusal.status] + defaults + retry
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )  # fmt: skip
