"""One connection to a node: it sends a request and hands the answer out as it arrives.

A node is trusted less than this router: what an answer may make the router hold is bounded.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

import httptools
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    Sink = Callable[[bytes], None]

MAX_HEAD_BYTES = 64 * 1024  # of an answer: status line and headers; also of its trailers, and of each chunk's size line
MAX_WHOLE_BYTES = 16 << 20  # of an answer that is read whole: those to clients above PIECE_BYTES are not
UNREAD_BYTES = 64 * 1024  # of an answer that may wait for `read` before the connection stops reading


class AnswerBroken(ConnectionError):
    """The connection ended before the answer did."""


class Unanswered(AnswerBroken):
    """The connection ended before the first byte of an answer: the node may just have closed it as idle."""


class AnswerUnreadable(AnswerBroken):
    """The answer is not HTTP/1, or exceeds a bound."""


class AnswerHead(msgspec.Struct, frozen=True):
    """Status and headers of a node's answer. Names are lower case."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]

    def header(self, name: bytes) -> str:
        """The first value of `name`; "" without one."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return ""

    @property
    def content_type(self) -> str:
        """The media type, without parameters."""
        return self.header(b"content-type").partition(";")[0].strip().lower()


class NodeExchange:
    """One request on one connection. Either `read` or `splice` takes the body. All raise AnswerBroken.

    `limit` is the deadline of all waits: it costs a twentieth of an `asyncio.timeout` around each.

    The connection is free for the next request when the answer is complete. `close` before that ends the connection.
    """

    __slots__ = ("_connection", "_error", "_is_paused", "_loop", "_num_unread", "_sink", "_spliced", "_unread",
                 "_waiter", "answer", "expires_s", "has_ended")  # fmt: skip

    def __init__(self, connection: NodeConnection, loop: asyncio.AbstractEventLoop) -> None:
        self.answer: AnswerHead | None = None  # once the head has arrived
        self.has_ended = False  # the whole answer has arrived
        self._connection: NodeConnection | None = connection  # until the answer is complete or has failed
        self._loop = loop
        self._error: Exception | None = None
        self._is_paused = False
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._spliced: asyncio.Future[None] | None = None
        self.expires_s = inf

    def limit(self, seconds: float) -> None:
        """Fail with TimeoutError unless the answer is complete in so many seconds from now; `inf`: no limit."""
        self.expires_s = self._loop.time() + seconds
        if self._connection is not None:
            self._connection.watch(self.expires_s)

    async def head(self) -> AnswerHead:
        """The final head; informational ones (1xx) are skipped."""
        while self.answer is None:
            await self._wait()
        return self.answer

    async def has_more(self) -> bool:
        """Wait for bytes of the body without taking them. False: the answer has ended."""
        while not self._unread:
            if self.has_ended:
                return False
            await self._wait()
        return True

    async def read(self) -> bytes:
        """What has arrived of the body since the last call; waits for at least one byte. b"": the end."""
        return self._take_unread() if await self.has_more() else b""

    def _take_unread(self) -> bytes:
        unread = self._unread
        data = unread[0] if len(unread) == 1 else b"".join(unread)
        unread.clear()
        self._num_unread = 0
        self.resume()
        return data

    async def whole(self) -> bytes:
        """The rest of the body. Raises AnswerUnreadable if it is longer than MAX_WHOLE_BYTES."""
        data = await self.read_most(MAX_WHOLE_BYTES)
        if len(data) > MAX_WHOLE_BYTES:
            raise AnswerUnreadable(f"the answer is longer than {MAX_WHOLE_BYTES} bytes")
        return data

    async def read_most(self, max_bytes: int) -> bytes:
        """The rest of the body, or more than `max_bytes` of it."""
        parts: list[bytes] = []
        num_bytes = 0
        while num_bytes <= max_bytes and (part := await self.read()):
            num_bytes += len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def splice(self, sink: Sink) -> asyncio.Future[None]:
        """Call `sink` with the bytes of the body as they arrive, once per read of the socket.

        The future is done after the last byte, or fails: with AnswerBroken, or with what `sink` raised. It may be
        failed from outside; `close` the exchange then.
        """
        done = self._spliced = self._loop.create_future()
        self._sink = sink
        if self._unread:
            self.received(self._take_unread())
        self._settle()
        return done

    def pause(self) -> None:
        """Stop reading from the node: the sink cannot take more."""
        if not self._is_paused and self._connection is not None:
            self._is_paused = True
            self._connection.pause()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._connection is not None:
                self._connection.resume()

    def close(self) -> None:
        """Idempotent. In the middle of an answer it ends the connection, so that the node aborts the request."""
        if self._connection is not None:
            self._connection.abandon()
            self.failed(AnswerBroken("the router closed it"))
        self._sink = self._spliced = None
        if self._error is not None:
            self._error = AnswerBroken("the router closed it")  # the other's traceback refers here: a cycle

    # --- called by the connection

    def began(self, answer: AnswerHead) -> None:
        self.answer = answer
        self._wake()

    def received(self, data: bytes) -> None:
        """Take a part of the body."""
        if self._sink is None:
            self._unread.append(data)
            self._num_unread += len(data)
            if self._num_unread > UNREAD_BYTES:
                self.pause()
            self._wake()
            return
        try:
            self._sink(data)
        except Exception as error:
            if self._connection is not None:
                self._connection.abandon()
            self.failed(error)

    def ended(self) -> None:
        """Note that the answer is complete. The connection may serve another request already."""
        if self._error is None:
            self.has_ended = True
            self._connection = None
            self._settle()

    def failed(self, error: Exception) -> None:
        if self._error is None and not self.has_ended:
            self._error = error
            self._connection = None
            self._settle()

    async def _wait(self) -> None:
        """Until something has arrived. Raises the error of the connection."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _settle(self) -> None:
        self._wake()
        done = self._spliced
        if done is None or done.done():
            return
        if self._error is not None:
            done.set_exception(self._error)
            done.exception()  # the splice may have been given up: its failure is then no news
        elif self.has_ended:
            done.set_result(None)


