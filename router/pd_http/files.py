"""How many files this process may open."""

from __future__ import annotations

import resource

# Listeners, logs, epoll, sockets of the engine and of the cluster's own calls.
RESERVED_FILES = 64


def raise_file_limit() -> int:
    """Set the soft limit of open files to the hard one, and return it. The usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # a hard limit of "unlimited" above what the kernel grants
        return soft
    return hard


def connections_for(num_files: int, files_per_connection: int) -> int:
    """How many connections those files are enough for. Each may need some more files for calls to other nodes."""
    return max(1, (num_files - RESERVED_FILES) // files_per_connection)
