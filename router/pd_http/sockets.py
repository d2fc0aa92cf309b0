"""TCP sockets of an HTTP server: bound by this process, or inherited from the process that started it. And what the
kernel does for a connection between processes of a cluster when the network or the other machine says nothing."""

from __future__ import annotations

import errno
import socket
import sys
from contextlib import suppress

from pd_http.errors import StartupError
from pd_http.settings import MAX_PORT

# The kernel asks a silent machine after so many seconds, then so often; the last miss breaks the connection: 30 s
ASK_AFTER_S, ASK_EVERY_S, MOST_MISSES = 10, 5, 4
# What is not acknowledged is sent again so often. By default the pause doubles up to 2 minutes, so a connection would
# stand still for as long again after a cut of the network. The 15 repetitions until a break take 27 s and not 15 min
RESEND_MS = 2000
_TCP_RTO_MAX_MS = 44  # Linux 6.15; Python does not name it, and elsewhere the number means something else
_WATCH = {
    "TCP_KEEPIDLE": ASK_AFTER_S,
    "TCP_KEEPINTVL": ASK_EVERY_S,
    "TCP_KEEPCNT": MOST_MISSES,
}  # some Pythons lack some


def watch_path(sock: socket.socket) -> None:
    """Have the kernel do so for this connection, or for all that come to this listener. What it does not know is left.

    A process that stands still is no cut: its kernel answers.
    """
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    options += [(socket.IPPROTO_TCP, getattr(socket, name), to) for name, to in _WATCH.items() if hasattr(socket, name)]
    options += [(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, RESEND_MS)] if sys.platform == "linux" else []
    for option in options:
        with suppress(OSError, ValueError):  # uvloop raises this one where the connection has just been closed
            sock.setsockopt(*option)


def bound(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet; port 0 takes any free one. Raises StartupError."""
    if not 0 <= port <= MAX_PORT:  # getaddrinfo keeps 16 bits: 99999 would become 34463
        raise StartupError(f"--port {port} is not a port: write 0 to {MAX_PORT} (0: any free one)")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except (socket.gaierror, OverflowError) as error:
        raise StartupError(f"cannot resolve --host {host} --port {port}: {error}") from error
    listener = socket.socket(family, kind)
    try:
        # allows a port in TIME_WAIT; a port with a listener stays taken
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def inherited(fd: int) -> socket.socket:
    """The listening TCP socket that a supervisor, or the process before this one, left open as `fd`.

    Raises StartupError for anything else.
    """
    try:
        listener = socket.socket(fileno=fd)
        is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
        if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listener.detach()  # this process does not own it
            raise OSError("this file descriptor is not a listening TCP socket")
    except OSError as error:
        raise StartupError(f"--listen-fd {fd}: {error}") from error
    listener.set_inheritable(False)
    return listener


def url_of(listener: socket.socket, host: str = "", scheme: str = "http") -> str:
    """Where `listener` serves. `host`: shown instead of its own address."""
    own, port = listener.getsockname()[:2]
    host = host or own
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    """The error for a failed `bind` or `listen`, with advice on what to change."""
    match error.errno:
        case errno.EADDRINUSE:
            advice = "the port is taken: stop its process, or choose another --port (0: any free one)"
        case errno.EADDRNOTAVAIL:
            advice = f"this machine has no address {host}: choose another --host (0.0.0.0: all of them)"
        case errno.EACCES:
            advice = "the port needs privileges: choose a --port above 1023"
        case _:
            advice = error.strerror or str(error)
    return StartupError(f"cannot listen on {host}:{port}: {advice}")
