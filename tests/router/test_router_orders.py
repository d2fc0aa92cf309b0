"""Both orders end to end over fake nodes: what reaches each node, what reaches the client."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Any

import orjson
import pytest
from aiohttp import web

from pd_connectors.protocol.feed import FeedSnapshot, NodeLoad
from pd_connectors.protocol.ticket import Offer, verify
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import KEY, serving, until
from tests.router.test_feed_follower import FakeFeed

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}


@pytest.mark.parametrize(("order", "predicted"), [("p-first", "0.0440"), ("d-first", "0.0460"), ("direct", "0.0400")])
async def test_the_answer_says_when_its_first_token_was_predicted(order: str, predicted: str) -> None:
    """400 tokens of 100 us each; the seconds at the router are added, which are none by a clock that stands."""
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    p.feed, d.feed = (FakeFeed(FeedSnapshot(7, 1, NodeLoad(num_slots=9, token_s=1e-4))) for _ in range(2))
    body = {"model": "demo", "prompt": [7] * 400, "stream": True}
    async with running(p, d), serving([p] if order != "direct" else [], [d]) as router:
        views = [node.view for node in router.services.table.nodes]
        await until(lambda: all(view.ledger.reported.token_s for view in views))
        now_s = router.services.table.clock()
        router.services.table.clock = lambda: now_s
        headers = {"x-pd-route": order} if order != "direct" else {}
        async with router.session.post(router.url + "/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
            told = answer.headers["x-pd-predicted-ttft"]
    assert answer.headers["x-pd-route"].startswith(order)
    assert told == predicted


async def test_a_refusal_has_no_prediction() -> None:
    p, d = FakeNode("prefill", fakes.refuse(400)), FakeNode("decode", fakes.decode)
    p.feed, d.feed = (FakeFeed(FeedSnapshot(7, 1, NodeLoad(num_slots=9, token_s=1e-4))) for _ in range(2))
    async with running(p, d), serving([p], [d]) as router:
        views = [node.view for node in router.services.table.nodes]
        await until(lambda: all(view.ledger.reported.token_s for view in views))
        async with router.session.post(router.url + CHAT, json=BODY) as answer:
            await answer.read()
    assert (answer.status, answer.headers["x-pd-route"]) == (400, "p-first; reason=default")
    assert "x-pd-predicted-ttft" not in answer.headers, "there is no first token"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_p_first_joins_the_legs_by_the_ticket(path: str, stream: bool) -> None:
    p, q, d = FakeNode("prefill", fakes.prefill), FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    body = BODY | {"stream": stream, "n": 2, "min_tokens": 2, "stop": ["x"], "max_completion_tokens": 7}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with running(p, q, d), serving([p, q], [d]) as router:
        async with router.session.post(router.url + path, json=body, headers={"x-request-id": "abc-1"}) as answer:
            data = await answer.read()
        first, other = (p, q) if p.seen else (q, p)
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "abc-1"
        assert answer.headers["x-pd-route"] == "p-first; reason=default"
        assert "x-pd-predicted-ttft" not in answer.headers, "no node has told how fast it is"
        assert (answer.headers["x-pd-prefill"], answer.headers["x-pd-decode"]) == (first.node_id, d.node_id)
        assert data == (fakes.WHOLE_STREAM if stream else b'{"object": "chat.completion", "by": "fake-decode"}')

        (leg,) = first.seen
        assert leg.path == path
        assert leg.headers["x-pd-ticket"] == "stream"
        assert leg.headers["x-request-id"] == "abc-1"
        asked = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None,
        }  # fmt: skip
        expected = body | {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "kv_transfer_params": asked}
        expected.pop("stream_options", None)
        assert leg.body == expected

        (leg,) = d.seen
        assert "x-pd-ticket" not in leg.headers
        assert leg.headers["x-request-id"] == "abc-1"
        params = leg.body.pop("kv_transfer_params")
        assert leg.body == body
        offer = verify(KEY, params.pop("offer"), Offer, time.time())
        assert offer.prefill_urls == (other.url,)
        assert params == fakes.kv_params(first)
        assert not other.seen
        assert first.released == []
        await router.idle()
        assert "pd_router_leg_failures_total{" not in router.services.metrics.exposition().decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_d_first_offers_prefill_nodes(stream: bool) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], route="d-first") as router:
        async with router.session.post(router.url + CHAT, json=BODY | {"stream": stream}) as answer:
            data = await answer.read()
        assert answer.headers["x-pd-route"] == "d-first; reason=default"
        assert data == (fakes.WHOLE_STREAM if stream else b'{"object": "chat.completion", "by": "fake-decode"}')
        assert p.seen == []
        params = d.seen[0].body["kv_transfer_params"]
        assert params.keys() == {"do_remote_prefill", "offer"}
        assert params["do_remote_prefill"] is True
        assert verify(KEY, params["offer"], Offer, time.time()).prefill_urls == (p.url,)


@pytest.mark.parametrize("is_whole", [False, True])
async def test_d_first_only_a_streamed_answer_tells_the_speed_of_p(is_whole: bool) -> None:
    """An engine may answer whole though a stream was asked for."""

    async def script(node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
        headers = {"x-pd-prefill": p.node_id}
        if is_whole:
            return web.json_response({}, headers=headers)
        return await fakes.decode_until_told(node, request, seen, headers)

    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", script)
    d.go_on.set()
    async with running(p, d), serving([p], [d], route="d-first") as router:
        async with router.session.post(router.url + CHAT, json=BODY | {"stream": True}) as answer:
            assert answer.headers["x-pd-prefill"] == p.node_id
            await answer.read()
        table = router.services.table
        assert (table.nodes[0].speed.at(table.clock()) is None) == is_whole
        await router.idle()


async def test_a_request_chooses_its_order_by_header() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        for order in ("d-first", "p-first"):
            async with router.session.post(router.url + CHAT, json=BODY, headers={"x-pd-route": order}) as answer:
                assert answer.headers["x-pd-route"] == f"{order}; reason=header"
        async with router.session.post(router.url + CHAT, json=BODY, headers={"x-pd-route": "direct"}) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "x-pd-route"
        assert (len(p.seen), len(d.seen)) == (1, 2)
        assert router.count("pd_router_requests_total", order="p-first", reason="header", outcome="ok") == 1


async def test_an_engine_without_tickets_hands_over_too() -> None:
    p, d = FakeNode("prefill", fakes.prefill_without_tickets), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.post(router.url + CHAT, json=BODY) as answer:
            assert answer.headers["x-pd-route"] == "p-first; reason=default"
        params = d.seen[0].body["kv_transfer_params"]
        assert params["remote_engine_id"] == "engine-fake-prefill"
        assert "ticket" not in params


async def test_fields_reach_both_nodes_as_the_client_wrote_them() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    raw = b'{"model":"demo","temperature":0.10000000000000000001,"seed":123456789012345678901234567890,"x":"\\u00e4"}'
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.post(router.url + CHAT, data=raw) as answer:
            assert answer.status == 200
        for node in (p, d):
            for part in (b"0.10000000000000000001", b"123456789012345678901234567890", b'"\\u00e4"'):
                assert part in node.seen[0].raw


@pytest.mark.parametrize("order", ["p-first", "d-first"])
async def test_clients_cannot_steer_transfers(order: str) -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    forged = BODY | {"kv_transfer_params": {"ticket": "forged", "remote_host": "evil", "do_remote_prefill": True}}
    headers = {"x-pd-ticket": "forged", "x-pd-decode": "forged", "x-pd-route": order}
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.post(router.url + CHAT, json=forged, headers=headers) as answer:
            assert answer.status == 200
        for leg in (*p.seen, *d.seen):
            assert b"forged" not in leg.raw
            assert b"evil" not in leg.raw
            assert "forged" not in leg.headers.values()


async def test_end_to_end_headers_pass_and_hop_by_hop_ones_do_not() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode_with_headers)
    headers = {
        "authorization": "Bearer secret", "openai-organization": "org", "traceparent": "00-1-2-01",
        "connection": "keep-alive, x-hop", "x-hop": "1", "te": "trailers", "proxy-authorization": "Basic x",
        "x-request-id": "no good id\t", "x-pd-client": "key:another",
    }  # fmt: skip
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.post(router.url + CHAT, json=BODY, headers=headers) as answer:
            assert answer.headers["x-pd-prefill"] == "the-prefill-node"
            assert answer.headers["x-pd-decode"] == "the-decode-node"
            assert answer.headers["x-extra"] == "kept"
            assert "x-dropped" not in answer.headers
            made = answer.headers["x-request-id"]
        for leg in (*p.seen, *d.seen):
            assert leg.headers["authorization"] == "Bearer secret"
            assert leg.headers["openai-organization"] == "org"
            assert leg.headers["traceparent"] == "00-1-2-01"
            assert leg.headers["x-pd-client"] == "net:127.0.0.1"
            assert leg.headers["content-type"] == "application/json"
            assert leg.headers["x-request-id"] == made != "no good id"
            assert not {"x-hop", "te", "proxy-authorization", "accept-encoding", "x-pd-route"} & leg.headers.keys()


async def test_d_is_called_before_p_is_done_and_its_bytes_come_at_once() -> None:
    p, d = FakeNode("prefill", fakes.prefill_until_told), FakeNode("decode", fakes.decode_until_told)
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.post(router.url + CHAT, json=BODY | {"stream": True}) as answer:
            assert await answer.content.readany() == fakes.chunk("a")
            assert not p.seen[0].finished
            (prompt_bytes, _), of_d = router.outstanding()
            assert prompt_bytes > 0
            assert of_d == (0, 1)
            d.go_on.set()
            assert await answer.read() == fakes.chunk("b") + b"data: [DONE]\n\n"
        p.go_on.set()  # P's leg is read to its end although the client is served
        await router.idle()
        assert p.seen[0].finished
        assert not p.seen[0].gone.is_set()


@pytest.mark.long
async def test_a_burst_of_64_spreads_over_the_nodes() -> None:
    ps = [FakeNode("prefill", fakes.prefill, node_id=f"p{i}") for i in range(2)]
    ds = [FakeNode("decode", fakes.decode_until_told, node_id=f"d{i}") for i in range(4)]
    async with running(*ps, *ds), serving(ps, ds) as router:

        async def one(i: int) -> bytes:
            url, body = router.url + CHAT, BODY | {"stream": bool(i % 2)}
            async with router.session.post(url, json=body) as answer:
                assert answer.status == 200
                return await answer.read()

        tasks = [asyncio.ensure_future(one(i)) for i in range(64)]
        for node in ds:
            await node.wait_seen(16)
        assert [sequences for _, sequences in router.outstanding()] == [0, 0, 16, 16, 16, 16]
        for node in ds:
            node.go_on.set()
        answers = await asyncio.gather(*tasks)
        assert sum(a == fakes.WHOLE_STREAM for a in answers) == 32
        assert [len(n.seen) for n in ds] == [16, 16, 16, 16]
        assert sum(len(n.seen) for n in ps) == 64
        assert min(len(n.seen) for n in ps) >= 16
        assert router.count("pd_router_requests_in_flight") == 0


@pytest.mark.long
async def test_a_prompt_of_megabytes_passes() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    text = "ä" * 1_500_000
    async with running(p, d), serving([p], [d]) as router:
        data = io.BytesIO(orjson.dumps({"model": "demo", "prompt": text}))
        async with router.session.post(router.url + "/v1/completions", data=data) as answer:
            assert answer.status == 200
        assert p.seen[0].body["prompt"] == d.seen[0].body["prompt"] == text
