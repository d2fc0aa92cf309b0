"""Listening sockets, bound before anything slow starts, so that a taken port is known at once."""

from __future__ import annotations

import errno
import socket

from pd_cluster.errors import StartupError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 lets the OS choose. Raises StartupError when the address cannot be had."""
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
