"""The router's answer to a client: how it ends when the router stops or has a bug."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from pd_http.errors import PdError
from pd_http.held_bytes import Share
from pd_http.reply import Reply
from pd_http.unfinished_requests import SMALL_BYTES
from pd_router.errors import Stopping

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Send

    from pd_http.held_bytes import HeldBytes
    from pd_http.reply import HeaderList
    from pd_router.calls.client_call import ClientCall

log = logging.getLogger("pd_router")
STOP_FLUSH_S = 1.0  # time for a client to accept the last bytes of a stopping router


class RouterReply(Reply):
    """Every answer carries `x-request-id`; errors with status 503 carry `retry-after`."""

    __slots__ = ("_request_id",)

    def __init__(self, send: Send, request_id: str) -> None:
        super().__init__(send)
        self._request_id = request_id
        self.headers["x-request-id"] = request_id

    async def fail(self, error: PdError) -> None:
        if error.status == 503 and not self.started:
            self.headers["retry-after"] = "1"
        await super().fail(error)

    async def stopped(self) -> None:
        """End the answer, because the router stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_FLUSH_S):
                await self.fail(Stopping("the router is shutting down; try again"))

    async def crashed(self, error: Exception) -> None:
        """End the answer after a bug in the router.

        Raises `error` if an answer has begun: the server then logs `error` and closes the connection.
        """
        if self.started:
            raise error
        log.error("request %s: a bug", self._request_id, exc_info=error)
        await self.fail(PdError("internal error"))


class CallReply(RouterReply):
    """The answer to a call on the token path: a stream's bytes need not wait for a task."""

    __slots__ = ("_call", "_held")

    def __init__(self, call: ClientCall, request_id: str, held: HeldBytes) -> None:
        super().__init__(call.send, request_id)
        self._call = call
        self._held = held

    async def whole(self, status: int, headers: HeaderList, content: bytes) -> None:
        """Raises NoRoom for a large one."""
        if len(content) > SMALL_BYTES:
            self.hold(len(content))
        await super().whole(status, headers, content)

    def hold(self, num_bytes: int) -> None:
        """Count so much of the answer until the client has taken it. Once, before the start. Raises NoRoom."""
        self._call.share = Share(self._held)
        self._call.share.grow(num_bytes)

    def write_now(self, content: bytes) -> None:
        """Send a part of a stream that has started. `watch_flow` tells when the client reads too slowly."""
        if content:
            self._call.write(content)

    def watch_flow(self, listener: Callable[[bool], None] | None) -> None:
        self._call.watch_flow(listener)
