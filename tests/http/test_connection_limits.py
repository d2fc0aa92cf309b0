"""The bounds of one connection: on bytes, however they are cut, and on time."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_http.connection_limits import BODY_PROGRESS_BYTES, ConnectionLimits
from pd_http.errors import StartupError
from pd_http.limits import HttpLimits
from pd_http.refusal import Refusal
from tests.http.traffic import cut, cuts, feed, requests

LIMITS = HttpLimits()
SMALL = HttpLimits(max_head_kb=1, max_headers=8)
HEAD = b"POST / HTTP/1.1\r\n\r\n"


@pytest.mark.long
@given(st.lists(requests(), max_size=4), cuts)
def test_requests_are_found_however_their_bytes_are_cut(
    sent: list[tuple[bytes, tuple[int, int]]], places: list[int]
) -> None:
    data = b"".join(raw for raw, _ in sent)
    outcome = feed(LIMITS, cut(data, places))
    assert outcome.refusal is None
    assert outcome.requests == [sizes for _, sizes in sent]


@pytest.mark.long
@given(st.lists(st.one_of(requests().map(lambda pair: pair[0]), st.binary(max_size=60)), max_size=4), cuts)
def test_any_bytes_get_the_same_verdict_however_they_are_cut(sent: list[bytes], places: list[int]) -> None:
    data = b"".join(sent)
    assert feed(SMALL, cut(data, places)) == feed(SMALL, [data])


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 2000, Refusal.LARGE_HEAD),
        (b"GET /" + b"a" * 2000, Refusal.LARGE_HEAD),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10, Refusal.LARGE_HEAD),
        (b"\r\n" * 600, Refusal.LARGE_HEAD),
        (HEAD[:-2] + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 10, Refusal.LARGE_HEAD),
        (HEAD[:-2] + b"transfer-encoding: chunked\r\n\r\n0\r\na: " + b"b" * 2000, Refusal.LARGE_HEAD),
        (HEAD[:-2] + b"transfer-encoding: chunked\r\n\r\n1;" + b"b" * 2000, Refusal.BAD_REQUEST),
        (HEAD[:-2] + b"transfer-encoding: chunked\r\n\r\n" + b"0" * 2000 + b"\r\n", Refusal.BAD_REQUEST),
    ],
)
@given(places=cuts)
def test_what_never_ends_is_refused_however_it_is_cut(data: bytes, refusal: Refusal, places: list[int]) -> None:
    assert feed(SMALL, cut(data, places)).refusal is refusal


def watched(now_s: float = 0.0) -> ConnectionLimits:
    return ConnectionLimits(LIMITS, now_s)


def take(limits: ConnectionLimits, data: bytes, now_s: float) -> None:
    assert limits.take(data, 0, now_s) == (len(data), data.endswith(b"\r\n\r\n"))


def test_a_silent_connection_ends_after_the_time_for_idle_ones() -> None:
    limits = watched()
    assert limits.deadline_s == LIMITS.client_keepalive_s
    assert limits.due(LIMITS.client_keepalive_s - 0.1) is None
    assert limits.due(LIMITS.client_keepalive_s) is Refusal.IDLE


@pytest.mark.long
@given(st.lists(st.floats(min_value=0.01, max_value=5.0), min_size=60, max_size=80))
def test_one_header_byte_after_the_other_ends_in_time(gaps: list[float]) -> None:
    limits, now_s = watched(), 0.0
    begun_s: float | None = None
    for gap in gaps:
        now_s += gap
        if begun_s is not None and now_s >= begun_s + LIMITS.head_timeout_s:
            assert limits.due(now_s) is Refusal.SLOW_HEAD
            return
        assert limits.due(now_s) is None
        begun_s = now_s if begun_s is None else begun_s
        take(limits, b"a", now_s)


def test_a_body_must_bring_64_kib_in_each_window() -> None:
    limits = watched()
    take(limits, HEAD, 0.0)
    limits.head_ended(1 << 20, 1.0)
    for window in range(3):
        now_s = 1.0 + window * (LIMITS.body_timeout_s - 1)
        assert limits.due(now_s) is None
        take(limits, b"x" * (BODY_PROGRESS_BYTES - 1), now_s)
        take(limits, b"x", now_s)
    assert limits.due(now_s + LIMITS.body_timeout_s - 0.1) is None
    assert limits.due(now_s + LIMITS.body_timeout_s) is Refusal.SLOW_BODY


def test_a_byte_now_and_then_is_no_progress() -> None:
    limits, now_s = watched(), 0.0
    take(limits, HEAD, 0.0)
    limits.head_ended(100, 0.0)
    while limits.due(now_s) is None:
        take(limits, b"x", now_s)
        now_s += 1.0
    assert (now_s, limits.due(now_s)) == (LIMITS.body_timeout_s, Refusal.SLOW_BODY)


def test_while_the_server_works_the_client_has_no_deadline() -> None:
    limits = watched()
    take(limits, HEAD, 0.0)
    assert limits.is_waiting
    limits.head_ended(0, 0.0)
    assert not limits.is_waiting
    assert limits.deadline_s == inf
    take(limits, b"GET", 5.0)  # the next one's beginning
    assert limits.deadline_s == inf
    limits.answered(100.0)
    assert limits.deadline_s == 100.0 + LIMITS.head_timeout_s
    assert limits.is_waiting


def test_what_is_not_read_for_the_servers_sake_is_not_late() -> None:
    limits = watched()
    take(limits, HEAD, 0.0)
    limits.head_ended(100, 0.0)
    limits.hold()
    assert limits.due(1000.0) is None
    limits.go_on(1000.0)
    assert limits.deadline_s == 1000.0 + LIMITS.body_timeout_s


def test_the_rest_of_a_body_that_is_answered_already_has_one_window() -> None:
    limits = watched()
    take(limits, HEAD, 0.0)
    limits.head_ended(1 << 30, 0.0)
    assert not limits.discards
    limits.answered(1.0)
    assert limits.discards
    take(limits, b"x" * BODY_PROGRESS_BYTES, 20.0)
    assert limits.due(1.0 + LIMITS.body_timeout_s) is Refusal.SLOW_BODY


def test_a_full_send_buffer_must_move_in_time() -> None:
    limits = watched()
    take(limits, HEAD, 0.0)
    limits.head_ended(0, 0.0)
    limits.write_paused(10.0)
    assert limits.due(10.0 + LIMITS.write_timeout_s - 0.1) is None
    limits.write_resumed()
    assert limits.deadline_s == inf
    limits.write_paused(200.0)
    assert limits.due(200.0 + LIMITS.write_timeout_s) is Refusal.READS_NOTHING


@pytest.mark.long
@given(st.lists(st.sampled_from(["byte", "pause", "resume", "wait"]), max_size=40))
def test_a_due_connection_stays_due(events: list[str]) -> None:
    """Time alone never takes a verdict back."""
    limits, now_s = watched(), 0.0
    for event in events:
        now_s += 3.0
        if event == "pause":
            limits.write_paused(now_s)
        elif event == "resume":
            limits.write_resumed()
        elif event == "byte":
            take(limits, b"a", now_s)
        verdict = limits.due(now_s)
        assert (verdict is None) == (now_s < limits.deadline_s)
        assert verdict is None or limits.due(now_s + 1000.0) is not None


@pytest.mark.parametrize("name", ["head_timeout_s", "write_timeout_s", "max_headers", "max_connections"])
def test_a_bound_of_nothing_is_refused_at_start(name: str) -> None:
    with pytest.raises(StartupError, match=name.replace("_", "-")):
        replace(LIMITS, **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("origin", ["*", "https://a.example", "http://localhost:3000", "app://obsidian.md"])
def test_origins_as_browsers_write_them(origin: str) -> None:
    assert HttpLimits(allowed_origins=(origin,)).allowed_origins == (origin,)


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", "null", "https://A.example", "", "https://*/x"])
def test_origins_that_would_never_match_are_refused(origin: str) -> None:
    with pytest.raises(StartupError, match="--allowed-origins"):
        HttpLimits(allowed_origins=("https://b.example", origin))
