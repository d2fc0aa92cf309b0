"""What the dashboard tells of recent requests, by table and by property."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.recent_requests import (
    LAST_S,
    MOST_REQUESTS,
    NAME_CHARS,
    NEWEST_SHOWN,
    SLOW_MINUTES,
    SLOW_SHOWN,
    RecentPart,
    RecentRequests,
    RequestNote,
    summary,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def a_note(ttft_s: float | None = 0.5, name: str = "r", **fields: object) -> RequestNote:
    told = {"prefill": "p", "decode": "d", "order": "p-first", "reason": "default", **fields}
    return RequestNote(at_s=0.0, request_id=name, ttft_s=ttft_s, **told)  # type: ignore[arg-type]


def after(recent: RecentRequests, clock: Clock, *notes: tuple[float, RequestNote]) -> None:
    """Each note ends so many seconds after the one before."""
    for wait_s, note in notes:
        clock.now_s += wait_s
        recent.add(note)


@given(st.lists(st.tuples(st.sampled_from(["receive", "ticket", "failed try", "prefill"]), st.floats(0, 100))))
def test_phases_sum_to_the_first_token(steps: list[tuple[str, float]]) -> None:
    note = RequestNote(at_s=0.0, arrived_s=10.0, request_id="r")
    now_s = 10.0
    for phase, seconds in steps:
        now_s += seconds
        note.end(phase, now_s)
    assert note.answer("p", "d", now_s + 1.0, is_stream=True) == pytest.approx(now_s - 9.0)
    note.end("prefill", now_s + 50.0)  # P's leg may end behind the first byte
    assert note.ttft_s == pytest.approx(sum(note.phases.values()))
    assert min(note.phases.values()) >= -1e-9


@pytest.mark.parametrize(
    ("before", "prefill", "last"),
    [
        (("receive", "ticket", "prefill"), "p", "handover"),
        (("receive",), "p", "prefill and handover"),  # D-first: the router does not see P
        (("receive", "ticket"), "p", "prefill and handover"),  # D was faster than P's last event
        (("receive",), "d", "prefill"),
        (("receive", "ticket", "failed try"), "d", "prefill"),
    ],
)
def test_the_last_phase_is_named_by_what_was_seen(before: tuple[str, ...], prefill: str, last: str) -> None:
    note = RequestNote(at_s=0.0, arrived_s=0.0, request_id="r")
    for i, phase in enumerate(before):
        note.end(phase, i + 1.0)
    note.answer(prefill, "d", 10.0, is_stream=True)
    assert list(note.phases) == list(dict.fromkeys((*before, last)))


def test_an_unstreamed_answer_has_no_first_token() -> None:
    """Its first byte comes with its last token, which would look like a long handover."""
    note = RequestNote(at_s=0.0, request_id="r")
    note.end("prefill", 1.0)
    assert note.answer("p" * 1000, "d", 9.0, is_stream=False) == 9.0
    assert (note.ttft_s, note.phases, note.decode, len(note.prefill)) == (None, {}, "d", NAME_CHARS)


def test_rates_are_of_the_last_minute_or_of_the_time_since_the_start() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    after(recent, clock, *[(2.0, a_note(prompt_tokens=100, kv_bytes=10))] * 5)
    told = summary([recent.part(3)])
    assert (told["in_flight"], told["total"]["per_s"]) == (3, pytest.approx(0.5))
    [pair] = told["pairs"]
    assert (pair["key"], pair["tokens_per_s"], pair["bytes_per_s"]) == (("p", "d"), pytest.approx(50), pytest.approx(5))
    clock.now_s += LAST_S - 5.0
    assert summary([recent.part(0)])["total"]["per_s"] == pytest.approx(3 / LAST_S), "two are older than a minute"
    clock.now_s += LAST_S
    told = summary([recent.part(0)])
    assert (told["pairs"], told["routes"], told["newest"], told["total"]["p50_s"]) == ([], [], [], None)
    assert len(told["slowest"]) == 5


def test_a_high_rate_is_told_right_by_the_requests_that_are_kept() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    after(recent, clock, *[(0.01, a_note())] * (3 * MOST_REQUESTS))
    part = recent.part(0)
    assert len(part.notes) == MOST_REQUESTS
    assert summary([part])["total"]["per_s"] == pytest.approx(100, rel=0.01)
    assert len(summary([part])["newest"]) == NEWEST_SHOWN


def test_the_slowest_outlive_thousands_of_others_and_then_their_minutes() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    after(recent, clock, (0.0, a_note(30.0, "slow")), (0.0, a_note(None, "unstreamed")))
    after(recent, clock, *[(0.01, a_note(0.1))] * 2000)
    slowest = summary([recent.part(0)])["slowest"]
    assert (slowest[0].request_id, len(slowest)) == ("slow", SLOW_SHOWN)
    for _ in range(2 * SLOW_MINUTES):
        after(recent, clock, (61.0, a_note(1.0, "later")))
    slowest = summary([recent.part(0)])["slowest"]
    assert {note.request_id for note in slowest} == {"later"}
    assert len(slowest) <= SLOW_MINUTES
    clock.now_s += 60 * SLOW_MINUTES + 60
    assert summary([recent.part(0)])["slowest"] == []


def test_a_summary_adds_workers_up_as_they_tell_it_in_json() -> None:
    clock = Clock()
    parts = []
    for worker, ttft_s in (("a", 1.0), ("b", 3.0)):
        recent = RecentRequests(clock)
        clock.now_s += 10.0
        recent.add(a_note(ttft_s, worker, phases={"handover": ttft_s}))
        recent.add(a_note(None, "local", prefill="d", order="direct", reason="no-prefill-node", outcome="broken"))
        parts.append(msgspec.convert(msgspec.json.decode(msgspec.json.encode(recent.part(2))), RecentPart))
    told = summary(parts)
    assert told["in_flight"] == 4
    assert told["total"]["per_s"] == pytest.approx(0.4)
    assert [(pair["key"], pair["per_s"], pair["p50_s"]) for pair in told["pairs"]] == [(("p", "d"), 0.2, 2.0)]
    assert [route["key"] for route in told["routes"]] == [
        ("direct", "no-prefill-node", "broken"), ("p-first", "default", "ok"),
    ]  # fmt: skip
    assert [note.request_id for note in told["slowest"]] == ["b", "a"]
    assert msgspec.json.encode(told)


def test_a_percentile_is_told_of_enough_samples_only() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    after(recent, clock, *[(0.1, a_note(i / 10)) for i in range(19)])
    assert summary([recent.part(0)])["total"]["p95_s"] is None
    recent.add(a_note(1.9))
    assert summary([recent.part(0)])["total"]["p95_s"] == pytest.approx(1.9, abs=0.1)
