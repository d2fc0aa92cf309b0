"""Resets that the kernel keeps from a socket, on plain sockets: a peer that ends with something unread sends one."""

from __future__ import annotations

import errno
import logging
import socket
from typing import TYPE_CHECKING

import pytest

from pd_connectors.nixl.resets import Place, drop_resets, hear_resets
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def place_of(listener: socket.socket) -> Place:
    address, port = listener.getsockname()
    return address, port


def test_what_is_sent_to_a_dead_reader_is_no_error(listener: socket.socket) -> None:
    drop_resets((place_of(listener),))
    reader = socket.create_connection(listener.getsockname())
    owner, _ = listener.accept()
    with owner:
        reader.send(b"question")
        owner.send(b"unread")
        reader.close()
        for _ in range(3):
            owner.send(b"answer")
        assert owner.recv(99) == b"question"


def test_a_reset_is_heard_again(listener: socket.socket) -> None:
    reader = socket.create_connection(listener.getsockname())
    owner, _ = listener.accept()
    with reader:
        drop_resets((place_of(listener),))
        reader.send(b"unread")
        owner.close()
        reader.send(b"question")
        hear_resets((place_of(listener),))
        reader.settimeout(HANG_S)
        with pytest.raises(ConnectionResetError):
            reader.recv(1)


def test_a_peer_on_the_same_port_of_another_host_is_not_touched(listener: socket.socket) -> None:
    """By default all hosts have the same ports."""
    with socket.create_server(("127.0.0.2", place_of(listener)[1])) as other:
        drop_resets((place_of(listener), place_of(other)))
        reader = socket.create_connection(other.getsockname())
        owner, _ = other.accept()
        with reader:
            drop_resets((place_of(other),))
            hear_resets((place_of(listener),))
            reader.send(b"unread")
            owner.close()
            for _ in range(3):  # on loopback the answer to the first is there before the second
                reader.send(b"question")


def test_other_sockets_hear_resets(listener: socket.socket) -> None:
    drop_resets((("127.0.0.2", place_of(listener)[1]),))
    reader = socket.create_connection(listener.getsockname())
    owner, _ = listener.accept()
    with owner:
        owner.send(b"unread")
        reader.close()
        owner.settimeout(HANG_S)
        with pytest.raises(ConnectionResetError):
            owner.recv(1)


def test_a_kernel_without_filters_is_told(
    listener: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node starts nevertheless."""

    def refuse(*option: object) -> None:
        raise OSError(errno.ENOPROTOOPT, "refused")

    monkeypatch.setattr(socket.socket, "setsockopt", refuse)
    with caplog.at_level(logging.WARNING):
        drop_resets((place_of(listener),))
    assert "no socket filter" in caplog.text
