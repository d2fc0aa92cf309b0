"""Limits of a key under a virtual clock: what is let in, and what becomes of retries that do as they were told."""

from __future__ import annotations

import heapq
import itertools
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.admission.api_keys import ApiKey
from pd_router.admission.key_limits import (
    DEBT_S,
    EARLY_S,
    GRACE_S,
    LONGEST_S,
    MAX_PROMISES,
    Held,
    KeyLimits,
    Promises,
)


def limits(**fields: Any) -> KeyLimits:
    return KeyLimits(ApiKey(name="k", sha256="", **fields), 0.0)


def admit(one: KeyLimits, now_s: float, tokens: float = 1.0, fingerprint: int = 0) -> tuple[str, int] | None:
    return one.admit(tokens, lambda: fingerprint, now_s)


def test_without_limits_all_are_admitted() -> None:
    one = limits()
    assert not any(admit(one, 0.0, 1e9) for _ in range(1000))


def test_a_minute_of_requests_may_come_at_once_and_then_as_they_refill() -> None:
    one = limits(requests_per_minute=3)
    assert [admit(one, 0.0, fingerprint=i) for i in range(4)] == [None, None, None, ("requests", 20)]
    assert admit(one, 1.0, fingerprint=4) == ("requests", 39)  # behind the one that was promised a place
    assert admit(one, 20.1, fingerprint=5) == ("requests", 40)  # that place is not for it
    assert admit(one, 20.2, fingerprint=3) is None


def test_a_place_that_is_not_taken_lapses() -> None:
    one = limits(requests_per_minute=1)
    assert admit(one, 0.0) is None
    assert admit(one, 0.0, fingerprint=1) == ("requests", 60)
    assert admit(one, 60.0, fingerprint=2) == ("requests", 60)
    assert admit(one, 60.0 + GRACE_S + 1, fingerprint=1) == ("requests", 60)
    assert admit(one, 120.0, fingerprint=2) is None


def test_a_retry_that_comes_too_early_gets_nothing_by_it() -> None:
    one = limits(concurrency=1)
    assert admit(one, 0.0) is None
    refused = [admit(one, at / 10, fingerprint=7) for at in range(5)]
    assert all(answer is not None and answer[0] == "concurrency" for answer in refused)
    assert one.running == 1


def test_a_limit_of_concurrency_is_never_exceeded() -> None:
    one = limits(concurrency=2)
    assert [admit(one, 0.0, fingerprint=i) is None for i in range(3)] == [True, True, False]
    one.end(1.0, (1, 1), 1.0)
    assert admit(one, 0.5, fingerprint=9) is not None  # the place is promised
    assert admit(one, 1.0, fingerprint=2) is None
    assert one.running == 2


def test_tokens_are_corrected_by_what_was_used() -> None:
    one = limits(tokens_per_minute=600)
    assert admit(one, 0.0, 100) is None
    one.end(100, (500, 400), 1.0)
    kind, seconds = admit(one, 0.0, 100) or ("", 0)
    assert (kind, seconds) == ("tokens", 40)  # 300 too many were used, and 100 are wanted, at 10 a second
    assert admit(one, 40.0, 100) is None
    one.end(100, (0, 0), 1.0)  # it failed, and costs nothing
    assert admit(one, 40.0, 100) is None


def test_a_prompt_of_more_than_a_minute_waits_for_a_full_budget_and_pays_later() -> None:
    one = limits(tokens_per_minute=600)
    assert admit(one, 0.0, 10_000) is None
    assert admit(one, 0.0, 1, fingerprint=1) == ("tokens", LONGEST_S)  # 940 s
    assert admit(one, 945.0, 1, fingerprint=1) is None


def test_other_limits_apply_to_what_comes_next() -> None:
    one = limits(requests_per_minute=10)
    assert admit(one, 0.0) is None
    one.configure(ApiKey(name="k", sha256="", requests_per_minute=1))
    assert [admit(one, 0.0, fingerprint=i) is None for i in range(2)] == [True, False]
    one.configure(ApiKey(name="k", sha256=""))
    assert admit(one, 0.0, fingerprint=5) is None
    one.configure(ApiKey(name="k", sha256="", requests_per_minute=2))
    assert [admit(one, 500.0, fingerprint=i) is None for i in range(6, 9)] == [True, True, False]


def test_promises_are_bounded() -> None:
    promises = Promises()
    for number in range(2 * MAX_PROMISES):
        assert promises.promise(number, 0.0, 0.5, 2.0) == (1 if number < MAX_PROMISES else LONGEST_S)
    assert (len(promises), promises.tokens) == (MAX_PROMISES, 2.0 * MAX_PROMISES)
    promises.lapse(1.0 + GRACE_S + 0.1)
    assert (len(promises), promises.tokens) == (0, 0.0)


