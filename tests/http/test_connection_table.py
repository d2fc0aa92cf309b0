"""Which connection has a place, and which one gives way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_http.connection_table import ConnectionTable, network_of
from pd_http.refusal import Refusal


def test_the_longest_waiting_gives_way() -> None:
    table: ConnectionTable[str] = ConnectionTable(3, 3)
    assert [table.join(key, "a") for key in ("1", "2", "3")] == [None, None, None]
    table.works("1")
    assert table.join("4", "b") == "2"
    table.waits("1")
    assert table.join("5", "b") == "3"
    assert table.join("6", "b") == "4"
    assert len(table) == 3


def test_an_address_makes_room_among_its_own() -> None:
    table: ConnectionTable[int] = ConnectionTable(100, 2)
    assert [table.join(key, "a") for key in range(2)] == [None, None]
    assert table.join(10, "b") is None
    assert table.join(2, "a") == 0
    table.works(1)
    table.works(2)
    assert table.join(3, "a") is Refusal.CONNECTIONS_OF_ADDRESS
    assert table.join(11, "b") is None


def test_handshakes_beyond_an_eighth_give_way_before_idle_connections() -> None:
    table: ConnectionTable[str] = ConnectionTable(16, 16)
    for number in range(13):
        table.join(f"idle {number}", "a")
    assert [table.join(f"new {number}", "b", is_shaking=True) for number in range(3)] == [None] * 3
    assert table.join("new 3", "b", is_shaking=True) == "new 0"
    assert table.join("idle 13", "a") == "new 1"
    assert table.join("idle 14", "a") == "idle 0"  # two handshakes are an eighth
    assert table.join("new 4", "b", is_shaking=True) == "idle 1"


def test_handshakes_of_an_address_give_way_within_its_share() -> None:
    table: ConnectionTable[str] = ConnectionTable(100, 2)
    assert table.join("idle", "a") is None
    assert table.join("new", "a", is_shaking=True) is None
    assert table.join("of another", "b", is_shaking=True) is None
    assert table.join("newer", "a", is_shaking=True) == "new"
    table.works("idle")
    table.leave("newer")
    assert table.join("newest", "a", is_shaking=True) is None
    table.waits("idle")
    assert len(table) == 3


def test_when_all_work_the_new_one_is_refused() -> None:
    table: ConnectionTable[int] = ConnectionTable(2, 2)
    for key in range(2):
        table.join(key, "a" * key)
        table.works(key)
    assert table.join(3, "b") is Refusal.CONNECTIONS
    table.leave(0)
    table.leave(0)
    assert table.join(3, "b") is None


ACTIONS = st.sampled_from(["join", "shake", "leave", "works", "waits"])


@pytest.mark.long
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=60))
def test_the_bounds_hold(steps: list[tuple[str, int]]) -> None:
    table: ConnectionTable[int] = ConnectionTable(5, 3)
    there: dict[int, str] = {}
    for action, key in steps:
        if action in ("join", "shake") and key not in there:
            outcome = table.join(key, str(key % 3), is_shaking=action == "shake")
            if not isinstance(outcome, Refusal):
                there[key] = str(key % 3)
                if outcome is not None:
                    del there[outcome]
        elif action == "leave":
            table.leave(key)
            there.pop(key, None)
        elif action == "works":
            table.works(key)
        elif action == "waits":
            table.waits(key)
        assert len(table) == len(there) <= 5
        assert all(list(there.values()).count(host) <= 3 for host in there.values())


def test_one_host_with_many_addresses_counts_as_one() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("fe80::1%eth0") == network_of("fe80::2")
