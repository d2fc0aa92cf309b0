"""The client's side of one request: what it sends, what it is sent, and that it may leave at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from pd_http import body
from pd_http.body import ClientGone
from pd_router.errors import BodyTooLarge, RouterError, Stopping, to_body

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.types import Receive, Scope, Send

log = logging.getLogger("pd_router")
HeaderList = list[tuple[bytes, bytes]]
STOP_FLUSH_S = 1.0  # what a client may take to accept the last bytes of a router that stops
JSON_TYPE = (b"content-type", b"application/json")


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole request body. Raises BodyTooLarge, ClientGone."""
    try:
        return await body.read_body(scope, receive, max_bytes)
    except body.BodyTooLong as error:
        raise BodyTooLarge(str(error)) from error


class Reply:
    """The answer to the client, with the headers that every answer carries."""

    __slots__ = ("_send", "common", "finished", "started", "status", "streams")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.common: HeaderList = []
        self.started = False
        self.finished = False
        self.status = 0
        self.streams = False  # it is made of server-sent events

    async def start(self, status: int, headers: HeaderList) -> None:
        self.started = True
        self.status = status
        self.streams = any(n.lower() == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.common]})

    async def chunk(self, content: bytes) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes = b"") -> None:
        self.finished = True
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def whole(self, status: int, headers: HeaderList, content: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", str(len(content)).encode())])
        await self.end(content)

    async def error(self, error: RouterError) -> None:
        extra = [(b"retry-after", b"1")] if error.status == 503 else []
        await self.whole(error.status, [JSON_TYPE, *extra], to_body(error))

    async def stopped(self) -> None:
        """The router ends, and this answer with it: a status, or the last event of a stream that has begun.

        An answer of another kind that has begun is left as it is: the server closes its connection.
        """
        error = Stopping("the router is shutting down; try again")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_FLUSH_S):
                if not self.started:
                    await self.error(error)
                elif self.streams and not self.finished:
                    # an event may have been cut short; an empty one says nothing
                    await self.end(b"\n\ndata: " + to_body(error) + b"\n\ndata: [DONE]\n\n")

    async def crashed(self, request_id: str, error: Exception) -> None:
        """For an exception that nobody expected.

        Raises it when an answer has begun: the server then logs it and closes the connection.
        """
        if self.started:
            raise error
        log.error("request %s: a bug", request_id, exc_info=error)
        await self.error(RouterError("internal error"))


class DisconnectWatch:
    """While entered, a client that leaves cancels the current task; outside this shows as ClientGone.

    ASGI tells of a disconnect only to those who await `receive`, so a task does that beside the work.
    """

    __slots__ = ("_gone", "_receive", "_reply", "_task", "_watcher")

    def __init__(self, receive: Receive, reply: Reply) -> None:
        self._receive = receive
        self._reply = reply
        self._gone = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # an empty part of a body that was complete already
        if not self._reply.finished:  # servers say the same after the last byte of the answer
            self._gone = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._gone:
            self._task.uncancel()
            raise ClientGone from error
