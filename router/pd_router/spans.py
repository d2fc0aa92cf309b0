"""The spans of one request, made from its record when all is over. Pure, except for drawn ids.

Nodes make no spans: they report durations, and the router places them on its own clock. So the clocks of the machines
need not agree. Attributes are `gen_ai.*` where the semantic conventions have one, else `pd.*`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_router.trace_context import new_span_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_router.request_record import RequestRecord

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


def spans_of(record: RequestRecord) -> Iterator[Span]:
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

    def under(parent: str, name: str, start_s: float, end_s: float, role: str, node: str) -> Span:
        return Span(f"pd.{name}", trace.trace_id, parent, start_s, end_s, f"pd-{role}", node, {"pd.node": node})

    at_s, leg = record.wall_s, None
    for name, seconds in record.phases.items():
        is_remote = name in _AT_PREFILL and "handoff" in record.phases
        role, node = ("prefill", record.prefill_by) if is_remote else ("router", "")
        if is_remote and leg is None:
            end_s = at_s + sum(record.phases.get(part, 0.0) for part in _AT_PREFILL)
            leg = under(trace.span_id, "prefill_leg", at_s, end_s, role, node)
            yield leg
        parent = leg.span_id if leg is not None and is_remote else trace.span_id
        yield under(parent, name, at_s, at_s + seconds, role, node)
        at_s += seconds
    if not record.asked_s:
        return
    start_s, end_s = record.asked_s + wall_s, record.ended_s + wall_s
    if record.report is not None and record.first_s:  # its arrival at the node
        start_s = max(start_s, record.first_s + wall_s - record.report.first_s)
    decode = under(trace.span_id, "decode_leg", start_s, end_s, "decode", record.served_by)
    yield decode
    if record.report is not None:
        told = record.report.phases
        for name in _AT_DECODE:
            if name in told:
                until_s = min(start_s + told[name], end_s)
                yield under(decode.span_id, name, start_s, until_s, "decode", record.served_by)
                start_s = until_s


def _attributes(record: RequestRecord) -> dict[str, Value]:
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
    return found
