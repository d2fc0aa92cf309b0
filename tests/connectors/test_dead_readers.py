"""Readers over TCP that are killed while their questions lie unread at the owner: the owner serves on.

The owner stands still meanwhile, so that each kill comes at that event. Without `drop_resets` UCX ends the owner at
the first kill.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from pd_connectors.nixl import resets
from pd_connectors.nixl.agent import NixlAgent, Region, Remote
from pd_connectors.nixl.machine import local_network
from pd_connectors.nixl.resets import drop_resets
from pd_connectors.protocol.slices import SliceRead
from tests.connectors.forked import start_process
from tests.deadlines import HANG_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.integration

NUM_BLOCKS, BLOCK_BYTES = 32, 1 << 18  # an answer is many sends


def make_agent(name: str, value: int) -> tuple[NixlAgent, torch.Tensor]:
    memory = torch.full((NUM_BLOCKS, BLOCK_BYTES), value, dtype=torch.uint8)
    return NixlAgent(name, [memory], local_network("127.0.0.1", None)), memory


def own(pipe: Connection, silent_s: int = resets.SILENT_S) -> None:
    """Be read, and connect to each reader that is told: it reads over this connection then."""
    resets.SILENT_S = silent_s
    agent, _ = make_agent("owner", 7)
    pipe.send((agent.metadata(), agent.regions))
    with suppress(EOFError):
        while True:
            metadata, regions, listeners = pipe.recv()
            connect(agent, metadata, regions)
            drop_resets(listeners)
            pipe.send("connected")


def read(pipe: Connection, name: str, metadata: bytes, regions: tuple[Region, ...], times: int = 1) -> None:
    """Connect, then read all blocks so many times when asked to, and tell whether they are right."""
    agent, memory = make_agent(name, 0)
    pipe.send((agent.metadata(), agent.regions, agent.listeners))
    pipe.recv()
    remote = connect(agent, metadata, regions)
    pipe.send("connected")
    pipe.recv()
    handles = [handle for _ in range(times) for handle in post_all(agent, remote)]
    pipe.send("asked")
    for handle in handles:
        wait_done(agent, handle)
    pipe.send(bool((memory == 7).all()))


def connect(agent: NixlAgent, metadata: bytes, regions: tuple[Region, ...]) -> Remote:
    remote = agent.connect(metadata, regions, (SliceRead(0, 0, 0, 0, 0, BLOCK_BYTES),))
    wait_done(agent, agent.post_warm_up(remote))
    return remote


def post_all(agent: NixlAgent, remote: Remote) -> list[int]:
    """Block by block."""
    return [agent.post_read(remote, ((block,),), ((block,),)) for block in range(NUM_BLOCKS)]


def wait_done(agent: NixlAgent, handle: int) -> None:
    while not agent.is_done(handle):
        time.sleep(0.0005)


@contextmanager
def running(target: Any, *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process and our end of a pipe to it."""
    ours, theirs = Pipe()
    process = start_process(target, theirs, *arguments)
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(HANG_S)
        ours.close()


def told(pipe: Connection) -> Any:
    assert pipe.poll(HANG_S), "it says nothing"
    return pipe.recv()


def queued_bytes(owner: psutil.Process) -> tuple[int, int]:
    """On the TCP connections of a process, as the kernel tells them: not acknowledged, and not read."""
    ports = {connection.laddr.port for connection in owner.net_connections("tcp")}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    mine = [fields for fields in lines if int(fields[1].partition(":")[2], 16) in ports and fields[3] != "0A"]
    sent, unread = (sum(int(fields[4].split(":")[at], 16) for fields in mine) for at in (0, 1))
    return sent, unread


@pytest.mark.parametrize("owner_connects", [False, True])
def test_a_reader_that_is_killed_does_not_end_the_owner(monkeypatch: pytest.MonkeyPatch, owner_connects: bool) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with running(own) as (process, pipe):
        there = told(pipe)
        owner = psutil.Process(process.pid)
        with running(read, "reader-0", *there) as (reader, asked):
            here = told(asked)
            if owner_connects:
                pipe.send(here)
                assert told(pipe) == "connected"
            ask_stopped(owner, asked)
            os.kill(reader.pid or 0, signal.SIGKILL)
            reader.join(HANG_S)
        assert queued_bytes(owner)[1] > 0, "it has no question left to answer"
        owner.resume()
        check_serves(process, there)


@pytest.mark.slow
def test_a_reader_that_stands_still_for_too_long_does_not_end_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers are full, so the kernel ends the owner's connection."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with running(own, 1) as (process, pipe):
        there, owner = told(pipe), psutil.Process(process.pid)
        with running(read, "reader-0", *there, 8) as (reader, asked):  # 64 MB are more than buffers take
            told(asked)
            ask_stopped(owner, asked)
            stopped = psutil.Process(reader.pid)
            stop(stopped)
            owner.resume()
            wait_until(lambda: queued_bytes(owner)[0] > 0)
            wait_until(lambda: queued_bytes(owner)[0] == 0, lambda: queued_bytes(owner))
            check_serves(process, there)
            stopped.resume()


def ask_stopped(owner: psutil.Process, asked: Connection) -> None:
    """A reader connects, the owner is stopped, and the reader asks."""
    asked.send("connect")
    assert told(asked) == "connected"
    stop(owner)
    asked.send("read")
    assert told(asked) == "asked"


def stop(process: psutil.Process) -> None:
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def check_serves(owner: BaseProcess, there: tuple[bytes, tuple[Region, ...]]) -> None:
    """A new reader gets the right bytes."""
    with running(read, "reader", *there) as (_, asked):
        told(asked)
        asked.send("connect")
        assert told(asked) == "connected", owner.exitcode
        asked.send("read")
        assert told(asked) == "asked"
        assert told(asked) is True
    assert owner.is_alive()
