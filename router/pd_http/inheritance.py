"""A listening socket that a supervisor, or the process before this one, has left open for this process."""

from __future__ import annotations

import socket


def listening_socket(fd: int) -> socket.socket:
    """The listening TCP socket behind the file descriptor `fd`. Raises OSError for anything else."""
    listener = socket.socket(fileno=fd)
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.detach()  # not this process's to close
        raise OSError("this file descriptor is no listening TCP socket")
    return listener
