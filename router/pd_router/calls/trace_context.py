"""W3C Trace Context, level 1: the header `traceparent`. Pure, except for drawn ids."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

TRACEPARENT = "traceparent"
_FORMAT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_NO_IDS = frozenset({"", "0" * 16, "0" * 32})


class TraceContext(NamedTuple):
    """The trace of one request. Ids are hexadecimal; "": the request has none."""

    trace_id: str = ""
    parent_id: str = ""  # the client's span; "": the trace begins at the router
    span_id: str = ""  # the router's span of the request
    is_sampled: bool = False

    @property
    def header(self) -> str:
        """The `traceparent` for the nodes."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def begin_trace(given: str | None, ratio: float) -> TraceContext:
    """The trace of a request with the client's header `given`. Without a valid one the request begins a trace.

    A client that samples its trace decides for the router too; of the others a share of `ratio` is sampled.
    """
    match = _FORMAT.fullmatch(given) if given else None
    trace_id, parent_id, flags = "", "", 0
    if match is not None and match[1] != "ff" and (match[1] != "00" or match[5] is None):
        trace_id, parent_id, flags = match[2], match[3], int(match[4], 16)
    if trace_id in _NO_IDS or parent_id in _NO_IDS:
        trace_id, parent_id, flags = f"{random.getrandbits(128) or 1:032x}", "", 0
    is_sampled = bool(flags & _SAMPLED) or int(trace_id[16:], 16) < ratio * (1 << 64)
    return TraceContext(trace_id, parent_id, new_span_id(), is_sampled)


def new_span_id() -> str:
    """16 hexadecimal digits, not all 0."""
    return f"{random.getrandbits(64) or 1:016x}"
