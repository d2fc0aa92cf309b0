"""The requests that have ended lately, as the dashboard shows them. Pure: no IO.

Each worker of a router keeps its own and tells a `RecentPart`; `summary` adds the parts up.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import msgspec

from pd_router.records.recent_load import RecentLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_router.records.call_record import CallRecord

LAST_S = 60.0  # rates and medians are of the requests that ended since
MOST_REQUESTS = 500  # of which a worker has kept so many; at a higher rate they cover less time
SLOW_MINUTES = 10  # of which the slowest requests are kept
SLOW_SHOWN = 10  # of each minute, and of all
NEWEST_SHOWN = 25
NAME_CHARS = 100  # of names that a node tells


class RequestNote(msgspec.Struct, frozen=True, kw_only=True):
    """One request. "" and 0: not known. `phases`: seconds by name, in order."""

    at_s: float  # of its end, Unix seconds
    request_id: str
    model: str
    order: str
    reason: str
    outcome: str
    prefill: str  # id of the node that read the prompt
    decode: str
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    total_s: float
    phases: dict[str, float]


class RecentPart(msgspec.Struct):
    """What one worker tells."""

    in_flight: int
    span_s: float  # `notes` are of the requests that ended in it
    notes: list[RequestNote]
    slowest: list[RequestNote]


class RecentRequests:
    """Keeps records, and reads them only for a dashboard. `clock`: monotonic seconds, as in the records."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_s = clock()
        self.load = RecentLoad(clock)
        self._ended: deque[CallRecord] = deque(maxlen=MOST_REQUESTS)
        self._slow: dict[int, list[tuple[float, int, CallRecord]]] = {}  # heaps by minute
        self._numbers = itertools.count()  # decide between equally slow ones

    def add(self, record: CallRecord) -> None:
        """Take a request that has just ended."""
        self.load.end(record)
        self._ended.append(record)
        if (ttft_s := record.ttft_s) is None:
            return
        heap = self._slow.setdefault(int(record.ended_s // 60), [])
        push = heapq.heappush if len(heap) < SLOW_SHOWN else heapq.heappushpop
        push(heap, (ttft_s, next(self._numbers), record))
        if len(self._slow) > SLOW_MINUTES:
            del self._slow[min(self._slow)]

    def part(self, in_flight: int) -> RecentPart:
        now_s = self._clock()
        since_s = max(now_s - LAST_S, self._begun_s)
        if len(self._ended) == MOST_REQUESTS:
            since_s = max(since_s, self._ended[0].ended_s)
        notes = [note_of(record) for record in self._ended if record.ended_s >= since_s]
        slow = [one for minute, heap in self._slow.items() if minute > now_s // 60 - SLOW_MINUTES for one in heap]
        slowest = [note_of(record) for *_, record in heapq.nlargest(SLOW_SHOWN, slow)]
        return RecentPart(in_flight, max(now_s - since_s, 1.0), notes, slowest)


def note_of(record: CallRecord) -> RequestNote:
    """What is shown of a request: names and figures, no text and no key."""
    report, total_s = record.report, record.ended_s - record.arrived_s
    phases = {name: seconds for name, seconds in record.phases.items() if name != "send"}
    if "send" in record.phases:  # the record has it before those that the node reports later
        phases["send"] = record.phases["send"]
    return RequestNote(
        at_s=record.wall_s + total_s, request_id=record.request_id, model=record.model[:NAME_CHARS], order=record.order,
        reason=record.reason, outcome=record.outcome, prefill=record.prefill_by[:NAME_CHARS],
        decode=record.served_by[:NAME_CHARS], prompt_tokens=0 if report is None else report.num_prompt_tokens,
        output_tokens=0 if report is None else report.num_output_tokens, ttft_s=record.ttft_s, total_s=total_s,
        phases=phases,
    )  # fmt: skip


def summary(parts: Sequence[RecentPart]) -> dict[str, Any]:
    """The recent requests of all workers: rates by pair of nodes and by route, the slowest, the newest."""
    notes = [(note, part.span_s) for part in parts for note in part.notes]
    handed = [(note, span_s) for note, span_s in notes if note.decode and note.prefill not in ("", note.decode)]
    slowest = (note for part in parts for note in part.slowest)
    return {
        "in_flight": sum(part.in_flight for part in parts),
        "total": _tally((), [(note, span_s, note.ttft_s) for note, span_s in notes]),
        "pairs": _tallies((n.prefill, n.decode, n, span_s, n.phases.get("handoff")) for n, span_s in handed),
        "routes": _tallies((n.order, n.reason, n.outcome, n, span_s, n.ttft_s) for n, span_s in notes),
        "slowest": heapq.nlargest(SLOW_SHOWN, slowest, key=lambda note: note.ttft_s or 0.0),
        "newest": heapq.nlargest(NEWEST_SHOWN, (note for note, _ in notes), key=lambda note: note.at_s),
    }


def _tallies(rows: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A tally for each key, the most frequent first. A row: the key's parts, then note, span, seconds."""
    groups: dict[tuple[str, ...], list[tuple[RequestNote, float, float | None]]] = {}
    for *key, note, span_s, seconds in rows:
        groups.setdefault(tuple(key), []).append((note, span_s, seconds))
    return sorted((_tally(*group) for group in groups.items()), key=lambda tally: (-tally["per_s"], tally["key"]))


def _tally(key: tuple[str, ...], rows: Sequence[tuple[RequestNote, float, float | None]]) -> dict[str, Any]:
    """Rates, and median and 95th percentile of the seconds; None: too few are known."""
    known = [seconds for *_, seconds in rows if seconds is not None]
    return {
        "key": key,
        "per_s": sum(1 / span_s for _, span_s, _ in rows),
        "tokens_per_s": sum(note.prompt_tokens / span_s for note, span_s, _ in rows),
        "p50_s": median(known) if known else None,
        "p95_s": quantiles(known, n=20)[-1] if len(known) >= 20 else None,
    }
