"""One HTTP exchange whose answer is made by a coroutine: streamed or not, it is cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from pd_cluster.errors import BodyTooLarge, EngineUnavailable, InvalidRequest, PdError
from pd_http import body as http_body
from pd_http.body import ClientGone

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from pd_cluster.server.state import NodeState

logger = logging.getLogger("pd_cluster.server")

SSE_DONE = b"data: [DONE]\n\n"


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A whole JSON answer."""
    return Response(orjson.dumps(body), status, headers, "application/json")


def error_body(error: PdError) -> dict[str, Any]:
    """OpenAI's error object."""
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"error": {"message": str(error), "type": error.kind, "param": param, "code": error.code}}


def error_event(error: PdError) -> bytes:
    """How a client's stream ends when it fails."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n" + SSE_DONE


ErrorEvent = Callable[[PdError], bytes]


class Reply:
    """The answering side of an exchange. Either `json` once, or `start_events`, `write`..., `end`."""

    def __init__(self, send: Send, endpoint: str = "") -> None:
        self._send = send
        self.endpoint = endpoint  # what it is counted under
        self.headers: dict[str, str] = {}  # of any answer, beside its own
        self.started = False
        self.ended = False  # every byte is on its way: a disconnect is then no news
        self.status = 0
        self._error_event: ErrorEvent = error_event

    async def json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = orjson.dumps(body)
        await self._start(
            status, {"content-type": "application/json", "content-length": str(len(content))} | (headers or {})
        )
        await self.end(content)

    async def start_events(self, headers: dict[str, str], on_error: ErrorEvent = error_event) -> None:
        """`on_error` writes a failure that comes when the status is already out."""
        self._error_event = on_error
        await self._start(
            200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"} | headers
        )

    async def write(self, content: bytes) -> None:
        if content:
            await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def fail(self, error: PdError) -> None:
        """As a status when nothing was sent, else as the stream's last event."""
        if not self.started:
            await self.json(error.status, error_body(error))
        elif not self.ended:
            self.status = error.status
            await self.end(self._error_event(error))

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        self.status = status
        raw = [(name.encode(), value.encode("latin-1")) for name, value in (headers | self.headers).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


Work = Callable[[Reply, bytes], Awaitable[None]]


class AnswerTask(Response):
    """Runs `work(reply, body)`; its errors become the client's, its end is counted under `endpoint`."""

    def __init__(self, state: NodeState, endpoint: str, work: Work) -> None:
        self._state = state
        self._endpoint = endpoint
        self._work = work
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._endpoint)
        self._state.num_in_flight += 1
        self._state.metrics.in_flight.inc()
        try:
            outcome = await self._run(reply, scope, receive)
        finally:
            self._state.num_in_flight -= 1
            self._state.metrics.in_flight.dec()
        self._state.metrics.requests.labels(reply.endpoint, outcome).inc()

    async def _run(self, reply: Reply, scope: Scope, receive: Receive) -> str:
        try:
            body = await read_body(scope, receive, self._state.max_body_bytes)
        except ClientGone:
            return "disconnected"
        except BodyTooLarge as error:
            await reply.fail(error)
            return "client_error"
        work = asyncio.create_task(self._guarded(reply, body))
        leave = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait({work, leave}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not reply.ended:
                return "disconnected"
            await work
        except asyncio.CancelledError:  # the node stops and could not wait
            work.cancel()
            await asyncio.wait({work})
            await reply.fail(EngineUnavailable("this node is shutting down"))
            raise
        finally:
            for task in (work, leave):
                task.cancel()
            await asyncio.gather(work, leave, return_exceptions=True)
        return "ok" if reply.status < 400 else "client_error" if reply.status < 500 else "server_error"

    async def _guarded(self, reply: Reply, body: bytes) -> None:
        try:
            await self._work(reply, body)
        except PdError as error:
            if error.status >= 500:
                logger.warning("%s: %s", self._endpoint, error)
            await reply.fail(error)
        except Exception:
            logger.exception("%s: a bug", self._endpoint)
            await reply.fail(PdError("internal error"))


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge, ClientGone."""
    try:
        return await http_body.read_body(scope, receive, max_bytes)
    except http_body.BodyTooLong as error:
        raise BodyTooLarge(str(error)) from error
