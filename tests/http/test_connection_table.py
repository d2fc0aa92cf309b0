"""Which connection has a place, and which one gives way."""

from __future__ import annotations

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


def test_when_all_work_the_new_one_is_refused() -> None:
    table: ConnectionTable[int] = ConnectionTable(2, 2)
    for key in range(2):
        table.join(key, "a" * key)
        table.works(key)
    assert table.join(3, "b") is Refusal.CONNECTIONS
    table.leave(0)
    table.leave(0)
    assert table.join(3, "b") is None


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "works", "waits"]), st.integers(0, 9)), max_size=60))
def test_the_bounds_hold(steps: list[tuple[str, int]]) -> None:
    table: ConnectionTable[int] = ConnectionTable(5, 3)
    there: dict[int, str] = {}
    for action, key in steps:
        if action == "join" and key not in there:
            outcome = table.join(key, str(key % 3))
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
