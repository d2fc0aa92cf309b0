"""Models, tokenizer, health, metrics, KV state and lease release."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from pd_cluster.protocol.messages import ReleaseLease
from pd_cluster.server.routes.meta_routes import slow_links
from pd_connectors.protocol.ticket import sign
from tests.http.answer import COMPLETIONS, post
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import KEY, Node, running

pytestmark = pytest.mark.anyio


async def get(node: Node, path: str) -> tuple[int, Any]:
    async with node.session.get(f"{node.url}{path}") as response:
        return response.status, await response.json()


@pytest.mark.long
async def test_models() -> None:
    async with (
        running(FakeEngine(says([5]))) as node,
        openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none") as client,
    ):
        card = (await client.models.list()).data[0].to_dict()
        assert (await client.models.retrieve("demo")).id == "demo"
        assert (await get(node, "/v1/models/other"))[0] == 404
    assert (card["id"], card["root"], card["max_model_len"]) == ("demo", "demo", 4096)


async def test_tokenize_and_back() -> None:
    async with running(FakeEngine(says([5]))) as node:
        status, answer = (await post(node, "/tokenize", {"prompt": "Hello there."})).told
        assert (status, answer["count"], answer["max_model_len"]) == (200, len(answer["tokens"]), 4096)
        assert (await post(node, "/detokenize", {"tokens": answer["tokens"]})).told == (200, {"prompt": "Hello there."})
        messages = [{"role": "user", "content": "hi"}]
        chat = (await post(node, "/tokenize", {"messages": messages, "add_generation_prompt": False})).json
        assert (await post(node, "/detokenize", {"tokens": chat["tokens"]})).told == (
            200,
            {"prompt": "<|im_start|>user\nhi<|im_end|>\n"},
        )
        for body in ({}, {"prompt": "a", "messages": messages}):
            assert (await post(node, "/tokenize", body)).status == 400
        assert (await post(node, "/detokenize", {"tokens": [-1]})).status == 400


async def test_health_follows_the_engine() -> None:
    engine = FakeEngine(says([5]))
    async with running(engine) as node:
        status, body = await get(node, "/health")
        assert (status, body["status"], body["role"], body["node_id"], body["epoch"]) == (200, "ok", "mixed", "node", 7)
        assert (body["model"], body["max_num_seqs"]) == ("demo", 48)
        assert engine.stats is not None
        assert body["kv_in_use"] == round(engine.stats.kv.in_use / engine.stats.kv.num_blocks, 3)
        engine.frozen = "it has said nothing"
        status, body = await get(node, "/health")
        assert (status, body["status"], body["reason"]) == (503, "frozen", "it has said nothing")
        status, body = (await post(node, COMPLETIONS, {"prompt": "a"})).told
        assert (status, body["error"]["code"]) == (503, "engine_frozen")
        engine.is_alive = False
        assert (await get(node, "/health"))[1]["status"] == "dead"
        assert (await post(node, COMPLETIONS, {"prompt": "a"})).status == 503
        engine.ready = None
        status, body = await get(node, "/health")
        assert (status, body["status"]) == (503, "starting")


def test_links_that_the_connector_calls_slow_are_told() -> None:
    links = {"peer=[fd77::1]:81,memory=cpu": (2e7, 1.0), "peer=b:1,memory=cpu": (2e9, 0.0)}
    gauges = {f"kv_peer_bytes_per_second|{link}": speed for link, (speed, _) in links.items()}
    gauges |= {f"kv_peer_slow|{link}": is_slow for link, (_, is_slow) in links.items()}
    assert slow_links(gauges) == ["KV comes from [fd77::1]:81 at 0.02 GB/s"]
    assert slow_links({}) == []


async def test_kv() -> None:
    async with running(FakeEngine(says([5]))) as node:
        _, kv = await get(node, "/kv")
    assert kv == {
        "num_blocks": 100, "free": 80, "cached": 5, "in_use": 15, "leased": 3, "quarantined": 1,
        "block_size": 16, "epoch": 7, "engine_id": "fake-engine",
        "groups": [
            {"kind": "full", "num_blocks": 40, "free": 25, "cached": 5, "in_use": 10, "leased": 3, "quarantined": 1},
            {"kind": "window", "num_blocks": 1, "free": 0, "cached": 0, "in_use": 1, "leased": 0, "quarantined": 0},
        ],
    }  # fmt: skip


async def test_release_takes_a_signed_ticket_of_this_engine_and_epoch() -> None:
    engine = FakeEngine(says([5]))
    async with running(engine) as node:
        ticket = engine.make_ticket([1, 2, 3])
        assert (await post(node, "/pd/release", {"ticket": sign(KEY, ticket)})).told == (200, {"released": True})
        assert engine.sent == [ReleaseLease("lease-1")]
        other = FakeEngine(says([5]), engine_id="another").make_ticket([1, 2, 3])
        assert (await post(node, "/pd/release", {"ticket": sign(KEY, other)})).told == (200, {"released": False})
        status, answer = (await post(node, "/pd/release", {"ticket": sign(b"f" * 32, ticket)})).told
        assert (status, answer["error"]["code"]) == (400, "bad_ticket")
        expired = engine.make_ticket([1, 2, 3], expires_at_s=1.0)
        assert (await post(node, "/pd/release", {"ticket": sign(KEY, expired)})).told == (200, {"released": False})
        assert engine.sent == [ReleaseLease("lease-1")]


async def test_metrics_of_api_and_engine() -> None:
    async with running(FakeEngine(says([5, 6, 7]))) as node:
        await post(node, COMPLETIONS, {"prompt": [5, 6]})
        async with node.session.get(f"{node.url}/metrics") as response:
            assert response.content_type == "text/plain"
            text = await response.text()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, value in {
        'pd_requests_total{endpoint="completions",outcome="ok"}': 1,
        'pd_prompt_tokens_total{work="generate"}': 2,
        "pd_generation_tokens_total": 3,
        "pd_time_to_first_token_seconds_count": 1,
        "pd_time_to_second_token_seconds_count": 1,
        "pd_time_per_output_token_seconds_count": 1,
        "pd_request_latency_seconds_count": 1,
        'pd_queue_seconds_count{work="generate"}': 1,
        'pd_prefill_seconds_count{work="generate"}': 1,
        'pd_kv_blocks{state="leased"}': 3,
        "pd_kv_num_blocks": 100,
        'pd_kv_group_blocks{group="0",kind="full",state="free"}': 25,
        'pd_kv_group_blocks{group="1",kind="window",state="in_use"}': 1,
        "pd_num_running": 2,
        'pd_kv_transfer_bytes_total{direction="read"}': 1024,
        "pd_preemptions_total": 3,
        "pd_step_tokens": 17,
    }.items():
        assert float(lines[name]) == value, name
    assert any(name.startswith("pd_node_info{") and 'node_id="node"' in name for name in lines)


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("x" * 129, False), ("a\tb", False)])
async def test_request_id_is_echoed_when_it_is_fit(given: str, kept: bool) -> None:
    async with running(FakeEngine(says([5]))) as node:
        body, headers = {"prompt": "a"}, {"x-request-id": given}
        async with node.session.post(f"{node.url}/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
            assert (response.headers["x-request-id"] == given) is kept
            assert answer["id"] == f"cmpl-{response.headers['x-request-id']}"
        async with node.session.get(f"{node.url}/health", headers=headers) as response:
            assert response.headers["x-request-id"]


async def test_names_of_vllm_beside_ours() -> None:
    async with running(FakeEngine(says([5, 6, 7])), metrics_names="vllm") as node:
        await post(node, COMPLETIONS, {"prompt": [5, 6]})
        async with node.session.get(f"{node.url}/metrics") as response:
            text = await response.text()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = 'engine="0",model_name="demo"'
    for name, value in {
        f"vllm:num_requests_running{{{labels}}}": 2,
        f"vllm:prompt_tokens_total{{{labels}}}": 2,
        f"vllm:generation_tokens_total{{{labels}}}": 3,
        f"vllm:time_to_first_token_seconds_count{{{labels}}}": 1,
        f"vllm:request_queue_time_seconds_count{{{labels}}}": 1,
        f"vllm:kv_cache_usage_perc{{{labels}}}": float(samples['pd_kv_blocks{state="in_use"}']) / 100,
    }.items():
        assert float(samples[name]) == pytest.approx(value), name
    assert 'vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",' in text
    assert "pd_num_running" in samples, "ours stay"


@pytest.mark.parametrize(("in_host", "queries"), [(300.0, 900.0), (None, None)])
async def test_names_of_vllm_for_a_host_cache(in_host: float | None, queries: float | None) -> None:
    """Theirs is asked for what the device has not: 1,000 less 400 hits, of which 300 were in host memory."""
    engine = FakeEngine(says([5]))
    assert engine.stats is not None
    counters = {"prefix_cache_queried_tokens_total": 1000.0, "prefix_cache_hit_tokens_total": 400.0}
    if in_host is not None:
        counters["host_cache_hit_tokens_total"] = in_host
    engine.stats = msgspec.structs.replace(engine.stats, counters=counters)
    async with (
        running(engine, metrics_names="vllm") as node,
        node.session.get(f"{node.url}/metrics") as response,
    ):
        lines = [line.split() for line in (await response.text()).splitlines() if line.startswith("vllm:external_")]
    found = {name.partition("{")[0]: float(value) for name, value in lines if "_created" not in name}
    names = "vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total"
    assert found == ({} if in_host is None else dict(zip(names, (queries, in_host), strict=True)))


async def test_names_of_vllm_for_drafts() -> None:
    """By place, with the label that vLLM has."""
    engine = FakeEngine(says([5]))
    assert engine.stats is not None
    counters = {"spec_decode_num_drafts_total": 9.0, "spec_decode_num_draft_tokens_total": 40.0}
    counters |= {"spec_decode_num_accepted_tokens_total": 12.0}
    counters |= {f"spec_decode_num_accepted_tokens_per_pos_total|position={at}": 7.0 - 2 * at for at in range(2)}
    engine.stats = msgspec.structs.replace(engine.stats, counters=counters)
    async with (
        running(engine, metrics_names="vllm") as node,
        node.session.get(f"{node.url}/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    labels = 'engine="0",model_name="demo"'
    assert {line for line in lines if line.startswith("vllm:spec_decode") and "_created" not in line} == {
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 9.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 40.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 12.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 7.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 5.0',
    }
