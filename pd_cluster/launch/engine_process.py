"""Starts, watches and ends the engine process of an API process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Callable

    from pd_cluster.config import NodeConfig
    from pd_cluster.engine.client import ZmqEngineClient

    SpawnEngine: TypeAlias = Callable[[NodeConfig, str], subprocess.Popen[bytes]]

logger = logging.getLogger("pd_cluster.node")

ENGINE_STOP_S = 10.0  # from the request to stop to SIGKILL
LAST_WORDS_S = 0.5  # limit for reading the last messages of a dead engine


@contextlib.asynccontextmanager
async def running_engine(
    spawn: SpawnEngine, config: NodeConfig, address: str
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run an engine process during the block. `address`: the ipc prefix that a ZmqEngineClient has bound."""
    process = spawn(config, address)
    try:
        yield process
        _hang_up(process)
        try:
            await asyncio.wait_for(exit_of(process), ENGINE_STOP_S)
        except TimeoutError:
            logger.warning("the engine did not stop within %g s: killing it", ENGINE_STOP_S)
    finally:
        process.kill()
        process.wait()
        _hang_up(process)


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close its standard input, which tells an engine to stop. Idempotent."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it died before it read its configuration
            process.stdin.close()


async def exit_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process to end. Returns its exit status."""
    if process.poll() is not None:
        return process.returncode
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    fd = os.pidfd_open(process.pid)  # readable when the process ends; no thread, no polling, no signal handler
    try:
        loop.add_reader(fd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return process.wait()


async def end_of_engine(client: ZmqEngineClient, process: subprocess.Popen[bytes]) -> str:
    """Deliver the engine's messages until it ends; then fail open requests. Returns why it ended."""
    watch, exited = asyncio.create_task(client.watch()), asyncio.create_task(exit_of(process))
    try:
        await asyncio.wait({watch, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not watch.done():
            await asyncio.wait({watch}, timeout=LAST_WORDS_S)
        if watch.done() and (error := watch.exception()) is not None:
            client.declare_dead(f"the engine's messages cannot be read: {error!r}")
        elif not client.death:
            client.declare_dead(f"the engine process ended with status {exited.result()}")
        if client.is_stalled:
            process.kill()
        return client.death
    finally:
        for task in (watch, exited):
            task.cancel()
        await asyncio.gather(watch, exited, return_exceptions=True)
