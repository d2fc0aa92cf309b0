"""What an operator sees of one request: its line and its trace, through a real router, P and D."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.cluster import Launched, Launcher
from tests.deadlines import HANG_S
from tests.deploy import metric_names
from tests.integration.system import wait_until
from tests.otlp_receiver import Collector, collecting
from tests.scheduling.test_host_tier import manager as host_manager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.system import System

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
PATIENT = f"--health-timeout-s={HANG_S:g}"
USAGE = {"include_usage": True}
_SUFFIX = re.compile("_(bucket|sum|count|total)$")
ON_EVENT = {
    "pd_loads_failed",
    "pd_kv_peer_bytes_per_second",
    "pd_kv_peer_slow",
    "pd_quarantined_blocks",
    "pd_handshakes_failed",
}
# Of nodes that draft: `tests/engine/test_drafted_answers.py` has these counters
OF_DRAFTS = {
    "pd_spec_decode_num_drafts", "pd_spec_decode_num_draft_tokens", "pd_spec_decode_num_accepted_tokens",
    "pd_spec_decode_num_accepted_tokens_per_pos",
}  # fmt: skip
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # trace and span of a client


class Seen:
    """A router over the system's P and D, which logs and traces every request."""

    def __init__(self, router: Launched, system: System, collector: Collector) -> None:
        self.router = router
        self.system = system
        self.collector = collector

    def ask(self, request_id: str, salt: str = "", route: str = "p-first", **fields: Any) -> httpx.Response:
        headers = {"x-request-id": request_id, "x-pd-route": route}
        headers["traceparent"] = f"00-{CLIENT[0][: -len(request_id)]}{request_id}-{CLIENT[1]}-01"
        body = {"model": "demo_model", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body["cache_salt"] = salt or request_id
        return httpx.post(
            f"{self.router.url}/v1/completions", json=body | fields, headers=headers, timeout=120, trust_env=False
        )

    def line(self, request_id: str) -> dict[str, Any]:
        text = self.router.wait_line(f'"id":"{request_id}"')
        assert "quick brown" not in text, "no text of the client"
        line: dict[str, Any] = json.loads(text)
        return line


@pytest.fixture(scope="module")
def seen(shared_system: System) -> Iterator[Seen]:
    with collecting() as collector, Launcher() as launcher:
        nodes = [f"--prefill={shared_system.urls['prefill']}", f"--decode={shared_system.urls['decode']}"]
        flags = ("--request-log=all", f"--otlp-url={collector.url}", "--trace-ratio=0", "--slo-ttft-ms=60000")
        router = launcher.command("router", "--port=0", PATIENT, *nodes, *flags)
        router.wait_line("router ready on ")
        one = Seen(router, shared_system, collector)
        one.ask("ab00", "warm")  # the first handoff waits for the link
        yield one


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("route", "request_id"), [("p-first", "abc"), ("d-first", "bcd")])
def test_a_handed_over_request_is_explained_from_its_line(
    seen: Seen, route: str, request_id: str, *, stream: bool
) -> None:
    request_id += "01" if stream else "02"
    assert seen.ask(request_id, route=route, stream=stream).status_code == 200
    line = seen.line(request_id)
    assert (line["route"], line["outcome"], line["status"], line["stream"]) == (route, "ok", 200, stream)
    assert (line["prefill"], line["decode"], line["model"], line["key"]) == ("prefill", "decode", "demo_model", "")
    assert line["tokens"]["output"] == 8
    assert line["tokens"]["prompt"] > 100
    phases = line["phases_ms"]
    assert abs(sum(phases.values()) - line["ttft_ms"]) < 2.0
    assert {"plan", "prefill_queue", "prefill", "handoff"} <= phases.keys()
    assert all(value >= 0 for value in phases.values())
    assert phases["prefill"] > 0
    assert line["ttft_ms"] <= line["total_ms"] + 0.01
    assert {"queue", "transfer", "link", "prefill_leg"} <= line["node_ms"].keys()
    assert ("itl_ms" in line) == stream


def test_a_request_that_is_not_handed_over_too(seen: Seen) -> None:
    """It has the spans and phases of the node that read the prompt."""
    with Launcher() as launcher:
        mixed = f"--mixed={seen.system.urls['decode']}"
        router = launcher.command("router", "--port=0", PATIENT, mixed, "--request-log=all")
        router.wait_line("router ready on ")
        alone = Seen(router, seen.system, seen.collector)
        for request_id, stream in (("ad01", True), ("ad02", False)):
            assert alone.ask(request_id, stream=stream, route="p-first").status_code == 200
            line = alone.line(request_id)
            assert (line["route"], line["prefill"], line["decode"]) == ("direct", "decode", "decode")
            assert {"plan", "queue", "prefill", "node", "network"} <= line["phases_ms"].keys()
            assert abs(sum(line["phases_ms"].values()) - line["ttft_ms"]) < 2.0
        assert line["trace"] == "", "this router traces nothing"


