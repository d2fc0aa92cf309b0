"""Turns of keys, by property and by table."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.admission.fair_queue import FairQueue, Turn

Costs = st.lists(st.integers(1, 500), min_size=1, max_size=40)


def turn(key: str, cost: float = 1.0, *, weight: float = 1.0, priority: int = 0, item: int = 0) -> Turn[int]:
    return Turn(item, key, weight, priority, cost)


def anything(_: Turn[int]) -> bool:
    return True


def drained(queue: FairQueue[int]) -> list[Turn[int]]:
    taken = []
    while (one := queue.pop(anything)) is not None:
        taken.append(one)
    return taken


@pytest.mark.long
@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 2)), max_size=60))
def test_every_turn_comes_once_and_those_of_a_key_in_order(pushed: list[tuple[str, int, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (key, cost, priority) in enumerate(pushed):
        queue.push(turn(key, cost, priority=priority, item=number))
    taken = drained(queue)
    assert sorted(one.item for one in taken) == list(range(len(pushed)))
    assert len(queue) == 0
    assert [one.priority for one in taken] == sorted(one.priority for one in taken)
    for key in "abc":
        for priority in range(3):
            numbers = [one.item for one in taken if (one.key, one.priority) == (key, priority)]
            assert numbers == sorted(numbers)


@pytest.mark.long
@settings(deadline=None)
@given(Costs, Costs, st.sampled_from([0.25, 1.0, 4.0]))
def test_keys_that_wait_get_their_shares(greedy: list[int], quiet: list[int], weight: float) -> None:
    """While both wait, what they were served differs by at most one of the largest requests of each."""
    queue: FairQueue[int] = FairQueue()
    for cost in greedy:
        queue.push(turn("greedy", cost))
    for cost in quiet:
        queue.push(turn("quiet", cost, weight=weight))
    served: Counter[str] = Counter()
    left = {"greedy": len(greedy), "quiet": len(quiet)}
    for one in drained(queue):
        if not all(left.values()):
            break
        assert abs(served["greedy"] - served["quiet"] / weight) <= max(greedy) + max(quiet) / weight
        served[one.key] += int(one.cost)
        left[one.key] -= 1


def test_a_key_that_waits_for_itself_is_passed_and_saves_up_no_turns() -> None:
    blocked = {"own"}
    queue: FairQueue[int] = FairQueue(lambda one: one.key not in blocked)
    for _ in range(20):
        queue.push(turn("own", 10.0))
    assert not queue.has_ready
    for _ in range(40):
        queue.push(turn("other", 10.0))
    assert queue.has_ready
    assert queue.ahead(turn("third", priority=1)) == (400.0, 40)
    assert {queue.pop(anything).key for _ in range(20)} == {"other"}
    blocked.clear()
    keys = [one.key for one in drained(queue)][:20]
    assert 9 <= keys.count("own") <= 11


def test_one_that_comes_back_is_next_and_has_saved_nothing_up() -> None:
    queue: FairQueue[int] = FairQueue()
    for _ in range(100):
        queue.push(turn("greedy", 10.0))
    for _ in range(50):
        queue.pop(anything)
    for _ in range(10):
        queue.push(turn("quiet", 10.0))
    keys = [one.key for one in drained(queue)]
    assert "quiet" in keys[:2]
    assert 9 <= keys[:20].count("quiet") <= 10
    assert "greedy" in keys[:3]


def test_what_was_served_at_once_counts_too() -> None:
    queue: FairQueue[int] = FairQueue()
    for _ in range(10):
        queue.serve(turn("greedy", 10.0))
    queue.push(turn("greedy", 10.0))
    queue.push(turn("quiet", 10.0))
    assert [one.key for one in drained(queue)] == ["quiet", "greedy"]


def test_longer_answers_than_expected_are_made_up_for() -> None:
    queue: FairQueue[int] = FairQueue()
    for key in ("long", "short"):
        queue.serve(turn(key, 10.0))
    queue.correct("long", 1.0, 100.0)
    for key in ("long", "short") * 5:
        queue.push(turn(key, 10.0))
    assert [one.key for one in drained(queue)][:5] == ["short"] * 5


def test_what_does_not_fit_lets_other_keys_pass_and_no_younger_one_of_its_own() -> None:
    queue: FairQueue[int] = FairQueue()
    for key, item in (("a", 1), ("a", 2), ("b", 3)):
        queue.push(turn(key, item=item))
    one = queue.pop(lambda one: one.item != 1)
    assert one is not None
    assert one.item == 3
    assert queue.pop(lambda one: one.item != 1) is None
    assert len(queue) == 2


def test_a_turn_that_is_removed_costs_its_key_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    gone = turn("a", 1000.0)
    queue.push(gone)
    queue.remove(gone)
    queue.remove(gone)
    queue.push(turn("a", 1.0, item=1))
    queue.push(turn("b", 1.0, item=2))
    assert [one.item for one in drained(queue)] == [1, 2]


def test_the_last_one_is_of_the_key_that_asks_for_most() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(5):
        queue.push(turn("greedy", 10.0, item=item))
    queue.push(turn("quiet", 10.0, item=9))
    assert queue.last().item == 4
    queue.push(turn("late", 1.0, priority=1, item=7))
    assert queue.last().item == 7


@pytest.mark.parametrize("seed", range(20))
def test_what_is_ahead_is_what_is_served_before_within_a_request_of_each_key(seed: int) -> None:
    random = Random(seed)
    queue: FairQueue[int] = FairQueue()
    weights = {key: random.choice([0.5, 1.0, 2.0]) for key in "abcd"}
    for item in range(30):
        key = random.choice("abc")
        queue.push(turn(key, random.randint(1, 100), weight=weights[key], priority=random.randint(0, 1), item=item))
    new = turn("abcd"[seed % 4], 10.0, weight=weights["abcd"[seed % 4]], priority=1, item=99)
    cost, sequences = queue.ahead(new)
    queue.push(new)
    before = drained(queue)
    before = before[: [one.item for one in before].index(99)]
    assert abs(cost - sum(one.cost for one in before)) <= 600
    assert abs(sequences - len(before)) <= 12
