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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_router.stream_record import StreamRecord

LAST_S = 60.0  # rates and medians are of the requests that ended since
MOST_REQUESTS = 500  # of which a worker has kept so many; at a higher rate they cover less time
SLOW_MINUTES = 10  # of which the slowest requests are kept
SLOW_SHOWN = 20  # of each minute, and of all
NEWEST_SHOWN = 40
NAME_CHARS = 100  # of a name that a client or a node sends: it may name what does not exist


class RequestNote(msgspec.Struct, kw_only=True):
    """One request. "" and 0: not known. `phases`: seconds by name, in order; they sum to `ttft_s`."""

    at_s: float  # of its arrival, Unix seconds
    arrived_s: float = 0.0  # the same by the router's clock
    request_id: str
    model: str = ""
    order: str = "none"
    reason: str = "none"
    outcome: str = "ok"
    prefill: str = ""  # id of the node that read the prompt
    decode: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_bytes: int = 0  # that D has read from P
    ttft_s: float | None = None  # arrival to the first bytes of a stream; None: not streamed, or none came
    total_s: float = 0.0
    phases: dict[str, float] = {}

    def end(self, phase: str, now_s: float) -> float:
        """Note that `phase` ends now, unless the answer has begun. Returns the seconds since arrival."""
        passed_s = now_s - self.arrived_s
        if not self.decode:
            self.phases[phase] = self.phases.get(phase, 0.0) + passed_s - sum(self.phases.values())
        return passed_s

    def answer(self, prefill: str, decode: str, now_s: float, *, is_stream: bool) -> float:
        """The same for the last phase, with the nodes of the answer. An unstreamed answer tells no phases."""
        handover = "handover" if "prefill" in self.phases else "prefill and handover"
        passed_s = self.end("prefill" if prefill == decode else handover, now_s)
        self.prefill, self.decode = prefill[:NAME_CHARS], decode
        if is_stream:
            self.ttft_s = passed_s
        else:
            self.phases.clear()
        return passed_s

    def count(self, record: StreamRecord) -> None:
        """Take the tokens of a stream that has ended."""
        if record.head is not None:
            self.prompt_tokens, self.output_tokens = record.head.num_prompt_tokens, record.num_tokens


class RecentPart(msgspec.Struct):
    """What one worker tells."""

    in_flight: int
    span_s: float  # `notes` are of the requests that ended in it
    notes: list[RequestNote]
    slowest: list[RequestNote]


class RecentRequests:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._ended: deque[tuple[float, RequestNote]] = deque(maxlen=MOST_REQUESTS)
        self._slow: dict[int, list[tuple[float, int, RequestNote]]] = {}  # heaps by minute
        self._numbers = itertools.count()  # decide between equally slow ones

    def add(self, note: RequestNote) -> None:
        """Take a request that has just ended."""
        now_s = self._clock()
        note.total_s = now_s - note.arrived_s
        self._ended.append((now_s, note))
        if note.ttft_s is None:
            return
        heap = self._slow.setdefault(int(now_s // 60), [])
        push = heapq.heappush if len(heap) < SLOW_SHOWN else heapq.heappushpop
        push(heap, (note.ttft_s, next(self._numbers), note))
        if len(self._slow) > SLOW_MINUTES:
            del self._slow[min(self._slow)]

    def part(self, in_flight: int) -> RecentPart:
        now_s = self._clock()
        since_s = max(now_s - LAST_S, self._begun_s)
        if len(self._ended) == MOST_REQUESTS:
            since_s = max(since_s, self._ended[0][0])
        notes = [note for ended_s, note in self._ended if ended_s >= since_s]
        slow = [one for minute, heap in self._slow.items() if minute > now_s // 60 - SLOW_MINUTES for one in heap]
        slowest = [note for *_, note in heapq.nlargest(SLOW_SHOWN, slow)]
        return RecentPart(in_flight, max(now_s - since_s, 1.0), notes, slowest)


def summary(parts: Sequence[RecentPart]) -> dict[str, Any]:
    """The recent requests of all workers: rates by pair of nodes and by route, the slowest, the newest."""
    notes = [(note, part.span_s) for part in parts for note in part.notes]
    handed = [(note, span_s) for note, span_s in notes if note.decode and note.prefill not in ("", note.decode)]
    slowest = (note for part in parts for note in part.slowest)
    return {
        "in_flight": sum(part.in_flight for part in parts),
        "total": _tally((), [(note, span_s, note.ttft_s) for note, span_s in notes]),
        "pairs": _tallies((n.prefill, n.decode, n, span_s, n.phases.get("handover")) for n, span_s in handed),
        "routes": _tallies((n.order, n.reason, n.outcome, n, span_s, n.ttft_s) for n, span_s in notes),
        "slowest": heapq.nlargest(SLOW_SHOWN, slowest, key=lambda note: note.ttft_s or 0.0),
        "newest": heapq.nlargest(NEWEST_SHOWN, (n for n, _ in notes), key=lambda note: note.at_s + note.total_s),
    }


def _tallies(rows: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A tally for each key, the most frequent first. A row: the key's parts, then note, span, seconds."""
    groups: dict[tuple[str, ...], list[tuple[RequestNote, float, float | None]]] = {}
    for *key, note, span_s, seconds in rows:
        groups.setdefault(tuple(key), []).append((note, span_s, seconds))
    return sorted((_tally(*group) for group in groups.items()), key=lambda told: (-told["per_s"], told["key"]))


def _tally(key: tuple[str, ...], rows: Sequence[tuple[RequestNote, float, float | None]]) -> dict[str, Any]:
    """Rates, and median and 95th percentile of the seconds; None: too few are known."""
    known = [seconds for *_, seconds in rows if seconds is not None]
    return {
        "key": key,
        "per_s": sum(1 / span_s for _, span_s, _ in rows),
        "tokens_per_s": sum(note.prompt_tokens / span_s for note, span_s, _ in rows),
        "bytes_per_s": sum(note.kv_bytes / span_s for note, span_s, _ in rows),
        "p50_s": median(known) if known else None,
        "p95_s": quantiles(known, n=20)[-1] if len(known) >= 20 else None,
    }
