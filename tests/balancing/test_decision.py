"""Decisions of a balance: when a role changes, and each reason for which none does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.balancing.decision import (
    CONFIRMED,
    HORIZON_S,
    KEPT_S,
    OPERATOR_S,
    SETTLE_S,
    STALE_S,
    BalanceDecision,
    RoleChange,
    decide,
)
from pd_cluster.balancing.estimate import Forecast
from pd_cluster.balancing.snapshot import ROLES, BalanceSnapshot
from tests.balancing.snapshots import TARGETS, a_node, a_snapshot, by_prefills, nodes_of

if TYPE_CHECKING:
    from pd_cluster.balancing.decision import Memory
    from pd_cluster.balancing.snapshot import GroupLoad
    from pd_cluster.planning.role_counts import RoleCounts

MORE = by_prefills({1: 0.5, 2: 0.7, 3: 0.9})  # each prefill node more gains 0.2


def rounds(snapshot: BalanceSnapshot, number: int = CONFIRMED, forecast: Any = MORE) -> list[BalanceDecision]:
    """The decision of each round."""
    memory: Memory = {}
    made = []
    for _ in range(number):
        (decision,), memory = decide(snapshot, memory, TARGETS, forecast)
        made.append(decision)
    return made


def test_a_change_that_gains_in_three_rounds_is_made_and_says_why() -> None:
    *first, last = rounds(a_snapshot(nodes_of(1, 3)))
    assert [one.change for one in first] == [None, None]
    assert "d-0 as a prefill node gains 0.20" in first[0].reason
    assert first[0].reason.endswith("seen in 1 rounds, of 3, with 0.19 of 0.06 in sum")
    assert last.change == RoleChange("d-0", "prefill", 0, 0)
    assert last.reason.startswith("1P3D: 0.50 of the requests would meet their targets")


def test_small_gains_are_added_up_and_losses_taken_off() -> None:
    snapshot, memory = a_snapshot(nodes_of(1, 3)), dict[str, Any]()
    for number, gain in enumerate((0.03, -0.02, 0.03, -0.2, *[0.03] * 4), 1):
        (decision,), memory = decide(snapshot, memory, TARGETS, by_prefills({1: 0.5, 2: 0.5 + gain}))
        assert (decision.change is not None) == (number == 8), (number, decision.reason)
    assert memory == {"demo": {}}, "what follows begins anew"


def test_the_order_names_what_was_seen() -> None:
    nodes = nodes_of(1, 3)
    nodes[0] = replace(nodes[0], changes=4)
    nodes[1] = replace(nodes[1], changes=2, num_streams=0)
    assert rounds(a_snapshot(nodes, role_state=6))[-1].change == RoleChange("d-0", "prefill", 2, 6)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"age_s": STALE_S + 1}, "is 6 s old"),
        ({"num_answering": 1, "num_routers": 2}, "1 of 2 routers answer: no majority"),
        ({"num_answering": 0, "num_routers": 1}, "0 of 1 routers answer"),
        ({"arrived_per_s": {}}, "not enough is known: 0 requests"),
        ({"seen": {}}, "0 requests have ended of late, 20 are needed"),
        ({"nodes": ()}, "there are no nodes"),
    ],
)
def test_what_is_not_known_changes_nothing(change: dict[str, Any], why: str) -> None:
    decision = rounds(replace(a_snapshot(nodes_of(1, 3)), **change))[-1]
    assert (decision.change, why in decision.reason) == (None, True), decision.reason


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({1: {"is_live": False}}, "nothing is told by d-0"),
        (
            {1: {"is_live": False}, 2: {"is_healthy": False}},
            "2 of 4 nodes are healthy and tell their load: no majority",
        ),
        ({0: {"sender": "balance", "order_age_s": SETTLE_S - 1}}, "the balance made p-0 a prefill node 44 s ago"),
        ({0: {"sender": "", "order_age_s": OPERATOR_S - 1}}, "an operator made p-0 a prefill node 599 s ago"),
        (
            {0: {"sender": "", "order_age_s": 70.0}, 1: {"sender": "balance", "order_age_s": 60.0}},
            "an operator made p-0",
        ),
    ],
)
def test_states_in_which_nothing_is_done(changed: dict[int, dict[str, Any]], why: str) -> None:
    nodes = nodes_of(1, 3)
    for index, fields in changed.items():
        nodes[index] = replace(nodes[index], **fields)
    decision = rounds(a_snapshot(nodes))[-1]
    assert (decision.change, why in decision.reason) == (None, True), decision.reason


def test_after_the_time_of_an_order_the_balance_acts_again() -> None:
    nodes = nodes_of(1, 3)
    nodes[0] = replace(nodes[0], sender="balance", order_age_s=SETTLE_S)
    nodes[1] = replace(nodes[1], sender="", order_age_s=OPERATOR_S)
    assert rounds(a_snapshot(nodes))[-1].change is not None


@pytest.mark.parametrize("age_s", [SETTLE_S, KEPT_S - 1, KEPT_S])
def test_a_change_is_to_pay_before_it_is_taken_back(age_s: float) -> None:
    nodes = nodes_of(1, 3)
    nodes[1] = replace(nodes[1], sender="balance", order_age_s=age_s)
    assert (rounds(a_snapshot(nodes))[-1].change is None) == (age_s < KEPT_S)


def test_no_role_that_a_change_has_given_of_late_is_left() -> None:
    """M became D, then P became M: what is best now is M in place of D again, the first change taken back."""
    nodes = nodes_of(1, 2, 2)
    nodes[1] = replace(nodes[1], sender="balance", order_age_s=2 * SETTLE_S)
    nodes[3] = replace(nodes[3], sender="balance", order_age_s=SETTLE_S)

    def more_mixed(load: GroupLoad, roles: RoleCounts) -> Forecast:
        return Forecast(*[0.2 * roles.mixed] * 3)

    assert rounds(a_snapshot(nodes), forecast=more_mixed)[-1].change is None
    nodes[1] = replace(nodes[1], order_age_s=KEPT_S)
    change = rounds(a_snapshot(nodes), forecast=more_mixed)[-1].change
    assert change is not None
    assert change.role == "mixed"


def test_what_a_change_costs_is_weighed() -> None:
    """Streams of the old role, and prompts with prefixes at the node: as many as a third of the requests."""
    gains = by_prefills({1: 0.5, 2: 0.55, 3: 0.0})
    nodes = [replace(node, num_streams=0, context=0) if node.role == "prefill" else node for node in nodes_of(1, 3)]
    assert rounds(a_snapshot(nodes), forecast=gains)[-1].change is not None
    busy = [replace(node, num_streams=round(10.0 * HORIZON_S * 0.06)) for node in nodes]
    decision = rounds(a_snapshot(busy), forecast=gains)[-1]
    assert decision.change is None
    assert "costs 0.060: too little" in decision.reason
    cached = a_snapshot([replace(node, cached_tokens=360_000) for node in nodes])
    seen = tuple(one._replace(cached_tokens=500) for one in cached.seen["demo"])
    assert rounds(replace(cached, seen={"demo": seen}), forecast=gains)[-1].change is None


def test_shorter_and_longer_steps_count() -> None:
    def unsure(load: Any, roles: Any) -> Forecast:
        return Forecast(0.9, 0.3, 1.0) if roles.prefill == 2 else Forecast(0.7, 0.6, 0.9)

    assert "gains 0.00" in rounds(a_snapshot(nodes_of(1, 3)), forecast=unsure)[-1].reason


def test_unequal_nodes_are_not_exchanged() -> None:
    nodes = [replace(node, shape=(2 if node.role == "decode" else 1,)) for node in nodes_of(2, 2)]
    decision = rounds(a_snapshot(nodes), forecast=by_prefills({1: 1.0, 2: 0.2, 3: 1.0}))[-1]
    assert "no node can change" in decision.reason
    nodes[3] = replace(nodes[3], shape=(1,))  # of two kinds of decode nodes the one that is like the prefill nodes
    change = rounds(a_snapshot(nodes), forecast=by_prefills({1: 1.0, 2: 0.2, 3: 1.0}))[-1].change
    assert change == RoleChange("d-1", "prefill", 0, 0), "and no prefill node, which is not like all decode nodes"


def test_equal_gpus_with_some_blocks_more_or_less_are_exchanged() -> None:
    """What start-up leaves to the KV cache differs by a few blocks from one GPU to the next."""
    nodes = [replace(node, kv_tokens=900_000 - 64 * number) for number, node in enumerate(nodes_of(1, 3))]
    assert rounds(a_snapshot(nodes))[-1].change is not None
    smaller = [replace(node, kv_tokens=450_000) if node.role == "prefill" else node for node in nodes]
    assert "no node can change" in rounds(a_snapshot(smaller))[-1].reason


def test_a_dead_node_does_not_forbid_changes_of_its_role() -> None:
    """It tells nothing, so it is like no other; it is the one that is missing."""
    dead = a_node("d-9", "decode", is_healthy=False, is_live=False, kv_tokens=0, shape=("unknown",))
    fewer = by_prefills({1: 0.9, 2: 0.6, 3: 0.3})
    change = rounds(a_snapshot([*nodes_of(3, 1), dead]), forecast=fewer)[-1].change
    assert change is not None
    assert change.role == "decode"


def test_what_waits_on_a_dead_node_is_no_load_of_the_others() -> None:
    told = list[Any]()

    def forecast(load: Any, roles: Any) -> Forecast:
        told.append(load.queued_tokens)
        return Forecast(1.0, 1.0, 1.0)

    dead = a_node("d-9", "decode", is_healthy=False, queued_tokens=10**6)
    rounds(a_snapshot([*nodes_of(1, 3), dead]), 1, forecast)
    assert set(told) == {0}


def test_nodes_of_an_earlier_release_change_no_roles() -> None:
    nodes = nodes_of(1, 3)
    nodes[2] = replace(nodes[2], tells_orders=False)
    decision = rounds(a_snapshot(nodes))[-1]
    assert (decision.change, decision.reason.partition(",")[0]) == (None, "of an earlier release")


def test_routers_that_tell_different_nodes_change_no_roles() -> None:
    decision = rounds(a_snapshot(nodes_of(1, 3), are_agreed=False))[-1]
    assert (decision.change, decision.reason[:31]) == (None, "the routers tell different node")


def test_adapters_part_no_nodes_and_their_requests_are_load() -> None:
    """One node has an adapter a moment before the others. Names may have commas."""
    base, tuned = frozenset({"de,mo"}), frozenset({"de,mo", "tuned"})
    nodes = [replace(node, models=base, names=base) for node in nodes_of(1, 3)]
    nodes[0] = replace(nodes[0], names=tuned)
    plain = a_snapshot(nodes)
    seen = plain.seen["demo"]
    snapshot = replace(
        plain, arrived_per_s={"de,mo": 5.0, "tuned": 5.0, "": 1.0},
        seen={"de,mo": seen[:7], "tuned": seen[7:14], "": seen[14:21]},
    )  # fmt: skip
    loads = list[float]()

    def forecast(load: Any, roles: Any) -> Forecast:
        loads.append(load.per_s)
        return MORE(load, roles)

    assert rounds(snapshot, forecast=forecast)[-1].change is not None
    assert set(loads) == {11.0}


def test_models_are_balanced_apart_and_one_change_a_round() -> None:
    names = frozenset({"other"})
    others = [replace(node, name=f"o-{node.name}", models=names, names=names) for node in nodes_of(1, 3)]
    snapshot = a_snapshot([*nodes_of(1, 3), *others])
    (ours, theirs), memory = decide(snapshot, {}, TARGETS, MORE)
    assert "seen in 1 rounds" in ours.reason
    assert "0 requests have ended" in theirs.reason, "the load of the other model is not theirs"
    both = replace(
        snapshot, arrived_per_s=dict.fromkeys(("demo", "other"), 10.0),
        seen=dict.fromkeys(("demo", "other"), snapshot.seen["demo"]),
    )  # fmt: skip
    for _ in range(CONFIRMED):
        decisions, memory = decide(both, memory, TARGETS, MORE)
        if any(one.change for one in decisions):
            break
    assert [one.change is not None for one in decisions].count(True) == 1
    assert all(one.reason for one in decisions)


NODES = st.lists(
    st.builds(
        a_node, st.uuids().map(str), st.sampled_from(ROLES), is_healthy=st.booleans(), is_live=st.booleans(),
        changes=st.integers(0, 3), sender=st.sampled_from([None, "", "balance"]), order_age_s=st.floats(0, 1000),
        shape=st.tuples(st.integers(1, 2)),
    ),
    min_size=1, max_size=7,
)  # fmt: skip


@pytest.mark.long
@given(NODES, st.integers(0, 9), st.sampled_from([1.0, 20.0, 200.0]), st.sampled_from([(6000, 60), (300, 800)]))
def test_no_change_takes_the_last_node_of_a_kind(
    nodes: list[Any], favour: int, per_s: float, lengths: tuple[int, int]
) -> None:
    """Whatever is predicted, by the feeds or by something that likes one number of prefill nodes."""

    def likes(load: Any, roles: Any) -> Forecast:
        return Forecast(*[1.0 / (1 + abs(roles.prefill - favour))] * 3)

    for forecast in (likes, None):
        memory: Memory = {}
        for _ in range(CONFIRMED):
            decisions, memory = decide(a_snapshot(nodes, per_s, lengths), memory, TARGETS, forecast)
            for decision in decisions:
                assert decision.reason
                if (change := decision.change) is None:
                    continue
                (node,) = (one for one in nodes if one.name == change.node)
                assert node.is_usable
                assert change.role != node.role
                assert any(one is not node and one.role == node.role and one.is_healthy for one in nodes)
                assert 2 * sum(one.is_usable for one in nodes) > len(nodes)
                assert all(one.is_like(node) for one in nodes if one.role == change.role and one.is_usable)
                assert not any(one.sender == "" and one.order_age_s < OPERATOR_S for one in nodes)
