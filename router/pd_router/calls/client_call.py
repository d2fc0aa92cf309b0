"""One generating request on a client's connection, without ASGI: its body, its answer, its client's end."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from pd_http.body import BYTE_ORDER_MARK, ClientGone, check_declared
from pd_http.errors import BodyTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from uvicorn.protocols.http.flow_control import FlowControl

    from pd_http.held_bytes import Share
    from pd_http.reply import HeaderList

log = logging.getLogger("pd_router")
# Of a body that may arrive before `read_body` runs. Without this bound uvloop reads 8 MB of one connection in a turn of
# the loop, while the others wait and the memory of ended requests is not free yet.
UNREAD_BYTES = 64 * 1024
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientCall:
    """A request from the end of its head on. uvicorn's protocol treats it as its cycle, and as the cycle's event.

    `send` takes the messages that an ASGI server takes. `write` sends a part of a stream at once. The head of an answer
    leaves with the first bytes of its body, so that a whole answer is one write.
    """

    __slots__ = (
        "_answer_headers", "_expects_continue", "_head", "_is_chunked", "_num_bytes", "_num_seen", "_on_complete",
        "_on_flow", "_parts", "_serve", "_task", "_waiter", "body", "disconnected", "flow", "headers", "host",
        "is_gone", "keep_alive", "key_name", "more_body", "path", "response_complete", "response_started", "share",
        "transport",
    )  # fmt: skip

    def __init__(
        self,
        path: str,
        headers: HeaderList,
        serve: Callable[[ClientCall], Coroutine[Any, Any, None]],
        transport: asyncio.Transport,
        flow: FlowControl,
        *,
        keep_alive: bool,
        may_chunk: bool = True,
        expects_continue: bool,
        answer_headers: Callable[[], HeaderList],
        on_complete: Callable[[], None],
    ) -> None:
        """`headers`: names in lower case. `answer_headers`: of the server, for every answer.

        `may_chunk` False: an answer of unknown length ends with the connection, which must not be kept alive.
        """
        self.path = path
        self.headers = headers
        self.flow = flow
        self.key_name = ""  # of the client's API key; "": the router has none, or refused it
        self.host = ""  # the client's address
        self.share: Share | None = None  # of a large answer, until the client has taken it
        self.is_gone = False  # the connection ended before the answer was complete
        self._serve = serve
        self.transport = transport
        self._expects_continue = expects_continue
        self._answer_headers = answer_headers
        self._on_complete = on_complete
        self._on_flow: Callable[[bool], None] | None = None
        self._task: asyncio.Task[Any] | None = None  # while the request is served
        self._waiter: asyncio.Future[None] | None = None  # for more of the body
        self._head = b""  # of the answer, not sent yet
        self._is_chunked = may_chunk
        self._parts: list[bytearray] = []  # of the body; one array would hold an eighth more than the client sent
        self._num_bytes = 0
        self._num_seen = 0  # of _num_bytes, when `read_body` last ran
        # what uvicorn's protocol reads and writes
        self.body = bytearray()
        self.more_body = True
        self.disconnected = False
        self.keep_alive = keep_alive
        self.response_started = False
        self.response_complete = False

    async def run_asgi(self, app: object) -> None:
        """Serve the request. An answer that is not complete then ends the connection, as does a bug."""
        self._task = asyncio.current_task()
        self.flow.resume_reading()
        try:
            await self._serve(self)
        except asyncio.CancelledError:
            if not self.is_gone:
                raise
        except Exception as error:
            log.error("a bug, in the middle of an answer", exc_info=error)
        finally:
            self._task = None
            self._parts, self.body = [], bytearray()  # of a refused one: an idle connection keeps its last call
            if not self.response_complete and not self.disconnected:
                self.transport.close()
            if self.share is not None:
                await self._give_back(self.share)

    async def _give_back(self, share: Share) -> None:
        """When the client has taken the answer, or is gone: the request itself has ended."""
        with share:
            await self.flow.drain()

    @property
    def message_event(self) -> ClientCall:
        return self

    def set(self) -> None:
        """Note that a part of the body, its end, or the end of the connection has come."""
        if self.disconnected:
            self._leave()
            return
        if self.body:
            self._parts.append(self.body)
            self._num_bytes += len(self.body)
            self.body = bytearray()
            if self._num_bytes - self._num_seen > UNREAD_BYTES:
                self.flow.pause_reading()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _leave(self) -> None:
        if not self.response_complete and not self.is_gone:
            self.is_gone = True
            self._parts, self.body = [], bytearray()  # now: the task runs only when other connections have been read
            if self._task is not None:
                self._task.cancel()

    async def read_body(self, max_bytes: int) -> bytes:
        """The whole body, as `pd_http.body.read_body` reads it."""
        check_declared(self.headers, max_bytes)
        if self._expects_continue and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
        while self.more_body and not self.is_gone and self._num_bytes <= max_bytes:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._num_seen = self._num_bytes
            self.flow.resume_reading()
        self.flow.resume_reading()  # the last part may have paused it, and only reading tells that the client left
        if self.is_gone:
            raise ClientGone
        if self._num_bytes > max_bytes:
            raise BodyTooLarge(f"the request body is longer than {max_bytes} bytes")
        parts, self._parts = self._parts, []
        return (bytes(parts[0]) if len(parts) == 1 else b"".join(parts)).removeprefix(BYTE_ORDER_MARK)

    # --- the answer

    async def send(self, message: Any) -> None:
        """One message of ASGI. Waits while the client reads too slowly; does nothing once it is gone."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message["headers"])
            return
        if message["body"] or not self._is_chunked:
            self.write(message["body"])
        if not message["more_body"]:
            self._end()

    def _start(self, status: int, headers: HeaderList) -> None:
        self.response_started = True
        lines = [STATUS_LINE[status]]
        for name, value in (*self._answer_headers(), *headers):
            if name == b"content-length":
                self._is_chunked = False
            lines += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")
        self._head = b"".join(lines)

    def write(self, data: bytes) -> None:
        """Send a part of the body now, whether the client reads or not: `watch_flow` tells when to stop."""
        if self.disconnected:
            return
        if self._is_chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        self.transport.write(data)

    def _end(self) -> None:
        if self._is_chunked:
            self.transport.write(self._head + b"0\r\n\r\n")
            self._head = b""
        self.response_complete = True
        if not self.keep_alive:
            self.transport.close()
        self._on_complete()

    def watch_flow(self, listener: Callable[[bool], None] | None) -> None:
        """Call `listener` with True when the client reads too slowly and with False when it has caught up."""
        self._on_flow = listener
        if listener is not None and self.flow.write_paused:
            listener(True)

    def flow_changed(self) -> None:
        """Note that the transport's buffer has become full or free."""
        if self._on_flow is not None:
            self._on_flow(self.flow.write_paused)
