"""Signed orders: POST and DELETE /nodes, drain and resume."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pd_connectors.protocol.ticket import Offer, sign
from tests.connectors import version_one
from tests.http.answer import COMPLETIONS, PROMPT
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import KEY, Router, serving, signed, until


async def call(router: Router, method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    async with router.session.request(method, router.url + path, headers=headers) as answer:
        return answer.status, await answer.json()


async def complete(router: Router) -> int:
    async with router.session.post(router.url + COMPLETIONS, json=PROMPT | {"stream": True}) as answer:
        await answer.read()
        return answer.status


def is_healthy(router: Router) -> list[bool]:
    table = router.services.table
    return [node.is_healthy(table.clock()) for node in table.nodes]


@pytest.mark.anyio
async def test_nodes_come_and_go_by_order() -> None:
    d = FakeNode("decode", fakes.decode, node_id="d-1")
    async with running(d), serving(start_empty=True) as router:
        assert await complete(router) == 503  # no node at all is not an unknown model
        status, told = await call(router, "POST", "/nodes", signed("add", d.url, "decode"))
        assert (status, told["state"], told["source"]) == (201, "active", "posted")
        await until(lambda: is_healthy(router) == [True])  # asked at once, not after health_interval_s
        assert await complete(router) == 200
        assert (await call(router, "POST", "/nodes", signed("add", d.url + "/", "decode")))[0] == 200
        status, told = await call(router, "DELETE", "/nodes/d-1", signed("remove", "d-1"))
        assert (status, told["state"], told["outstanding"]["sequences"]) == (200, "leaving", 0)
        assert await complete(router) == 503
        assert (await call(router, "DELETE", "/nodes/d-1", signed("remove", "d-1")))[0] == 404
        assert len(d.seen) == 1


@pytest.mark.anyio
async def test_another_role_is_another_node() -> None:
    d = FakeNode("", fakes.decode, node_id="of-another-engine")  # which tells no role
    async with running(d), serving(start_empty=True) as router:
        assert (await call(router, "POST", "/nodes", signed("add", d.url, "decode")))[0] == 201
        (before,) = router.services.table.nodes
        assert (await call(router, "POST", "/nodes", signed("add", d.url, "mixed")))[0] == 201
        (after,) = router.services.table.nodes
        assert (before.gone, after.role.value) == (True, "mixed")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "hint"),
    [
        ({}, "x-pd-order"),
        ({"x-pd-order": "nonsense"}, ""),
        (signed("add", "http://evil:1", "decode", key=b"x" * 32), "not signed with this cluster's key"),
        (signed("add", "http://evil:1", "decode", lives_s=-1.0), "expired"),
        (
            {"x-pd-order": version_one.sign(KEY, version_one.NodeOrder("add", "http://p:1", 9e9))},
            "protocol 1, this node 2",
        ),
        ({"x-pd-order": sign(KEY, Offer(("http://evil:1",), time.time() + 60.0))}, "cannot be read"),
    ],
)
async def test_an_order_that_the_cluster_did_not_sign_in_this_version_is_refused(
    headers: dict[str, str], hint: str
) -> None:
    d = FakeNode("decode", fakes.decode, node_id="d-1")
    async with running(d), serving(decode=[d]) as router:
        for method, path in (
            ("POST", "/nodes"),
            ("DELETE", "/nodes/d-1"),
            ("POST", "/nodes/d-1/drain"),
            ("DELETE", "/nodes/d-1/drain"),
        ):
            status, told = await call(router, method, path, headers)
            refusal = (409, "protocol_mismatch") if hint.startswith("protocol") else (401, "bad_signature")
            assert (status, told["error"]["code"]) == refusal
            assert hint in told["error"]["message"]
        assert [(n.url, n.draining) for n in router.services.table.nodes] == [(d.url, False)]


@pytest.mark.anyio
async def test_an_order_is_obeyed_for_what_it_says_only() -> None:
    d, other = (FakeNode("decode", fakes.decode, node_id=name) for name in ("d-1", "d-2"))
    async with running(d, other), serving(decode=[d, other]) as router:
        for headers, method, path, status in (
            (signed("drain", "d-2"), "POST", "/nodes/d-1/drain", 400),
            (signed("drain", "d-1"), "DELETE", "/nodes/d-1", 400),
            (signed("drain", "d-3"), "POST", "/nodes/d-3/drain", 404),
            (signed("remove", "d-1"), "DELETE", "/nodes/d-1", 409),  # it is a flag's
            (signed("add", d.url, "prefill"), "POST", "/nodes", 409),
            (signed("add", "d:1", "decode"), "POST", "/nodes", 400),
            (signed("add", "http://d:1", "encode"), "POST", "/nodes", 400),
        ):
            answered, told = await call(router, method, path, headers)
            assert (path, answered, bool(told["error"]["message"])) == (path, status, True)
        assert is_healthy(router) == [True, True]


@pytest.mark.anyio
async def test_two_nodes_of_one_name_must_be_named_by_address() -> None:
    a, b = (FakeNode("decode", fakes.decode, node_id="same") for _ in range(2))
    async with running(a, b), serving(decode=[a, b]) as router:
        assert (await call(router, "POST", "/nodes/same/drain", signed("drain", "same")))[0] == 409
        name = a.url.removeprefix("http://")
        assert (await call(router, "POST", f"/nodes/{name}/drain", signed("drain", name)))[0] == 200
        assert is_healthy(router) == [False, True]


@pytest.mark.anyio
async def test_a_drained_node_finishes_what_it_has_and_gets_no_more() -> None:
    d, spare = FakeNode("decode", fakes.decode_until_told, node_id="d-1"), FakeNode("decode", fakes.decode)
    async with running(d, spare), serving(decode=[d, spare]) as router:
        async with router.session.post(router.url + COMPLETIONS, json=PROMPT | {"stream": True}) as answer:
            assert await answer.content.readany() == fakes.chunk("a")
            status, told = await call(router, "POST", "/nodes/d-1/drain", signed("drain", "d-1"))
            assert (status, told["state"], told["healthy"]) == (200, "draining", False)
            assert told["outstanding"] == {"prefill_bytes": 0, "sequences": 1}
            assert [await complete(router) for _ in range(3)] == [200] * 3
            assert (len(d.seen), len(spare.seen)) == (1, 3)
            d.go_on.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await router.idle()
        _, told = await call(router, "POST", "/nodes/d-1/drain", signed("drain", "d-1"))  # asked again: what is left
        assert told["outstanding"]["sequences"] == 0


@pytest.mark.anyio
@pytest.mark.parametrize("ended_by", ["resume", "boot"])
async def test_a_drain_ends_by_order_or_by_a_new_boot(ended_by: str) -> None:
    d = FakeNode("decode", fakes.decode, node_id="d-1")
    interval_s = 0.01 if ended_by == "boot" else 3600.0
    async with running(d), serving(decode=[d], health_interval_s=interval_s) as router:
        await call(router, "POST", "/nodes/d-1/drain", signed("drain", "d-1"))
        assert await complete(router) == 503
        if ended_by == "boot":
            d.epoch += 1
        else:
            assert (await call(router, "DELETE", "/nodes/d-1/drain", signed("resume", "d-1")))[0] == 200
        await until(lambda: is_healthy(router) == [True])
        assert await complete(router) == 200
