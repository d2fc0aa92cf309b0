"""Feeds of fake nodes, read by a live router: what it takes from them, and what it does when they end or lie."""

from __future__ import annotations

import asyncio
import time
from math import inf
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from pd_connectors.protocol.feed import FEED_TYPE, FeedDelta, FeedMessage, FeedSnapshot, NodeLoad, StoredBlock
from pd_connectors.protocol.stream_codec import encode_message
from pd_connectors.protocol.ticket import NodeOrder, verify
from pd_http.node_answers import FailureKind
from pd_router.nodes.liveness import Down
from pd_router.nodes.node_view import FeedState
from pd_router.watch import feed_follower, health
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import KEY, Router, serving, until

if TYPE_CHECKING:
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_view import NodeView

pytestmark = pytest.mark.anyio

SNAPSHOT = FeedSnapshot(7, 1, NodeLoad(queued_tokens=100, block_size=16, free_blocks=4), (StoredBlock(1, 11, 16),))


class FakeFeed:
    """Answers each connection with the same bytes, then with what `say` sends to all that are open."""

    def __init__(self, opening: FeedMessage | bytes = SNAPSHOT) -> None:
        self.opening = opening
        self.orders: list[NodeOrder] = []  # of each connection
        self.routers: list[str] = []
        self.waits_ms: list[str] = []
        self._open: set[asyncio.Queue[bytes]] = set()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.orders.append(verify(KEY, request.headers["x-pd-order"], NodeOrder, time.time()))
        self.routers.append(request.headers["x-pd-charge"])
        self.waits_ms.append(request.headers["x-pd-feed-wait-ms"])
        response = web.StreamResponse(headers={"content-type": FEED_TYPE})
        await response.prepare(request)
        await response.write(encoded(self.opening))
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._open.add(queue)
        try:
            while data := await queue.get():
                await response.write(data)
        finally:
            self._open.discard(queue)
        await response.write_eof()
        return response

    def say(self, message: FeedMessage | bytes) -> None:
        """b"": the end."""
        for queue in self._open:
            queue.put_nowait(encoded(message))

    @property
    def num_open(self) -> int:
        return len(self._open)


def encoded(message: FeedMessage | bytes) -> bytes:
    return message if isinstance(message, bytes) else encode_message(message)


def a_node(feed: FakeFeed | None = None, node_id: str = "p") -> FakeNode:
    node = FakeNode("mixed", fakes.decode, node_id=node_id)
    node.feed = feed
    return node


def view_of(router: Router) -> NodeView:
    return the_node(router).view


def the_node(router: Router) -> Node:
    return router.services.table.nodes[0]


def hits(router: Router) -> list[int]:
    return list(router.services.table.prefixes.hits([11, 12]).values())


async def live(router: Router) -> NodeView:
    view = view_of(router)
    await until(lambda: view.feed is FeedState.LIVE and view.load is not None)
    return view


@pytest.mark.long
async def test_a_router_knows_what_the_node_says_and_what_it_has_sent_since() -> None:
    feed = FakeFeed()
    node = a_node(feed)
    node.script = fakes.decode_until_told
    async with running(node), serving(mixed=[node]) as router:
        view = await live(router)
        assert (view.queued_tokens, view.ledger.total.free_tokens, hits(router)) == (100, 64, [16])
        assert (feed.orders[0].action, feed.orders[0].node) == ("feed", "p")
        body = {"model": "demo", "prompt": "x" * 400, "n": 2}
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(router.session.post(router.url + "/v1/completions", json=body).__aenter__())
            name = (await node.wait_seen(1)).headers["x-pd-charge"]
            assert view.ledger.own_tokens > 100
            assert view.ledger.own_sequences == 2
            number = int(name.removeprefix(feed.routers[0] + "."))
            feed.say(FeedDelta(2, NodeLoad(queued_tokens=330, num_waiting=2), charges=(number,)))
            await until(lambda: view.queued_tokens == 330)
            assert view.num_sequences == 2
            feed.say(FeedDelta(3, NodeLoad(num_running=2), evicted=(1,), stored=(StoredBlock(2, 12, 32),)))
            await until(lambda: not view.queued_tokens)
            assert hits(router) == [32]
            node.go_on.set()
        asking.result().release()
        await router.idle()
        assert len(feed.orders) == 1
    assert view.load is None, "the router has stopped"


