"""The process's limit of open files."""

from __future__ import annotations

import resource
import socket

# For listeners, logs, epoll, the engine's sockets and calls inside the cluster.
RESERVED_FILES = 64


def raise_file_limit() -> int:
    """Set the soft limit of open files to the hard one, and return it. The usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the hard limit is "unlimited", which is above what the kernel grants
        return soft
    return hard


def connections_for(num_files: int, files_per_connection: int) -> int:
    """Connections that `num_files` allow. `files_per_connection` includes the connections to nodes for its request."""
    return max(1, (num_files - RESERVED_FILES) // files_per_connection)


def has_files() -> bool:
    """Whether this process can open a file now. It takes 4 us."""
    try:
        socket.socket().close()
    except OSError:
        return False
    return True
