"""Listening sockets, bound before anything slow starts, so that a taken port is known at once.

Two ways in which a supervisor keeps an address while the process that serves it is started again:

- `listen` and pass the socket on (`pd_http.sockets.inherited`): the queue of connections lives as long as the
  supervisor, so new connections wait while no process accepts. The router's clients want that.
- `reserve`: the port is bound and no socket listens. The process listens on it by itself; when it dies its socket goes
  with it, and connections are refused at once. The router wants that of a node, since it has another one to ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_http.sockets import bound, cannot_listen

if TYPE_CHECKING:
    import socket

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 lets the OS choose. Raises StartupError when the address cannot be had."""
    listener = bound(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def reserve(host: str) -> socket.socket:
    """A socket bound to a free port of `host` that does not listen. Raises StartupError.

    While it is open the OS gives the port to no other socket, except to one that asks for this number with
    SO_REUSEADDR, as `listen` does.
    """
    return bound(host, 0)


def port_of(listener: socket.socket) -> int:
    """The port that a listener has."""
    port: int = listener.getsockname()[1]
    return port
