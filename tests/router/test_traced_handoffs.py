"""A prefill node that makes spans of its own, as under OpenTelemetry's instrumentation: they join the trace."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pd_cluster.server.app import create_app
from tests.otlp_receiver import Collector, collecting
from tests.router.router_process import serving as serving_router
from tests.router.router_process import until
from tests.server.fake_engine import FakeEngine, decodes, says
from tests.server.live_server import make_state, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.router.router_process import Router

pytestmark = pytest.mark.anyio
TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STATE = "vendor=kept"
ROLES = ("prefill", "decode")


class Instrumented:
    """Exports a span for each call of the app, under the span that the call's `traceparent` names."""

    def __init__(self, app: ASGIApp, collector: Collector) -> None:
        self._app = app
        resource = Resource({"service.name": "p", "service.instance.id": "p"})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces")
        self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self.states: list[str] = []  # `tracestate` of the calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.states.append(headers.get("tracestate", ""))
        parent = TraceContextTextMapPropagator().extract(headers)
        with self._provider.get_tracer("test").start_as_current_span("p.prefill", parent):
            await self._app(scope, receive, send)

    def close(self) -> None:
        self._provider.shutdown()


class At:
    def __init__(self, url: str) -> None:
        self.url = url


@contextlib.asynccontextmanager
async def node(app: Instrumented | ASGIApp, engine: FakeEngine) -> AsyncIterator[At]:
    async with serving(app) as url:  # type: ignore[arg-type]
        yield At(url)
    await engine.close()


@contextlib.asynccontextmanager
async def cluster(collector: Collector, **settings: Any) -> AsyncIterator[tuple[Router, Instrumented]]:
    """A router of these settings before an instrumented prefill node and a decode node."""
    engines = FakeEngine(says([5]), engine_id="engine-of-p"), FakeEngine(decodes([5, 6, 7]))
    apps = [
        create_app(make_state(engine, role=role, node_id=role)) for engine, role in zip(engines, ROLES, strict=True)
    ]
    seen = Instrumented(apps[0], collector)
    async with (
        node(seen, engines[0]) as p,
        node(apps[1], engines[1]) as d,
        serving_router(prefill=[p], decode=[d], **settings) as router,
    ):
        yield router, seen
    seen.close()


async def complete(router: Router, headers: dict[str, str]) -> None:
    """A request that the prefill node reads."""
    body = {"model": "demo", "prompt": "Hello there.", "max_tokens": 3}
    async with router.session.post(f"{router.url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["x-pd-prefill"] == "engine-of-p"


@pytest.mark.long
@pytest.mark.parametrize("route", ["p-first", "d-first"])
async def test_the_spans_of_a_prefill_node_hang_under_the_request(route: str) -> None:
    with collecting() as collector:
        async with cluster(collector, otlp_url=collector.url, trace_ratio=0.0) as (router, seen):
            headers = {"x-pd-route": route, "traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": STATE}
            await complete(router, headers)
            await until(lambda: {span.service for span in collector.of(TRACE)} >= {"p", "pd-router"})
            spans = collector.of(TRACE)
            assert {span.trace_id for span in collector.spans} == {TRACE}, "one trace"
            [root] = [span for span in spans if span.parent_id == CLIENT]
            [own] = [span for span in spans if span.name == "p.prefill"]
            assert (root.service, own.parent_id) == ("pd-router", root.span_id)
            known = {span.span_id for span in spans}
            assert all(span.parent_id in known for span in spans if span is not root)
            assert seen.states == [STATE]


@pytest.mark.long
@pytest.mark.parametrize("state", ["v=é", "v=" + "é" * 20_000, "v=" + "x" * 5000], ids=["odd", "huge", "long"])
async def test_a_state_that_does_not_go_on_unchanged_is_left_out(state: str) -> None:
    """The client's header fails no prefill: P hears the trace without it."""
    with collecting() as collector:
        async with cluster(collector) as (router, seen):
            await complete(router, {"x-pd-route": "d-first", "tracestate": state})
            assert seen.states == [""]
