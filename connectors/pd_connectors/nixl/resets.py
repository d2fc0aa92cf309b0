"""Resets of UCX's TCP connections, which are kept from it: a reader that dies must not end the engine that it reads.

Over TCP the owner of the memory sends the answers itself. UCX (1.22, in NIXL 1.5.1) takes an error of such a send for
fatal, `unexpected error: Endpoint timeout`, and calls abort(). A killed reader's connection is reset, so the error
comes wherever a question of its is not answered yet. No setting of UCX changes that; where it *receives*, it handles
the same death. So the kernel drops resets: what is sent to a dead reader is only not acknowledged, and the connection
ends with a FIN or after `SILENT_S`. Of a peer that is given up within a read they are heard: its blocks come back soon.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

SILENT_S, PROBE_AFTER_S, PROBE_EVERY_S = 30, 10, 2  # nothing acknowledges data or a probe; as UCX where it connects
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux, <asm-generic/socket.h>
# Load the flags of the TCP header; with RST take 0 bytes of the packet, else all
_DROP_RESETS = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x04), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))

logger = logging.getLogger(__name__)


def drop_resets(ports: Container[int]) -> None:
    """Of sockets that listen on one of these ports, or are connected to one. Accepted sockets inherit it."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in _DROP_RESETS))
    program = struct.pack("@HP", len(_DROP_RESETS), ctypes.addressof(code))
    try:
        for sock, _ in _sockets(ports):
            _probe(sock, PROBE_AFTER_S, PROBE_EVERY_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError as error:
        logger.warning("no socket filter, a reader that dies may end this engine over TCP: %s", error)


def hear_resets(ports: Container[int]) -> None:
    """Of sockets that are connected to one of these ports. Where nothing is any more, a probe is answered by one."""
    for sock, listens in _sockets(ports):
        with suppress(OSError):  # none was dropped
            if not listens:
                sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                _probe(sock, 1, 1)


def _probe(sock: socket.socket, after_s: int, every_s: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, after_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)


def _sockets(ports: Container[int]) -> Iterator[tuple[socket.socket, bool]]:
    """Copies of this process's sockets that listen on one of these ports (True), or are connected to one."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile, or connected to nothing
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    listens = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                    place = copy.getsockname() if listens else copy.getpeername()
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and place[1] in ports:
                        yield copy, listens
