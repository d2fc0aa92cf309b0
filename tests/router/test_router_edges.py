"""Bad input, missing nodes, the small endpoints."""

from __future__ import annotations

import io
from typing import Any

import orjson
import pytest
from yarl import URL

from pd_http.body import longest_body
from tests.http.answer import CHAT, HI
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving

pytestmark = pytest.mark.anyio


@pytest.mark.long_cases
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"model": nope}', b"{} x"])
async def test_malformed_json_is_a_400(path: str, raw: bytes) -> None:
    d = FakeNode("decode", fakes.decode)
    async with running(d), serving(None, [d]) as router:
        async with router.session.post(router.url + path, data=raw) as answer:
            error = (await answer.json())["error"]
            assert answer.status == 400
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")
            assert error.keys() == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"].startswith("req-")
        assert d.seen == []


async def test_an_unknown_model_is_a_404_and_a_known_one_goes_where_it_is() -> None:
    d, e = FakeNode("decode", fakes.decode, node_id="d"), FakeNode("decode", fakes.decode, ("other",), node_id="e")
    async with running(d, e), serving(None, [d, e]) as router:
        async with router.session.post(router.url + CHAT, json=HI | {"model": "nope"}) as answer:
            assert answer.status == 404
            error = (await answer.json())["error"]
            assert error["code"] == "model_not_found"
            assert error["message"] == "no node serves the model 'nope'; served: demo, other"
        for _ in range(3):
            async with router.session.post(router.url + CHAT, json=HI | {"model": "other"}) as answer:
                assert (answer.status, answer.headers["x-pd-decode"]) == (200, "e")
        assert d.seen == []


async def test_too_large_a_body_is_a_413() -> None:
    d = FakeNode("decode", fakes.decode)
    big = HI | {"x": "y" * 2000}
    async with (
        running(d),
        serving(None, [d], max_body_mb=0.001) as router,
        router.session.post(router.url + CHAT, json=big) as answer,
    ):
        assert answer.status == 413
        assert (await answer.json())["error"]["code"] == "body_too_large"


@pytest.mark.long
@pytest.mark.parametrize(("lengths", "longest"), [((100, 1000), 1000), ((100, None), None), ((None,), None)])
async def test_the_longest_body_follows_from_what_the_nodes_tell(
    lengths: tuple[int | None, ...], longest: int | None
) -> None:
    """Without reading it; nodes that do not tell may have a use for all that is allowed."""
    nodes = [FakeNode("decode", fakes.decode, node_id=f"d{i}", max_model_len=n) for i, n in enumerate(lengths)]
    async with running(*nodes), serving(None, nodes) as router:
        bound = router.services.config.max_body_bytes if longest is None else longest_body(longest)
        for num_bytes, status in ((bound, 200), (bound + 1, 413)):
            body = b'{"prompt":""' + b" " * (num_bytes - 13) + b"}"
            assert len(body) == num_bytes
            async with router.session.post(router.url + "/v1/completions", data=io.BytesIO(body)) as answer:
                assert answer.status == status


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/nope", "GET", 404), (CHAT, "GET", 405), ("/health", "POST", 405)]
)
async def test_unknown_paths_answer_in_the_same_shape(path: str, method: str, status: int) -> None:
    d = FakeNode("decode", fakes.decode)
    async with (
        running(d),
        serving(None, [d]) as router,
        router.session.request(method, router.url + path) as answer,
    ):
        assert answer.status == status
        assert (await answer.json())["error"].keys() == {"message", "type", "param", "code"}


async def test_mixed_nodes_serve_alone_and_before_decode_nodes() -> None:
    d, m = FakeNode("decode", fakes.decode, node_id="d"), FakeNode("mixed", fakes.decode, node_id="m")
    async with running(d, m), serving(None, [d], [m]) as router:
        for _ in range(3):
            async with router.session.post(router.url + CHAT, json=HI, headers={"x-pd-route": "p-first"}) as answer:
                assert answer.headers["x-pd-route"] == "direct; reason=no-prefill-node"
                assert answer.headers["x-pd-prefill"] == answer.headers["x-pd-decode"] == "m"
        assert d.seen == []
        assert router.count("pd_router_requests_total", order="direct", reason="no-prefill-node", outcome="ok") == 3


async def test_no_node_that_decodes_is_a_503() -> None:
    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    d.is_up = False
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.post(router.url + CHAT, json=HI) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "no_healthy_node"
        async with router.session.get(router.url + "/health") as answer:
            assert (answer.status, (await answer.json())["healthy"]) == (503, {"prefill": 1, "decode": 0})
        assert p.seen == []