def test_equal_requests_have_a_place_each() -> None:
    promises = Promises()
    assert [promises.promise(1, 0.0, wait_s, 1.0) for wait_s in (5.0, 8.5)] == [5, 9]
    assert not promises.claim(1, 5.0 - 2 * EARLY_S)
    assert [promises.claim(1, 5.0), promises.claim(1, 5.0), promises.claim(1, 9.0)] == [True, False, True]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 400), st.integers(0, 9)), max_size=200))
def test_no_more_is_let_in_than_the_limits_and_their_slack(arrivals: list[tuple[float, int, int]]) -> None:
    one = limits(requests_per_minute=60, tokens_per_minute=6000)
    now_s = requests = tokens = 0.0
    for after_s, amount, fingerprint in arrivals:
        now_s += after_s
        if admit(one, now_s, amount, fingerprint) is None:
            requests, tokens = requests + 1, tokens + amount
        assert requests <= 60 + now_s + EARLY_S
        assert tokens <= 6000 + 100 * (now_s + DEBT_S)


def test_what_other_processes_use_counts_and_news_are_told_once() -> None:
    one, other = limits(requests_per_minute=2, concurrency=2), limits(requests_per_minute=2, concurrency=2)
    assert one.news() is None
    assert admit(one, 0.0, 5.0) is None
    news = one.news()
    assert news == (1, 5.0, 1)
    assert one.news() is None
    other.take(*news[:2])
    other.elsewhere = news[2]
    assert [admit(other, 0.0, fingerprint=i) is None for i in range(2)] == [True, False]
    one.end(5.0, (10, 10), 1.0)
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
        one.let_held()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["begin", "begin", "end", "hear"])), max_size=200))
def test_several_processes_exceed_a_limit_by_what_each_may_begin_unheard(events: list[tuple[int, str]]) -> None:
    """docs/operations.md says so. Without requests that it has not heard of no process exceeds the limit."""
    processes = [limits(concurrency=3) for _ in range(4)]
    running = [0] * len(processes)
    for number, event in events:
        one, before = processes[number], sum(other.running for other in processes)
        if event == "hear":
            hear(processes, running)
        elif event == "end" and one.running:
            one.end(1.0, (1, 1), 1.0)
        elif event == "begin" and admit(one, 0.0, fingerprint=before) is None:
            is_heard = [other.running for other in processes if other is not one] == [
                run for other, run in zip(processes, running, strict=True) if other is not one
            ]
            assert before < 3 or not is_heard
        assert sum(other.running for other in processes) <= len(processes) * 3


def test_requests_of_a_burst_at_all_processes_are_paid_back() -> None:
    processes = [limits(requests_per_minute=2) for _ in range(4)]
    for one in processes:
        assert [admit(one, 0.0, fingerprint=i) is None for i in range(3)] == [True, True, False]
    hear(processes, [0] * len(processes))  # 8 of 2
    assert all(admit(one, 200.0, fingerprint=8) is not None for one in processes)
    assert admit(processes[0], 215.0, fingerprint=9) is None, "6 are paid back, and one has refilled"


def test_a_burst_at_all_processes_reaches_that_bound() -> None:
    processes = [limits(concurrency=3) for _ in range(4)]
    running = [0] * len(processes)
    for one in processes:
        assert [admit(one, 0.0, fingerprint=i) is None for i in range(4)] == [True, True, True, False]
    hear(processes, running)
    for one in processes[:3]:
        for _ in range(3):
            one.end(1.0, (1, 1), 1.0)
    hear(processes, running)
    assert [one.elsewhere for one in processes] == [3, 3, 3, 0]
    assert all(admit(one, 0.1, fingerprint=9) is not None for one in processes), "three run still"
    processes[3].end(1.0, (1, 1), 1.0)
    hear(processes, running)
    assert admit(processes[0], 5.0, fingerprint=8) is None


def test_a_held_retry_gets_the_next_place_before_others() -> None:
    one, admitted = limits(concurrency=1), list[str]()
    assert admit(one, 0.0) is None
    seconds = [admit(one, 0.0, fingerprint=number)[1] for number in (1, 2)]  # type: ignore[index]
    for number, due_s in zip((1, 2), seconds, strict=True):
        assert admit(one, due_s, fingerprint=number) == ("concurrency", 0)
        one.hold(1.0, lambda number=number: admitted.append(str(number)))  # type: ignore[misc]
    late = one.hold(1.0, lambda: admitted.append("late"))
    one.end(1.0, (1, 1), 1.0)
    assert (admitted, one.running) == (["1"], 1)
    refusal = admit(one, max(seconds), fingerprint=3)
    assert refusal is not None
    assert refusal[1] > 0
    assert one.release(late)
    one.end(1.0, (1, 1), 1.0)
    one.end(1.0, (1, 1), 1.0)
    assert (admitted, one.running) == (["1", "2"], 0)


