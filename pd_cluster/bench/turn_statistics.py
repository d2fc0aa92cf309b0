"""Statistics of conversations: first and later turns apart, and what a prompt found again of the turn before it.

What counts is sent in a window. In a closed loop it ends when there is no conversation to follow one that ends, and
the first requests of those that begin together are left out: they come at once. In an open loop it begins a
conversation's mean length after the first arrival, when about as many run as later on, and ends with the last arrival.
Rates are of the requests that ended in that time. Failures are listed whenever they happen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import inf
from statistics import mean
from typing import TYPE_CHECKING

from pd_cluster.bench.statistics import RequestRecord, Summary, meets, summarize

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class TurnsSummary:
    """`whole`, `parts`: of the requests that count."""

    num_conversations: int
    num_requests: int
    num_unasked: int  # turns that were to follow a failed request
    errors: dict[str, int]
    window_s: tuple[float, float] | None  # None: all requests count
    whole: Summary
    parts: dict[str, Summary]  # of "first turns", "later turns", each route, and "left out", which do not count
    found_history: float  # share of the prompts before that the cache had
    found_answers: float  # and of their answers
    attained: dict[str, float]  # shares within the targets, of all that count, failed ones and those not asked too


def steady_window(records: Sequence[RequestRecord], at_once: int) -> tuple[float, float] | None:
    """Seconds between which requests count. None: there is no such time."""
    by_conversation = defaultdict[int, list[RequestRecord]](list)
    for record in records:
        by_conversation[record.conversation].append(record)
    begins = [one[0].sent_s for one in by_conversation.values()]
    ends = sorted(max(record.end_s for record in one) for one in by_conversation.values())
    if at_once:
        window_s = min(begins), ends[-min(at_once, len(ends))]
    else:
        window_s = min(begins) + mean(ends) - mean(begins), max(begins)
    return window_s if window_s[0] < window_s[1] else None


def summarize_turns(
    records: Sequence[RequestRecord], num_planned: Sequence[int], at_once: int, later_ttft_ms: float, gap_ms: float
) -> TurnsSummary:
    """`records`: by conversation in the order of its turns, not empty. `num_planned`: turns of each conversation."""
    window_s = steady_window(records, at_once)
    begin_s, end_s = window_s or (-inf, inf)
    counted, left_out = list[RequestRecord](), list[RequestRecord]()
    for record in records:
        is_start = window_s is not None and record.turn == 0 and record.conversation < at_once
        (counted if begin_s <= record.sent_s <= end_s and not is_start else left_out).append(record)
    if not counted:
        window_s, counted, left_out = None, list(records), []
    later, whole = [record for record in counted if record.turn], summarize(counted, {})
    if window_s is not None:
        ended = [record for record in records if record.ok and begin_s < record.end_s <= end_s]
        num_output, span_s = sum(record.num_output for record in ended), end_s - begin_s
        whole = replace(whole, duration_s=span_s, request_rate=len(ended) / span_s, output_rate=num_output / span_s)
    parts = {"first turns": [record for record in counted if not record.turn], "later turns": later}
    parts |= {"left out": left_out} | {
        route: [one for one in counted if one.ok and one.route == route] for route in sorted(whole.routes)
    }
    soon, steady = {"ttft": later_ttft_ms}, {"longest_gap": gap_ms}
    unasked = _unasked(records, num_planned)
    missed = [one for one in unasked if one.sent_s <= end_s]
    targets = {
        "later TTFT": ([*later, *missed], soon), "longest gap": ([*counted, *missed], steady),
        "both": ([*later, *missed], soon | steady),
    }  # fmt: skip
    errors = Counter(record.error or "no output" for record in records if not record.ok)
    return TurnsSummary(
        len({record.conversation for record in records}), len(records), len(unasked), dict(errors),
        window_s, whole, {name: summarize(some, {}) for name, some in parts.items() if some}, *_found(records, later),
        {name: mean(meets(record, limits) for record in some) for name, (some, limits) in targets.items() if some},
    )  # fmt: skip


def _unasked(records: Sequence[RequestRecord], num_planned: Sequence[int]) -> list[RequestRecord]:
    """Turns that were to follow a failed request, at its time: also one in the ramp, which they would have survived."""
    last = {record.conversation: record for record in records}
    return [
        replace(one, turn=turn, error="not asked")
        for one in last.values()
        for turn in range(one.turn + 1, num_planned[one.conversation])
    ]


def _found(records: Sequence[RequestRecord], later: Sequence[RequestRecord]) -> tuple[float, float]:
    """A cache has prefixes: an answer's tokens are found as far as it has more than the prompt before."""
    by_turn = {(record.conversation, record.turn): record for record in records}
    pairs = [(by_turn[one.conversation, one.turn - 1], one.num_cached) for one in later if one.ok]
    of_prompts = sum(min(cached, before.num_input) for before, cached in pairs)
    of_answers = sum(min(max(0, cached - before.num_input), before.num_output) for before, cached in pairs)
    num_prompts, num_answers = (sum(getattr(one, name) for one, _ in pairs) for name in ("num_input", "num_output"))
    return of_prompts / max(1, num_prompts), of_answers / max(1, num_answers)
