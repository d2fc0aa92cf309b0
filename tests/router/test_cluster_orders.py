"""Orders that a router gives to all of its nodes, facts that it relays, and its OpenAPI document."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from jsonschema import Draft202012Validator

from pd_cluster.server.routes.openapi import openapi_document
from pd_connectors.protocol.ticket import ALL_NODES, NodeOrder, verify
from pd_http.endpoints import NODE_ACTIONS
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, Seen, running
from tests.router.router_process import KEY, Router, serving, signed

pytestmark = pytest.mark.anyio


async def obeys(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response({"success": True})


async def refuses(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response({"error": {"code": "no_profile_dir", "message": "no --profile-dir"}}, status=400)


async def breaks(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response({"error": {}}, status=503)


async def call(router: Router, method: str, path: str, **kwargs: Any) -> tuple[int, Any]:
    async with router.session.request(method, router.url + path, **kwargs) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("path", NODE_ACTIONS)
async def test_an_order_reaches_every_node_with_a_signature_of_its_own(path: str) -> None:
    action: Any = NODE_ACTIONS[path]
    p, d = FakeNode("prefill", obeys, node_id="p-1"), FakeNode("decode", obeys, node_id="d-1")
    async with running(p, d), serving(prefill=[p], decode=[d]) as router:
        for headers, status in (({}, 401), (signed("drain", "d-1"), 400), (signed(action, "d-1"), 400)):
            assert (await call(router, "POST", path, headers=headers))[0] == status
        assert p.seen == d.seen == []
        status, told = await call(router, "POST", path, headers=signed(action, ALL_NODES))
        assert (status, told["nodes"].keys()) == (200, {"p-1", "d-1"})
        for node in (p, d):
            (seen,) = node.seen
            order = verify(KEY, seen.headers["x-pd-order"], NodeOrder, time.time())
            assert (seen.path, order.action, order.node) == (path, action, node.node_id)
        assert (await call(router, "GET", path))[0] == 405


async def test_clients_may_give_orders_where_the_operator_says_so() -> None:
    d = FakeNode("decode", obeys, node_id="d-1")
    async with running(d), serving(decode=[d], admin_endpoints="open") as router:
        assert (await call(router, "POST", "/reset_prefix_cache"))[0] == 200
        assert (await call(router, "POST", "/nodes/d-1/drain"))[0] == 401, "other orders still need a signature"


@pytest.mark.parametrize(("allowed", "status"), [((), 401), (("https://a.example",), 401), (("*",), 200)])
async def test_web_pages_give_no_open_orders_without_consent(allowed: tuple[str, ...], status: int) -> None:
    """A form of any page can POST without a preflight; it cannot leave out the header `origin`."""
    d = FakeNode("decode", obeys, node_id="d-1")
    async with running(d), serving(decode=[d], admin_endpoints="open", allowed_origins=allowed) as router:
        for origin in ("https://evil.example", "null"):
            assert (await call(router, "POST", "/flush_cache", headers={"origin": origin}))[0] == status
        assert len(d.seen) == (2 if status == 200 else 0)
        if allowed == ("https://a.example",):
            assert (await call(router, "POST", "/flush_cache", headers={"origin": allowed[0]}))[0] == 200


@pytest.mark.parametrize(
    ("script", "status", "says"), [(refuses, 400, "no --profile-dir"), (breaks, 502, "refused: status 503")]
)
async def test_a_node_that_does_not_obey_is_named(script: fakes.Script, status: int, says: str) -> None:
    p, d = FakeNode("prefill", script, node_id="p-1"), FakeNode("decode", obeys, node_id="d-1")
    async with running(p, d), serving(prefill=[p], decode=[d], admin_endpoints="open") as router:
        answered, told = await call(router, "POST", "/start_profile")
        assert answered == status
        assert told["error"]["message"] == f"not every node obeyed: p-1: {says}"
        p.is_up = d.is_up = False


async def test_without_nodes_no_order_is_carried_out() -> None:
    async with serving(start_empty=True, admin_endpoints="open") as router:
        assert (await call(router, "POST", "/flush_cache"))[0] == 503
        assert (await call(router, "GET", "/openapi.json"))[0] == 503
        assert (await call(router, "GET", "/version"))[0] == 200
        assert await call(router, "GET", "/load") == (200, {"server_load": 0})
        assert (await call(router, "POST", "/ping"))[0] == 503


class WithDocument(FakeNode):
    """Its GET /openapi.json is that of a real node."""

    async def start(self) -> None:
        await super().start()
        self.document: Any = openapi_document()
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/openapi.json", self._openapi)
        await self.vanish()
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", int(self.url.rsplit(":", 1)[1]), reuse_address=True).start()

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.json_response(self.document)


@pytest.mark.long
@pytest.mark.parametrize("admin", ["signed", "open"])
async def test_the_document_of_the_router_has_its_paths_and_the_nodes_bodies(admin: str) -> None:
    d = WithDocument("mixed", obeys, node_id="d-1")
    async with running(d), serving(mixed=[d], admin_endpoints=admin) as router:
        status, document = await call(router, "GET", "/openapi.json")
        assert status == 200
        of_node = openapi_document()
        chat = document["paths"]["/v1/chat/completions"]["post"]
        assert chat["requestBody"] == of_node["paths"]["/v1/chat/completions"]["post"]["requestBody"]
        assert "/kv" not in document["paths"], "the router has no such path"
        assert set(document["paths"]["/nodes"]) == {"get", "post"}
        assert ("parameters" in document["paths"]["/flush_cache"]["post"]) == (admin == "signed")
        assert "502" in document["paths"]["/health_generate"]["get"]["responses"]
        assert list(document["paths"]["/dashboard"]["get"]["responses"]["200"]["content"]) == ["text/html"]
        for path in ("/version", "/load", "/metrics", "/nodes", "/health"):
            assert "502" not in document["paths"][path]["get"]["responses"], f"{path} asks no node"
        unwell = document["paths"]["/health"]["get"]["responses"]["503"]["content"]["application/json"]["schema"]
        assert unwell == {"type": "object"}, "the report, not an error"
        for methods in document["paths"].values():
            for operation in methods.values():
                for answer in operation["responses"].values():
                    for content in answer["content"].values():
                        Draft202012Validator(content["schema"] | {"components": document["components"]}).is_valid({})
        d.document = ["no document"]
        assert (await call(router, "GET", "/openapi.json"))[0] == 502


@pytest.mark.parametrize("allowed", [(), ("https://page.example",)])
async def test_pages_of_allowed_origins_may_call(allowed: tuple[str, ...]) -> None:
    d = FakeNode("mixed", fakes.decode)
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with running(d), serving(mixed=[d], allowed_origins=allowed) as router:
        for method, body in (("OPTIONS", None), ("POST", {"model": "demo", "prompt": "x"}), ("POST", {"model": "?"})):
            async with router.session.request(
                method, f"{router.url}/v1/completions", headers=headers, json=body
            ) as answer:
                await answer.read()
                assert (answer.headers.get("access-control-allow-origin") is not None) == bool(allowed)
        assert d.seen
        assert not any("origin" in seen.headers for seen in d.seen), "a node would answer with consent of its own"
        async with aiohttp.ClientSession() as plain, plain.get(f"{router.url}/health") as answer:
            assert "access-control-allow-origin" not in answer.headers


async def test_an_empty_model_is_any_model() -> None:
    d = FakeNode("mixed", fakes.decode)
    async with running(d), serving(mixed=[d]) as router:
        for model, status in (("", 200), ("demo", 200), ("?", 404)):
            async with router.session.post(f"{router.url}/v1/completions", json={"model": model, "prompt": "x"}) as got:
                await got.read()
                assert got.status == status
