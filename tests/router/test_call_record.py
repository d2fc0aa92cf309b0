"""What the record of a request says: phases that add up, a line without text, spans of one trace."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from typing import TYPE_CHECKING

import orjson
import pytest

from pd_http.node_report import NodeReport, decode_report, encode_report
from pd_router.calls import trace_context
from pd_router.calls.trace_context import TraceContext, begin_trace
from pd_router.config import RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.records.call_record import CallRecord
from pd_router.records.metrics import RouterMetrics
from pd_router.records.model_metrics import BOUNDS_S, ModelTotals
from pd_router.records.slo import Slo
from pd_router.records.spans import spans_of

if TYPE_CHECKING:
    from collections.abc import Mapping

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HANDED = {"queue": 0.1, "transfer": 0.5, "admit": 0.001, "first_decode": 0.02, "prefill_leg": 0.6, "prefill_queue": 0.2}


def record(*, stream: bool = True) -> CallRecord:
    one = CallRecord("/v1/chat/completions", "req-1", 10.0, 1_700_000_000.0)
    one.model, one.stream = "demo", stream
    one.trace = TraceContext(TRACE, "00f067aa0ba902b7", "b7ad6b7169203331", is_sampled=True)
    return one


def report(phases: Mapping[str, float], first_s: float = 0.7, tokens: int = 5) -> NodeReport:
    return NodeReport("demo", 100, 64, tokens, first_s, dict(phases), "p0")


def handed_over(*, stream: bool = True, phases: Mapping[str, float] = HANDED) -> CallRecord:
    """Asked P at 10.1, had its ticket at 10.2, asked D at 10.21, which answered at 11.0."""
    one = record(stream=stream)
    one.until(10.1, "plan")
    one.until(10.2, "ticket")
    one.until(10.21, "plan")
    one.answered(11.0, "d0")
    one.prefill_by = "p0"
    if stream:
        one.first_piece(11.01)
        for at_s in (11.11, 11.31):
            ModelTotals().piece(one, at_s)
    one.reported(report(phases), is_first_node=True)
    one.end(11.5, "ok", 200)
    return one


def test_a_handoff_is_split_by_what_its_prefill_node_said() -> None:
    one = handed_over()
    assert one.ttft_s == pytest.approx(1.01)
    assert one.phases == pytest.approx(
        {"plan": 0.11, "send": 0.01, "prefill_queue": 0.2, "prefill": 0.4, "handoff": 0.29}
    )
    assert sum(one.phases.values()) == pytest.approx(one.ttft_s)


def test_an_answer_that_is_not_streamed_has_the_first_token_s_time_without_the_generation() -> None:
    one = handed_over(stream=False)
    assert one.ttft_s == pytest.approx(0.11 + 0.1 + 0.7)
    assert one.phases["handoff"] == pytest.approx(0.2)
    assert one.tpot_s is None


def test_a_local_prefill_is_split_by_its_node() -> None:
    one = record()
    one.until(10.1, "plan")
    one.answered(11.0, "d0")
    one.first_piece(11.0)
    one.reported(report({"queue": 0.2, "prefill": 0.4}), is_first_node=True)
    assert one.phases == pytest.approx(
        {"plan": 0.1, "send": 0.0, "queue": 0.2, "prefill": 0.4, "node": 0.1, "network": 0.2}
    )


@pytest.mark.long_cases
@pytest.mark.parametrize("seed", range(200))
def test_phases_always_add_up_and_none_is_negative(seed: int) -> None:
    """Whatever nodes tell: their clocks are not ours, and a request may have been tried before."""
    rng = random.Random(seed)
    one = record(stream=rng.random() < 0.7)
    now_s = 10.0
    for phase in rng.choices(["plan", "ticket", "retry"], k=rng.randrange(1, 6)):
        now_s += rng.expovariate(10)
        one.until(now_s, phase)
    now_s += rng.expovariate(3)
    one.answered(now_s, "d0")
    if one.stream:
        now_s += rng.expovariate(100)
        one.first_piece(now_s)
    told = {name: rng.expovariate(4) for name in HANDED if rng.random() < 0.7}
    one.reported(report(told, rng.expovariate(2)), is_first_node=rng.random() < 0.9)
    if one.stream or "answer" not in one.phases:
        assert one.ttft_s is not None
        assert math.isclose(sum(one.phases.values()), one.ttft_s, abs_tol=1e-9)
    assert all(seconds >= -1e-12 for seconds in one.phases.values()), one.phases


def test_a_continued_stream_keeps_the_first_node_s_time_whole() -> None:
    one = record()
    one.until(10.1, "plan")
    one.answered(11.0, "d0")
    one.first_piece(11.0)
    one.reported(report({"queue": 0.2, "prefill": 0.4}), is_first_node=False)
    assert one.phases == pytest.approx({"plan": 0.1, "answer": 0.9, "send": 0.0})
    assert one.line()["tokens"] == {"prompt": 100, "cached": 64, "output": 5}


def test_the_line_is_one_json_object_without_text() -> None:
    one = handed_over()
    one.failed("prefill p1 died")
    line = orjson.loads(orjson.dumps(one.line()))
    assert line["itl_ms"] == {"mean": 150.0, "max": 200.0}
    assert line["failures"] == ["prefill p1 died"]
    assert (line["id"], line["trace"], line["prefill"], line["decode"]) == ("req-1", TRACE, "p0", "d0")
    assert line["total_ms"] == 1500.0
    assert sum(line["phases_ms"].values()) == pytest.approx(line["ttft_ms"], abs=0.01)


def test_a_first_token_is_compared_with_what_was_predicted_for_it() -> None:
    """The time before the choice is a part of both."""
    one = handed_over()
    assert "predicted_ttft_ms" not in one.line()
    one.predict(10.1, 1.91)
    assert one.predicted_s == pytest.approx(2.01)
    assert one.line()["predicted_ttft_ms"] == 2010.0
    one.failed("stream d0 died")
    assert (one.is_retried, one.failures) == (False, ["stream d0 died"]), "its first token had come"
    early = record()
    early.predict(10.1, 1.91)
    early.failed("prefill p1 died")
    early.predict(10.9, 0.01)
    assert early.is_retried
    assert early.predicted_s == pytest.approx(2.01), "the first word is compared"


def test_ratios_are_counted_by_order_and_missing_ones_apart() -> None:
    metrics = RouterMetrics(NodeTable(RouterConfig(start_empty=True), lambda: 0.0))
    right, continued, retried, blind = (handed_over() for _ in range(4))
    for one in (right, continued, retried):
        one.predict(10.1, 0.41)
    continued.failed("stream d0 died")  # after its first token
    retried.is_retried = True
    for one in (right, continued, retried, blind, record()):  # the last one has no first token
        one.order = "p-first"
        metrics.observe(one)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"pd_router_{name}", {"order": "p-first", **labels})

    assert value("time_to_first_token_ratio_sum") == pytest.approx(2 * 1.01 / 0.51)
    assert value("time_to_first_token_ratio_count") == value("time_to_first_token_ratio_bucket", le="2.0") == 2
    assert value("time_to_first_token_ratio_bucket", le="1.5") == 0
    assert [value("unpredicted_requests_total", reason=one) for one in ("retried", "no-figures")] == [1, 1]


def test_the_line_and_the_span_say_what_was_drafted() -> None:
    one = handed_over()
    assert "drafts" not in one.line()
    assert not any(name.startswith("pd.drafts") for span in spans_of(one) for name in span.attributes)
    one.report = NodeReport("demo", 100, 64, 30, num_drafts=40, num_accepted_drafts=22)
    assert one.line()["drafts"] == {"verified": 40, "accepted": 22}
    attributes = next(iter(spans_of(one))).attributes
    assert (attributes["pd.drafts.verified"], attributes["pd.drafts.accepted"]) == (40, 22)


def test_reports_of_older_and_newer_releases_are_read() -> None:
    older = b'["demo",100,64,5,0.7,{},"p0"]'
    assert decode_report(older) == report({})
    assert decode_report(older[:-1] + b",40,22,1]") == NodeReport("demo", 100, 64, 5, 0.7, {}, "p0", 40, 22)


def test_the_tokens_of_a_piece_share_the_time_before_it() -> None:
    one, totals = record(), ModelTotals()
    one.answered(11.0, "d0")
    one.first_piece(11.0)
    totals.piece(one, 11.09, 3)
    totals.piece(one, 11.1)
    one.reported(report({}, tokens=5), is_first_node=True)
    one.end(11.1, "ok", 200)
    assert one.line()["itl_ms"] == {"mean": 25.0, "max": 90.0}, "by tokens, and by pieces"
    assert one.tpot_s == pytest.approx(0.1 / 4)
    assert sum(totals.gaps) == 4
    assert totals.gaps_s == pytest.approx(0.1)
    assert (totals.gaps[bisect_left(BOUNDS_S, 0.03)], totals.gaps[bisect_left(BOUNDS_S, 0.01)]) == (3, 1)


def test_spans_are_one_trace_inside_the_request() -> None:
    one = handed_over()
    root, *others = spans_of(one)
    assert (root.name, root.parent_id, root.span_id) == ("chat demo", "00f067aa0ba902b7", "b7ad6b7169203331")
    assert (root.start_s, root.end_s) == (1_700_000_000.0, 1_700_000_001.5)
    known = {root.span_id, *(span.span_id for span in others)}
    assert len(known) == 1 + len(others)
    for span in others:
        assert span.trace_id == TRACE
        assert span.parent_id in known
        assert root.start_s - 1e-6 <= span.start_s <= span.end_s <= root.end_s + 1e-6, span
    by_name = {span.name: span for span in others}
    assert (by_name["pd.prefill_leg"].service, by_name["pd.prefill_leg"].instance) == ("pd-prefill", "p0")
    assert by_name["pd.prefill_leg"].end_s - by_name["pd.prefill_leg"].start_s == pytest.approx(0.6, abs=1e-5)
    assert (by_name["pd.decode_leg"].service, by_name["pd.transfer"].parent_id) == (
        "pd-decode", by_name["pd.decode_leg"].span_id,
    )  # fmt: skip
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    assert root.error == ""


def test_d_first_the_prefill_is_a_part_of_the_decode_leg() -> None:
    one = record()
    one.until(10.1, "plan")
    one.answered(11.0, "d0")
    one.prefill_by, one.order = "p0", "d-first"
    one.first_piece(11.01)
    one.reported(report(HANDED), is_first_node=True)
    one.end(11.5, "ok", 200)
    by_name = {span.name: span for span in spans_of(one)}
    decode, leg, queue = (by_name[f"pd.{name}"] for name in ("decode_leg", "prefill_leg", "queue"))
    assert (leg.parent_id, decode.parent_id) == (decode.span_id, "b7ad6b7169203331")
    assert decode.start_s == pytest.approx(leg.start_s, abs=1e-5)
    assert leg.end_s <= decode.end_s
    assert queue.start_s - decode.start_s == pytest.approx(11.01 - 0.7 - 10.1, abs=1e-5), "its way to the node"
    ends_s = max(span.end_s for span in (by_name["pd.send"], by_name["pd.handoff"], leg))
    assert by_name["pd.send"].end_s == ends_s, "it is the last phase"


def test_a_request_that_no_node_answered_has_its_span_too() -> None:
    one = record()
    one.until(10.1, "plan")
    one.end(10.2, "failed", 503)
    root, *others = spans_of(one)
    assert (root.error, root.attributes["error.type"], root.attributes["http.response.status_code"]) == (
        "failed", "failed", 503,
    )  # fmt: skip
    assert [span.name for span in others] == ["pd.plan"]


@pytest.mark.parametrize(
    ("outcome", "slo", "result"),
    [
        ("ok", Slo(2.0, 1.0), "met"),
        ("ok", Slo(1.0, 1.0), "ttft"),
        ("ok", Slo(2.0, 0.05), "tpot"),
        ("ok", Slo(0.0, 0.05), "tpot"),
        ("broken", Slo(2.0, 1.0), "failed"),
        ("refused", Slo(2.0, 1.0), ""),
        ("client_gone", Slo(0.1, 0.1), ""),
    ],
)
def test_targets(outcome: str, slo: Slo, result: str) -> None:
    one = handed_over()
    one.outcome = outcome
    assert one.tpot_s == pytest.approx(0.3 / 4)
    assert slo.result(one) == result


@pytest.mark.parametrize(
    "header",
    ["", "00", f"00-{TRACE}-00f067aa0ba902b7", f"ff-{TRACE}-00f067aa0ba902b7-01", f"00-{'0' * 32}-00f067aa0ba902b7-01",
     f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-00f067aa0ba902b7-01", f"00-{TRACE}-00f067aa0ba902b7-01-more",
     "00-" + "é" * 32 + "-00f067aa0ba902b7-01"],
)  # fmt: skip
def test_a_header_that_is_no_trace_begins_one(header: str) -> None:
    trace = begin_trace(header, 0.0)
    assert (len(trace.trace_id), trace.parent_id, trace.is_sampled) == (32, "", False)
    assert trace.trace_id != TRACE


def test_the_client_s_trace_goes_on() -> None:
    trace = begin_trace(f"00-{TRACE}-00f067aa0ba902b7-01", 0.0)
    assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (TRACE, "00f067aa0ba902b7", True)
    assert trace.header == f"00-{TRACE}-{trace.span_id}-01"
    assert not begin_trace(f"00-{TRACE}-00f067aa0ba902b7-00", 0.0).is_sampled
    assert begin_trace(f"01-{TRACE}-00f067aa0ba902b7-00-later", 1.0).trace_id == TRACE, "of a later version"


def test_a_share_of_the_traces_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_context, "random", random.Random(5))
    assert 400 < sum(begin_trace(None, 0.25).is_sampled for _ in range(2000)) < 600


def test_reports_survive_the_wire_and_anything_else_is_none() -> None:
    one = report(HANDED)
    assert decode_report(encode_report(one)) == one
    for junk in (b"", b"{}", b"[1]", b"\xff", b"[" * 5000, b'["m","x"]'):
        assert decode_report(junk) is None
