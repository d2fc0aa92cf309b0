"""The limit on connections of the control port: the count, and what it does to a real socket."""

from __future__ import annotations

import random
import socket
from contextlib import closing

import pytest

from pd_connectors.gate import ConnectionLimit, Gate
from tests.deadlines import HANG_S


def test_it_shuts_at_the_limit_and_opens_when_an_eighth_has_gone() -> None:
    limit = ConnectionLimit(16)
    for _ in range(15):
        limit.accepted()
    assert not limit.is_shut
    limit.accepted()
    assert limit.is_shut
    limit.closed()
    assert limit.is_shut
    limit.closed()
    assert not limit.is_shut


@pytest.mark.parametrize("number", [1, 2, 7, 8, 100])
def test_whatever_comes_and_goes_it_is_open_when_nothing_is_connected(number: int) -> None:
    draw = random.Random(number)
    limit = ConnectionLimit(number)
    for _ in range(2000):
        if limit.num_open and draw.random() < 0.5:
            limit.closed()
        else:
            limit.accepted()
        assert limit.is_shut or limit.num_open < number
    while limit.num_open:
        limit.closed()
    assert not limit.is_shut


@pytest.mark.parametrize("host", ["192.0.2.77", "2001:db8::77", "fe80::1", "fe80::1%elsewhere", "a-name.invalid"])
def test_an_address_that_is_translated_and_a_name_are_listened_for_everywhere(host: str) -> None:
    with closing(Gate(2)) as gate:
        gate.listen(host, 0)
        socket.create_connection(("127.0.0.1", gate.port), HANG_S).close()


def test_a_shut_gate_drops_newcomers_and_disturbs_no_connection() -> None:
    with closing(Gate(2)) as gate:
        gate.listen("127.0.0.1", 0)
        listener = socket.socket(fileno=gate.descriptor())
        listener.settimeout(HANG_S)
        address = ("127.0.0.1", gate.port)
        with listener, socket.create_connection(address) as first, socket.create_connection(address):
            accepted, _ = listener.accept()
            gate.accepted()
            gate.accepted()
            with pytest.raises(TimeoutError):
                socket.create_connection(address, 0.1)
            first.sendall(b"still here")
            assert accepted.recv(10) == b"still here"
            accepted.close()
            gate.closed()
            socket.create_connection(address, HANG_S).close()
