"""Turns of TLS handshakes: clients that come at once all have theirs, and clients that stand still delay few others."""

from __future__ import annotations

from itertools import count

import pytest

from pd_http.handshake_turns import HandshakeTurns

SILENT_S, SLOW_S = 1.0, 5.0


def turns(most: int) -> HandshakeTurns[object]:
    return HandshakeTurns(most, SILENT_S, SLOW_S)


@pytest.mark.long
def test_clients_that_come_at_once_all_have_a_turn() -> None:
    """3,000 of one program, which ends 100 handshakes a second: none ends for another."""
    table = turns(256)
    for number in range(3000):
        table.wait(number, "a")
    under_way: list[object] = []
    for tick in count(1):
        under_way += table.begin(tick / 100)
        assert len(under_way) <= 256
        if not under_way:
            break
        assert not table.slow(tick / 100)
        table.ended(tick / 100)
        table.leave(under_way.pop(0))
    assert tick == 3001


def test_handshakes_that_stand_end_for_others() -> None:
    table = turns(2)
    for number in range(5):
        table.wait(number, "a")
    assert list(table.begin(0.0)) == [0, 1]
    assert not table.slow(0.9)
    assert table.slow(1.0) == [0, 1]
    table.ended(1.0)  # others make progress
    assert not table.slow(1.9)
    assert table.slow(2.0) == [0, 1]
    for now_s in (2.0, 3.0, 4.0):
        table.ended(now_s)
    assert not table.slow(4.9)
    assert table.slow(5.0) == [0, 1]
    for number in (2, 3, 4):  # none waits
        table.leave(number)
    assert not table.slow(100.0)


def test_the_network_with_the_fewest_handshakes_has_the_next_turn() -> None:
    table = turns(4)
    for number in range(100):
        table.wait(("a", number), "a")
        table.wait(("b", number), "b")
    begun = list(table.begin(0.0))
    for number in range(8):
        table.wait(("c", number), "c")
    assert begun == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    table.leave(begun[0])
    for number in range(8):  # those of a third network go on although those of the others stand
        assert list(table.begin(0.0)) == [("c", number)]
        table.leave(("c", number))
    assert list(table.begin(0.0)) == [("a", 2)]
    for number in range(100):
        for network in "ab":
            table.leave((network, number))
    assert not list(table.begin(0.0))
    assert not table.slow(9.0)
