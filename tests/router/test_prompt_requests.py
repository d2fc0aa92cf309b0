"""Requests about prompts alone over fake nodes: one leg, to a node that reads prompts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from pd_http.endpoints import Kind, paths_of
from pd_router.calls.body import RequestBody
from pd_router.edge.client_connection import PROXY_PATHS
from tests.http.answer import COMPLETIONS, PROMPT, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import WAIT_S, FakeNode, running
from tests.router.router_process import serving, until

if TYPE_CHECKING:
    from tests.router.fake_nodes import Seen

pytestmark = pytest.mark.anyio
EMBEDDINGS = "/v1/embeddings"
PROMPT_PATHS = paths_of(Kind.READ)
BODY: dict[str, Any] = {"model": "demo", "input": ["hi", "there"]}


async def reads(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response({"by": node.node_id})


async def reads_when_told(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    await node.go_on.wait()
    return await reads(node, request, seen)


def node(role: str, script: fakes.Script = reads, name: str = "") -> FakeNode:
    return FakeNode(role, script, node_id=name)


@pytest.mark.long_cases
@pytest.mark.parametrize("path", PROMPT_PATHS)
async def test_one_prefill_node_answers_alone(path: str) -> None:
    p, d = node("prefill"), node("decode")
    async with running(p, d), serving([p], [d]) as router:
        got = await post(router, path, BODY)
        assert (got.ok, got.route) == ({"by": p.node_id}, "prompt; reason=default")
        assert got.prefilled_by == p.node_id
        assert "x-pd-decode" not in got.headers
        (leg,) = p.seen
        assert (leg.path, leg.body) == (path, BODY)
        assert "x-pd-ticket" not in leg.headers
        assert leg.headers["x-pd-charge"]
        assert (d.seen, p.released) == ([], [])
        await router.idle()
        assert router.count("pd_router_requests_total", order="prompt", reason="default", outcome="ok") == 1
        assert router.count("pd_router_request_seconds_count", order="prompt") == 1


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("more", "order"),
    [
        ({"max_tokens": 0}, "prompt"),
        ({"max_tokens": 0.0, "prompt": ["a", "b"]}, "prompt"),
        ({"max_tokens": 1, "echo": True, "logprobs": 1}, "prompt"),
        ({"max_tokens": 1, "echo": True, "logprobs": 0}, "prompt"),
        ({"max_tokens": 1, "prompt_logprobs": 1}, "prompt"),
        ({"max_tokens": 9, "max_completion_tokens": 1, "prompt_logprobs": 0}, "prompt"),
        ({"max_tokens": 1, "echo": True}, "p-first"),
        ({"max_tokens": 1, "logprobs": 1}, "p-first"),
        ({"max_tokens": 1, "prompt_logprobs": None}, "p-first"),
        ({"max_tokens": "0"}, "p-first"),
        ({}, "p-first"),
        ({"max_tokens": 2, "echo": True, "logprobs": 1}, "direct; reason=prompt-logprobs"),
        ({"prompt_logprobs": 1}, "direct; reason=prompt-logprobs"),
        ({"prompt_logprobs": 1, "prompt": ["a", "b"]}, "direct; reason=prompt-logprobs"),
    ],
)
async def test_completions_that_need_no_decode_node(more: dict[str, Any], order: str) -> None:
    p, d = node("prefill", fakes.prefill), node("decode")
    if order == "prompt":
        p.script = reads
    async with running(p, d), serving([p], [d]) as router:
        assert (await post(router, COMPLETIONS, PROMPT, **more)).route.startswith(order)


def test_chat_always_generates() -> None:
    body = RequestBody(b'{"max_tokens": 0}')
    assert [path for path in PROXY_PATHS if body.reads_only(path)] == [COMPLETIONS, *PROMPT_PATHS]


async def test_the_least_charged_of_prefill_and_mixed_nodes() -> None:
    nodes = [node("prefill", reads_when_told, "p"), node("mixed", reads_when_told, "m"), node("decode", reads, "d")]
    p, m, d = nodes
    async with running(*nodes), serving([p], [d], [m]) as router:
        calls = []
        for _ in range(4):
            num_seen = len(p.seen) + len(m.seen)
            calls.append(asyncio.create_task(post(router, EMBEDDINGS, BODY)))
            await until(lambda: len(p.seen) + len(m.seen) > num_seen)  # noqa: B023 - it is called in this turn
        assert (len(p.seen), len(m.seen), len(d.seen)) == (2, 2, 0)
        assert sorted(router.outstanding())[-1][0] > 0
        p.go_on.set()
        m.go_on.set()
        assert {got.status for got in await asyncio.gather(*calls)} == {200}
        await router.idle()


@pytest.mark.parametrize("role", ["mixed", "prefill", "decode"])
@pytest.mark.parametrize("on_prefill_failure", ["local", "fail"])
async def test_clusters_of_one_role(role: str, on_prefill_failure: str) -> None:
    one = node(role)
    prefill, decode, mixed = ([one] if role == which else None for which in ("prefill", "decode", "mixed"))
    settings = {"start_empty": True, "on_prefill_failure": on_prefill_failure}
    async with running(one), serving(prefill, decode, mixed, **settings) as router:  # type: ignore[arg-type]
        got = await post(router, EMBEDDINGS, BODY)
        assert got.route == f"prompt; reason={'no-prefill-node' if role == 'decode' else 'default'}"
        assert len(one.seen) == 1


async def test_without_nodes_it_is_unavailable_and_without_the_model_not_found() -> None:
    p = node("prefill")
    async with running(p), serving([p], start_empty=True) as router:
        got = await post(router, EMBEDDINGS, BODY, model="other")
        assert (got.status, got.error["code"]) == (404, "model_not_found")
        router.services.table.set_down(router.services.table.nodes[0])
        got = await post(router, EMBEDDINGS, BODY)
        assert (got.status, got.error["code"]) == (503, "no_healthy_node")
        assert router.count("pd_router_requests_total", order="none", reason="none", outcome="failed") == 1
        for data in (b"", b"[1]", b'{"input": '):
            async with router.session.post(router.url + EMBEDDINGS, data=data) as answer:
                assert answer.status == 400
        async with router.session.get(router.url + EMBEDDINGS) as answer:
            assert answer.status == 405
        assert p.seen == []


@pytest.mark.parametrize("script", [fakes.hang_up, fakes.refuse(503), fakes.refuse(429), fakes.decode_dies])
async def test_a_node_that_fails_before_the_answer_is_complete_is_replaced(script: fakes.Script) -> None:
    p, q, d = node("prefill", script, "p"), node("prefill", script, "q"), node("decode", reads, "d")
    p.go_on.set()
    q.go_on.set()
    async with running(p, q, d), serving([p, q], [d], max_node_deaths=3) as router:
        got = await post(router, EMBEDDINGS, BODY)
        assert (got.ok, got.route) == ({"by": "d"}, "prompt; reason=prefill-failed")
        num_asked = 2 if script is fakes.hang_up else 1  # an idle connection may just have been closed
        assert (len(p.seen), len(q.seen), len(d.seen)) == (num_asked, num_asked, 1)
        await router.idle()
        failures = [
            sample.value
            for metric in router.services.metrics.legs.failures.collect()
            for sample in metric.samples
            if sample.labels.get("leg") == "prompt" and sample.name.endswith("_total")
        ]
        assert failures == [1, 1]


async def test_decode_nodes_are_spared_if_the_settings_say_so() -> None:
    p, d = node("prefill", fakes.refuse(503), "p"), node("decode", reads, "d")
    async with running(p, d), serving([p], [d], on_prefill_failure="fail") as router:
        got = await post(router, EMBEDDINGS, BODY)
        assert (got.status, got.route) == (503, "prompt; reason=default")
        assert "no (p)" in got.error["message"]
        assert d.seen == []
        assert router.count("pd_router_requests_total", order="prompt", reason="default", outcome="failed") == 1


async def test_a_refusal_reaches_the_client_and_no_other_node_is_asked() -> None:
    p, q = node("prefill", fakes.refuse(400)), node("prefill", fakes.refuse(400))
    async with running(p, q), serving([p, q], start_empty=True) as router:
        assert (await post(router, EMBEDDINGS, BODY)).status == 400
        assert len(p.seen) + len(q.seen) == 1
        await router.idle()


async def test_a_request_that_kills_nodes_does_not_reach_all_of_them() -> None:
    async def dies(one: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
        one.epoch += 1  # started again
        return await fakes.hang_up(one, request, seen)

    nodes = [node("prefill", dies, f"p{i}") for i in range(4)]
    async with running(*nodes), serving(nodes, start_empty=True) as router:
        got = await post(router, EMBEDDINGS, BODY)
        assert (got.status, got.error["code"]) == (500, "nodes_died")
        assert sum(len(one.seen) for one in nodes) == 2


async def test_a_client_that_leaves_closes_the_leg_and_releases_the_charge() -> None:
    p, d = node("prefill", fakes.silent), node("decode")
    async with running(p, d), serving([p], [d]) as router:
        host, port = router.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps(BODY)
        writer.write(f"POST {EMBEDDINGS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await p.wait_seen(1)
        writer.close()
        await asyncio.wait_for(p.seen[0].gone.wait(), WAIT_S)
        await until(lambda: router.count("pd_router_client_disconnects_total", phase="prefill"))
        await router.idle()
        assert d.seen == []


async def test_a_stream_is_passed_on_and_one_that_breaks_off_ends_with_an_error() -> None:
    body = {"model": "demo", "prompt": "hi", "max_tokens": 0, "echo": True, "stream": True}
    p, d = node("prefill", fakes.decode), node("decode")
    async with running(p, d), serving([p], [d]) as router:
        assert (await post(router, COMPLETIONS, body)).body == fakes.WHOLE_STREAM
        p.script = fakes.decode_dies
        p.go_on.set()
        async with router.session.post(router.url + COMPLETIONS, json=body) as answer:
            data = b""
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async for piece in answer.content.iter_any():
                    data += piece
        assert b"stream_interrupted" in data
        assert d.seen == [], "another node would write the same answer, but the client has a part of it"
        await router.idle()
        assert router.count("pd_router_requests_total", order="prompt", reason="default", outcome="broken") == 1


async def test_512_inputs_of_a_kilobyte_pass_whole() -> None:
    p, d = node("prefill"), node("decode")
    inputs = [f"{i:04}" * 256 for i in range(512)]
    async with running(p, d), serving([p], [d]) as router:
        assert (await post(router, EMBEDDINGS, {"model": "demo", "input": inputs})).status == 200
        assert p.seen[0].body["input"] == inputs
