"""How an HTTP server leaves, and uvicorn's server that does so. No request that a client sends in time is lost.

    phase     begins                    meanwhile                                            is over
    closing   with the signal           connections are accepted; answers that begin say     linger_s later; earlier
                                        `connection: close`, unless another request waits    if no connection is open
                                        after them, and the connection ends after them       or came in QUIET_S
    drain     when the socket's queue   the same for what is open; a connection on which     when none is open, or
              is empty and it is        no request has come for linger_s is closed           drain_s after the signal
              closed
    cut       with drain_s              no request begins; each that runs gets its last words    when they are told

A second SIGINT (at a node any second signal) ends the process at once.

An answer that had begun cannot say more: its connection waits for the next request, as an idle one. HTTP/1.1 has no
way to close an idle connection without a risk, because a request may be on its way. So the server closes those that
clients no longer use: httpx (openai and anthropic too) uses none that was idle for 5 s, Node's fetch none after 4 s.
Other clients see the end when it comes. It meets a request on its way, of a client that sends one in linger_s, once in
linger_s / (half a round trip): once in 12,000 where a round trip takes 1 ms. A connection is closed in two steps, first
the sending side: what still comes is read for a while, because unread bytes would turn the end into a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    import socket

    from pd_http.gate import HttpGate

QUIET_S = 0.25  # clients that open a connection for each request have none between two
POLL_S = 0.02
LEAST_DRAIN_S = 1.0  # also without a drain: for what is being sent


class LeavingServer(uvicorn.Server):
    """Leaves as above, `linger_s` (at most `drain_s`) after `should_exit` is set or `leave` is called.

    `drain_s` None: the process has a deadline of its own.
    """

    is_succeeded = False  # another process accepts from the same queue: this one stops at once

    def __init__(self, config: uvicorn.Config, linger_s: float, drain_s: float | None) -> None:
        super().__init__(config)
        self._gate: HttpGate = config.http.gate  # type: ignore[union-attr]
        self.linger_s = linger_s if drain_s is None else min(linger_s, drain_s)
        self.drain_s = drain_s
        self._left_s = self._ends_s = inf  # when the closing answers began, and when they end

    def leave(self, linger_s: float | None = None) -> None:
        """Begin the closing answers, or shorten their time to `linger_s` from now on."""
        now_s = time.monotonic()
        linger_s = self.linger_s if linger_s is None else linger_s
        if now_s + linger_s < self._ends_s:
            self._left_s, self._ends_s = min(self._left_s, now_s), now_s + linger_s
            self._gate.leave(linger_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.is_succeeded:
            for server in self.servers:
                server.close()
        if self._left_s == inf:
            self.leave()
        while not self.force_exit and (now_s := time.monotonic()) < self._ends_s:
            if not self.server_state.connections and now_s - self._gate.joined_s >= QUIET_S:
                break
            await asyncio.sleep(POLL_S)
        if not self.is_succeeded:
            await self._empty(sockets or [])
        if self.drain_s is not None:
            left_s = self._left_s + self.drain_s - time.monotonic()
            self.config.timeout_graceful_shutdown = left_s = max(LEAST_DRAIN_S, left_s)  # type: ignore[assignment]
            asyncio.get_running_loop().call_later(left_s, self._gate.cut)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the app as it is, and its log has a traceback then
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAST_DRAIN_S):
                    await self.lifespan.shutdown()

    async def _empty(self, sockets: list[socket.socket]) -> None:
        """Stop accepting after the last connection of the queue: to close it would reset those."""
        queues = [one.dup() for one in sockets]
        for server in self.servers:
            server.close()
        kind: Any = self.config.http_protocol_class
        make = partial(kind, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        loop = asyncio.get_running_loop()
        for queue in queues:
            queue.setblocking(False)
            with queue, contextlib.suppress(OSError):  # BlockingIOError: it is empty
                for _ in range(self.config.backlog):
                    accepted, _ = queue.accept()
                    accepted.setblocking(False)
                    await loop.connect_accepted_socket(make, accepted)