@pytest.mark.parametrize(("route", "request_id"), [("p-first", "acf0"), ("d-first", "acf1")])
def test_a_trace_goes_from_the_client_through_router_p_and_d(seen: Seen, route: str, request_id: str) -> None:
    assert seen.ask(request_id, route=route, stream=True).status_code == 200
    line = seen.line(request_id)
    spans = seen.collector.wait_for(line["trace"], 10)
    assert line["trace"].endswith(request_id)
    by_name = {span.name: span for span in spans}
    assert len(by_name) == len(spans)
    root = by_name["text_completion demo_model"]
    assert (root.parent_id, root.service) == (CLIENT[1], "pd-router")
    known = {span.span_id for span in spans}
    assert all(span.parent_id in known for span in spans if span is not root)
    assert {span.service: span.instance for span in spans} == {
        "pd-router": "", "pd-prefill": "prefill", "pd-decode": "decode",
    }  # fmt: skip
    leg, decode = by_name["pd.prefill_leg"], by_name["pd.decode_leg"]
    assert leg.parent_id == (root if route == "p-first" else decode).span_id, "of what asked the prefill node"
    if route == "d-first":
        assert decode.start_s - 1e-3 <= leg.start_s <= leg.end_s <= decode.end_s + 1e-3
    assert by_name["pd.prefill_queue"].parent_id == leg.span_id
    assert by_name["pd.transfer"].parent_id == by_name["pd.decode_leg"].span_id
    assert all(root.start_s - 1e-3 <= span.start_s <= span.end_s <= root.end_s + 1e-3 for span in spans)
    facts = root.attributes
    assert facts["gen_ai.request.model"] == facts["gen_ai.response.model"] == "demo_model"
    assert (facts["gen_ai.operation.name"], facts["gen_ai.usage.output_tokens"]) == ("text_completion", 8)
    assert facts["gen_ai.usage.input_tokens"] == line["tokens"]["prompt"]
    assert (facts["pd.route"], facts["pd.prefill"], facts["pd.decode"]) == (route, "prefill", "decode")
    assert not any("quick brown" in str(span) for span in spans)


@pytest.mark.parametrize("stream", [True, False])
def test_usage_has_what_the_prefill_node_had_cached(seen: Seen, *, stream: bool) -> None:
    """D has nothing of the prompt: only P has met it before."""
    salt = f"cached {stream}"
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    assert seen.system.ask_node("prefill", "/v1/completions", body).num_cached_tokens == 0
    request_id = f"aca{int(stream)}"
    answer = seen.ask(request_id, salt, stream=stream, stream_options=USAGE if stream else None)
    usage = json.loads(answer.text.split("data: ")[-2])["usage"] if stream else answer.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 128
    assert seen.line(request_id)["tokens"]["cached"] >= 128


def test_timings_of_an_answer_that_is_not_streamed(seen: Seen) -> None:
    answer = seen.ask("acd0", stream_options={"include_timings": True})
    assert answer.status_code == 200, answer.text
    assert {"queue", "transfer", "first_decode", "prefill_leg"} <= answer.json()["usage"]["timings"].keys()
    assert seen.ask("acd1", stream_options={"include_usage": True}).status_code == 400
    assert "x-pd-report" not in answer.headers


def test_metrics_of_the_client_s_side(seen: Seen) -> None:
    seen.ask("acd2", stream=True)
    seen.line("acd2")
    samples = (
        'pd_router_time_to_first_token_seconds_count{model="demo_model",order="p-first"}',
        'pd_router_inter_token_latency_seconds_count{model="demo_model"}',
        'pd_router_slo_requests_total{model="demo_model",result="met"}',
        'pd_router_generation_tokens_total{model="demo_model"}',
    )

    def router_page() -> str:
        return httpx.get(f"{seen.router.url}/metrics", trust_env=False).text

    wait_until(lambda: all(sample in router_page() for sample in samples), router_page)
    for page in (router_page(), httpx.get(f"{seen.system.urls['decode']}/metrics", trust_env=False).text):
        assert "_created" not in page


def of_host_cache() -> set[str]:
    """Of nodes with a host cache."""
    host = host_manager(2, 2).host
    return {f"pd_{name.partition('|')[0].removesuffix('_total')}" for name in host.counters | host.gauges}


def test_a_live_cluster_exports_every_metric_of_dashboard_and_alerts(seen: Seen) -> None:
    """Names of families: some have no sample before their event."""
    seen.ask("acd3", stream=True)
    seen.line("acd3")
    urls = (seen.router.url, *seen.system.urls.values())
    texts = [httpx.get(f"{url}/metrics", trust_env=False).text for url in urls]
    live = {line.split()[2] for text in texts for line in text.splitlines() if line.startswith("# TYPE")}
    expressions = metric_names.dashboard_expressions() | metric_names.alert_expressions()
    read = {_SUFFIX.sub("", name) for text in expressions.values() for name in metric_names.names_in(text)}
    unknown = read - {_SUFFIX.sub("", name) for name in live}
    assert unknown <= ON_EVENT | OF_DRAFTS | of_host_cache(), unknown
