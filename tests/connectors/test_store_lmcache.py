"""LMCache's server as a store: restarts, eviction, broken senders; and what is said without LMCache."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import struct
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import psutil
import pytest

from pd_connectors.lmcache import LMCacheConnector, LMCacheProtocol, LMCacheStore
from pd_connectors.lmcache_server import ARRIVING_SHARE, ENTRY_BYTES
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.registry import create_connector
from pd_connectors.store import ObjectName, StoreUnavailable
from tests.connectors.pool_bench import POOL_CONTEXT
from tests.connectors.store_server import StoreServer, needs_lmcache
from tests.deadlines import HANG_S
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = HANG_S
NAMES = [ObjectName("ab" * 16, bytes([i]) * 16) for i in range(100)]  # more than are asked for at once


@pytest.fixture(scope="module")
def protocol() -> LMCacheProtocol:
    return LMCacheProtocol()


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(max_bytes=1 << 20) as server:
        yield server


@needs_lmcache
@pytest.mark.integration
def test_objects_come_back_in_order_and_a_reader_may_leave_early(
    server: StoreServer, protocol: LMCacheProtocol
) -> None:
    store = LMCacheStore(("127.0.0.1", server.port), protocol)
    objects = [(name, name.hash * (index + 1)) for index, name in enumerate(NAMES)]
    assert store.put(objects[:90]) == 90
    assert store.contains(NAMES) == [True] * 90 + [False] * 10
    for _ in range(2):
        reading = store.get(NAMES)
        assert bytes(next(reading) or b"") == objects[0][1]
        reading.close()
        assert [None if got is None else bytes(got) for got in store.get(NAMES)] == [o for _, o in objects[:90]] + [
            None
        ] * 10
    store.close()


@needs_lmcache
@pytest.mark.integration
def test_a_server_that_was_restarted_costs_a_client_nothing(server: StoreServer, protocol: LMCacheProtocol) -> None:
    store = LMCacheStore(("127.0.0.1", server.port), protocol)
    assert store.put([(NAMES[0], b"x")]) == 1
    server.kill()
    with pytest.raises(StoreUnavailable, match="refused"):
        store.contains(NAMES[:1])
    server.start()
    assert store.contains(NAMES[:1]) == [False]
    assert store.put([(NAMES[0], b"x")]) == 1
    server.kill()
    server.start()
    assert store.contains(NAMES[:1]) == [False]  # over a connection that has died unnoticed
    store.close()


@needs_lmcache
@pytest.mark.integration
def test_a_full_server_evicts_what_was_used_least_recently(server: StoreServer, protocol: LMCacheProtocol) -> None:
    store = LMCacheStore(("127.0.0.1", server.port), protocol)
    quarter = bytes((1 << 18) - ENTRY_BYTES)
    assert store.put([(name, quarter) for name in NAMES[:4]]) == 4
    assert bytes(next(store.get(NAMES[:1])) or b"") == quarter
    assert store.put([(NAMES[0], quarter)]) == 1  # not counted twice
    assert store.contains(NAMES[:4]) == [True] * 4
    assert store.contains(NAMES[:1]) == [True]
    assert store.put([(NAMES[4], quarter)]) == 1
    assert store.contains(NAMES[:5]) == [True, False, True, True, True]
    store.close()


@needs_lmcache
@pytest.mark.integration
def test_unfinished_objects_have_a_bound(server: StoreServer, protocol: LMCacheProtocol) -> None:
    address, size = ("127.0.0.1", server.port), (1 << 18) // ARRIVING_SHARE * 3
    with socket.create_connection(address) as one, socket.create_connection(address) as other:
        for name, half in zip(NAMES, (one, other), strict=False):
            half.sendall(protocol.put(name, size) + bytes(100))
        (refused,), _, _ = select.select([one, other], [], [], DEADLINE_S)  # that which came second
        with contextlib.suppress(ConnectionResetError):  # what it has sent was not read
            assert refused.recv(1) == b""
        kept, name = (one, NAMES[0]) if refused is other else (other, NAMES[1])
        kept.sendall(bytes(size - 100) + protocol.exists(name))
        kept.settimeout(DEADLINE_S)
        assert protocol.read_answer(bytearray(kept.recv(protocol.answer_bytes, socket.MSG_WAITALL))) == 0
    store = LMCacheStore(address, protocol)
    assert sum(store.contains(NAMES[:2])) == 1
    assert store.put([(NAMES[2], bytes(size))]) == 1  # the room is free again
    store.close()


@needs_lmcache
@pytest.mark.integration
def test_objects_without_content_have_a_bound(server: StoreServer, protocol: LMCacheProtocol) -> None:
    store = LMCacheStore(("127.0.0.1", server.port), protocol)
    names = [ObjectName("ab" * 16, i.to_bytes(16, "big")) for i in range(2000)]
    assert store.put([(name, b"") for name in names]) == (1 << 20) // ENTRY_BYTES
    store.close()


@needs_lmcache
@pytest.mark.integration
def test_a_server_goes_on_when_its_descriptors_ran_out(server: StoreServer, protocol: LMCacheProtocol) -> None:
    """All that it holds would be lost."""
    address, process = ("127.0.0.1", server.port), psutil.Process(server.pid)
    store = LMCacheStore(address, protocol, io_deadline_s=DEADLINE_S)
    assert store.put([(NAMES[0], b"x")]) == 1
    most = process.num_fds() + 4
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(address))
        assert store.contains(NAMES[:1]) == [True]  # over the connection that it has
    again = LMCacheStore(address, protocol, io_deadline_s=DEADLINE_S)
    assert again.contains(NAMES[:1]) == [True]
    for one in (store, again):
        one.close()


@needs_lmcache
@pytest.mark.integration
def test_half_an_object_is_never_visible(server: StoreServer, protocol: LMCacheProtocol) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(protocol.put(NAMES[0], 1000) + bytes(500))
        half.shutdown(socket.SHUT_WR)
        assert half.recv(1) == b""  # the server has given up on it
    store = LMCacheStore(("127.0.0.1", server.port), protocol)
    assert store.contains(NAMES[:1]) == [False]
    store.close()


@pytest.mark.long
@needs_lmcache
def test_a_server_that_answers_nonsense_or_nothing_is_unavailable(protocol: LMCacheProtocol) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = LMCacheStore(listener.getsockname(), protocol, io_deadline_s=0.1)
        with pytest.raises(StoreUnavailable, match="timed out"):
            store.contains(NAMES[:1])
        with listener.accept()[0]:
            pass
        store = LMCacheStore(listener.getsockname(), protocol)
        listener.settimeout(DEADLINE_S)
        reading = store.get(NAMES[:1])
        # the answer is written before the question is read: both fit the sockets' buffers
        store._send(())  # connects
        with listener.accept()[0] as peer:
            peer.sendall(b"\xff" * protocol.answer_bytes)
            with pytest.raises(StoreUnavailable):
                next(reading)


@pytest.mark.long
@needs_lmcache
def test_a_missing_server_is_reported_at_once(protocol: LMCacheProtocol) -> None:
    with pytest.raises(StoreUnavailable, match="refused"):
        LMCacheStore(("127.0.0.1", free_port()), protocol).contains(NAMES)


@pytest.mark.long
@needs_lmcache
def test_an_object_that_no_node_has_written_is_not_read(protocol: LMCacheProtocol) -> None:
    """It would take a node's memory, twice at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = LMCacheStore(listener.getsockname(), protocol, max_object_bytes=1000)
        reading = store.get(NAMES[:2])
        store._send(())  # connects
        with listener.accept()[0] as peer:
            peer.sendall(struct.pack("9i", 200, 1 << 29, 1, 6, 0, 0, 0, 0, 0) + bytes(1000))
            assert list(reading) == [bytearray()]
            peer.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionResetError):  # what it has sent was not read
                while peer.recv(4096):
                    pass


