"""The API process's hold on its engine process: started, watched, ended by its own id."""

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

ENGINE_STOP_S = 10.0  # the word to stop, to SIGKILL
LAST_WORDS_S = 0.5  # a dead engine's last messages are read within this


@contextlib.asynccontextmanager
async def running_engine(
    spawn: SpawnEngine, config: NodeConfig, address: str
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """An engine process for the length of the block. `address`: the ipc prefix that a ZmqEngineClient has bound."""
    process = spawn(config, address)
    try:
        yield process
        _hang_up(process)
        try:
            await asyncio.wait_for(exit_of(process), ENGINE_STOP_S)
        except TimeoutError:
            logger.warning("the engine did not stop within %g s of being told: killing it", ENGINE_STOP_S)
    finally:
        process.kill()
        process.wait()
        _hang_up(process)


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """End its standard input: that is how an engine is told to stop. Idempotent."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it died before it had read its configuration
            process.stdin.close()


async def exit_of(process: subprocess.Popen[bytes]) -> int:
    """The process's exit status, when it has one."""
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
    """Deliver the engine's messages until it is gone; then fail what is open and say why it went."""
    watch, exited = asyncio.create_task(client.watch()), asyncio.create_task(exit_of(process))
    try:
        await asyncio.wait({watch, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not watch.done():
            await asyncio.wait({watch}, timeout=LAST_WORDS_S)
        if watch.done() and (error := watch.exception()) is not None:
            client.declare_dead(f"the engine's messages cannot be read: {error!r}")
        elif not client.death:
            client.declare_dead(f"the engine process ended with status {exited.result()}")
        return client.death
    finally:
        for task in (watch, exited):
            task.cancel()
        await asyncio.gather(watch, exited, return_exceptions=True)
