"""GET /pd/feed of a node over a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from datetime import date
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.errors import EngineUnavailable, Overloaded
from pd_cluster.protocol.messages import EngineNews, ReportNews
from pd_cluster.server.node import feed_hub
from pd_cluster.server.node.feed_hub import FeedReader
from pd_connectors.protocol.feed import (
    CHARGE_HEADER,
    DEVICE,
    FEED_TYPE,
    HOST,
    MAX_WAIT_MS,
    WAIT_HEADER,
    FeedDelta,
    FeedMessage,
    FeedSnapshot,
    NodeLoad,
    StoredBlock,
)
from pd_connectors.protocol.stream_codec import StreamParser
from pd_connectors.protocol.text_chain import AS_ALWAYS, LastTurn, chain_key, read_canonical, step_hashes
from pd_connectors.protocol.ticket import FEED_ACTION, MAX_LIFETIME_S, ORDER_HEADER, NodeOrder, sign
from pd_http.endpoints import FEED_PATH
from tests.deadlines import HANG_S
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.live_server import KEY, Node, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import aiohttp

    from pd_connectors.protocol.adapters import AdapterState

pytestmark = pytest.mark.anyio
WAIT_S = HANG_S
LOAD = NodeLoad(queued_tokens=5, num_running=2, num_slots=48, block_size=16)
BLOCKS = tuple(StoredBlock(i, 100 + i, 16 * i) for i in range(1, 4))


def order(
    action: str = FEED_ACTION, node: str = "node", key: bytes = KEY, lifetime_s: float = 30.0, **more: Any
) -> dict[str, str]:
    paper = NodeOrder(action, node, time.time() + lifetime_s, **more)  # type: ignore[arg-type]
    return {ORDER_HEADER: sign(key, paper), CHARGE_HEADER: "r1"}


class Reader:
    """A router that reads a feed: it keeps the load and the blocks, and checks the numbers."""

    def __init__(self, node: Node, content: Any) -> None:
        self.node = node
        self._content = content
        self._parser: StreamParser[FeedMessage] = StreamParser(FeedMessage)
        self._ready: list[FeedMessage] = []
        self.load = NodeLoad()
        self.blocks: dict[int, StoredBlock] = {}
        self.adapters: dict[str, AdapterState] = {}
        self.charges: list[int] = []
        self.last_turn: LastTurn | None = None
        self.number = -1

    async def next(self) -> FeedMessage | None:
        """None: the feed has ended."""
        async with asyncio.timeout(WAIT_S):
            while not self._ready:
                data = await self._content.readany()
                if not data:
                    return None
                self._ready = self._parser.feed(data)
        message = self._ready.pop(0)
        if isinstance(message, FeedDelta):
            assert message.number == self.number + 1
            for block in message.evicted:
                del self.blocks[block]
        else:
            assert self.number == -1
            self.last_turn = message.last_turn
        self.number = message.number
        self.load = message.load
        self.blocks |= {stored.block: stored for stored in message.stored}
        for block, tier in message.moved if isinstance(message, FeedDelta) else ():
            self.blocks[block] = msgspec.structs.replace(self.blocks[block], tier=tier)
        self.adapters |= {one.record.name: one for one in message.adapters}
        self.charges += message.charges
        return message


@contextlib.asynccontextmanager
async def reading(node: Node, router: str = "r1") -> AsyncIterator[Reader]:
    """A reader that has its snapshot."""
    get = node.session.get(node.url + FEED_PATH, headers=order() | {CHARGE_HEADER: router})
    asked = asyncio.create_task(get.__aenter__())
    async with asyncio.timeout(WAIT_S):
        while not node.state.feed.is_on:  # noqa: ASYNC110 (the request is on its way)
            await asyncio.sleep(0.001)
        if node.engine.news.load is None:
            assert node.engine.sent[-1] == ReportNews(True)
            node.engine.news.take(EngineNews(len(node.engine.requests), LOAD))
        answer = await asked
    try:
        assert answer.status == 200
        assert answer.content_type == FEED_TYPE
        reader = Reader(node, answer.content)
        assert isinstance(await reader.next(), FeedSnapshot)
        yield reader
    finally:
        answer.close()


@pytest.mark.long
async def test_routers_are_told_of_the_chat_template_by_which_prompts_are_named() -> None:
    async with running(FakeEngine(says([5]))) as node:
        messages = [{"role": "user", "content": "why " * 200}, {"role": "assistant", "content": "so " * 600}]
        body = {"messages": messages, "max_tokens": 1}
        named = []
        for last_turn in (AS_ALWAYS, LastTurn(answers=True)):
            node.state.feed.last_turn = last_turn
            async with reading(node) as reader:
                assert reader.last_turn == last_turn
                async with node.session.post(f"{node.url}/v1/chat/completions", json=body) as answer:
                    assert answer.status == 200
            named.append({step for _, step in node.engine.requests[-1].steps})
            raw = {"messages": json.dumps(messages).encode()}
            read = read_canonical(raw, last_turn)
            assert read is not None
            assert named[-1] <= set(step_hashes(chain_key(KEY), "", read.text, read.starts))
        assert named[0] - named[1]
        assert named[0] & named[1]


@pytest.mark.long
async def test_a_snapshot_and_numbered_deltas() -> None:
    async with running(FakeEngine(says([5]))) as node, reading(node) as reader:
        assert reader.load == LOAD
        assert not node.state.num_in_flight
        tell = node.engine.news.take
        tell(EngineNews(0, LOAD, (), BLOCKS))
        await reader.next()
        assert list(reader.blocks.values()) == list(BLOCKS)
        tell(EngineNews(0, LOAD, (2,), ()))
        tell(EngineNews(0, NodeLoad(queued_tokens=9), (3,), (StoredBlock(2, 7, 32),)))
        await reader.next()  # both in one
        assert reader.load.queued_tokens == 9
        assert list(reader.blocks) == [1, 2]
        tell(EngineNews(0, LOAD, (), (StoredBlock(4, 8, 64, HOST),), 0, ((1, HOST), (9, HOST))))
        await reader.next()
        assert {block: one.tier for block, one in reader.blocks.items()} == {1: HOST, 2: DEVICE, 4: HOST}
        async with reading(node, "r2") as other:
            assert other.blocks == reader.blocks
        await reader.next()
        assert (await reader.next()) is not None, "heartbeats without a change"


async def test_requests_on_their_way_to_the_engine_count_and_charges_are_acknowledged() -> None:
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def script(line: Line) -> None:
        is_asked.set()
        await may_answer.wait()
        await says([5])(line)

    async with running(FakeEngine(script)) as node, reading(node) as reader, reading(node, "r2") as other:
        body = {"model": "demo", "prompt": [5] * 40, "max_tokens": 1}
        post = node.session.post(f"{node.url}/v1/completions", json=body, headers={CHARGE_HEADER: "r1.17"})
        answer = asyncio.create_task(post.__aenter__())
        await is_asked.wait()
        while reader.load.queued_tokens != LOAD.queued_tokens + 40 or not reader.charges:
            await reader.next()
        assert reader.load.num_waiting == 1
        assert reader.load.queued_keys == 800
        assert reader.charges == [17]
        async with reading(node) as late:
            assert late.charges == [17]  # it still lives
        node.engine.news.take(EngineNews(1, LOAD))
        while reader.load != LOAD:
            await reader.next()
        may_answer.set()
        (await answer).close()
        bad = body | {"prompt": []}
        async with node.session.post(f"{node.url}/v1/completions", json=bad, headers={CHARGE_HEADER: "r1.18"}) as one:
            assert one.status == 400
        while 18 not in reader.charges:
            await reader.next()
        assert reader.charges == [17, 18]
        async with reading(node) as late:
            assert late.charges == []
        assert other.charges == []


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("signed", "status"),
    [
        (None, 401),
        ({"key": b"x" * 32}, 401),
        ({"lifetime_s": -1.0}, 401),
        ({"lifetime_s": math.inf}, 401),
        ({"lifetime_s": math.nan}, 401),
        ({"lifetime_s": 2 * MAX_LIFETIME_S}, 401),
        ({"action": "reset_cache"}, 400),
        ({"node": "another"}, 400),
    ],
)
async def test_strangers_read_nothing(signed: dict[str, Any] | None, status: int) -> None:
    headers = {} if signed is None else order(**signed)
    async with running(FakeEngine(says([5]))) as node:
        async with node.session.get(node.url + FEED_PATH, headers=headers) as answer:
            assert answer.status == status
            assert answer.content_type == "application/json"
        assert not node.state.feed.is_on


async def test_the_reader_that_wants_the_longest_wait_decides_for_all() -> None:
    async with running(FakeEngine(says([5]))) as node:
        hub = node.state.feed

        def wait_s() -> float:
            """From the newest message to the next, which a change has just brought about."""
            hub._flush()
            node.engine.news.take(EngineNews(0, LOAD))
            assert hub._batch is not None
            return hub._batch.when() - hub._sent_s

        quick = asyncio.create_task(hub.open(FeedReader("quick")))
        await asyncio.sleep(0)
        node.engine.news.take(EngineNews(0, LOAD))
        await quick
        assert wait_s() == pytest.approx(feed_hub.BATCH_S)
        await hub.open(slow := FeedReader("slow", 0.2))
        assert wait_s() == pytest.approx(0.2)
        hub.leave(slow)
        assert wait_s() == pytest.approx(feed_hub.BATCH_S)


async def test_a_wait_is_a_number_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(reader: FeedReader) -> None:
        waits.append(reader.wait_s)
        raise EngineUnavailable("no reader")

    async with running(FakeEngine(says([5]))) as node:
        monkeypatch.setattr(node.state.feed, "open", note)
        for told, status in (("100", 503), ("9999", 503), ("-1", 400), ("1.5", 400), ("1" * 99, 400), ("\u0661", 400)):
            async with node.session.get(node.url + FEED_PATH, headers=order() | {WAIT_HEADER: told}) as answer:
                assert answer.status == status, told
    assert waits == [0.1, MAX_WAIT_MS / 1e3]


@pytest.mark.long
async def test_a_slow_reader_is_cut_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_hub, "MAX_UNREAD_BYTES", 10_000)
    async with running(FakeEngine(says([5]))) as node:
        engine, hub = node.engine, node.state.feed
        async with reading(node) as reader:
            await hub.open(slow := FeedReader("slow"))
            await slow.next()
            for i in range(200):
                engine.news.take(EngineNews(0, LOAD, (), tuple(StoredBlock(1000 * i + j, j, 16) for j in range(10))))
                await reader.next()
            assert slow.is_cut
            assert len(reader.blocks) == 2000
            hub.leave(slow)


async def test_so_many_readers_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_hub, "MAX_READERS", 1)
    async with running(FakeEngine(says([5]))) as node, reading(node):
        answer = await node.session.get(node.url + FEED_PATH, headers=order())
        assert answer.status == 503
        assert "1 routers read" in await answer.text()


@contextlib.asynccontextmanager
async def routers(node: Node) -> AsyncIterator[Callable[[dict[str, str]], Awaitable[aiohttp.ClientResponse]]]:
    """Opens feeds, and closes them all."""
    async with contextlib.AsyncExitStack() as stack:
        yield lambda headers: stack.enter_async_context(node.session.get(node.url + FEED_PATH, headers=headers))


@pytest.mark.long
@pytest.mark.parametrize("names", [{"reader": "r1", "serial": 1}, {}], ids=["named", "of the release before"])
async def test_an_overheard_order_takes_one_place(names: dict[str, Any]) -> None:
    """Whatever it is sent with: base64 has many forms of one order."""
    async with running(FakeEngine(says([5]))) as node, reading(node), routers(node) as opened:
        overheard = order(**names)
        forms = [
            overheard | {CHARGE_HEADER: f"r{i}", ORDER_HEADER: overheard[ORDER_HEADER] + "=" * i} for i in range(70)
        ]
        assert [(await opened(form)).status for form in forms] == [200] + 69 * [503]
        assert len(node.state.feed._readers) == 2


async def test_of_a_router_s_orders_the_newest_reads() -> None:
    async with running(FakeEngine(says([5]))) as node, reading(node), routers(node) as opened:
        first, second, third = (order(reader="r2", serial=serial) for serial in (1, 2, 3))
        replayed = await opened(second)  # by a process that overheard it
        assert replayed.status == 200
        genuine = await opened(third)
        assert genuine.status == 200
        async with asyncio.timeout(WAIT_S):
            await replayed.read()  # to its end
        assert [(await opened(late)).status for late in (third, second, first)] == 3 * [503]
        assert {one.serial for one in node.state.feed._readers if one.place == "r2"} == {3}
        genuine.close()
        async with asyncio.timeout(WAIT_S):
            while len(node.state.feed._readers) > 1:  # noqa: ASYNC110 (the node has to notice it)
                await asyncio.sleep(0.001)
        assert (await opened(second)).status == 200
        assert (await opened(order(reader="r2", serial=4))).status == 200


async def test_a_router_that_names_a_node_twice_reads_it_twice() -> None:
    """Its requests' charges are in both feeds."""
    async with running(FakeEngine(says([5]))) as node, reading(node), routers(node) as opened:
        assert [(await opened(order(reader=f"r2.{place}", serial=1))).status for place in (1, 2)] == [200, 200]
        assert sorted(one.router for one in node.state.feed._readers) == ["r1", "r2", "r2"]


