"""Mixed nodes with loads that want what each other's leases hold: none waits for the deadline of a load."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pd_cluster.scheduling.lent_memory import LENT_WAIT_S, patience_s
from pd_cluster.scheduling.sequence import Request
from tests.scheduling.mixed_nodes import DEADLINE_S, MixedNodes
from tests.scheduling.simulation import BLOCK_SIZE, message

if TYPE_CHECKING:
    from pd_cluster.protocol.messages import AddRequest

LEASE_GRACE_S = 2.0  # for which a lease that its reader has left stays (`pd_connectors.lease`)
SOON_S = LENT_WAIT_S + LEASE_GRACE_S + 1.0


def asked(name: str, num_blocks: int, max_tokens: int = 4) -> AddRequest:
    """A prompt that shares no block with those of other names."""
    own = random.Random(name)
    return message(name, [own.randint(1, 20) for _ in range(num_blocks * BLOCK_SIZE - 3)], max_tokens=max_tokens)


def local_prefills(nodes: MixedNodes) -> list[float]:
    return [node.transfers.counters["prefills_local_total"] for node in nodes.nodes]


def failed_loads(nodes: MixedNodes) -> dict[str, float]:
    """As the metrics of all nodes count them, by reason."""
    counts: Counter[str] = Counter()
    for node in nodes.nodes:
        for name, number in node.connector.stats().items():
            if number and name.startswith("loads_failed_total"):
                counts[name.partition("reason=")[2]] += int(number)
    return dict(counts)


def test_nothing_is_given_up_where_memory_suffices() -> None:
    nodes = MixedNodes((6, 6))
    nodes.hand_over(asked("x", 4), 0, 1)
    assert nodes.seconds_until_done(40.0) < 1
    nodes.hand_over(asked("y", 4), 1, 0)
    assert nodes.seconds_until_done(40.0) < 1
    assert local_prefills(nodes) == [0, 0]
    nodes.check_empty()


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_a_circle_of_nodes_that_hand_over(num_nodes: int) -> None:
    """Each one's memory holds what the next wants to read. One of them, the first by name, computes a prompt itself."""
    nodes = MixedNodes((6,) * num_nodes)
    for at in range(num_nodes):
        nodes.hand_over(asked(f"r{at}", 4), at, (at + 1) % num_nodes)
    assert nodes.seconds_until_done(2 * DEADLINE_S) < SOON_S
    assert sum(local_prefills(nodes)) == 1
    assert [reason for node in nodes.nodes for reason in node.reasons] == ["no_room"]
    assert failed_loads(nodes) == {"no_room": 1}
    nodes.check_empty()


@pytest.mark.long
def test_a_node_that_may_not_compute_again_waits() -> None:
    """With `--on-load-failure fail` a load that is given up would be an error."""
    nodes = MixedNodes((6, 6))
    for node in nodes.nodes:
        node.transfers._may_give_up = False
    nodes.hand_over(asked("x", 4), 0, 1)
    nodes.hand_over(asked("y", 4), 1, 0)
    assert nodes.seconds_until_done(2 * DEADLINE_S) > DEADLINE_S
    nodes.check_empty()


@pytest.mark.long
def test_streams_that_hold_the_memory_are_waited_for() -> None:
    """No load is given up: without the leases there would be no room either."""
    nodes = MixedNodes((8, 8))
    source, target = nodes.nodes
    source.admit(asked("other", 1, max_tokens=90))
    nodes.hand_over(asked("x", 6), 0, 1)
    target.admit(asked("stream", 2, max_tokens=60))
    nodes.hand_over(asked("lent", 3), 1, 0)
    nodes.advance(0.5)
    lent, waiting = target.world.scheduler.lent, target.world.scheduler._queues.reserving
    assert [request.request_id for request in waiting] == ["x"]
    assert lent.waited_s() > 0
    assert not lent.is_lacking
    while len(target.world.scheduler._queues.running):
        assert not lent.is_lacking
        nodes.advance(0.1)
    assert lent.is_lacking
    assert nodes.seconds_until_done(2 * DEADLINE_S) < SOON_S
    nodes.check_empty()


