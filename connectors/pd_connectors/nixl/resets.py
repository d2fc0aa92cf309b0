"""Resets of UCX's TCP connections, which are kept from it: a reader that dies must not end the engine that it reads.

Over TCP the owner of the memory sends the answers itself. UCX (1.22, in NIXL 1.5.1) takes an error of such a send for
fatal, `unexpected error: Endpoint timeout`, and calls abort(). A killed reader's connection is reset, so the error
comes wherever a question of its is not answered yet. No setting of UCX changes that; where it *receives*, it handles
the same death. So the kernel drops resets: what is sent to a dead reader is only not acknowledged, and the connection
ends with a FIN or after `SILENT_S`. Of a peer that is given up within a read they are heard: its blocks come back soon,
or after `SILENT_S` where the read went over a connection that the peer had opened.

An owner that itself stands still for longer than `SILENT_S` with questions of a dead reader unread still aborts.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

Place: TypeAlias = tuple[str, int]  # address and port

# Nothing acknowledges data or a probe, or the other side takes no data; probes as UCX has them where it connects
SILENT_S, PROBE_AFTER_S, PROBE_EVERY_S = 30, 10, 2
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux, <asm-generic/socket.h>
# Load the flags of the TCP header; with RST take 0 bytes of the packet, else all
_DROP_RESETS = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x04), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))

logger = logging.getLogger(__name__)


def drop_resets(places: Container[Place]) -> None:
    """Of sockets that listen at one of these places, or are connected to one. Accepted sockets inherit it."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in _DROP_RESETS))
    program = struct.pack("@HP", len(_DROP_RESETS), ctypes.addressof(code))
    for sock, _ in _sockets(places):
        try:
            _probe(sock, PROBE_AFTER_S, PROBE_EVERY_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        except OSError as error:
            logger.warning("no socket filter, a reader that dies may end this engine over TCP: %s", error)


def hear_resets(places: Container[Place]) -> None:
    """Of sockets that are connected to one of these places. Where nothing is any more, a probe is answered by one."""
    for sock, listens in _sockets(places):
        with suppress(OSError):  # none was dropped
            if not listens:
                sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                _probe(sock, 1, 1)


def _probe(sock: socket.socket, after_s: int, every_s: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, after_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)


def _sockets(places: Container[Place]) -> Iterator[tuple[socket.socket, bool]]:
    """Copies of this process's sockets that listen at one of these places (True), or are connected to one."""
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError as error:  # no descriptor is left
        logger.warning("cannot look at the sockets of UCX: %s", error)
        return
    for descriptor in map(int, descriptors):
        with suppress(OSError):  # closed meanwhile, or connected to nothing
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    listens = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                    place = copy.getsockname() if listens else copy.getpeername()
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and (place[0], place[1]) in places:
                        yield copy, listens