async def test_two_orders_that_wait_for_the_engine_leave_one_reader() -> None:
    async with running(FakeEngine(says([5]))) as node:
        hub = node.state.feed
        tasks = [asyncio.create_task(hub.open(FeedReader("r", serial=serial))) for serial in (2, 3, 1, 3)]
        await asyncio.sleep(0)
        node.engine.news.take(EngineNews(0, LOAD))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, Overloaded) for one in results] == [False, False, True, True]
        assert [one.serial for one in hub._readers] == [3]


@pytest.mark.parametrize("is_alive", [True, False])
async def test_a_node_that_stops_ends_its_feeds(*, is_alive: bool) -> None:
    """It says that this is by order, unless its engine has died."""
    async with running(FakeEngine(says([5]))) as node, reading(node) as reader:
        node.engine.is_alive = is_alive
        for _ in range(2):
            node.state.feed.close()
        last = await reader.next()
        assert isinstance(last, FeedDelta)
        assert last.is_last == is_alive
        assert await reader.next() is None
        async with node.session.get(node.url + FEED_PATH, headers=order()) as answer:
            assert answer.status == 503


async def test_it_is_said_at_once_that_the_engine_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_hub, "HEARTBEAT_S", 3600.0)
    async with running(FakeEngine(says([5]))) as node, reading(node) as reader:
        for why in ("it has said nothing", ""):
            node.engine.frozen = why
            node.engine.on_freeze()
            message = await reader.next()
            assert isinstance(message, FeedDelta)
            assert message.is_frozen == bool(why)


