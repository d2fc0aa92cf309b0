"""What the kernel does for connections between processes of a cluster."""

from __future__ import annotations

import socket

from pd_http.sockets import _TCP_RTO_MAX_MS, ASK_AFTER_S, ASK_EVERY_S, MOST_MISSES, RESEND_MS, watch_path


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


def test_what_the_kernel_does_not_know_is_left() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        watch_path(sock)