async def test_a_node_with_two_addresses_has_two_places_for_the_router() -> None:
    """With one place the two feeds ended each other, three times a second."""
    feed = FakeFeed()
    first, second = a_node(feed), a_node(feed)
    async with running(first, second), serving(mixed=[first, second]) as router:
        await until(lambda: len(feed.orders) == 2)
        name = router.services.table.router_name
        assert {one.reader for one in feed.orders} == {f"{name}.1", f"{name}.2"}
        assert feed.routers == [name, name]


async def test_the_more_nodes_the_longer_the_wait_between_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_follower, "WAIT_MS_PER_NODE", 20.0)
    first, second = FakeFeed(), FakeFeed()
    p, d = a_node(first), a_node(second, "d")
    async with running(p, d), serving([p], [d]):
        await until(lambda: bool(first.waits_ms and second.waits_ms))
    assert first.waits_ms == second.waits_ms == ["40"]


async def test_d_first_the_prefill_node_names_the_charge_that_d_passes_on() -> None:
    feed = FakeFeed(FeedSnapshot(7, 1, NodeLoad()))
    p, d = FakeNode("prefill", fakes.prefill, node_id="p"), FakeNode("decode", fakes.decode_until_told)
    p.feed = feed
    async with running(p, d), serving([p], [d]) as router:
        view = await live(router)
        body, headers = {"model": "demo", "prompt": "x" * 400}, {"x-pd-route": "d-first"}
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(
                router.session.post(router.url + "/v1/completions", json=body, headers=headers).__aenter__()
            )
            name = (await d.wait_seen(1)).headers["x-pd-prefill-charge"]
            assert view.ledger.own_tokens > 100
            feed.say(FeedDelta(2, NodeLoad(queued_tokens=130), charges=(int(name.rpartition(".")[2]),)))
            await until(lambda: view.queued_tokens == 130)
            d.go_on.set()
        asking.result().release()


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\x00\x00\x00\x01\xc1",
        b"\xff" * 8,
        FeedDelta(3, NodeLoad()),
        FeedDelta(1, NodeLoad()),
        FeedDelta(2, NodeLoad(queued_tokens=-1)),
    ],
    ids=["end", "junk", "huge", "gap", "repeated", "negative"],
)
async def test_a_feed_that_cannot_go_on_is_read_again_from_a_snapshot(wrong: FeedMessage | bytes) -> None:
    feed = FakeFeed()
    node = a_node(feed)
    async with running(node), serving(mixed=[node]) as router:
        view = await live(router)
        feed.opening = FeedSnapshot(8, 5, NodeLoad(queued_tokens=7))
        feed.say(wrong)
        await until(lambda: view.queued_tokens == 7)
        assert hits(router) == []
        await until(lambda: feed.num_open == 1)
        feed.say(FeedDelta(6, NodeLoad(queued_tokens=8)))
        await until(lambda: view.queued_tokens == 8)
        assert router.count("pd_router_feed_losses_total", node="p") == 1
        assert len(feed.orders) == 2


