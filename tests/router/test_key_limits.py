"""Limits of a key under a virtual clock: what is let in, what is told to the rest, and that no key stays out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.admission.api_keys import ApiKey, KeyRing
from pd_router.admission.key_admission import KeyAdmission
from pd_router.admission.key_limits import LONGEST_S, MAY_WAIT, MINUTE_S, MOST_DEBT_MINUTES, KeyLimits, whole_seconds
from pd_router.config import RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.records.metrics import RouterMetrics

if TYPE_CHECKING:
    from collections.abc import Callable


def limits(**fields: Any) -> KeyLimits:
    return KeyLimits(ApiKey(name="k", sha256="", **fields), 0.0)


def admit(one: KeyLimits, now_s: float, tokens: float = 1.0) -> tuple[str, int] | None:
    """What is admitted goes to the nodes if there is a place."""
    refusal = one.admit(tokens, now_s)
    one.inside += refusal is None and one.has_place
    return refusal


def end(one: KeyLimits, expected: float = 1.0, used: tuple[int, int] | None = (1, 1), took_s: float = 1.0) -> None:
    one.inside -= 1
    one.end(expected, used, took_s)


def test_without_limits_all_are_admitted() -> None:
    one = limits()
    assert not any(admit(one, 0.0, 1e9) for _ in range(1000))


def test_a_minute_of_requests_may_come_at_once_and_then_as_they_refill() -> None:
    one = limits(requests_per_minute=3)
    assert [admit(one, 0.0) for _ in range(4)] == [None, None, None, ("requests", 20)]
    assert admit(one, 1.0) == ("requests", 19)
    assert admit(one, 20.0) is None, "the refused ones have left nothing behind"
    assert admit(one, 20.0) == ("requests", 20)


def test_a_limit_of_concurrency_is_never_exceeded_and_a_few_may_wait() -> None:
    one = limits(concurrency=2)
    assert [admit(one, 0.0) for _ in range(2 + MAY_WAIT)] == [None] * (2 + MAY_WAIT)
    assert (one.running, one.inside, one.has_place) == (2 + MAY_WAIT, 2, False)
    assert admit(one, 0.0) == ("concurrency", 9)  # 17 of a second each, two at once
    end(one)
    assert one.has_place
    assert admit(one, 0.5) is None


def test_a_retry_after_is_whole_seconds_from_one_to_a_minute() -> None:
    assert [whole_seconds(wait_s) for wait_s in (-5.0, 0.0, 1.0, 1.2, 59.5, 1e9, float("inf"), float("nan"))] == [
        1, 1, 1, 2, 60, LONGEST_S, LONGEST_S, LONGEST_S,
    ]  # fmt: skip


def test_tokens_are_corrected_by_what_was_used() -> None:
    one = limits(tokens_per_minute=600)
    assert admit(one, 0.0, 100) is None
    end(one, 100, (500, 400))
    assert admit(one, 0.0, 100) == ("tokens", 40)  # 300 too many were used, and 100 are wanted, at 10 a second
    assert admit(one, 40.0, 100) is None
    end(one, 100, (0, 0))  # it failed, and costs nothing
    assert admit(one, 40.0, 100) is None


def test_a_prompt_of_more_than_a_minute_waits_for_a_full_budget_and_pays_later() -> None:
    one = limits(tokens_per_minute=600)
    assert admit(one, 0.0, 10_000) is None
    assert admit(one, 0.0, 1) == ("tokens", LONGEST_S)
    end(one, 10_000, (10_000, 0))
    debt_s = MOST_DEBT_MINUTES * MINUTE_S
    assert admit(one, debt_s - 1, 10_000) == ("tokens", LONGEST_S), "10,000 do not fit 600"
    assert admit(one, debt_s + MINUTE_S, 10_000) is None


def test_a_key_in_debt_gets_one_request_a_minute_that_fits() -> None:
    one = limits(tokens_per_minute=600)
    for minute in range(3):
        assert admit(one, minute * MINUTE_S, 10) is None
        end(one, 10, (0, 1 << 62))
        assert [admit(one, minute * MINUTE_S + after_s, 10) for after_s in (1, 59)] == [
            ("tokens", LONGEST_S), ("tokens", LONGEST_S),
        ]  # fmt: skip
    one.elsewhere = 1
    assert admit(one, 1e4, 10) is None, "the debt is at most ten minutes"


def test_other_limits_apply_to_what_comes_next() -> None:
    one = limits(requests_per_minute=10)
    assert admit(one, 0.0) is None
    one.configure(ApiKey(name="k", sha256="", requests_per_minute=1))
    assert [admit(one, 0.0) is None for _ in range(2)] == [True, False]
    one.configure(ApiKey(name="k", sha256=""))
    assert admit(one, 0.0) is None
    one.configure(ApiKey(name="k", sha256="", requests_per_minute=2))
    assert [admit(one, 500.0) is None for _ in range(3)] == [True, True, False]


def test_a_debt_shrinks_with_a_lowered_limit() -> None:
    one = limits(tokens_per_minute=60_000)
    assert admit(one, 0.0, 1) is None
    end(one, 1, (600_000, 0))
    one.configure(ApiKey(name="k", sha256="", tokens_per_minute=60))
    one.elsewhere = 1
    assert admit(one, MOST_DEBT_MINUTES * MINUTE_S + 1, 1) is None


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 400)), max_size=200))
def test_no_more_is_let_in_than_the_limits(arrivals: list[tuple[float, int]]) -> None:
    one = limits(requests_per_minute=60, tokens_per_minute=6000)
    now_s = requests = tokens = 0.0
    for after_s, amount in arrivals:
        now_s += after_s
        if admit(one, now_s, amount) is None:
            requests, tokens = requests + 1, tokens + amount
        assert requests <= 60 + now_s + 1e-6
        assert tokens <= 6000 + 100 * now_s + 1e-6


def test_what_other_processes_use_counts_and_news_are_told_once() -> None:
    one, other = limits(requests_per_minute=2, concurrency=2), limits(requests_per_minute=2, concurrency=2)
    assert one.news() is None
    assert admit(one, 0.0, 5.0) is None
    news = one.news()
    assert news == (1, 5.0, 1)
    assert one.news() is None
    other.take(*news[:2])
    other.elsewhere = news[2]
    assert [admit(other, 0.0) is None for _ in range(2)] == [True, False]
    end(one, 5.0, (10, 10))
    assert one.news() == (0, 15.0, 0)


def hear(all_limits: list[KeyLimits], running: list[int]) -> None:
    """Each process is told what the others have used."""
    for number, one in enumerate(all_limits):
        if (news := one.news()) is not None:
            running[number] = news[2]
            for other in all_limits:
                if other is not one:
                    other.take(*news[:2])
    for number, one in enumerate(all_limits):
        one.elsewhere = sum(running) - running[number]


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["begin", "begin", "end", "hear"])), max_size=200))
def test_several_processes_exceed_a_limit_by_what_each_may_begin_unheard(events: list[tuple[int, str]]) -> None:
    """docs/operations.md says so. Without requests that it has not heard of no process exceeds the limit."""
    processes = [limits(concurrency=3) for _ in range(4)]
    running = [0] * len(processes)
    for number, event in events:
        one, before = processes[number], sum(other.inside for other in processes)
        if event == "hear":
            hear(processes, running)
        elif event == "end" and one.inside:
            end(one)
        elif event == "begin" and one.has_place and admit(one, 0.0) is None:
            is_heard = [other.inside for other in processes if other is not one] == [
                run for other, run in zip(processes, running, strict=True) if other is not one
            ]
            assert before < 3 or not is_heard
        assert sum(other.inside for other in processes) <= len(processes) * 3


def test_requests_of_a_burst_at_all_processes_are_paid_back() -> None:
    processes = [limits(requests_per_minute=2) for _ in range(4)]
    for one in processes:
        assert [admit(one, 0.0) is None for _ in range(3)] == [True, True, False]
    hear(processes, [0] * len(processes))  # 8 of 2
    assert all(admit(one, 200.0) is not None for one in processes)
    assert admit(processes[0], 215.0) is None, "6 are paid back, and one has refilled"


# --- no key stays out

AMOUNTS = st.sampled_from([-(1 << 62), -1, 0, 1, 500, 1 << 62])
USED = st.none() | st.tuples(AMOUNTS, AMOUNTS)
LIMITS = st.fixed_dictionaries(
    {
        "requests_per_minute": st.sampled_from([0, 1, 60]),
        "tokens_per_minute": st.sampled_from([0, 100, 6000]),
        "concurrency": st.sampled_from([0, 1, 8]),
    }
)
EVENTS = st.one_of(
    st.tuples(st.just("admit"), st.integers(1, 10_000)),
    st.tuples(st.just("end"), USED),
    st.tuples(st.just("wait"), st.floats(0, 100)),
    st.tuples(st.just("keys"), LIMITS | st.none()),  # None: the key is out of the file
    st.tuples(st.just("news"), st.tuples(st.integers(1, 3), st.integers(0, 99), st.integers(0, 1 << 40))),
    st.tuples(st.just("worker ends"), st.integers(1, 3)),
)
OTHER = ApiKey(name="other", sha256="1" * 64)


class KeyWorld:
    """One key in one of four processes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.begun: list[tuple[KeyLimits, float]] = []
        config = RouterConfig(mixed=("http://n:1",))
        table = NodeTable(config, lambda: self.now_s)
        self.key = ApiKey(name="k", sha256="0" * 64)
        self.admission = KeyAdmission(config, table, RouterMetrics(table), KeyRing((self.key, OTHER)))

    def admit(self, tokens: float) -> bool:
        limits = self.admission.limits_of(self.key)
        if limits.admit(tokens, self.now_s) is None:
            if not limits.has_place:  # it waits, and leaves
                limits.end(tokens, (0, 0), 0.0)
                return False
            limits.inside += 1
            self.begun.append((limits, tokens))
            return True
        return False

    def end(self, used: tuple[int, int] | None) -> None:
        if self.begun:
            limits, expected = self.begun.pop()
            end(limits, expected, used)

    def take_file(self, fields: dict[str, Any] | None) -> None:
        self.key = ApiKey(name="k", sha256="0" * 64, **(fields or {}))
        self.admission.adopt(KeyRing((OTHER,) if fields is None else (self.key, OTHER)))

    def receive(self, worker: int, running: int, tokens: int) -> None:
        self.admission.receive_usage(worker, {"k": (running, tokens, running)})

    def worker_ends(self, worker: int) -> None:
        self.admission.receive_usage(worker, None)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=60), LIMITS)
