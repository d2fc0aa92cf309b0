"""Nodes that end by order while requests are with them: they do not count as nodes that the request has killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pd_connectors.protocol.feed import FeedDelta, FeedSnapshot, NodeLoad
from pd_router.nodes.node import Node, Role
from pd_router.requests.resume_nodes import MAX_FAILURES, ResumeNodes
from pd_router.requests.stream_record import StreamRecord
from tests.deadlines import HANG_S
from tests.http.answer import COMPLETIONS, PROMPT, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.framed_nodes import End, FramedScript, framed_nodes
from tests.router.framed_streams import HEAD, VERSION, make_stream
from tests.router.router_process import Router, serving, until
from tests.router.test_feed_follower import FakeFeed

if TYPE_CHECKING:
    from aiohttp import web

pytestmark = [pytest.mark.anyio, pytest.mark.long]
STREAM = make_stream(3)
MIDDLE = sum(map(len, STREAM.messages()[1:3]))
QUICK: dict[str, Any] = {"health_interval_s": 0.05, "probe_timeout_s": HANG_S, "continue_wait_s": 0.0}


async def say_by_health(router: Router, node: FakeNode) -> None:
    node.is_up, node.facts = False, {"status": "draining"}
    await heard(router, node)


async def say_by_feed(router: Router, node: FakeNode) -> None:
    """The health poller has not looked since, as if the drain were over at once."""
    assert isinstance(node.feed, FakeFeed)
    feed = node.feed
    await until(lambda: feed.num_open)
    feed.say(FeedDelta(2, NodeLoad(), is_last=True))
    await heard(router, node)


async def heard(router: Router, node: FakeNode) -> None:
    """Until the router knows, and sends the node nothing more."""
    [known] = (one for one in router.services.table.nodes if one.url == node.url)
    await until(lambda: known.liveness.has_left(node.epoch) and not known.reachable)


async def gone(node: FakeNode, _: Router) -> None:
    await node.vanish()


async def started_again(node: FakeNode, router: Router) -> None:
    node.epoch, node.is_up, node.facts = node.epoch + 1, True, {}


class Leaving:
    """The first two nodes that get a request say that they drain, and are gone without a last word to it."""

    def __init__(self, stream: FramedScript, say: Any, end: Any) -> None:
        self.router: Router
        self.left: list[FakeNode] = []
        self._stream = stream
        self._say = say
        self._end = end

    async def __call__(self, node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
        if node in self.left or len(self.left) == 2:
            return await (self._stream if seen.body.get("stream") else fakes.decode)(node, request, seen)
        self.left.append(node)
        await self._say(self.router, node)
        await self._end(node, self.router)
        return await (self._stream if seen.body.get("stream") else fakes.hang_up)(node, request, seen)


def with_feeds(nodes: list[FakeNode]) -> list[FakeNode]:
    for node in nodes:
        node.feed = FakeFeed(FeedSnapshot(node.epoch, 1, NodeLoad()))
    return nodes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("say", "end"), [(say_by_health, started_again), (say_by_feed, started_again), (say_by_feed, gone)]
)
async def test_drains_do_not_count(say: Any, end: Any, *, stream: bool) -> None:
    script = FramedScript(STREAM, [(MIDDLE, End.BREAKS)] * 2)
    leaving = Leaving(script, say, end)
    nodes = with_feeds(framed_nodes(script, 3))
    for node in nodes:
        node.script = leaving
    # the feed's word comes without a poll; without one a node that has started again is not judged, but probed
    settings = QUICK if say is say_by_health else QUICK | {"health_interval_s": 3600.0}
    async with running(*nodes), serving(decode=nodes, **settings) as router:
        leaving.router = router
        got = await post(router, COMPLETIONS, PROMPT, stream=stream)
        assert (got.status, not stream or got.body == STREAM.text) == (200, True)
        assert leaving.left
        await router.idle()


async def test_a_stream_leaves_a_node_that_is_gone_by_order() -> None:
    """Its connection stands: only /health shows that another process is there."""
    script = FramedScript(STREAM, [(MIDDLE, End.STANDS)])
    leaving = Leaving(script, say_by_health, started_again)
    nodes = framed_nodes(script)
    for node in nodes:
        node.script = leaving
    async with running(*nodes), serving(decode=nodes, **QUICK, max_node_deaths=1) as router:
        leaving.router = router
        got = await post(router, COMPLETIONS, PROMPT, stream=True)
        assert (got.status, got.body) == (200, STREAM.text)
        first = leaving.left[0].node_id
        assert router.count("pd_router_legs_moved_total", leg="stream", node=first, kind="left") == 1


async def test_streams_that_a_drain_breaks_eject_no_node() -> None:
    """The node may be there again before the last of them is noted."""
    script = FramedScript(STREAM, [(MIDDLE, End.BREAKS)])
    leaving = Leaving(script, say_by_feed, started_again)
    nodes = with_feeds(framed_nodes(script))
    for node in nodes:
        node.script = leaving
    async with running(*nodes), serving(decode=nodes, **QUICK | {"health_interval_s": 3600.0}, eject_after=1) as router:
        leaving.router = router
        got = await post(router, COMPLETIONS, PROMPT, stream=True)
        assert (got.status, got.body) == (200, STREAM.text)
        assert [node.ejected_until_s for node in router.services.table.nodes] == [0.0, 0.0]
        first = leaving.left[0].node_id
        assert router.count("pd_router_leg_failures_total", leg="stream", node=first, kind="left") == 1


async def test_an_engine_that_dies_in_a_drain_counts() -> None:
    async def engine_died(node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
        await say_by_health(router, node)
        return fakes.error(503, "engine_died")

    nodes = [FakeNode("decode", engine_died, node_id=f"d{number}") for number in range(3)]
    async with running(*nodes), serving(decode=nodes, **QUICK) as router:
        got = await post(router, COMPLETIONS, PROMPT)
        assert (got.status, got.error["code"]) == (500, "nodes_died")


async def test_a_p_that_drained_after_its_ticket_is_no_second_death() -> None:
    p, d0, d1 = (FakeNode(role, fakes.decode, node_id=name) for role, name in
                 (("prefill", "p"), ("decode", "d0"), ("decode", "d1")))  # fmt: skip
    p.script = fakes.prefill

    async def dies(node: FakeNode, request: web.Request, seen: fakes.Seen) -> web.StreamResponse:
        await say_by_health(router, p)
        await started_again(p, router)
        node.epoch += 1
        return await fakes.hang_up(node, request, seen)

    d0.script = dies
    async with running(p, d0, d1), serving([p], [d0, d1], **QUICK) as router:
        assert (await post(router, COMPLETIONS, PROMPT)).status == 200
        assert (len(d0.seen), len(d1.seen)) == (1, 1)


async def test_late_last_words_of_a_boot_close_no_later_one() -> None:
    """As when a lost packet held them back: /health has told of the next boot already."""
    [node] = with_feeds([FakeNode("decode", fakes.decode)])
    feed = node.feed
    assert isinstance(feed, FakeFeed)
    async with running(node), serving(decode=[node]) as router:
        [known] = router.services.table.nodes
        await until(lambda: feed.num_open)
        known.epoch = node.epoch + 1
        feed.say(FeedDelta(2, NodeLoad(), is_last=True))
        feed.say(b"")
        await until(lambda: len(feed.orders) == 2)  # no feed of a node that is down is asked for
        assert known.liveness.has_left(node.epoch)
        assert known.reachable


def test_a_node_that_fails_under_ever_new_epochs_is_not_asked_for_ever() -> None:
    node, record = Node(url="a", role=Role.DECODE, node_id="a", stream_version=VERSION), StreamRecord()
    record.begin(HEAD)
    resume_nodes = ResumeNodes(record)
    for epoch in range(MAX_FAILURES):
        node.epoch = epoch + 1
        assert resume_nodes.among([node]) == [node]
        resume_nodes.fail(node, epoch)
    assert resume_nodes.among([node]) == []
    record.take(STREAM.frames[0])
    resume_nodes.fail(node, 0)
    assert resume_nodes.among([node]) == [node]
