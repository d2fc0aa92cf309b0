"""Mutated control messages: frames to the decoder and to a channel, signed ones to both halves of the protocol, and
strangers' bytes to the control port of live engines.

What is not signed changes nothing. What is signed, but wrong (a member with a bug), costs at most its own load.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.base import LoadDone, LoadSpec, PublishSpec
from pd_connectors.channel import Channel, FromReader
from pd_connectors.handshake import transport_checksum
from pd_connectors.lease import LeaseTable
from pd_connectors.owner import Owner
from pd_connectors.protocol.errors import BadSignature, ProtocolMismatch, TicketError
from pd_connectors.protocol.messages import (
    MAC_BYTES,
    Confirm,
    ConfirmReply,
    Hello,
    HelloReply,
    LeaseRef,
    LeaseState,
    Release,
    Renew,
    SampledToken,
    ToOwner,
    ToReader,
    mac,
    open_sealed,
    seal,
)
from pd_connectors.protocol.ticket import NodeOrder, Offer, Ticket, sign, verify
from pd_connectors.transport import Connected, ReadEnded
from pd_connectors.zmq_channel import ZmqChannel
from tests.connectors.layouts import full_layout, runs
from tests.connectors.simulation import CONTEXT, LAYOUT
from tests.connectors.test_reader import OWNER, Bench
from tests.deadlines import HANG_S
from tests.security.mutations import EXAMPLES, fuzzing, mutated_bytes

if TYPE_CHECKING:
    from tests.security.live_cluster import LiveCluster

KEY = b"k" * 32
LEASE = LeaseRef("P", 1, "lease")
TO_OWNER: tuple[ToOwner, ...] = (
    Hello("D", 1, "f", LAYOUT, b"nonce"), Renew(LEASE), Confirm(LEASE, 0, 32, 7), Release(LEASE, done=False),
    Release(LEASE, done=True),
)  # fmt: skip
TO_READER: tuple[ToReader, ...] = (
    HelloReply("P", 1, "f", LAYOUT, b"there", transport_checksum(b"there"), b"nonce"),
    LeaseState(LEASE, 0, 5, 32, runs(0, (1, 2)), (SampledToken(1),), ttl_s=2.0, is_begun=True),
    ConfirmReply(LEASE, 0, 32, 7, ok=False),
)  # fmt: skip
HEAD_BYTES = 2 + MAC_BYTES
PAPERS = (
    Ticket("request", LEASE, 0, 1e12, "f", LAYOUT, b"digest", 32, 1, "host", 1),
    Offer(("http://p:1", "http://q:1"), 1e12), NodeOrder("add", "http://p:1", 1e12, "prefill"),
)  # fmt: skip
CONTEXT_OF_P = replace(CONTEXT, engine_id="P", epoch=1)


def resealed(message: ToOwner | ToReader) -> st.SearchStrategy[bytes]:
    """The message's frame with a mutated body under a signature that is right."""
    frame = seal(KEY, message)
    return mutated_bytes(frame[HEAD_BYTES:]).map(lambda body: frame[:2] + mac(KEY, body) + body)


@fuzzing(200)
@given(st.sampled_from([*TO_OWNER, *TO_READER]), st.data())
def test_a_mutated_frame_is_refused_by_name(message: ToOwner | ToReader, data: st.DataObject) -> None:
    genuine = seal(KEY, message)
    frame = data.draw(mutated_bytes(genuine))
    try:
        assert open_sealed(KEY, frame) == message
        assert frame == genuine
    except (ProtocolMismatch, BadSignature):
        assert frame != genuine


@fuzzing(150)
@given(st.sampled_from(PAPERS), st.data())
def test_a_signed_paper_that_is_wrong_is_refused_by_name(
    paper: Ticket | Offer | NodeOrder, data: st.DataObject
) -> None:
    body = data.draw(mutated_bytes(urlsafe_b64decode(sign(KEY, paper))[MAC_BYTES:]))
    token = urlsafe_b64encode(mac(KEY, body) + body).decode()
    for kind in (Ticket, Offer, NodeOrder):
        with contextlib.suppress(TicketError, ProtocolMismatch):
            assert isinstance(verify(KEY, token, kind, 1e12), type(paper))  # type: ignore[type-var]


