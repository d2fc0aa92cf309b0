"""P's half: what readers are answered, and which of them keep a lease alive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_connectors.base import LeaseEnded, PublishSpec
from pd_connectors.handshake import transport_checksum
from pd_connectors.lease import ABANDON_GRACE_S, LeaseTable
from pd_connectors.owner import Owner
from pd_connectors.protocol.errors import LeaseEnd
from pd_connectors.protocol.messages import (
    Confirm,
    ConfirmReply,
    Hello,
    HelloReply,
    LeaseRef,
    LeaseState,
    Release,
    Renew,
    SampledToken,
    ToReader,
)
from tests.connectors.layouts import full_layout, runs
from tests.connectors.simulation import CONTEXT, LAYOUT, VirtualClock

HELLO = Hello("D", 4, "f", LAYOUT, b"nonce")
TTL_S = 10.0


class Bench:
    """An owner with its readers in a list."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.leases = LeaseTable("P", 1, full_layout(), TTL_S, self.clock)
        self.told: list[tuple[bytes, ToReader]] = []
        context = replace(CONTEXT, engine_id="P", epoch=1)
        self.owner = Owner(
            context, self.leases, lambda reader, message: self.told.append((reader, message)), is_frozen=lambda: False
        )

    def open(self) -> LeaseRef:
        """A lease of which all is announced."""
        self.owner.open(b"there")
        lease = self.leases.open(16, hold=False)
        self.leases.announce(PublishSpec(lease.lease_id, runs(0, (4,)), 16, 0))
        self.leases.take_changed()
        return lease

    def take_told(self) -> list[tuple[bytes, ToReader]]:
        told, self.told = self.told, []
        return told

    def pushed(self) -> list[tuple[bytes, ToReader]]:
        self.owner.push()
        return self.take_told()

    def state(self, lease: LeaseRef) -> LeaseState:
        """As the table tells it, without a renewal's effect."""
        return self.leases.renew(lease)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_greeting_is_answered_once_the_transport_is_up(bench: Bench) -> None:
    bench.owner.on_message(b"d", HELLO)
    assert bench.take_told() == []  # the reader repeats it
    bench.owner.open(b"there")
    bench.owner.on_message(b"d", HELLO)
    reply = HelloReply("P", 1, "f", LAYOUT, b"there", transport_checksum(b"there"), b"nonce")
    assert bench.take_told() == [(b"d", reply)]


@pytest.mark.parametrize("other", [LeaseRef("P", 2, "x"), LeaseRef("Q", 1, "x")])
def test_a_reader_of_another_epoch_or_engine_is_told_what_lives_here(bench: Bench, other: LeaseRef) -> None:
    """Also when a lease of ours has that id: nothing of it is told, and nothing happens to it."""
    lease = bench.open()
    other = LeaseRef(other.engine_id, other.epoch, lease.lease_id)
    for message in (
        Renew(other), Confirm(other, 0, 16, 7), Release(other, done=True), Release(other, done=False),
    ):  # fmt: skip
        bench.owner.on_message(b"d", message)
        ((reader, reply),) = bench.take_told()
        assert reader == b"d"
        assert isinstance(reply, HelloReply)
        assert (reply.engine_id, reply.epoch, reply.nonce) == ("P", 1, b"")
    assert len(bench.leases) == 1
    bench.leases.finish(lease.lease_id, (SampledToken(3),))
    assert bench.pushed() == [], "it was not attached"


def test_a_reader_that_renews_is_told_every_change_until_the_end(bench: Bench) -> None:
    lease = bench.open()
    bench.owner.on_message(b"d", Renew(lease))
    assert bench.take_told() == [(b"d", bench.state(lease))]
    bench.owner.on_message(b"e", Renew(lease))
    bench.take_told()
    bench.leases.finish(lease.lease_id, (SampledToken(3),))
    state = bench.state(lease)
    assert sorted(bench.pushed(), key=lambda told: told[0]) == [(b"d", state), (b"e", state)]
    assert bench.pushed() == []
    bench.owner.on_message(b"d", Release(lease, done=True))
    assert bench.leases.take_ended() == [LeaseEnded(lease.lease_id, LeaseEnd.RELEASED)]
    ended = bench.pushed()
    assert sorted(reader for reader, _ in ended) == [b"d", b"e"]
    assert all(isinstance(message, LeaseState) and message.ended for _, message in ended)


def test_a_renewal_keeps_the_lease_and_one_that_has_ended_is_told_so(bench: Bench) -> None:
    lease = bench.open()
    for _ in range(3):
        bench.clock.now += TTL_S * 0.9
        bench.owner.on_message(b"d", Renew(lease))
    bench.take_told()
    bench.clock.now += TTL_S
    bench.leases.expire()
    bench.owner.on_message(b"late", Renew(lease))
    ((_, reply),) = bench.take_told()
    assert isinstance(reply, LeaseState)
    assert reply.ended is LeaseEnd.EXPIRED
    assert [reader for reader, _ in bench.pushed()] == [b"d"], "a reader that comes late is not attached"


def test_a_confirmation_is_the_tables(bench: Bench) -> None:
    lease = bench.open()
    bench.owner.on_message(b"d", Confirm(lease, 0, 16, 7))
    bench.owner.on_message(b"d", Confirm(lease, 1, 16, 8))
    assert bench.take_told() == [
        (b"d", ConfirmReply(lease, 0, 16, 7, True)), (b"d", ConfirmReply(lease, 1, 16, 8, False)),
    ]  # fmt: skip


def test_a_lease_is_abandoned_when_its_last_reader_leaves(bench: Bench) -> None:
    lease = bench.open()
    for reader in (b"d", b"e"):
        bench.owner.on_message(reader, Renew(lease))
    bench.owner.on_message(b"d", Release(lease, done=False))
    assert bench.leases.expire() == bench.clock.now + TTL_S, "another still reads it"
    bench.owner.on_message(b"d", Release(lease, done=False))  # repeated
    assert bench.leases.expire() == bench.clock.now + TTL_S
    bench.take_told()
    bench.leases.finish(lease.lease_id, (SampledToken(3),))
    assert [reader for reader, _ in bench.pushed()] == [b"e"]
    bench.owner.on_message(b"e", Release(lease, done=False))
    assert bench.leases.expire() == bench.clock.now + ABANDON_GRACE_S
    assert len(bench.leases) == 1, "another reader may come"


def test_a_reader_that_never_renewed_abandons_nothing(bench: Bench) -> None:
    lease = bench.open()
    bench.owner.on_message(b"d", Release(lease, done=False))
    assert bench.leases.expire() == bench.clock.now + TTL_S


def test_nothing_is_kept_of_ended_leases(bench: Bench) -> None:
    for _ in range(3):
        lease = bench.open()
        bench.owner.on_message(b"d", Renew(lease))
        bench.leases.release(lease)
        bench.owner.push()
    assert not bench.owner._attached
    lease = bench.open()
    bench.owner.on_message(b"d", Renew(lease))
    bench.owner.on_message(b"d", Release(lease, done=False))
    assert not bench.owner._attached
