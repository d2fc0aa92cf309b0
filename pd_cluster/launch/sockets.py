"""Listening sockets. They are bound before anything slow starts, so that a taken port is reported at once.

A supervisor keeps an address while the process that serves it is restarted, in one of two ways:

- `listen`, and the process inherits the socket (`pd_http.sockets.inherited`). The queue of connections lives as long as
  the supervisor, so new connections wait while no process accepts. This is for the router, so that clients wait.
- `reserve`: the port is bound and no socket listens. The process opens its own socket, which closes when the process
  dies, so connections are refused at once. This is for nodes, because the router can ask another node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_http.sockets import bound, cannot_listen

if TYPE_CHECKING:
    import socket

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 lets the OS choose. Raises StartupError when the address is not available."""
    listener = bound(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def reserve(host: str) -> socket.socket:
    """A socket that is bound to a free port of `host` and does not listen. Raises StartupError.

    While it is open, the OS gives the port only to sockets that ask for its number with SO_REUSEADDR, as `listen` does.
    """
    return bound(host, 0)


def port_of(listener: socket.socket) -> int:
    """The port of a listener."""
    port: int = listener.getsockname()[1]
    return port
