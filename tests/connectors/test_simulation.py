"""The protocol under loss, duplication, delay, reordering, failed and hanging reads, preemption, crashes and stops.

For every schedule: (a) no LoadDone with other bytes than the prompt's; (b) every load ends once, in order, within
its deadline, and drains; nothing ever lands in a free block; (c) every lease ends and every block comes back.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connectors.loopback import Faults, LoopbackNetwork
from pd_connectors.protocol.errors import LoadFailure
from tests.connectors.simulation import Simulation, VirtualClock, random_operation

if TYPE_CHECKING:
    from collections.abc import Sequence

FAULTS = st.builds(
    Faults,
    drop=st.sampled_from([0.0, 0.05, 0.3]),
    duplicate=st.sampled_from([0.0, 0.3]),
    max_delay_s=st.sampled_from([0.0, 0.01, 0.3]),
    fail_read=st.sampled_from([0.0, 0.1]),
    hang_read=st.sampled_from([0.0, 0.1]),
)


def run(faults: Faults, seed: int, num_operations: int, num_engines: int, degrees: Sequence[int] = ()) -> Simulation:
    clock = VirtualClock()
    simulation = Simulation(LoopbackNetwork(faults, seed, clock), clock, num_engines, degrees)
    rng = random.Random(seed)
    for _ in range(num_operations):
        random_operation(simulation, rng)
        simulation.advance(rng.choice((0.0, 0.01, 0.05, 0.2)))
    simulation.settle()
    return simulation


@pytest.mark.long
@given(
    faults=FAULTS,
    seed=st.integers(0, 2**32),
    num_operations=st.integers(1, 60),
    num_engines=st.integers(1, 3),
)
@settings(max_examples=15, deadline=None)
def test_every_schedule(faults: Faults, seed: int, num_operations: int, num_engines: int) -> None:
    simulation = run(faults, seed, num_operations, num_engines)
    assert simulation.num_done + len(simulation.failures) <= simulation.num_loads


RANKED = {
    "faults": FAULTS,
    "seed": st.integers(0, 2**32),
    "num_operations": st.integers(1, 60),
    "degrees": st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
}


def check_ranked(faults: Faults, seed: int, num_operations: int, degrees: list[int]) -> None:
    simulation = run(faults, seed, num_operations, len(degrees), degrees)
    assert simulation.num_done + len(simulation.failures) <= simulation.num_loads


@pytest.mark.long
@given(**RANKED)
@settings(max_examples=15, deadline=None)
def test_every_schedule_of_engines_with_ranks_that_die_or_lag(
    faults: Faults, seed: int, num_operations: int, degrees: list[int]
) -> None:
    check_ranked(faults, seed, num_operations, degrees)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(**RANKED)
@settings(max_examples=10_000, deadline=None)
def test_ten_thousand_schedules_of_engines_with_ranks(
    faults: Faults, seed: int, num_operations: int, degrees: list[int]
) -> None:
    check_ranked(faults, seed, num_operations, degrees)


@pytest.mark.long_cases
@pytest.mark.parametrize("degrees", list(itertools.product((1, 2, 4), repeat=2)))
def test_without_faults_every_load_between_unequal_engines_succeeds(degrees: tuple[int, int]) -> None:
    clock = VirtualClock()
    simulation = Simulation(LoopbackNetwork(Faults(max_delay_s=0.01), clock=clock), clock, 2, degrees)
    for i in range(5):
        simulation.request(0, [1], 16 * i + 1 + i, i % 3, hold=i % 2 == 0)
    simulation.settle()
    assert simulation.engines[1].num_done == 5
    assert simulation.failures == []


@pytest.mark.long
def test_without_faults_every_load_succeeds() -> None:
    clock = VirtualClock()
    simulation = Simulation(LoopbackNetwork(clock=clock), clock, 2)
    for i in range(10):
        simulation.request(0, [1], 16 * (i % 5) + 1 + i, i % 3, hold=i % 2 == 0)
        simulation.settle()
    assert simulation.engines[1].num_done == 10
    assert simulation.failures == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_lossy_network_without_disasters_still_delivers(seed: int) -> None:
    """Retries, not luck: with a third of all messages lost, loads go through."""
    clock = VirtualClock()
    faults = Faults(drop=0.3, duplicate=0.3, max_delay_s=0.05)
    simulation = Simulation(LoopbackNetwork(faults, seed, clock), clock, 2)
    for _ in range(10):
        simulation.request(0, [1], 70, 0, hold=False)
        simulation.settle()
    assert simulation.engines[1].num_done >= 8, simulation.failures


def race(seed: int, drop: float) -> Simulation:
    """P takes blocks back and overwrites them while D reads them, and word of it is late or lost."""
    clock, rng = VirtualClock(), random.Random(seed)
    network = LoopbackNetwork(Faults(drop=drop, duplicate=0.3, max_delay_s=0.3), seed, clock)
    simulation = Simulation(network, clock, 2)
    prefill = simulation.engines[0]
    simulation.request(0, [1, 1], 90, 0, hold=False)
    for _ in range(3):
        prefill.compute(6, sample=rng.random() < 0.7)
        simulation.advance(rng.uniform(0.3, 1.2))
        rng.choice((prefill.preempt, prefill.revoke))()
    simulation.settle()
    return simulation


@pytest.mark.long
@given(seed=st.integers(0, 2**32), drop=st.sampled_from([0.0, 0.4]))
@settings(max_examples=30, deadline=None)
def test_fence(seed: int, drop: float) -> None:
    simulation = race(seed, drop)
    assert simulation.num_done + len(simulation.failures) == simulation.num_loads


@pytest.mark.long
def test_the_schedules_reach_every_outcome() -> None:
    """Guards the test above: a simulation in which nothing goes wrong proves nothing."""
    outcomes: set[LoadFailure] = set()
    num_done = 0
    for seed in range(12):
        faults = Faults(drop=0.15, duplicate=0.2, max_delay_s=0.2, fail_read=0.1, hang_read=0.1)
        simulation = run(faults, seed, 60, 3)
        outcomes.update(simulation.failures)
        num_done += simulation.num_done
    assert num_done > 20
    rare = {LoadFailure.REJECTED, LoadFailure.NOT_CONFIRMED, LoadFailure.DEADLINE}
    assert outcomes >= set(LoadFailure) - rare - {LoadFailure.NO_ROOM}  # an engine gives up, the connector is told
