"""What the dashboard tells of recent requests, by table and by property."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pd_http.node_report import NodeReport
from pd_router.records.call_record import CallRecord
from pd_router.records.recent_requests import (
    LAST_S,
    MOST_REQUESTS,
    NAME_CHARS,
    NEWEST_SHOWN,
    SLOW_MINUTES,
    SLOW_SHOWN,
    RecentPart,
    RecentRequests,
    note_of,
    summary,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def a_record(ttft_s: float | None = 0.5, name: str = "r", **fields: Any) -> CallRecord:
    """A stream with this first token. None: not known."""
    record = CallRecord("/v1/completions", name, 0.0, 5.0)
    record.order, record.reason, record.prefill_by, record.served_by = "p-first", "default", "p", "d"
    record.report = NodeReport(num_prompt_tokens=100, num_output_tokens=7) if ttft_s is not None else None
    record.phases = {"handoff": ttft_s or 0.0}
    for field, value in fields.items():
        setattr(record, field, value)
    return record


def after(recent: RecentRequests, clock: Clock, *records: tuple[float, CallRecord]) -> None:
    """Each record ends so many seconds after the one before."""
    for wait_s, record in records:
        clock.now_s += wait_s
        record.end(clock.now_s, record.outcome, 200)
        recent.add(record)


def several(count: int, wait_s: float, ttft_s: float = 0.1) -> list[tuple[float, CallRecord]]:
    return [(wait_s, a_record(ttft_s)) for _ in range(count)]


def test_a_note_has_names_and_figures_only() -> None:
    record = a_record(0.5, "id", key="a customer", model="m" * 1000, prefill_by="p" * 1000)
    record.end(3.0, "ok", 200)
    note = note_of(record)
    assert (note.at_s, note.total_s, note.ttft_s, note.phases) == (8.0, 3.0, 0.5, {"handoff": 0.5})
    assert (note.prompt_tokens, note.output_tokens) == (100, 7)
    assert (len(note.model), len(note.prefill)) == (NAME_CHARS, NAME_CHARS)
    assert b"customer" not in msgspec.json.encode(note)
    record.phases = {"plan": 0.1, "send": 0.2, "prefill": 0.3}
    assert list(note_of(record).phases) == ["plan", "prefill", "send"]


def test_rates_are_of_the_last_minute_or_of_the_time_since_the_start() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    after(recent, clock, *several(5, 2.0))
    told = summary([recent.part(3)])
    assert (told["in_flight"], told["total"]["per_s"]) == (3, pytest.approx(0.5))
    [pair] = told["pairs"]
    assert (pair["key"], pair["tokens_per_s"], pair["p50_s"]) == (("p", "d"), pytest.approx(50), 0.1)
    clock.now_s += LAST_S - 5.0
    assert summary([recent.part(0)])["total"]["per_s"] == pytest.approx(3 / LAST_S), "two are older than a minute"
    clock.now_s += LAST_S
    told = summary([recent.part(0)])
    assert (told["pairs"], told["routes"], told["newest"], told["total"]["p50_s"]) == ([], [], [], None)
    assert len(told["slowest"]) == 5


def test_a_high_rate_is_told_right_by_the_requests_that_are_kept() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    after(recent, clock, *several(3 * MOST_REQUESTS, 0.01))
    part = recent.part(0)
    assert len(part.notes) == MOST_REQUESTS
    assert summary([part])["total"]["per_s"] == pytest.approx(100, rel=0.01)
    assert len(summary([part])["newest"]) == NEWEST_SHOWN


def test_the_slowest_outlive_thousands_of_others_and_then_their_minutes() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    after(recent, clock, (0.0, a_record(30.0, "slow")), (0.0, a_record(None, "not known")))
    after(recent, clock, *several(2000, 0.01))
    slowest = summary([recent.part(0)])["slowest"]
    assert (slowest[0].request_id, len(slowest)) == ("slow", SLOW_SHOWN)
    for _ in range(2 * SLOW_MINUTES):
        after(recent, clock, (61.0, a_record(1.0, "later")))
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
        local = a_record(None, "local", prefill_by="d", order="direct", reason="no-prefill-node", outcome="broken")
        after(recent, clock, (10.0, a_record(ttft_s, worker)), (0.0, local))
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
    after(recent, clock, *[(0.1, a_record(i / 10)) for i in range(1, 20)])
    assert summary([recent.part(0)])["total"]["p95_s"] is None
    after(recent, clock, (0.1, a_record(2.0)))
    assert summary([recent.part(0)])["total"]["p95_s"] == pytest.approx(2.0, abs=0.1)