@pytest.mark.long
async def test_a_silent_feed_is_dropped_and_then_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends bytes and no message. Until it comes back, own charges count alone."""
    monkeypatch.setattr(feed_follower, "SILENCE_S", 0.1)
    monkeypatch.setattr(feed_follower, "SNAPSHOT_S", 0.1)
    monkeypatch.setattr(feed_follower, "LOAD_LIFE_S", 0.15)
    feed = FakeFeed()
    node = a_node(feed)
    async with running(node), serving(mixed=[node]) as router:
        view = await live(router)
        feed.opening = b"\x00\x00"  # of a length
        feed.say(b"\x00")
        await until(lambda: view.feed is FeedState.LOST)
        await until(lambda: view.load is None)
        assert (view.queued_tokens, view.ledger.total.free_tokens, hits(router)) == (0, inf, [])
        await until(lambda: len(feed.orders) > 2)
        feed.opening = SNAPSHOT
        await live(router)
        assert hits(router) == [16]


@pytest.mark.parametrize("status", [200, 401, 404, 307])
async def test_a_node_without_a_feed_is_asked_again_when_it_has_restarted(status: int) -> None:
    feed = FakeFeed()
    node = a_node()
    num_asked = 0

    async def refuse(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        return web.Response(status=status, headers={"location": "/health"})

    node.feed = refuse
    async with running(node), serving(mixed=[node]) as router:
        await until(lambda: num_asked)
        node.feed = feed
        for _ in range(20):
            await asyncio.sleep(0)
        assert view_of(router).feed is FeedState.NONE
        assert not feed.orders
        the_node(router).liveness.restarted(Down(FailureKind.DIED, "the node has restarted"))
        await live(router)
    assert num_asked == 1


async def test_a_death_is_the_end_of_what_a_lost_feed_said_and_not_of_a_living_one() -> None:
    feed = FakeFeed()
    node = a_node(feed)
    died = Down(FailureKind.DIED, "gone")
    async with running(node), serving(mixed=[node]) as router:
        view = await live(router)
        the_node(router).liveness.judge(died)  # late: the feed is of the next boot
        assert view.load is not None
        node.feed = None
        feed.say(b"")
        await until(lambda: view.feed is FeedState.NONE)
        assert view.load is None
        node.feed = feed
        the_node(router).liveness.judge(died)
        await live(router)


async def test_health_is_polled_at_once_where_an_engine_makes_no_progress() -> None:
    """And not again for each message while the node is down."""
    feed = FakeFeed()
    node = a_node(feed)
    async with running(node), serving(mixed=[node]) as router:
        await live(router)
        num_checks = node.num_checks
        node.is_frozen = True
        feed.say(FeedDelta(2, NodeLoad(), is_frozen=True))
        await until(lambda: not the_node(router).reachable)
        down = the_node(router).liveness.down
        assert down is not None
        assert down.kind is FailureKind.FROZEN
        feed.say(FeedDelta(3, NodeLoad(queued_tokens=7), is_frozen=True))
        await until(lambda: view_of(router).queued_tokens == 7)
        assert node.num_checks == num_checks + 1
        assert not the_node(router).liveness.doubted.is_set()


async def test_a_feed_causes_no_more_polls_than_one_each_least_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed says that the engine is frozen, /health that it is not."""
    monkeypatch.setattr(health, "LEAST_INTERVAL_S", 3600.0)
    feed = FakeFeed()
    node = a_node(feed)
    async with running(node), serving(mixed=[node]) as router:
        await live(router)
        num_checks = node.num_checks
        for number in range(2, 12):
            feed.say(FeedDelta(number, NodeLoad(queued_tokens=number), is_frozen=True))
            await until(lambda: view_of(router).queued_tokens == number)  # noqa: B023 (awaited here)
        assert the_node(router).liveness.doubted.is_set()
        assert node.num_checks == num_checks


async def test_a_node_that_is_removed_is_forgotten() -> None:
    feed = FakeFeed()
    node = a_node(feed)
    async with running(node), serving(mixed=[node]) as router:
        view = await live(router)
        table = router.services.table
        table.apply("flags", ())
        await until(lambda: not feed.num_open)
        assert view.load is None
        assert len(table.prefixes) == 0


async def test_the_report_and_the_metrics_tell_the_load() -> None:
    feed = FakeFeed()
    nodes = [a_node(feed), a_node(node_id="other")]
    async with running(*nodes), serving(mixed=nodes) as router:
        await live(router)
        async with router.session.get(router.url + "/nodes") as answer:
            first, second = (await answer.json())["nodes"]
        assert first["load"] == {
            "feed": "live", "queued_tokens": 100, "sequences": 0, "free_tokens": 64, "stream_room": None,
            "cached_blocks": 1,
            "engine": {
                "running": 0, "waiting": 0, "slots": 0, "free_blocks": 4, "num_blocks": 0, "step_ms": 0.0,
                "block_size": 16, "context": 0, "token_s": 0.0, "key_s": 0.0, "context_s": 0.0,
            },
        }  # fmt: skip
        assert (second["load"]["feed"], second["load"]["free_tokens"]) == ("none", None)
        labels = {"node": "p", "url": nodes[0].url, "role": "mixed"}
        assert router.count("pd_router_node_feed_live", **labels) == 1
        assert router.count("pd_router_node_queued_tokens", **labels) == 100
        assert router.count("pd_router_node_free_tokens", **labels) == 64
