"""What a client sends can neither crash the router nor put a node out of service."""

from __future__ import annotations

import asyncio
import io
import logging
from typing import TYPE_CHECKING

import orjson
import pytest
from aiohttp import web

from pd_cluster.server.app import create_app
from pd_http.node_report import NodeReport, encode_report
from pd_router.nodes.node_report import report
from pd_router.watch.health import MAX_MODELS, HealthPoller
from tests.bad_bodies import BAD_BODIES, OVERSIZED, check_error, nested
from tests.http.answer import CHAT, HI
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, Seen, running
from tests.router.router_process import serving, until
from tests.server import live_server
from tests.server.fake_engine import FakeEngine, says

if TYPE_CHECKING:
    from pd_router.calls.body import RequestBody

pytestmark = pytest.mark.anyio


class RealNode(FakeNode):
    """Only its address: what listens there is a node's own app over a scripted engine."""

    def __init__(self, role: str, url: str) -> None:
        super().__init__(role, fakes.decode)
        self.url = url


@pytest.mark.long
@pytest.mark.parametrize("order", ["p-first", "d-first"])
async def test_bad_bodies_leave_every_node_healthy(order: str) -> None:
    engines = [FakeEngine(says([5]), engine_id=role) for role in ("prefill", "decode")]
    states = [live_server.make_state(engine, role=engine.ready.engine_id) for engine in engines if engine.ready]
    async with (
        live_server.serving(create_app(states[0])) as p,
        live_server.serving(create_app(states[1])) as d,
        serving([RealNode("prefill", p)], [RealNode("decode", d)], eject_after=1) as router,
    ):
        headers = {"x-pd-route": order}
        for name, (path, body) in list(BAD_BODIES.items()) * 10:
            async with router.session.post(router.url + path, data=body, headers=headers) as answer:
                assert answer.status == 400, name
                check_error(await answer.json())
        for path in (CHAT, "/v1/completions", "/tokenize"):
            for _ in range(10):
                data = io.BytesIO(OVERSIZED)
                async with router.session.post(router.url + path, data=data, headers=headers) as answer:
                    assert answer.status == 413
                    check_error(await answer.json())
        await router.idle()
        assert all(node["healthy"] for node in report(router.services.table))
        assert engines[0].requests == engines[1].requests == []
    for engine in engines:
        await engine.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "raw",
    [
        b'{"\xff":1}',
        b'{"x":' + nested(100_000) + b"}",
        b"[" * 100_000,
        b'{"x":' * 100_000,
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
async def test_the_router_refuses_by_itself_what_it_cannot_take_apart(path: str, raw: bytes) -> None:
    d = FakeNode("decode", fakes.decode)
    async with running(d), serving(None, [d]) as router:
        async with router.session.post(router.url + path, data=raw) as answer:
            assert answer.status == 400
            check_error(await answer.json())
        assert d.seen == []


async def test_a_field_that_is_no_text_is_the_nodes_to_judge() -> None:
    from pd_router.calls.body import RequestBody

    body = RequestBody(b'{"model":"\xff","n":1' + b"0" * 400 + b',"stream":' + nested(500) + b"}")
    assert (body.model, body.num_samples, body.wants_stream) == (None, 128, False)
    assert b'"model":"\xff"' in body.plain()


@pytest.mark.parametrize("blanks", [b"", b" \n", b" " * 100])
@pytest.mark.parametrize(
    ("prompt", "several"), [(b'["a"]', True), (b"[[1]]", True), (b"[1]", False), (b'"[["', False), (b"[]", False)]
)
async def test_several_prompts_are_seen_after_any_number_of_blanks(blanks: bytes, prompt: bytes, several: bool) -> None:
    from pd_router.calls.body import RequestBody

    spread = prompt.replace(b"[", b"[" + blanks) if prompt.startswith(b"[") else prompt
    assert RequestBody(b'{"prompt":' + blanks + spread + b"}").has_several_prompts is several


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_bug_is_a_500_in_openais_shape_and_logged_once(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: RequestBody) -> str:
        raise ZeroDivisionError("a bug of ours")

    d = FakeNode("decode", fakes.decode)
    async with running(d), serving(None, [d]) as router:
        monkeypatch.setattr("pd_router.calls.body.RequestBody.model", property(broken))
        with caplog.at_level(logging.ERROR):
            async with router.session.post(router.url + path, json=HI) as answer:
                assert answer.status == 500
                error = (await answer.json())["error"]
                assert (error["type"], error["code"]) == ("server_error", "internal_error")
                assert answer.headers["x-request-id"] in caplog.text
        assert caplog.text.count("ZeroDivisionError: a bug of ours") == 1
        await router.idle()


@pytest.mark.long
async def test_a_stopped_node_does_not_slow_the_looks_at_the_others() -> None:
    """One node accepts connections and never answers: the other is looked at many times within that one's timeout."""
    stopped, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(stopped, d), serving([stopped], [d], health_interval_s=0.01, health_timeout_s=fakes.WAIT_S):
        looks = stopped.num_checks
        stopped.is_silent = True
        await until(lambda: stopped.num_checks > looks)
        looks, begun = stopped.num_checks, d.num_checks
        await until(lambda: d.num_checks >= begun + 20)
        assert stopped.num_checks == looks, "twenty looks at one node took no longer than one at the other"


async def test_names_that_a_node_tells_are_bounded_wherever_they_go() -> None:
    long = "n" * 60_000
    report = encode_report(NodeReport(model=long[:5000])).decode()

    async def answer(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({"usage": {}}, headers={"x-pd-report": report, "x-pd-prefill": long[:8000]})

    d = FakeNode("decode", answer, node_id=long, models=("demo", long, *(f"m{n}" for n in range(3000))))
    d.facts |= {"stream_version": long, "fingerprint": "f", "kv_protocol": long}
    async with running(d), serving(decode=[d]) as router:
        for model in ({"model": "demo"}, {"model": "m7"}, {}):
            async with router.session.post(router.url + CHAT, json={"messages": [], **model}) as given:
                assert given.status == 200
        async with router.session.post(router.url + CHAT, json={"messages": [], "model": long}) as given:
            assert given.status == 404
        [node] = router.services.table.nodes
        assert (node.node_id, node.stream_version, node.kv_version) == (d.url.removeprefix("http://"), "", "")
        assert len(node.models or ()) <= MAX_MODELS
        d.is_up, d.facts["reason"] = False, long
        await HealthPoller(router.services.config, router.services.table, router.services.upstream).poll(node)
        assert node.logged_down
        for path in ("/metrics", "/nodes"):
            async with router.session.get(router.url + path) as given:
                assert long[:300] not in await given.text(), path


def test_the_error_shape_is_checked() -> None:
    with pytest.raises(AssertionError):
        check_error(orjson.loads(b'{"detail":"no"}'))


@pytest.mark.parametrize(("version", "status"), [(b"", b"400"), (b" HTTP/1.0", b"503"), (b" HTTP/1.1", b"503")])
async def test_a_request_line_without_a_version_is_refused(version: bytes, status: bytes) -> None:
    async with serving(start_empty=True) as router:
        host, _, port = router.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health" + version + b"\r\nhost: x\r\n\r\n")
        line = await asyncio.wait_for(reader.readline(), fakes.WAIT_S)
        writer.close()
        assert line.split()[1] == status
