"""Listening sockets, bound before anything slow starts, so that a taken port is known at once.

Two ways in which a supervisor keeps an address while the process that serves it is started again:

- `listen` and pass the socket on (`inherited`): the queue of connections lives as long as the supervisor, so while no
  process accepts, new connections wait. The router's clients want that.
- `reserve`: the port is bound and no socket listens. The process listens on it by itself; when it dies its socket goes
  with it, and connections are refused at once. The router wants that of a node, since it has another one to ask.
"""

from __future__ import annotations

import errno
import socket

from pd_cluster.errors import StartupError
from pd_cluster.launch.flags import MAX_PORT
from pd_http.inheritance import listening_socket

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 lets the OS choose. Raises StartupError when the address cannot be had."""
    if not 0 <= port <= MAX_PORT:  # getaddrinfo keeps 16 bits: 99999 would become 34463
        raise StartupError(f"--port {port} is no port: write 0 to {MAX_PORT} (0: any free one)")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except (socket.gaierror, OverflowError) as error:
        raise StartupError(f"--host {host} --port {port} is no address: {error}") from error
    listener = socket.socket(family, kind)
    try:
        # a port in TIME_WAIT is free; one with a listener is not, whatever this option says
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.set_inheritable(False)
    except BaseException as error:
        listener.close()
        if not isinstance(error, OSError):
            raise
        raise StartupError(_advice(host, port, error)) from error
    return listener


def inherited(fd: int) -> socket.socket:
    """The listening TCP socket that the process before this one has left open as `fd`. Raises StartupError."""
    try:
        listener = listening_socket(fd)
    except OSError as error:
        raise StartupError(f"--listen-fd {fd}: {error}") from error
    listener.set_inheritable(False)
    return listener


def reserve(host: str) -> socket.socket:
    """A socket bound to a free port of `host` that does not listen. Raises StartupError.

    While it is open the OS gives the port to no other socket, except to one that asks for this number with
    SO_REUSEADDR, as `listen` does.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        reserved = socket.socket(family, kind)
    except OSError as error:
        raise StartupError(f"no port of {host} can be had: {error}") from error
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise StartupError(f"no port of {host} can be had: {error}") from error
    return reserved


def port_of(listener: socket.socket) -> int:
    """The port that a listener has."""
    port: int = listener.getsockname()[1]
    return port


def _advice(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port {port} on {host} is taken: stop what listens there, or choose another --port (0: any free one)"
            )
        case errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}: choose another --host (0.0.0.0: all of them)"
        case errno.EACCES:
            return f"port {port} needs privileges: choose a --port above 1023"
        case _:
            return f"cannot listen on {host} port {port}: {error.strerror or error}"
