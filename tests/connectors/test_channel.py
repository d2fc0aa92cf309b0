"""The ZeroMQ channel: what it delivers, what it drops, and that it sleeps and wakes."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from pd_connectors import zmq_channel as channel_module
from pd_connectors.channel import Channel, FromOwner, FromReader, Incoming, OwnerLost
from pd_connectors.curve import CurveKeys
from pd_connectors.nixl.machine import listening_sockets
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.protocol.messages import LeaseRef, LeaseState, Release, Renew, seal
from pd_connectors.zmq_channel import MAX_ANSWER_BYTES, MAX_QUESTION_BYTES, ZmqChannel
from tests.connectors.layouts import runs
from tests.deadlines import HANG_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = b"k" * 32
LEASE = LeaseRef("P", 1, "lease")
STATE = LeaseState(LEASE, 0, 1, 0, ())
FOREVER_S = 3600.0  # pytest's own timeout ends a test that waits so long


@pytest.fixture
def make() -> Iterator[Callable[..., ZmqChannel]]:
    channels: list[ZmqChannel] = []

    def build(key: bytes = KEY, port: int = 0, max_readers: int = 64) -> ZmqChannel:
        channels.append(ZmqChannel(key, "127.0.0.1", port, max_readers))
        return channels[-1]

    yield build
    for channel in channels:
        channel.close()


def receive(channel: Channel, kind: type[Incoming]) -> Incoming:
    end_s = time.monotonic() + HANG_S
    while True:
        for incoming in channel.receive():
            if isinstance(incoming, kind):
                return incoming
        assert time.monotonic() < end_s, f"no {kind.__name__} came"
        channel.wait(0.05)


def wait_unheard(owner: ZmqChannel, holds: Callable[[], bool]) -> None:
    """Until it holds. No message comes meanwhile."""

    def is_so() -> bool:
        assert owner.receive() == []
        return holds()

    wait_until(is_so, owner.stats)


def test_question_and_answer(make: Callable[..., ZmqChannel]) -> None:
    owner, reader = make(), make()
    reader.ask(("127.0.0.1", owner.port), Renew(LEASE))
    question = receive(owner, FromReader)
    assert isinstance(question, FromReader)
    assert question.message == Renew(LEASE)
    owner.reply(question.reader, STATE)
    assert receive(reader, FromOwner) == FromOwner(("127.0.0.1", owner.port), STATE)


def test_a_restarted_owner_is_reached_again_and_its_loss_is_told(make: Callable[..., ZmqChannel]) -> None:
    owner, reader = make(), make()
    address = ("127.0.0.1", owner.port)
    reader.ask(address, Renew(LEASE))
    receive(owner, FromReader)
    owner.close()
    assert receive(reader, OwnerLost) == OwnerLost(address)
    again = make(port=address[1])
    reader.ask(address, Release(LEASE, done=True))
    received = receive(again, FromReader)
    assert isinstance(received, FromReader)
    assert received.message == Release(LEASE, done=True)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"garbage"],
        [b"\0\1" + b"m" * 16 + b"body"],
        [b"\x7f\x7f" + seal(KEY, Renew(LEASE))[2:]],
        [seal(b"another key", Renew(LEASE))],
        [seal(KEY, Renew(LEASE))[:-1] + b"\0"],
        [seal(KEY, STATE)],
        [seal(KEY, Renew(LEASE)), b"more"],
    ],
    ids=["empty", "garbage", "bad-mac", "other-version", "other-key", "flipped", "wrong-direction", "two-frames"],
)
def test_bad_frames_are_counted_and_dropped(make: Callable[..., ZmqChannel], frames: list[bytes]) -> None:
    owner = make()
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            CurveKeys(KEY).ask(dealer)
            dealer.connect(f"tcp://127.0.0.1:{owner.port}")
            dealer.send_multipart(frames)
            dealer.send(seal(KEY, Renew(LEASE)))
            good = receive(owner, FromReader)
    finally:
        context.term()
    assert isinstance(good, FromReader)
    assert good.message == Renew(LEASE)
    assert owner.stats()["bad_frames_total"] == 1


def null_client(sock: zmq.Socket[bytes]) -> None:
    """A build without CURVE."""


def guesses_the_servers_key(sock: zmq.Socket[bytes]) -> None:
    public, secret = zmq.curve_keypair()
    sock.curve_serverkey, sock.curve_publickey, sock.curve_secretkey = public, public, secret


def has_another_cluster_key(sock: zmq.Socket[bytes]) -> None:
    CurveKeys(b"another key").ask(sock)


@pytest.mark.parametrize("dress", [null_client, guesses_the_servers_key, has_another_cluster_key])
def test_a_stranger_fails_at_the_handshake(
    make: Callable[..., ZmqChannel], dress: Callable[[zmq.Socket[bytes]], None], caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = make(), make()
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            dress(stranger)
            stranger.connect(f"tcp://127.0.0.1:{owner.port}")
            stranger.send(seal(KEY, Renew(LEASE)))  # even a good seal does not help it
            wait_unheard(owner, lambda: owner.stats()["handshakes_failed_total"] > 0)
    finally:
        context.term()
    assert "failed the handshake" in caplog.text
    assert owner.stats()["bad_frames_total"] == 0, "nothing of it was read as a message"
    reader.ask(("127.0.0.1", owner.port), Renew(LEASE))
    assert isinstance(receive(owner, FromReader), FromReader)


@pytest.mark.parametrize("dress", ["null", "curve"])
def test_an_owner_without_the_clusters_key_is_lost_and_counted(make: Callable[..., ZmqChannel], dress: str) -> None:
    """It gets nothing, and an owner that comes after it under the same address is reached."""
    reader = make()
    context = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as other:
            other.setsockopt(zmq.LINGER, 0)
            if dress == "curve":
                CurveKeys(b"another key").serve(other)
            port = other.bind_to_random_port("tcp://127.0.0.1")
            address = ("127.0.0.1", port)
            reader.ask(address, Renew(LEASE))
            assert receive(reader, OwnerLost) == OwnerLost(address)
            assert not other.poll(100), "a message reached it"
            assert reader.stats()["handshakes_failed_total"] >= 1
    finally:
        context.term()
    reader.forget(address)
    owner = make(port=port)
    reader.ask(address, Renew(LEASE))
    assert isinstance(receive(owner, FromReader), FromReader)


def test_silent_connections_leave_those_that_are_connected_served(make: Callable[..., ZmqChannel]) -> None:
    """A newcomer is not accepted until one of them has gone."""
    owner, reader, late = make(max_readers=8), make(), make()
    address = ("127.0.0.1", owner.port)
    reader.ask(address, Renew(LEASE))
    receive(owner, FromReader)
    strangers = [socket.create_connection(address) for _ in range(7)]
    try:
        wait_unheard(owner, lambda: owner.stats()["control_connections"] == 8)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, 0.1)
        reader.ask(address, Renew(LEASE))
        assert isinstance(receive(owner, FromReader), FromReader)
    finally:
        for stranger in strangers:
            stranger.close()
    wait_unheard(owner, lambda: owner.stats()["control_connections"] == 1)
    late.ask(address, Release(LEASE, done=True))
    received = receive(owner, FromReader)
    assert isinstance(received, FromReader)
    assert received.message == Release(LEASE, done=True)


def test_a_silent_connection_is_cut_after_the_handshakes_time(
    make: Callable[..., ZmqChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_MS", 200)
    owner = make()
    with socket.create_connection(("127.0.0.1", owner.port)) as stranger:
        stranger.settimeout(HANG_S)
        while stranger.recv(4096):  # ZeroMQ's greeting
            pass
    wait_unheard(owner, lambda: owner.stats()["control_connections"] == 0)


def test_a_question_that_is_too_long_is_cut_off_and_an_answer_of_a_million_tokens_arrives(
    make: Callable[..., ZmqChannel],
) -> None:
    owner, reader = make(), make()
    address = ("127.0.0.1", owner.port)
    lease = LeaseRef("P" * MAX_QUESTION_BYTES, 1, "lease")
    reader.ask(address, Renew(lease))
    assert receive(reader, OwnerLost) == OwnerLost(address)
    reader.ask(address, Renew(LEASE))
    question = receive(owner, FromReader)
    assert isinstance(question, FromReader)
    assert question.message == Renew(LEASE)
    state = LeaseState(LEASE, 0, 1, 1 << 20, runs(0, tuple(range(1 << 20, (1 << 20) + (1 << 16)))))
    assert len(seal(KEY, state)) < MAX_ANSWER_BYTES / 16
    owner.reply(question.reader, state)
    assert receive(reader, FromOwner) == FromOwner(address, state)


@pytest.mark.long
def test_an_idle_connection_outlives_its_heartbeats(
    make: Callable[..., ZmqChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost without an answer for 3 heartbeats: 450 ms. A machine may stand still so long, but not each time."""
    monkeypatch.setattr(channel_module, "HEARTBEAT_MS", 150)
    owner, reader = make(), make()
    is_lost = True
    while is_lost:  # pytest's own timeout ends this if it is lost each time
        reader.ask(("127.0.0.1", owner.port), Renew(LEASE))
        question = receive(owner, FromReader)
        is_lost = False
        end_s = time.monotonic() + 0.75
        while time.monotonic() < end_s and not is_lost:
            is_lost = reader.receive() != [] or owner.receive() != []
            reader.wait(0.05)
    assert isinstance(question, FromReader)
    owner.reply(question.reader, STATE)
    assert isinstance(receive(reader, FromOwner), FromOwner)


