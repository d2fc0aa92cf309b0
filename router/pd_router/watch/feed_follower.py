"""Reads each node's feed, `GET /pd/feed`, into the node's view and the prefix index.

A node's word is forgotten when its feed is lost and does not come back within LOAD_LIFE_S. Then, as for a node without
a feed, only /health and this router's own charges count.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import TYPE_CHECKING

import msgspec

from pd_connectors.protocol.feed import CHARGE_HEADER, FEED_TYPE, HEARTBEAT_S, WAIT_HEADER, FeedDelta, FeedMessage
from pd_connectors.protocol.stream_codec import StreamParser
from pd_connectors.protocol.ticket import ORDER_HEADER, NodeOrder, sign
from pd_http.endpoints import FEED_PATH
from pd_http.node_answers import FailureKind
from pd_router.nodes.node_feed import FeedLost, NodeFeed
from pd_router.nodes.node_view import FeedState
from pd_router.nodes.upstream import LEG_ERRORS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from pd_router.nodes.liveness import Down
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_connection import NodeExchange
    from pd_router.nodes.node_table import NodeTable
    from pd_router.nodes.upstream import Upstream
    from pd_router.records.metrics import RouterMetrics

log = logging.getLogger("pd_router")
ORDER_LIFETIME_S = 30.0  # more than clocks differ
SNAPSHOT_S = 10.0  # from the request to the whole snapshot, over a slow link
SILENCE_S = 3 * HEARTBEAT_S  # between two messages
LOAD_LIFE_S = SILENCE_S + 1.0  # after the last message of a lost feed
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 1.0  # after a lost feed; doubled each time
NO_FEED_RETRY_S = 60.0  # a node that has no feed is asked again then, or when it has died
MAX_PENDING_BYTES = 32 << 20  # of one message: a snapshot of a million blocks
# Between two messages of a node, for each node of the table. A message costs 40 to 70 us here, so feeds take 0.4 to 0.7
# of a core at most. 0.1 s between the messages of 1,000 nodes cost three routers nothing in simulation
WAIT_MS_PER_NODE = 0.1
_MAY_PASS = frozenset({408, 425, 429})  # refusals that do not say that there is no feed


class NoFeed(Exception):
    """The node refuses the feed, or is of an engine that has none."""


class FeedFollower:
    """Follows feeds, one task a node."""

    def __init__(
        self, table: NodeTable, upstream: Upstream, metrics: RouterMetrics, key: bytes, wall_clock: Callable[[], float]
    ) -> None:
        self._table = table
        self._upstream = upstream
        self._metrics = metrics
        self._key = key
        self._wall_clock = wall_clock
        self._serials, self._places = itertools.count(1), itertools.count(1)

    async def follow(self, node: Node) -> None:
        """Read a node's feed until cancelled, connection after connection; then forget what it said."""
        loop = asyncio.get_running_loop()
        retry_s = FIRST_RETRY_S
        place = f"{self._table.router_name}.{next(self._places)}"
        with _Following(NodeFeed(self._table.prefixes, node, self._table), node, place) as following:
            while True:
                begun_s, wait_s = loop.time(), None
                if node.reachable:  # else its id is not known, for which the order is signed
                    try:
                        await self._read(node, following)
                    except NoFeed as error:
                        following.refused(error)
                        wait_s = NO_FEED_RETRY_S
                    except (FeedLost, *LEG_ERRORS) as error:
                        self._metrics.feed_losses.labels(node.node_id).inc()
                        following.lost(error)
                    except Exception as error:  # a bug that one node triggers must not stop the other feeds
                        log.exception("the feed of node %s (%s) cannot be read", node.node_id, node.url)
                        following.lost(error)
                if loop.time() - begun_s > LAST_RETRY_S:  # it was read
                    retry_s = FIRST_RETRY_S
                await following.wait(wait_s or retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _read(self, node: Node, following: _Following) -> None:
        """One connection, to its end. Raises NoFeed, FeedLost, or one of LEG_ERRORS."""
        loop = asyncio.get_running_loop()
        parser: StreamParser[FeedMessage] = StreamParser(FeedMessage)
        following.feed.begin()
        async with asyncio.timeout(SNAPSHOT_S) as limit, self._answer(node, following.place) as exchange:
            while data := await exchange.read():
                try:
                    messages = parser.feed(data)
                except (ValueError, msgspec.MsgspecError) as error:
                    raise FeedLost(f"not a feed: {error}") from error
                if parser.num_pending_bytes > MAX_PENDING_BYTES:
                    raise FeedLost(f"a message has more than {MAX_PENDING_BYTES} bytes")
                for message in messages:
                    following.received()
                    for _ in following.feed.apply(message):
                        await asyncio.sleep(0)
                    if isinstance(message, FeedDelta) and message.is_last and node.liveness.has_left(node.epoch):
                        self._table.set_down(node)  # it refuses what would be sent before the next look at /health
                    if isinstance(message, FeedDelta) and message.is_frozen:
                        node.liveness.doubt()
                    limit.reschedule(loop.time() + SILENCE_S)
        raise FeedLost("the answer ended")

    @contextlib.asynccontextmanager
    async def _answer(self, node: Node, place: str) -> AsyncIterator[NodeExchange]:
        """The answer to the request for a feed. Raises NoFeed, FeedLost."""
        order = NodeOrder(
            "feed", node.node_id, self._wall_clock() + ORDER_LIFETIME_S, reader=place, serial=next(self._serials)
        )  # fmt: skip
        wait_ms = round(WAIT_MS_PER_NODE * len(self._table.nodes))
        headers = {
            ORDER_HEADER: sign(self._key, order), CHARGE_HEADER: self._table.router_name, WAIT_HEADER: str(wait_ms)
        }  # fmt: skip
        exchange = await self._upstream.exchange(node, "GET", FEED_PATH, headers)
        try:
            head = await exchange.head()
            if head.status >= 500 or head.status in _MAY_PASS:
                raise FeedLost(f"status {head.status}")
            if head.status != 200 or head.content_type != FEED_TYPE:
                raise NoFeed(f"status {head.status}, type {head.content_type}")
            yield exchange
        finally:
            exchange.close()


class _Following:
    """The state of one node's feed over its connections. `with` it: at the end the node's word is forgotten."""

    def __init__(self, feed: NodeFeed, node: Node, place: str) -> None:
        """`place`: at the node. A node that is named by two addresses is followed twice."""
        self.feed = feed
        self.place = place
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._received_s = self._loop.time()
        self._forgetting: asyncio.TimerHandle | None = None  # while the feed is lost
        self._died = asyncio.Event()

    def __enter__(self) -> _Following:
        self._node.liveness.enter(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._node.liveness.leave(self)
        self._forget()
        self._node.view.feed = FeedState.NONE

    def received(self) -> None:
        """Note that a message has come."""
        self._received_s = self._loop.time()
        view = self._node.view
        if view.feed is not FeedState.LIVE:
            self._stop_forgetting()
            view.feed = FeedState.LIVE
            log.info("the feed of node %s (%s) is read", self._node.node_id, self._node.url)

    def refused(self, error: NoFeed) -> None:
        if self._node.view.feed is not FeedState.NONE:
            log.warning("node %s (%s) has no feed any more: %s", self._node.node_id, self._node.url, error)
        self._forget()
        self._node.view.feed = FeedState.NONE

    def lost(self, error: Exception) -> None:
        """Note that the connection has ended: what the node said counts for LOAD_LIFE_S after its last message."""
        view = self._node.view
        if view.feed is FeedState.LIVE:
            log.warning("the feed of node %s (%s) is lost: %r", self._node.node_id, self._node.url, error)
            self._forgetting = self._loop.call_at(self._received_s + LOAD_LIFE_S, self._forget)
        view.feed = FeedState.LOST

    async def wait(self, limit_s: float) -> None:
        """Return after `limit_s`, or as soon as the node is judged to have died or restarted."""
        self._died.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._died.wait()

    def receive(self, down: Down) -> None:
        """A judgement of the health poller. A feed that is read is of a living process: of the node's next boot."""
        if down.kind is not FailureKind.FROZEN and self._node.view.feed is not FeedState.LIVE:
            self._forget()
            self._died.set()

    def _forget(self) -> None:
        self._stop_forgetting()
        self._step(self.feed.forget())

    def _step(self, steps: Iterator[None]) -> None:
        """Take the next step, and the others in turns of the loop of their own."""
        for _ in steps:
            self._loop.call_soon(self._step, steps)
            return

    def _stop_forgetting(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
