"""What two routers learn from the feeds of real nodes: one prefill node, one decode node."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from pd_connectors.protocol.keys import derive_key
from pd_connectors.protocol.text_chain import chain_key
from pd_router.calls.body import RequestBody
from pd_router.nodes.node_view import FeedState
from tests.cluster import TEST_KEY, Launcher
from tests.deadlines import HANG_S
from tests.integration.calls import COMPLETIONS
from tests.integration.fault_cluster import Member, Part, start, until
from tests.router.router_process import Router, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from pd_router.nodes.node import Node
    from tests.integration.system import System
    from tests.router.router_process import HasUrl

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.timeout(300)]

KEY = derive_key(TEST_KEY)
BLOCK_SIZE = 16
RESTART_S = 400.0
LONG = 2000  # tokens of an answer


@dataclass(frozen=True)
class ServedAt:
    """A node that runs there."""

    url: str


@pytest.fixture
def nodes(shared_system: System) -> tuple[ServedAt, ServedAt]:
    return ServedAt(shared_system.urls["prefill"]), ServedAt(shared_system.urls["decode"])


@pytest.fixture
def members() -> Iterator[tuple[Member, Member]]:
    """Nodes that a test may kill."""
    with Launcher() as launcher:
        flags = ("--max-num-batched-tokens=256", f"--block-size={BLOCK_SIZE}")
        p, d = Member(launcher, "p0", "prefill", *flags), Member(launcher, "d0", "decode", *flags)
        start([p, d])
        yield p, d


@contextlib.asynccontextmanager
async def two_routers(p: HasUrl, d: HasUrl) -> AsyncIterator[tuple[Router, Router]]:
    """Both read the feeds of both nodes."""
    settings: dict[str, Any] = {"key": KEY, "health_interval_s": 0.2, "health_timeout_s": HANG_S}
    async with serving([p], [d], **settings) as one, serving([p], [d], **settings) as other:
        for router in (one, other):
            await so(lambda router=router: all(is_live(node) for node in nodes_of(router)))  # type: ignore[misc]
        yield one, other


def nodes_of(router: Router) -> tuple[Node, ...]:
    """P, D."""
    return router.services.table.nodes


def is_live(node: Node) -> bool:
    return node.view.feed is FeedState.LIVE and node.view.load is not None


async def so(condition: Callable[[], bool], deadline_s: float = HANG_S) -> None:
    async def probe() -> bool:
        return condition()

    await until(probe, "the routers know", deadline_s)


def a_body(seed: int, **fields: Any) -> dict[str, Any]:
    words = random.Random(seed)
    text = " ".join(str(words.randrange(10_000)) for _ in range(300))
    return {"prompt": text, "max_tokens": 4, "temperature": 0, **fields}


def hits(router: Router, body: dict[str, Any], salt: str = "") -> list[int]:
    """Tokens that P and D have of the prompt, as the router knows it from its text."""
    chain = RequestBody(orjson.dumps(body | {"cache_salt": salt})).text_chain(chain_key(KEY))
    nodes = nodes_of(router)
    found = router.services.table.prefixes.hits(chain)
    return [found.get(node, 0) for node in nodes]


async def ask(router: Router, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"x-pd-route": "p-first"}
    async with router.session.post(router.url + COMPLETIONS, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


async def ask_on(router: Router, body: dict[str, Any]) -> None:
    """Until it is cancelled: what looks for the request cannot be late."""
    while True:
        await ask(router, body)


async def test_two_routers_know_what_is_cached_whichever_of_them_sent_it(nodes: tuple[ServedAt, ServedAt]) -> None:
    """And what a request through either finds there is what they know."""
    async with two_routers(*nodes) as (one, other):
        body = a_body(1)
        assert hits(one, body) == [0, 0]
        first = await ask(one, body)
        num_tokens = first["usage"]["prompt_tokens"]
        await so(lambda: min(hits(one, body)) > 0 and hits(one, body) == hits(other, body))
        p_has, d_has = hits(other, body)
        assert num_tokens // 2 < p_has <= num_tokens
        assert not p_has % BLOCK_SIZE
        second = await ask(other, body)
        assert second["choices"] == first["choices"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= d_has
        assert hits(one, body) == hits(other, body) == [p_has, d_has]
        longer = {**body, "prompt": body["prompt"] + " and so on" * 100}
        assert hits(one, longer)[0] > num_tokens // 2
        assert hits(one, body, salt="of another tenant") == hits(one, a_body(2)) == [0, 0]


async def test_two_routers_count_each_request_once(nodes: tuple[ServedAt, ServedAt]) -> None:
    async with two_routers(*nodes) as (one, other):
        asking = [asyncio.create_task(ask_on(one, a_body(seed, max_tokens=LONG, ignore_eos=True))) for seed in (3, 4)]
        views = [nodes_of(router)[1].view for router in (one, other)]
        await so(lambda: [(view.num_sequences, view.ledger.own_sequences) for view in views] == [(2, 0), (2, 0)])
        assert nodes_of(one)[1].decode_sequences == 2
        for task in asking:
            task.cancel()  # the clients leave
        await asyncio.gather(*asking, return_exceptions=True)
        every = [node.view for router in (one, other) for node in nodes_of(router)]
        await so(lambda: all(view.num_sequences == view.queued_tokens == 0 for view in every))
        await so(lambda: nodes_of(one)[0].view.load == nodes_of(other)[0].view.load)
        assert nodes_of(one)[1].view.ratio.value != 0.25, "learned from P's ticket, for D too"


@pytest.mark.slow
async def test_a_node_that_restarts_has_nothing_and_is_heard_again(members: tuple[Member, Member]) -> None:
    p, d = members
    async with two_routers(p, d) as (one, other):
        body = a_body(5)
        await ask(one, body)
        await so(lambda: min(hits(one, body)) > 0)
        before = hits(one, body)
        await p.kill(Part.ENGINE)
        await so(lambda: hits(one, body) == hits(other, body) == [0, before[1]])
        await asyncio.to_thread(start, [p])
        await so(lambda: is_live(nodes_of(one)[0]) and is_live(nodes_of(other)[0]), RESTART_S)
        assert hits(one, body) == hits(other, body) == [0, before[1]]
        await ask(other, body)
        await so(lambda: hits(one, body) == hits(other, body) == before)
