"""The control loop: in which order a turn does what is due."""

from __future__ import annotations

import pytest

from pd_connectors.base import LeaseEnded
from pd_connectors.channel import FromOwner
from pd_connectors.loopback import LoopbackChannel, LoopbackNetwork
from pd_connectors.protocol.clock import PatientClock
from pd_connectors.protocol.errors import LeaseEnd
from pd_connectors.protocol.messages import LeaseState, Renew
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
    """A turn that comes late finds the renewal that came in time beside the lease whose time is over by now."""
    owner = Engine(network, clock, 1, epoch=1)
    lease = owner.exchange.leases.open(16, hold=False)
    assert owner.exchange.turn() == CONTEXT.lease_ttl_s
    clock.now += CONTEXT.lease_ttl_s - 0.1
    reader.ask(("sim", 1), Renew(lease))
    clock.now += 0.2
    assert owner.exchange.turn() == CONTEXT.lease_ttl_s
    assert owner.exchange.take_events() == []
    assert [state.ended for state in told(reader)] == [None]
    clock.now += CONTEXT.lease_ttl_s
    owner.exchange.turn()
    assert owner.exchange.take_events() == [LeaseEnded(lease.lease_id, LeaseEnd.EXPIRED)]
    assert [state.ended for state in told(reader)] == [LeaseEnd.EXPIRED], "in the same turn"


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
