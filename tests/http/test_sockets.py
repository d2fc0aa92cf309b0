"""What the kernel does for connections between processes of a cluster."""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
from typing import TYPE_CHECKING

import uvloop

from pd_http import sockets
from pd_http.sockets import _TCP_RTO_MAX_MS, ASK_AFTER_S, ASK_EVERY_S, MOST_MISSES, RESEND_MS, watch_path

if TYPE_CHECKING:
    import pytest


def told(sock: socket.socket) -> tuple[int, ...]:
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    is_kept = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return (is_kept, *(sock.getsockopt(socket.IPPROTO_TCP, option) for option in options))


def knows_resends(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS))
    except OSError:
        return False  # an older kernel


def test_connections_inherit_what_their_listener_watches() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watch_path(listener)
        with socket.create_connection(listener.getsockname()) as ours:
            theirs, _ = listener.accept()
            with theirs:
                assert told(theirs) == (1, ASK_AFTER_S, ASK_EVERY_S, MOST_MISSES)
                assert not told(ours)[0], "a side that did not ask is not watched"
                if knows_resends(ours):
                    assert theirs.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS) == RESEND_MS


def test_what_python_does_not_name_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: the rest is set, and the module can be imported."""
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")
    monkeypatch.setattr(sys, "platform", "darwin")
    again = importlib.reload(sockets)
    with socket.socket() as sock:
        again.watch_path(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == MOST_MISSES
        if knows_resends(sock):
            assert sock.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS) != RESEND_MS


class Ours(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_lost = asyncio.Event()

    def connection_lost(self, _: Exception | None) -> None:
        self.is_lost.set()


def test_a_connection_that_has_just_been_closed_is_left() -> None:
    async def watch_closed() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            loop = asyncio.get_running_loop()
            there, ours = await loop.create_connection(Ours, *listener.getsockname())
            sock = there.get_extra_info("socket")
            there.abort()
            await ours.is_lost.wait()
            watch_path(sock)
            assert sock.fileno() < 0

    uvloop.run(watch_closed())


def test_what_the_kernel_does_not_know_is_left() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        watch_path(sock)
