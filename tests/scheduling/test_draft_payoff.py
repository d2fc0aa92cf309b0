"""Drafts rest where the device waits for the host and they gain less than the host's time for them."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cluster.drafting.payoff import FIRST_REST, MOST_REST, PROBE, Payoff
from pd_cluster.scheduling.drafts import Speculation
from tests.drafters import TokenDrafter
from tests.scheduling.simulation import message, prompt
from tests.scheduling.test_lookup_drafter import drafting_of
from tests.scheduling.world import World


def searched(payoff: Payoff, num_steps: int, spent_s: float, saved_s: float = 0.0) -> list[bool]:
    """Which steps are searched for drafts, where each search takes and saves so much."""
    found = []
    for _ in range(num_steps):
        found.append(not payoff.rests())
        if found[-1]:
            payoff.save(saved_s)
            payoff.spend(spent_s)
    return found


def test_useless_searches_become_seldom() -> None:
    found = searched(Payoff(), 20_000, 0.3e-3)
    assert found[:PROBE] == [True] * PROBE
    assert found[PROBE : PROBE + FIRST_REST] == [False] * FIRST_REST
    late = found[10_000:]
    assert 0 < sum(late) / len(late) <= PROBE / MOST_REST, "a step that is 1.25 times as long at most 0.6% of the time"
    assert sum(found) * 0.3 < 0.01 * 20_000 * 1.2, "of 20,000 steps of 1.2 ms hardly a hundredth"


def test_searches_that_gain_never_rest_and_are_taken_up_again() -> None:
    payoff = Payoff()
    assert all(searched(payoff, 1000, 0.3e-3, 0.4e-3))
    assert not all(searched(payoff, 5000, 0.3e-3))
    again = searched(payoff, MOST_REST + 500, 0.3e-3, 0.4e-3)
    assert all(again[MOST_REST:]), "from the next probe on"
    assert searched(payoff, 2 * PROBE + FIRST_REST + 40, 0.3e-3).count(False) >= FIRST_REST, (
        "and it rests shortly first"
    )


def test_where_the_device_is_slower_nothing_rests() -> None:
    payoff = Payoff()
    for _ in range(1000):
        assert not payoff.rests()
        payoff.save(-1e-3)
        payoff.forget()


class Clock:
    """Each reading is 1 ms after the one before."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s


class WrongDrafter(TokenDrafter):
    """Guesses nothing, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def offer(self, *_: Any) -> None:
        self.num_asked += 1


@pytest.mark.parametrize("is_late", [True, False])
def test_a_step_is_planned_without_drafts_while_they_rest(*, is_late: bool) -> None:
    world, drafter = World(drafts=True), WrongDrafter()
    drafting = drafting_of(world)
    drafting._drafter = drafter
    drafting._costs = Speculation(drafter, is_late=lambda: is_late, clock=Clock())
    num_tokens = 2 * (PROBE + FIRST_REST)
    request = world.submit(message("a", prompt(9), max_tokens=num_tokens, ignore_eos=True))
    world.run_until_idle()
    assert len(world.client(request).outputs[0]) == num_tokens
    if is_late:
        assert PROBE <= drafter.num_asked <= num_tokens - FIRST_REST
    else:
        assert num_tokens - 3 <= drafter.num_asked <= num_tokens


def test_accepted_drafts_keep_a_late_node_drafting() -> None:
    """Drafts that are all right save some 4 ms a token where looking for them takes 1 ms of a step."""
    world = World(drafts=True)
    drafting, numbers = drafting_of(world), list[int]()
    drafting._costs = Speculation(drafting._drafter, is_late=lambda: True, clock=Clock())
    world.submit(message("a", prompt(9), max_tokens=140, ignore_eos=True))
    while world.scheduler.has_work:
        numbers += [len(chunk.drafts) for chunk in world.start_step().chunks]
        world.settle()
    assert sum(map(bool, numbers)) > len(numbers) / 2
