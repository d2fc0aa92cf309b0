"""SIGHUP: a router starts its successor, which inherits the listening socket, and drains when that one serves.

    predecessor                                         successor (the same command, and --listen-fd)
      what orders have changed, as a line of JSON   ──►  takes it over, polls the nodes, serves
      drains and ends                               ◄──  SERVING

Both accept from one queue of connections, so none is refused. If the successor ends, or does not serve within the
deadline, the predecessor continues.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from pd_http.sockets import url_of
from pd_router.node_change import Heritage

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

PREDECESSOR_ENV = "PD_PREDECESSOR_FD"  # in a successor's environment: its end of a socket pair
SERVING = b"serving\n"
START_DEADLINE_S = 60.0  # until a successor serves: imports, and a poll of every node
TELL_DEADLINE_S = 10.0  # until a predecessor has written its heritage
MAX_HERITAGE_BYTES = 1 << 24


class SuccessionFailed(Exception):
    """No successor serves. The message names the reason."""


class Succession:
    """The predecessor's side. `heritage` is called when a successor starts."""

    def __init__(self, listener: socket.socket, heritage: Callable[[], Heritage]) -> None:
        self._listener = listener
        self._heritage = heritage

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
                    await loop.sock_sendall(own, self._heritage().to_line())
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
        return subprocess.Popen(command, pass_fds=fds, env={**os.environ, PREDECESSOR_ENV: str(fds[1])})


class Predecessor:
    """The successor's side. Without a predecessor there is no heritage, and `serving` does nothing."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Waits for the predecessor's heritage. Raises OSError if it cannot be read."""
        fd = environ.pop(PREDECESSOR_ENV, "")  # not for this router's own successor
        self.heritage = Heritage()
        self._channel: socket.socket | None = None
        if fd.isdigit():
            self._channel = socket.socket(fileno=int(fd))
            self._channel.set_inheritable(False)
            self._channel.settimeout(TELL_DEADLINE_S)
            with self._channel.makefile("rb") as stream:
                line = stream.readline(MAX_HERITAGE_BYTES)
            try:
                self.heritage = Heritage.from_line(line)
            except ValueError as error:
                self._channel.close()
                raise OSError(f"the router before this one sent {line[:80]!r}") from error

    def serving(self, listener: socket.socket, scheme: str = "http") -> None:
        """Print the router's URL, and tell the predecessor that it can end. One that has ended is not an error."""
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
