"""Where records go: which requests have a line, what a slow collector costs (nothing), what is lost (counted)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import orjson
import pytest

from pd_http.errors import StartupError
from pd_router.calls.trace_context import TraceContext
from pd_router.config import RouterConfig
from pd_router.nodes.node_table import NodeTable
from pd_router.records import otlp, outbox
from pd_router.records.call_record import CallRecord
from pd_router.records.metrics import RouterMetrics
from pd_router.records.outbox import Outbox
from pd_router.records.request_sinks import RequestSinks, write_lines
from tests.deadlines import HANG_S
from tests.otlp_receiver import collecting

if TYPE_CHECKING:
    from collections.abc import Sequence

WAIT_S = HANG_S


def ended(outcome: str = "ok", total_s: float = 0.1, *, is_sampled: bool = False) -> CallRecord:
    one = CallRecord("/v1/completions", "req-1", 10.0, 1e9)
    one.trace = TraceContext("1" * 32, "", "2" * 16, is_sampled)
    one.until(10.05, "plan")
    one.end(10.0 + total_s, outcome, 200)
    return one


def parts(**settings: object) -> tuple[RouterConfig, RouterMetrics]:
    config = RouterConfig(start_empty=True, slow_ttft_ms=1000.0, **settings)  # type: ignore[arg-type]
    return config, RouterMetrics(NodeTable(config, lambda: 0.0))


def lost(metrics: RouterMetrics, kind: str, reason: str) -> float:
    labels = {"kind": kind, "reason": reason}
    return metrics.registry.get_sample_value("pd_router_records_lost_total", labels) or 0.0


@pytest.mark.parametrize(
    ("level", "written"),
    [("off", []), ("errors", ["failed"]), ("slow", ["failed", "slow"]), ("all", ["failed", "slow", "ok"])],
)
def test_levels_of_the_log(level: str, written: list[str]) -> None:
    lines: list[str] = []
    config, metrics = parts(request_log=level)
    names = {"failed": ended("broken"), "slow": ended(total_s=2.0), "ok": ended()}
    sinks = RequestSinks(
        config, metrics, write=lambda records: lines.extend(n for r in records for n in names if names[n] is r)
    )
    for one in names.values():
        sinks.take(one)
    sinks.close()
    assert lines == written
    assert metrics.registry.get_sample_value("pd_router_request_seconds_count", {"order": "none"}) == 3


def test_slow_and_failed_requests_are_always_traced() -> None:
    traced: list[CallRecord] = []
    config, metrics = parts(request_log="off")
    sinks = RequestSinks(config, metrics, traced.extend)
    some = [ended(), ended(is_sampled=True), ended("failed"), ended(total_s=2.0), ended("refused")]
    for one in some:
        sinks.take(one)
    sinks.close()
    assert traced == [some[1], some[2], some[3]]


def test_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines([ended(), ended("failed")])
    first, second = capsys.readouterr().err.splitlines()
    assert (orjson.loads(first)["outcome"], orjson.loads(second)["outcome"]) == ("ok", "failed")


def test_a_full_outbox_loses_and_counts_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING", 3)
    begun, go_on = threading.Event(), threading.Event()
    written: list[int] = []
    counts: list[tuple[str, int]] = []

    def write(items: Sequence[int]) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        written.extend(items)

    box: Outbox[int] = Outbox("test", write, lambda reason, count: counts.append((reason, count)))
    box.put(0)
    assert begun.wait(WAIT_S)
    for item in range(1, 6):
        box.put(item)
    assert counts == [("full", 1), ("full", 1)]
    go_on.set()
    box.close(WAIT_S)
    assert written == [0, 1, 2, 3]


def test_a_writer_that_fails_loses_its_batch_only(caplog: pytest.LogCaptureFixture) -> None:
    counts: list[tuple[str, int]] = []
    seen = threading.Event()
    written: list[int] = []

    def write(items: Sequence[int]) -> None:
        if not seen.is_set():
            seen.set()
            raise OSError("the disk is full")
        written.extend(items)

    box: Outbox[int] = Outbox("test", write, lambda reason, count: counts.append((reason, count)))
    box.put(1)
    assert seen.wait(WAIT_S)
    box.put(2)
    box.close(WAIT_S)
    assert (counts, written) == ([("failed", 1)], [2])
    assert "the disk is full" in caplog.text


def test_a_hanging_writer_ends_the_router_late_by_its_deadline_only() -> None:
    begun, go_on, ended = (threading.Event() for _ in range(3))

    def hang(_: Sequence[int]) -> None:
        begun.set()
        go_on.wait(WAIT_S)
        ended.set()

    box: Outbox[int] = Outbox("test", hang, lambda reason, count: None)
    box.put(1)
    assert begun.wait(WAIT_S)
    box.close(0.01)
    assert not ended.is_set(), "it was waited for"
    go_on.set()


def test_spans_reach_a_collector_by_otlp_and_a_refusal_is_counted() -> None:
    config, metrics = parts(request_log="off")
    with collecting() as collector:
        sinks = RequestSinks(config, metrics, otlp.make_exporter(collector.url))
        sinks.take(ended("failed"))
        spans = collector.wait_for("1" * 32, 2)
        assert [(span.name, span.is_error, span.service) for span in spans] == [
            ("text_completion", True, "pd-router"), ("pd.plan", False, "pd-router"),
        ]  # fmt: skip
        collector.status = 400  # which no exporter tries again
        sinks.take(ended("failed"))
        sinks.close()
    assert lost(metrics, "trace", "failed") == 1


@pytest.mark.long
def test_a_collector_that_hangs_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING", 2)
    monkeypatch.setattr(outbox, "CLOSE_S", 0.01)
    config, metrics = parts(request_log="off")
    with collecting() as collector:
        collector.go_on.clear()
        sinks = RequestSinks(config, metrics, otlp.make_exporter(collector.url))
        for _ in range(5000):
            sinks.take(ended("failed"))
        assert lost(metrics, "trace", "full") > 4000
        collector.go_on.set()
        sinks.close()


def test_without_the_extra_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    otlp.check_exporter()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install 'pd-cluster\[otel\]'"):
        otlp.check_exporter()
    with pytest.raises(StartupError, match="bad collector URL"):
        RouterConfig(start_empty=True, otlp_url="collector:4318")


def test_gaps_are_a_histogram() -> None:
    _, metrics = parts()
    one = ended()
    one.first_piece(10.0)
    for gap_s in (0.0005, 0.001, 0.02, 99.0):
        one.last_s = 0.0
        metrics.models.of("demo").piece(one, gap_s)
    name, read = "pd_router_inter_token_latency_seconds", metrics.registry.get_sample_value
    buckets = [read(f"{name}_bucket", {"model": "demo", "le": le}) for le in ("0.001", "0.02", "10.0", "+Inf")]
    assert buckets == [2, 3, 3, 4]
    assert read(f"{name}_count", {"model": "demo"}) == 4
    assert read(f"{name}_sum", {"model": "demo"}) == pytest.approx(99.0215)
    assert "_created" not in metrics.exposition().decode()
    one.model = "demo"
    metrics.observe(one)
    assert read("pd_router_longest_gap_seconds_sum", {"model": "demo"}) == pytest.approx(99.0)


def test_a_piece_of_several_tokens_is_as_many_gaps() -> None:
    _, metrics = parts()
    one = ended()
    one.first_piece(10.0)
    metrics.models.of("demo").piece(one, 10.09, 3)
    name, read = "pd_router_inter_token_latency_seconds", metrics.registry.get_sample_value
    assert [read(f"{name}_bucket", {"model": "demo", "le": le}) for le in ("0.02", "0.03", "+Inf")] == [0, 3, 3]
    assert read(f"{name}_sum", {"model": "demo"}) == pytest.approx(0.09)
