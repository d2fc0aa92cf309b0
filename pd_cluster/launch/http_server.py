"""The node's HTTP server, without uvicorn's signal handling, on a socket that is already listening."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from pd_http.leaving import LeavingServer
from pd_http.server import server_config
from pd_http.sockets import url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    import uvicorn
    from fastapi import FastAPI

    from pd_cluster.config import NodeConfig
    from pd_cluster.engine.client import EngineClient
    from pd_cluster.server.state import NodeState

FILES_PER_REQUEST = 2  # the client's connection, and one to a prefill node
# Routers learn it in 10 ms by the feed that a node drains, or at their next poll of /health. Those without a word keep
# an idle connection; a request that comes on it later is refused, and asked of another node.
LINGER_S = 1.0


class _Uvicorn(LeavingServer):
    def __init__(self, config: uvicorn.Config, up: asyncio.Event) -> None:
        super().__init__(config, LINGER_S, None)
        self._up = up

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # NodeProcess handles signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._up.set()


class HttpServer:
    """Serves a node's app. Call `run` once, as a task; `up` is set when requests are answered."""

    def __init__(self, config: NodeConfig, listener: socket.socket, client: EngineClient) -> None:
        self._config = config
        self._listener = listener
        self._client = client
        self._uvicorn: _Uvicorn | None = None
        self._state: NodeState | None = None
        self._closing = False
        self.up = asyncio.Event()

    @property
    def url(self) -> str:
        return url_of(self._listener, self._config.server.host, self._config.http.scheme)

    async def run(self) -> None:
        """Serve until `stop_accepting` and the last connection ends. Raises StartupError if the app cannot be built."""
        # in a thread: imports and the tokenizer take seconds, in which signals must be handled
        app, state = await asyncio.to_thread(_build_app, self._config, self._client)
        self._state = state
        settings = server_config(app, self._config.http, state.metrics.http, FILES_PER_REQUEST)
        self._uvicorn = _Uvicorn(settings, self.up)
        if not self._closing:
            await self._uvicorn.serve([self._listener])

    async def load_adapters(self) -> None:
        """Load those of the command line, once `up` is set. Raises StartupError."""
        if self._state is not None:
            await self._state.adapters.load_own()

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return self._state is not None and self._state.num_in_flight > 0

    def drain(self, linger_s: float = LINGER_S) -> None:
        """Answer new requests with 503, and /health with "draining". Answers ask clients to close their connections.

        Connections are still accepted: a router takes a node that refuses them for dead, and moves its streams. One on
        which no request comes for `linger_s` is closed.
        """
        self._closing = True
        if self._uvicorn is not None:
            self._uvicorn.leave(linger_s)
        if self._state is not None:
            self._state.draining = True
            self._state.feed.close()

    def stop_accepting(self) -> None:
        """Accept no new connection once the time of `drain` is over, and let `run` return with the last request."""
        self.drain()
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    async def cut(self, run: asyncio.Task[None], flush_s: float) -> None:
        """Cancel the requests that still run, and stop accepting when each has its last words, or after `flush_s`.

        In this order: a router that finds the port closed takes the node for dead, and does not wait for last words.
        Then wait for `run` to return. All of it takes up to twice `flush_s`.
        """
        self.drain(0.0)
        if self._uvicorn is not None:
            waiting = set(self._uvicorn.server_state.tasks)
            for task in waiting:
                task.cancel()
            if waiting:
                _, waiting = await asyncio.wait(waiting, timeout=flush_s)
            self.stop_accepting()
            if not waiting:
                await asyncio.wait({run}, timeout=flush_s)
            self._uvicorn.force_exit = True
        await asyncio.wait({run}, timeout=flush_s)


def _build_app(config: NodeConfig, client: EngineClient) -> tuple[FastAPI, NodeState]:
    from pd_cluster.server.app import create_app
    from pd_cluster.server.state import NodeState

    state = NodeState.load(config, client)
    return create_app(state), state
