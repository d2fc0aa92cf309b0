"""Listening sockets. They are bound before anything slow starts, so that a taken port is reported at once.

A supervisor keeps an address while the process that serves it is restarted, in one of two ways:

- `listen`, and the process inherits the socket (`inherited`). The queue of connections lives as long as the
  supervisor, so new connections wait while no process accepts. This is for the router, so that clients wait.
- `reserve`: the port is bound and no socket listens. The process opens its own socket, which closes when the process
  dies, so connections are refused at once. This is for nodes, because the router can ask another node.
"""

from __future__ import annotations

import errno
import socket

from pd_cluster.errors import StartupError
from pd_cluster.launch.flags import MAX_PORT
from pd_router.inheritance import listening_socket

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 lets the OS choose. Raises StartupError when the address is not available."""
    if not 0 <= port <= MAX_PORT:  # getaddrinfo keeps 16 bits: 99999 would become 34463
        raise StartupError(f"--port {port} is out of range: write 0 to {MAX_PORT} (0: any free port)")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except (socket.gaierror, OverflowError) as error:
        raise StartupError(f"cannot resolve --host {host} --port {port}: {error}") from error
    listener = socket.socket(family, kind)
    try:
        # allows a port in TIME_WAIT, but not a port with a listener
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
    """The listening TCP socket that this process inherited as `fd`. Raises StartupError."""
    try:
        listener = listening_socket(fd)
    except OSError as error:
        raise StartupError(f"--listen-fd {fd}: {error}") from error
    listener.set_inheritable(False)
    return listener


def reserve(host: str) -> socket.socket:
    """A socket that is bound to a free port of `host` and does not listen. Raises StartupError.

    While it is open, the OS gives the port only to sockets that ask for its number with SO_REUSEADDR, as `listen` does.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        reserved = socket.socket(family, kind)
    except OSError as error:
        raise StartupError(f"cannot reserve a port of {host}: {error}") from error
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise StartupError(f"cannot reserve a port of {host}: {error}") from error
    return reserved


def port_of(listener: socket.socket) -> int:
    """The port of a listener."""
    port: int = listener.getsockname()[1]
    return port


def _advice(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port {port} on {host} is taken: stop what listens there, or choose another --port (0: any free one)"
            )
        case errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}: choose another --host (0.0.0.0: all addresses)"
        case errno.EACCES:
            return f"port {port} needs privileges: choose a --port above 1023"
        case _:
            return f"cannot listen on {host} port {port}: {error.strerror or error}"
