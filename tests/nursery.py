"""Forks the nodes and the router of a forked `pd-cluster up`, so that they need not import all again.

    up                                      nursery              a process in between     a node or the router
      Nursery() ── before it has a thread ──► waits
      create_subprocess_exec ── order ──────► forks ─────────────► forks, and ends ────────► leads a session, and
        is its subreaper meanwhile,           waits for its end                                runs the command
      NursedProcess ◄── id ────────────────── tells it
        and so its parent

`up` waits for it and reads its status, as of one that it has executed. What is no node and no router (a pool) is
executed. So is all that `up` starts when it is a process of its own itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PROGRAM = (sys.executable, "-P", "-m", "pd_cluster.launch.cli")
ROLES = ("prefill", "decode", "mixed", "router")
# How `up` starts its children, which is how they are forked here
STREAMS = {
    "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True
}  # fmt: skip
MAX_ORDER_BYTES = 1 << 20
MAX_FDS = 16
FREE_FD = 200  # numbers from here on are no socket's that a child inherits
PR_SET_CHILD_SUBREAPER = 36


class Nursery:
    """Ends with the process that made it. `run` runs a command in a child and ends with SystemExit."""

    def __init__(self, run: Callable[[list[str], dict[str, str]], None]) -> None:
        self._run = run
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._orders.close()
            self._serve(theirs)  # returns never: a child raises what its command raises
        theirs.close()

    async def create_subprocess_exec(
        self, *arguments: str, env: Mapping[str, str], pass_fds: Sequence[int], limit: int, **streams: Any
    ) -> asyncio.subprocess.Process | NursedProcess:
        """As `asyncio.create_subprocess_exec`, for the calls of `pd_cluster.launch.supervise`."""
        assert streams == STREAMS, streams
        if arguments[: len(PROGRAM)] != PROGRAM or arguments[len(PROGRAM)] not in ROLES:
            return await EXECUTE(*arguments, env=env, pass_fds=pass_fds, limit=limit, **streams)
        output, written = os.pipe()
        try:
            pid = self._fork(arguments[len(PROGRAM) :], env, (written, *pass_fds), (1, *pass_fds))
        finally:
            os.close(written)
        loop, stdout = asyncio.get_running_loop(), asyncio.StreamReader(limit)
        await loop.connect_read_pipe(
            functools.partial(asyncio.StreamReaderProtocol, stdout), os.fdopen(output, "rb", buffering=0)
        )
        return NursedProcess(pid, stdout)

    def _fork(
        self, arguments: Sequence[str], env: Mapping[str, str], fds: Sequence[int], numbers: Sequence[int]
    ) -> int:
        order = json.dumps([[*arguments], dict(env), [*numbers]]).encode()
        adopt_orphans(True)
        try:
            socket.send_fds(self._orders, [order], fds)
            return int(self._orders.recv(MAX_ORDER_BYTES))
        finally:
            adopt_orphans(False)  # an engine that outlives its node is not this process's child

    def _serve(self, orders: socket.socket) -> None:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        while True:
            order, fds, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, MAX_FDS)
            if not order:
                os._exit(0)
            told, tell = os.pipe()
            between = os.fork()
            if between == 0:
                if os.fork():
                    os._exit(0)
                os.setsid()
                os.write(tell, str(os.getpid()).encode())
                for fd in (told, tell, orders.detach()):
                    os.close(fd)
                arguments, environment, numbers = json.loads(order)
                renumber(fds, numbers)
                for number, handler in before.items():
                    signal.signal(number, handler)
                self._run(arguments, environment)
            for fd in (tell, *fds):
                os.close(fd)
            os.waitpid(between, 0)
            orders.sendall(os.read(told, MAX_ORDER_BYTES))
            os.close(told)


class NursedProcess:
    """What `pd_cluster.launch.supervise` uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)


def adopt_orphans(on: bool) -> None:
    """Whether this process becomes the parent of descendants when their own parents end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def renumber(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give these descriptors these numbers. The first is of the output, and of errors too; there is no input."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, FREE_FD) for fd in (*fds, os.open(os.devnull, os.O_RDONLY), fds[0])]
    os.closerange(3, FREE_FD)
    for fd, number in zip(high, (*numbers, 0, 2), strict=True):
        os.dup2(fd, number)
        os.close(fd)


EXECUTE = asyncio.create_subprocess_exec
