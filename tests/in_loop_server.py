"""uvicorn in a test's own event loop, without uvicorn's waits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn

from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

POLL_S = 0.001


class InLoopServer(uvicorn.Server):
    """Leaves signals alone, says when it listens, and ends as soon as it may.

    uvicorn itself looks every 100 ms whether it should end and then sleeps for 100 ms: 0.2 s for each test with a
    server, and there are 500.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's: no new connections, then `timeout_graceful_shutdown` for those that answer, then lifespan."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - they have no event
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()


@contextlib.asynccontextmanager
async def in_loop(config: uvicorn.Config, listener: socket.socket) -> AsyncIterator[InLoopServer]:
    """The server, which listens, until the block is left. Closes `listener`."""
    # uvloop sets this for each connection, asyncio does not: an answer in two parts would wait 40 ms for its second
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = InLoopServer(config)
    task = asyncio.create_task(server.serve([listener]))
    up = asyncio.create_task(server.up.wait())
    try:
        await asyncio.wait({task, up}, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        assert server.up.is_set(), "the server did not start"
        yield server
    finally:
        up.cancel()
        server.stop.set()
        async with asyncio.timeout(HANG_S):
            await task
        listener.close()