async def test_what_the_router_tells_about_itself() -> None:
    p, d = FakeNode("prefill", fakes.prefill, node_id="p7"), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.get(router.url + "/health") as answer:
            assert (answer.status, (await answer.json())["status"]) == (200, "ok")
        async with router.session.get(router.url + "/nodes") as answer:
            told = (await answer.json())["nodes"]
        assert told[0] == {
            "node_id": "p7", "role": "prefill", "url": p.url, "healthy": True, "epoch": 7, "models": ["demo"],
            "outstanding": {"prefill_bytes": 0, "sequences": 0}, "state": "active", "source": "flags", "down": None,
            "slow_links": [], "down_s": None, "restarts": 0, "kv_version": "", "role_changes": 0, "role_order": None,
            "tells_orders": False, "tp": None, "max_model_len": None, "adapters": {}, "adapter_errors": {},
            "load": {
                "feed": "none", "queued_tokens": 0, "sequences": 0, "free_tokens": None, "stream_room": None,
                "cached_blocks": 0, "engine": None,
            },
        }  # fmt: skip
        async with router.session.post(router.url + CHAT, json=HI):
            pass
        async with router.session.get(router.url + "/metrics") as answer:
            text = await answer.text()
        assert 'pd_router_requests_total{order="p-first",outcome="ok",reason="default"} 1.0' in text
        assert f'pd_router_node_healthy{{node="p7",role="prefill",url="{p.url}"}} 1.0' in text
        assert "pd_router_ticket_seconds_count 1.0" in text


async def test_models_and_tokenize_are_any_nodes_business() -> None:
    async def tokenize(node: FakeNode, request: Any, seen: fakes.Seen) -> Any:
        from aiohttp import web

        return web.json_response({"tokens": [1], "path": seen.path, "auth": seen.headers["authorization"]})

    p, d = FakeNode("prefill", tokenize), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d]) as router:
        async with router.session.get(router.url + "/v1/models") as answer:
            assert [entry["id"] for entry in (await answer.json())["data"]] == ["demo"]
        for path in ("/tokenize", "/detokenize"):
            headers = {"authorization": "Bearer x"}
            async with router.session.post(
                router.url + path, json={"model": "demo", "prompt": "x"}, headers=headers
            ) as answer:
                assert orjson.loads(await answer.read()) == {"tokens": [1], "path": path, "auth": "Bearer x"}
        await p.stop()  # the next one answers
        async with router.session.get(router.url + "/v1/models") as answer:
            assert answer.status == 200


async def test_a_nodes_answer_to_a_bad_tokenize_passes() -> None:
    p, d = FakeNode("prefill", fakes.refuse(400)), FakeNode("decode", fakes.decode)
    async with (
        running(p, d),
        serving([p], [d]) as router,
        router.session.post(router.url + "/tokenize", json={}) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["message"] == "no (fake-prefill)"


async def test_one_model_is_told_from_the_list_of_a_node_that_serves_it() -> None:
    d = FakeNode("decode", fakes.decode)
    e = FakeNode("decode", fakes.decode, ("org/other", "b?c"), node_id="e")
    async with running(d, e), serving(None, [d, e]) as router:
        for path, name in (("demo", "demo"), ("org/other", "org/other"), ("b%3Fc", "b?c")):
            async with router.session.get(URL(f"{router.url}/v1/models/{path}", encoded=True)) as answer:
                assert (answer.status, await answer.json()) == (200, {"id": name, "object": "model"})
                assert answer.headers["x-request-id"].startswith("req-")
        async with router.session.get(router.url + "/v1/models/nope") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("path", "method"), [("/nope", "GET"), (CHAT, "GET"), ("/v1/models/demo", "POST")])
async def test_errors_of_the_router_carry_the_request_id(path: str, method: str) -> None:
    d = FakeNode("decode", fakes.decode)
    async with running(d), serving(None, [d]) as router:
        headers = {"x-request-id": "mine-1"}
        async with router.session.request(method, router.url + path, headers=headers) as answer:
            assert answer.status in (404, 405)
            assert answer.headers["x-request-id"] == "mine-1"
            assert ("allow" in answer.headers) is (answer.status == 405)


async def test_a_bug_in_a_small_endpoint_is_a_500_with_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("a bug of ours")

    d = FakeNode("decode", fakes.decode)
    async with running(d), serving(None, [d]) as router:
        monkeypatch.setattr(router.services.metrics, "exposition", broken)
        async with router.session.get(router.url + "/metrics", headers={"x-request-id": "mine-2"}) as answer:
            assert (answer.status, answer.headers["x-request-id"]) == (500, "mine-2")
            assert (await answer.json())["error"]["code"] == "internal_error"
