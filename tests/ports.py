"""Ports for programs that cannot say which one the OS chose."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

# Below those that the OS gives to sockets that name none: a connection of another test takes one of these before the
# program listens, in one of seven runs of Ray, and for Mooncake in one of some twenty whole runs. Ray's workers have
# those from 10,002 to 19,999, and its clients' servers 23,000 to 24,000
PORTS = 24_001, 32_000


def free_port(size: int = 1) -> int:
    """The first of `size` ports in a row that were free on all IPv4 addresses of this machine a moment ago."""
    while True:
        first = random.SystemRandom().randrange(PORTS[0], PORTS[1] - size)
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + size):
                stack.enter_context(socket.create_server(("", port)))
            return first