def test_without_curve_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(ConnectorUnavailable, match="built without CURVE"):
        ZmqChannel(KEY, "127.0.0.1", 0)


def test_keys_are_of_the_cluster_key_alone_and_not_shown() -> None:
    keys = CurveKeys(KEY)
    assert keys.public == CurveKeys(KEY).public != CurveKeys(b"another key").public
    assert "CurveKeys()" == repr(keys) == str(keys)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "localhost", "::1"])
def test_loopback_stays_on_loopback(host: str) -> None:
    channel = ZmqChannel(KEY, host, 0)
    try:
        (where,) = [address for address, port in listening_sockets() if port == channel.port]
        assert where == ("127.0.0.1" if host == "localhost" else host)
    finally:
        channel.close()


def test_an_answer_to_a_reader_that_left_is_counted(make: Callable[..., ZmqChannel]) -> None:
    owner = make()
    owner.reply(b"unknown", STATE)
    assert owner.stats()["frames_dropped_total"] == 1


def test_wait_ends_on_wake_from_another_thread(make: Callable[..., ZmqChannel]) -> None:
    channel = make()
    waker = threading.Timer(0.05, channel.wake)
    waker.start()
    channel.wait(FOREVER_S)
    waker.join()
    channel.wake()
    channel.wait(FOREVER_S)  # woken before it slept: the wake is not lost