def test_an_answer_by_single_bytes_ends() -> None:
    """A search would end, and a loading thread would not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = cast("LMCacheProtocol", _Wire())
        store = LMCacheStore(listener.getsockname(), wire, io_deadline_s=DEADLINE_S, receive_deadline_s=0.0)
        store._send(())  # connects
        with listener.accept()[0] as peer:
            peer.sendall(b"A")
            with pytest.raises(StoreUnavailable, match="too slowly"):
                store._receive(2)


class _Wire:
    """The protocol in a byte for each message."""

    answer_bytes = 1

    def put(self, name: ObjectName, num_bytes: int) -> bytes:
        return b"P"

    def exists(self, name: ObjectName) -> bytes:
        return b"E"

    def read_answer(self, header: bytearray) -> int:
        return 0


def test_each_piece_of_an_object_has_the_whole_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with many clients takes a big object slowly; that is no server which is gone."""
    sent = bytearray()

    class Busy(socket.socket):
        def send(self, data: object, flags: int = 0) -> int:
            piece = bytes(cast("memoryview", data)[:1000])
            assert self.gettimeout() == 2.0
            sent.extend(piece)
            return super().send(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener, Busy() as busy:
        busy.connect(listener.getsockname())
        monkeypatch.setattr(socket, "create_connection", lambda *_: busy)
        there, _ = listener.accept()
        with there:
            there.sendall(b"1")
            store = LMCacheStore(("no-such-host", 1), cast("LMCacheProtocol", _Wire()))
            assert store.put([(NAMES[0], bytes(10_500))]) == 1
            assert sent == b"P" + bytes(10_500) + b"E"
            store.close()


def test_without_lmcache_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache.utils", None)
    with pytest.raises(ConnectorUnavailable, match=r"pip install 'pd-cluster\[lmcache\]'"):
        create_connector("lmcache", POOL_CONTEXT)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:6500", "lm://:6500", "lm://host", "lm://host:port", "http://host:1", "lm://h:0"]
)
def test_a_url_that_is_none_is_explained(url: str) -> None:
    with pytest.raises(ConnectorUnavailable, match="like lm://"):
        LMCacheConnector(replace(POOL_CONTEXT, options=(("pool_url", url),)))
