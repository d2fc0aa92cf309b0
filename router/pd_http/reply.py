"""The answering side of one HTTP request, and the watch that ends the work when the client leaves."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from pd_http.body import ClientGone
from pd_http.dialect import OPENAI, Dialect
from pd_http.json_pieces import json_pieces
from pd_http.sse import EVENT_STREAM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import TypeAlias

    from starlette.types import Receive, Send

    from pd_http.errors import PdError
    from pd_http.held_bytes import Share

    HeaderList: TypeAlias = list[tuple[bytes, bytes]]
    ErrorEvent: TypeAlias = Callable[[PdError], bytes]

JSON_TYPE = (b"content-type", b"application/json")
PIECE_BYTES = 1 << 20  # an answer above it leaves in pieces of about that size
EVENTS_HEADERS = ((b"content-type", EVENT_STREAM.encode() + b"; charset=utf-8"), (b"cache-control", b"no-cache"))


class Reply:
    """One answer. Either `json` or `whole` once, or `start` or `start_events`, then `write`..., then `end`.

    `body_share`: of the request's body, which is kept as long as the answer takes. One of up to PIECE_BYTES, as prompts
    have, counts until the head of the answer only: many streams may be under way. Without the others' count 40 streams
    with 8 MB that are ignored took 0.3 GB beside the bound.
    """

    __slots__ = ("_on_error", "_send", "body_share", "dialect", "ended", "headers", "started", "status")

    def __init__(self, send: Send, dialect: Dialect = OPENAI) -> None:
        """`dialect`: of its errors."""
        self._send = send
        self.dialect = dialect
        self._on_error: ErrorEvent | None = None
        self.body_share: Share | None = None
        self.headers: dict[str, str] = {}  # of any answer, beside its own
        self.started = False
        self.ended = False  # every byte was handed to the server: a disconnect does not matter any more
        self.status = 0

    async def start(self, status: int, headers: HeaderList, on_error: ErrorEvent | None = None) -> None:
        """`on_error` makes the last bytes of an answer that fails after its start. None: it is left incomplete."""
        self.started = True
        self.status = status
        if self.body_share is not None and self.body_share.num_come <= PIECE_BYTES:
            self.body_share.close()
        self._on_error = on_error
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *_raw(self.headers)]})

    async def start_events(self, headers: Mapping[str, str], on_error: ErrorEvent | None = None) -> None:
        await self.start(200, [*EVENTS_HEADERS, *_raw(headers)], on_error or self.dialect.error_event)

    async def write(self, content: bytes) -> None:
        if content:
            await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def whole(self, status: int, headers: HeaderList, content: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", str(len(content)).encode())])
        await self.end(content)

    async def json(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        """`body` may have JsonLists. The next piece of a long one is made when the client has taken those before."""
        raw, parts, num_bytes = [JSON_TYPE, *_raw(headers or {})], list[bytes](), 0
        for part in json_pieces(body):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > PIECE_BYTES:
                if not self.started:
                    await self.start(status, raw)
                await self.write(b"".join(parts))
                await asyncio.sleep(0)  # the socket may have taken it at once: other requests have a turn
                parts, num_bytes = [], 0
        if self.started:
            await self.end(b"".join(parts))
        else:
            await self.whole(status, raw, b"".join(parts))

    async def fail(self, error: PdError) -> None:
        """Answer with `error`: as a status if nothing was sent, else as the last event of a stream.

        Any other answer that has begun is left incomplete: the server then closes the connection. A status 503 says
        when to try again, a status 401 how to name a key (RFC 9110, 15.5.2).
        """
        if not self.started:
            self.headers.update(error.answer_headers)
            if error.status == HTTPStatus.SERVICE_UNAVAILABLE or error.retry_after_s:
                self.headers["retry-after"] = str(error.retry_after_s or 1)
            if error.status == HTTPStatus.UNAUTHORIZED:
                self.headers["www-authenticate"] = "Bearer"
            await self.json(self.dialect.status(error), self.dialect.error_body(error))
        elif self._on_error is not None and not self.ended:
            self.status = error.status
            await self.end(self._on_error(error))


def _raw(headers: Mapping[str, str]) -> HeaderList:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A whole JSON answer as a starlette response."""
    return Response(orjson.dumps(body), status, headers, "application/json")


class DisconnectWatch:
    """While entered, a client that leaves cancels the current task; the `with` block then raises ClientGone.

    ASGI reports a disconnect only to a call of `receive`, so a second task awaits it beside the work.
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
        if not self._reply.ended:  # servers report a disconnect after the last byte of the answer too
            self._gone = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._gone:
            self._task.uncancel()
            raise ClientGone from error