def test_wait_sleeps_its_time(make: Callable[..., ZmqChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    channel, slept_ms = make(), list[int]()

    def poll(time_ms: int) -> list[tuple[int, int]]:
        slept_ms.append(time_ms)
        return []

    monkeypatch.setattr(channel._poller, "poll", poll)
    for seconds in (0.1, 0.0004, 0.0, -1.0):
        channel.wait(seconds)
    assert slept_ms == [100, 1, 0, 0], "a short wait is no spin, and a negative one no wait for ever"


def test_a_taken_port_is_said(make: Callable[..., ZmqChannel]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConnectorUnavailable, match="cannot listen"):
            make(port=taken.getsockname()[1])


BAD_HOSTS = ["node 1", "*", "http://x", "node/1"]


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_peer_without_a_usable_address_is_counted_not_raised(make: Callable[..., ZmqChannel], host: str) -> None:
    owner, reader = make(), make()
    for _ in range(3):
        reader.ask((host, 5555), Renew(LEASE))
    assert reader.receive() == []
    assert reader.stats()["frames_dropped_total"] == 3
    reader.forget((host, 5555))
    reader.ask(("127.0.0.1", owner.port), Renew(LEASE))
    assert isinstance(receive(owner, FromReader), FromReader), "it works on"
    reader.close()  # returns: a socket that is left half made would keep the context from its end


@pytest.mark.parametrize("host", [*BAD_HOSTS, "", "0.0.0.0", "::", "[::]"])
def test_an_advertised_host_that_no_peer_can_reach_is_refused_at_start(host: str) -> None:
    with pytest.raises(ConnectorUnavailable, match="no address under which peers can reach this node"):
        ZmqChannel(KEY, host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "prefill-0.nodes.default.svc", "10.0.0.7"])
def test_advertised_hosts_may_be_names_and_addresses(host: str) -> None:
    channel = ZmqChannel(KEY, host, 0)
    assert channel.port > 0
    channel.close()


def test_forgetting_and_closing_are_idempotent(make: Callable[..., ZmqChannel]) -> None:
    owner, reader = make(), make()
    address = ("127.0.0.1", owner.port)
    reader.ask(address, Renew(LEASE))
    reader.forget(address)
    reader.forget(address)
    reader.ask(address, Renew(LEASE))
    assert isinstance(receive(owner, FromReader), FromReader)
    reader.close()
    reader.close()
    reader.wake()
