"""The control port's listening socket, with a limit on connections. libzmq has none: out of descriptors, it would try
to accept for ever.

At the limit the gate shuts: the kernel drops requests for a connection (TCP repeats them after 1 s, 3 s, ...), and open
connections are not disturbed. The gate opens when an eighth of them has gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import logging
import os
import resource
import socket
import struct

logger = logging.getLogger(__name__)

BACKLOG = 256
_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)  # for an address that is none of this machine

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # socket(7); Python's socket module does not name them
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one BPF instruction: return 0, which drops the packet


class ConnectionLimit:
    """Counts connections that are accepted and closed, and decides whether the gate is open. Pure."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_open = 0
        self.is_shut = False

    def accepted(self) -> None:
        """Note that a connection was accepted."""
        self.num_open += 1
        if self.num_open >= self.limit:
            self.is_shut = True

    def closed(self) -> None:
        """Note that a connection has ended."""
        self.num_open -= 1
        if self.num_open <= self.limit - max(1, self.limit // 8):
            self.is_shut = False


class Gate:
    """The control port's socket, shut while it has `limit` connections. ZeroMQ accepts and closes them."""

    def __init__(self, limit: int) -> None:
        self._limit = ConnectionLimit(min(limit, _spare_descriptors()))
        self._is_shut = False
        self._listener: socket.socket | None = None

    def listen(self, host: str, port: int) -> None:
        """Listen where peers find `host`; port 0: the OS chooses. Once. Raises OSError, OverflowError."""
        self._listener = _listen(host, port)

    @property
    def port(self) -> int:
        """The port that the socket listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    def descriptor(self) -> int:
        """A new descriptor of the socket. The caller closes it."""
        return os.dup(self._socket.fileno())

    def close(self) -> None:
        """Idempotent."""
        if self._listener is not None:
            self._listener.close()

    @property
    def _socket(self) -> socket.socket:
        assert self._listener is not None, "it does not listen yet"
        return self._listener

    @property
    def num_open(self) -> int:
        """The number of open connections."""
        return self._limit.num_open

    def accepted(self) -> None:
        """Note that a connection was accepted."""
        self._limit.accepted()
        self._follow()

    def closed(self) -> None:
        """Note that a connection has ended."""
        self._limit.closed()
        self._follow()

    def _follow(self) -> None:
        if self._limit.is_shut == self._is_shut:
            return
        self._is_shut = self._limit.is_shut
        if self._is_shut:
            logger.warning("the control port has %d connections: no more until some end", self._limit.num_open)
        try:
            self._move()
        except OSError as error:  # a kernel without socket filters (some sandboxes): the descriptors are the limit
            logger.warning("the control port's connections cannot be limited: %s", error)

    def _move(self) -> None:
        if self._is_shut:
            program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
            what = struct.pack("@HP", 1, ctypes.addressof(program))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, what)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _spare_descriptors() -> int:
    """Half of the files that this process may open. The engine needs the other half."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft // 2 if soft != resource.RLIM_INFINITY else 1 << 20


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket: on the advertised address, if it is one of this machine. A name may mean another address to
    peers, and an address may be translated on the way: then it listens everywhere. Raises OSError."""
    with contextlib.suppress(ValueError):
        address = "127.0.0.1" if host == "localhost" else host.strip("[]")
        is_loopback = ipaddress.ip_address(address).is_loopback
        try:
            return _open(address, port)
        except OSError as error:
            # The first one: of a scope (fe80::1%eth9) that this machine does not have
            is_elsewhere = isinstance(error, socket.gaierror) or error.errno in _ELSEWHERE
            if is_loopback or not is_elsewhere:
                raise
    try:
        return _open("::", port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _open("0.0.0.0", port)  # a kernel without IPv6


def _open(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        if address == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)  # ZeroMQ's descriptor is of the same socket
    except BaseException:
        listener.close()
        raise
    return listener