def test_a_key_without_requests_is_in_again_after_a_minute(events: list[tuple[str, Any]], last: dict[str, Any]) -> None:
    world = KeyWorld()
    acts: dict[str, Callable[[Any], object]] = {
        "admit": world.admit, "end": world.end, "keys": world.take_file, "worker ends": world.worker_ends,
        "news": lambda news: world.receive(*news),
    }  # fmt: skip
    for event, what in events:
        if event == "wait":
            world.now_s += what
        elif event != "admit" or "k" in world.admission._ring.by_name:
            acts[event](what)
    while world.begun:
        world.end((1 << 62, 1 << 62))
    for worker in (1, 2, 3):
        world.worker_ends(worker)
    world.take_file(last)
    world.now_s += MINUTE_S
    assert world.admit(last["tokens_per_minute"] or 1e9)


def test_what_other_workers_run_is_right_after_a_key_was_out_of_the_file() -> None:
    """Its requests go on meanwhile, here and there, and their end must be heard."""
    world = KeyWorld()
    world.take_file({"concurrency": 2})
    world.receive(1, 1, 0)
    assert world.admit(1)
    told = world.admission.limits_of(world.key)
    assert told.news() == (1, 1, 1)
    world.take_file(None)
    world.end(None)
    assert told.news() == (0, 0, 0)
    world.receive(1, 0, 0)
    world.take_file({"concurrency": 1})
    assert world.admission.limits_of(world.key) is told
    assert (told.elsewhere, told.running) == (0, 0)
    world.receive(2, 1, 0)
    assert told.elsewhere == 1


@pytest.mark.parametrize("amount", [1 << 62, -(1 << 62)])
def test_a_false_report_neither_keeps_a_key_out_nor_fills_its_budget(amount: int) -> None:
    one = limits(tokens_per_minute=600)
    assert admit(one, 0.0, 100) is None
    end(one, 100, (0, amount))
    admitted = sum(admit(one, MINUTE_S, 100) is None for _ in range(20))
    assert admitted == (1 if amount > 0 else 6)


def test_other_processes_hear_of_the_last_end_of_a_key_that_is_taken_out() -> None:
    world = KeyWorld()
    admitted = world.admission.limits_of(world.key)
    admit(admitted, 0.0)
    assert admitted.news() == (1, 1.0, 1)
    end(admitted)
    world.take_file(None)
    kept = world.admission._limits["k"].news()
    assert kept is not None
    assert kept[2] == 0
    world.take_file(None)
    assert "k" not in world.admission._limits
