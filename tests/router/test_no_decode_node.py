"""Where no decode node answers, prefill nodes serve requests alone: as far as they are known to generate."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.http.answer import COMPLETIONS, PROMPT, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, Seen, running
from tests.router.leg_case import SOON_S
from tests.router.router_process import serving

if TYPE_CHECKING:
    from aiohttp import web

pytestmark = pytest.mark.anyio


async def generate_or_prefill(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    return await (fakes.prefill if "kv_transfer_params" in seen.body else fakes.decode)(node, request, seen)


def pair(script: fakes.Script = fakes.decode) -> tuple[FakeNode, FakeNode]:
    prefill, decode = FakeNode("prefill", generate_or_prefill), FakeNode("decode", script)
    prefill.stream_version = "frames"
    return prefill, decode


@pytest.mark.parametrize("order", ["p-first", "d-first"])
async def test_a_prefill_node_answers_while_no_decode_node_is_healthy(order: str) -> None:
    prefill, decode = pair()
    decode.is_up = False
    async with running(prefill, decode), serving([prefill], [decode], route=order) as router:
        answer = await post(router, COMPLETIONS, PROMPT)
        assert (answer.status, answer.route) == (200, "direct; reason=no-decode-node")
        assert answer.decoded_by == prefill.node_id
        async with router.session.get(f"{router.url}/health") as health:
            assert health.status == 200, "balancers send it requests"
        decode.is_up = True
        await router.poll(decode)
        assert (await post(router, COMPLETIONS, PROMPT)).decoded_by == decode.node_id


@pytest.mark.usefixtures("sure_checks")
async def test_a_request_that_waits_for_the_last_decode_node_moves_to_a_prefill_node() -> None:
    """As behind a cut network: it would wait for the end of the cut."""
    prefill, decode = pair(fakes.decode_until_told)
    async with running(prefill, decode), serving([prefill], [decode]) as router:
        request = asyncio.ensure_future(post(router, COMPLETIONS, PROMPT))
        await decode.wait_seen(1)
        decode.is_silent = True
        await router.poll(decode, limit_s=SOON_S)
        answer = await request
        assert (answer.status, answer.route) == (200, "direct; reason=no-decode-node")
        assert answer.decoded_by == prefill.node_id


@pytest.mark.parametrize(("version", "setting"), [(None, "auto"), ("frames", "never")])
async def test_nodes_of_other_engines_and_by_order_do_not(version: str | None, setting: str) -> None:
    prefill, decode = pair()
    prefill.stream_version, decode.is_up = version, False
    async with running(prefill, decode), serving([prefill], [decode], decode_on_prefill=setting) as router:
        answer = await post(router, COMPLETIONS, PROMPT)
        assert (answer.status, answer.error["code"]) == (503, "no_healthy_node")


async def test_slow_links_that_a_node_tells_are_shown() -> None:
    prefill, decode = pair()
    decode.facts = {"slow_links": ["KV comes from 10.0.0.1:8101 at 0.02 GB/s", 5]}
    async with running(prefill, decode), serving([prefill], [decode]) as router:
        async with router.session.get(f"{router.url}/nodes") as answer:
            nodes = (await answer.json())["nodes"]
        assert [node["slow_links"] for node in nodes] == [[], ["KV comes from 10.0.0.1:8101 at 0.02 GB/s"]]