class NodeConnection(asyncio.Protocol):
    """A connection that serves one exchange after the other. `on_free`: called when it can take the next one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_free: Callable[[NodeConnection], None],
                 on_lost: Callable[[NodeConnection], None]) -> None:  # fmt: skip
        self._loop = loop
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: NodeExchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fires_s = inf  # of the timer, which does not tell it under uvloop when it fires within 0.5 ms
        self._begin()

    def _begin(self) -> None:
        """Expect an answer."""
        self._has_bytes = False
        self._has_head = False
        self._is_complete = False
        self._is_framed = False  # by a length or in chunks; otherwise the end of the connection is the end of the body
        self._keeps_alive = False
        self._num_loose = 0  # bytes since the last byte of a body
        self._head_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []

    def send(self, head: bytes, body: bytes) -> NodeExchange:
        """Send a request. Call it on a free connection only."""
        assert self._exchange is None
        self._begin()
        exchange = self._exchange = NodeExchange(self, self._loop)
        if len(body) < UNREAD_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return exchange

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def pause(self) -> None:
        if self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    def abandon(self) -> None:
        """End the connection at once. Its exchange receives nothing more."""
        self._exchange = None
        self._transport.abort()
        self._stop_timer()

    def fail(self, error: Exception) -> None:
        """End the connection at once. Its exchange, if it has one, fails with `error`."""
        exchange = self._exchange
        self.abandon()
        if exchange is not None:
            exchange.failed(error)

    def watch(self, expires_s: float) -> None:
        """End the exchange with TimeoutError when its `expires_s` has passed.

        The timer is the connection's, and outlives the exchange: it may fire early, and is then set again.
        """
        if expires_s < self._fires_s:
            self._stop_timer()
            self._timer, self._fires_s = self._loop.call_at(expires_s, self._look), expires_s

    def _look(self) -> None:
        self._timer, self._fires_s = None, inf
        if (exchange := self._exchange) is None:
            return
        if self._loop.time() < exchange.expires_s:
            self.watch(exchange.expires_s)
        else:
            self.fail(TimeoutError())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._fires_s = None, inf

    # --- called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # nothing was asked
            self._transport.abort()
            return
        self._has_bytes = True
        self._num_loose += len(data)
        problem = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            problem = "the node wants another protocol"
        except httptools.HttpParserError as error:
            problem = str(error.__context__ or error)
        if not problem and max(self._num_loose, self._head_bytes) > MAX_HEAD_BYTES:
            problem = f"a head, a trailer or the size of a chunk is longer than {MAX_HEAD_BYTES} bytes"
        parts = self._parts
        if parts:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            exchange.received(body)
        if self._exchange is None:  # closed by the receiver
            return
        if self._is_complete:
            self._complete(exchange, can_reuse=not problem)
        elif problem:
            self.fail(AnswerUnreadable(problem))

    def _complete(self, exchange: NodeExchange, *, can_reuse: bool) -> None:
        exchange.resume()  # a connection in the pool must see that the node closes it
        self._exchange = None
        if can_reuse and self._keeps_alive and self.is_open and not self._transport.get_write_buffer_size():
            self._on_free(self)
        else:
            self._transport.abort()
        exchange.ended()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(self)
        self._stop_timer()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if error is None and self._has_head and not self._is_framed:
            exchange.ended()
            return
        kind = AnswerBroken if self._has_bytes else Unanswered
        why = f"{type(error).__name__}: {error}" if error is not None else "the connection was closed"
        exchange.failed(kind(f"{why} {'in the middle of' if self._has_bytes else 'without'} an answer"))

    # --- called by the parser; what it raises ends the connection

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise ValueError("a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._has_head:
            return  # a trailer
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._is_framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise ValueError("the node wants another protocol")
            self._headers.clear()
            return
        self._has_head = True
        self._num_loose -= min(self._num_loose, self._head_bytes)
        assert self._exchange is not None
        self._exchange.began(AnswerHead(status, tuple(self._headers)))

    def on_body(self, body: bytes) -> None:
        self._num_loose = 0
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if not self._has_head:
            return  # an informational answer: the final one follows
        self._is_complete = True
        self._keeps_alive = self._parser.should_keep_alive()