def test_a_node_that_lends_nothing_gives_no_load_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that still writes after its end is no lease, and what is kept for running streams is not room."""
    monkeypatch.setattr("tests.scheduling.mixed_nodes.TICK_S", 0.5)  # the stream grows by a block in 8 s
    nodes = MixedNodes((12, 8))
    target = nodes.nodes[1]
    blocks = target.world.blocks
    target.admit(asked("stream", 2, max_tokens=100))
    nodes.advance(1.5)
    table = blocks.open_table()
    blocks.grow(table, 0, 2 * BLOCK_SIZE)
    blocks.quarantine("orphan", table)
    blocks.close(table)
    nodes.hand_over(asked("x", 3), 0, 1)
    nodes.advance(2 * LENT_WAIT_S)
    assert blocks.num_available == 3, "as many as the load needs"
    nodes.advance(2 * LENT_WAIT_S)
    assert target.reasons == []
    blocks.drain("orphan")
    nodes.seconds_until_done(2 * DEADLINE_S)
    assert failed_loads(nodes) == {}
    nodes.check_empty()


@pytest.mark.long
def test_a_load_that_begins_again_waits_from_then_on() -> None:
    """The time in between, and that of the load before, are no waiting for what is lent."""
    nodes = MixedNodes((6, 12))
    target, source = nodes.nodes
    target.asks_again = True
    nodes.hand_over(asked("lent", 4), 0, None)
    nodes.hand_over(asked("x", 4), 1, 0)
    nodes.advance(0.7 * LENT_WAIT_S)
    source.release()
    nodes.advance(LENT_WAIT_S)
    assert target.reasons == ["lease_ended"]
    for num_given_up in range(3):
        nodes.hand_over(asked("x", 4), 1, 0)
        nodes.advance(0.9 * LENT_WAIT_S)
        assert target.reasons == ["lease_ended"] + ["no_room"] * num_given_up
        nodes.advance(0.2 * LENT_WAIT_S)
        assert target.reasons == ["lease_ended", "no_room"] + ["no_room"] * num_given_up
    target.transfers.prefill_locally("x")
    nodes.seconds_until_done(2 * DEADLINE_S)
    nodes.check_empty()


@pytest.mark.long
def test_what_has_waited_before_any_load_does_not_count() -> None:
    """A search of the pool waits first, but nothing is given up for its sake: it ends soon, or takes less."""
    nodes = MixedNodes((6, 12))
    target = nodes.nodes[0]
    scheduler = target.world.scheduler
    nodes.hand_over(asked("lent", 4), 0, None)
    nodes.advance(0.5)
    search = Request.from_message(asked("search", 4))
    scheduler.park(search)
    search.load_id = "search@1"
    assert scheduler.reserve(search, 3 * BLOCK_SIZE) is None
    for name in ("x", "y"):
        nodes.hand_over(asked(name, 4), 1, 0)
        nodes.advance(0.9 * LENT_WAIT_S)
        assert target.failed == []
        nodes.nodes[1].release()
        nodes.advance(LENT_WAIT_S)
        assert target.reasons == ["lease_ended"]
        target.failed.clear()
        target.reasons.clear()
    scheduler.abort(search)
    nodes.seconds_until_done(2 * DEADLINE_S)
    nodes.check_empty()


@pytest.mark.long
def test_a_load_of_another_lender_is_next() -> None:
    """No node knows which load stands in the way: one lender after the other gets its lease back."""
    nodes = MixedNodes((6, 20, 20))
    node = nodes.nodes[0]
    nodes.hand_over(asked("lent", 4), 0, None)
    for number, source in enumerate((1, 1, 2, 2)):
        nodes.hand_over(asked(f"r{number}", 3), source, 0)
        nodes.advance(0.1)
    nodes.advance(LENT_WAIT_S + 1.0)
    assert node.failed == ["r3"], "one at a time"
    nodes.advance(3 * LENT_WAIT_S)
    assert node.failed == ["r3", "r1", "r2", "r0"]
    assert set(node.reasons) == {"no_room"}
    nodes.seconds_until_done(2 * DEADLINE_S)
    nodes.check_empty()


@pytest.mark.long
def test_loads_that_are_given_up_later_do_not_wait_for_the_last_of_the_others() -> None:
    """What was given up gets its time to have an effect; what has waited until then has still waited."""
    nodes = MixedNodes((20, 6, 20))
    node = nodes.nodes[1]
    nodes.hand_over(asked("lent", 4), 1, None)
    for name, source in (("later", 0), ("r0", 2), ("r1", 2)):  # patience: 5 s, 2 s, 2 s
        nodes.hand_over(asked(name, 3), source, 1)
        nodes.advance(0.1)
    nodes.advance(2 * LENT_WAIT_S + 0.5)
    assert node.failed == ["r1", "r0"]
    nodes.advance(LENT_WAIT_S)
    assert node.failed == ["r1", "r0", "later"]
    nodes.seconds_until_done(2 * DEADLINE_S)
    nodes.check_empty()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_many_prompts_that_cross(seed: int) -> None:
    """Three nodes with room for one or two prompts, and short answers: no load waits for its deadline."""
    rng = random.Random(seed)
    nodes = MixedNodes((9, 7, 8))
    for number in range(24):
        source, target = rng.sample(range(3), 2)
        if rng.random() < 0.2:
            nodes.nodes[target].admit(asked(f"own{number}", rng.randint(1, 5), rng.randint(1, 20)))
        nodes.hand_over(asked(f"r{number}", rng.randint(1, 6), rng.randint(1, 20)), source, target)
        nodes.advance(rng.choice((0.0, 0.1, 0.3)))
    nodes.seconds_until_done(10 * DEADLINE_S)
    assert "deadline" not in {reason for node in nodes.nodes for reason in node.reasons}
    nodes.check_empty()


def test_of_two_nodes_one_is_first() -> None:
    assert patience_s("a", "b") == patience_s("a", "a") == LENT_WAIT_S
    assert patience_s("b", "a") > LENT_WAIT_S + LEASE_GRACE_S
