"""The control loop: in which order a turn does what is due."""

from __future__ import annotations

import pytest

from pd_connectors.base import LeaseEnded, PublishSpec
from pd_connectors.channel import FromOwner
from pd_connectors.loopback import LoopbackChannel, LoopbackNetwork
from pd_connectors.protocol.clock import PatientClock
from pd_connectors.protocol.errors import LeaseEnd
from pd_connectors.protocol.messages import LeaseState, PrefillFacts, Renew, SampledToken
from tests.connectors.simulation import CONTEXT, Engine, VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def network(clock: VirtualClock) -> LoopbackNetwork:
    return LoopbackNetwork(clock=clock)


@pytest.fixture
def reader(network: LoopbackNetwork) -> LoopbackChannel:
    return LoopbackChannel(network.attach("sim", 2))


def told(reader: LoopbackChannel) -> list[LeaseState]:
    messages = [item.message for item in reader.receive() if isinstance(item, FromOwner)]
    return [message for message in messages if isinstance(message, LeaseState)]


def test_what_has_arrived_is_heard_before_anything_expires(
    clock: VirtualClock, network: LoopbackNetwork, reader: LoopbackChannel
) -> None:
    """A turn that comes late finds the renewal that came in time beside the lease that has expired by now."""
    owner = Engine(network, clock, 1, epoch=1)
    lease = owner.connector.leases.open(16, hold=False)
    assert owner.connector.turn() == CONTEXT.lease_ttl_s
    clock.now += CONTEXT.lease_ttl_s - 0.1
    reader.ask(("sim", 1), Renew(lease))
    clock.now += 0.2
    assert owner.connector.turn() == CONTEXT.lease_ttl_s
    assert owner.connector.poll() == []
    assert [state.ended for state in told(reader)] == [None]
    clock.now += CONTEXT.lease_ttl_s
    owner.connector.turn()
    assert owner.connector.poll() == [LeaseEnded(lease.lease_id, LeaseEnd.EXPIRED)]
    assert [state.ended for state in told(reader)] == [LeaseEnd.EXPIRED], "in the same turn"


def test_the_last_blocks_and_the_first_token_are_one_message(
    clock: VirtualClock, network: LoopbackNetwork, reader: LoopbackChannel
) -> None:
    """A prompt of two chunks is told in three messages: it has begun, its first block, all the rest with the token."""
    owner = Engine(network, clock, 1, epoch=1)
    lease = owner.connector.leases.open(40, hold=False)
    reader.ask(("sim", 1), Renew(lease))
    owner.connector.turn()
    assert len(told(reader)) == 1, "the answer to the renewal"
    heard = []
    for num_tokens, block_ids, tokens in ((0, (), ()), (16, (4,), ()), (40, (4, 5, 6), (SampledToken(7),))):
        blocks = owner.runs(list(block_ids), 40, num_tokens) if num_tokens else ()
        owner.connector.leases.announce(PublishSpec(lease.lease_id, blocks, num_tokens, 0, tokens, PrefillFacts(0.25)))
        owner.connector.turn()
        heard.append([(state.num_tokens_readable, state.first_tokens, state.prefill.seconds) for state in told(reader)])
    assert heard == [[(0, (), 0.0)], [(16, (), 0.0)], [(40, (SampledToken(7),), 0.25)]]


def test_the_pause_of_a_stopped_process_is_no_silence_of_its_peers() -> None:
    now = [100.0]
    clock = PatientClock(lambda: now[0], patience_s=1.0)
    clock.sleep(2.0)
    now[0] += 3.0  # one second late: that is load, and counts
    clock.resume()
    assert clock() == 103.0
    clock.sleep(2.0)
    now[0] += 32.0
    clock.resume()
    assert clock() == 105.0
