"""When a dead process is started again: backoff, its reset, and when there is no use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.launch.restarts import (
    FIRST_DELAY_S,
    HEALTHY_S,
    MAX_DELAY_S,
    MAX_FAILED_STARTS,
    Again,
    GiveUp,
    Restarts,
)

ABILITIES = {"prefill": ["p0"], "decode": ["d0", "d1"], "route": ["router"]}


def fail(restarts: Restarts, name: str, times: int) -> list[Again | GiveUp]:
    """Deaths of a process that never becomes ready."""
    return [restarts.died(name, 0.0) for _ in range(times)]


def test_the_delay_doubles_up_to_its_limit() -> None:
    restarts = Restarts({})
    delays = [verdict.delay_s for verdict in fail(restarts, "pool", 9) if isinstance(verdict, Again)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert fail(restarts, "pool", 2000)[-1] == Again(MAX_DELAY_S, 2009), "no float overflows"


def test_a_minute_of_health_resets_the_delay_but_not_the_count() -> None:
    restarts = Restarts(ABILITIES)
    restarts.ready("p0", 0.0)
    assert restarts.died("p0", 1.0) == Again(FIRST_DELAY_S, 1)
    restarts.ready("p0", 5.0)
    assert restarts.died("p0", 5.0 + HEALTHY_S - 0.1) == Again(2 * FIRST_DELAY_S, 2)
    restarts.ready("p0", 100.0)
    assert restarts.died("p0", 100.0 + HEALTHY_S) == Again(FIRST_DELAY_S, 3)


def test_processes_are_counted_apart() -> None:
    restarts = Restarts(ABILITIES)
    fail(restarts, "d0", 3)
    assert restarts.died("d1", 0.0) == Again(FIRST_DELAY_S, 1)


def test_a_role_with_one_process_is_given_up_after_the_last_failed_start() -> None:
    restarts = Restarts(ABILITIES)
    restarts.ready("p0", 0.0)
    assert isinstance(restarts.died("p0", 1.0), Again), "a death while it served is no failed start"
    *before, last = fail(restarts, "p0", MAX_FAILED_STARTS)
    assert all(isinstance(verdict, Again) for verdict in before)
    assert last == GiveUp(f"p0 has failed to start {MAX_FAILED_STARTS} times in a row")


def test_a_start_that_succeeds_begins_the_count_anew() -> None:
    restarts = Restarts(ABILITIES)
    fail(restarts, "router", MAX_FAILED_STARTS - 1)
    restarts.ready("router", 0.0)
    assert isinstance(restarts.died("router", 0.0), Again)
    assert all(isinstance(verdict, Again) for verdict in fail(restarts, "router", MAX_FAILED_STARTS - 1))


def test_while_another_process_can_do_it_none_is_given_up() -> None:
    restarts = Restarts(ABILITIES)
    restarts.ready("d1", 0.0)
    assert all(isinstance(verdict, Again) for verdict in fail(restarts, "d0", 3 * MAX_FAILED_STARTS))
    *before, last = fail(restarts, "d1", 1 + MAX_FAILED_STARTS)
    assert all(isinstance(verdict, Again) for verdict in before), "d1 may come back"
    assert last == GiveUp(f"d1 has failed to start {MAX_FAILED_STARTS} times in a row, and no other process can decode")


def test_one_that_may_still_come_back_is_waited_for() -> None:
    restarts = Restarts(ABILITIES)
    fail(restarts, "d1", MAX_FAILED_STARTS - 1)
    assert all(isinstance(verdict, Again) for verdict in fail(restarts, "d0", 3 * MAX_FAILED_STARTS))


def test_what_no_ability_needs_is_never_given_up() -> None:
    assert all(isinstance(verdict, Again) for verdict in fail(Restarts(ABILITIES), "pool", 100))


@pytest.mark.long
@given(
    st.lists(st.tuples(st.sampled_from(["p0", "d0", "d1", "router"]), st.booleans(), st.floats(0, 200)), max_size=80)
)
def test_any_history(history: list[tuple[str, bool, float]]) -> None:
    """Delays stay within their limits, counts grow by one, and GiveUp comes only when an ability has no hope left."""
    restarts = Restarts(ABILITIES)
    now_s = 0.0
    counts = dict.fromkeys(["p0", "d0", "d1", "router"], 0)
    failed = dict.fromkeys(counts, 0)
    is_ready = dict.fromkeys(counts, False)
    for name, comes_up, lives_s in history:
        if comes_up:
            restarts.ready(name, now_s)
            is_ready[name], failed[name] = True, 0
        now_s += lives_s
        verdict = restarts.died(name, now_s)
        failed[name] += not is_ready[name]
        is_ready[name] = False
        able = next(names for names in ABILITIES.values() if name in names)
        hopeless = all(not is_ready[other] and failed[other] >= MAX_FAILED_STARTS for other in able)
        assert isinstance(verdict, GiveUp) is hopeless
        if isinstance(verdict, GiveUp):
            return
        counts[name] += 1
        assert verdict.number == counts[name]
        assert FIRST_DELAY_S <= verdict.delay_s <= MAX_DELAY_S


@pytest.mark.parametrize("name", ["prefill", "decode", "route"])
def test_each_ability_is_watched(name: str) -> None:
    restarts = Restarts(ABILITIES)
    verdicts = [fail(restarts, able, MAX_FAILED_STARTS)[-1] for able in ABILITIES[name]]
    assert isinstance(verdicts[-1], GiveUp)