@fuzzing(150)
@given(st.lists(st.sampled_from(TO_OWNER).flatmap(resealed), max_size=5))
def test_a_member_with_a_bug_does_not_end_anothers_lease(frames: list[bytes]) -> None:
    """Only the message that names the lease and says that it is done does."""
    replies: list[ToReader] = []
    leases = LeaseTable("P", 1, full_layout(), 10.0, lambda: 0.0)
    owner = Owner(CONTEXT_OF_P, leases, lambda _, message: replies.append(message), is_frozen=lambda: False)
    owner.open(b"there")
    lease = leases.open(32, hold=False)
    leases.announce(PublishSpec(lease.lease_id, runs(0, (4, 5)), 32, 0))
    ended = False
    for frame in frames:
        try:
            message = open_sealed(KEY, frame)
        except msgspec.MsgspecError:
            continue
        if isinstance(message, ToOwner):
            owner.on_message(b"member", message)
            ended |= message == Release(lease, done=True)
        owner.push()
    assert leases.confirm(Confirm(lease, 0, 32, 1)).ok is not ended
    assert leases.renew(lease).runs == (() if ended else runs(0, (4, 5)))


@fuzzing(150)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(TO_READER).flatmap(resealed)), max_size=5))
def test_wrong_answers_cost_at_most_their_own_load(wrong: list[tuple[int, bytes]]) -> None:
    """At any of four moments of a load. It ends, once, and holds nothing; KV is used only if it was confirmed."""
    bench, now = Bench(), itertools.count(1)
    ticket = bench.begin("a", lease_id=LEASE.lease_id)

    def interfere(moment: int) -> None:
        for at, frame in wrong:
            if at == moment:
                try:
                    message = open_sealed(KEY, frame)
                except msgspec.MsgspecError:
                    continue
                if isinstance(message, ToReader):
                    bench.reader.on_message(OWNER, message, 0.0)

    interfere(0)
    bench.answer()
    interfere(1)
    for key in bench.transport.connects:
        bench.reader.on_completion(Connected(key), 0.0)
    bench.announce(ticket)
    interfere(2)
    bench.reader.reserve(LoadSpec("a", runs(0, (8, 9)), 32), 0.0)
    for _, read_id in list(bench.transport.reads):
        bench.reader.on_completion(ReadEnded(read_id), 0.0)
    interfere(3)
    while bench.reader.loads.num_loads:
        for _, read_id in list(bench.transport.reads):
            bench.reader.on_completion(ReadEnded(read_id), 0.0)
        bench.reader.tick(float(next(now)))
    assert sum(isinstance(event, LoadDone) for event in bench.events) == 0, "nothing was confirmed"
    assert bench.reader.loads.num_quarantined_blocks == 0


def test_a_channel_counts_what_is_wrong_and_hears_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's own channel sends the mutated frames, past whatever handshake there is."""
    frames: list[bytes] = []

    @fuzzing(60)
    @given(st.sampled_from(TO_OWNER).flatmap(lambda message: mutated_bytes(seal(b"another key", message))))
    def collect(frame: bytes) -> None:
        frames.append(frame)

    collect()
    owner, reader = ZmqChannel(KEY, "127.0.0.1", 0), ZmqChannel(KEY, "127.0.0.1", 0)
    try:
        waiting = iter(frames)
        monkeypatch.setattr("pd_connectors.zmq_channel.seal", lambda key, message: next(waiting, seal(key, message)))
        for _ in frames:
            reader.ask(("127.0.0.1", owner.port), Renew(LEASE))
        reader.ask(("127.0.0.1", owner.port), Renew(LEASE))
        assert heard(owner) == [Renew(LEASE)]
        assert owner.stats()["bad_frames_total"] == len(frames)
    finally:
        reader.close()
        owner.close()


def heard(channel: Channel) -> list[ToOwner]:
    """The first messages that come through."""
    end_s = time.monotonic() + HANG_S
    while time.monotonic() < end_s:
        messages = [one.message for one in channel.receive() if isinstance(one, FromReader)]
        if messages:
            return messages
        channel.wait(0.05)
    raise AssertionError("nothing came")


# live engines

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
CONVERSATIONS = tuple(
    GREETING + READY + b"\0" + bytes([len(frame)]) + frame for frame in (seal(KEY, one) for one in TO_OWNER)
)


@pytest.mark.integration
@pytest.mark.parametrize("examples", EXAMPLES)
def test_strangers_bytes_to_the_control_port(cluster: LiveCluster, examples: int) -> None:
    ticket = cluster.take_ticket()
    cluster.release(ticket["ticket"])

    @fuzzing(examples)
    @given(st.sampled_from(CONVERSATIONS).flatmap(mutated_bytes))
    def fuzz(raw: bytes) -> None:
        with socket.create_connection(("127.0.0.1", int(ticket["remote_port"])), HANG_S) as connection:
            connection.sendall(raw)

    fuzz()
    cluster.check_unharmed()
