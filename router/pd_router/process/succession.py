"""SIGHUP: a router starts its successor, which inherits the listening socket, and drains when that one serves.

    old router                                          successor (the same command, and --listen-fd)
      what orders have changed, as a line of JSON   ──►  takes it over, polls the nodes, serves
      drains and ends                               ◄──  SERVING

Both accept from one queue of connections, so none is refused. If the successor ends, or does not serve within the
deadline, the old router continues.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from pd_http.sockets import url_of
from pd_router.sources.node_change import RestartState

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

OLD_ROUTER_ENV = "PD_OLD_ROUTER_FD"  # in a successor's environment: its end of a socket pair
SERVING = b"serving\n"
START_DEADLINE_S = 60.0  # until a successor serves: imports, and a poll of every node
TELL_DEADLINE_S = 10.0  # until an old router has written its state
MAX_STATE_BYTES = 1 << 24


class SuccessionFailed(Exception):
    """No successor serves. The message names the reason."""


class Succession:
    """The old router's side. `restart_state` is called when a successor starts."""

    def __init__(self, listener: socket.socket, restart_state: Callable[[], RestartState]) -> None:
        self._listener = listener
        self._restart_state = restart_state

    async def run(self) -> int:
        """Start a successor and wait until it serves. Returns its process id. Raises SuccessionFailed, OSError.

        Cancelling the call ends the successor.
        """
        own, theirs = socket.socketpair()
        own.setblocking(False)
        with own:
            with theirs:
                process = self._spawn(theirs)
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    loop = asyncio.get_running_loop()
                    await loop.sock_sendall(own, self._restart_state().to_line())
                    word = await loop.sock_recv(own, len(SERVING))
                if word == SERVING:
                    return process.pid
                raise SuccessionFailed("it ended before it served; its log names the reason")
            except TimeoutError as error:
                _end(process)
                raise SuccessionFailed(f"it did not serve within {START_DEADLINE_S:g} s") from error
            except BaseException:
                _end(process)
                raise

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fds = self._listener.fileno(), theirs.fileno()
        command = [sys.executable, *sys.orig_argv[1:], f"--listen-fd={fds[0]}"]
        return subprocess.Popen(command, pass_fds=fds, env={**os.environ, OLD_ROUTER_ENV: str(fds[1])})


class OldRouter:
    """The successor's side. Without an old router the restart state is empty, and `serving` does nothing."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Waits for the old router's state. Raises OSError if it cannot be read."""
        fd = environ.pop(OLD_ROUTER_ENV, "")  # not for this router's own successor
        self.restart_state = RestartState()
        self._channel: socket.socket | None = None
        if fd.isdigit():
            self._channel = socket.socket(fileno=int(fd))
            self._channel.set_inheritable(False)
            self._channel.settimeout(TELL_DEADLINE_S)
            with self._channel.makefile("rb") as stream:
                line = stream.readline(MAX_STATE_BYTES)
            try:
                self.restart_state = RestartState.from_line(line)
            except ValueError as error:
                self._channel.close()
                raise OSError(f"the router before this one sent {line[:80]!r}") from error

    def serving(self, listener: socket.socket, scheme: str = "http") -> None:
        """Print the router's URL, and tell the old router that it can end. One that has ended is not an error."""
        sys.stdout.write(f"router ready on {url_of(listener, scheme=scheme)}\n")
        sys.stdout.flush()
        if self._channel is not None:
            with self._channel as channel:
                self._channel = None
                try:
                    channel.sendall(SERVING)
                except OSError:
                    return


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