def test_held_retries_count_as_if_they_had_been_admitted() -> None:
    """A refusal meanwhile is told when the key has tokens for both, and so is a retry that was told a time before."""
    one = limits(concurrency=1, tokens_per_minute=6000, requests_per_minute=60)
    assert admit(one, 0.0, 0.0) is None
    due_s = admit(one, 0.0, 6000.0, 1)[1]  # type: ignore[index]
    assert admit(one, due_s, 6000.0, 1) == ("concurrency", 0)
    one.hold(6000.0, lambda: None)
    assert admit(one, due_s, 6000.0, 2)[1] >= 60  # type: ignore[index]
    few = limits(concurrency=1, requests_per_minute=2)
    assert admit(few, 0.0) is None
    due_s = admit(few, 0.0, fingerprint=1)[1]  # type: ignore[index]
    assert admit(few, due_s, fingerprint=1) == ("concurrency", 0)
    few.hold(1.0, lambda: None)
    reason, wait_s = admit(few, due_s, fingerprint=2)  # type: ignore[misc]
    assert (reason, wait_s >= 25) == ("requests", True)


def test_a_raised_limit_lets_held_retries_in() -> None:
    one, admitted = limits(concurrency=1), list[str]()
    assert admit(one, 0.0) is None
    one.hold(1.0, lambda: admitted.append("held"))
    one.configure(ApiKey(name="k", sha256="", concurrency=2))
    assert (admitted, one.running) == (["held"], 2)


# --- retries


class Clients:
    """Clients of one key that send new requests at random times, and come again as they are told."""

    def __init__(self, one: KeyLimits, per_s: float, seed: int, *, answer_s: float = 0.5) -> None:
        self.retried = self.succeeded = self.most_running = 0
        self._one = one
        self._random = random = Random(seed)
        self._answer_s = answer_s
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, str, int]] = []
        self._held: dict[int, Held] = {}
        self.now_s = 0.0
        at_s = 0.0
        while at_s < 200.0:
            at_s += random.expovariate(per_s)
            self._add(at_s, "new", next(self._numbers))

    def _add(self, at_s: float, kind: str, request: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), kind, request))

    def _begin(self, now_s: float, request: int) -> None:
        self.most_running = max(self.most_running, self._one.running)
        self._add(now_s + self._random.expovariate(1 / self._answer_s), "end", request)

    def _come_again(self, now_s: float, after_s: int, request: int) -> None:
        if now_s < 400.0:
            self._add(now_s + after_s + self._random.uniform(0, 0.3), "retry", request)

    def _hold(self, now_s: float, request: int) -> None:
        def go() -> None:
            self.succeeded += 1
            self._held.pop(request, None)
            self._begin(self.now_s, request)

        self._held[request] = self._one.hold(100.0, go)
        self._add(now_s + self._one.hold_s, "too long", request)

    def run(self) -> float:
        """The share of retries that succeeded."""
        while self._events:
            self.now_s, _, kind, request = heapq.heappop(self._events)
            now_s = self.now_s
            if kind == "end":
                self._one.end(100.0, (50, self._random.randint(0, 100)), self._answer_s)
                continue
            if kind == "too long":
                if (held := self._held.pop(request, None)) is not None and self._one.release(held):
                    self._come_again(now_s, self._one.refuse(100.0, request, now_s), request)
                continue
            refusal = admit(self._one, now_s, 100.0, request)
            self.retried += kind == "retry"
            if refusal is None:
                self.succeeded += kind == "retry"
                self._begin(now_s, request)
            elif not refusal[1]:
                self._hold(now_s, request)
            else:
                self._come_again(now_s, refusal[1], request)
        return self.succeeded / max(1, self.retried)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fields", "per_s", "answer_s"),
    [
        ({"requests_per_minute": 120}, 3.0, 0.5),
        ({"requests_per_minute": 120}, 6.0, 0.5),
        ({"tokens_per_minute": 12_000}, 3.0, 0.5),
        ({"concurrency": 4}, 8.0, 0.5),
        ({"concurrency": 1}, 3.0, 0.5),  # 1.5 times what it allows, as the next
        ({"concurrency": 8}, 24.0, 0.5),
        ({"concurrency": 1}, 0.5, 4.0),
        ({"concurrency": 8}, 3.0, 4.0),
        ({"requests_per_minute": 120, "tokens_per_minute": 12_000, "concurrency": 4}, 3.0, 1.0),
    ],
)
def test_four_of_five_retries_succeed(fields: dict[str, Any], per_s: float, answer_s: float, seed: int) -> None:
    clients = Clients(limits(**fields), per_s, seed, answer_s=answer_s)
    share = clients.run()
    assert clients.retried > 30
    assert share >= 0.8
    assert clients.most_running <= fields.get("concurrency", 1e9)
