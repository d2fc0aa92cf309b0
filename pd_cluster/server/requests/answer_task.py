"""One HTTP request that a coroutine answers: streamed or not, it is cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.responses import Response

from pd_cluster.errors import EngineUnavailable, PdError
from pd_http.body import ClientGone, read_body
from pd_http.dialects import dialect_of
from pd_http.held_bytes import Share
from pd_http.member_bounds import check_members
from pd_http.reply import DisconnectWatch, Reply

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from pd_cluster.server.node.feed_hub import ChargeMark
    from pd_cluster.server.state import NodeState
    from pd_http.dialect import Dialect
    from pd_http.held_bytes import HeldBytes

logger = logging.getLogger("pd_cluster.server")


class CountedReply(Reply):
    """An answer, the endpoint that it is counted under, and what is held of it."""

    __slots__ = ("endpoint", "share")

    def __init__(self, send: Send, endpoint: str, dialect: Dialect, held: HeldBytes) -> None:
        super().__init__(send, dialect)
        self.endpoint = endpoint
        self.share = Share(held)


Work = Callable[[CountedReply, bytes], Awaitable[None]]


class AnswerTask(Response):
    """Runs `work(reply, body)`. The client gets its errors; its outcome is counted under `reply.endpoint`."""

    def __init__(self, state: NodeState, endpoint: str, work: Work, charge: ChargeMark) -> None:
        self._state = state
        self._endpoint = endpoint
        self._work = work
        self._charge = charge
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = CountedReply(send, self._endpoint, dialect_of(scope["path"]), self._state.held)
        role = self._state.role
        role_changes = role.take()
        self._state.num_in_flight += 1
        self._state.metrics.in_flight.inc()
        try:
            outcome = await self._run(reply, scope, receive)
        finally:
            self._charge.end()
            self._state.num_in_flight -= 1
            role.drop(role_changes)
            self._state.metrics.in_flight.dec()
        self._state.metrics.requests.labels(reply.endpoint, outcome).inc()

    async def _run(self, reply: CountedReply, scope: Scope, receive: Receive) -> str:
        try:
            body = await read_body(scope, receive, self._state.max_body_bytes)
            with reply.share, Share(self._state.held) as reply.body_share, DisconnectWatch(receive, reply):
                reply.body_share.grow(len(body))
                await self._guarded(reply, body)
        except ClientGone:
            return "disconnected"
        except PdError as error:  # of the body
            await reply.fail(error)
        except asyncio.CancelledError:
            # The node stops, and its drain time is over. This is the end of the task: raised again, uvicorn would log a
            # traceback for each stream, 10 to 20 ms before the last words of the next one
            await reply.fail(EngineUnavailable("this node is shutting down"))
        return "ok" if reply.status < 400 else "client_error" if reply.status < 500 else "server_error"

    async def _guarded(self, reply: CountedReply, body: bytes) -> None:
        try:
            await self._state.turns.take(len(body))
            check_members(body, reply.dialect.bounds)
            await self._work(reply, body)
        except PdError as error:
            if error.status >= 500:
                logger.warning("%s: %s", self._endpoint, error)
            await reply.fail(error)
        except Exception:
            logger.exception("%s: a bug", self._endpoint)
            await reply.fail(PdError("internal error"))