async def test_the_engine_rests_when_no_router_has_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_hub, "LINGER_S", 0.05)
    async with running(FakeEngine(says([5]))) as node:
        async with reading(node):
            node.engine.news.take(EngineNews(0, LOAD, (), BLOCKS))
        async with asyncio.timeout(WAIT_S):
            while node.state.feed.is_on:  # noqa: ASYNC110 (a timer of the node)
                await asyncio.sleep(0.01)
        assert node.engine.sent == [ReportNews(True, 0), ReportNews(False, 1)]
        assert not node.engine.news.stored


@pytest.mark.long
async def test_an_idle_node_sends_heartbeats_to_its_first_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a router takes the feed of a node without any change for lost, every three seconds."""
    monkeypatch.setattr(feed_hub, "HEARTBEAT_S", 0.05)
    async with running(FakeEngine(says([5]))) as node, reading(node) as reader:
        assert [type(await reader.next()) for _ in range(3)] == [FeedDelta] * 3
        assert reader.load == LOAD


async def test_no_rest_while_a_router_reads_however_others_left() -> None:
    async with running(FakeEngine(says([5]))) as node:
        hub = node.state.feed
        first, second = (asyncio.create_task(hub.open(FeedReader(name))) for name in ("r1", "r2"))
        await asyncio.sleep(0)
        second.cancel()  # it gives up before the engine has said its load
        await asyncio.wait([second])
        node.engine.news.take(EngineNews(0, LOAD))
        await first
        assert hub._linger is None
        [reader] = hub._readers
        hub.leave(reader)
        assert (timer := hub._linger) is not None
        hub.begin_day(date(2026, 1, 1))
        assert timer.cancelled(), "it would end the feed of a router that comes later"
        assert hub._linger is not None, "no router reads, so the engine rests some time"
        again = asyncio.create_task(hub.open(FeedReader("r1")))
        await asyncio.sleep(0)
        node.engine.news.take(EngineNews(0, LOAD, serial=1))
        hub.begin_day(date(2026, 1, 2))  # between the news and the router's task
        await asyncio.sleep(0)
        node.engine.news.take(EngineNews(0, LOAD, (), BLOCKS, serial=1))  # of yesterday
        assert not node.engine.news.stored, "the engine has forgotten these names and tells no eviction of them"
        node.engine.news.take(EngineNews(0, LOAD, serial=2))
        await again
        assert hub._linger is None


async def test_a_snapshot_of_more_blocks_than_a_router_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_hub, "MAX_NAMED", 2)
    async with running(FakeEngine(says([5]))) as node, reading(node):
        node.engine.news.take(EngineNews(0, LOAD, (), BLOCKS))
        async with reading(node, "r2") as other:
            assert list(other.blocks.values()) == list(BLOCKS[1:])


@pytest.mark.long
async def test_prompts_get_names_while_a_router_reads() -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 1}
    async with running(FakeEngine(says([5]))) as node:
        async with node.session.post(f"{node.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
        async with reading(node), node.session.post(f"{node.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
        unnamed, named = node.engine.requests
        assert not unnamed.steps
        assert len(named.steps) == 3
        assert all(num_tokens % 16 == 0 for num_tokens, _ in named.steps)
