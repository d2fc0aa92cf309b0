"""A bad network between a router and a node: bytes come late, some of them as late as lost ones, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHUNK_BYTES = 1 << 16
RESENT_S = 0.2  # how late a lost segment comes: the least time of TCP until it is sent again


class Relay:
    """Passes connections on to `target`, an URL. While it is parted, nothing passes, and connections stay open."""

    def __init__(self, target: str, *, delay_s: float = 0.0, lost: float = 0.0) -> None:
        self.url = ""
        self._host, _, self._port = target.removeprefix("http://").partition(":")
        self._delay_s = delay_s
        self._lost = lost
        self._chance = random.Random(target)
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self._joined.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def parted(self) -> AsyncIterator[None]:
        self._joined.clear()
        try:
            yield
        finally:
            self._joined.set()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_writer = None
        try:
            await self._joined.wait()
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # of `running`: nothing else cancels it
        finally:
            self._tasks.discard(task)
            for one in (writer, far_writer):
                if one is not None:
                    one.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(RESENT_S if self._chance.random() < self._lost else self._delay_s)
                await self._joined.wait()
                writer.write(chunk)
                await writer.drain()
            writer.close()
