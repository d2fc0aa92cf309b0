"""The spans of one request, made from its record when all is over. Pure, except for drawn ids.

Nodes make no spans: they report durations, and the router places them on its own clock. So the clocks of the machines
need not agree. The prefill leg is a child of what asked the prefill node: of the request, or D-first of the decode leg.
Attributes are `gen_ai.*` where the semantic conventions have one, else `pd.*`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_router.calls.trace_context import new_span_id
from pd_router.config import HandoffOrder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_router.records.call_record import CallRecord

Value = str | int | float | bool
_AT_PREFILL = ("prefill_queue", "prefill")
# Of the decode node's timeline, one after the other
_AT_DECODE = ("queue", "prefill", "transfer", "admit", "first_decode")


@dataclass(frozen=True, slots=True)
class Span:
    """Ids are hexadecimal, times Unix seconds. `error`: "" unless the request failed."""

    name: str
    trace_id: str
    parent_id: str
    start_s: float
    end_s: float
    service: str
    instance: str
    attributes: dict[str, Value] = field(default_factory=dict)
    is_server: bool = False
    error: str = ""
    span_id: str = field(default_factory=new_span_id)


def spans_of(record: CallRecord) -> Iterator[Span]:
    """The request first, then what it waited for at the router, at the prefill node and at the decode node."""
    trace, wall_s = record.trace, record.wall_s - record.arrived_s
    operation = "chat" if record.path.endswith(("/chat/completions", "/messages", "/responses")) else "text_completion"
    yield Span(
        f"{operation} {record.model}".rstrip(),
        trace.trace_id, trace.parent_id, record.wall_s, record.ended_s + wall_s, "pd-router", "",
        {"gen_ai.operation.name": operation, **_attributes(record)},
        is_server=True,
        error=record.outcome if record.has_failed else "",
        span_id=trace.span_id,
    )  # fmt: skip

    decode = _decode_leg(record) if record.asked_s else None
    asks_prefill = decode if record.order == HandoffOrder.D_FIRST else None
    yield from _phases(record, trace.span_id if asks_prefill is None else asks_prefill.span_id)
    if decode is not None:
        yield decode
        yield from _at_decode(record, decode)


def _under(record: CallRecord, parent_id: str, name: str, start_s: float, end_s: float, role: str, node: str) -> Span:
    return Span(f"pd.{name}", record.trace.trace_id, parent_id, start_s, end_s, f"pd-{role}", node, {"pd.node": node})


def _phases(record: CallRecord, prefill_parent: str) -> Iterator[Span]:
    """What the router waited for until the first token. `prefill_parent`: the span of what asked the prefill node."""
    at_s, leg = record.wall_s, None
    for name, seconds in record.phases.items():
        is_remote = name in _AT_PREFILL and "handoff" in record.phases
        role, node = ("prefill", record.prefill_by) if is_remote else ("router", "")
        if is_remote and leg is None:
            end_s = at_s + sum(record.phases.get(part, 0.0) for part in _AT_PREFILL)
            leg = _under(record, prefill_parent, "prefill_leg", at_s, end_s, role, node)
            yield leg
        parent = leg.span_id if leg is not None and is_remote else record.trace.span_id
        yield _under(record, parent, name, at_s, at_s + seconds, role, node)
        at_s += seconds


def _decode_leg(record: CallRecord) -> Span:
    """From its arrival at the node, if it reported that; D-first from the call, because the prefill is a part of it."""
    wall_s = record.wall_s - record.arrived_s
    start_s = record.asked_s + wall_s
    if record.order != HandoffOrder.D_FIRST:
        start_s = max(start_s, _arrival_s(record))
    return _under(
        record, record.trace.span_id, "decode_leg", start_s, record.ended_s + wall_s, "decode", record.served_by
    )


def _arrival_s(record: CallRecord) -> float:
    """When the decode node had the request: Unix seconds on the router's clock; 0: it did not tell."""
    if record.report is None or not record.first_s:
        return 0.0
    return record.wall_s - record.arrived_s + record.first_s - record.report.first_s


def _at_decode(record: CallRecord, leg: Span) -> Iterator[Span]:
    reported = record.report.phases if record.report is not None else {}
    start_s = max(leg.start_s, _arrival_s(record))
    for name in _AT_DECODE:
        if name in reported:
            until_s = min(start_s + reported[name], leg.end_s)
            yield _under(record, leg.span_id, name, start_s, until_s, "decode", record.served_by)
            start_s = until_s


def _attributes(record: CallRecord) -> dict[str, Value]:
    found: dict[str, Value] = {
        "gen_ai.provider.name": "pd-cluster",
        "http.request.method": "POST",
        "url.path": record.path,
        "pd.request_id": record.request_id,
        "pd.route": record.order,
        "pd.reason": record.reason,
        "pd.outcome": record.outcome,
        "pd.stream": record.stream,
        "pd.prefill": record.prefill_by,
        "pd.decode": record.served_by,
    }
    if record.key:
        found["pd.key"] = record.key
    if record.status:
        found["http.response.status_code"] = record.status
    if record.has_failed:
        found["error.type"] = record.outcome
    if record.failures:
        found["pd.failures"] = "; ".join(record.failures)
    if record.model:
        found["gen_ai.request.model"] = record.model
    if (ttft_s := record.ttft_s) is not None:
        found["pd.time_to_first_token"] = ttft_s
    if record.report is not None:
        found["gen_ai.response.model"] = record.report.model
        found["gen_ai.usage.input_tokens"] = record.report.num_prompt_tokens
        found["gen_ai.usage.output_tokens"] = record.report.num_output_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = record.report.num_cached_tokens
        if record.report.num_drafts:
            found["pd.drafts.verified"] = record.report.num_drafts
            found["pd.drafts.accepted"] = record.report.num_accepted_drafts
    return found
