"""Forks children on orders of one client, or of several that share the server: see fork_server.py."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

LIFELINE = 0  # of a server that clients share: standard input
MAX_ORDER_BYTES = 1 << 20
MAX_FDS = 5  # three streams, perhaps a lifeline, and the socket for answers
PR_SET_PDEATHSIG = 1


class Order(NamedTuple):
    """`python -m MODULE ARGUMENTS`, and the descriptors that a child has for it: its streams from number 0 on."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    streams: list[int]


class ForkingServer:
    """Forks a child for each order, and tells of its start and its end on the order's own socket."""

    def __init__(self, orders: socket.socket, prepare: Callable[[], None]) -> None:
        """`orders`: of the only client, or what its clients connect to. `prepare`: called when the first one is there.

        A client that is gone leaves no child behind: they are told to end (SIGTERM).
        """
        self._prepare: Callable[[], None] | None = prepare
        self._clients: dict[int, socket.socket] = {}  # by their descriptors
        self._children: dict[int, tuple[int, socket.socket, int]] = {}  # by pidfd: id, the order's socket, the client
        self._poll = select.poll()
        self._door: socket.socket | None = None
        if orders.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            self._door = orders
            for fd in (LIFELINE, orders.fileno()):
                self._poll.register(fd, select.POLLIN)
        else:
            self._greet(orders)

    def serve(self) -> Order | None:
        """Until the end of the only client, or of standard input. In a child: returns what the child is to run."""
        while self._door or self._clients:
            for fd, _ in self._poll.poll():
                if self._door and fd == LIFELINE:
                    return None
                if self._door and fd == self._door.fileno():
                    self._greet(self._door.accept()[0])
                elif fd not in self._clients:
                    self._tell_end(fd)
                elif (taken := self._take(fd)) is not None:
                    return taken
        return None

    def _greet(self, client: socket.socket) -> None:
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        self._clients[client.fileno()] = client
        self._poll.register(client, select.POLLIN)

    def _take(self, client: int) -> Order | None:
        """An order, or a client's end."""
        try:  # a whole one, by SOCK_SEQPACKET
            order, fds, _, _ = socket.recv_fds(self._clients[client], MAX_ORDER_BYTES, MAX_FDS)
        except ConnectionError:
            order, fds = b"", []
        if order:
            return self._fork(order, fds, client)
        self._poll.unregister(client)
        self._clients.pop(client).close()
        for pidfd in [pidfd for pidfd, child in self._children.items() if child[2] == client]:
            pid, channel, _ = self._children[pidfd]
            self._children[pidfd] = pid, channel, -1  # another client may get this descriptor
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        return None

    def _fork(self, order: bytes, fds: list[int], client: int) -> Order | None:
        *streams, answers = fds
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with(server)
            os.setpgid(0, 0)
            os.close(answers)
            self._close()
            module, arguments, environment, cwd = json.loads(order)
            return Order(module, arguments, environment, cwd, streams)
        with suppress(OSError):  # the child has done it and has ended, or both do it: a signal to the group finds it
            os.setpgid(pid, pid)
        for fd in streams:
            os.close(fd)
        pidfd, channel = os.pidfd_open(pid), socket.socket(fileno=answers)
        try:
            socket.send_fds(channel, [str(pid).encode()], [pidfd])
        except OSError:  # the client is gone, or its test has ended by a timeout: nothing else would end the child
            os.kill(pid, signal.SIGKILL)
        self._children[pidfd] = pid, channel, client
        self._poll.register(pidfd, select.POLLIN)
        return None

    def _tell_end(self, pidfd: int) -> None:
        pid, channel, _ = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with channel, suppress(OSError):
            channel.sendall(str(os.waitstatus_to_exitcode(status)).encode())

    def _close(self) -> None:
        for one in (self._door, *self._clients.values()):
            if one is not None:
                one.close()
        for pidfd, (_, channel, _) in self._children.items():
            os.close(pidfd)
            channel.close()


def end_with(parent: int) -> None:
    """Let the kernel end this process when its parent dies: nodes of a run that was killed would run for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)
